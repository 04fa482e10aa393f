"""The plain calls of `layer_norm` and `rms_norm` on the CPU, against float64 and against PyTorch: dtypes, shapes, strides,
hard values, gradients of the first and second order. What goes beyond PyTorch is in `test_keywords.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F

import warpnorm
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
    row_errors,
    truth,
)
from warpnorm import routing
from warpnorm.norms import LAYER_NORM, RMS_NORM

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
by_norm = pytest.mark.parametrize("norm", FUNCTIONS)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[torch.dtype], torch.Tensor]  # the leaf; `view` of it is the input
    why: str
    view: Callable[[torch.Tensor], torch.Tensor] = lambda leaf: leaf
    dims: int = 1
    has_weight: bool = True
    has_bias: bool = True
    eps: float | None = None


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: (random(shape, torch.float64) * scale + shift).to(dtype)


CASES = [
    Case("two_dims", normal(7, 24), "the common call"),
    Case("odd_width", normal(5, 41), "rows are not 16-byte aligned, and end inside a vector"),
    Case("no_affine", normal(7, 24), "neither parameter", has_weight=False, has_bias=False),
    Case("weight_only", normal(7, 24), "a bias is optional", has_bias=False),
    Case("bias_only", normal(7, 24), "and so is a weight", has_weight=False),
    Case("several_column_dims", normal(2, 3, 4, 5), "normalized_shape of three dimensions", dims=3),
    Case("one_row", normal(24), "every dimension is normalized"),
    Case("one_column", normal(6, 1), "the variance is zero: layer_norm gives the bias"),
    Case("zero_rows", normal(0, 24), "an empty batch is a batch; parameters get a gradient of zeros"),
    Case("zero_columns", normal(4, 0), "rows without elements"),
    Case("large_eps", normal(7, 24), "eps reaches the formula", eps=0.5),
    Case("zero_eps", normal(7, 24), "eps is not replaced where it is falsy", eps=0.0),
    Case("negative_eps", normal(7, 24), "PyTorch takes it", eps=-0.25),
    Case("packed_qkv", normal(5, 3, 24), "rows three widths apart", view=lambda t: t[:, 1]),
    Case("packed_heads", normal(2, 4, 96), "a slice of columns", view=lambda t: t[..., 24:48]),
    Case("transposed_batch", normal(4, 5, 24), "two row axes that do not collapse", view=lambda t: t.transpose(0, 1)),
    Case("column_major", normal(24, 7), "columns far apart, rows adjacent", view=lambda t: t.t()),
    Case("every_second_column", normal(7, 48), "column stride of two", view=lambda t: t[:, ::2]),
    Case("expanded_rows", normal(1, 24), "row stride of zero: gradients add up", view=lambda t: t.expand(5, 24)),
    Case("expanded_columns", normal(5, 1), "column stride of zero: constant rows", view=lambda t: t.expand(5, 24)),
    Case("channels_last", normal(2, 4, 3, 5), "permuted columns", view=lambda t: t.permute(0, 3, 1, 2), dims=3),
    Case("offset", normal(6, 64, scale=1e-2, shift=1e4), "E[x^2] - E[x]^2 would lose every digit"),
    Case("constant", lambda dtype: torch.full((5, 24), 3.25, dtype=dtype), "no variance at all"),
    Case("zeros", lambda dtype: torch.zeros(5, 24, dtype=dtype), "nothing but eps under the root"),
    Case("huge", normal(5, 24, scale=1e4), "squares leave the range of float16"),
    Case("tiny", normal(5, 24, scale=1e-6), "squares fall below float16, and below eps"),
    Case("nan_row", lambda dtype: _spoiled(dtype, float("nan")), "NaN stays in its own row"),
    Case("inf_row", lambda dtype: _spoiled(dtype, float("inf")), "and so does infinity"),
]


def _spoiled(dtype: torch.dtype, value: float) -> torch.Tensor:
    tensor = random((5, 24), dtype)
    tensor[2, 3] = value
    return tensor


def arguments(case: Case, norm: str, dtype: torch.dtype) -> tuple[torch.Tensor, Arguments]:
    leaf = case.make(dtype).requires_grad_()
    input = case.view(leaf)
    shape = tuple(input.shape[input.ndim - case.dims :])
    weight = random(shape, dtype, seed=1, requires_grad=True) if case.has_weight else None
    bias = random(shape, dtype, seed=2, requires_grad=True) if case.has_bias and norm == "layer_norm" else None
    return leaf, Arguments(norm, input, shape, weight, bias, case.eps)


@by_norm
@by_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_accurate_and_has_pytorchs_bits(case: Case, dtype: torch.dtype, norm: str) -> None:
    """Forward and the gradient of every operand, the leaf under a view included. The bits where its operator runs."""
    leaf, a = arguments(case, norm, dtype)
    is_small = not routing.is_long(LAYER_NORM if norm == "layer_norm" else RMS_NORM, prod(a.shape))
    grad_output = random(a.input.shape, dtype, seed=3)
    parameters = [leaf, *a.tensors[1:]]
    output, theirs = ours(a), pytorch(a)
    assert output.dtype == dtype
    found = torch.autograd.grad(output, parameters, grad_output)
    expected = torch.autograd.grad(theirs, parameters, grad_output)
    for mine, its in zip((output, *found), (theirs, *expected), strict=True):
        if is_small or not routing.has_compiler():
            _assert_same_bits(mine, its)
    check(a, pytorch, grad_output)


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@by_norm
@by_dtype
def test_error_is_small_in_itself(dtype: torch.dtype, norm: str) -> None:
    """PyTorch's error is no excuse where rows are easy: some roundings of the dtype, whatever PyTorch does."""
    a = Arguments(norm, random((50, 64), dtype), (64,), random((64,), dtype, seed=1))
    error, largest = row_errors(ours(a), truth(a)["output"], 1)
    assert (error <= 8 * torch.finfo(dtype).eps * largest).all()


@by_norm
@by_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(value: float, dtype: torch.dtype, norm: str) -> None:
    clean = Arguments(norm, random((5, 24), dtype), (24,), random((24,), dtype, seed=1))
    spoiled = Arguments(norm, _spoiled(dtype, value), (24,), clean.weight)
    for keywords in ({}, {"normalized_dim": -1}):
        before, after = ours(clean, **keywords), ours(spoiled, **keywords)
        others = [0, 1, 3, 4]
        assert torch.equal(before[others], after[others])
        assert after[2].isnan().any()


@pytest.mark.parametrize(
    "dtypes", list(product(DTYPES, DTYPES, DTYPES)), ids=lambda dtypes: "-".join(name_of(dtype) for dtype in dtypes)
)
def test_mixed_dtypes_of_layer_norm(dtypes: tuple[torch.dtype, ...]) -> None:
    """Computed in float32, or float64 where anything is; rounded once, to the dtype of the input."""
    input, weight, bias = (
        random(shape, dtype, seed, requires_grad=True)
        for seed, (shape, dtype) in enumerate(zip(((9, 24), (24,), (24,)), dtypes, strict=True))
    )
    a = Arguments("layer_norm", input, (24,), weight, bias)
    check(a, _theirs(a), random((9, 24), input.dtype, seed=3))


@pytest.mark.parametrize(
    "dtypes", list(product(DTYPES, DTYPES)), ids=lambda dtypes: "-".join(name_of(dtype) for dtype in dtypes)
)
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["normal", "small"])
def test_mixed_dtypes_of_rms_norm(dtypes: tuple[torch.dtype, ...], scale: float) -> None:
    """Small inputs show which eps was taken: that of the input's dtype of computation, whatever the weight."""
    input = (random((9, 24), torch.float64) * scale).to(dtypes[0]).requires_grad_()
    a = Arguments("rms_norm", input, (24,), random((24,), dtypes[1], seed=1, requires_grad=True))
    check(a, pytorch if dtypes[0] == dtypes[1] else pytorch_wide, random((9, 24), input.dtype, seed=3))


def _theirs(a: Arguments) -> Callable[[Arguments], torch.Tensor]:
    """PyTorch's operator where it takes these dtypes."""
    try:
        pytorch(a)
    except RuntimeError:
        return pytorch_wide
    return pytorch


@by_norm
@by_dtype
def test_default_eps_is_the_same_on_every_path(dtype: torch.dtype, norm: str) -> None:
    """An input so small that eps decides: the plain call goes to PyTorch's operator, the other does not."""
    a = Arguments(norm, (random((4, 32), torch.float64) * 1e-4).to(dtype), (32,))
    plain, other = ours(a), ours(a, return_stats=True)[0]
    true = truth(a)["output"]
    assert_accurate(plain, pytorch_wide(a), true, 1)
    assert_accurate(other, pytorch_wide(a), true, 1)


@by_norm
@by_dtype
def test_rows_do_not_depend_on_their_number(dtype: torch.dtype, norm: str) -> None:
    for cols in (33, 1000, 16384):
        input, weight = random((20, cols), dtype), random((cols,), dtype, seed=1)
        whole = ours(Arguments(norm, input, (cols,), weight))
        for rows in (1, 2, 7):
            assert torch.equal(ours(Arguments(norm, input[:rows], (cols,), weight)), whole[:rows])


@dataclass(frozen=True)
class Spelling:
    name: str
    make: Callable[[tuple[int, ...]], object]
    why: str
    dims: int = 2


SPELLINGS = [
    Spelling("list", list, "what PyTorch's modules of old pass"),
    Spelling("size", torch.Size, "x.shape[-2:]"),
    Spelling("int", lambda shape: shape[0], "PyTorch's modules take it, its functions do not", dims=1),
    Spelling("list_of_one", list, "one dimension in brackets", dims=1),
]


@by_norm
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_normalized_shape_is_spelled_freely(spelling: Spelling, norm: str) -> None:
    input = random((3, 4, 6))
    shape = tuple(input.shape[-spelling.dims :])
    expected = pytorch(Arguments(norm, input, shape))
    assert torch.equal(FUNCTIONS[norm](input, spelling.make(shape)), expected)
    stats = FUNCTIONS[norm](input, spelling.make(shape), return_stats=True)[1]
    assert stats.shape == (*input.shape[: -spelling.dims], *(1,) * spelling.dims)


@dataclass(frozen=True)
class Derivative:
    name: str
    why: str
    has_weight: bool = True
    has_bias: bool = True
    weight_shape: tuple[int, ...] | None = None
    number: float | None = None
    weight_offset: float = 0.0
    dims: int = 1
    is_transposed: bool = False
    has_stats: bool = False


DERIVATIVES = [
    Derivative("plain", "PyTorch's operator"),
    Derivative("no_affine", "the norm by itself", has_weight=False, has_bias=False),
    Derivative("two_dims", "columns of two axes", dims=2),
    Derivative("offset", "(1 + weight)", weight_offset=1.0),
    Derivative("scalar_weight", "its gradient is a sum over everything", weight_shape=()),
    Derivative("scalar_offset", "both at once", weight_shape=(), weight_offset=1.0),
    Derivative("number", "a weight that has no gradient", number=1.5),
    Derivative("transposed", "strides of two row axes", is_transposed=True),
    Derivative("with_stats", "the output next to statistics is as differentiable", has_stats=True),
]


@by_norm
@pytest.mark.parametrize("case", DERIVATIVES, ids=lambda case: case.name)
def test_first_and_second_derivatives(case: Derivative, norm: str) -> None:
    input = random((2, 2, 3), torch.float64, requires_grad=True)
    view = input.transpose(0, 1) if case.is_transposed else input
    shape = tuple(view.shape[-case.dims :])
    weight = random(shape if case.weight_shape is None else case.weight_shape, torch.float64, 1, requires_grad=True)
    bias = random(shape, torch.float64, 2, requires_grad=True)
    tensors = [input]
    if case.has_weight and case.number is None:
        tensors.append(weight)
    if case.has_bias and norm == "layer_norm":
        tensors.append(bias)

    def call(input: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        view = input.transpose(0, 1) if case.is_transposed else input
        remaining = list(parameters)
        weight = case.number if case.number is not None else remaining.pop(0) if case.has_weight else None
        a = Arguments(norm, view, shape, weight, remaining.pop(0) if remaining else None, None, case.weight_offset)
        return ours(a, return_stats=True)[0] if case.has_stats else ours(a)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@by_norm
def test_only_what_is_wanted_gets_a_gradient(norm: str) -> None:
    """A frozen input under a trained weight, and the other way round."""
    for trained in ("input", "weight"):
        input, weight = (random(s, requires_grad=trained == n) for s, n in (((5, 8), "input"), ((8,), "weight")))
        check(a := Arguments(norm, input, (8,), weight, weight_offset=1.0), pytorch_wide, random((5, 8), seed=3))
        ours(a).sum().backward()
        assert (input.grad is None, weight.grad is None) == (trained != "input", trained != "weight")
    assert not ours(Arguments(norm, random((5, 8)), (8,), random((8,)))).requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("cols", [16, 2048], ids=["small", "large"])
@pytest.mark.parametrize(
    ("norm", "layout"),
    [("layer_norm", torch.jagged), ("rms_norm", torch.jagged), ("layer_norm", torch.strided)],
    ids=["layer_norm-jagged", "rms_norm-jagged", "layer_norm-strided"],
)
def test_nested_tensors(norm: str, layout: torch.layout, cols: int) -> None:
    """As PyTorch takes them, with gradients: the ones have no shape, the others know PyTorch's arguments alone."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, cols, generator=generator) for count in (2, 3)]
    vectors = torch.randn(2 if norm == "layer_norm" else 1, cols, generator=generator)
    found = []
    for home in (warpnorm, F):
        leaves = [part.clone().requires_grad_() for part in (*rows, *vectors)]
        nested = torch.nested.as_nested_tensor(leaves[:2], layout=layout)
        parts = getattr(home, norm)(nested, (cols,), *leaves[2:], eps=1e-5).unbind()
        sum((part * part.detach().sigmoid()).sum() for part in parts).backward()  # type: ignore[union-attr]
        found.append([*parts, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found)
    if layout is torch.strided:
        with pytest.raises(warpnorm.InputError, match="nested tensor without a shape"):
            warpnorm.layer_norm(nested, (cols,))
