"""Several sums at once: warps that exchange several numbers wait for each other once."""

import triton
import triton.language as tl


@triton.jit
def add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def add_four(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


@triton.jit
def sums_of(tiles, axis: tl.constexpr, COUNT: tl.constexpr):
    """Of COUNT tiles, up to four in one reduction."""
    if COUNT == 1:
        return (tl.sum(tiles[0], axis),)
    elif COUNT == 2:
        return tl.reduce((tiles[0], tiles[1]), axis, add_two)
    elif COUNT == 3:
        return tl.reduce((tiles[0], tiles[1], tiles[2]), axis, add_three)
    else:
        first = tl.reduce((tiles[0], tiles[1], tiles[2], tiles[3]), axis, add_four)
        if COUNT > 4:
            first += sums_of(tiles[4:], axis, COUNT - 4)
        return first
