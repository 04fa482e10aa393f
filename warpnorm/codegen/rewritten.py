"""The source of a problem's functions in other words, which the compiler takes where it does not take the first, or takes as
something quicker."""

import re

from warpnorm.codegen.pointwise import loaded
from warpnorm.problem import BY_ROW, COLUMN, TILES, Problem


def widened_apart(source: str, problem: Problem) -> str:
    """The same, but halves that are loaded by tiles are widened by what the compiler does not look into; those of columns
    too, where a thread has several of them."""
    operands = [operand for _, _, operand in loaded(problem)]
    by_row, by_column = ([o for o in operands if (o.axes in BY_ROW) == is_by_row] for is_by_row in (True, False))
    homes = {"values": (by_row, TILES), "columns": (by_column, (COLUMN,) if problem.has_vectors else ())}
    for home, (found, axes) in homes.items():
        for k, operand in enumerate(found):
            if operand.axes in axes and operand.dtype.is_floating_point and operand.dtype.itemsize == 2:
                source = source.replace(f"{home}[{k}].to(tl.float32)", f"ours.widened({home}[{k}])")
    return source


def unordered(source: str) -> str:
    """The same, but the compiler does not see which addresses follow each other: every tile is read and written an element
    at a time, in one layout."""
    lines = source.splitlines(keepends=True)
    is_access = [("tl.load(" in line or "tl.store(" in line) for line in lines]
    hidden = [re.sub(r"\b(row|col)_offsets\b", r"ours.unordered(\g<0>)", line) for line in lines]
    return "".join(new if access else old for access, new, old in zip(is_access, hidden, lines, strict=True))


def at_once(source: str) -> str:
    """The same, but numbers become float8 by one instruction, where it rounds as PyTorch does."""
    return source.replace("ours.to_e4m3fn(", "ours.to_e4m3fn_at_once(")
