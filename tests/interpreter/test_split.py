"""The kernels' side of norms that ranks share, with one rank: statistics alone, results by given ones, and gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from warpnorm.norms import BATCH_NORM, LAYER_NORM, RMS_NORM, Norm
from warpnorm.parallel import split
from warpnorm.problem import COLUMN, FULL, Call
from warpnorm.reference import Affine, Itself

EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(norm: Norm, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    if norm is BATCH_NORM:
        return F.batch_norm(x, None, None, *parameters, training=True, eps=EPS)
    function: Any = F.layer_norm if norm is LAYER_NORM else F.rms_norm
    return function(x, x.shape[-1:], *parameters, eps=EPS)


@pytest.mark.parametrize(
    ("norm", "shape", "is_channels_last"),
    [
        (BATCH_NORM, (4, 5, 6, 6), False), (BATCH_NORM, (4, 5, 6, 6), True), (BATCH_NORM, (40, 5), False),
        (LAYER_NORM, (2, 3, 70), False), (LAYER_NORM, (2, 20000), False), (RMS_NORM, (2, 3, 70), False),
    ],
)  # fmt: skip
def test_three_steps_are_one_norm(norm: Norm, shape: tuple[int, ...], is_channels_last: bool) -> None:
    x = torch.randn(shape) * 2 + 3
    if is_channels_last:
        x = x.to(memory_format=torch.channels_last)
    size = shape[1] if norm is BATCH_NORM else shape[-1]
    parameters = [torch.randn(size, requires_grad=True) for _ in range(1 + norm.is_centered)]
    mask: Any = tuple(dim == 1 for dim in range(len(shape))) if norm is BATCH_NORM else COLUMN
    call = Call(norm, 1, EPS, Itself(), Affine(True, norm.is_centered), (FULL, *[mask] * len(parameters)), (x.dtype,))
    spread = [p.view(-1, *[1] * (len(shape) - 2)) if norm is BATCH_NORM else p for p in parameters]
    x.requires_grad_()
    (output,), _ = split.normalize(call, [x, *spread], None, True)
    grad = torch.randn_like(output)
    found = (output, *torch.autograd.grad(output, [x, *parameters], grad))
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    expected = plain(norm, *wide)
    for ours, true in zip(found, (expected, *torch.autograd.grad(expected, wide, grad.double())), strict=True):
        off = (ours.detach().double() - true.detach()).norm() / true.detach().norm()
        assert float(off) < 4e-7
