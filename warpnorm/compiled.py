"""Fused functions where a compiler or an export sees them. The function runs as it is, under a mode that writes down what it
calls: so a compiler guards all that it reads and finds every tensor. What was written down is captured like any call and
becomes one operator of `library.py`; what the function had computed is then dead, and compilers leave it away. Where it
cannot become one, the results are those of the function as it is."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from warpnorm import functional, library, pipeline, routing, settings
from warpnorm.errors import WarpnormError
from warpnorm.functional import HANDLERS
from warpnorm.launch import call_text
from warpnorm.launch.call_text import NORMS
from warpnorm.problem import Running, View
from warpnorm.trace import checks, fusion
from warpnorm.trace.arrange import Prepared, arrange
from warpnorm.trace.record import normalize, relabel

_log = logging.getLogger(__name__)
aten = torch.ops.aten
# Those with running statistics; and where it stands whether these are averaged, and what it is called
AVERAGING = (F.batch_norm, F.instance_norm, functional.batch_norm, functional.instance_norm)
FLAG, FLAG_NAMES = 5, ("training", "use_input_stats")
# PyTorch's own do not average what ranks share of a DTensor
OURS = {F.batch_norm: functional.batch_norm, F.instance_norm: functional.instance_norm}
CONSTANTS = (type(None), bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
# Views, by what a capture calls them
MOVES: dict[str, Callable[..., Any]] = {
    str(op): op
    for op in (
        aten.alias.default, aten.chunk.default, aten.expand.default, aten.permute.default, aten.select.int,
        aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.dim, aten.squeeze.default,
        aten.t.default, aten.transpose.int, aten.unbind.int, aten.unflatten.int, aten.unsqueeze.default,
    )
}  # fmt: skip
MOVES |= dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), torch.reshape)
CUTS = frozenset(
    str(op)
    for op in (
        aten.chunk.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
        aten.unbind.int,
    )
)  # fmt: skip
SHARED: tuple[
    Callable[..., Any], ...
] = ()  # norms that exchange something, which no operator does; `parallel` has them
on_shards: Callable[..., bool] | None = None  # whether an operator takes DTensors that are placed so; `parallel` says
# Sizes that stand for symbols, in two ways, larger than any number that decides about a call and unlike all others
INVENTED = ((1 << 17) + 1, (1 << 18) + 1)
SYMBOL, TENSOR, SLICE = "symbol", "tensor", "slice"


def _unfold(func: Any, tensors: Sequence[torch.Tensor], numbers: Sequence[float], text: str) -> list[torch.Tensor]:
    """A norm of ours, which is an operator by now, taken apart again, so that it is the norm of a larger call."""
    call, _ = call_text.read(text)
    operands = library.with_numbers(call, tensors, numbers)
    c = call.prologue(*operands)
    xhat = normalize(c, call.col_dims, call.norm.name, call.eps, call.groups, "")
    results = [
        relabel(o, dtype) if o.dtype != dtype else o
        for o, dtype in zip(call.epilogue(xhat, c, *operands), call.outputs, strict=True)
    ]
    return [*results, *(torch.empty(library.row_shape(call, tensors), device=c.device) for _ in call.norm.statistics)]


OWN_HANDLERS = HANDLERS | {torch.ops.warpnorm.norm: _unfold, torch.ops.warpnorm.norm.default: _unfold}


class Tape(TorchFunctionMode):
    """Writes down every call of PyTorch's or of ours, and how it was answered. Running statistics are left alone: copies
    of them are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.averaged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_apart = False  # whether there is a norm that is called as it is

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SHARED or (func in OURS and args and library.is_sharded(args[0])):
            self.is_apart = True
            return OURS.get(func, func)(*args, **kwargs)
        given, named = args, kwargs
        if func in AVERAGING and self._is_averaging(func, args, kwargs):
            given, named = self._with_copies(args, kwargs)
        if func is torch.Tensor.to and not torch.compiler.is_dynamo_compiling():
            result = _cast(*args, **kwargs)
        else:
            result = func(*given, **named)
        self.steps.append((func, args, kwargs, result, torch.is_grad_enabled()))
        return result

    def _is_averaging(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > FLAG:
            return bool(args[FLAG])
        is_usual = func in (F.instance_norm, functional.instance_norm)
        return bool(kwargs.get(FLAG_NAMES[int(is_usual)], is_usual))  # older compilers take no bool for an index

    def _with_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = list(args), dict(kwargs)
        for place, name in ((1, "running_mean"), (2, "running_var")):
            buffer = given[place] if len(given) > place else named.get(name)
            if buffer is None:
                continue
            copy = buffer.clone()
            self.averaged.append((buffer, copy))
            if len(given) > place:
                given[place] = copy
            else:
                named[name] = copy
        return tuple(given), named


def _cast(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `x.to`: but a program that is exported checks what `to` is given, and for that computes what nobody reads."""
    dtype = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if not args and len(kwargs) == 1 else None
    if not isinstance(dtype, torch.dtype):
        return x.to(*args, **kwargs)
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


class Writer:
    """What stands on a tape in names and numbers alone: tensors by number, symbols by number."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.leaves: list[int] = []
        self.symbols: list[Any] = []
        self.is_known = True

    def value(self, value: Any, is_result: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            return TENSOR, self.tensor(value, is_result)
        if isinstance(value, (tuple, list)):
            return [self.value(part, is_result) for part in value]
        if isinstance(value, dict):
            return {name: self.value(part, is_result) for name, part in value.items()}
        if isinstance(value, slice):
            return SLICE, self.value(value.start), self.value(value.stop), self.value(value.step)
        if value is Ellipsis or isinstance(value, CONSTANTS):
            return value
        if isinstance(value, (int, float, torch.SymInt)):  # which an export has as itself
            return self.number(value)
        self.is_known = False
        return None

    def tensor(self, tensor: torch.Tensor, is_result: bool) -> int:
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return place
        self.tensors.append(tensor)
        place = len(self.tensors) - 1
        if not is_result:
            self.leaves.append(place)
        return place

    def number(self, value: Any) -> Any:
        from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value, statically_known_true

        if has_static_value(value) or isinstance(value, float):
            return guard_scalar(value)  # floats are constants, as everywhere in a fused function
        for place, symbol in enumerate(self.symbols):
            if statically_known_true(value == symbol):
                return SYMBOL, place
        self.symbols.append(value)
        return SYMBOL, len(self.symbols) - 1

    def leaf(self, place: int) -> tuple[Any, ...]:
        tensor = self.tensors[place]
        sizes = [self.number(size) for size in tensor.shape]
        return place, sizes, tensor.dtype, str(tensor.device), tensor.requires_grad


def run(function: Callable[..., Any], given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of a fused function."""
    if torch.compiler.is_dynamo_compiling() and is_inside():
        return function(*given, **kwargs)
    tape = Tape()
    with tape:
        plain = function(*given, **kwargs)
    if tape.is_apart:
        _say_apart()
        return plain
    results, tree = pytree.tree_flatten(plain)
    writer = Writer()
    steps = []
    for func, args, named, result, has_gradients in tape.steps:
        if _has_tensor(result):
            written = (writer.value(args), writer.value(named), writer.value(result, True))
            steps.append((func, *written, has_gradients))
        elif result is None and _has_tensor(pytree.tree_leaves((args, named))):
            writer.is_known = False  # something was written into a tensor, such as a slice that was assigned to
    wanted = [writer.value(result) if isinstance(result, torch.Tensor) else None for result in results]
    leaves = [writer.leaf(place) for place in writer.leaves]
    found = lower(steps, wanted, leaves, len(writer.symbols)) if writer.is_known and leaves else None
    if found is not None:
        text, name, col_dims, inputs, outputs, effect = found
        norm = NORMS[name]
        shape = next(r.shape for r, o in zip(results, outputs, strict=True) if o is not None)
        tensors = [writer.tensors[place] for place in writer.leaves]
        is_large = routing.is_large(norm, shape, prod(shape[len(shape) - col_dims :]))
        lead = next(t for t in tensors if t.ndim > 0)
        if any(library.is_sharded(t) for t in tensors):
            operands = [] if effect is not None else _operands_on_shards(writer, inputs, shape, text)
        elif routing.route(lead, *tensors, is_large=is_large) != "reference":
            operands = [_seen(writer, entry, shape) for entry in inputs]
        else:
            operands = []
        if operands:
            running = None
            if effect is not None:
                mean, variance, momentum = effect
                size = prod(shape) // shape[1] if norm.rows == "channel" else prod(shape[2:])
                running = Running(writer.tensors[mean], writer.tensors[variance], momentum, size)
            made = library.normalize(norm, text, operands, running=running)
            results = [r if o is None else made[o] for r, o in zip(results, outputs, strict=True)]
            return pytree.tree_unflatten(results, tree)
        _say_small()
    for (
        buffer,
        copy,
    ) in tape.averaged:  # neither has a gradient; an export cannot take a part without results in no_grad
        buffer.copy_(copy)
    return plain


@settings.constant
def _say_small() -> None:
    _log.info("a fused function runs as it is under the compiler: PyTorch's operators are quicker for rows so small")


@settings.constant
def _say_apart() -> None:
    _log.info("a fused function runs as it is under the compiler: its norm has something to exchange or to average")


@settings.constant
def is_inside() -> bool:
    """Whether the compiler traces what belongs to another of its operators, such as a checkpoint: it refuses modes there."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except AttributeError:
        return True


def _has_tensor(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(isinstance(part, torch.Tensor) for part in result)
    return isinstance(result, torch.Tensor)


def _seen(writer: Writer, entry: Any, shape: Any) -> torch.Tensor:
    """An operand: a tensor seen through views."""
    place, moves, is_unreached, is_spread = entry
    tensor = writer.tensors[place]
    for name, args, pick in moves:
        if library.is_sharded(tensor) and _is_all(name, args):
            continue
        moved = MOVES[name](tensor, *[_filled(arg, writer.symbols) for arg in args])
        tensor = moved if pick is None else moved[pick]
    if is_unreached:
        tensor = tensor.detach()
    return tensor.expand(shape) if is_spread else tensor


def _operands_on_shards(writer: Writer, inputs: Any, shape: Any, text: str) -> list[torch.Tensor]:
    """The operands, some of which are DTensors; none where the operator does not take them as they are placed."""
    settings.prepare()
    if on_shards is None or settings.current().route == "reference":
        return []
    if any(map(_is_cut, inputs)):
        on_shards(text, [], [])
        return []
    operands = [_seen(writer, entry, shape) for entry in inputs]
    sizes = [(operand.ndim, tuple(operand.shape) == tuple(shape)) for operand in operands]
    return operands if on_shards(text, sizes, [_placement_codes(operand) for operand in operands]) else []


def _is_cut(entry: Any) -> bool:
    """Whether a part is cut out of an operand: of a DTensor PyTorch gathers or refuses its gradient."""
    return any(name in CUTS and not _is_all(name, args) for name, args, _ in entry[1])


def _is_all(name: str, args: Any) -> bool:
    """A slice that leaves nothing away, as x[:, None] begins."""
    return name == "aten.slice.Tensor" and args[1:2] in ((), (0,)) and (len(args) < 3 or args[2] == sys.maxsize)


def _placement_codes(operand: Any) -> list[int | None] | None:
    """For each dimension of the mesh the dimension that is split, -1 for none, None for anything else; constants."""
    if not library.is_sharded(operand):
        return None
    return [p.dim if p.is_shard() else -1 if p.is_replicate() else None for p in operand.placements]


def _filled(arg: Any, symbols: Sequence[Any]) -> Any:
    if isinstance(arg, (tuple, list)):
        if len(arg) == 2 and arg[0] == SYMBOL:
            return symbols[arg[1]]
        return [_filled(part, symbols) for part in arg]
    return arg


class Lowered(NamedTuple):
    """A call as a text, and the rest of it: `inputs` are (tensor, views, whether no gradient reaches it, whether it is
    spread out), `outputs` say of each result which output it is, `effect` which running statistics are averaged."""

    text: str
    norm: str
    col_dims: int
    inputs: tuple[Any, ...]
    outputs: tuple[int | None, ...]
    effect: tuple[int, int, float] | None


@settings.constant
def lower(steps: list[Any], wanted: list[Any], leaves: list[Any], symbols: int) -> tuple[Any, ...] | None:
    """What was written down as one call; nothing if it cannot be one. A compiler takes it for a constant."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    kind = torch.device(leaves[0][3]).type
    autocast: Any = nullcontext()
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        autocast = torch.autocast(kind, torch.get_autocast_dtype(kind))
    has_gradients = torch.is_grad_enabled()
    found: list[Any] = []

    def both() -> None:
        try:
            with disable_proxy_modes_tracing(), autocast, torch.set_grad_enabled(has_gradients):
                sizes = [[start + 2 * k for k in range(symbols)] for start in INVENTED]
                first, second = (_lowered(steps, wanted, leaves, own) for own in sizes)
                found.append(_agreed(first, second, sizes))
        except (
            AssertionError,
            WarpnormError,
            RuntimeError,
            ValueError,
            TypeError,
            NotImplementedError,
            KeyError,
        ) as error:
            _log.info("a fused function runs as it is under the compiler: %s: %s", type(error).__name__, error)

    # The caller's modes are its own, but for that of an export, which all threads see
    thread = threading.Thread(target=both, name="warpnorm-lower")
    thread.start()
    thread.join()
    return None if not found or found[0] is None else tuple(found[0])


def _agreed(first: Lowered | None, second: Lowered | None, sizes: Sequence[Sequence[int]]) -> Lowered | None:
    """The same for all sizes: numbers that differ as a symbol does become that symbol."""
    if first is None or second is None or first.text != second.text or first[4:] != second[4:]:
        return None
    return first._replace(inputs=_merged(first.inputs, second.inputs, sizes))


def _merged(first: Any, second: Any, sizes: Sequence[Sequence[int]]) -> Any:
    if isinstance(first, tuple):
        return tuple(_merged(a, b, sizes) for a, b in zip(first, second, strict=True))
    if first == second:
        return first
    pairs = list(zip(*sizes, strict=True))
    if (first, second) not in pairs:
        raise ValueError("a size that no symbol has")
    return SYMBOL, pairs.index((first, second))


def _lowered(steps: list[Any], wanted: list[Any], leaves: list[Any], symbols: Sequence[int]) -> Lowered | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = []
    with FakeTensorMode():
        for _, sizes, dtype, device, needs_gradient in leaves:
            shape = [symbols[size[1]] if isinstance(size, tuple) else size for size in sizes]
            tensor = torch.empty(shape, dtype=dtype, device=device)
            tensors.append(tensor.requires_grad_(needs_gradient))
    places = [leaf[0] for leaf in leaves]

    def replayed(*fakes: torch.Tensor) -> Any:
        return _replay(steps, wanted, dict(zip(places, fakes, strict=True)), symbols)

    names = [f"tensor{place}" for place in places]
    request = fusion.Request(replayed, (tuple(tensors), {}), tensors, names, OWN_HANDLERS, NORMS)
    captured = fusion.capture_call(request)
    if captured.draws:
        return None
    sizes = captured.sizes(tensors)
    inputs = tuple(i.at(sizes) for i in captured.inputs)
    prepared = Prepared(captured, inputs, captured.leaves, None, ())
    call, operands = arrange(prepared, tensors)
    if torch.is_grad_enabled():
        needing = tuple(k for k, o in enumerate(operands) if o.requires_grad)  # type: ignore[union-attr]
        checks.check_gradients(captured.call, captured.dtypes, needing)
    text = call_text.written(call, tuple(o.dtype for o in operands if isinstance(o, torch.Tensor)))
    is_native = tensors[0].device.type == "cpu"
    if text is None or (is_native and not pipeline.takes_views(call, tuple(map(_view, operands)), operands)):
        return None
    spread = [a != b for a, b in zip(call.axes, captured.call.axes, strict=True)]
    entries = tuple(
        (places[i.index], tuple(map(_move, i.moves)), k in captured.unreached, spread[k]) for k, i in enumerate(inputs)
    )
    outputs = tuple(leaf.number if isinstance(leaf, fusion.Output) else None for leaf in captured.leaves)
    return Lowered(text, call.norm.name, call.col_dims, entries, outputs, _effect(captured, places))


def _effect(captured: fusion.Captured, places: Sequence[int]) -> tuple[int, int, float] | None:
    """Counters were counted by the function itself."""
    averages = [effect for effect in captured.effects if isinstance(effect, fusion.Average)]
    if not averages:
        return None
    (average,) = averages
    if average.mean.moves or average.variance.moves:
        raise ValueError("running statistics that are views")
    return places[average.mean.index], places[average.variance.index], average.momentum


def _view(operand: Any) -> View:
    return View(tuple(operand.shape), tuple(operand.stride()), operand.dtype)


def _move(move: Any) -> tuple[str, tuple[Any, ...], int | None]:
    name = str(move.target)
    if name not in MOVES or move.kwargs:
        raise ValueError(f"a view by {name}")
    return name, _as_tuple(move.args), move.pick


def _as_tuple(args: Any) -> Any:
    return tuple(_as_tuple(arg) for arg in args) if isinstance(args, (tuple, list)) else args


def _replay(steps: list[Any], wanted: list[Any], values: dict[int, Any], symbols: Sequence[int]) -> Any:
    """The function again, on other tensors."""

    def of(written: Any) -> Any:
        if isinstance(written, tuple) and written[0] == TENSOR:
            return values[written[1]]
        if isinstance(written, tuple) and written[0] == SYMBOL:
            return symbols[written[1]]
        if isinstance(written, tuple) and written[0] == SLICE:
            return slice(*map(of, written[1:]))
        if isinstance(written, dict):
            return {name: of(part) for name, part in written.items()}
        return [of(part) for part in written] if isinstance(written, list) else written

    def keep(written: Any, result: Any) -> None:
        if isinstance(written, list):
            for part, value in zip(written, result, strict=True):
                keep(part, value)
        elif isinstance(written, tuple):
            values[written[1]] = result

    for func, args, named, result, has_gradients in steps:
        with torch.set_grad_enabled(has_gradients):
            keep(result, func(*map(_as_index, map(of, args)), **of(named)))
    return tuple(None if place is None else of(place) for place in wanted)


def _as_index(arg: Any) -> Any:
    """Lists stand for tuples too, which matters in an index alone."""
    return tuple(arg) if isinstance(arg, list) and any(isinstance(a, slice) or a is Ellipsis for a in arg) else arg
