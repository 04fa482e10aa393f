"""`torch.fx.symbolic_trace` of models with our norms: it takes PyTorch's for one node each, so it has to take ours."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

import warpnorm
from warpnorm import nn

IMAGE = (2, 8, 3, 3)
# The module, the shapes of its inputs, and whether it becomes one node
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[tuple[int, ...], ...], bool]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), ((3, 8),), False),
    "RMSNorm": (lambda: nn.RMSNorm(8), ((3, 8),), False),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (IMAGE,), False),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), ((3, 8),), True),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (IMAGE,), True),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(8), (IMAGE,), True),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, track_running_stats=True), (IMAGE,), True),
    "AddLayerNorm": (lambda: nn.AddLayerNorm(8), ((3, 8), (3, 8)), True),
    "AddRMSNorm": (lambda: nn.AddRMSNorm(8), ((3, 8), (3, 8)), True),
    "GatedRMSNorm": (lambda: nn.GatedRMSNorm(8), ((3, 8), (3, 8)), True),
    "AdaLayerNorm": (lambda: nn.AdaLayerNorm(8), ((2, 3, 8), (2, 8), (2, 8)), True),
    "BatchNormReLU2d": (lambda: nn.BatchNormReLU2d(8), (IMAGE, IMAGE), True),
    "SyncBatchNormReLU2d": (lambda: nn.SyncBatchNormReLU2d(8), (IMAGE,), True),
    "GroupNormSiLU": (lambda: nn.GroupNormSiLU(2, 8), (IMAGE,), True),
    "QKNorm": (lambda: nn.QKNorm(8, 2, 1), ((3, 5, 8),), True),
    "RMSNormFloat8": (lambda: nn.RMSNormFloat8(8), ((3, 8), ()), False),
}  # fmt: skip


class Two(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: Any = None, z: Any = None) -> Any:
        given = [value for value in (x, y, z) if value is not None]
        return self.inner(*given)


def trace(model: torch.nn.Module, count: int) -> torch.fx.GraphModule:
    return symbolic_trace(model, dict(list({"x": None, "y": None, "z": None}.items())[count:]))


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    """In training and, without another trace, in evaluation; nothing is counted by the trace itself."""
    make, shapes, is_one = MODULES[name]
    torch.manual_seed(0)
    model = Two(make())
    twin = copy.deepcopy(model)
    traced = trace(model, len(shapes))
    assert any(node.op == "call_module" for node in traced.graph.nodes) == is_one
    for mode in (True, False) if is_one else (True,):
        given = [torch.randn(shape).abs() for shape in shapes]
        right, found = twin.train(mode)(*given), traced.train(mode)(*given)
        torch.testing.assert_close(found, right, rtol=0, atol=0)
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)


def test_a_patched_model() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.InstanceNorm2d(8), torch.nn.GroupNorm(2, 8),
        torch.nn.Flatten(), torch.nn.LayerNorm(8 * 36), torch.nn.BatchNorm1d(8 * 36),
    )  # fmt: skip
    twin = copy.deepcopy(model)
    assert len(warpnorm.patch(model).swapped) == 5
    traced, x = symbolic_trace(model), torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(traced(x), twin(x))


@warpnorm.fuse
def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + F.silu(x)
    return F.rms_norm(h, h.shape[-1:]), h


def test_fused_functions_stay_fused() -> None:
    def model(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, h = (block(x, residual=residual)[i] for i in range(2))
        return y * 2 + h

    traced = symbolic_trace(model)
    assert any(node.target is block for node in traced.graph.nodes)
    x, residual = torch.randn(3, 128), torch.randn(3, 128)
    torch.testing.assert_close(traced(x, residual), model(x, residual), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm", "GatedRMSNorm", "GroupNormSiLU", "RMSNormFloat8"])
def test_a_ready_made_module_that_is_all_there_is(name: str) -> None:
    """Is the plain PyTorch that it is made of."""
    make, shapes, _ = MODULES[name]
    module, given = make(), [torch.randn(shape).abs() for shape in shapes]
    torch.testing.assert_close(symbolic_trace(module)(*given), module(*given))


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm2d, nn.BatchNorm2d, nn.BatchNormReLU2d, nn.AdaLayerNorm])
def test_a_module_that_is_all_there_is(kind: Any) -> None:
    """Is traced inside, as PyTorch's own, and asks for dimensions there: no node could call it."""
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        symbolic_trace(kind(8))
