"""A recorded function is cut at its norm: what lies before is the prologue, what lies after the epilogue. Both become
expressions over the same operands, and with the norm they are a call like any other."""

import inspect
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from warpnorm.errors import FusionError
from warpnorm.norms import Norm
from warpnorm.problem import NUMBER, Axes, Call, Literal, compute_dtype, operand_name
from warpnorm.trace import checks
from warpnorm.trace.calls import Calls
from warpnorm.trace.expression import DROPOUT, Constant, Expression, Ref, Step
from warpnorm.trace.fakes import Shape, StandIns, Symbols
from warpnorm.trace.record import Counted, Move, NormCall, Recorded, Recorder, Result, Running, Source

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip

COPY = Move(torch.ops.aten.clone.default, (), ())


@dataclass(frozen=True)
class Input:
    """A tensor of the user's, by number, seen through views."""

    index: int
    moves: tuple[Move, ...]

    def at(self, sizes: Mapping[Any, int]) -> "Input":
        """With the sizes of one call in the place of symbols."""
        return Input(
            self.index, tuple(Move(m.target, _at(m.args, sizes), _at(m.kwargs, sizes), m.pick) for m in self.moves)
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self.index]
        for move in self.moves:
            tensor = move.of_user(tensor)
        return tensor


@dataclass(frozen=True)
class Output:
    """An output of the kernel, by number."""

    number: int


@dataclass(frozen=True)
class Average:
    """Running statistics that the norm's own are averaged into after a call."""

    mean: Input
    variance: Input
    momentum: float


@dataclass(frozen=True)
class Count:
    """A counter that a call adds a number to."""

    counter: Input
    number: int


@dataclass(frozen=True)
class Captured:
    """A call, which of the user's tensors its operands are, and the leaves of what the user's function returns: an Output,
    an Input, or anything else that stands for itself. Two numbers, a seed and an offset, follow the operands where
    something is drawn."""

    call: Call
    inputs: tuple[Input, ...]
    draws: bool
    leaves: tuple[Any, ...]
    tree: Any
    symbols: Mapping[Any, tuple[int, int]]
    guards: tuple[Any, ...]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of the operands, seen through views
    shapes: tuple[Any, ...] = ()  # the only ones that it serves, where no symbols could stand for them
    effects: tuple[Average | Count, ...] = ()
    unreached: tuple[int, ...] = ()  # operands that no gradient reaches
    ranks: str = ""  # the name of the process group that shares the rows

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
        return {symbol: tensors[i].shape[dim] for symbol, (i, dim) in self.symbols.items()}

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        sizes = self.sizes(tensors)
        is_served = not self.shapes or self.shapes == _shapes(tensors)
        return is_served and all(bool(guard.xreplace(sizes)) for guard in self.guards)


@dataclass(frozen=True)
class Request:
    """`function` with `arguments` (args, kwargs); `tensors` are all that it may read, `names` what they are called, `asked`
    the attributes of theirs that it reads."""

    function: Callable[..., Any]
    arguments: tuple[Any, Any]
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    handlers: Mapping[Any, Callable[..., Any]]
    norms: Mapping[str, Norm]
    asked: frozenset[str] = frozenset()


def capture_call(request: Request) -> Captured:
    """What is kept for gradients meanwhile is nobody's: a checkpoint would count it, and find less the second time. In
    inference mode views and casts do not come to the recorder, so a capture is not in it."""
    has_gradients = torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(has_gradients),
        torch.autograd.graph.saved_tensors_hooks(_itself, _itself),
    ):
        return by_stand_ins(request) or by_symbols(request)


def _itself(tensor: Any) -> Any:
    return tensor


def by_stand_ins(request: Request) -> Captured | None:
    """None where the function asks for sizes, and where something is wrong with it, which the other way says."""
    stand_ins = StandIns(request.tensors)
    try:
        recorder, result = _record(request, stand_ins)
        is_asked = stand_ins.mode.was_asked or any(isinstance(leaf, Shape) for leaf in pytree.tree_leaves(result))
        return None if is_asked else _cut(recorder, stand_ins, result, request)
    except Exception:
        return None


def by_symbols(request: Request) -> Captured:
    fakes = Symbols(request.tensors)
    with _silent(
        logging.getLogger("torch._subclasses.fake_tensor")
    ):  # what is wrong is raised, and need not be said before
        try:
            recorder, result = _record(request, fakes)
            if any(isinstance(leaf, str | bytes) for leaf in pytree.tree_leaves(result)):
                raise NotImplementedError("a text may tell of sizes: the record is for these alone")
        except FusionError:
            raise
        except Exception:  # a symbol in a place that takes no symbols; what is wrong with the function is raised again
            fakes = Symbols(request.tensors, are_symbolic=False)
            recorder, result = _record(request, fakes)
            return replace(_cut(recorder, fakes, result, request), shapes=_shapes(request.tensors))
    return _cut(recorder, fakes, result, request)


CONSTANTS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, type(None))


def _beside(leaf: Any, norm: NormCall) -> Any:
    """A result that is no tensor: of a symbol, what it is now, which becomes a condition of the record. Whatever else might
    hold tensors that are nobody's."""
    kinds: tuple[tuple[Any, Any], ...] = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
    if _is_size(leaf):  # which PyTorch's trees take for a tuple
        return torch.Size(map(int, leaf))
    for symbol, plain in kinds:
        if isinstance(leaf, symbol):
            return plain(leaf)
    if not isinstance(leaf, CONSTANTS):
        raise FusionError(
            f"{norm.line}: a result is of type {type(leaf).__name__}, which may hold tensors that are not computed yet; "
            "return tensors, numbers and texts, in tuples, lists and dictionaries"
        )
    return leaf


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _record(request: Request, fakes: StandIns | Symbols) -> tuple[Recorder, Any]:
    by_id = {id(real): (i, fake) for i, (real, fake) in enumerate(zip(request.tensors, fakes.fakes, strict=True))}
    recorder = Recorder(by_id)
    for real, fake in zip(request.tensors, fakes.fakes, strict=True):
        for name in request.asked.intersection(vars(real)):
            setattr(fake, name, vars(real)[name])
    args, kwargs = pytree.tree_map(
        lambda leaf: by_id[id(leaf)][1] if isinstance(leaf, torch.Tensor) else leaf, request.arguments
    )
    leaves, tree = pytree.tree_flatten((args, kwargs))
    with fakes.mode, recorder, Calls(request.handlers, fakes):
        result = request.function(*args, **kwargs)
    left, as_left = pytree.tree_flatten((args, kwargs))
    if as_left != tree or any(map(operator.is_not, left, leaves)):
        raise FusionError(
            f"{place(request.function)}the function changes a list or a dictionary that it is given, which would happen "
            "only while it is captured; return what it puts there, and put it there outside"
        )
    return recorder, result


def _cut(recorder: Recorder, fakes: StandIns | Symbols, result: Any, request: Request) -> Captured:
    norm = recorder.norm
    if norm is None:
        raise FusionError(
            f"{place(request.function)}the function holds no norm, and nothing else can be fused; call one of torch's or "
            "of warpnorm's in it"
        )
    if isinstance(norm.c, Literal):
        raise FusionError(f"{norm.line}: the norm is of a constant; normalize a tensor that depends on an argument")
    builder = _Builder(norm, recorder)
    leaves, tree = pytree.tree_flatten(result, is_leaf=_is_size)
    kept: list[Any] = []
    outputs: list[Recorded] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            kept.append(_beside(leaf, norm))
            continue
        value = recorder.value_of(leaf)
        if isinstance(value, Source):
            kept.append(Input(value.index, value.moves))
            continue
        if tuple(leaf.shape) != tuple(norm.c.fake.shape):
            line = value.line if isinstance(value, Result) else norm.line
            raise FusionError(
                f"{line}: a result has shape {_shape(leaf)}, but the normalized tensor at {norm.line} has shape "
                f"{_shape(norm.c.fake)}; every result must have that shape: compute this one outside"
            )
        if leaf.dtype not in DTYPES:
            raise FusionError(f"{norm.line}: a result has dtype {leaf.dtype}, which no kernel writes")
        number = next((k for k, other in enumerate(outputs) if other is value), len(outputs))
        outputs[number:] = outputs[number:] or [value]
        kept.append(Output(number))
    if not any(isinstance(value, Result) and value.depends_on_norm for value in outputs):
        raise FusionError(f"{norm.line}: no result depends on the norm; return what it gives, or leave it away")
    dtypes = tuple(leaf.dtype for leaf in _first_leaves(leaves, kept, len(outputs)))
    compute = builder.compute_dtype([norm.c, *outputs], dtypes)
    prologue, epilogue = builder.expressions(outputs, dtypes, compute)
    axes: tuple[Axes, ...] = tuple(_axes(source.fake, norm.c.fake) for source in builder.sources)
    if recorder.dropouts:
        axes = (*axes, NUMBER, NUMBER)
    detached = tuple(k for k, value in enumerate(outputs) if not _is_differentiable(value))
    call = Call(
        request.norms[norm.norm],
        norm.col_dims,
        norm.eps,
        prologue,
        epilogue,
        axes,
        dtypes,
        compute,
        detached,
        norm.groups,
    )
    own_dtypes = tuple(source.fake.dtype for source in builder.sources)
    checks.check_operators(call, own_dtypes)
    inputs = tuple(_operand(source, recorder.effects) for source in builder.sources)
    shown = tuple(request.names[i.index] + "".join(f".{_move_name(m)}" for m in i.moves) for i in inputs)
    return Captured(
        call, inputs, bool(recorder.dropouts), tuple(kept), tree, fakes.symbols, fakes.guards(), shown, own_dtypes,
        effects=tuple(map(_effect, recorder.effects)), unreached=_unreached(builder.sources, outputs),
        ranks=norm.ranks,
    )  # fmt: skip


def _operand(source: Source, effects: Sequence[Running | Counted]) -> Input:
    """What a call changes is an operand as it was before: backward reads it again."""
    changed = {s.index for e in effects for s in ((e.source,) if isinstance(e, Counted) else (e.mean, e.variance))}
    return Input(source.index, (COPY, *source.moves) if source.index in changed else source.moves)


def _effect(effect: Running | Counted) -> "Average | Count":
    def of(source: Source) -> Input:
        return Input(source.index, source.moves)

    if isinstance(effect, Counted):
        return Count(of(effect.source), effect.number)
    return Average(of(effect.mean), of(effect.variance), effect.momentum)


def place(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


class _Builder:
    """Numbers the operands, in the order in which prologue and epilogue read them."""

    def __init__(self, norm: NormCall, recorder: Recorder) -> None:
        self.norm, self.has_dropout = norm, bool(recorder.dropouts)
        self.sources: list[Source] = []
        self._names: dict[tuple[int, str], str] = {}

    def expressions(
        self, outputs: Sequence[Recorded], dtypes: Sequence[torch.dtype], compute: torch.dtype
    ) -> tuple[Expression, Expression]:
        before = self._steps([self.norm.c], [compute], {})
        leaves = {id(self.norm.c): Ref("c")} if isinstance(self.norm.c, Result) else {}
        after = self._steps(outputs, dtypes, leaves)
        names = [operand_name(i) for i in range(len(self.sources))]
        renamed = {}
        if self.has_dropout:
            names += ["seed", "offset"]
            drawn = [operand_name(len(self.sources)), operand_name(len(self.sources) + 1)]
            renamed = dict(zip(("seed", "offset"), drawn, strict=True))
        given = tuple(renamed.get(name, name) for name in names)
        prologue = Expression(given, *_renamed(before, renamed), compute, is_single=True)
        return prologue, Expression(("xhat", "c", *given), *_renamed(after, renamed), compute)

    def compute_dtype(self, values: Sequence[Recorded], dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """float64 if a result is, of which `dtypes` are those, or anything that it depends on."""
        reached = (v.fake.dtype for value in values for v in _reached(value, lambda _: True))
        return compute_dtype([*reached, *dtypes])

    def _steps(
        self, roots: Sequence[Recorded], dtypes: Sequence[torch.dtype], leaves: Mapping[int, Ref]
    ) -> tuple[tuple[Step, ...], tuple[Any, ...]]:
        steps: list[Step] = []
        found: dict[int, Any] = dict(leaves)

        def build(value: Any) -> Any:
            if id(value) in found:
                return found[id(value)]
            if isinstance(value, Source):
                return Ref(self._operand(value))
            if not isinstance(value, Result):
                return value
            if value.target == "warpnorm.normalize.default":
                return Ref("xhat")
            args = tuple(build(arg) for arg in value.args)
            kwargs = tuple((k, build(arg)) for k, arg in value.kwargs)
            if value.target == DROPOUT:
                if tuple(value.fake.shape) != tuple(self.norm.c.fake.shape):  # type: ignore[union-attr]
                    raise FusionError(
                        f"{value.line}: dropout of a tensor of shape {_shape(value.fake)} cannot be fused: the normalized "
                        f"tensor has shape {_shape(self.norm.c.fake)}; drop out after they are combined, or outside"  # type: ignore[union-attr]
                    )
                args = (args[0], Ref("seed"), Ref("offset"), *args[1:])
            steps.append(Step(f"s{len(steps)}", value.target, args, kwargs, value.line))
            found[id(value)] = Ref(steps[-1].name)
            return found[id(value)]

        outputs = tuple(
            Constant(root, dtype) if isinstance(root, Literal) else build(root)
            for root, dtype in zip(roots, dtypes, strict=True)
        )
        return tuple(steps), outputs

    def _operand(self, source: Source) -> str:
        key = (source.index, str(source.moves))
        if key not in self._names:
            if source.fake.dtype not in DTYPES:
                raise FusionError(f"{self.norm.line}: a tensor of dtype {source.fake.dtype} cannot be fused")
            self._names[key] = operand_name(len(self.sources))
            self.sources.append(source)
        return self._names[key]


def _renamed(
    steps_and_outputs: tuple[tuple[Step, ...], tuple[Any, ...]], names: Mapping[str, str]
) -> tuple[tuple[Step, ...], tuple[Any, ...]]:
    steps, outputs = steps_and_outputs
    if not names:
        return steps, outputs

    def of(arg: Any) -> Any:
        return Ref(names.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg

    return tuple(Step(s.name, s.target, tuple(map(of, s.args)), s.kwargs, s.line) for s in steps), outputs


def _is_differentiable(value: Any) -> bool:
    return any(_differentiated(value))


def _differentiated(value: Any) -> Iterator[Source]:
    """The inputs that a gradient would reach: not through detach(), nor through integers and booleans."""
    passed = _reached(value, lambda v: v.fake.is_floating_point() and not _ends(v))
    return (v for v in passed if isinstance(v, Source))


def _unreached(sources: Sequence[Source], outputs: Sequence[Recorded]) -> tuple[int, ...]:
    reached = {(s.index, str(s.moves)) for value in outputs for s in _differentiated(value)}
    return tuple(k for k, s in enumerate(sources) if (s.index, str(s.moves)) not in reached)


def _ends(value: Source | Result) -> bool:
    return isinstance(value, Result) and value.target == "aten.detach.default"


def _reached(value: Any, passes: Callable[[Any], bool]) -> Iterator[Source | Result]:
    """What a value depends on, itself too, each once; not by way of anything that does not pass."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if id(value) in seen or not isinstance(value, Source | Result) or not passes(value):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Result):
            todo += [*value.args, *(arg for _, arg in value.kwargs)]


def _axes(fake: torch.Tensor, space: torch.Tensor) -> tuple[bool, ...]:
    """For each dimension of the iteration space whether a tensor has values of its own there."""
    missing = space.ndim - fake.ndim
    own = zip(fake.shape, space.shape[missing:], strict=True)
    return (False,) * missing + tuple(not (is_one(size) and not is_one(full)) for size, full in own)


def is_one(size: Any) -> bool:
    """Symbols stand for two and more."""
    return isinstance(size, int) and size == 1


def _first_leaves(leaves: Sequence[Any], kept: Sequence[Any], count: int) -> list[torch.Tensor]:
    return [leaves[kept.index(Output(k))] for k in range(count)]


def _at(tree: Any, sizes: Mapping[Any, int]) -> Any:
    if isinstance(tree, torch.SymInt):
        return int(tree.node.expr.xreplace(sizes))
    return tuple(_at(part, sizes) for part in tree) if isinstance(tree, tuple | list) else tree


def _shape(tensor: torch.Tensor) -> str:
    sizes = [str(s.node.hint) if isinstance(s, torch.SymInt) else str(s) for s in tensor.shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _move_name(move: Move) -> str:
    return str(move.target).split(".")[1]
