"""`fuse`: an ordinary PyTorch function with one norm in it becomes one kernel, forward and backward. It is captured at its
first call; a function that cannot be fused raises a FusionError there that says why, and is never run in another way."""

import copy
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from warpnorm import compiled, functional, pipeline, reference, repeat, repeat_fused, routing
from warpnorm.arguments import check_layout
from warpnorm.errors import FusionError, InputError, InputTypeError
from warpnorm.launch.call_text import NORMS
from warpnorm.library import is_sharded
from warpnorm.locks import Lock
from warpnorm.parallel import exchange, split
from warpnorm.parallel import functional as parallel
from warpnorm.parallel.opened import opened
from warpnorm.problem import Call, Running
from warpnorm.trace import checks, environment, fusion, handlers, symbolic
from warpnorm.trace.arrange import Prepared, arrange, is_host_scalar, leader

_log = logging.getLogger(__name__)
LARGEST_CACHE = 4096  # layouts of one function; captured graphs and kernels are kept apart from them
MANY_CAPTURES = 32
MOST_CAPTURES = 1024  # of one function: widths may change at every call
NOTHING: Any = object()
HANDLERS = functional.HANDLERS | {
    parallel.layer_norm: handlers.shared(handlers.layer_norm, exchange.name_of),
    parallel.rms_norm: handlers.shared(handlers.rms_norm, exchange.name_of),
    parallel.batch_norm: handlers.shared(handlers.batch_norm, exchange.name_of),
}
LEAF = pytree.tree_structure(0)


class Request(NamedTuple):
    """One call: what the function is given, all tensors that it may read (its arguments', then the others), a key, and which
    attributes of tensors it reads that PyTorch has not given them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    key: Any
    asked: frozenset[str]
    owner: Any


class Bound(functools.partial):
    """A fused method of one object."""

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(self.func.__self__.__wrapped__)  # type: ignore[attr-defined]
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.func.__self__.__wrapped__.__doc__  # type: ignore[attr-defined]


class Fused:
    """A function that runs as one kernel. Binds to an owner as functions do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._captured: dict[Any, list[fusion.Captured]] = {}
        self._prepared: dict[Any, Prepared] = {}
        self._differentiable: set[Any] = set()
        self._lock = Lock()
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        wrapped = self.__wrapped__
        if owner is None or isinstance(wrapped, staticmethod) or not hasattr(type(wrapped), "__get__"):
            return self  # as of a partial or a module, an attribute that is no method
        if torch.compiler.is_compiling():  # which knows no such class
            return functools.partial(self.run, owner)
        return Bound(self.run, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(NOTHING, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<warpnorm.fuse of {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

    def __deepcopy__(self, memo: Any) -> "Fused":
        twin = copy.deepcopy(self.__wrapped__, memo)  # of a method: bound to the twin of its owner
        return self if twin is self.__wrapped__ else fuse(twin)

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(self.__module__)
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return self.__qualname__ if found is self else (fuse, (self.__wrapped__,))

    def run(self, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """One call; `owner` is the object whose method this is."""
        given = args if owner is NOTHING else (owner, *args)
        if routing.is_traced(()):
            return compiled.run(self.__wrapped__, given, kwargs)
        if routing.is_seen_through(()) or is_watched():
            return self.__wrapped__(*given, **kwargs)
        proxy = symbolic.proxy_in(args, kwargs)
        if proxy is not None:
            return self._symbolic(proxy, owner, args, kwargs)
        request = self.request(owner, args, kwargs)
        if routing.is_seen_through(request.tensors):
            if any(map(is_sharded, request.tensors)):
                return self._on_shards(request)
            self._check_layouts(request)
            return self.__wrapped__(*given, **kwargs)
        prepared = self.prepare(request)
        if prepared.order is not None and repeat.quick is not None and not repeat.has_hooks():
            tensors = [request.tensors[i] for i in prepared.order]
            found = repeat.quick(prepared.captured, None, prepared.number, *tensors)
            if found is not None:
                for effect in prepared.captured.effects:
                    if isinstance(effect, fusion.Count):
                        apply_effect(effect, prepared.captured.call, (), request.tensors)
                return found
        is_large = is_large_call(prepared.captured.call, request.tensors)
        route = routing.route(leader(request.tensors), *request.tensors, is_large=is_large)
        if route == "reference":
            return self.__wrapped__(*given, **kwargs)
        call, operands = arrange(prepared, request.tensors)
        if prepared.captured.draws:
            operands += draw(leader(request.tensors).device)
        if route == "native" and not pipeline.takes(call, operands):
            return self.__wrapped__(*given, **kwargs)
        if prepared.captured.ranks:
            group = exchange.group_of(prepared.captured.ranks)
            outputs = self._shared(prepared, call, operands, request.tensors, group)
            leaves = [_leaf(leaf, outputs, request.tensors) for leaf in prepared.leaves]
            return pytree.tree_unflatten(leaves, prepared.captured.tree)
        running = running_of(prepared.captured.effects, call, operands, request.tensors)
        outputs = functional.normalize_and_average(call, operands, None, running)
        for effect in prepared.captured.effects:
            if running is None or not isinstance(effect, fusion.Average):
                apply_effect(effect, call, outputs, request.tensors)
        if prepared.order is not None:
            plain = [request.tensors[i] for i in prepared.order[: len(operands)]]
            of_call, is_tuple = outputs[: len(call.outputs)], prepared.captured.tree != LEAF
            repeat_fused.offer(
                prepared.captured, call, operands, plain, of_call, is_tuple, prepared.differentiable, running
            )
        leaves = [_leaf(leaf, outputs, request.tensors) for leaf in prepared.leaves]
        return pytree.tree_unflatten(leaves, prepared.captured.tree)

    def _symbolic(self, proxy: torch.fx.Proxy, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in a symbolic trace: one node that is fused when it runs; of any method but a module's `forward`, which is
        no function of its arguments alone, the plain PyTorch that it is."""
        if owner is NOTHING:
            return proxy.tracer.create_proxy("call_function", self, args, kwargs)
        is_forward = isinstance(owner, torch.nn.Module) and getattr(type(owner), "forward", None) is self
        found = symbolic.call_of(owner, *args, **kwargs) if is_forward else None
        return self.__wrapped__(owner, *args, **kwargs) if found is None else found

    def _on_shards(self, request: Request) -> Any:
        """One call on DTensors, by what lies here of them; as plain PyTorch where that cannot be."""
        prepared = self.prepare(request)
        try:
            here = opened(prepared, request.tensors)
        except InputError as error:
            _log.info("%r runs as plain PyTorch: %s", self, error)
            return self.__wrapped__(*request.args, **request.kwargs)
        call, operands = arrange(here.prepared, here.operands)
        is_large = is_large_call(call, here.operands)
        route = routing.route(leader(here.operands), *here.operands, is_large=is_large)
        takes = route == "kernels" or (route == "native" and pipeline.takes(call, operands))
        if here.group is not None:
            outputs = self._shared(prepared, call, operands, here.tensors, here.group, takes)
        else:
            outputs = pipeline.normalize(call, operands) if takes else by_definition(call, operands)
            for effect in prepared.captured.effects:
                apply_effect(effect, call, outputs, here.tensors)
        placed = [here.placed(output) for output in outputs[: len(call.outputs)]]
        leaves = [_leaf(leaf, placed, request.tensors) for leaf in prepared.leaves]
        return pytree.tree_unflatten(leaves, prepared.captured.tree)

    def _shared(
        self,
        prepared: Prepared,
        call: Call,
        operands: Sequence[torch.Tensor | float],
        tensors: Sequence[torch.Tensor],
        group: Any,
        takes_kernels: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of a call whose rows lie on several ranks."""
        outputs, merged = split.normalize(call, operands, group, takes_kernels)
        for effect in sorted(prepared.captured.effects, key=lambda effect: isinstance(effect, fusion.Count)):
            if isinstance(effect, fusion.Count):
                apply_effect(effect, call, outputs, tensors)
            else:
                count = outputs[0].numel() // merged.variance.numel()
                running = effect.mean(tensors), effect.variance(tensors)
                parallel.average(
                    merged, count, *running, effect.momentum, f"a result has {outputs[0].numel()} elements"
                )
        return outputs

    def request(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        tensors: list[torch.Tensor] = []
        try:
            key = tuple([_key(arg, tensors) for arg in args])
        except FusionError:
            if owner is NOTHING and self._is_method_of(args[0]):
                return self.request(args[0], args[1:], kwargs)
            raise
        if kwargs:
            key = (*key, *((name, _key(arg, tensors)) for name, arg in kwargs.items()))
        function = self.__wrapped__
        around = environment.read(function) if owner is NOTHING else environment.read(function, owner)
        places: tuple[Any, ...] = tuple([_key(tensor, tensors) for tensor in around.tensors])
        given = args if owner is NOTHING else (owner, *args)
        modes = (torch.get_default_dtype(), _autocast(tensors), torch.is_grad_enabled(), exchange.present())
        if around.asked:
            places = (places, environment.attributes(tensors, around.asked))
        return Request(given, kwargs, tensors, (key, around.key, places, modes), around.asked, owner)

    def _is_method_of(self, owner: Any) -> bool:
        """Whether it is, beneath other decorators: these call it as a function."""
        found = inspect.getattr_static(type(owner), getattr(self, "__name__", ""), None)
        while found is not None and found is not self:
            found = getattr(found, "__wrapped__", None)
        return found is self

    def prepare(self, request: Request) -> Prepared:
        """Captures at the first call, and again only where nothing captured so far fits."""
        tensors = request.tensors
        layout = (request.key, tuple([(t.shape, t.dtype, t.device) for t in tensors]))
        prepared = self._prepared.get(layout)
        if prepared is None:
            with self._lock:
                captured = self._capture(request)
            sizes = captured.sizes(tensors)
            leaves = tuple(leaf.at(sizes) if isinstance(leaf, fusion.Input) else leaf for leaf in captured.leaves)
            prepared = Prepared(
                captured,
                tuple(i.at(sizes) for i in captured.inputs),
                leaves,
                _order(captured),
                _differentiable(captured),
                next((e.momentum for e in captured.effects if isinstance(e, fusion.Average)), ()),
            )
            if len(self._prepared) >= LARGEST_CACHE:
                self._prepared.clear()
            self._prepared[layout] = prepared
        if torch.is_grad_enabled():
            self._check_gradients(prepared, tensors)
        return prepared

    def _capture(self, request: Request) -> fusion.Captured:
        tensors = request.tensors
        if not tensors:
            try:
                inspect.signature(self.__wrapped__).bind(*request.args, **request.kwargs)
            except TypeError as error:
                name = getattr(self.__wrapped__, "__name__", "a fused function")
                raise InputTypeError(f"{name}: {error}") from None
            raise InputError("a fused function needs a tensor among its arguments, but there is none")
        self._check_layouts(request)
        devices = {t.device for t in tensors if not is_host_scalar(t)}
        if len(devices) > 1:
            raise InputError(
                f"the tensors of a fused function are on {', '.join(sorted(map(str, devices)))}, not on one"
            )
        kind = (request.key, tuple((t.ndim, t.dtype, t.device, _fixed_sizes(t)) for t in tensors))
        known = self._captured.get(kind, [])
        for captured in known:
            if captured.fits(tensors):
                return captured
        names = _names(self.__wrapped__, request)
        captured = fusion.capture_call(
            fusion.Request(
                self.__wrapped__, (request.args, request.kwargs), tensors, names, HANDLERS, NORMS, request.asked
            )
        )
        self._check_unchanged(request)
        if sum(map(len, self._captured.values())) >= MOST_CAPTURES:
            for kept in (self._captured, self._prepared, self._differentiable):
                kept.clear()
            known = []
        self._captured[kind] = [*known, captured]
        is_ours = getattr(self.__wrapped__, "__module__", "") == "warpnorm.blocks"  # of all of a kind, of any size
        if sum(map(len, self._captured.values())) == MANY_CAPTURES and not is_ours:
            lengths = len({sizes[-1:] for _, views in self._captured for *_, sizes in views[:1]})
            instead = "a number that changes from call to call is a constant: pass it as a tensor"
            if lengths > MANY_CAPTURES // 2:
                instead = f"each of the {lengths} sizes of the last dimension is one: let there be fewer, if you can"
            warnings.warn(
                f"{self!r} was captured {MANY_CAPTURES} times, each time for other dtypes, sizes or constants; {instead}",
                stacklevel=5,
            )
        return captured

    def _check_layouts(self, request: Request) -> None:
        for tensor, what in zip(request.tensors, _names(self.__wrapped__, request), strict=True):
            if not tensor.is_nested:  # which PyTorch's operators take, some of them
                check_layout("a fused function", what, tensor)

    def _check_unchanged(self, request: Request) -> None:
        """What a function does beside its results is done by its capture alone."""
        args = request.args if request.owner is NOTHING else request.args[1:]
        again = self.request(request.owner, args, request.kwargs).key
        if again != request.key:
            what = ("an argument", "something outside of it", "something outside of it", "a mode of PyTorch's")
            changed = next(name for name, new, old in zip(what, again, request.key, strict=True) if new != old)
            raise FusionError(
                f"{fusion.place(self.__wrapped__)}the function changes {changed}, which would happen only while it is "
                "captured; return the value, and do that outside"
            )

    def _check_gradients(self, prepared: Prepared, tensors: Sequence[torch.Tensor]) -> None:
        silent = prepared.captured.unreached
        wanted = tuple([k for k, i in enumerate(prepared.inputs) if tensors[i.index].requires_grad and k not in silent])
        key = (prepared.captured.call, wanted)
        if wanted and key not in self._differentiable:
            checks.check_gradients(prepared.captured.call, prepared.captured.dtypes, wanted)
            self._differentiable.add(key)


def fuse(function: Callable[..., Any]) -> Fused:
    """An ordinary PyTorch function with one norm in it, as one kernel forward and one, with a small sum, backward.

        @warpnorm.fuse
        def block(x, residual, weight, bias):
            h = residual + F.silu(x)
            return F.layer_norm(h, h.shape[-1:], weight, bias), h

    The norm is torch's or warpnorm's, a function or a module, over rows or by channel (batch_norm, group_norm,
    instance_norm; running statistics are averaged as ever). What comes before and after it must be
    elementwise: everything before the norm that its results depend on is computed again in backward, nothing in between is
    written to memory. Works on functions, lambdas, closures, methods and the `forward` of modules; tensors that the
    function reads from outside are read anew at every call and get gradients.

    On a CPU it becomes native code in the same way; where there is no C compiler, and where rows are so small that PyTorch's
    operators are quicker, it is captured and checked, and then runs as the plain PyTorch that it is.
    Raises a FusionError at the first call where a function cannot be fused; see `warpnorm.explain` for what one becomes."""
    if isinstance(function, Fused):
        return function
    if not callable(function):
        raise InputTypeError(f"fuse: takes a function, but got something of type {type(function).__name__}")
    return Fused(function)


def running_of(
    effects: Sequence[fusion.Average | fusion.Count],
    call: Call,
    operands: Sequence[torch.Tensor | float],
    tensors: Sequence[torch.Tensor],
) -> Running | None:
    """The running statistics of a batch norm, which its kernel averages."""
    for effect in effects:
        if isinstance(effect, fusion.Average) and not call.groups:
            shape = torch.broadcast_shapes(*(o.shape for o in operands if isinstance(o, torch.Tensor)))
            mean = effect.mean(tensors)
            return Running(mean, effect.variance(tensors), effect.momentum, prod(shape) // mean.numel())
    return None


def apply_effect(
    effect: fusion.Average | fusion.Count, call: Call, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """What a call changes beside what it returns."""
    if isinstance(effect, fusion.Count):
        with torch.no_grad():
            effect.counter(tensors).add_(effect.number)
        return
    mean, _, variance = (statistic.detach() for statistic in results[len(call.outputs) :])
    channels = effect.mean(tensors).numel()
    count = results[0].numel() // mean.numel()
    if call.groups:
        mean, variance = mean.view(-1, channels), variance.view(-1, channels)
    reference.update_running(effect.mean(tensors), effect.variance(tensors), mean, variance, count, effect.momentum)


def by_definition(call: Call, operands: Sequence[torch.Tensor | float]) -> tuple[torch.Tensor, ...]:
    """(*outputs, *statistics) by PyTorch's operators."""
    outputs = reference.composite(call, *operands)
    if not call.norm.keeps_variance:  # which nobody asks for
        return outputs
    named = reference.statistics(call, *operands)
    return *outputs, *(named[name] for name in call.norm.statistics)


def is_watched() -> bool:
    """Whether a mode looks at functions, and may change them: any but that of a default device."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def draw(device: torch.device) -> tuple[int, int]:
    """A seed and an offset of PyTorch's generator, which moves on: `torch.manual_seed` repeats them."""
    if device.type != "cuda":
        return int(torch.randint(1 << 62, (), device="cpu")), 0
    if torch.cuda.is_current_stream_capturing():
        raise InputError("a fused dropout cannot be captured in a CUDA graph: every replay would draw the same mask")
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    seed = generator.initial_seed()
    return seed - (1 << 64) if seed >= 1 << 63 else seed, offset


def _leaf(leaf: Any, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, fusion.Output):
        return outputs[leaf.number]
    return leaf(tensors) if isinstance(leaf, fusion.Input) else leaf


def _differentiable(captured: fusion.Captured) -> tuple[int, ...]:
    """The operands whose gradients need nothing but a backward: those that `arrange` leaves as they are in any case."""
    call = captured.call
    found = []
    for k, axes in enumerate(call.axes):
        if isinstance(axes, tuple) and k not in captured.unreached:
            is_by_channel = call.norm.is_by_channel
            row_dims = 2 if is_by_channel else len(axes) - call.col_dims
            rows, cols = axes[:row_dims], axes[row_dims:]
            is_whole = not any(cols) or all(rows) if is_by_channel else len(set(rows)) <= 1
            if is_whole and len(set(cols)) <= 1:
                found.append(k)
    return tuple(found)


def _order(captured: fusion.Captured) -> tuple[int, ...] | None:
    """The numbers of the tensors that are the operands, but for views, and then of the running statistics that a batch norm
    averages into, where the outputs are all that is returned, alone or in a tuple, and nothing is drawn."""
    count = len(captured.call.outputs)
    is_plain = captured.tree in (LEAF, pytree.tree_structure(tuple(range(count))))
    numbers = [leaf.number if isinstance(leaf, fusion.Output) else None for leaf in captured.leaves]
    if not is_plain or numbers != list(range(count)):
        return None
    averages = [effect for effect in captured.effects if isinstance(effect, fusion.Average)]
    running = [input for effect in averages for input in (effect.mean, effect.variance)]
    is_more = captured.draws or captured.ranks or len(averages) > 1 or (averages and captured.call.groups)
    is_moved = any(i.moves for i in (*running, *(() if captured.call.norm.is_by_channel else captured.inputs)))
    if is_more or is_moved or any(type(effect.momentum) is not float for effect in averages):
        return None
    return tuple(i.index for i in (*captured.inputs, *running))


def _key(arg: Any, tensors: list[torch.Tensor]) -> Any:
    """Of an argument: a tensor is the place where it stands in `tensors`, and is added if it is not there."""
    kind = type(arg)
    if kind in routing.PLAIN_TYPES or issubclass(kind, torch.Tensor):
        return environment.place_of(arg, tensors)
    return environment.snapshot(arg, tensors)


def _autocast(tensors: Sequence[torch.Tensor]) -> Any:
    kind = tensors[0].device.type if tensors else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def is_large_call(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether native code is worth a call, by the largest of its tensors."""
    shape = max(tensors, key=torch.Tensor.numel).shape
    return routing.is_large(call.norm, shape, prod(shape[max(len(shape) - call.col_dims, 0) :]))


def _fixed_sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes that a capture holds on to: the last one, zeros and ones; -1 is any other."""
    return tuple(size if size < 2 or dim == tensor.ndim - 1 else -1 for dim, size in enumerate(tensor.shape))


def _names(function: Callable[..., Any], request: Request) -> list[str]:
    """What the user calls each tensor: its parameter's name, or where it stands outside."""
    names = {id(t): f"outer{k}" for k, t in enumerate(request.tensors)}
    try:
        given = inspect.signature(function).bind(*request.args, **request.kwargs).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        given = {f"argument{k}": arg for k, arg in enumerate(request.args)}
    for name, value in given.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                names[id(leaf)] = name + pytree.keystr(path)
    return [names[id(t)] for t in request.tensors]
