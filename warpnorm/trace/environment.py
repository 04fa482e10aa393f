"""What a function's result may depend on besides its arguments (its closure, globals and `self`, and those of what it
calls), as one hashable key and a list of tensors. What has no key is an error: a captured graph must never be stale."""

import builtins
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from warpnorm.errors import FusionError
from warpnorm.trace.bytecode import Use, asked, loads, refusal, trusted
from warpnorm.trace.fakes import is_left

# What trusted packages have that does change; dots end a name
CHANGING = (
    "numpy.random.",
    "torch.initial_seed",
    "torch.seed",
    "torch.random.",
    "torch.get_num_threads",
    "torch.get_rng_state",
    "torch.are_deterministic_algorithms_enabled",
    "torch.backends.",
    "torch.get_float32_matmul_precision",
    "torch.is_inference_mode_enabled",
)
UNSEEN = frozenset({"globals", "eval", "exec", "__import__", "open", "input"})  # builtins that read what no path shows
TENSOR = torch.Tensor
PLAIN = (torch.Tensor, nn.Parameter)
MODULE_STATE = frozenset(vars(nn.Module()))
# What a class carries for itself, and methods that nobody runs on an object that is there already.
UNREAD = (frozenset(dir(object)) - {"__init__", "__new__"}) | {"__post_init__", "extra_repr", "_abc_impl"}


class Environment(NamedTuple):
    """Two environments with equal keys may share a captured graph; the tensors are its operands, each of them once. `asked`
    are attributes that tensors may have by their user, and that are read."""

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    asked: frozenset[str] = frozenset()


def attributes(tensors: list[torch.Tensor], names: frozenset[str]) -> Hashable:
    """The key of those attributes of tensors. What is a tensor joins them."""
    found = []
    for place, tensor in enumerate(tensors):
        for name in names.intersection(vars(tensor)):
            found.append((place, name, snapshot(vars(tensor)[name], tensors, f"the attribute {name} of a tensor")))
    return frozenset(found)


def place_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    """Where it stands in `tensors`, to which it is added if it is not there; of a Parameter below zero."""
    place = 0
    for known in tensors:
        if known is tensor:
            break
        place += 1  # quicker than `enumerate`
    else:
        tensors.append(tensor)
    return place if type(tensor) is TENSOR else ~place


@dataclass(frozen=True, eq=False)
class Reads:
    """What a code object reads from outside: (where, name, uses). Found once, it stands for the code object in keys,
    for a code object is slow to hash."""

    code: CodeType
    roots: tuple[tuple[str, str, tuple[Use, ...]], ...]
    asked: frozenset[str] = frozenset()
    modules: dict[str, ModuleType] = field(default_factory=dict)  # trusted ones that were seen under a name


class _UnkeyableError(Exception):
    """The bare fact; who knows the name of the value tells the user."""

    def __init__(self, value: object, fact: str = "") -> None:
        self.value, self.fact = value, fact


class _Nothing:
    """Stands for a value that is not there."""


_BUILTINS = vars(builtins)
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(Environment)["key"]))  # hold no state
# Values that are their own key, whatever is read from them; by id, for not every value has a hash.
_fixed: dict[int, Any] = {id(v): v for k, v in _BUILTINS.items() if callable(v) and k not in UNSEEN}
_fixed[id(_Nothing)] = _Nothing
LARGEST_CACHE = 4096  # code objects: whoever makes functions of texts may make any number
_reads: tuple[dict[int, Reads], dict[int, Reads]] = ({}, {})  # without and with `self`; by the id of the code they hold


def read(function: Callable[..., Any], owner: object = _Nothing) -> Environment:
    """All that `function` depends on besides its arguments, as it is now. `owner` is its `self`, if it has one."""
    tensors: list[torch.Tensor] = []
    reader, bound = _Reader(tensors), function if owner is _Nothing else MethodType(function, owner)
    try:
        key = reader.function(function, owner) if isinstance(function, FunctionType) else reader.called(bound)
        return Environment(key, tuple(tensors), reader.asked)
    except (_UnkeyableError, RecursionError) as error:
        raise FusionError(_complaint(error, "the function", bound)) from None


AN_ARGUMENT = "an argument"


def snapshot(value: Any, tensors: list[torch.Tensor], name: str = AN_ARGUMENT) -> Hashable:
    """The key of a bare value. Tensors join `tensors`, unless they are there, and stand in the key as their index."""
    try:
        return _Reader(tensors).key(value)
    except (_UnkeyableError, RecursionError) as error:
        raise FusionError(_complaint(error, name, value)) from None


def _complaint(error: BaseException, name: str, target: object) -> str:
    found = error if isinstance(error, _UnkeyableError) else _UnkeyableError(target, ", and holds itself.")
    verb = "is" if found.value is target else "holds a value"
    kinds = "a number, a tensor, a tuple or a frozen dataclass"
    such = f" (such as `{name}.eps`)" if "eps" in dir(target) else ""
    instead = f" Pass it as an argument, read only the attribute that is needed{such}, or make it {kinds}."
    if name == AN_ARGUMENT:
        instead = f" Pass {kinds} instead; torch.as_tensor makes a tensor of an array."
    return f"`{name}` {verb} of type {type(found.value).__qualname__}" + (
        found.fact
        or ", whose value cannot be part of the key of the captured function, so a later change would go unnoticed."
        + instead
    )


def _analyse(code: CodeType, is_method: bool) -> Reads:
    own = code.co_varnames[0] if is_method and code.co_argcount else None
    found: dict[tuple[str, str], dict[Use, None]] = {}
    if is_method and own is None:  # `self` is in `*args`, and may be used in any way
        found["own", "self"] = {Use(): None}
    outer = frozenset(code.co_freevars)
    for where, name, use in loads(code, code, outer, own):
        found.setdefault((where, name), {})[use] = None
    roots = tuple((where, name, tuple(uses)) for (where, name), uses in found.items())
    reads = Reads(code, roots, asked(code, outer, own))
    if len(_reads[is_method]) >= LARGEST_CACHE:
        _reads[is_method].clear()  # keys that hold what was there fit no more, and nothing is wrong
    return _reads[is_method].setdefault(id(code), reads)


class _Reader:
    """One reading. It knows what it has met, so that a tensor is one operand and a function may refer to itself."""

    asked: frozenset[str] = frozenset()

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.met: dict[tuple[int, int], tuple[int, object, object]] = {}  # with the objects: their ids stay in use

    def key(self, value: Any) -> Hashable:
        return (_RULES.get(type(value)) or _rule(type(value)))(self, value)

    def again(self, value: object, owner: object = _Nothing) -> Hashable:
        """What stands for a value that was met before; None for a new one."""
        place = (id(value), id(owner))
        if place in self.met:
            return "again", self.met[place][0]
        self.met[place] = (len(self.met), value, owner)
        return None

    def function(self, function: FunctionType, owner: Any = _Nothing) -> Hashable:
        """Its code, and the keys of all that the code reads from outside."""
        if again := self.again(function, owner):
            return again
        scope, code, closure = function.__globals__, function.__code__, function.__closure__ or ()
        if trusted(scope.get("__name__")):
            return self.trusted_function(function, owner)
        is_method = owner is not _Nothing
        reads = _reads[is_method].get(id(code)) or _analyse(code, is_method)
        parts: list[Hashable] = [reads]
        if reads.asked:
            self.asked |= reads.asked
        for where, name, uses in reads.roots:
            if where == "global":
                value = scope.get(name, _Nothing)
                value = _BUILTINS.get(name, _Nothing) if value is _Nothing else value
            elif where == "own":
                value = owner
            else:
                value = _content(closure[code.co_freevars.index("__class__" if where == "super" else name)])
                value = super(value, owner) if where == "super" else value
            is_known = id(value) in _fixed or reads.modules.get(name) is value
            parts.append(value if is_known else self.uses(reads, name, value, uses))
        if function.__defaults__ or function.__kwdefaults__ or function.__dict__:
            for name in ("__defaults__", "__kwdefaults__", "__dict__"):
                parts.append(self.uses(reads, f"{code.co_name}.{name}", getattr(function, name), (Use(),)))
        return tuple(parts)

    def trusted_function(self, function: FunctionType, owner: Any) -> Hashable:
        """It reads nothing but the functions that it was made of, if any: `torch.no_grad()` makes such a one."""
        wrapped = function.__dict__.get("__wrapped__")
        if "register" in function.__dict__:
            return self.dispatched(function)
        if isinstance(wrapped, FunctionType):
            return function, self.function(wrapped, owner)
        inner = [_content(cell) for cell in function.__closure__ or ()]
        keys = [self.key(value) for value in inner if isinstance(value, (FunctionType, MethodType, nn.Module))]
        return function, tuple(keys), self.module(owner, True) if isinstance(owner, nn.Module) else self.key(owner)

    def dispatched(self, function: Any) -> Hashable:
        """A function of `functools.singledispatch`: every implementation. Fakes are tensors, but of no class among them."""
        registry = getattr(function, "registry", None)  # of methods it is out of reach
        if registry is None or any(issubclass(kind, torch.Tensor) and kind is not torch.Tensor for kind in registry):
            why = ", which chooses among implementations in a way that a capture cannot follow: call the one that is meant."
            raise _UnkeyableError(function, why)
        return function, tuple([(kind, self.key(found)) for kind, found in registry.items()])

    def uses(self, reads: Reads, name: str, value: Any, uses: Iterable[Use]) -> Hashable:
        code = reads.code
        if isinstance(value, ModuleType) and trusted(value.__name__):
            for names, _, compared in uses:
                if compared:
                    _refuse_classes(code, self.follow(value, names), (name, *names))
                path = f"{value.__name__}.{'.'.join(names)}"
                if path.startswith(CHANGING):
                    what = f"reads `{'.'.join((name, *names))}`, which changes from call to call"
                    raise refusal(code, f"{what}; read it outside, and pass it as an argument")
            reads.modules[name] = value
            return value
        keys = []
        for names, called, compared in uses:
            target = self.follow(value, names)
            if compared:
                _refuse_classes(code, target, (name, *names))
            try:
                keys.append(self.called(target) if called else self.key(target))
            except (_UnkeyableError, RecursionError) as error:
                problem = _complaint(error, ".".join((name, *names)), target)
                raise refusal(code, f"cannot be captured: {problem}") from None
        return tuple(keys)

    def follow(self, value: Any, names: Iterable[str]) -> Any:
        """The value at the end of a path, or the one whose own type provides the rest of it, as a tensor does."""
        for name in names:
            kind = type(value)
            if (_RULES.get(kind) or _rule(kind)) in _CLOSED and name not in getattr(value, "__dict__", ()):
                return value
            getter = getattr(kind, name, None)
            if type(getter) is property and isinstance(getter.fget, FunctionType):
                return MethodType(getter.fget, value)  # what it reads, not what it makes: that may be a new tensor
            value = getattr(value, name, _Nothing)
        return value

    def called(self, value: Any) -> Hashable:
        """Of a user's object that is only called, no more than the call reads."""
        kind = type(value)
        if trusted(kind.__module__) or _rule(kind) not in (_Reader.module, _Reader.refuse):
            return self.key(value)
        call: Any = kind.__call__
        if call is nn.Module.__call__:
            _refuse_hooks(value)
            return "call", value.training, self.key(value.forward)
        return ("call", self.function(call, value)) if isinstance(call, FunctionType) else self.refuse(value)

    def tensor(self, value: torch.Tensor) -> Hashable:
        if type(value) not in PLAIN and is_left(value):
            why = ", which a capture left there: the function puts a result into something outside of it"
            raise _UnkeyableError(value, f"{why}, and that happens only while it is captured; return it instead.")
        return place_of(value, self.tensors)

    def sequence(self, value: Iterable[Any]) -> Hashable:
        return type(value), tuple([self.key(item) for item in value])

    def unordered(self, value: Iterable[Any]) -> Hashable:
        tensors: list[torch.Tensor] = []
        keys = frozenset([_Reader(tensors).key(item) for item in value])
        return self.refuse(value) if tensors else (type(value), keys)  # operands need an order

    def mapping(self, value: dict[Any, Any]) -> Hashable:
        return type(value), tuple([(self.key(name), self.key(item)) for name, item in value.items()])

    def record(self, value: Any) -> Hashable:
        """A named tuple or a frozen dataclass."""
        names = () if isinstance(value, tuple) else tuple([field.name for field in fields(value)])
        items = value if isinstance(value, tuple) else [getattr(value, name) for name in names]
        more = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in names}
        return self.kind(type(value)), tuple([self.key(item) for item in items]), self.key(more)

    def module(self, value: nn.Module, is_owner: bool = False) -> Hashable:
        """All that it holds, for what is done with it cannot be told. Hooks of an owner run around its fused `forward`, and
        one of our own classes does not read what others keep in it, such as `fully_shard`."""
        if again := self.again(value):
            return again
        if not is_owner:
            _refuse_hooks(value)
        state, is_ours = vars(value), is_owner and trusted(type(value).__module__)
        entries = []
        for name, item in state.items():
            if name not in MODULE_STATE:
                before = len(self.tensors), len(self.met)
                try:
                    entries.append((name, self.key(item)))
                except (_UnkeyableError, FusionError):
                    if not is_ours:
                        raise
                    del self.tensors[before[0] :]
                    self.met = {place: known for place, known in self.met.items() if known[0] < before[1]}
        for group in ("_parameters", "_buffers", "_modules"):
            entries += [(name, self.key(item)) for name, item in state[group].items()]
        return self.kind(type(value)), value.training, tuple(entries)

    def kind(self, kind: type) -> Hashable:
        """A class: itself and, if it is a user's, its attributes and all that its methods read."""
        if trusted(kind.__module__):
            return kind
        if issubclass(kind, torch.autograd.Function):
            raise _UnkeyableError(
                kind, ", an autograd function, whose own gradient no kernel has; write it in operators"
            )
        if again := self.again(kind):
            return again
        items = [item for base in kind.__mro__ if not trusted(base.__module__) for item in vars(base).items()]
        if issubclass(kind, Enum):  # its members are as they were made
            items = [(name, item) for name, item in items if isinstance(_plain(item), FunctionType)]
        plain = [(name, _plain(item)) for name, item in items]
        return kind, tuple([(name, self.key(item)) for name, item in plain if _is_read(kind, name, item)])

    def method(self, value: MethodType) -> Hashable:
        function: Any = value.__func__
        while not isinstance(function, FunctionType | None) and trusted(type(function).__module__):
            function = getattr(function, "__wrapped__", None)
        is_known = isinstance(function, FunctionType)
        return ("bound", self.function(function, value.__self__)) if is_known else self.refuse(value)

    def partial(self, value: partial) -> Hashable:
        maker = getattr(value.func, "__self__", None)
        wrapped = getattr(maker, "__wrapped__", None) if trusted(type(maker).__module__) else None
        if isinstance(wrapped, FunctionType) and value.args:  # a method that `fuse` bound to its owner
            owner, *args = value.args
            return "bound", self.function(wrapped, owner), self.key((args, value.keywords))
        return type(value), self.key((value.func, value.args, value.keywords))

    def builtin(self, value: Any) -> Hashable:
        if trusted(getattr(value, "__module__", None)) and value.__name__ not in UNSEEN:
            return value
        owner = getattr(value, "__self__", None)
        is_bound = owner is not None and not isinstance(owner, ModuleType)
        return ("bound", value.__name__, self.key(owner)) if is_bound else self.refuse(value)

    def wrapper(self, value: Any) -> Hashable:
        """An object of a trusted class that stands for a function, as `fuse` makes it."""
        if type(value).__module__ == "functools" and hasattr(value, "register"):
            return self.dispatched(value)
        wrapped = getattr(value, "__wrapped__", None)
        return (type(value), self.key(wrapped)) if callable(wrapped) else self.refuse(value)

    def constant(self, value: Hashable) -> Hashable:
        return type(value), value

    def ranks(self, value: Any) -> Hashable:
        """A process group is found again by its name."""
        return type(value), value.group_name, value.size()

    def member(self, value: Enum) -> Hashable:
        return self.kind(type(value)), value

    def spelled(self, value: Any) -> Hashable:
        return type(value), repr(value)

    def refuse(self, value: object) -> Hashable:
        raise _UnkeyableError(value)


Rule = Callable[[_Reader, Any], Hashable]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _Nothing


def _refuse_classes(code: CodeType, value: Any, names: Iterable[str]) -> None:
    if isinstance(value, type) and issubclass(value, torch.Tensor):
        what = f"compares a type with `{'.'.join(names)}`, but while it is captured tensors are of a type of their own"
        raise refusal(code, f"{what}; use isinstance, or decide outside of the fused function")


def _refuse_hooks(module: nn.Module) -> None:
    of_all = vars(nn.modules.module)
    if any(of_all.get(f"_global_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre")):
        raise _UnkeyableError(
            module, ", and all modules have hooks, which would run only while it is captured: remove them."
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise _UnkeyableError(module, ", with hooks, which would run only while it is captured: remove them.")


def _plain(item: Any) -> Any:
    """The function in an attribute of a class, or the attribute."""
    if isinstance(item, FunctionType) or not trusted(type(item).__module__):
        return item
    found = item.fget if isinstance(item, property) else item.func if isinstance(item, cached_property) else item
    return getattr(found, "__wrapped__", found)  # of static methods too


def _is_read(kind: type, name: str, item: Any) -> bool:
    """Whether an attribute of a user's class may change what a function does with the class or its instances."""
    if isinstance(item, FunctionType):
        is_generated = hasattr(kind, "__dataclass_fields__") or issubclass(kind, tuple)
        return name not in UNREAD and not (is_generated and name in ("__init__", "__new__"))
    return name not in UNREAD and not name.startswith("__") and not isinstance(item, SLOTS)


def _rule(kind: type) -> Rule:
    """How a value of this type becomes a key; what is not listed is of no use to a captured function, or changes."""
    if kind not in _RULES:
        params = getattr(kind, "__dataclass_params__", None)
        ordered: list[tuple[bool, Rule]] = [
            (issubclass(kind, torch.Tensor), _Reader.tensor),
            (issubclass(kind, partial) and trusted(kind.__module__), _Reader.partial),
            (issubclass(kind, nn.Module), _Reader.module),
            (issubclass(kind, type), _Reader.kind),
            (issubclass(kind, Enum), _Reader.member),
            (torch.distributed.is_available() and issubclass(kind, torch.distributed.ProcessGroup), _Reader.ranks),
            (kind.__module__ in ("typing", "torch._ops"), _Reader.constant),
            (issubclass(kind, tuple) and hasattr(kind, "_fields"), _Reader.record),
            (issubclass(kind, tuple) and trusted(kind.__module__), _Reader.sequence),
            (params is not None and params.frozen, _Reader.record),
            (kind.__module__ == "numpy" and hasattr(kind, "item") and kind.__hash__ is not None, _Reader.spelled),
            (trusted(kind.__module__), _Reader.wrapper),
        ]
        _RULES[kind] = next((rule for holds, rule in ordered if holds), _Reader.refuse)
    return _RULES[kind]


_RULES: dict[type, Rule] = {
    **dict.fromkeys((types.NoneType, types.EllipsisType, bool, int, bytes), _Reader.constant),
    **dict.fromkeys((torch.dtype, torch.device, torch.layout, torch.memory_format), _Reader.constant),
    **dict.fromkeys((complex, range, torch.finfo, torch.iinfo), _Reader.spelled),
    **dict.fromkeys((tuple, list, torch.Size), _Reader.sequence),
    **dict.fromkeys((dict, OrderedDict), _Reader.mapping),
    **dict.fromkeys((set, frozenset), _Reader.unordered),
    **dict.fromkeys((types.BuiltinFunctionType, types.MethodWrapperType), _Reader.builtin),
    **dict.fromkeys((types.MethodDescriptorType, types.WrapperDescriptorType), _Reader.constant),
    **dict.fromkeys((types.GenericAlias, types.UnionType), _Reader.constant),
    str: lambda _, value: value,  # the only key that is a string
    float: lambda _, value: (float, value if value and value == value else repr(value)),  # 0.0 is -0.0, nan is not nan
    slice: lambda reader, value: (slice, reader.key((value.start, value.stop, value.step))),
    partial: _Reader.partial,
    FunctionType: _Reader.function,
    MethodType: _Reader.method,
    ModuleType: lambda reader, value: value if trusted(value.__name__) else reader.refuse(value),
}
# From these a path goes no further: they are keyed whole, and the next name is one that their type provides.
_CLOSED = {_RULES[kind] for kind in _RULES if kind is not ModuleType} | {_Reader.tensor}
