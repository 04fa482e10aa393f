"""Outputs that are cast to what they are stored as are rounded once, by storing; every other cast stays."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import pipeline
from warpnorm.fuse import NOTHING, arrange
from warpnorm.problem import View

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, list[torch.dtype]]] = {
    "stored so": (lambda y: y.to(E4M3), torch.float32, []),
    "scaled before": (lambda y: (y * 3).clamp(-448, 448).to(E4M3), torch.float32, []),
    "half of half": (lambda y: (y * 2).to(torch.float16), torch.float16, []),
    "by way of another": (lambda y: y.to(torch.bfloat16).to(E5M2), torch.float32, [torch.bfloat16]),
    "read again": (lambda y: (y.to(E4M3).float() * 2).to(E4M3), torch.float32, [E4M3]),
    "whole numbers": (lambda y: (y * 8).to(torch.int32).to(torch.float16), torch.float32, [torch.int32, torch.float16]),
    "wider than computed": (lambda y: y.to(torch.float64), torch.float32, []),
}


@pytest.mark.parametrize("name", CASES)
def test_which_casts_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of rounding twice."""
    function, dtype, expected = CASES[name]
    fused = warpnorm.fuse(lambda x: function(F.rms_norm(x, x.shape[-1:]) * 1.5))
    x = torch.randn(4, 512).to(dtype)
    request = fused.request(NOTHING, (x,), {})
    call, operands = arrange(fused.prepare(request), request.tensors)
    output = View(tuple(x.shape), x.stride(), call.outputs[0])
    graph = pipeline.forward_problem(call, (*map(View.of, operands), output))[0].epilogue
    narrow = [n.dtype for n in graph.nodes if n.operator == "convert" and n.dtype not in (torch.float32, torch.float64)]
    assert narrow == expected
    found = fused(x)
    monkeypatch.setattr(pipeline, "rounded_once", lambda graph, *_: graph)
    pipeline.prepare_forward.cache_clear()
    twice = fused(x)
    pipeline.prepare_forward.cache_clear()
    assert found.dtype == twice.dtype == function(x).dtype
    assert found.view(torch.uint8).equal(twice.view(torch.uint8))
