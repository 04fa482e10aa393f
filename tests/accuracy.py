"""The one tolerance rule, which is that of `warpnorm/fuzz/accuracy.py`, and the truth of norms over rows: computed in
extended precision, so that it is one for float64 too. Errors are taken row by row, relative to the row."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from warpnorm.fuzz.accuracy import Error, why_inaccurate
from warpnorm.norms import Norm

Wide = np.ndarray  # of np.longdouble


class Truth(NamedTuple):
    """An output as (rows, cols), and the gradients of input, weight and bias (a parameter is one row)."""

    output: Wide
    gradients: tuple[Wide, ...]


def widen(tensor: torch.Tensor, cols: int) -> Wide:
    return tensor.detach().double().cpu().numpy().astype(np.longdouble).reshape(-1, cols)


def exact(norm: Norm, col_dims: int, operands: tuple[torch.Tensor, ...], grad: torch.Tensor, eps: float) -> Truth:
    """The definition of the norm and of its gradients, written out; the operands are input, weight and bias, or fewer."""
    cols = operands[0].shape[-col_dims:].numel()
    c, *parameters = (widen(operand, cols) for operand in operands)
    g = widen(grad, cols)
    if norm.is_centered:
        c = c - c.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((c * c).mean(1, keepdims=True) + np.longdouble(eps))
    xhat = c * rstd
    weight = parameters[0] if parameters else np.longdouble(1)
    output = xhat * weight + (parameters[1] if len(parameters) > 1 else 0)
    grad_xhat = g * weight
    grad_c = grad_xhat - xhat * (grad_xhat * xhat).mean(1, keepdims=True)
    if norm.is_centered:
        grad_c = grad_c - grad_xhat.mean(1, keepdims=True)
    sums = ((g * xhat).sum(0, keepdims=True), g.sum(0, keepdims=True))
    return Truth(output, (grad_c * rstd, *sums[: len(parameters)]))


def error_of(result: torch.Tensor, truth: Wide, draws: Wide | None = None) -> Error:
    """`draws`: true values of the same kind, for rows so short that their own size is chance; that of all is theirs."""
    if truth.size == 0:
        return Error(0.0, 0.0)
    error = widen(result, truth.shape[1]) - truth

    def worst(norm: Callable[[Wide], Wide]) -> float:
        scale = norm(truth) if draws is None else np.sqrt((norm(draws) ** 2).mean(0, keepdims=True))
        return float((norm(error) / np.where(scale == 0, 1, scale)).max())

    return Error(worst(lambda rows: np.sqrt((rows * rows).mean(1))), worst(lambda rows: np.abs(rows).max(1)))


def assert_accurate(what: str, ours: Error, torchs: Error, dtype: torch.dtype) -> None:
    """The rule, which is the package's own, so that `warpnorm fuzz` has the same."""
    why = why_inaccurate(what, ours, torchs, dtype)
    assert why is None, why


def assert_no_further(what: str, ours: torch.Tensor, truth: torch.Tensor | Wide, *theirs: torch.Tensor) -> None:
    """The same of tensors of any shape, each taken as one row: of few values chance would decide row by row. Where PyTorch
    has several ways, none of which is better, the worst of them counts."""
    wide = widen(truth, max(truth.numel(), 1)) if isinstance(truth, torch.Tensor) else truth.reshape(1, -1)
    if wide.size == 0:
        return
    errors = [error_of(tensor.reshape(1, -1), wide) for tensor in theirs]
    worst = Error(max(e.mean for e in errors), max(e.largest for e in errors))
    assert_accurate(what, error_of(ours.reshape(1, -1), wide), worst, ours.dtype)
