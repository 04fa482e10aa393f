"""Norms that ranks share, on a GPU: one process with NCCL, whose exchange has one rank, and two processes on one GPU with
gloo, whose messages go by way of the host while statistics and results are the kernels'."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
from accuracy import assert_no_further
from warpnorm import parallel
from warpnorm.nn import SyncBatchNormReLU2d
from warpnorm.norms import BATCH_NORM, LAYER_NORM, RMS_NORM, Norm
from warpnorm.parallel import split
from warpnorm.problem import COLUMN, FULL, Call
from warpnorm.reference import Affine, Itself

EPS = 1e-5


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not dist.is_nccl_available():
        pytest.skip("NCCL is not there")
    meeting = tmp_path_factory.mktemp("nccl") / "meeting"
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


def call_of(norm: Norm, x: torch.Tensor) -> Call:
    mask: Any = (False, True, *[False] * (x.ndim - 2)) if norm is BATCH_NORM else COLUMN
    parameters = 2 if norm.is_centered else 1
    return Call(norm, 1, EPS, Itself(), Affine(True, parameters == 2), (FULL, *[mask] * parameters), (x.dtype,))


def plain(norm: Norm, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    if norm is BATCH_NORM:
        return F.batch_norm(x, None, None, *parameters, training=True, eps=EPS)
    function: Any = F.layer_norm if norm is LAYER_NORM else F.rms_norm
    return function(x, x.shape[-1:], *parameters, eps=EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "shape", "is_channels_last"),
    [
        (BATCH_NORM, (8, 24, 30, 30), False), (BATCH_NORM, (8, 24, 30, 30), True), (BATCH_NORM, (500, 48), False),
        (LAYER_NORM, (3, 50, 1000), False), (LAYER_NORM, (7, 40000), False), (RMS_NORM, (3, 50, 1024), False),
    ],
)  # fmt: skip
def test_one_rank_by_nccl(
    nccl: None, device: str, norm: Norm, shape: tuple[int, ...], is_channels_last: bool, dtype: torch.dtype
) -> None:
    """Three steps forward and three backward give what one kernel would."""
    x = (torch.randn(shape, device=device) * 2 + 3).to(dtype)
    if is_channels_last:
        x = x.to(memory_format=torch.channels_last)
    size = shape[1] if norm is BATCH_NORM else shape[-1]
    parameters = [torch.randn(size, device=device, requires_grad=True) for _ in range(1 + norm.is_centered)]
    spread = [p.view(-1, *[1] * (len(shape) - 2)) if norm is BATCH_NORM else p for p in parameters]
    x.requires_grad_()
    (output,), _ = split.normalize(call_of(norm, x), [x, *spread], None, True)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, [x, *parameters], grad)
    expected = []
    for kind in (torch.float64, torch.float32):
        leaves = [t.detach().to(kind, copy=True).requires_grad_() for t in (x, *parameters)]
        alone = plain(norm, *leaves)
        expected.append([alone, *torch.autograd.grad(alone, leaves, grad.to(kind))])
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    for name, ours, true, torchs in zip(names, (output, *found), *expected, strict=False):
        assert_no_further(name, ours, true, torchs.to(ours.dtype))


def whole_and_part(rank: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, device="cuda")
    cut = shape[0] // 3
    return x, x[:cut] if rank == 0 else x[cut:]


def assert_all(found: list[Any], truth: list[Any], theirs: list[Any]) -> None:
    for k, (ours, true, torchs) in enumerate(zip(found, truth, theirs, strict=True)):
        assert_no_further(f"{k}", ours, true, torchs)


def batches(rank: int, world: int) -> None:
    """An uneven batch, fused with a residual, and its running statistics."""
    for is_channels_last in (False, True):
        x, mine = whole_and_part(rank, 12, 16, 24, 24)
        residual, of_mine = whole_and_part(rank, 12, 16, 24, 24)
        if is_channels_last:
            mine, of_mine = (t.to(memory_format=torch.channels_last) for t in (mine, of_mine))
        norm = SyncBatchNormReLU2d(16).cuda()
        leaves = [t.detach().clone().requires_grad_() for t in (mine, of_mine)]
        output = norm(*leaves)
        assert "SplitNormalization" in type(output.grad_fn).__name__
        output.square().sum().backward()
        part = slice(0, 4) if rank == 0 else slice(4, None)
        found = [output, *(leaf.grad for leaf in leaves), norm.running_mean, norm.running_var]
        expected = []
        for kind in (torch.float64, torch.float32):
            alone = torch.nn.BatchNorm2d(16, device="cuda", dtype=kind)
            wide = [t.to(kind, copy=True).requires_grad_() for t in (x, residual)]
            theirs = F.relu(alone(wide[0]) + wide[1])
            theirs.square().sum().backward()
            expected.append([theirs[part], *(t.grad[part] for t in wide), alone.running_mean, alone.running_var])
        assert_all(found, *expected)


def columns(rank: int, world: int) -> None:
    """A hidden dimension in uneven parts."""
    for shared, plain_norm in ((parallel.layer_norm, F.layer_norm), (parallel.rms_norm, F.rms_norm)):
        x, weight = torch.randn(6, 30, 3000, device="cuda"), torch.randn(3000, device="cuda")
        part = slice(0, 1000) if rank == 0 else slice(1000, None)
        leaves = [t[..., part].clone().requires_grad_() for t in (x, weight)]
        output = shared(leaves[0], leaves[0].shape[-1:], leaves[1], eps=EPS)
        assert "SplitNormalization" in type(output.grad_fn).__name__
        output.pow(3).sum().backward()
        expected = []
        for kind in (torch.float64, torch.float32):
            wide = [t.to(kind, copy=True).requires_grad_() for t in (x, weight)]
            theirs = plain_norm(wide[0], (3000,), wide[1], eps=EPS)
            theirs.pow(3).sum().backward()
            expected.append([t[..., part] for t in (theirs, *(leaf.grad for leaf in wide))])
        assert_all([output, *(leaf.grad for leaf in leaves)], *expected)


def test_two_ranks_by_gloo(tmp_path: Path) -> None:
    told = ranks.run([batches, columns], 2, tmp_path, timeout=60)
    assert not any(told.values()), told
