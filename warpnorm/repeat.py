"""Norms over rows as calls: the first of its kind, and one that was seen before, which is one look-up, its allocations and
the launch. Whatever decides about a call is in the key, so that what was checked, planned and bound at the first one holds;
what may change between two calls, settings, modes and gradients, is asked each time. The compiled launcher does the same in
a fraction of the time once it is there; it is told here of the calls that it may take over."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._device import DeviceContext

from warpnorm import library, pipeline, routing, settings
from warpnorm.errors import InputError
from warpnorm.launch import launcher
from warpnorm.launch.autograd import RepeatedNormalization, are_batched, gradients_of, is_differentiated
from warpnorm.launch.lasting import LARGEST_LOAN, lasting, new_lender
from warpnorm.norms import LAYER_NORM, Norm
from warpnorm.problem import COLUMN, FULL, NUMBER, SCALAR, Call, Running, View, alignment_of
from warpnorm.reference import Affine, Itself
from warpnorm.settings import Settings
from warpnorm.trace.arrange import spread

LARGEST_CACHE = 4096
# Bytes of statistics that nobody reads up to which they have a place of their own, instead of an allocation each time
LARGEST_SCRATCH = 1 << 20

_seen: dict[Any, "Repeat"] = {}
_scratch: dict[Any, tuple[torch.Tensor, ...]] = {}
_count = 0  # of calls that the compiled launcher might have had

# The look-up of the compiled launcher, once it is there: (norm, eps, shape, *operands) -> the output of a call that was seen
# before, or None
quick: Callable[..., torch.Tensor | None] | None = None


def again(norm: Norm, input: Any, shape: Any, weight: Any, bias: Any, eps: float | None) -> Any:
    """The output of a plain call that was seen before; otherwise the key under which it may be remembered, or nothing."""
    if not (getattr(input, "is_cuda", False) or settings.is_interpreting() or _is_large(norm, input, shape)):
        return None
    operands = [operand for operand in (input, weight, bias) if operand is not None]
    if routing.is_seen_through(operands):  # and may have no memory to ask about
        return None
    key = _key(norm, input, shape, weight, bias, eps)
    found = _seen.get(key)
    if found is None:
        return key
    if not is_repeatable(operands):
        return None
    if found.offered is not settings.current():
        _offer(found, (norm, eps, shape, input, weight, *((bias,) if norm == LAYER_NORM else ())))
    try:
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
            return RepeatedNormalization.apply(found, found.call, *operands)
        return found(operands)
    except RuntimeError as error:
        forget_refused(error, _seen, input.device)
        return key


def forget_refused(error: RuntimeError, seen: dict[Any, Any], device: torch.device) -> None:
    """What was seen, where a device refuses a launch whose programs wait for each other: nothing was computed, and other
    plans are next."""
    if not pipeline.refuses_teams(error, device):
        raise error
    seen.clear()


def launcher_for(input: torch.Tensor) -> Any:
    """The compiled launcher, if it is there and may be told of a call; every call of Python's that asks counts."""
    global _count
    if settings.is_interpreting() or (input.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    _count += 1
    return launcher.find(_set_up, _count)


def _offer(found: "Repeat", key: tuple[Any, ...]) -> None:
    """To the compiled launcher, if it is there."""
    input: torch.Tensor = key[3]
    module = launcher_for(input)
    if module is None:
        return
    found.offered = settings.current()
    like = torch.empty(input.shape, dtype=found.call.outputs[0], device="meta")
    how = described(found.launch, input, (like,), range(found.count), False)
    if how is not None:
        saved, mask = tuple(range(found.count)), (1 << found.count) - 1
        module.remember(key, *how, (), saved, mask, False, found, (found.launch, how[-2]), True)


def described(
    launch: Any,
    input: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    operands: Sequence[int],
    is_tuple: bool,
    running: Sequence[int] = (),
) -> tuple[Any, ...] | None:
    """As the compiled launcher takes it, but for the key and what Python does: tensors like the outputs, whether a tuple of
    them is returned, places of statistics, how many of them there are and are kept for backward, of how many rows, and
    whether they are doubles; the launches, which own what their addresses are of, and what they share. Nothing if it does
    not take it. `operands` and `running` are numbers of tensors."""
    how = launch.described(operands, len(outputs), running) if hasattr(launch, "described") else None
    if how is None:
        return None
    problem = launch.problem
    scratch: tuple[torch.Tensor, ...] = ()
    if not problem.norm.is_by_channel:  # of these, launches may read what others of the same call have left there
        place = _place(launch, input.device)
        if not _is_kept(place, launch):
            return None
        scratch = _scratch_at(place, launch, input)
    is_double = problem.compute == torch.float64
    counts = len(problem.norm.statistics), len(problem.norm.saved)
    return tuple(outputs), is_tuple, scratch, *counts, launch.units, is_double, *how


def _place(launch: Any, device: torch.device) -> tuple[Any, ...]:
    """Many batches share few: the number of their statistics is a power of two."""
    return device, 1 << max(launch.units - 1, 0).bit_length(), launch.problem.compute, launch.problem.norm.name


def _scratch_at(place: tuple[Any, ...], launch: Any, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where statistics go that nobody reads."""
    scratch = _scratch.get(place)
    if scratch is None:
        device = like.device
        # A graph's memory is its own
        if not _is_kept(place, launch) or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            return launch.empty_statistics(device, None)
        scratch = _scratch[place] = lasting(lambda: launch.empty_statistics(device, place[1]), device)
    return scratch


def _is_kept(place: tuple[Any, ...], launch: Any) -> bool:
    return place[1] * place[2].itemsize * len(launch.problem.norm.statistics) <= LARGEST_SCRATCH


def prepare_launcher() -> str:
    """Builds the compiled launcher, which may take half a minute, and waits for it; says why there is none, if so."""
    return launcher.prepare(_set_up)


def _mailbox(teams: int, splits: int, length: int, device: torch.device) -> torch.Tensor:
    from warpnorm.launch.shared import team_mailbox  # beside kernels, which are there by now

    return team_mailbox(teams, splits, length, device)


def _set_up(module: Any) -> None:
    global quick
    is_cuda = torch.version.cuda is not None
    hooks = None
    if is_cuda and routing.has_triton():
        import triton

        hooks = triton.knobs.runtime
    stream = torch._C._cuda_getCurrentRawStream if is_cuda else None
    to_share = (_mailbox, new_lender, LARGEST_LOAN)
    module.set_up(torch.nn.Parameter, DeviceContext, vars(settings), stream, hooks, _backward, *to_share)
    quick = module.call
    from warpnorm.cpu import memory

    memory.keeper = module


def _backward(
    found: Any,
    operands: tuple[torch.Tensor, ...],
    statistics: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor | None, ...],
    wanted: tuple[int, ...],
    handle: Any,
) -> tuple[torch.Tensor | None, ...]:
    """What the compiled launcher leaves to Python, of the tensors that it has kept. `handle` is how it would know the same
    launches again."""
    by_operand = found.gradients(operands, statistics, grads, wanted, handle)
    return tuple([by_operand.get(i) for i in range(found.count)])


def _is_large(norm: Norm, input: Any, shape: Any) -> bool:
    """Whether a row on a CPU is worth native code, and a look at what was seen before."""
    if not getattr(input, "is_cpu", False):
        return False
    try:
        return routing.is_long(norm, shape if type(shape) is int else prod(shape))
    except TypeError:  # no sizes; who checks the arguments says so
        return False


def _key(norm: Norm, input: Any, shape: Any, weight: Any, bias: Any, eps: float | None) -> Any:
    if eps is not None and type(eps) is not float and type(eps) is not int:
        return None
    kind = type(shape)
    if kind is list or kind is tuple:
        shape = tuple(shape)
        if not all(type(size) is int for size in shape):
            return None
    elif kind is not torch.Size and kind is not int:
        return None
    try:
        of_weight = None if weight is None else layout(weight)
        is_autocast = input.is_cuda and torch.is_autocast_enabled("cuda")
        return norm.name, shape, eps, layout(input), of_weight, None if bias is None else layout(bias), is_autocast
    except (AttributeError, InputError, RuntimeError, TypeError):  # not a tensor, or not a strided one with memory
        return None


def layout(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, alignment_of(tensor)


def has_hooks() -> bool:
    """Whether somebody sees what is saved: a checkpoint compares its shapes with those of another call of the same, and of
    norms by channel a call that was seen before has vectors where the first one has more dimensions."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_repeatable(operands: Sequence[Any]) -> bool:
    """Whether nothing that may change has changed."""
    input = operands[0]
    if settings.current().route not in (
        "auto",
        "native" if input.is_cpu and not settings.is_interpreting() else "kernels",
    ):
        return False
    if input.is_cuda and input.get_device() != torch.cuda.current_device():
        return False
    return not any(operand.is_neg() for operand in operands)


def first(
    norm: Norm,
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """(output, *statistics): the affine is the epilogue, weight and bias are its operands. The output is in `dtype`.
    Remembered under `key`."""
    operands: list[torch.Tensor | float] = [input]
    axes = [FULL]
    if weight is not None:
        operands.append(spread(weight) if isinstance(weight, torch.Tensor) else float(weight))
        axes.append(NUMBER if not isinstance(weight, torch.Tensor) else SCALAR if weight.ndim == 0 else COLUMN)
    if bias is not None:
        operands.append(spread(bias))
        axes.append(COLUMN)
    if torch.compiler.is_compiling():
        return _as_operator(norm, input, len(shape), operands, axes, eps, weight_offset, dtype, out, bias is not None)
    epilogue = Affine(weight is not None, bias is not None, weight_offset)
    call = Call(norm, len(shape), eps, Itself(), epilogue, tuple(axes), (dtype,))
    output, *statistics = pipeline.normalize(call, operands, out)
    given = [operand for operand in (input, weight, bias) if operand is not None]
    if key is not None and all(a is b for a, b in zip(operands, given, strict=True)) and is_repeatable(given):
        if len(_seen) >= LARGEST_CACHE:
            _seen.clear()
        repeat = Repeat(call, given, View.of(output))  # type: ignore[arg-type]
        if repeat.can_run:
            _seen[key] = repeat
    return output, *_shaped(statistics, input, len(shape))


def _as_operator(
    norm: Norm,
    input: torch.Tensor,
    col_dims: int,
    operands: Sequence[torch.Tensor | float],
    axes: Sequence[str],
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    has_bias: bool,
) -> tuple[torch.Tensor, ...]:
    """The same as one operator of PyTorch's library."""
    has_weight = len(operands) > 1 + has_bias
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    dtypes = [tensor.dtype for tensor in tensors]
    text = library.affine_text(norm.name, col_dims, eps, has_weight, has_bias, weight_offset, list(axes), dtypes, dtype)
    numbers = [operand for operand in operands if not isinstance(operand, torch.Tensor)]
    output, *statistics = library.normalize(norm, text, tensors, numbers, out)
    return output, *_shaped(statistics, input, col_dims)


def _shaped(statistics: Sequence[torch.Tensor], input: torch.Tensor, col_dims: int) -> list[torch.Tensor]:
    shape = (*input.shape[: input.ndim - col_dims], *[1] * col_dims)
    return [statistic.view(shape) for statistic in statistics]


class Backwards:
    """The backward launches of a call that were needed so far."""

    def __init__(self, call: Call, is_native: bool) -> None:
        self.call, self.is_native = call, is_native
        self._backward: dict[Any, Any] = {}

    def gradients(
        self, operands: Sequence[Any], statistics: Sequence[torch.Tensor], grads: Sequence[Any], wanted: tuple[int, ...],
        handle: Any = None,
    ) -> dict[int, Any]:  # fmt: skip
        """By the numbers of the user's operands, which are wanted by these."""
        if are_batched(grads) or is_differentiated():
            return gradients_of(self, self.call, operands, grads, statistics, wanted)  # type: ignore[arg-type]
        return self.backward(self.call, operands, grads, statistics, wanted, handle)

    def backward(
        self,
        call: Call,
        operands: Sequence[Any],
        grad_outputs: Sequence[torch.Tensor | None],
        statistics: Sequence[torch.Tensor],
        wanted: tuple[int, ...],
        handle: Any = None,
    ) -> dict[int, torch.Tensor]:
        grad = grad_outputs[0]
        if grad is None or grad.is_neg() or type(grad) is not torch.Tensor:
            return pipeline.backward(call, operands, grad_outputs, statistics, wanted)
        view = View.of(grad)
        views = tuple(map(View.of, operands))  # which may come back from where they were kept with other strides
        key = (wanted, view, views)
        launch = self._backward.get(key)
        if launch is None:
            launch = pipeline.prepare_backward(call, (*views, view), grad.device, (0,), wanted, None)
            problem = launch.problem
            is_plain = all(operands[i].dtype == g.dtype for i, g in zip(problem.wanted, problem.gradients, strict=True))
            is_plain = is_plain and not pipeline.without_twins(call, (*views, view), (0,), wanted)[1]
            if not is_plain or len(self._backward) >= LARGEST_CACHE:
                return pipeline.backward(call, operands, grad_outputs, statistics, wanted)
            launch = self._backward.setdefault(key, launch)  # or what another thread has prepared meanwhile
        which = launch.problem.wanted
        gradients = tuple([self._empty(operands[i]) for i in which])
        if gradients:
            try:
                launch(operands, (grad,), statistics, gradients)
            except RuntimeError as error:
                forget_refused(error, self._backward, grad.device)
                return pipeline.backward(call, operands, grad_outputs, statistics, wanted)
            is_asked = handle is not None and handle[1] and hasattr(launch, "described")
            described = launch.described(len(operands)) if is_asked else None
            if described is not None:
                launcher.module.remember_backward(handle, which, *described, (launch, described[1]))
        return dict(zip(which, gradients, strict=True))

    def _empty(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        result = torch.empty_like(like, dtype=dtype) if self.call.norm.is_by_channel else _empty(like, dtype)
        if self.is_native:
            pipeline.reuse_memory((result,), self.call)
        return result


class Repeat(Backwards):
    """A call with its forward launch too. Runs both directions for autograd."""

    running_dtypes: tuple[torch.dtype, ...] = ()  # of what is averaged into

    def __init__(self, call: Call, operands: Sequence[torch.Tensor], output: View) -> None:
        input = operands[0]
        super().__init__(call, routing.is_native(input.device))
        self.dtype = call.outputs[0]
        views = (*map(View.of, operands), output)
        launch: Any = pipeline.prepare_forward(call, views, input.device, None, self.running_dtypes)
        self.launch = launch
        self.can_run = hasattr(launch, "into")  # what the compiler did not build is nothing to repeat
        if not self.can_run:
            return
        self.place = _place(launch, input.device)
        self.count = len(operands)
        self.offered: Settings | None = None  # to the compiled launcher, under these

    def __call__(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output alone, where no gradient is needed."""
        output = self._empty(operands[0], self.dtype)
        self.launch.into(operands, (output,), _scratch_at(self.place, self.launch, output))
        return output

    def forward(
        self, call: Call, operands: Sequence[Any], *, running: Running | None = None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        output = self._empty(operands[0], self.dtype)
        statistics = self.launch.empty_statistics(output.device)
        self.launch.into(operands, (output,), statistics)
        return (output,), statistics


def _empty(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Contiguous, of its own dtype or another one."""
    if dtype is None or dtype is like.dtype:
        if like.is_contiguous():
            return torch.empty_like(like)  # the quickest
        dtype = like.dtype
    return torch.empty(like.shape, dtype=dtype, device=like.device)
