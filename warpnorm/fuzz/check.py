"""What is wrong with a call, if anything: it changes its inputs, raises where PyTorch does not, has another dtype or shape,
other bits at a second time, or is further from float64 than the rule allows."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from warpnorm import routing, settings
from warpnorm.fuzz.accuracy import Error, why_inaccurate
from warpnorm.fuzz.case import Case
from warpnorm.problem import compute_dtype

DRAWS = 24  # of PyTorch's error, where one is not enough
OWN_DRAWS = 3
FRESH_DRAWS = 12  # of other values
SLIGHT = 8.0  # times what is allowed: an error of one number, as of the mean of a lone row, may be that by chance
OF_GRADIENTS = 10**9  # the seed of the first one, which is that of no operand: their products would cancel
REPEATED = 4  # one in so many cases is run twice
MARGIN = 16  # of kinks, in errors
# Second gradients are promised to be right, not to be as close as PyTorch's, which has formulas of its own for some of them:
# those of batch_norm in float32 are off by 8 roundings, its own by 5
SECOND = 8
OWN_ERROR = 4 * torch.finfo(torch.float64).eps / 2  # of the truth
EPS_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)

Named = dict[str, torch.Tensor]


class WrongError(Exception):
    """What is wrong with a case, in one sentence."""


class TheirError(RuntimeError):
    """What PyTorch's own operators raise."""


def forced_route(device: str) -> str:
    """The way to compute that is to be tested on a device."""
    if device == "cuda" or settings.is_interpreting():
        return "kernels"
    return "native" if routing.has_compiler() else "auto"


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch has one thread: most tensors are too small for a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows without elements, and functions that are captured often
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # as torch.use_deterministic_algorithms, which would import PyTorch's compiler
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def is_lost(device: str) -> bool:
    """Whether nothing can be computed any more: a kernel that reaches past its memory takes the GPU from the process."""
    if device != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def check(case: Case, device: str) -> None:
    """Raises what is wrong. Where PyTorch's own operators fail halfway, as cuDNN's now and then do, there is nothing to
    compare with; unless they do since ours have taken the GPU away."""
    try:
        _check(case, device)
    except TheirError:
        if is_lost(device):
            raise


def _check(case: Case, device: str) -> None:
    """Numbers come from the device all at once."""
    operands = case.make(case.seed, device)
    before = [operand.clone() for operand in operands]
    theirs, refusal = _attempt(lambda: _theirs(case, operands))
    ours, error = _attempt(lambda: _ours(case, operands))
    if error is not None and refusal is None:
        raise WrongError(f"raises {type(error).__name__}: {error}") from error
    numbers = {"changed its inputs": [_differ(a, b) for a, b in zip(operands, before, strict=True)]}
    if ours is None or theirs is None:
        _raise_any(_fetched(numbers))
        return  # both refuse, or ours takes more than PyTorch does
    _check_kinds(case, ours, theirs)
    if case.seed % REPEATED == 0:
        again = _ours(case, operands)
        numbers |= {f"{name}: other bits at a second time": [_differ(ours[name], again[name])] for name in ours}
    truth, narrowed = _truth(case, operands), _narrowed(operands)
    if narrowed is not operands:
        theirs = _theirs(case, narrowed)
    narrow = truth if narrowed is operands else _truth(case, narrowed)
    measured = {name: _measured(name, [ours], [truth], [theirs], [narrow]) for name in ours}
    found = _fetched(numbers | measured | {"kinks": _closeness(case, operands)})
    _raise_any({name: found[name] for name in numbers})
    if any(_why_wrong(name, _held_to(case, ours[name]), 1, found[name]) for name in _compared(ours, found["kinks"])):
        _check_closely(case, operands)


def names_of(case: Case) -> list[str]:
    """Of the results, as they are reported."""
    results, _ = _attempt(lambda: _theirs(case, case.make(case.seed, "cpu")))
    return list(results or ())


def _fetched(numbers: dict[str, list[torch.Tensor]]) -> dict[str, list[float]]:
    flat = [number.double() for some in numbers.values() for number in some]
    values = iter(torch.stack(flat).tolist() if flat else ())
    return {name: [next(values) for _ in some] for name, some in numbers.items()}


def _raise_any(found: dict[str, list[float]]) -> None:
    for name, numbers in found.items():
        if any(numbers):
            raise WrongError(name)


def _compared(ours: Named, kinks: Sequence[float]) -> list[str]:
    """All, but where a value is too close to a kink to tell on which side it is no gradients: those jump there."""
    return [name for name in ours if not any(kinks) or name.startswith("output")]


def _check_closely(case: Case, operands: list[torch.Tensor]) -> None:
    """An error is a property of a way to compute, and one small input may be easy by chance: ours is the middle one of
    several, PyTorch's the worst of many. All are as hard as the first, but rounded differently: the same at other scales."""
    ours, truths, theirs, narrow, kinks = [], [], [], [], []
    wide: list[Named] = []  # theirs in float64
    for k in range(DRAWS):
        scaled = [_scaled(operand, 1 + k / 64) for operand in operands]
        narrowed = _narrowed(scaled)
        truths.append(_truth(case, scaled))
        if k < OWN_DRAWS:
            ours.append(_ours(case, scaled))
            kinks += _closeness(case, scaled)
        if narrowed is not scaled:
            wide.append(_as_they_are(case, scaled) or _theirs(case, scaled))
        theirs.append(_as_they_are(case, narrowed) or _theirs(case, narrowed))
        narrow.append(truths[-1] if narrowed is scaled else _truth(case, narrowed))
    for name in _compared(ours[0], [float(number) for number in kinks]):
        numbers = _fetched({name: _measured(name, ours, truths, theirs, narrow, wide)})[name]
        dtype = _held_to(case, ours[0][name])
        why = _why_wrong(name, dtype, len(ours), numbers, len(wide))
        if why is None:
            continue
        is_slight = _why_wrong(name, dtype, len(ours), numbers, len(wide), SLIGHT) is None
        if not is_slight or _is_far_off(case, name, operands[0].device):
            raise WrongError(why)


def _is_far_off(case: Case, name: str, device: torch.device) -> bool:
    """The same of other values, and other gradients of the outputs, not too close to a kink: where a result is a few
    numbers, who is closer by chance may be so at every scale."""
    draws = {k: case.make(case.seed + 10_000 * k, device.type) for k in range(1, 1 + FRESH_DRAWS)}
    draws = {k: draw for k, draw in draws.items() if not any(map(bool, _closeness(case, draw)))}
    if not draws:
        return True
    narrowed = {k: _narrowed(draw) for k, draw in draws.items()}
    is_wide = any(narrowed[k] is not draw for k, draw in draws.items())
    ours = [_ours(case, draw, k) for k, draw in draws.items()]
    truths = [_truth(case, draw, k) for k, draw in draws.items()]
    theirs = [_as_they_are(case, draw, k) or _theirs(case, draw, k) for k, draw in narrowed.items()]
    narrow = [_truth(case, draw, k) for k, draw in narrowed.items()] if is_wide else truths
    wide = [_as_they_are(case, draw, k) or _theirs(case, draw, k) for k, draw in draws.items()] if is_wide else []
    numbers = _fetched({name: _measured(name, ours, truths, theirs, narrow, wide)})[name]
    return _why_wrong(name, _held_to(case, ours[0][name]), len(ours), numbers, len(wide)) is not None


def _held_to(case: Case, result: torch.Tensor) -> torch.dtype:
    """What is averaged into float64 is no closer than what is averaged."""
    return torch.float32 if result.dtype == torch.float64 != case.computed else result.dtype


def _narrowed(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The truth is no better than float64, where PyTorch is held against it in float32."""
    if all(operand.dtype != torch.float64 for operand in operands):
        return operands
    return [operand.float() if operand.dtype == torch.float64 else operand for operand in operands]


def _closeness(case: Case, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each kink, whether some value is closer to it than MARGIN times what PyTorch is off in float32."""
    if not case.kinks:
        return []
    with torch.no_grad():
        true, rounded = (case.of_kinks(*(o.to(d) for o in operands)) for d in (torch.float64, torch.float32))
    unit = EPS_RATIO if case.computed == torch.float64 else 1.0
    found = []
    for one, other in zip(true, rounded, strict=True):
        if one.numel():
            far = unit * (MARGIN * (one - other).abs().max() + MARGIN * torch.finfo(torch.float32).eps)
            found.append(~(one.abs().min() > far))
    return found


def _measured(
    name: str,
    ours: list[Named],
    truths: list[Named],
    theirs: list[Named],
    narrow: list[Named],
    wide: Sequence[Named] = (),
) -> list[torch.Tensor]:
    """Numbers, still on the device: whether something is not finite that should be, whether there is anything to compare,
    and root mean square and largest value of the truth, of the errors of ours, of theirs and of theirs in float64. `narrow`
    is the truth that theirs are held against."""
    dtype = ours[0][name].dtype
    if ours[0][name].numel() == 0:
        return []
    if not dtype.is_floating_point:
        return [(ours[0][name] != truths[0][name]).any()]
    # where the true value or PyTorch's is past the end of the dtype there is nothing to compare
    masks = [t[name].to(dtype).isfinite() & p[name].isfinite() for _, t, p in zip(ours, truths, theirs, strict=False)]
    gone = [(mask & ~result[name].isfinite()).any() for result, mask in zip(ours, masks, strict=True)]
    mask = masks[0] if len(masks) == 1 else torch.stack(masks).all(0)
    sizes = [torch.where(mask, t[name], 0) for t in narrow]
    mean = torch.stack([size.square().sum() for size in sizes]).sum() / (mask.sum() * len(sizes))
    numbers = [
        torch.stack(gone).any(),
        mask.any(),
        mean.sqrt(),
        torch.stack([size.abs().max() for size in sizes]).max(),
    ]
    for results, true in ((ours, truths), (theirs, narrow), (wide, truths)):
        for r, t in zip(results, true, strict=False):
            numbers += _error(r[name], t[name], mask, dtype)
    return numbers


def _error(result: torch.Tensor, truth: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    error = result.double() - truth
    mask = mask & error.isfinite()  # PyTorch's may be past the end at another scale
    info = torch.finfo(dtype)
    # one rounding, where the dtype has nothing in between, is none
    error = torch.where(mask & (error.abs() > info.tiny * info.eps), error, 0)
    return [(error.square().sum() / mask.sum().clamp(min=1)).sqrt(), error.abs().max()]


def _why_wrong(
    name: str, dtype: torch.dtype, own: int, numbers: list[float], wide: int = 0, times: float = 1.0
) -> str | None:
    """Of what was measured, of `own` draws of ours, any number of theirs and `wide` of these in float64.

    In float64 theirs is as far off as it is in float32, in proportion, or as it is measured. The one may be less, as its
    sums are of float64 in both on a CPU; the other too, as it rounds what stands around a norm in the same way as the truth.
    Twice that, as the truth is no more precise: its sums over rows, which gradients of weights are, are theirs. And four
    roundings; of 4,000 results one took two and a half, a sum of 500 numbers."""
    if not dtype.is_floating_point or not numbers:
        return f"{name}: not equal" if any(numbers) else None
    is_gone, is_there, mean, largest, *errors = numbers
    if is_gone:
        return f"{name}: not finite, but it is in PyTorch"
    if not is_there:
        return None
    means = [error / (mean or 1.0) for error in errors[::2]]
    largests = [error / (largest or 1.0) for error in errors[1::2]]
    allowed = Error(*(max(kind[own : len(kind) - wide]) for kind in (means, largests)))
    if dtype == torch.float64:
        off = (
            max(a * EPS_RATIO, *kind[len(kind) - wide :], 0) for a, kind in zip(allowed, (means, largests), strict=True)
        )
        allowed = Error(*(2 * error + OWN_ERROR for error in off))
    if name.startswith("second"):
        allowed = Error(*(SECOND * (error + torch.finfo(dtype).eps / 2) for error in allowed))
    return why_inaccurate(name, Error(median(means[:own]) / times, median(largests[:own]) / times), allowed, dtype)


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
        if case.is_widened or case.is_mixed:
            wanted = case.operands[0].dtype if name == "output 0" else result.dtype
        if "gradient" in name:
            wanted = case.operands[int(name.split("x")[1])].dtype
        if result.dtype != wanted:
            raise WrongError(f"{name}: dtype {result.dtype}, but it should be {wanted}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is like NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (_bits(one) != _bits(other)).any()


def _attempt(run: Callable[[], Named]) -> tuple[Named | None, Exception | None]:
    try:
        return run(), None
    except REFUSALS as error:
        return None, error


def _ours(case: Case, operands: Sequence[torch.Tensor], draw: int = 0) -> Named:
    with settings.override(route=case.route), poisoned():
        return _results(case, case.of_ours, operands, draw)


def _theirs(case: Case, operands: Sequence[torch.Tensor], draw: int = 0) -> Named:
    if case.is_widened or case.is_mixed:
        dtype = compute_dtype([o.dtype for i, o in enumerate(operands) if i not in case.averaged])
        operands = [operand.to(dtype) for operand in operands]
    try:
        return _results(case, case.of_theirs, operands, draw)
    except REFUSALS as error:
        raise TheirError(str(error)) from error


def _as_they_are(case: Case, operands: Sequence[torch.Tensor], draw: int = 0) -> Named | None:
    """By PyTorch in several dtypes, where it has such a call: it rounds more often than in the dtype of computation."""
    return _attempt(lambda: _results(case, case.of_theirs, operands, draw))[0] if case.is_mixed else None


def _truth(case: Case, operands: Sequence[torch.Tensor], draw: int = 0) -> Named:
    """By PyTorch's own kernels, where the operands are: cuDNN's need not centre what they sum. Where ours is float64 too by
    something closer: see truth.py."""
    if operands[0].numel() and any(operand.dtype == torch.float64 for operand in operands):
        return _results(case, case.of_truth, [operand.double() for operand in operands], draw)
    is_on_gpu = operands[0].is_cuda
    with torch.backends.cudnn.flags(enabled=False) if is_on_gpu else nullcontext():
        return _results(case, case.of_theirs, [operand.double() for operand in operands], draw)


def _results(case: Case, function: Callable[..., Any], operands: Sequence[torch.Tensor], draw: int) -> Named:
    """Outputs and gradients. The gradients of the outputs, which are others for each draw, are those of the dtypes that the
    outputs have in ours, or close: they are rounded to 7 bits, which every dtype has."""
    leaves = [t.detach().requires_grad_(o.wants_grad) for t, o in zip(operands, case.operands, strict=True)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
    grown = [output for output in outputs if output.requires_grad]
    wanted = {f"x{i}": leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
    for first, kind in ((0, "gradient"), (100, "second gradient"))[: 1 + case.is_twice]:
        if not grown or not wanted:
            break
        seed = OF_GRADIENTS + 1000 * draw + first
        grads = [gradient_for(output, seed + k) for k, output in enumerate(grown)]
        found = torch.autograd.grad(grown, [*wanted.values()], grads, allow_unused=True, create_graph=case.is_twice)
        named |= {f"{kind} of {name}": g.detach() for name, g in zip(wanted, found, strict=True) if g is not None}
        grown = [grad for grad in found if grad is not None and grad.requires_grad]
    return named


def gradient_for(output: torch.Tensor, seed: int) -> torch.Tensor:
    return _drawn(output.shape, seed, output.device).to(output.dtype, copy=True)


@lru_cache(maxsize=8)
def _drawn(shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).bfloat16().half()
