"""Device memory: flat over thousands of calls; and a batch whose mean is far above its deviation, with 2^28 values a
channel. A short run of the fuzzer, too."""

import threading

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import settings
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


def add_batch_norm_relu(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True) + r)


def let_go(device: str) -> None:
    """Autograd's thread holds what it had last until it has something else: a step of no elements, which needs no memory."""
    x = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.empty(0, device=device))
    torch.cuda.synchronize()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("launcher", ["compiled", "python"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_both_directions_need_no_more_than_eager(layout: torch.memory_format, launcher: str, device: str) -> None:
    """What the programs leave for each other is a stream's to lend. Bytes are counted as they are asked for: what the
    allocator has at hand may be a megabyte more, whoever asks."""
    x, r, grad = (torch.randn(32, 256, 56, 56, device=device).half().to(memory_format=layout) for _ in range(3))
    w, b = (torch.randn(256, device=device) for _ in range(2))
    peaks = []
    with settings.override(launcher=launcher):
        for function in (warpnorm.fuse(add_batch_norm_relu), add_batch_norm_relu):
            found = []
            for _ in range(6):
                leaves = [t.detach().requires_grad_() for t in (x, r, w, b)]
                let_go(device)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_stats()["requested_bytes.all.current"]
                y = function(*leaves)
                gradients = torch.autograd.grad(y, leaves, grad)
                torch.cuda.synchronize()
                found.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
                del y, gradients
            assert len(set(found[3:])) == 1, (
                found
            )  # of the first calls each is another way, and one is lent memory for good
            peaks.append(found[-1])
    assert peaks[0] <= peaks[1]


def test_threads_that_share_a_stream(device: str) -> None:
    """Each has what its programs leave for each other until they are launched, though it is the same memory."""
    fused = warpnorm.fuse(add_batch_norm_relu)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        leaves = [
            t.detach().requires_grad_() for t in (x, x.flip(0), torch.ones(64, device=device), x[0, :, 0, 0].float())
        ]
        y = fused(*leaves)
        return [y, *torch.autograd.grad(y, leaves, x.roll(1, 0))]

    inputs = [torch.randn(16 + k, 64, 56, 56, device=device).half() for k in range(4)]
    expected = [both(x) for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(25):
            if not all(a.equal(b) for a, b in zip(both(inputs[k]), expected[k], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
