"""Launches as the compiled launcher takes them: slots in the place of tensors, and the bits of numbers."""

import struct
from typing import Any, NamedTuple

from warpnorm.codegen.kernel import BoundKernel

PACKED = {"fp32": ("<f", "<i"), "fp64": ("<d", "<q")}


class Slot(NamedTuple):
    """Where the launcher finds a tensor: the tensors of a call have numbers."""

    number: int


def slots(*counts: int) -> list[tuple[Slot, ...]]:
    """Of several kinds of tensors, one after another."""
    found, first = [], 0
    for count in counts:
        found.append(tuple(Slot(first + i) for i in range(count)))
        first += count
    return found


def describe(kernel: BoundKernel, grid: tuple[int, ...], *arguments: Any) -> tuple[Any, ...] | None:
    """A launch that has happened before, with slots instead of tensors, as the launcher takes it; nothing where this version
    of Triton launches in a way that it does not know."""
    compiled = kernel.compiled
    if compiled is None:
        return None
    of = compiled.metadata
    is_known = of.target.backend == "cuda" and of.num_ctas == 1 and not of.launch_cooperative_grid
    if not is_known or of.global_scratch_size or of.profile_scratch_size or not compiled.function:
        return None
    params = [_param(*pair) for pair in zip(_leaves(kernel.types), _leaves(arguments), strict=True)]
    hidden = _count_params(compiled.asm["ptx"]) - len(params)  # pointers to scratch memory, of which there is none
    if not 0 <= hidden <= 2:
        return None
    params += [(-1, 0)] * hidden
    threads = of.num_warps * of.target.warp_size
    return compiled.function, *(*grid, 1)[:2], threads, of.shared, bool(of.launch_pdl), tuple(params)


def _param(type: str, value: Any) -> tuple[int, int]:
    """A slot, or the bits of a number."""
    if isinstance(value, Slot):
        return value.number, 0
    if type in PACKED:
        real, whole = PACKED[type]
        return -1, struct.unpack(whole, struct.pack(real, value))[0]
    return -1, int(value)


def _leaves(arguments: Any) -> list[Any]:
    return [leaf for a in arguments for leaf in (_leaves(a) if type(a) in (tuple, list) else [a])]


def _count_params(ptx: str) -> int:
    entry = ptx.index(".entry")
    return ptx[entry : ptx.index("{", entry)].count(".param ")
