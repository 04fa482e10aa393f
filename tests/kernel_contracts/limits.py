"""Checks of tensors so large that nothing of their size is there in float64: by slices, of all elements."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import warpnorm
from warpnorm.norms import LAYER_NORM, Norm

SLICE = 1 << 26  # elements in float64 at a time
WEIGHT, BIAS = 1.5, 0.25


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of 16 bits: one rounding, and what float32 lost on the way."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=eps, rtol=eps)


def check_one_column(norm: Norm, rows: int, device: str) -> None:
    """A value is its own mean, and its own root mean square but for eps, which is 1: rstd is (x² + 1) ** -0.5 or 1, and
    xhat's slope its third power or 0."""
    is_centered = norm is LAYER_NORM
    function = warpnorm.layer_norm if is_centered else warpnorm.rms_norm
    input, grad = (torch.empty(rows, 1, dtype=torch.float16, device=device).normal_().abs_() for _ in range(2))
    leaves = [input, *(torch.tensor([value], device=device) for value in (WEIGHT, BIAS)[: 1 + is_centered])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output, *statistics = function(leaves[0], (1,), *leaves[1:], eps=1.0, return_stats=True)
    grad_input, *found = torch.autograd.grad(output, leaves, grad)
    output, input = output.detach(), input.detach()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, rows, SLICE):
        here = slice(start, start + SLICE)
        x, g = input[here].double(), grad[here].double()
        rstd = torch.ones_like(x) if is_centered else (x * x + 1).rsqrt()
        xhat = torch.zeros_like(x) if is_centered else x * rstd
        assert_close(output[here], WEIGHT * xhat + (BIAS if is_centered else 0))
        assert_close(grad_input[here], torch.zeros_like(x) if is_centered else WEIGHT * g * rstd**3)
        for statistic, expected in zip(statistics, (x, rstd) if is_centered else (rstd,), strict=True):
            torch.testing.assert_close(statistic[here].double(), expected, atol=1e-6, rtol=1e-6)
        sums += torch.stack([(g * xhat).sum(), g.sum()])
    for mine, exact in zip(found, sums, strict=False):
        assert float((mine.double() - exact).abs()) <= 1e-5 * rows


@dataclass(frozen=True)
class Batch:
    """`groups`: of GroupNorm, or 0 for BatchNorm in training."""

    name: str
    shape: tuple[int, ...]
    why: str
    is_last: bool = False
    groups: int = 0


BATCHES = [
    Batch("images", (70, 64, 1024, 1024), "more than 2^32 elements"),
    Batch("channels_last", (70, 64, 1024, 1024), "and across the rows", is_last=True),
    Batch("samples", ((1 << 26) + 3, 64), "2^32 of two dimensions"),
    Batch("one_channel", (520, 1, 2048, 2048), "more than 2^31 elements are one row"),
    Batch("groups", (3, 32, 6701, 6701), "more than 2^32, of an odd size", groups=4),
    Batch("one_group", (1, 2, (1 << 30) + 24), "more than 2^31 elements are one row, in two pieces", groups=1),
]


def rows_of(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(before, rows, after), a view."""
    if batch.groups:
        return tensor.view(1, batch.shape[0] * batch.groups, -1)
    return tensor.flatten(2) if tensor.ndim > 2 else tensor.unsqueeze(2)


def slices(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Of (before, rows, after), in float64."""
    before, rows, after = tensors[0].shape
    width = max(1, min(after, SLICE // rows))
    height = max(1, min(before, SLICE // (rows * width)))
    for i in range(0, before, height):
        for j in range(0, after, width):
            yield [tensor[i : i + height, :, j : j + width].double() for tensor in tensors]


def check_batch(batch: Batch, device: str) -> None:
    layout = torch.channels_last if batch.is_last else torch.contiguous_format
    x, grad = (
        torch.empty(batch.shape, dtype=torch.bfloat16, device=device, memory_format=layout).normal_(0.5)
        for _ in range(2)
    )
    x.requires_grad_()
    rows = batch.shape[0] * batch.groups or batch.shape[1]
    parameters = [torch.linspace(0.5, 1.5, rows, device=device).requires_grad_() for _ in range(2)]
    averaged = [torch.zeros(rows, device=device), torch.ones(rows, device=device)]
    if batch.groups:
        output, parameters = warpnorm.group_norm(x, batch.groups), []
    else:
        output = warpnorm.batch_norm(x, *averaged, *parameters, training=True, momentum=1.0)
    gradients = torch.autograd.grad(output, [x, *parameters], grad)
    x, found, grad, grad_x = (rows_of(tensor.detach(), batch) for tensor in (x, output, grad, gradients[0]))
    count = x.numel() // rows

    def spread(row: torch.Tensor) -> torch.Tensor:
        return row[:, None]

    mean = sum(part.sum((0, 2)) for (part,) in slices(x)) / count
    variance = sum((part - spread(mean)).square().sum((0, 2)) for (part,) in slices(x)) / count
    rstd = (variance + 1e-5).rsqrt()
    of_grad, of_product = torch.zeros(2, rows, dtype=torch.float64, device=device)
    for part, g in slices(x, grad):
        of_grad += g.sum((0, 2))
        of_product += (g * (part - spread(mean)) * spread(rstd)).sum((0, 2))
    weight, bias = (p.detach().double() for p in parameters) if parameters else (torch.ones_like(mean), mean * 0)
    for part, g, y, dx in slices(x, grad, found, grad_x):
        xhat = (part - spread(mean)) * spread(rstd)
        torch.testing.assert_close(y, xhat * spread(weight) + spread(bias), atol=0.01, rtol=0.01)
        exact = g - spread(of_grad / count) - xhat * spread(of_product / count)
        torch.testing.assert_close(dx, spread(weight * rstd) * exact, atol=0.01, rtol=0.01)
    for mine, exact in zip(gradients[1:], (of_product, of_grad), strict=False):
        assert float((mine.double() - exact).abs().max()) <= 1e-5 * count
    if not batch.groups:
        torch.testing.assert_close(averaged[0].double(), mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(averaged[1].double(), variance * count / (count - 1), atol=1e-5, rtol=1e-4)
