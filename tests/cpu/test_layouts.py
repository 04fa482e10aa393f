"""Tensors that are no plain memory: what PyTorch's operators take is theirs, the rest is refused in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype
WIDTHS = (64, 2048)  # PyTorch's operators and native code


def parts(width: int) -> list[torch.Tensor]:
    return [torch.randn(3, width), torch.randn(2, width)]


@pytest.mark.parametrize("width", WIDTHS)
def test_nested_rows_are_normalized_by_pytorch(width: int) -> None:
    """Wide ones ended in an internal error of PyTorch's."""
    rows, weight, bias = parts(width), torch.randn(width), torch.randn(width)
    nested = torch.nested.nested_tensor(rows)
    fused = warpnorm.fuse(lambda x: F.layer_norm(x * 2, (width,), weight, bias))
    for found, scale in ((warpnorm.layer_norm(nested, (width,), weight, bias), 1), (fused(nested), 2)):
        for part, row in zip(found.unbind(), rows, strict=True):  # type: ignore[union-attr]
            torch.testing.assert_close(part, F.layer_norm(row * scale, (width,), weight, bias))


@pytest.mark.parametrize("width", WIDTHS)
def test_jagged_rows_are_normalized_by_pytorch(width: int) -> None:
    """PyTorch knows rms_norm of them by its name, and refused our keywords."""
    rows, weight = parts(width), torch.randn(width)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for found in (warpnorm.rms_norm(jagged, (width,), weight), warpnorm.nn.RMSNorm(width)(jagged) * weight):
        for part, row in zip(found.unbind(), rows, strict=True):  # type: ignore[union-attr]
            torch.testing.assert_close(part, F.rms_norm(row, (width,), weight))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "input": (lambda x: warpnorm.layer_norm(x.to_sparse(), x.shape[-1:]), "input has layout torch.sparse_coo"),
    "rms_norm": (lambda x: warpnorm.rms_norm(x.to_sparse(), x.shape[-1:]), "give input.to_dense"),
    "mkldnn": (lambda x: warpnorm.rms_norm(x.to_mkldnn(), x.shape[-1:]), "input has layout torch._mkldnn"),
    "weight": (lambda x: warpnorm.rms_norm(x, x.shape[-1:], x[0].to_sparse()), "weight has layout torch.sparse_coo"),
    "running": (
        lambda x: warpnorm.batch_norm(x.T, x[:, 0].to_sparse(), x[:, 0], training=True),
        "running_mean has layout torch.sparse_coo",
    ),
    "nested": (lambda x: warpnorm.rms_norm(torch.nested.nested_tensor([x]), x.shape[-1:]), "input is a nested tensor"),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_can_normalize_is_refused_in_words(case: str, width: int) -> None:
    call, said = REFUSED[case]
    with pytest.raises(InputError, match=said):
        call(torch.randn(4, width))
