"""Formulas that have a shorter form are found wherever they are spelled, and nothing else is."""

import math

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from accuracy import assert_no_further
from warpnorm import pipeline
from warpnorm.codegen import pointwise
from warpnorm.codegen.shorter import shortened
from warpnorm.fuse import NOTHING, arrange
from warpnorm.problem import View
from warpnorm.trace import operators

ROOT = math.sqrt(0.5)
FOUND = {
    "gelu": F.gelu,
    "by hand": lambda x: 0.5 * x * (1.0 + torch.erf(x * ROOT)),
    "turned around": lambda x: (torch.erf(ROOT * x) + 1) * (x * 0.5),
    "of a sum": lambda x: F.gelu(x + 1.5),
}
NOT_FOUND = {
    "another factor": lambda x: 0.25 * x * (1.0 + torch.erf(x * ROOT)),
    "another argument": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.7)),
    "of something else": lambda x: 0.5 * (x + 1) * (1.0 + torch.erf(x * ROOT)),
    "erf alone": lambda x: torch.erf(x * ROOT),
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def problem(activation, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    fused = warpnorm.fuse(lambda x: F.rms_norm(activation(x), x.shape[-1:]))
    x = torch.empty(4, 64, dtype=dtype)
    request = fused.request(NOTHING, (x,), {})
    call, operands = arrange(fused.prepare(request), request.tensors)
    return pipeline.forward_problem(call, (*map(View.of, operands), View.of(x)))[0]


@pytest.mark.parametrize("name", FOUND)
def test_gelu_is_found(name: str) -> None:
    half = problem(FOUND[name], torch.bfloat16)
    assert "gelu" in [node.operator for node in shortened(half.prologue).nodes]
    assert "ours.quick_gelu(" in pointwise.forward_source(half)
    assert "erf" not in pointwise.forward_source(half)
    assert "quick" not in pointwise.forward_source(problem(FOUND[name], torch.float32))


@pytest.mark.parametrize("name", NOT_FOUND)
def test_nothing_else_is(name: str) -> None:
    graph = problem(NOT_FOUND[name], torch.bfloat16).prologue
    assert shortened(graph) is graph


def test_what_others_read_stays() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        normal = 1.0 + torch.erf(x * ROOT)
        return 0.5 * x * normal + normal

    graph = shortened(problem(both, torch.bfloat16).prologue)
    operators = [node.operator for node in graph.nodes]
    assert "gelu" in operators
    assert "erf" in operators


def test_the_gradient_of_gelu_is_found() -> None:
    fused = warpnorm.fuse(lambda x: F.rms_norm(F.gelu(x), x.shape[-1:]))
    x = torch.empty(4, 64, dtype=torch.float16, requires_grad=True)
    request = fused.request(NOTHING, (x,), {})
    call, operands = arrange(fused.prepare(request), request.tensors)
    backward, _ = pipeline.backward_problem(call, (*map(View.of, operands), View.of(x)), (0,), (0,))
    source = pointwise.backward_source(backward)
    assert "ours.quick_gelu_slope(" in source
    assert "erf" not in source


def test_mish_by_one_exponential() -> None:
    """No further from the truth than PyTorch, which takes a logarithm and a tanh, and not finite where it is not."""
    ends = [20.0, 20.000002, 44.0, 45.0, 88.0, 89.0, -88.0, -104.0, math.inf, -math.inf, math.nan]
    x = torch.cat([torch.linspace(-60, 60, 100_001), torch.tensor(ends)])
    mish, backward = torch.ops.aten.mish.default, torch.ops.aten.mish_backward.default
    for target, arguments in ((mish, (x,)), (backward, (torch.ones_like(x), x))):
        ours, torchs = operators.decompositions()[target](*arguments), target(*arguments)
        assert ours.isnan().equal(torchs.isnan())
        assert ours.isinf().equal(torchs.isinf())
        there = ours.isfinite()
        truth = target(*(a.double() for a in arguments))
        assert_no_further(str(target), ours[there], truth[there], torchs[there])
