"""Calls as operators of PyTorch's library, for what sees operators only: `torch.compile` and `torch.export`. Two operators
stand for every call, forward and backward, each told by a text which call it is; on tensors with memory they run as
`pipeline.py` runs any call. Calls that nobody traces never come here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpnorm import absorb, pipeline, routing, settings
from warpnorm.errors import InputError
from warpnorm.launch import call_text
from warpnorm.launch.autograd import composite_gradients, second_gradients, without_gradient
from warpnorm.norms import CHANNEL, FIXED_NORM, GROUPS, Norm
from warpnorm.problem import FULL, NUMBER, Axes, Call, Running, View, compute_dtype
from warpnorm.reference import Affine, FixedAffine, Itself, composite, statistics, update_running
from warpnorm.space import shape_of
from warpnorm.trace import at_hand, capture

on_shards: Callable[[], None] | None = None  # prepares these operators for DTensors; `parallel` says how


class _Operators(torch.library.Library):
    """Notices the first DTensor that comes to an operator: what it needs is not imported before."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, _noticing(fn) if dispatch_key == "Autograd" else fn, dispatch_key, **options)


def _noticing(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def noticed(keys: Any, *args: Any, **kwargs: Any) -> Any:
        absorb.register()
        if on_shards is None or not any(is_sharded(t) for arg in args if isinstance(arg, list | tuple) for t in arg):
            return kernel(keys, *args, **kwargs)
        on_shards()
        try:
            return kernel(keys, *args, **kwargs)
        except RuntimeError as error:  # around what a rule raised
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise

    return noticed


def is_sharded(input: Any) -> bool:
    """Whether this is a DTensor, which others hold parts of."""
    return type(input) not in routing.PLAIN_TYPES and type(input).__name__ == "DTensor"


_library = _Operators("warpnorm", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("norm(Tensor[] operands, float[] numbers, str call) -> Tensor[]", tags=_tags)
_library.define(
    "norm_backward(Tensor[] grad_outputs, int[] given, Tensor[] operands, float[] numbers, Tensor[] statistics,"
    " int[] wanted, str call) -> Tensor[]",
    tags=_tags,
)


@dataclass(frozen=True)
class Again:
    """A call that was seen before, with its launch: what was looked up for the first one holds `under` the same settings."""

    under: settings.Settings
    call: Call
    launch: Any
    device: torch.device
    shape: Sequence[int]
    row_shape: Sequence[int] = ()  # of forward's statistics

    def forward(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[torch.Tensor]:
        operands = with_numbers(self.call, tensors, numbers) if numbers else tensors
        outputs = pipeline.empty_outputs(self.call, operands, self.shape, self.device)
        how = {} if routing.is_native(self.device) else {"is_apart": True}
        return [*outputs, *(row.view(self.row_shape) for row in self.launch(operands, outputs, None, **how))]

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        grads: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        operands = with_numbers(self.call, tensors, numbers) if numbers else tensors
        wanted = [operands[i] for i in self.launch.problem.wanted]
        gradients = pipeline.empty_gradients(self.call, wanted, [operand.dtype for operand in wanted])
        self.launch(operands, grads, [row.reshape(-1) for row in rows], gradients)
        return list(gradients)


LARGEST_CACHE = 4096
_seen: dict[Any, Again] = {}


def _key(text: str, tensors: Sequence[torch.Tensor], *more: Any) -> Any:
    """All that decides about a call, but for settings; nothing where something else sees it, or no memory holds what the
    tensors say."""
    if routing.is_seen_through(tensors) or any(t.is_neg() or t.numel() == 0 for t in tensors):
        return None
    return text, tensors[0].device, more, *map(View.of, tensors)


def _remember(key: Any, call: Call, views: tuple[View, ...], launch: Any, row_shape: Sequence[int] = ()) -> None:
    if len(_seen) >= LARGEST_CACHE:
        _seen.clear()
    _seen[key] = Again(settings.current(), call, launch, key[1], shape_of(views[: len(call.axes)]), tuple(row_shape))


@torch.library.impl(_library, "norm", "CompositeExplicitAutograd")
def _norm(tensors: Sequence[torch.Tensor], numbers: Sequence[float], text: str) -> list[torch.Tensor]:
    """[*outputs, *statistics]."""
    key = _key(text, tensors, len(numbers))
    again = _seen.get(key)
    if again is not None and again.under is settings.current():
        try:
            return again.forward(tensors, numbers)
        except RuntimeError:  # such as programs that can no longer run at the same time: the pipeline knows another way
            _seen.pop(key, None)
    call = _call_of(text, tensors, numbers)
    operands, shape = with_numbers(call, tensors, numbers), row_shape(call, tensors)
    if _is_run(call, operands):
        outputs, found = pipeline.forward(call, operands, are_apart=True)
        if key is not None:
            views = tuple(map(View.of, (*operands, *outputs)))
            _remember(key, call, views, pipeline.prepare_forward(call, views, key[1], None, ()), shape)
    else:
        outputs, found = composite(call, *operands), ()
        outputs = tuple(_laid(output, call, operands) for output in outputs)
        if call.norm.is_computed:
            named = statistics(call, *operands)
            found = tuple(named[name] for name in call.norm.statistics)
    return [*outputs, *(statistic.view(shape) for statistic in found)]


@torch.library.register_fake("warpnorm::norm", lib=_library)
def _(tensors: Sequence[torch.Tensor], numbers: Sequence[float], text: str) -> list[torch.Tensor]:
    call = _call_of(text, tensors, numbers)
    shape = _shape(call, tensors)
    device = pipeline.device_of(tensors)
    outputs = [pipeline.empty_output(call, _full(call, tensors), shape, dtype, device) for dtype in call.outputs]
    compute = compute_dtype([call.compute, *(t.dtype for t in tensors)])
    rows = [torch.empty(row_shape(call, tensors), dtype=compute, device=device) for _ in call.norm.statistics]
    return [*outputs, *rows]


@torch.library.impl(_library, "norm_backward", "CompositeExplicitAutograd")
def _norm_backward(
    grad_outputs: Sequence[torch.Tensor],
    given: Sequence[int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
    rows: Sequence[torch.Tensor],
    wanted: Sequence[int],
    text: str,
) -> list[torch.Tensor]:
    """The gradients of the operands in `wanted`, by those of the outputs in `given`."""
    key = _key(text, (*tensors, *grad_outputs), len(numbers), tuple(given), tuple(wanted))
    again = _seen.get(key)
    if again is not None and again.under is settings.current():
        try:
            return again.backward(tensors, numbers, grad_outputs, rows)
        except RuntimeError:
            _seen.pop(key, None)
    call = _call_of(text, tensors, numbers)
    operands = with_numbers(call, tensors, numbers)
    grads = _of_outputs(call, grad_outputs, given)
    found: dict[int, Any]
    if _is_run(call, operands):
        found = pipeline.backward(call, operands, grads, [row.reshape(-1) for row in rows], tuple(wanted))
        if key is not None:
            views = tuple(map(View.of, (*operands, *grad_outputs)))
            launch = pipeline.prepare_backward(call, views, key[1], tuple(given), tuple(wanted), None)
            dtypes = [gradient.dtype for gradient in launch.problem.gradients]
            if launch.problem.wanted == tuple(wanted) and dtypes == [operands[i].dtype for i in wanted]:
                _remember(key, call, views, launch)
    else:
        leaves = [o.detach() if isinstance(o, torch.Tensor) else o for o in operands]
        by_definition = composite_gradients(call, leaves, [g if g is None else g.detach() for g in grads], wanted)
        found = {
            i: _empty_gradient(call, operands[i]).copy_(g.detach()) for i, g in by_definition.items() if g is not None
        }
    gradients: list[torch.Tensor] = []
    for i in wanted:
        gradient = found.get(i)
        if gradient is None:
            gradient = _empty_gradient(call, operands[i]).zero_()
        is_there = any(gradient is other for other in gradients)
        gradients.append(gradient.clone() if is_there else gradient)
    return gradients


@torch.library.register_fake("warpnorm::norm_backward", lib=_library)
def _(
    grad_outputs: Sequence[torch.Tensor],
    given: Sequence[int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
    rows: Sequence[torch.Tensor],
    wanted: Sequence[int],
    text: str,
) -> list[torch.Tensor]:
    call = _call_of(text, tensors, numbers)
    operands = with_numbers(call, tensors, numbers)
    return [_empty_gradient(call, operands[i]) for i in wanted]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    tensors, numbers, text = inputs
    call, _ = call_text.read(text)
    outputs, rows = output[: len(call.outputs)], output[len(call.outputs) :]
    ctx.numbers, ctx.text, ctx.count = list(numbers), text, len(tensors)
    ctx.kept = [(i,) for i in range(len(tensors))]  # whose gradient that of each kept tensor is
    ctx.placements = [tensor.placements if is_sharded(tensor) else None for tensor in tensors]
    short = _shortcut(call, tensors) if not numbers else None
    if short is not None:
        ctx.kept, tensors = short.kept, short.of(outputs, tensors)
        ctx.text = call_text.written(short.call, tuple(t.dtype for t in tensors))
    ctx.mark_non_differentiable(*without_gradient(call, outputs), *rows)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *rows[: len(call.norm.saved)])


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    call, _ = call_text.read(ctx.text)
    saved, count = ctx.saved_tensors, len(ctx.kept)
    tensors, rows = list(saved[:count]), list(saved[count:])
    grad_outputs = list(grads[: len(call.outputs)])
    results: list[torch.Tensor | None] = [None] * ctx.count
    needs = ctx.needs_input_grad[0]
    mine = tuple(k for k, which in enumerate(ctx.kept) if any(needs[i] for i in which))
    if mine and any(grad is not None for grad in grad_outputs):
        found = _gradients(call, ctx.text, grad_outputs, tensors, ctx.numbers, rows, mine)
        for k, which in enumerate(ctx.kept):
            for i in which:
                results[i] = _placed(found.get(k), ctx.placements[i]) if needs[i] else None
    return results, _nothing(ctx.numbers), None


def _placed(gradient: Any, placements: Any) -> Any:
    """A gradient of which ranks have parts is reduced here, once, to lie as its operand does."""
    is_elsewhere = gradient is not None and placements is not None and gradient.placements != placements
    return gradient.redistribute(placements=placements) if is_elsewhere else gradient


def _gradients(
    call: Call,
    text: str,
    grad_outputs: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
    rows: Sequence[torch.Tensor],
    mine: tuple[int, ...],
) -> dict[int, torch.Tensor]:
    """By the numbers of the tensors, those of `mine` that depend on an output with a gradient."""
    places = [i for i, axes in enumerate(call.axes) if axes != NUMBER]
    given = tuple(i for i, grad in enumerate(grad_outputs) if grad is not None)
    inside, compute = _inside(call, tensors)
    gradients = at_hand.gradients(call, inside, compute, given, tuple(places[k] for k in mine))
    same: dict[int, int] = {}
    if not call.norm.is_by_channel and gradients.wanted:
        dtypes = tuple(tensors[places.index(i)].dtype for i in gradients.wanted)
        same = at_hand.twins(call, inside, compute, gradients, dtypes)
    wanted = [i for i in gradients.wanted if i not in same]
    if not wanted:
        return {}
    grads = [grad for grad in grad_outputs if grad is not None]
    values = torch.ops.warpnorm.norm_backward(grads, given, tensors, numbers, rows, wanted, text)
    found = dict(zip(wanted, values, strict=True))
    found |= {twin: found[i] for twin, i in same.items()}
    return {places.index(i): gradient for i, gradient in found.items()}


def _keep_for_second(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    grad_outputs, given, tensors, numbers, rows, wanted, text = inputs
    ctx.rows = len(rows)
    ctx.numbers, ctx.given, ctx.wanted, ctx.text = list(numbers), tuple(given), tuple(wanted), text
    ctx.save_for_backward(*grad_outputs, *tensors)
    ctx.set_materialize_grads(False)


def _second(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """By the composite: PyTorch's operators, which can be differentiated any number of times."""
    (call, _), count = call_text.read(ctx.text), len(ctx.given)
    grad_outputs = _of_outputs(call, ctx.saved_tensors[:count], ctx.given)
    operands = with_numbers(call, ctx.saved_tensors[count:], ctx.numbers)
    places = [*ctx.given, *(len(grad_outputs) + i for i, axes in enumerate(call.axes) if axes != NUMBER)]
    needs = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[2]]
    needed = [place for place, need in zip(places, needs, strict=True) if need]
    found = second_gradients(call, ctx.wanted, [*grad_outputs, *operands], grads, needed)
    second = [found.get(place) for place in places]
    nothing = [None] * ctx.rows, _nothing(ctx.wanted), None
    return second[:count], _nothing(ctx.given), second[count:], _nothing(ctx.numbers), *nothing


def _of_outputs(call: Call, grads: Sequence[torch.Tensor], given: Sequence[int]) -> list[torch.Tensor | None]:
    by_output = dict(zip(given, grads, strict=True))
    return [by_output.get(i) for i in range(len(call.outputs))]


torch.library.register_autograd("warpnorm::norm", _backward, setup_context=_keep_for_backward, lib=_library)
torch.library.register_autograd("warpnorm::norm_backward", _second, setup_context=_keep_for_second, lib=_library)


def affine_text(
    norm: str,
    col_dims: int,
    eps: float,
    has_weight: bool,
    has_bias: bool,
    weight_offset: float,
    axes: Sequence[Axes],
    dtypes: Sequence[torch.dtype],
    dtype: torch.dtype,
    groups: int = 0,
    is_fixed: bool = False,
) -> str:
    """Of a norm alone, with its weight and bias. Its operands have these `dtypes`, its output `dtype`; `is_fixed`: batch
    norm by its running statistics."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    eps, weight_offset, count = guard_scalar(eps), guard_scalar(weight_offset), int(guard_scalar(groups))
    flags = has_weight, has_bias, weight_offset, axes, dtypes, dtype, count, is_fixed
    return _affine_text(norm, col_dims, eps, *flags)


@settings.constant
def _affine_text(
    norm: str, col_dims: int, eps: float, has_weight: bool, has_bias: bool, weight_offset: float, axes: Sequence[Axes],
    dtypes: Sequence[torch.dtype], dtype: torch.dtype, groups: int, is_fixed: bool,
) -> str:  # fmt: skip
    """A compiler takes it for a constant of its arguments."""
    epilogue: Any = Affine(has_weight, has_bias, weight_offset)
    if is_fixed:
        epilogue = FixedAffine(eps, has_weight, has_bias)
    found = FIXED_NORM if is_fixed else call_text.NORMS[norm]
    call = Call(found, col_dims, eps, Itself(), epilogue, tuple(axes), (dtype,), groups=groups)
    text = call_text.written(call, tuple(dtypes))
    assert text is not None
    return text


def normalize(
    norm: Norm,
    text: str,
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float] = (),
    out: torch.Tensor | None = None,
    running: Running | None = None,
) -> tuple[torch.Tensor, ...]:
    """(*outputs, *statistics) of a call, by the operator; the rest of what it does by PyTorch's own."""
    made = torch.ops.warpnorm.norm(list(operands), list(numbers), text)
    count = len(made) - len(norm.statistics)
    outputs, found = made[:count], made[count:]
    if out is not None:
        outputs = [out.copy_(outputs[0])]
    if running is not None:
        mean, _, variance = found
        update_running(running.mean, running.variance, mean, variance, running.size, running.momentum)
    return *outputs, *found


def _nothing(numbers: Sequence[float]) -> list[Any] | None:
    """The gradient of a list of numbers: PyTorch takes one without elements for a list of tensors."""
    return None if numbers else []


def _is_run(call: Call, operands: Sequence[torch.Tensor | float]) -> bool:
    """Whether kernels or native code run a call here; otherwise its definition does, by PyTorch's operators."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if any(tensor.numel() == 0 for tensor in tensors):
        return False
    found = routing.route(tensors[0], *tensors)
    return found == "kernels" or (found == "native" and pipeline.takes(call, operands))


def _call_of(text: str, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> Call:
    """The call, if these are operands of it: an exported program may be given anything."""
    call, dtypes = call_text.read(text)
    given = tuple(tensor.dtype for tensor in tensors)
    if len(given) != len(dtypes) or len(numbers) != len(call.axes) - len(dtypes):
        raise InputError(
            f"{call.norm.name}: this program takes {len(dtypes)} tensors and {len(call.axes) - len(dtypes)} numbers, "
            f"but got {len(given)} and {len(numbers)}"
        )
    if given != dtypes:
        wanted, found = (", ".join(str(d).removeprefix("torch.") for d in of) for of in (dtypes, given))
        raise InputError(
            f"{call.norm.name}: this program was made for {wanted}, but got {found}; export or compile it anew"
        )
    return call


def with_numbers(call: Call, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[Any]:
    of_tensors, of_numbers = iter(tensors), iter(numbers)
    return [next(of_numbers) if axes == NUMBER else next(of_tensors) for axes in call.axes]


def _full(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands that have a value for every element."""
    axes = [a for a in call.axes if a != NUMBER]
    return [t for t, a in zip(tensors, axes, strict=True) if a == FULL or (isinstance(a, tuple) and all(a))]


def _shape(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """Of the iteration space; sizes may be symbols."""
    full = _full(call, tensors)
    return full[0].shape if full else torch.broadcast_shapes(*(t.shape for t in tensors))


def row_shape(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Of one number for each row: (C,), (N, groups), or the dimensions before the normalized ones."""
    shape = _shape(call, tensors)
    if call.norm.rows == CHANNEL:
        return (shape[1],)
    return (shape[0], call.groups) if call.norm.rows == GROUPS else tuple(shape[: len(shape) - call.col_dims])


def _laid(output: torch.Tensor, call: Call, operands: Sequence[Any]) -> torch.Tensor:
    """In the memory format in which a kernel would have written it."""
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    empty = pipeline.empty_output(call, _full(call, tensors), output.shape, output.dtype, output.device)
    return empty.copy_(output)


def _empty_gradient(call: Call, operand: torch.Tensor) -> torch.Tensor:
    if call.norm.is_by_channel:
        return torch.empty_like(operand)
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)


def _inside(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.dtype, ...], torch.dtype]:
    """As `pipeline.inside`, of tensors without memory too."""
    compute = compute_dtype([call.compute, *(t.dtype for t in tensors)])
    given = with_numbers(call, [t.dtype for t in tensors], [torch.float32] * len(call.axes))  # type: ignore[misc, list-item]
    return capture.probe_dtypes(given, compute), compute


def _shortcut(call: Call, tensors: Sequence[torch.Tensor]) -> at_hand.Shortcut | None:
    """The way from a sum as it is: of one that is scaled there is no text."""
    short = at_hand.shortcut(call, tuple(t.dtype for t in tensors), *_inside(call, tensors))
    return short if short is not None and isinstance(short.call.prologue, at_hand.Sum) else None
