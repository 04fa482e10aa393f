"""How many kernels a call runs: one forward; backward one and the small sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import warpnorm
from kernel_contracts.running import operands_for, ours
from warpnorm.norms import LAYER_NORM


def launched(function) -> list[str]:  # type: ignore[no-untyped-def]
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    events = profiled.events()
    return [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA and "mem" not in e.name.lower()]


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("rows", "cols", "count"), [(64, 1024, 1), (256, 1024, 2), (256, 16_384, 2), (256, 65_536, 2)])
def test_launches(rows: int, cols: int, count: int, device: str) -> None:
    """The sums of few rows are taken in the same launch."""
    leaves = [
        o.requires_grad_() for o in operands_for(LAYER_NORM, torch.randn(rows, cols, device=device).bfloat16(), 1)
    ]
    output = ours(LAYER_NORM, 1, *leaves)
    grad = torch.randn_like(output)
    assert len(launched(lambda: ours(LAYER_NORM, 1, *leaves))) == 1
    names = launched(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))
    assert len(names) == count, names


def gated(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return F.layer_norm(F.silu(x) * r, x.shape[-1:], weight, bias)


def residual(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    h = F.dropout(x, 0.1) + r
    return F.rms_norm(h, h.shape[-1:], weight) + bias, h


def modulated(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return F.layer_norm(x, x.shape[-1:]) * (1 + r) * weight + bias  # r: one for each sample


@pytest.mark.unpoisoned
@pytest.mark.parametrize("cols", [1024, 4096, 8192, 16_384, 65_536])
@pytest.mark.parametrize("function", [gated, residual, modulated], ids=lambda f: f.__name__)
def test_launches_of_fused_functions(function: Callable[..., Any], cols: int, device: str) -> None:
    shapes = ((4, 16, cols), (4, 1 if function is modulated else 16, cols), (cols,), (cols,))
    leaves = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    fused = warpnorm.fuse(function)
    outputs = fused(*leaves)
    grads = [torch.randn_like(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
    assert len(launched(lambda: fused(*leaves))) == 1
    names = launched(lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True))
    assert len(names) <= 2, names


@pytest.mark.unpoisoned
@pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 64, 28, 28), (64, 256, 28, 28)], ids=str)
def test_launches_of_batch_norm(shape: tuple[int, ...], is_last: bool, device: str) -> None:
    """Held in registers, one each way, with the gradients of the parameters. Channels last, by turns, words are cleared
    before, and gradients are summed after; where there is little of everything, all kinds of tasks have a launch; elsewhere
    the last ones may merge for themselves. The running statistics need none."""
    input = torch.randn(shape, device=device).bfloat16()
    input = input.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format).requires_grad_()
    module = warpnorm.nn.BatchNorm2d(shape[1]).to(device)
    leaves = [input, module.weight, module.bias]
    run = lambda: warpnorm.batch_norm(input, module.running_mean, module.running_var, *leaves[1:], training=True)  # noqa: E731
    grad = torch.randn_like(input)
    for _ in range(4):  # Python and the compiled launcher clear mailboxes of their own once
        output = run()
        torch.autograd.grad(output, leaves, grad, retain_graph=True)
    names = launched(run)
    assert len(names) in ((2, 3) if is_last else (1,)), names
    names = launched(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))
    assert len(names) in ((2, 3) if is_last else (1,)), names
