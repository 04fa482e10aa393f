"""The norms and their gradients as the definitions read, in more precision than float64; PyTorch's own answer; and the
one tolerance rule: an error no larger than PyTorch's in the same dtype, plus one rounding of the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import warpnorm

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS: dict[str, Callable[..., Any]] = {"layer_norm": warpnorm.layer_norm, "rms_norm": warpnorm.rms_norm}
PYTORCH: dict[str, Callable[..., torch.Tensor]] = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}
Number = torch.Tensor | float
Wide = np.ndarray  # of np.longdouble


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Arguments:
    """One call of one norm. `eps=None` is the default of the function; `bias` is layer_norm's alone."""

    norm: str
    input: torch.Tensor
    shape: tuple[int, ...]
    weight: Number | None = None
    bias: torch.Tensor | None = None
    eps: float | None = None
    weight_offset: float = 0.0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.input, self.weight, self.bias) if isinstance(t, torch.Tensor)]

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if any(t.dtype == torch.float64 for t in self.tensors) else torch.float32

    def to(self, dtype: torch.dtype) -> "Arguments":
        """Tensors of their own in another dtype, to differentiate by where the originals are."""

        def convert(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)

        return replace(self, input=convert(self.input), weight=convert(self.weight), bias=convert(self.bias))


def ours(a: Arguments, **keywords: Any) -> Any:
    if a.norm == "layer_norm":
        keywords["bias"] = a.bias
    if a.eps is not None:
        keywords["eps"] = a.eps
    if a.weight_offset:
        keywords["weight_offset"] = a.weight_offset
    if "normalized_dim" not in keywords:
        keywords.setdefault("normalized_shape", a.shape)
    return FUNCTIONS[a.norm](a.input, weight=a.weight, **keywords)


def eps_of(a: Arguments) -> float:
    if a.eps is not None:
        return a.eps
    if a.norm == "layer_norm":
        return 1e-5
    return torch.finfo(torch.float64 if a.input.dtype == torch.float64 else torch.float32).eps


def widen(value: torch.Tensor | float) -> Wide:
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.longdouble)


def truth(a: Arguments, grad_output: torch.Tensor | None = None) -> dict[str, Wide]:
    """Output and statistics; given the gradient of the output, also that of every operand."""
    dims = tuple(range(-len(a.shape), 0))

    def mean(values: Wide) -> Wide:
        return values.sum(dims, keepdims=True) / np.longdouble(prod(a.shape))

    with np.errstate(all="ignore"):  # rows without elements, NaN and infinity
        c = widen(a.input)
        results = {}
        if a.norm == "layer_norm":
            results["mean"] = mean(c)
            c = c - results["mean"]
        rstd = results["rstd"] = 1 / np.sqrt(mean(c * c) + np.longdouble(eps_of(a)))
        xhat = c * rstd
        weight = np.longdouble(1) if a.weight is None else widen(a.weight) + np.longdouble(a.weight_offset)
        results["output"] = xhat * weight + (0 if a.bias is None else widen(a.bias))
        if grad_output is None:
            return results
        grad = widen(grad_output)
        grad_xhat = grad * weight
        grad_c = grad_xhat - xhat * mean(grad_xhat * xhat)
        if a.norm == "layer_norm":
            grad_c = grad_c - mean(grad_xhat)
        rows = tuple(range(c.ndim - len(dims)))
        return results | {
            "grad_input": grad_c * rstd,
            "grad_weight": (grad * xhat).sum(None if np.ndim(weight) == 0 else rows),
            "grad_bias": grad.sum(rows),
        }


def pytorch(a: Arguments) -> torch.Tensor:
    """PyTorch's operator as it stands."""
    extra = {"bias": a.bias} if a.norm == "layer_norm" else {}
    eps = eps_of(a) if a.norm == "layer_norm" else a.eps
    return PYTORCH[a.norm](a.input, a.shape, a.weight, **extra, eps=eps)


def pytorch_wide(a: Arguments) -> torch.Tensor:
    """PyTorch's operator in the dtype of computation, for arguments it does not take: the result is not rounded, so that
    the rule leaves one rounding and nothing more."""
    weight = a.weight
    if weight is not None:
        weight = (torch.as_tensor(weight, dtype=a.compute) + a.weight_offset).expand(a.shape)
    wide = replace(a, input=a.input.to(a.compute), weight=weight, eps=eps_of(a), weight_offset=0.0)
    return pytorch(replace(wide, bias=None if a.bias is None else a.bias.to(a.compute)))


def run(a: Arguments, output: torch.Tensor, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """An output of these arguments, and the gradient of every operand that wants one."""
    operands = {"grad_input": a.input, "grad_weight": a.weight, "grad_bias": a.bias}
    wanted = {n: t for n, t in operands.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    results = {"output": output.detach()}
    if wanted:
        found = torch.autograd.grad(output, list(wanted.values()), grad_output.to(output.dtype))
        results |= dict(zip(wanted, found, strict=True))
    return results


def run_pytorch(
    a: Arguments, operator: Callable[..., torch.Tensor], grad_output: torch.Tensor
) -> dict[str, torch.Tensor]:
    if operator is pytorch_wide:
        a = replace(a, eps=eps_of(a)).to(a.compute)
    return run(a, operator(a), grad_output)


def row_errors(found: torch.Tensor, true: Wide, dims: int) -> tuple[Wide, Wide]:
    """The largest error of every row and its largest true value; the last `dims` dimensions are a row. What is NaN, or
    infinite once rounded, must be so exactly: it counts as no error, or as an infinite one."""
    cols = prod(true.shape[true.ndim - dims :]) if true.size else 1
    result, exact = widen(found).reshape(-1, cols), true.reshape(-1, cols)
    rounded = widen(torch.from_numpy(exact.astype(np.float64)).to(found.dtype))
    special = ~np.isfinite(rounded)
    is_same = (result == rounded) | (np.isnan(result) & np.isnan(rounded))
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(result - exact), nan=np.inf)
    error = np.where(special, np.where(is_same, 0.0, np.inf), error)
    return error.max(1, initial=0), np.abs(np.where(special, 0, exact)).max(1, initial=0)


def assert_accurate(found: torch.Tensor, theirs: torch.Tensor, true: Wide, dims: int, what: str = "output") -> None:
    """The rule, for every row by itself."""
    assert found.shape == true.shape, f"{what} has shape {tuple(found.shape)}, not {tuple(true.shape)}"
    error, largest = row_errors(found, true, dims)
    allowed = row_errors(theirs, true, dims)[0] + torch.finfo(found.dtype).eps / 2 * largest
    for row in np.flatnonzero(error > allowed):
        raise AssertionError(f"{what}: row {row} is off by {error[row]:.3e}, but {allowed[row]:.3e} is allowed")


def check(a: Arguments, theirs: Callable[..., torch.Tensor], grad_output: torch.Tensor, **keywords: Any) -> None:
    """Output and gradients of every operand that wants one, by the rule and in the dtypes of what they belong to."""
    true = truth(a, grad_output)
    expected = run_pytorch(a, theirs, grad_output)
    for name, found in run(a, ours(a, **keywords), grad_output).items():
        assert found.dtype == getattr(a, name.removeprefix("grad_"), a.input).dtype
        assert_accurate(found, expected[name], true[name], row_dims(a, name), name)


def row_dims(a: Arguments, name: str) -> int:
    """How many dimensions of this result are a row: a parameter is one row, a scalar too."""
    if name in ("output", "grad_input"):
        return len(a.shape)
    return getattr(a, name.removeprefix("grad_")).ndim


def random(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, requires_grad: bool = False
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
