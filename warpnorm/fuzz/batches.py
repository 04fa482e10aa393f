"""Calls come in batches: one kind, in few shapes but for the number of rows or samples, which take no other kernel. All by
choices that a seed repeats, and that can be made simpler one case at a time."""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from warpnorm.fuzz.case import Case
from warpnorm.fuzz.draws import Draws
from warpnorm.fuzz.fused import fused_kinds
from warpnorm.fuzz.kinds import ROW_NORMS, Choice, Kind, channel_kinds, row_kinds

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 97, 127, 128, 129)
WIDTHS = (*SIZES, 255, 256, 257, 509, 512, 513, 1021, 1024, 1025, 2047, 2048, 2049, 4096, 4099, 8191, 8192, 8200)
LARGEST = 1 << 15  # elements of a call
# On a GPU a part of the calls is larger: only there are all ways to reach rows in memory met. See plan/choose.py
LARGEST_ON_GPU = 1 << 21
WIDE = (4096, 5120, 8191, 8192, 10007, 12288, 16384, 20000, 24576, 32768, 50257, 65536, 70000)
WIDEST = 70_000  # columns, of several dimensions
CHANNELS = (8, 16, 24, 32, 48, 64, 128, 256)  # of a group
SIDES = (7, 8, 14, 16, 28, 32, 56, 57, 64, 112)
LINES = (196, 1024, 3136, 4096, 12544)  # positions of one dimension
MOST_SAMPLES = 64
SMALL = 1 << 11  # the same of a call that is differentiated twice
COUNTS = {"plain": (16, 32, 48), "fused": (32, 48, 64)}  # cases of one kind, which is compiled a few times
SHAPES = 3  # of one kind, at most


class Inner(NamedTuple):
    """All sizes but the first, or all where the first is of columns, and how large the first may be."""

    sizes: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class Batch:
    """`choices` are those of each case by itself: `single` makes it of them."""

    cases: list[Case]
    choices: list[list[int]]


def batch(draws: Draws, choice: Choice, route: str, has_gpu: bool) -> Batch:
    """`route` is what is tested; some calls go where they would without it."""
    marks = [len(draws.made)]
    kind = kind_of(draws, choice, route)
    marks.append(len(draws.made))
    inners = []
    for _ in range(1 + draws.below(SHAPES)):
        inners.append(inner_of(draws, kind, has_gpu))
        marks.append(len(draws.made))
    of_kind = draws.made[marks[0] : marks[1]]
    found = Batch([], [])
    for _ in range(draws.pick(COUNTS["fused" if kind.is_fused else "plain"])):
        k = draws.below(len(inners))
        before = len(draws.made)
        found.cases.append(case_of(draws, kind, inners[k]))
        of_inner = draws.made[marks[k + 1] + (k == 0) : marks[k + 2]]  # before the first stands how many there are
        found.choices.append([*of_kind, *of_inner, *draws.made[before:]])
    return found


def single(draws: Draws, choice: Choice, route: str, has_gpu: bool) -> Case:
    """One case of the choices that a batch noted for it."""
    kind = kind_of(draws, choice, route)
    return case_of(draws, kind, inner_of(draws, kind, has_gpu))


def kind_of(draws: Draws, choice: Choice, route: str) -> Kind:
    form, norm = draws.pick(choice.forms), draws.pick(choice.norms)
    of_norm = fused_kinds if form == "fused" else row_kinds if norm in ROW_NORMS else channel_kinds
    kind = of_norm(draws, choice, norm)
    return replace(kind, route=draws.pick((route, route, route, "auto")))


def inner_of(draws: Draws, kind: Kind, has_gpu: bool) -> Inner:
    if has_gpu and not kind.is_twice and draws.flag(3):
        return _large_rows(draws, kind) if kind.cols else _large_images(draws, kind)
    left, sizes = SMALL if kind.is_twice else LARGEST, []
    for position in reversed(range(_is_free(kind), kind.dims)):
        allowed = [size for size in (WIDTHS if position == kind.dims - 1 else SIZES) if size <= left]
        sizes.append(draws.pick(allowed))
        left //= sizes[-1]
    return Inner(tuple(reversed(sizes)), min(left, SIZES[-1]))


def _is_free(kind: Kind) -> bool:
    """Whether the first size is of rows or samples."""
    return kind.cols < kind.dims


def _large_rows(draws: Draws, kind: Kind) -> Inner:
    sizes = [draws.pick(WIDE)]
    for position in reversed(range(_is_free(kind), kind.dims - 1)):
        most = (WIDEST if position >= kind.dims - kind.cols else LARGEST_ON_GPU) // prod(sizes)
        sizes.append(draws.pick([size for size in SIZES if size <= most]))
    return Inner(tuple(reversed(sizes)), LARGEST_ON_GPU // prod(sizes))


def _large_images(draws: Draws, kind: Kind) -> Inner:
    sides = kind.dims - 2
    if sides == 0:
        width = draws.pick(WIDTHS)
        return Inner((width,), min(513, LARGEST_ON_GPU // prod(kind.shapes((1, width))[0])))
    channels = draws.pick(CHANNELS)
    most = LARGEST_ON_GPU // 4 // channels
    if sides == 1:
        positions = [draws.pick([line for line in LINES if line <= most])]
    else:
        allowed = [side for side in SIDES if side**sides <= most]
        side = draws.pick(allowed)
        positions = [side] * (sides - 1) + [draws.pick(allowed) if sides == 2 and draws.flag(3) else side]
    sample = prod(kind.shapes((1, channels, *positions))[0])
    return Inner((channels, *positions), max(1, min(LARGEST_ON_GPU // sample, MOST_SAMPLES)))


def case_of(draws: Draws, kind: Kind, inner: Inner) -> Case:
    """A number of rows, a seed and what the values are like."""
    sizes = list(inner.sizes)
    if _is_free(kind):
        firsts = [size for size in WIDTHS if size <= inner.most]
        sizes.insert(0, draws.pick(firsts))
    if kind.may_be_empty and draws.flag(20):
        sizes[draws.below(kind.dims)] = 0
    values = "normal"
    if not kind.is_fused:
        wide = kind.operands[0].dtype in (torch.float32, torch.float64)
        special = ("far_from_zero", "tiny") if wide else ("small",)
        values = draws.pick(("normal", "normal", "normal", *special, "huge"))
    is_twice = kind.is_twice and values == "normal" and prod(sizes) > 0
    return kind.case(tuple(sizes), draws.below(10_000), values, is_twice)
