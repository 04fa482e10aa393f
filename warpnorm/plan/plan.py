"""The frozen record of how a problem is run: the one vocabulary of heuristics, tests and tuning."""

from dataclasses import dataclass

ROW = "row"
LONG_ROW = "long_row"


@dataclass(frozen=True)
class Plan:
    """`programs`: how many persistent programs share the rows; 0 is one for each block of rows.
    `splits`: how many programs share the columns of one row (a `row` backward).
    `stages`: the depth of the software pipeline of loads."""

    pattern: str
    block_rows: int
    block_cols: int
    warps: int
    programs: int = 0
    splits: int = 1
    stages: int = 1
