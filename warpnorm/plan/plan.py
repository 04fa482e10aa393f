"""The frozen record of how a problem is run: the one vocabulary of heuristics, tests and tuning."""

from dataclasses import dataclass, field

ROW = "row"
LONG_ROW = "long_row"
TEAM = "team"
COLUMN = "column"
HELD = "held"

ALL, FIRST, LAST, JOINT = "all", "first", "last", "merge and last"  # tasks


@dataclass(frozen=True)
class Plan:
    """`programs`: how many persistent programs share the rows; 0 is one for each block of rows.
    `splits`: how many programs are a team, which shares a row; of pattern `held`, how many it may have at the most.
    `chunks`: how many blocks of columns, one after another, are one program's part of it, or the row; 0 in `column` is as
    many as leave `programs` in all.
    `ahead`: how many first tasks are begun, of pattern `column`, between those of a row and its merging, and again between
    that and the last tasks; of pattern `held`, how many rows, one or none, are begun before another is finished, whose
    messages arrive meanwhile; of pattern `team`, how many rows after the one that is loaded, one or none, are brought
    to L2 meanwhile, where elements are moved alone or beside few others, for which there is no pipeline.
    `held`: as many tiles at the most stay in L2 from their first task to their last. Where that
    is too few, each kind of them has a launch of its own. `tasks`: which of them the kernel of pattern `column` has. Without
    the last ones, which then are another kernel's, no program ever has to wait. That kernel may be one whose programs all
    merge what they need themselves.
    `together`: so many columns of a block, far apart, are merged before they are merged with those of blocks before: those
    that one thread has (`column`, first tasks).
    `by_units`: where each task has a launch of its own, tiles are visited one unit after another, not one tile of each: what
    is close in memory is visited at the same time (`column`).
    `stages`: the depth of the software pipeline of loads.
    `streams`: what is written need not stay in L2, so that what is read twice does.
    `late`: what the epilogue reads of columns is loaded when the statistic is known: fewer registers, but a lone row waits
    for it (`row`, forward, a program for each block of rows).
    `recomputes`: the prologue is computed again after a row is reduced, for the want of registers (`row`, `team`, `held`).
    `keeps`: what was loaded of a row stays in registers until it is finished, instead of being loaded again from L2 (`team`,
    on NVIDIA's GPUs).
    `early`: it is loaded again before its sums have come, not after (`team`, backward).
    `asks`: messages of other programs are asked for before the next row is loaded; only for those that have not come by then
    does a program wait after that (`team`).
    `least`: elements of a tile for each warp, where there are few rows (`row`: forward, where there is a program for each
    block of rows; backward, where a program has one warp).
    `per_unit`: so many programs must fit on a multiprocessor, if not 0: they have no more registers than that leaves
    (`team`, `held`, and `row` on NVIDIA's GPUs).
    `why`: what the choice followed from; it makes no difference between plans."""

    pattern: str
    block_rows: int
    block_cols: int
    warps: int
    programs: int = 0
    splits: int = 1
    chunks: int = 1
    stages: int = 1
    ahead: int = 0
    held: int = 0
    tasks: str = ALL
    streams: bool = False
    late: bool = False
    recomputes: bool = False
    keeps: bool = False
    early: bool = False
    asks: bool = False
    per_unit: int = 0
    together: int = 1
    by_units: bool = False
    least: int = 256
    why: str = field(default="", compare=False)

    @property
    def is_apart(self) -> bool:
        return self.tasks == FIRST

    @property
    def is_walked(self) -> bool:
        """Whether a program of pattern `column` has many blocks of columns of the same lines."""
        return self.chunks != 1
