"""Launches as the compiled launcher takes them: slots in the place of tensors, and the bits of numbers."""

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.shared import Shared

PACKED = {"fp32": ("<f", "<i"), "fp64": ("<d", "<q")}
# What the launcher tells apart from a slot: a value; a number of each call's own, rounded to either
VALUE, FLOAT, DOUBLE = -1, -2, -3
MOST_PARAMS = 256
Launches = tuple[tuple[Any, ...], ...]
Described = tuple[Launches, tuple[tuple[int, ...], int, int]]  # and what they share


class Slot(NamedTuple):
    """Where the launcher finds a tensor: the tensors of a call have numbers."""

    number: int


class Factor(NamedTuple):
    """A number that is known when the call comes: a sum of `base` and `slope` times the number that the call has."""

    base: float
    slope: float


def averaged(slots: tuple[Slot, ...], size: int) -> tuple[tuple[Slot, ...], tuple[Factor, ...]]:
    """`Running.arguments` of any momentum."""
    return slots, (Factor(1.0, -1.0), Factor(0.0, 1.0), Factor(0.0, size / (size - 1)))


def numbered(first: int, *counts: int) -> list[tuple[Slot, ...]]:
    """Slots of several kinds of tensors, one after another."""
    found = []
    for count in counts:
        found.append(tuple(Slot(first + i) for i in range(count)))
        first += count
    return found


def described(steps: Iterable[tuple[Any, ...]], shared: Shared) -> Described | None:
    """Nothing where the launcher does not take all of them."""
    launches = tuple(describe(*step) for step in steps)
    return None if None in launches else (launches, shared.described)  # type: ignore[return-value]


def describe(kernel: BoundKernel, grid: tuple[int, ...], *arguments: Any) -> tuple[Any, ...] | None:
    """A launch that has happened before, with slots instead of tensors, as the launcher takes it; nothing where this version
    of Triton launches in a way that it does not know."""
    compiled = kernel.compiled
    if compiled is None:
        return None
    of = compiled.metadata
    is_known = of.target.backend == "cuda" and of.num_ctas == 1
    if not is_known or of.global_scratch_size or of.profile_scratch_size or not compiled.function:
        return None
    params = [_param(*pair) for pair in zip(_leaves(kernel.types), _leaves(arguments), strict=True)]
    hidden = _count_params(compiled.asm["ptx"]) - len(params)  # pointers to scratch memory, of which there is none
    if not 0 <= hidden <= 2 or len(params) + hidden > MOST_PARAMS:
        return None
    params += [(VALUE, 0)] * hidden
    threads = of.num_warps * of.target.warp_size
    how = (bool(of.launch_pdl), bool(of.launch_cooperative_grid))
    return compiled.function, *(*grid, 1, 1)[:3], threads, of.shared, *how, tuple(params)


def _param(type: str, value: Any) -> tuple[Any, ...]:
    """A slot, or the bits of a number, or how to find it."""
    if isinstance(value, Slot):
        return value.number, 0
    if isinstance(value, Factor):
        return FLOAT if type == "fp32" else DOUBLE, 0, value.base, value.slope
    if type in PACKED:
        real, whole = PACKED[type]
        return VALUE, struct.unpack(whole, struct.pack(real, value))[0]
    return VALUE, int(value)


def _leaves(arguments: Any) -> list[Any]:
    is_node = lambda a: isinstance(a, tuple | list) and not isinstance(a, Slot | Factor)  # noqa: E731
    return [leaf for a in arguments for leaf in (_leaves(a) if is_node(a) else [a])]


def _count_params(ptx: str) -> int:
    entry = ptx.index(".entry")
    return ptx[entry : ptx.index("{", entry)].count(".param ")
