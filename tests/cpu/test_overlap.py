"""Which tensors share memory, as `arguments.py` decides it for `out=`, against the addresses of their elements: a shared
one is never missed, and for slices of one packed tensor the answer is exact."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from warpnorm import arguments

examples = settings(max_examples=300, deadline=None, database=None, derandomize=True)
BUFFER = torch.zeros(4096)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Any shape and strides, zero and one included."""
    dims = draw(st.integers(1, 3))
    return (
        tuple(draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))),
        tuple(draw(st.lists(st.integers(0, 12), min_size=dims, max_size=dims))),
    )


@st.composite
def packed_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Slices of a permuted contiguous tensor: every axis steps over the inner ones."""
    shape, strides, reach = [], [], 1
    for _ in range(draw(st.integers(1, 3))):
        size, step = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        shape.append(size)
        strides.append(reach * step)
        reach = reach * step * (size + draw(st.integers(0, 1)))
    order = draw(st.permutations(range(len(shape))))
    return tuple(shape[i] for i in order), tuple(strides[i] for i in order)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of every byte of every element."""
    index = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        index += (torch.arange(size) * stride).view(-1, *(1,) * (tensor.ndim - dim - 1))
    starts = (tensor.data_ptr() + index.flatten() * tensor.element_size()).tolist()
    return [start + byte for start in starts for byte in range(tensor.element_size())]


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not set(addresses(a)).isdisjoint(addresses(b))


@given(layouts(), layouts(), st.integers(0, 40), st.integers(0, 40))
@examples
def test_overlap_is_never_missed(a: Any, b: Any, a_at: int, b_at: int) -> None:
    first, second = BUFFER.as_strided(*a, a_at), BUFFER.as_strided(*b, b_at)
    assert arguments.overlap(first, second) or not share(first, second)
    assert arguments.overlap(first, second) == arguments.overlap(second, first)


@given(layouts(), st.integers(0, 40), st.integers(0, 80))
@examples
def test_overlap_of_two_dtypes_is_never_missed(layout: Any, a_at: int, b_at: int) -> None:
    first, second = BUFFER.as_strided(*layout, a_at), BUFFER.view(torch.float16).as_strided(*layout, b_at)
    assert arguments.overlap(first, second) or not share(first, second)


@given(packed_layouts(), st.integers(0, 60), st.integers(0, 60))
@examples
def test_overlap_of_packed_slices_is_exact(layout: Any, a_at: int, b_at: int) -> None:
    first, second = BUFFER.as_strided(*layout, a_at), BUFFER.as_strided(*layout, b_at)
    assert arguments.overlap(first, second) == share(first, second)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20))
@examples
def test_overlap_of_two_storages_over_one_array_is_never_missed(a: int, a_size: int, b: int, b_size: int) -> None:
    memory = np.zeros(64, dtype=np.float32)
    first, second = torch.from_numpy(memory[a : a + a_size]), torch.from_numpy(memory[b : b + b_size])
    assert arguments.overlap(first, second) or not share(first, second)


@given(layouts())
@examples
def test_elements_that_share_memory_are_never_missed(layout: Any) -> None:
    tensor = BUFFER.as_strided(*layout)
    found = addresses(tensor)
    assert arguments.overlaps_itself(tensor) or len(found) == len(set(found))


@given(packed_layouts())
@examples
def test_no_element_of_a_packed_slice_is_said_to_share_memory(layout: Any) -> None:
    assert not arguments.overlaps_itself(BUFFER.as_strided(*layout))
