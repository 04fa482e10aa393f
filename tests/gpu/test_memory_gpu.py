"""Device memory: flat over thousands of calls; and a batch whose mean is far above its deviation, with 2^28 values a
channel. A short run of the fuzzer, too."""

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm.fuzz import run


@pytest.mark.unpoisoned
def test_ten_thousand_calls_leave_device_memory_flat(device: str) -> None:
    @warpnorm.fuse
    def fused(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.silu(x) + r, x.shape[-1:], w)

    def call(k: int) -> None:
        rows, cols = 2 + k % 101, 64 * (1 + k % 7)
        x = torch.ones(rows, cols, device=device, requires_grad=k % 3 == 0)
        w = torch.ones(cols, device=device)
        if k % 3 == 0:
            y = warpnorm.layer_norm(x, (cols,), w)
        elif k % 3 == 1:
            y = fused(x, x.detach(), w)
        else:
            y = warpnorm.batch_norm(x, None, None, training=True)
        if y.requires_grad:
            y.sum().backward()

    for k in range(3_000):
        call(k)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for k in range(3_000, 13_000):
        call(k)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1 << 20


@pytest.mark.unpoisoned
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_batch_far_from_zero_with_two_to_the_28_values(mean: float, device: str) -> None:
    """Held against the same input in float64, beside PyTorch's own error."""
    x = torch.randn(64, 1, 2048, 2048, device=device).mul_(0.1).add_(mean)
    assert x.numel() == 1 << 28
    errors = []
    wide = x.double()
    true_mean = wide.mean()
    true_rstd = (wide.sub_(true_mean).square_().mean() + 1e-5).rsqrt()
    for function in (warpnorm.batch_norm, F.batch_norm):
        y = function(x, None, None, training=True)
        error = torch.zeros((), dtype=torch.float64, device=device)
        for part, result in zip(x.split(8), y.split(8), strict=True):
            error += ((part.double() - true_mean) * true_rstd - result).square().sum()
        errors.append(float((error / x.numel()).sqrt()))
        del y
    assert errors[0] <= errors[1] + torch.finfo(torch.float32).eps / 2


def test_random_calls(device: str) -> None:
    found = run.fuzz(run.Limits(60.0, 1000), 0, device)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
