"""How a compiled kernel reduces a row, read off its code: which thread holds which columns, which lanes of a warp meet in
which round, and how the warps come together."""

import re
from dataclasses import dataclass
from math import prod

from warpnorm.codegen.kernel import BoundKernel


@dataclass(frozen=True)
class Reduction:
    """A tile of `rows` x `cols` over threads. Pairs are (along rows, along columns): how many neighbouring elements a thread
    holds, how many lanes of a warp and how many warps lie there. `order` is the dimension that runs fastest first. A tile
    that is larger than all of them is covered by going round again."""

    rows: int
    cols: int
    per_thread: tuple[int, int]
    lanes: tuple[int, int]
    warps: tuple[int, int]
    order: tuple[int, int]
    count: int = 1  # of such reductions in the kernel

    @property
    def elements(self) -> int:
        """Of one row that one thread holds."""
        return max(self.cols // (self.lanes[1] * self.warps[1]), 1)

    @property
    def lane_masks(self) -> tuple[int, ...]:
        """Of the butterfly in a warp: in each round a lane meets the one whose number differs by these bits."""
        return _masks(self.lanes[1], self.lanes[0] if self.order[0] == 0 else 1)

    @property
    def warp_masks(self) -> tuple[int, ...]:
        """Of the butterfly over what the warps have left in shared memory."""
        return _masks(self.warps[1], 1)

    def columns(self, warp: int, lane: int) -> list[tuple[int, int]]:
        """The first and the last column of each run that a thread holds of its row; `lane` and `warp` are counted along
        the columns."""
        width, step = self.per_thread[1], self.per_thread[1] * self.lanes[1] * self.warps[1]
        first = (warp * self.lanes[1] + lane) * width
        if first >= self.cols:  # a tile with fewer columns than there are threads is held more than once
            first %= self.cols
        return [(start, min(start + width, self.cols) - 1) for start in range(first, self.cols, step)]


def _masks(count: int, stride: int) -> tuple[int, ...]:
    return tuple(stride << bit for bit in reversed(range(count.bit_length() - 1)))


def read(kernel: BoundKernel) -> Reduction | None:
    """The reduction of the largest tile along its columns, or nothing if there is none."""
    code = kernel.compiled.asm["ttgir"]
    found = re.findall(r"^#(\w+) = #ttg\.blocked<\{(.*?)\}>", code, re.MULTILINE)
    layouts = {name: layout for name, text in found if (layout := _layout(text)) is not None}
    # Neighbours that one thread has may be a dimension of their own, which is reduced before
    along_columns = (
        r'"tt\.reduce"\((?:(?!tt\.reduce").)*?<\{axis = [12] .*?\}\) : \(tensor<(\d+)x((?:\d+x)+)\w+, #(\w+)>'
    )
    tiles = [
        (int(rows), prod(map(int, re.findall(r"\d+", cols))), name)
        for rows, cols, name in re.findall(along_columns, code, re.DOTALL)
        if name in layouts
    ]
    if not tiles:
        return None
    largest = max(tiles, key=lambda tile: tile[0] * tile[1])
    per_thread, lanes, warps, order = layouts[largest[2]]
    return Reduction(largest[0], largest[1], per_thread, lanes, warps, order, tiles.count(largest))


Pair = tuple[int, int]


def _layout(text: str) -> tuple[Pair, Pair, Pair, Pair] | None:
    """Columns in two dimensions count as one, if lanes and warps lie along the first of them alone."""
    per_thread, lanes, warps, order = (
        tuple(map(int, re.findall(r"\d+", part))) for part in re.findall(r"\[(.*?)\]", text)[:4]
    )
    if len(order) > 2 and (lanes[2] * warps[2] > 1 or per_thread[1] > 1):
        return None
    pairs = [(part[0], prod(part[1:])) for part in (per_thread, lanes, warps)]
    return pairs[0], pairs[1], pairs[2], (0, 1) if order[0] == 0 else (1, 0)


def shuffle_masks(kernel: BoundKernel) -> tuple[int, ...] | None:
    """The butterflies in the code itself, in its order; nothing where the instructions have no masks."""
    code = kernel.compiled.asm.get("ptx")
    return None if code is None else tuple(map(int, re.findall(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),", code)))
