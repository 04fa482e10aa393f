"""One way to run a norm by channel forward and backward, shared by its contract tests: by our kernels and by PyTorch's
operator, each held against the truth of `cpu/channel_truth.py` by the rule of `accuracy.py`. A row is a channel, or a
group of channels of one sample; a parameter is one row."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db

from accuracy import Error, assert_accurate, error_of
from cpu.channel_truth import TENSORS, Arguments, ours, pytorch, rows_of, run, truth
from warpnorm import pipeline
from warpnorm.norms import BATCH_NORM, FIXED_NORM, GROUP_NORM, Norm
from warpnorm.plan.plan import Plan
from warpnorm.problem import FULL, Axes, Call, compute_dtype
from warpnorm.reference import Affine, FixedAffine, Itself

BUFFERS = ("running_mean", "running_var")
WHOLE = ("output", "grad_input")


@dataclass(frozen=True)
class Mode:
    """A norm by channel and how it is called. `groups`: how many there are of so many channels."""

    name: str
    norm: str
    groups: Callable[[int], int] = lambda channels: 0
    is_training: bool = True

    def __str__(self) -> str:
        return self.name


def several(channels: int) -> int:
    """Groups of several channels, where that can be."""
    return next((count for count in (2, 3, 5) if channels % count == 0), 1)


BATCH = Mode("batch", "batch_norm")
EVALUATION = Mode("evaluation", "batch_norm", is_training=False)
ONE_GROUP = Mode("one_group", "group_norm", lambda channels: 1)
GROUPS = Mode("groups", "group_norm", several)
INSTANCE = Mode("instance", "instance_norm")
MODES = (BATCH, EVALUATION, ONE_GROUP, GROUPS, INSTANCE)


@dataclass(frozen=True)
class Layout:
    """An input of `shape`, seen through `view`."""

    name: str
    shape: tuple[int, ...]
    why: str
    view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def make(self, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
        return self.view(random(self.shape, dtype, device, seed))

    def __str__(self) -> str:
        return self.name


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d)


def arguments(mode: Mode, input: torch.Tensor, dtype: torch.dtype | None = None, seed: int = 1) -> Arguments:
    """A call with all its parameters, which are leaves in `dtype`, or in that of the input."""
    channels, dtype = input.shape[1], dtype or input.dtype
    weight, bias, mean, variance = (random((channels,), dtype, str(input.device), 4 * seed + i) for i in range(4))
    fixed: dict[str, Any] = {} if mode.is_training else {"running_mean": mean, "running_var": variance.abs() + 0.5}
    input, weight, bias = (tensor.detach().requires_grad_() for tensor in (input, weight, bias))
    return Arguments(mode.norm, input, mode.groups(channels), weight, bias, is_training=mode.is_training, **fixed)


def gradient_for(a: Arguments, seed: int = 2) -> torch.Tensor:
    return random(tuple(a.input.shape), a.input.dtype, str(a.input.device), seed)


def run_ours(a: Arguments, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """With running statistics of its own."""
    own: dict[str, Any] = {n: None if getattr(a, n) is None else getattr(a, n).clone() for n in BUFFERS}
    a = replace(a, **own)
    return run(a, ours(a), grad_output)


def run_torchs(a: Arguments, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """PyTorch in the same dtype; where there are several, in that of computation, and nothing is rounded."""
    tensors = {name: tensor for name in TENSORS if (tensor := getattr(a, name)) is not None}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = compute_dtype(list(dtypes)) if len(dtypes) > 1 else a.input.dtype
    own: dict[str, Any] = {n: t.detach().to(dtype).requires_grad_(t.requires_grad) for n, t in tensors.items()}
    own |= {name: own[name].clone() for name in BUFFERS if name in own}
    a = replace(a, **own)
    return run(a, pytorch(a), grad_output)


Run = Callable[[Arguments, torch.Tensor], dict[str, torch.Tensor]]


def check_accuracy(make: Callable[[int], Arguments], run_ours: Run = run_ours) -> None:
    """Ours on one call against PyTorch's worst of several of the same kind: an error is a property of a way to compute, and
    one small input may be easy by chance. `make` gives the call for a seed."""
    calls = [make(seed) for seed in range(min(max(40_000 // make(0).input.numel(), 6), 40))]
    grads = [gradient_for(a, seed + 200) for seed, a in enumerate(calls)]
    _check(calls, grads, run_ours)


def check_sample(sample: Arguments) -> None:
    """The same of one sample at several scales: as hard, but rounded differently. Its rows are so short that ours too is
    judged by the middle one of three."""
    factors = [1 + step / 64 for step in range(64)]
    grad_output = gradient_for(sample)
    calls = [_scaled(sample, factor) for factor in factors]
    _check(calls, [grad_output * factor for factor in factors], run_ours, ours_too=3)


def _check(calls: list[Arguments], grads: list[torch.Tensor], run_ours: Run, ours_too: int = 1) -> None:
    """PyTorch on all of the calls, ours on the first of them."""
    truths = [truth(a, grad_output) for a, grad_output in zip(calls, grads, strict=True)]
    theirs = [run_torchs(a, grad_output) for a, grad_output in zip(calls, grads, strict=True)]
    found = [run_ours(calls[i], grads[i]) for i in range(ours_too)]
    assert found[0].keys() == theirs[0].keys()
    for name, result in found[0].items():
        own = getattr(calls[0], name.removeprefix("grad_"), calls[0].input)
        assert (result.dtype, result.shape) == (own.dtype, own.shape), name
        exact = [_rows(a, name, true[name]) for a, true in zip(calls, truths, strict=True)]
        every = None if name in WHOLE else np.concatenate(exact)  # a parameter is as short as there are channels
        of_theirs, of_ours = (
            [error_of(_rows(a, name, r[name]), true, every) for a, r, true in zip(calls, results, exact, strict=False)]
            for results in (theirs, found)
        )
        error = Error(*map(median, zip(*of_ours, strict=True)))
        assert_accurate(name, error, Error(*map(max, zip(*of_theirs, strict=True))), result.dtype)


def _rows(a: Arguments, name: str, values: Any) -> Any:
    return rows_of(a, values) if name in WHOLE else values.reshape(1, -1)


def call_of(a: Arguments) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """The call that the function would make, with its operands."""
    dims = a.input.ndim - 2
    fixed = () if a.is_training else (a.running_mean, a.running_var)
    parameters = [p.view(-1, *[1] * dims) for p in (*fixed, a.weight, a.bias) if p is not None]
    has = (a.weight is not None, a.bias is not None)
    norm: Norm = GROUP_NORM if a.norm != "batch_norm" else BATCH_NORM if a.is_training else FIXED_NORM
    epilogue: Any = Affine(*has) if a.is_training else FixedAffine(a.eps, *has)
    groups = a.input.shape[1] if a.norm == "instance_norm" else a.groups
    mask: Axes = (False, True, *[False] * dims)
    axes = (FULL, *[mask] * len(parameters))
    call = Call(norm, 1, a.eps, Itself(), epilogue, axes, (a.input.dtype,), groups=groups)
    return call, (a.input.detach(), *(parameter.detach() for parameter in parameters))


def run_planned(
    a: Arguments, grad_output: torch.Tensor, forward: Plan | None, backward: Plan | None
) -> dict[str, torch.Tensor]:
    """Ours, with plans forced."""
    call, operands = call_of(a)
    (output,), statistics = pipeline.forward(call, operands, plan=forward)
    names = ("grad_input", *(() if a.is_training else (None, None)), "grad_weight", "grad_bias")
    wanted = {i: name for i, name in enumerate(names) if name is not None}
    gradients = pipeline.backward(call, operands, (grad_output,), statistics, tuple(wanted), plan=backward)
    results = {"output": output, "grad_input": gradients[0]}
    results |= {name: gradients[i].view(-1) for i, name in wanted.items() if i}
    return results if a.is_training else results | {n: getattr(a, n) for n in BUFFERS}


def samples(norm: str, kind: str, device: str, dtype: torch.dtype) -> Iterator[Arguments]:
    """PyTorch's own samples that have elements, one of each shape and setting."""
    torch.manual_seed(0)
    seen = set()
    names = ("groups",) if norm == "group_norm" else ("running_mean", "running_var", "weight", "bias")
    operator = next(op for op in op_db if op.name == f"nn.functional.{norm}" and not op.variant_test_name)
    method = "sample_inputs" if kind == "noncontiguous_inputs" else kind
    for sample in getattr(operator, method)(device, dtype, requires_grad=True):
        given = sample.noncontiguous() if kind == "noncontiguous_inputs" else sample
        keywords = dict(zip(names, given.args, strict=False)) | given.kwargs
        flags = [keywords.pop(flag) for flag in ("training", "use_input_stats") if flag in keywords]
        default = norm != "batch_norm"  # PyTorch's, where the sample says nothing
        a = Arguments(norm, given.input, **keywords, is_training=flags[0] if flags else default)
        kind_of = str([tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in vars(a).values()])
        if a.input.numel() and kind_of not in seen:
            seen.add(kind_of)
            yield a


def _scaled(a: Arguments, factor: float) -> Arguments:
    def scale(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """In the same strides, gaps included."""
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        own = (memory * factor).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return own.requires_grad_(tensor.requires_grad)

    own: dict[str, Any] = {name: scale(getattr(a, name)) for name in TENSORS}
    return replace(a, **own)
