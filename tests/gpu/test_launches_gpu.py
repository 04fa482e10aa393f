"""How many kernels a call runs: one forward; backward one and the small sum, two and the sum for the longest rows."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

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
@pytest.mark.parametrize(("cols", "backward"), [(1024, 2), (16_384, 2), (65_536, 3)])
def test_launches(cols: int, backward: int, device: str) -> None:
    leaves = [o.requires_grad_() for o in operands_for(LAYER_NORM, torch.randn(64, cols, device=device).bfloat16(), 1)]
    output = ours(LAYER_NORM, 1, *leaves)
    grad = torch.randn_like(output)
    assert len(launched(lambda: ours(LAYER_NORM, 1, *leaves))) == 1
    names = launched(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))
    assert len(names) == backward, names
