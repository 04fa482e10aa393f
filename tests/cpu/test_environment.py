"""The key of what a function reads: every change is seen, tensors are operands, and what cannot be keyed is refused."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpnorm.errors import FusionError
from warpnorm.fuse import fuse
from warpnorm.trace.environment import read, snapshot

Function = Callable[..., Any]
count = 1
weight = torch.ones(4)
act: Any = F


class Plain:
    eps, name = 1.0, "eps"

    @fuse
    def fused(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (4,), None, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.eps


class Mode(Enum):
    PLAIN, SCALED = 1, 2

    def factor(self) -> int:
        return count


@dataclass(frozen=True)
class Settings:
    eps: Any
    shape: tuple[int, ...] = (4,)


class Pair(NamedTuple):
    first: Any
    second: Any = None


class RMSNorm(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (4,), self.weight + self.offset, self.eps)

    def other(self, x: Tensor) -> Tensor:
        return x * count


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.rms = RMSNorm()
        self.scale = 2.0
        self.plain = Plain()
        self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(4), RMSNorm()])

    @property
    def factor(self) -> Any:
        return self.scale * count

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


class Child(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


config, thing, ring = Plain(), object(), [torch.ones(1)]
ring.append(ring)


def helper(x: Tensor) -> Tensor:
    return x * count


def raise_count(_: object = None) -> None:
    global count
    count += 1


def put(path: str, value: object) -> Callable[[Any], None]:
    *names, last = path.split(".")
    return lambda state: setattr(reduce(getattr, names, state), last, value)


def on(function: Function) -> Callable[[Any], Function]:
    return lambda owner: MethodType(function, owner)


@dataclass(frozen=True)
class Change:
    name: str
    start: Callable[[], Any]
    function: Callable[[Any], Function]  # of what `start` made
    change: Callable[[Any], object]
    why: str


def alias(self: Block, x: Tensor) -> Tensor:
    norm = self.rms
    return norm.other(x)


loop = on(lambda self, x: [norm(x) for norm in self.norms])
CHANGES = [
    Change("global", object, lambda _: lambda x: x * count, raise_count, "a number is rebound"),
    Change("global_of_helper", object, lambda _: lambda x: helper(x), raise_count, "read by a function it calls"),
    Change("global_in_lambda", object, lambda _: lambda x: (lambda t: t * count)(x), raise_count, "read inside only"),
    Change("config", lambda: config, lambda _: lambda x: x + config.eps, put("eps", 0.1), "the one attribute it reads"),
    Change("class", lambda: RMSNorm, lambda _: lambda x: x + RMSNorm.offset, put("offset", 2.0), "as a namespace"),
    Change("list", lambda: [1.0], lambda s: lambda x: x * s[0], lambda s: s.append(2.0), "mutated in place"),
    Change("list_in_lambda", lambda: [1], lambda s: lambda x: (lambda: s)(), lambda s: s.append(2), "a cell passed on"),
    Change("dict", lambda: {"a": 1}, lambda s: lambda x: x * s["a"], lambda s: s.update(a=2), "mutated in place"),
    Change("partial", lambda: [1], lambda s: partial(helper, s), lambda s: s.append(1), "an argument given"),
    Change("partial_inside", lambda: [partial(helper)], lambda s: lambda x: s[0](x), raise_count, "its global"),
    Change("default", lambda: lambda x, y=1: x * y, lambda f: f, put("__defaults__", (7,)), "of an argument"),
    Change("keyword_default", lambda: lambda *, y=[1]: y, lambda f: f, lambda f: f().append(2), "mutated in place"),
    Change("attribute_of_function", lambda: lambda x: x, lambda f: lambda x: x * f.eps, put("eps", 3), "put on it"),
    Change("attribute_of_tensor", lambda: torch.ones(4), lambda t: lambda x: x * t.eps, put("eps", 3), "put on it"),
    Change("module", globals, lambda _: lambda x: act.relu(x), lambda s: s.update(act=torch), "a name is rebound"),
    Change("builtin", globals, lambda _: lambda x: float(x), lambda s: s.update(float=int), "a global hides it"),
    Change("self_number", Block, lambda b: b.forward, put("scale", 3.0), "read from self"),
    Change("self_deep", Block, on(lambda self, x: x + self.plain.eps), put("plain.eps", 1), "two attributes deep"),
    Change("training", Block, on(lambda self, x: x if self.training else -x), nn.Module.eval, "a flag of the module"),
    Change("torch_module", Block, lambda b: b.forward, put("norm.eps", 0.1), "torch's module is keyed whole"),
    Change("module_replaced", Block, lambda b: b.forward, put("norm", nn.RMSNorm(4)), "another class in its place"),
    Change("user_module", Block, on(lambda self, x: self.rms(x)), put("rms.eps", 0.1), "read by its forward"),
    Change("module_list", Block, loop, lambda b: put("eps", 0.1)(b.norms[1]), "a module inside of a list"),
    Change("parameter_list", Block, on(lambda self, x: x * self.scales[0]), lambda b: b.scales.append(weight), "grown"),
    Change("alias", Block, on(alias), raise_count, "the global of a method, reached through a local name"),
    Change("class_of_module", Block, loop, lambda _: put("offset", 1.0)(RMSNorm), "an attribute of its class"),
    Change("property", Block, on(lambda self, x: x * self.factor), raise_count, "what a property reads"),
    Change("method", Block, on(lambda self, x: self.forward(x)), put("scale", 3.0), "read by another method"),
    Change("super", Child, lambda b: b.forward, put("scale", 3.0), "read by the method of the base class"),
    Change("no_grad", Block, on(torch.no_grad()(Block.forward)), put("scale", 3.0), "under a decorator of torch"),
    Change("fused", Plain, lambda p: lambda x: p.fused(x), put("eps", 2.0), "a fused method of any object"),
    Change("star_args", RMSNorm, on(lambda *args: args[0].eps), put("eps", 0.1), "self without a name"),
    Change("self_in_lambda", Block, on(lambda self, x: (lambda: self.scale * x)()), put("scale", 3.0), "as a cell"),
    Change("call", Block, on(lambda self, x: self.plain(x)), put("plain.eps", 2), "of any object that is called"),
    Change("enum", lambda: [Mode.PLAIN], lambda s: lambda x: s, lambda s: s.append(Mode.SCALED), "a member"),
    Change("enum_method", lambda: Mode.PLAIN, lambda m: lambda x: x * m.factor(), raise_count, "a method of a member"),
    Change("frozen", lambda: [Settings(1)], lambda s: lambda x: s, lambda s: s.__setitem__(0, Settings(2)), "by value"),
]


@pytest.fixture(autouse=True)
def globals_restored() -> Iterator[None]:
    before = dict(globals())
    yield
    globals().update(before)
    globals().pop("float", None)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_change_is_seen(case: Change) -> None:
    state = case.start()
    function = case.function(state)
    before = read(function)
    assert {read(function).key} == {before.key}
    case.change(state)
    assert read(function).key != before.key, case.why


def test_functions_of_one_factory_differ_by_their_constants() -> None:
    def scaled(scale: Any) -> Function:
        return lambda x: x * scale

    values = [1, 1.0, True, 0.0, -0.0, 0, "1", b"1", None, float("nan"), 1j, (1,), [1], {1}, torch.float32, int, F.silu]
    keys = [read(scaled(value)).key for value in values]
    assert len(set(keys)) == len(values)
    assert keys == [read(scaled(value)).key for value in values]
    assert snapshot(Pair(1), []) == snapshot(Pair(1), []) != snapshot((1, None), [])
    assert snapshot(slice(0, 1), []) != snapshot(slice(0, True), [])
    assert snapshot(Settings(Pair([2])), []) == snapshot(Settings(Pair([2])), [])
    function = scaled(2.0)
    function.__closure__[0].cell_contents = 3.0
    assert read(function).key == read(scaled(3.0)).key


def test_tensors_are_found_once_and_refetched() -> None:
    block, local = Block(), torch.ones(4)

    def function(self: Block, x: Tensor) -> Tensor:
        return self.norm(x) * self.norm.weight * local * weight.float() + self.rms(x) * self.scales[1]

    for _ in range(2):
        expected = [local, weight, block.norm.weight, block.norm.bias, block.rms.weight, *block.scales]
        found = read(function, block)
        assert {id(tensor) for tensor in found.tensors} == {id(tensor) for tensor in expected}
        assert len(found.tensors) == len(expected), "each of them once"
        assert list(map(id, read(MethodType(function, block)).tensors)) == list(map(id, found.tensors)), "in order"
        block.norm.weight, local = nn.Parameter(torch.zeros(4)), torch.zeros(4)
    assert read(function, block).key == found.key, "a new tensor is a new operand, not a new function"
    block.norm.bias = block.norm.weight
    assert read(function, block).key != found.key, "two operands became one"


def test_tensors_of_arguments_join_those_that_are_there() -> None:
    tensors = [weight]
    assert snapshot([weight, other := torch.ones(1), other], tensors) == (list, (0, 1, 1))
    assert list(map(id, tensors)) == [id(weight), id(other)]
    with pytest.raises(FusionError, match="`x` is of type Plain"):
        snapshot(Plain(), tensors, "x")


def test_functions_may_refer_to_themselves() -> None:
    def outer(x: Tensor, depth: int) -> Tensor:
        return inner(x, depth - 1) if depth else x * count

    def inner(x: Tensor, depth: int) -> Tensor:
        return outer(x, depth)

    before = read(outer)
    assert read(outer).key == before.key
    raise_count()
    assert read(outer).key != before.key


def test_what_is_not_there_is_left_to_the_function() -> None:
    function = on(lambda self, x: self.missing + never_defined)(Block())  # type: ignore[name-defined]  # noqa: F821
    assert read(function).key == read(function).key


def imports(x: Tensor) -> Any:
    import random

    return random.random() * x


def assigns(self: Any, x: Tensor) -> Any:
    self.last = x
    return x


hooked = Block()
hooked.norm.register_forward_hook(lambda *_: None)


@dataclass(frozen=True)
class Refusal:
    name: str
    function: Function
    words: str
    why: str


REFUSALS = [
    Refusal("object", lambda x: repr(thing), "`thing` is of type object", "its state is hidden"),
    Refusal("bare_config", lambda x: vars(config), "`config` is of type Plain", "all of it may be read"),
    Refusal("held", lambda x: Pair(x, Settings(thing)), "`thing` is of type object", "wherever it is put"),
    Refusal("in_list", (lambda s: lambda x: s)([thing]), "`s` holds a value of type object", "a list is its content"),
    Refusal("getattr", on(lambda self, x: getattr(self, self.name))(Plain()), "`self` is of type Plain", "any name"),
    Refusal("in_self", on(lambda self, x: str(self.plain))(Block()), "`self.plain` is of type Plain", "all of it"),
    Refusal("module", lambda x: vars(json), "`json` is of type module", "all of it may be read"),
    Refusal("clock", lambda x: x * time.time(), "`time.time` is of type builtin", "another value each time"),
    Refusal(
        "drawn", lambda x: x * np.random.rand(), "reads `np.random.rand`, which changes", "another value each time"
    ),
    Refusal("seed", lambda x: x * torch.initial_seed(), "reads `torch.initial_seed`, which changes", "it may be set"),
    Refusal(
        "flag",
        lambda x: x * torch.backends.cudnn.enabled,
        "reads `torch.backends.cudnn.enabled`, which",
        "it may be set",
    ),
    Refusal(
        "mode",
        lambda x: x * torch.is_inference_mode_enabled(),
        "reads `torch.is_inference_mode_enabled`",
        "never in one",
    ),
    Refusal("globals", lambda x: globals()["count"], "`globals` is of type builtin", "no path shows what it reads"),
    Refusal("hooks", hooked.forward, "`self.norm` is of type LayerNorm, with hooks", "they would run only once"),
    Refusal("ring", lambda x: ring[0], "`ring` is of type list, and holds itself", "it has no end"),
    Refusal("import", imports, "imports `random`", "what it reads there has no path"),
    Refusal("reassigned", on(lambda self, x: (self := self.rms)(x))(Block()), "assigns to `self`", "who is it then"),
    Refusal("assigned", on(assigns)(Block()), "assigns to `self.last`", "it would happen only once"),
    Refusal("super_object", on(lambda self, x: super(Block, self).extra)(Plain()), "`self` is of type Plain", "bare"),
    Refusal("set_of_tensors", (lambda s: lambda x: s)({weight}), "`s` is of type set", "operands have an order"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_what_cannot_be_keyed_is_refused(case: Refusal) -> None:
    for _ in range(2):  # at every call
        with pytest.raises(FusionError) as error:
            read(case.function)
        assert case.words in str(error.value), case.why
        assert f"{__file__}:" in str(error.value)
