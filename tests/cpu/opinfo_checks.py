"""PyTorch's own samples of the two norms, checked for any device and dtype: forward, gradients and errors. Where the
kernels are to be tried, the caller forces them (`settings.override(route="kernels")`)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from cpu.truth import (
    DTYPES,
    FUNCTIONS,
    Arguments,
    Wide,
    ours,
    pytorch,
    row_dims,
    row_errors,
    run,
    run_pytorch,
    truth,
)

OPERATORS: dict[str, OpInfo] = {
    op.name.removeprefix("nn.functional."): op
    for op in op_db
    if op.name in ("nn.functional.layer_norm", "nn.functional.rms_norm")
}
KINDS = ("sample_inputs", "reference_inputs", "noncontiguous_inputs")
SCALES = 16
assert OPERATORS.keys() == FUNCTIONS.keys()


def supported_dtypes(norm: str, device: str) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in OPERATORS[norm].supported_dtypes(device)]


def samples(norm: str, kind: str, device: str, dtype: torch.dtype) -> Iterator[Arguments]:
    """Every sample as it is, and without weight and bias."""
    torch.manual_seed(0)
    method = "sample_inputs" if kind == "noncontiguous_inputs" else kind
    names = ("shape", "weight", "bias") if norm == "layer_norm" else ("shape", "weight")
    for sample in getattr(OPERATORS[norm], method)(device, dtype, requires_grad=True):
        given = sample.noncontiguous() if kind == "noncontiguous_inputs" else sample
        a = Arguments(norm, given.input, **dict(zip(names, given.args, strict=False)), **given.kwargs)
        yield a
        yield replace(a, weight=None, bias=None)


def check_samples(norm: str, kind: str, device: str, dtype: torch.dtype) -> int:
    """Output and gradients of every sample, by the rule; returns how many there were. They are so small that PyTorch may
    be exact on one by chance: its error is the worst of several scales of the sample, which are rounded differently and
    are otherwise as hard."""
    count = 0
    rounding = torch.finfo(dtype).eps / 2
    for count, a in enumerate(samples(norm, kind, device, dtype), 1):
        grad_output = torch.randn(a.input.shape, generator=torch.Generator().manual_seed(count)).to(device, dtype)
        found = _worst_errors(a, run(a, ours(a), grad_output), truth(a, grad_output))
        allowed = dict.fromkeys(found, 0.0)
        for step in range(SCALES):
            b, scaled = _scaled(a, 1 + step / SCALES), grad_output * (1 + step / SCALES)
            worst = _worst_errors(b, run_pytorch(b, pytorch, scaled), truth(b, scaled))
            allowed = {name: max(error, allowed[name]) for name, error in worst.items()}
        for name, error in found.items():
            limit = allowed[name] + rounding
            assert error <= limit, f"sample {count}: {name} is off by {error:.3e}, but {limit:.3e} is allowed"
    return count


def _scaled(a: Arguments, factor: float) -> Arguments:
    def scale(value: Any) -> Any:
        return (value.detach() * factor).requires_grad_() if isinstance(value, torch.Tensor) else value

    return replace(a, input=scale(a.input), weight=scale(a.weight), bias=scale(a.bias))


def _worst_errors(a: Arguments, results: dict[str, torch.Tensor], true: dict[str, Wide]) -> dict[str, float]:
    """Of each result in its worst row, relative to the largest value of that row."""
    worst = {}
    for name, found in results.items():
        assert (found.shape, found.dtype) == (true[name].shape, a.input.dtype)
        error, largest = row_errors(found, true[name], row_dims(a, name))
        worst[name] = float((error / np.where(largest == 0, 1, largest)).max(initial=0))
    return worst


def check_errors(norm: str, device: str) -> int:
    """Every error input raises what PyTorch raises. layer_norm has none of its own, and is given those of rms_norm."""
    count = 0
    for error in OPERATORS["rms_norm"].error_inputs(device):
        sample = error.sample_input
        shape, weight, eps = sample.args
        keywords: dict[str, Any] = {"normalized_shape": shape, "weight": weight, "eps": eps}
        with pytest.raises(error.error_type):
            OPERATORS[norm].op(sample.input, **keywords)
        with pytest.raises(error.error_type, match=f"^{norm}: "):
            FUNCTIONS[norm](sample.input, **keywords)
        count += 1
    return count
