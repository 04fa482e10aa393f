"""What `layer_norm` and `rms_norm` take beyond PyTorch: `normalized_dim`, `out`, `weight_offset`, weights that are one
number, and `return_stats`, by the same tolerance rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from cpu.truth import (
    DTYPES,
    FUNCTIONS,
    Arguments,
    assert_accurate,
    check,
    name_of,
    ours,
    pytorch,
    pytorch_wide,
    random,
    truth,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
by_norm = pytest.mark.parametrize("norm", FUNCTIONS)


def plain(norm: str, dtype: torch.dtype, shape: tuple[int, ...] = (5, 24), dims: int = 1) -> Arguments:
    columns = shape[-dims:]
    bias = random(columns, dtype, seed=2) if norm == "layer_norm" else None
    return Arguments(norm, random(shape, dtype), columns, random(columns, dtype, seed=1), bias)


@by_norm
@pytest.mark.parametrize("dim", range(-4, 4))
def test_normalized_dim_is_a_spelling_of_normalized_shape(dim: int, norm: str) -> None:
    a = plain(norm, torch.float32, (2, 3, 4, 5), dims=4 - dim % 4)
    assert torch.equal(ours(a, normalized_dim=dim), ours(a))
    torch.testing.assert_close(ours(a), pytorch(a))
    for by_dim, by_shape in zip(
        ours(a, normalized_dim=dim, return_stats=True), ours(a, return_stats=True), strict=True
    ):
        assert torch.equal(by_dim, by_shape)


@dataclass(frozen=True)
class Weight:
    name: str
    make: Callable[[torch.dtype], torch.Tensor | float]
    offset: float
    why: str


WEIGHTS = [
    Weight("offset", lambda dtype: random((24,), dtype, 1, requires_grad=True), 1.0, "(1 + weight) of Gemma"),
    Weight("fraction", lambda dtype: random((24,), dtype, 1, requires_grad=True), -0.3, "1.0 is not the only offset"),
    Weight(
        "small_weight",
        lambda dtype: (random((24,), torch.float64, 1) * 1e-3).to(dtype).requires_grad_(),
        1.0,
        "added in the dtype of the weight, bfloat16 would lose it",
    ),
    Weight("float", lambda _: 1.7, 0.0, "one number for all columns"),
    Weight("int", lambda _: 3, 0.0, "a number need not be a float"),
    Weight("zero", lambda _: 0.0, 0.0, "a falsy weight is a weight"),
    Weight("float_offset", lambda _: 0.7, 1.0, "a number and an offset"),
    Weight("scalar", lambda dtype: torch.tensor(1.7, dtype=dtype, requires_grad=True), 0.0, "a trained gain"),
    Weight("scalar_float32", lambda _: torch.tensor(1.7, requires_grad=True), 0.0, "a gain kept in float32"),
    Weight("scalar_offset", lambda dtype: torch.tensor(0.2, dtype=dtype, requires_grad=True), 1.0, "and its (1 + w)"),
]


@by_norm
@by_dtype
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.name)
def test_weight_with_offset_or_without_dimensions(weight: Weight, dtype: torch.dtype, norm: str) -> None:
    bias = random((24,), dtype, 2, requires_grad=True) if norm == "layer_norm" else None
    a = Arguments(norm, random((9, 24), dtype, requires_grad=True), (24,), weight.make(dtype), bias)
    check(replace(a, weight_offset=weight.offset), pytorch_wide, random((9, 24), dtype, seed=3))


@by_norm
def test_equivalent_weights_have_the_same_bits(norm: str) -> None:
    a = plain(norm, torch.float32)
    full = ours(replace(a, weight=torch.full((24,), 2.5)))
    assert torch.equal(ours(replace(a, weight=2.5)), full)
    assert torch.equal(ours(replace(a, weight=torch.tensor(2.5))), full)
    assert torch.equal(ours(replace(a, weight=1.5, weight_offset=1.0)), full)
    assert torch.equal(ours(replace(a, weight=torch.full((24,), 1.5), weight_offset=1.0)), full)
    assert torch.equal(ours(replace(a, weight_offset=0.0)), ours(a))


@by_norm
def test_gradient_of_a_scalar_weight_is_a_scalar(norm: str) -> None:
    weight = torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)
    ours(Arguments(norm, random((9, 24)), (24,), weight)).square().sum().backward()
    assert weight.grad is not None
    assert (weight.grad.shape, weight.grad.dtype) == ((), torch.bfloat16)
    exact = 2 * 1.5 * (truth(Arguments(norm, random((9, 24)), (24,)))["output"] ** 2).sum()
    assert abs(weight.grad.item() - exact) <= exact * torch.finfo(torch.bfloat16).eps / 2


@dataclass(frozen=True)
class Out:
    name: str
    buffer: tuple[int, ...]
    view: Callable[[torch.Tensor], torch.Tensor]
    why: str


OUTS = [
    Out("fresh", (5, 24), lambda t: t, "as allocated"),
    Out("packed_slice", (5, 3, 24), lambda t: t[:, 1], "the neighbours in the packed tensor stay"),
    Out("column_slice", (5, 40), lambda t: t[:, 8:32], "rows with a gap between"),
    Out("transposed", (24, 5), lambda t: t.t(), "strides unlike those of the input"),
    Out("every_second", (5, 48), lambda t: t[:, ::2], "the gaps stay"),
]


@by_norm
@by_dtype
@pytest.mark.parametrize("case", OUTS, ids=lambda case: case.name)
def test_out_is_written_and_nothing_else(case: Out, dtype: torch.dtype, norm: str) -> None:
    a = plain(norm, dtype)
    expected, *stats = ours(a, return_stats=True)
    buffer = torch.full(case.buffer, float("nan"), dtype=dtype)
    out = case.view(buffer)
    assert ours(a, out=out) is out
    assert torch.equal(out, expected)
    assert int(buffer.isnan().sum()) == buffer.numel() - out.numel()
    buffer.fill_(float("nan"))
    written, *found = ours(a, out=out, return_stats=True)
    assert written is out
    assert torch.equal(out, expected)
    assert all(torch.equal(mine, its) for mine, its in zip(found, stats, strict=True))


@by_norm
@by_dtype
@pytest.mark.parametrize("rows", [0, 5])
def test_out_may_be_the_input(rows: int, dtype: torch.dtype, norm: str) -> None:
    a = plain(norm, dtype, (rows, 24))
    expected, *stats = ours(a, return_stats=True)
    for view in (lambda t: t, lambda t: t.view_as(t), lambda t: t[:]):
        input = a.input.clone()
        out, *found = ours(replace(a, input=input), out=view(input), return_stats=True)
        assert out.data_ptr() == input.data_ptr()
        assert torch.equal(input, expected)
        assert all(torch.equal(mine, its) for mine, its in zip(found, stats, strict=True))


@by_norm
def test_out_is_taken_where_no_gradient_is_recorded(norm: str) -> None:
    a = plain(norm, torch.float32)
    trained = Arguments(norm, a.input.clone().requires_grad_(), a.shape, a.weight, a.bias)
    out = torch.full_like(a.input, float("nan"))
    with torch.no_grad():
        assert torch.equal(ours(trained, out=out), ours(a))
    assert not out.requires_grad


@by_norm
@by_dtype
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stats_are_those_of_the_rows(dims: int, dtype: torch.dtype, norm: str) -> None:
    """In the dtype of computation, one number a row, no gradient; the output next to them keeps its own."""
    a = plain(norm, dtype, (4, 3, 20), dims)
    input = (a.input * 3 + 100).requires_grad_()
    a = replace(a, input=input)
    output, *stats = ours(a, return_stats=True)
    compute = a.compute
    wide = input.detach().to(compute)
    if norm == "layer_norm":
        theirs = torch.native_layer_norm(wide, a.shape, None, None, 1e-5)[1:]
    else:
        theirs = ((wide.pow(2).mean(tuple(range(-dims, 0)), keepdim=True) + torch.finfo(compute).eps).rsqrt(),)
    assert len(stats) == len(theirs)
    for mine, its, name in zip(stats, theirs, ("mean", "rstd")[-len(stats) :], strict=True):
        assert mine.dtype == compute
        assert mine.shape == (*input.shape[: 3 - dims], *(1,) * dims)
        assert not mine.requires_grad
        assert_accurate(mine, its, truth(a)[name], dims, name)
    assert output.requires_grad
    if compute == dtype:
        assert torch.equal(output, ours(a))


@by_norm
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=name_of)
@by_dtype
def test_dtype_of_stats(dtype: torch.dtype, weight_dtype: torch.dtype, norm: str) -> None:
    """As the docstring says: float32, float64 where input or parameters are; both norms alike."""
    a = Arguments(norm, random((4, 8), dtype), (8,), random((8,), weight_dtype, 1))
    wanted = torch.float64 if torch.float64 in (dtype, weight_dtype) else torch.float32
    assert [stat.dtype for stat in ours(a, return_stats=True)[1:]] == [wanted] * (2 if norm == "layer_norm" else 1)


@by_norm
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_stats_of_no_rows(shape: tuple[int, ...], norm: str) -> None:
    a = plain(norm, torch.float32, shape)
    output, *stats = ours(a, return_stats=True)
    assert output.shape == shape
    assert all(stat.shape == (*shape[:-1], 1) for stat in stats)
