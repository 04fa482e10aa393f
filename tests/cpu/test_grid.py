"""How many programs run, and what they divide by."""

import hypothesis.strategies as st
from hypothesis import given, settings

from warpnorm.plan import grid

examples = settings(max_examples=2000, deadline=None, database=None, derandomize=True)


@examples
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1) | st.integers(1, 300))
def test_reciprocals_divide(number: int, divisor: int) -> None:
    factor, shift = grid.reciprocal(divisor)
    assert 0 < factor < 2**32
    assert ((2 * number * factor) >> 32) >> shift == number // divisor
    multiple = number // divisor * divisor
    for near in {max(multiple - 1, 0), multiple, min(multiple + 1, 2**31 - 1)}:
        assert ((2 * near * factor) >> 32) >> shift == near // divisor
