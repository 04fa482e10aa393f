"""One way to run a norm forward and backward, shared by the contract tests: by our kernels and by PyTorch's operator in
the same dtype, each held against the truth."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import warpnorm
from accuracy import Error, Truth, assert_accurate, error_of, exact
from warpnorm import pipeline
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.plan.plan import Plan
from warpnorm.problem import COLUMN, FULL, Call
from warpnorm.reference import Affine, Itself

NORMS = (LAYER_NORM, RMS_NORM)
EPS = 1e-5


class Results(NamedTuple):
    """An output, and the gradients of the operands in their order."""

    output: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


def operands_for(norm: Norm, input: torch.Tensor, col_dims: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """The input, a weight, and for LayerNorm a bias."""
    generator = torch.Generator().manual_seed(seed)
    shape = input.shape[-col_dims:]
    parameters = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2 if norm.is_centered else 1)
    ]
    return input, *(p.to(input.device, input.dtype) for p in parameters)


def call_for(norm: Norm, col_dims: int, *operands: torch.Tensor) -> Call:
    count = len(operands)
    epilogue, axes = Affine(count > 1, count > 2), (FULL, COLUMN, COLUMN)[:count]
    return Call(norm, col_dims, EPS, Itself(), epilogue, axes, (operands[0].dtype,))


def ours(norm: Norm, col_dims: int, *operands: torch.Tensor) -> torch.Tensor:
    function = warpnorm.layer_norm if norm.is_centered else warpnorm.rms_norm
    shape = operands[0].shape[-col_dims:]
    return function(operands[0], shape, *operands[1:], eps=EPS)


def torchs(norm: Norm, col_dims: int, *operands: torch.Tensor) -> torch.Tensor:
    function = F.layer_norm if norm.is_centered else F.rms_norm
    return function(operands[0], operands[0].shape[-col_dims:], *operands[1:], eps=EPS)


def run(
    function: Callable[..., torch.Tensor],
    norm: Norm,
    col_dims: int,
    operands: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
) -> Results:
    leaves = [operand.detach().requires_grad_() for operand in operands]
    output = function(norm, col_dims, *leaves)
    return Results(output.detach(), torch.autograd.grad(output, leaves, grad))


def gradient_for(input: torch.Tensor, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(input.shape, generator=generator, dtype=torch.float64).to(input.device, input.dtype)


def check_accuracy(
    norm: Norm, col_dims: int, make: Callable[[int], torch.Tensor], run_ours: Callable[..., Results] | None = None
) -> None:
    """Ours on one input against PyTorch's worst of several of the same kind: an error is a property of a way to compute,
    and one small input may be easy by chance. `make` gives the input for a seed."""
    input = make(0)
    numel = max(input.numel(), 1)
    draws = min(max(8000 // numel, min(24000 // numel, 8), 3), 200)
    names = ("output", "grad_input", "grad_weight", "grad_bias")[: 3 + norm.is_centered]
    allowed = [Error(0.0, 0.0)] * len(names)
    for seed in range(draws):
        operands = operands_for(norm, make(seed), col_dims, seed + 100)
        grad = gradient_for(operands[0], seed + 200)
        truth = exact(norm, col_dims, operands, grad, EPS)
        theirs = run(torchs, norm, col_dims, operands, grad)
        errors = _errors(theirs, truth)
        allowed = [Error(*map(max, a, e)) for a, e in zip(allowed, errors, strict=True)]
        if seed == 0:
            found = run(ours, norm, col_dims, operands, grad) if run_ours is None else run_ours(operands, grad)
            for result, expected in zip(
                (found.output, *found.gradients), (theirs.output, *theirs.gradients), strict=True
            ):
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            found_errors = _errors(found, truth)
    for name, error, limit in zip(names, found_errors, allowed, strict=True):
        assert_accurate(name, error, limit, input.dtype)


def _errors(results: Results, truth: Truth) -> list[Error]:
    values = (results.output, *results.gradients)
    return [error_of(value, exactly) for value, exactly in zip(values, (truth.output, *truth.gradients), strict=True)]


def run_planned(
    norm: Norm, operands: tuple[torch.Tensor, ...], grad: torch.Tensor, forward: Plan | None, backward: Plan | None
) -> Results:
    """Ours, with plans forced."""
    call = call_for(norm, 1, *operands)
    (output,), statistics = pipeline.forward(call, operands, plan=forward)
    wanted = tuple(range(len(operands)))
    gradients = pipeline.backward(call, operands, (grad,), statistics, wanted, plan=backward)
    return Results(output, tuple(gradients[i] for i in wanted))
