"""Contract: `fuse` around the norms by channel computes what the plain function does, values and gradients, in every memory
format, and leaves running statistics and counters as PyTorch does."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import warpnorm
from kernel_contracts.fuse_contract import drawn
from kernel_contracts.fuse_operators_contract import check_fused
from warpnorm import settings
from warpnorm.plan.plan import COLUMN

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
N, C, H, W = 4, 6, 3, 5
FULL, CHANNELS, SAMPLE, BOTH, PLACE = (N, C, H, W), (C,), (N, 1, 1, 1), (N, C, 1, 1), (1, 1, H, W)


def batch_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True))


def residual_batch_relu(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.relu(F.batch_norm(h, None, None, w, b, True) + r), h


def group_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 2, w, b))


def modulated_group(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.group_norm(F.silu(x), 3, w, b) * (1 + scale) + shift


def sample_scaled(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x * gain, None, None, w, None, True)


def placed(x: Tensor, place: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x + place, 2, w, b)


def scalar_scaled(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(gain * x, None, None, w, None, True) * gain


def instance_plus(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.instance_norm(x, weight=w, bias=b)) + x


def group_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.group_norm(x, 2, w, b))


def gated_group(x: Tensor) -> Tensor:
    h = x + x * torch.sin(x)
    return F.group_norm(h, 1) * F.gelu(h)


def batch_by_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, None, None, True) * F.gelu(w) + b


class Fusion(NamedTuple):
    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    why: str


FUSIONS = (
    Fusion(batch_relu, (FULL, CHANNELS, CHANNELS), "the block of every convolutional network"),
    Fusion(residual_batch_relu, (FULL, FULL, CHANNELS, CHANNELS), "the end of a residual block, and its stream"),
    Fusion(group_silu, (FULL, CHANNELS, CHANNELS), "the block of every diffusion network"),
    Fusion(modulated_group, (FULL, CHANNELS, CHANNELS, BOTH, BOTH), "a scale and a shift of each sample's channels"),
    Fusion(sample_scaled, (FULL, SAMPLE, CHANNELS), "a number for each sample, before the norm"),
    Fusion(placed, (FULL, PLACE, CHANNELS, CHANNELS), "a number for each place: PyTorch sums its gradient"),
    Fusion(scalar_scaled, (FULL, (), CHANNELS), "one number"),
    Fusion(instance_plus, (FULL, CHANNELS, CHANNELS), "a group for each channel"),
    Fusion(group_gelu, (FULL, CHANNELS, CHANNELS), "a formula that has a shorter form, of what is normalized"),
    Fusion(gated_group, (FULL,), "a factor of a sum along lines that has a shorter form"),
    Fusion(batch_by_gelu, (FULL, (C, 1, 1), (C, 1, 1)), "a shorter form that is the same along a line"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.function.__name__)
def test_channel_fused(fusion: Fusion, layout: str, dtype: torch.dtype, device: str) -> None:
    def make(seed: int) -> list[Tensor]:
        tensors = [drawn(shape, 50 * seed + k, dtype, device) for k, shape in enumerate(fusion.shapes)]
        return [t.contiguous(memory_format=FORMATS[layout]) if t.ndim == 4 else t for t in tensors]

    check_fused(warpnorm.fuse(fusion.function), fusion.function, make, 24, 2)


def wide_results(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x + gain * torch.sin(x)
    y = F.instance_norm(h, eps=1e-3)
    return y * x, h, torch.sin(h) + y


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_channel_fused_halves_whose_results_are_float32(dtype: torch.dtype, device: str) -> None:
    """Across lines: Triton 3.6 does not compile the source as it is first written."""

    def make(seed: int) -> list[Tensor]:
        return [drawn((2, 128, 16), 2 * seed, dtype, device).mT, drawn((1, 1, 1), 2 * seed + 1, torch.float32, device)]

    check_fused(warpnorm.fuse(wide_results), wide_results, make, 24, 2)


def test_channel_fused_lines_that_do_not_fit_in_registers(device: str) -> None:
    """Rows in one piece, whose parameters are summed along lines also where they are walked."""
    leaves = [
        drawn(shape, k, torch.float64, device).requires_grad_() for k, shape in enumerate(((2, 2, 4095), (2,), (2,)))
    ]
    grad = drawn((2, 2, 4095), 3, torch.float64, device)

    def gated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.instance_norm(F.silu(x), weight=w, bias=b)

    assert warpnorm.explain(gated, *leaves).backward.plan.pattern == COLUMN  # type: ignore[union-attr]
    found = torch.autograd.grad(warpnorm.fuse(gated)(*leaves), leaves, grad)
    for ours, theirs in zip(found, torch.autograd.grad(gated(*leaves), leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_channel_fused_keeps_the_memory_format(device: str) -> None:
    x = drawn(FULL, 0, torch.float32, device).contiguous(memory_format=torch.channels_last).requires_grad_()
    w, b = (drawn(CHANNELS, k, torch.float32, device) for k in (1, 2))
    output = warpnorm.fuse(group_silu)(x, w, b)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(output.sum(), x)[0].is_contiguous(memory_format=torch.channels_last)


class Block(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    @warpnorm.fuse
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.relu(self.norm(x) + r)


MODULES = {
    "torch_batch": lambda: torch.nn.BatchNorm2d(C),
    "our_batch": lambda: warpnorm.nn.BatchNorm2d(C, momentum=0.3),
    "untracked_batch": lambda: torch.nn.BatchNorm2d(C, track_running_stats=False),
    "torch_group": lambda: torch.nn.GroupNorm(3, C),
    "tracked_instance": lambda: torch.nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("module", MODULES)
def test_channel_fused_modules_and_their_buffers(module: str, training: bool, device: str) -> None:
    plain = MODULES[module]().to(device).train(training)
    fused = Block(copy.deepcopy(plain)).train(training)
    for step in range(3):
        x, r = (drawn(FULL, 2 * step + k, torch.float32, device) for k in range(2))
        found = fused(x, r)
        with settings.override(route="reference"):
            expected = F.relu(plain(x) + r)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(fused.norm.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_channel_fused_evaluation_is_one_launch_without_statistics(device: str) -> None:
    x, r = (drawn(FULL, k, torch.float32, device).requires_grad_() for k in range(2))
    found = warpnorm.explain(Block(MODULES["torch_batch"]().to(device).eval()).forward, x, r)
    assert [name for name, _ in found.forward.launches] == ["column_forward_kernel"]
    assert found.backward is not None
    assert [name for name, _ in found.backward.launches] == ["column_backward_kernel", "column_sum_kernel"]


def test_channel_fused_refusals(device: str) -> None:
    x = drawn(FULL, 0, torch.float32, device)
    block = Block(torch.nn.BatchNorm2d(C, momentum=None).to(device))
    with pytest.raises(warpnorm.FusionError, match=r"channel_fuse_contract.py:\d+: .*momentum=None cannot be fused"):
        block(x, x)
    assert block.norm.num_batches_tracked.item() == 0, "nothing is half done"
    one = drawn((1, C, 1, 1), 0, torch.float32, device)
    mean, variance = torch.zeros(C, device=device), torch.ones(C, device=device)
    with pytest.raises(warpnorm.InputError, match="more than 1 value per channel"):
        warpnorm.fuse(lambda x: F.batch_norm(x, mean, variance, training=True).relu())(one)
    assert mean.eq(0).all()
    assert variance.eq(1).all()
    with pytest.raises(warpnorm.InputError, match="num_groups is 4"):
        warpnorm.fuse(lambda x: F.group_norm(x, 4).relu())(x)


def test_channel_fused_groups_of_a_lone_value(device: str) -> None:
    """Two samples of one value: PyTorch refuses a lone one, and takes these, which are zero."""

    def program(x: Tensor) -> Tensor:
        return F.group_norm(torch.sin(x) + x, 1).exp()

    for shape in ((2, 1), (2, 1, 1), (3, 1, 1, 1)):
        x = drawn(shape, 0, torch.float32, device).requires_grad_()
        output = warpnorm.fuse(program)(x)
        assert output.equal(torch.ones_like(output))
        assert torch.autograd.grad(output.sum(), x)[0].eq(0).all()
    one = drawn((1, 1, 1), 0, torch.float32, device)
    for function in (program, warpnorm.fuse(program)):
        with pytest.raises(ValueError, match="more than 1 value per"):
            function(one)
