"""What backward keeps of a tile from its first visit to its second is found by its formula, and told apart from what it is
not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import pipeline
from warpnorm.codegen import kept, pointwise
from warpnorm.fuse import NOTHING, arrange
from warpnorm.problem import BackwardProblem, View

COLS = 64


def problem_of(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> BackwardProblem:
    fused = warpnorm.fuse(function)
    request = fused.request(NOTHING, operands, {})
    call, arranged = arrange(fused.prepare(request), request.tensors)
    x = operands[0]
    return pipeline.backward_problem(call, (*map(View.of, arranged), View.of(x)), (0,), tuple(range(len(arranged))))[0]


def of(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """A tensor, another, and two of columns."""
    shapes = ((4, COLS), (4, COLS), (COLS,), (COLS,))
    return tuple(torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def rms(h: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, h.shape[-1:])


def count_kept(function: Callable[..., torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> int:
    return len(kept.values(problem_of(function, *of(dtype))).outputs)


def test_gelu_and_its_slope_share_one_value() -> None:
    """Which the second visit reads behind the two values that were loaded."""
    problem = problem_of(lambda x, r, b, w: rms(F.gelu(x + b)) * w, *of())
    source = pointwise.backward_source(problem)
    assert len(kept.values(problem).outputs) == 1
    assert source.count("ours.kept(") == 1
    assert "ours.widened(values[2]) if len(values) > 2 else ours.quick_gelu(" in source
    assert "ours.widened(values[2])) if len(values) > 2 else ours.quick_gelu_slope(" in source


def test_of_every_argument_one() -> None:
    assert count_kept(lambda x, r, b, w: rms(F.gelu(x + b) * F.gelu(r))) == 2
    assert count_kept(lambda x, r, b, w: rms(F.gelu(x) + 0.5 * F.gelu(x) * r)) == 1
    assert count_kept(lambda x, r, b, w: rms(F.gelu(x) * r) * F.gelu(x)) == 1, "on both sides of the norm"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, r, b, w: rms(F.silu(x) * r), "it takes as long to compute again"),
        (lambda x, r, b, w: rms(x * F.gelu(b)), "it is no tile"),
        (lambda x, r, b, w: rms(x + r) * w, "there is nothing"),
        (lambda x, r, b, w: rms(x + r) * F.gelu(r), "it is not there before the norm"),
        (lambda x, r, b, w: F.gelu(rms(x + r) * w), "it is of what is normalized"),
    ],
)
def test_nothing_else_is(function: Callable[..., torch.Tensor], why: str) -> None:
    assert count_kept(function) == 0, why


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_not_where_a_half_would_be_coarser_than_the_result(dtype: torch.dtype) -> None:
    assert count_kept(lambda x, r, b, w: rms(F.gelu(x)), dtype) == 0


def test_forward_knows_nothing_of_it() -> None:
    operands = of()
    fused = warpnorm.fuse(lambda x, r, b, w: rms(F.gelu(x + b)) * w)
    request = fused.request(NOTHING, operands, {})
    call, arranged = arrange(fused.prepare(request), request.tensors)
    problem = pipeline.forward_problem(call, (*map(View.of, arranged), View.of(operands[0])))[0]
    assert "len(values)" not in pointwise.forward_source(problem)
