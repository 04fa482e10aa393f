"""Hand-written Triton, one file for each access pattern. A kernel knows how a row lies in memory and on the chip, its
statistic, and when to call the functions it is handed; it knows no formula, no weight and no layout.

statistics  mean and variance, or mean square: on registers, along a walk, and their gradients
sums        several sums by one reduction
masks       which elements of a tile are there
pointwise   elementwise functions that generated source calls
row         a row fits in one program's registers
few_rows    its sums over rows, where these are few, by other programs of the same launch
blocks      a row in registers, as blocks of columns
long_row    it does not: walk it by blocks, twice
team        programs that share a row and run at the same time exchange their sums
held        rows in pieces that stay in the registers of a team from their statistic to their result
pieces      what `held` does with such rows: lines, sums, and what a team's programs make of them
messages    how those of `held` and `team` tell each other numbers
column      rows in pieces or side by side: the norms by channel, by tiles of lines
tasks       which of the tasks of `column` a program has, and where its tile lies
merge       the statistics of rows from those of their pieces
words       how those of `column` tell each other numbers
chain       launches that are made ready before the one before them ends
column_sum  the partial sums of persistent programs, added in a fixed order

Handed in, generated for each problem by `codegen/pointwise.py` (`place` is where a tile lies: row numbers, column
offsets, columns of a row, mask):

LOAD_COLUMNS   the operands that do not vary by row               -> tuple of (1, cols) values or numbers
LOAD_ROWS      the operands that do                               -> tuple of (rows, cols) or (rows, 1) values
LOAD_LINES     of these, those that are the same along a line     -> tuple of (rows, 1) values
LOAD_TILES     the others, and both together as LOAD_ROWS gives them
HOLD           those values again, from which the prologue is computed a second time
KEEP           what was computed of them, xhat and c, and takes long to compute again: it is joined to what was loaded when
               the functions below are called a second time
PACK, UNPACK   values of a tile                                   -> as they go on to the next round of a loop, and back
PACK_ROW, UNPACK_ROW  the same where elements are moved alone, or few at a time: each would have a register of its own
PREFETCH       has memory bring some columns of a row to L2
ASK            messages that a row waits for later                -> tuple of words, as they are now
NOTHING        the shape of a tile                                -> the same of no row
ROW_NUMBERS    row offsets of backward                            -> those of forward
PROLOGUE       values, columns, place                             -> c, in the dtype of computation
EPILOGUE       xhat, c, values, columns, place                    -> tuple of outputs
EPILOGUE_VJP   xhat, c, values, columns, place                    -> tuple of gradients: of xhat, of c, of operands
ROUND          the gradient of xhat                               -> as it is, or where it is a product, rounded
PROLOGUE_VJP   grad_c, those gradients, values, columns, place    -> the gradient of each wanted operand, elementwise
STORE          writes what lies full in memory
STORE_ROW_SUMS writes what is one value a row
ACCUMULATE     adds to the accumulators what is summed over rows
STORE_PARTIALS writes the accumulators of one program
ADD_FIRST      adds what is summed along lines in the first task of `column`
SETTLE         those sums, lines                                  -> the terms of the statistic's gradient, and gradients
               that can be merged with them, and others
STORE_MERGED   writes merged gradients
STORE_FIRST, STORE_UNMERGED, ACCUMULATE_LAST, STORE_LAST  the same of gradients that leave sums along lines behind, in the
               first task or in the last
"""
