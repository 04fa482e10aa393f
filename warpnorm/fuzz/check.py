"""What is wrong with a call, if anything: it changes its inputs, raises where PyTorch does not, has another dtype or shape,
other bits at a second time, or is further from float64 than the rule allows."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from warpnorm import pipeline, settings
from warpnorm.fuzz.accuracy import Error, why_inaccurate
from warpnorm.fuzz.case import Case
from warpnorm.problem import compute_dtype

DRAWS = 24  # of PyTorch's error, where one is not enough
OWN_DRAWS = 3
REPEATED = 4  # one in so many cases is run twice
EPS_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)

Named = dict[str, torch.Tensor]


class WrongError(Exception):
    """What is wrong with a case, in one sentence."""


def forced_route(device: str) -> str:
    """The way to compute that is to be tested on a device."""
    if device == "cuda" or settings.is_interpreting():
        return "kernels"
    return "native" if pipeline.has_compiler() else "auto"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, and PyTorch has one thread: most tensors are too small for a second."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    # as torch.use_deterministic_algorithms, which would import PyTorch's compiler
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows without elements, and functions that are captured often
            yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_num_threads(threads)


def check(case: Case, device: str) -> None:
    """Raises what is wrong."""
    operands = case.make(case.seed, device)
    before = [operand.clone() for operand in operands]
    theirs, refusal = _attempt(lambda: _theirs(case, operands))
    ours, error = _attempt(lambda: _ours(case, operands))
    if error is not None and refusal is None:
        raise WrongError(f"raises {type(error).__name__}: {error}") from error
    if not all(a.equal(b) for a, b in zip(operands, before, strict=True)):
        raise WrongError("changed its inputs")
    if ours is None or theirs is None:
        return  # both refuse, or ours takes more than PyTorch does
    _check_kinds(case, ours, theirs)
    if case.seed % REPEATED == 0:
        again = _ours(case, operands)
        for name, result in ours.items():
            if not torch.equal(_bits(result), _bits(again[name])):
                raise WrongError(f"{name}: other bits at a second time")
    truth, narrowed = _truth(case, operands), _narrowed(operands)
    if narrowed is not operands:
        theirs = _theirs(case, narrowed)
    narrow = truth if narrowed is operands else _truth(case, narrowed)
    if any(_why_wrong(name, [ours], [truth], [theirs], [narrow]) for name in ours):
        _check_closely(case, operands)


def names_of(case: Case) -> list[str]:
    """Of the results, as they are reported."""
    results, _ = _attempt(lambda: _theirs(case, case.make(case.seed, "cpu")))
    return list(results or ())


def _check_closely(case: Case, operands: list[torch.Tensor]) -> None:
    """An error is a property of a way to compute, and one small input may be easy by chance: ours is the middle one of
    several, PyTorch's the worst of many. All are as hard as the first, but rounded differently: the same at other scales."""
    ours, truths, theirs, narrow = [], [], [], []
    for k in range(DRAWS):
        scaled = [_scaled(operand, 1 + k / 64) for operand in operands]
        if k < OWN_DRAWS:
            ours.append(_ours(case, scaled))
            truths.append(_truth(case, scaled))
        scaled = _narrowed(scaled)
        theirs.append(_theirs(case, scaled))
        narrow.append(_truth(case, scaled))
    for name in ours[0]:
        why = _why_wrong(name, ours, truths, theirs, narrow)
        if why is not None:
            raise WrongError(why)


def _narrowed(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The truth is no better than float64, where PyTorch is held against it in float32."""
    if all(operand.dtype != torch.float64 for operand in operands):
        return operands
    return [operand.float() if operand.dtype == torch.float64 else operand for operand in operands]


def _why_wrong(
    name: str, ours: list[Named], truths: list[Named], theirs: list[Named], narrow: list[Named]
) -> str | None:
    """`narrow` is the truth that theirs is held against."""
    dtype = ours[0][name].dtype
    if ours[0][name].numel() == 0:
        return None
    if not dtype.is_floating_point:
        return None if ours[0][name].cpu().equal(truths[0][name]) else f"{name}: not equal"
    # where the true value or PyTorch's is past the end of the dtype there is nothing to compare
    masks = [t[name].to(dtype).isfinite() for t in truths]
    masks = [m & p[name].cpu().isfinite() for m, p in zip(masks, theirs, strict=False)]
    for result, mask in zip(ours, masks, strict=False):
        if not result[name].cpu().isfinite()[mask].all():
            return f"{name}: not finite, but it is in PyTorch"
    mask = torch.stack(masks).all(0)
    if not mask.any():
        return None
    sizes = torch.stack([t[name][mask] for t in narrow]).abs()
    scale = Error(float(sizes.square().mean().sqrt()) or 1.0, float(sizes.max()) or 1.0)
    of_ours = [_error(r[name], t[name], mask, scale, dtype) for r, t in zip(ours, truths, strict=True)]
    of_theirs = [_error(r[name], t[name], mask, scale, dtype) for r, t in zip(theirs, narrow, strict=True)]
    unit = 2 * EPS_RATIO if dtype == torch.float64 else 1.0
    # The truth of float64 is off itself, by roundings of its sums, which PyTorch's of float32 on a CPU have not
    own = 4 * torch.finfo(dtype).eps / 2 if dtype == torch.float64 else 0.0
    allowed = Error(*(unit * max(kind) + own for kind in zip(*of_theirs, strict=True)))
    return why_inaccurate(name, Error(*map(median, zip(*of_ours, strict=True))), allowed, dtype)


def _error(result: torch.Tensor, truth: torch.Tensor, mask: torch.Tensor, scale: Error, dtype: torch.dtype) -> Error:
    error = (result.cpu().double() - truth)[mask]
    error = error[error.isfinite()]  # PyTorch's may be past the end at another scale
    info = torch.finfo(dtype)
    error[error.abs() <= info.tiny * info.eps] = 0  # one rounding, where the dtype has nothing in between
    if error.numel() == 0:
        return Error(0.0, 0.0)
    return Error(float(error.square().mean().sqrt()) / scale.mean, float(error.abs().max()) / scale.largest)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """In the same strides, overlaps included."""
    if factor == 1:
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return (memory * factor).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _check_kinds(case: Case, ours: Named, theirs: Named) -> None:
    if list(ours) != list(theirs):
        raise WrongError(f"results are {', '.join(ours)}, but PyTorch's {', '.join(theirs)}")
    for name, result in ours.items():
        if result.shape != theirs[name].shape:
            raise WrongError(f"{name}: shape {tuple(result.shape)}, but PyTorch's is {tuple(theirs[name].shape)}")
        wanted = theirs[name].dtype
        if case.is_widened:
            wanted = case.operands[0].dtype if name == "output 0" else result.dtype
        if name.startswith("gradient"):
            wanted = case.operands[int(name.split("x")[1])].dtype
        if result.dtype != wanted:
            raise WrongError(f"{name}: dtype {result.dtype}, but it should be {wanted}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is like NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _attempt(run: Callable[[], Named]) -> tuple[Named | None, Exception | None]:
    try:
        return run(), None
    except REFUSALS as error:
        return None, error


def _ours(case: Case, operands: Sequence[torch.Tensor]) -> Named:
    with settings.override(route=case.route):
        return _results(case, case.of_ours, operands)


def _theirs(case: Case, operands: Sequence[torch.Tensor]) -> Named:
    if case.is_widened:
        dtype = compute_dtype([operand.dtype for operand in operands])
        operands = [operand.to(dtype) for operand in operands]
    return _results(case, case.of_theirs, operands)


def _truth(case: Case, operands: Sequence[torch.Tensor]) -> Named:
    return _results(case, case.of_theirs, [operand.cpu().double() for operand in operands])


def _results(case: Case, function: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Named:
    """Outputs and gradients. The gradients of the outputs are those of the dtypes that the outputs have in ours, or close:
    they are rounded to 7 bits, which every dtype has."""
    leaves = [t.detach().requires_grad_(o.wants_grad) for t, o in zip(operands, case.operands, strict=True)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
    grown = [output for output in outputs if output.requires_grad]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if grown and wanted:
        grads = [gradient_for(output, k) for k, output in enumerate(grown)]
        found = torch.autograd.grad(grown, [leaves[i] for i in wanted], grads, allow_unused=True)
        named |= {f"gradient of x{i}": grad for i, grad in zip(wanted, found, strict=True) if grad is not None}
    return named


def gradient_for(output: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return drawn.to(torch.bfloat16).to(output.device, output.dtype)
