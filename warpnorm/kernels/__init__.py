"""Hand-written Triton, one file for each access pattern. A kernel knows how a row lies in memory and on the chip, its
statistic, and when to call the functions it is handed; it knows no formula, no weight and no layout.

statistics  mean and variance, or mean square: on registers, along a walk, and their gradients
row         a row fits in one program's registers
long_row    it does not: walk it by blocks, twice
column_sum  the partial sums of persistent programs, added in a fixed order

Handed in, generated for each problem by `codegen/pointwise.py`:

LOAD_COLUMNS   the operands that do not vary by row       -> tuple of (1, cols) values or numbers
LOAD_ROWS      the operands that do                       -> tuple of (rows, cols) values
PROLOGUE       values, columns                            -> c, in the dtype of computation
EPILOGUE       xhat, values, columns                      -> tuple of outputs
EPILOGUE_VJP   xhat, values, columns                      -> tuple of gradients, that of xhat first if it is needed
PROLOGUE_VJP   grad_c, those gradients, values, columns   -> the gradient of each wanted operand, elementwise
STORE          writes what lies full in memory
ACCUMULATE     adds to the accumulators what is summed over rows
STORE_PARTIALS writes the accumulators of one program
"""
