"""What a fused function reads may change in ways that are easily overlooked, and what it is called with may be unusual: it
gives what the plain function gives, or says why not."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import warpnorm
from warpnorm import settings
from warpnorm.errors import FusionError, InputError

COLS = 24


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def scaled(factor: float, x: torch.Tensor) -> torch.Tensor:
    return norm(x) * factor


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """Else such small calls run as the plain functions that they are held against."""
    with settings.override(route="native"):
        yield


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, COLS, generator=torch.Generator().manual_seed(0))


class Block:
    run = warpnorm.fuse(functools.partial(scaled, 2.0))
    still = warpnorm.fuse(staticmethod(norm))


def test_an_attribute_that_is_no_method(x: torch.Tensor) -> None:
    """A partial and a static method are called without their owner; of a partial the reader of functions found no end."""
    torch.testing.assert_close(Block().run(x), norm(x) * 2)
    torch.testing.assert_close(Block().still(x), norm(x))
    bound = MethodType(functools.partial(lambda factor, owner, t: t * factor, 3.0), object())
    with pytest.raises(FusionError, match="cannot be"):
        warpnorm.fuse(lambda x: norm(bound(x)))(x)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules_are_refused(register: Callable[..., Any], x: torch.Tensor) -> None:
    """As those of one module are; before and after, it is the module's own result."""
    module = nn.LayerNorm(COLS)
    fused = warpnorm.fuse(lambda x: module(x) * 2)
    torch.testing.assert_close(fused(x), module(x) * 2)
    handle = register(lambda *_: None)
    try:
        with pytest.raises(FusionError, match="hooks"):
            fused(x)
    finally:
        handle.remove()
    torch.testing.assert_close(fused(x), module(x) * 2)


class Factor:
    value = 2.0


class Mode(Enum):
    A = 1

    def factor(self) -> float:
        return Factor.value


class Named(namedtuple("Named", "a")):
    pass


@dataclass(frozen=True)
class Frozen:
    a: int = 1


class Thawed(Frozen):
    pass


def kept(owner: Any) -> float:
    found: float = owner.factor
    return found


def test_a_method_of_an_enumeration(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = warpnorm.fuse(lambda x, mode: norm(x) * mode.factor())
    torch.testing.assert_close(fused(x, Mode.A), norm(x) * 2)
    monkeypatch.setattr(Factor, "value", 5.0)
    torch.testing.assert_close(fused(x, Mode.A), norm(x) * 5)


@pytest.mark.parametrize("make", [lambda: Named(1), Thawed], ids=["named_tuple", "frozen_dataclass"])
def test_attributes_beside_fields(make: Callable[[], Any], x: torch.Tensor) -> None:
    owner = make()
    vars(owner)["factor"] = 2.0
    fused = warpnorm.fuse(lambda x: norm(x) * kept(owner))
    torch.testing.assert_close(fused(x), norm(x) * 2)
    vars(owner)["factor"] = 7.0
    torch.testing.assert_close(fused(x), norm(x) * 7)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    @warpnorm.fuse
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return norm(x)


def test_counting_calls_is_an_assignment(x: torch.Tensor) -> None:
    module = Counting()
    with pytest.raises(FusionError, match=r"assigns to `self\.step`"):
        module(x)
    assert module.step == 0


def test_powers_in_place(x: torch.Tensor) -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        y **= 2
        return y

    torch.testing.assert_close(warpnorm.fuse(power)(x), norm(x) ** 2)
    torch.testing.assert_close(warpnorm.fuse(lambda x: norm(x).square_())(x), norm(x) ** 2)
    torch.testing.assert_close(warpnorm.fuse(lambda x: norm(x).abs_())(x), norm(x).abs())


def test_flags_for_cudnn(x: torch.Tensor) -> None:
    torch.testing.assert_close(
        warpnorm.fuse(lambda x: torch.layer_norm(x, (COLS,), None, None, 1e-5, True))(x), norm(x)
    )
    images = x.view(2, 8, 6)
    expected = F.group_norm(images, 4)
    torch.testing.assert_close(
        warpnorm.fuse(lambda x: torch.group_norm(x, 4, None, None, 1e-5, False))(images), expected
    )
    by_name = warpnorm.fuse(lambda x: torch.group_norm(x, 4, None, None, 1e-5, cudnn_enabled=True))
    torch.testing.assert_close(by_name(images), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalized_dim": 5}, "normalized_dim is 5"),
        ({"normalized_dim": -9}, "normalized_dim is -9"),
        ({"normalized_dim": -1, "normalized_shape": (COLS,)}, "both was given"),
        ({"normalized_dim": -1, "weight_offset": 1.0}, "no weight"),
    ],
)
def test_wrong_arguments_are_wrong_inside_too(options: dict[str, Any], words: str, x: torch.Tensor) -> None:
    for function in (warpnorm.layer_norm, warpnorm.rms_norm):
        with pytest.raises((InputError, TypeError), match=words):
            function(x, **options)
        with pytest.raises((InputError, TypeError), match=words):
            warpnorm.fuse(lambda x, function=function: function(x, **options))(x)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    @warpnorm.fuse
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        self.kept.append(y)
        return y


def test_results_put_elsewhere(x: torch.Tensor) -> None:
    """Where a capture leaves something that is said, and again at later calls: none runs in another way in silence."""
    module = Keeping()
    for _ in range(2):
        with pytest.raises(FusionError, match="a capture left there"):
            module(x)


class Doubled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.layer_norm else result


def test_modes_see_the_functions(x: torch.Tensor) -> None:
    fused = warpnorm.fuse(norm)
    expected = fused(x)
    with Doubled():
        torch.testing.assert_close(fused(x), expected * 2)
    with torch.device("meta"):
        torch.testing.assert_close(fused(x), expected)


def call_often(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    for call in calls:
        function(*call)


def test_many_captures_are_told_with_their_reason() -> None:
    numbers = [(torch.ones(2, COLS), float(factor)) for factor in range(32)]
    with pytest.warns(UserWarning, match=r"captured 32 times.*pass it as a tensor"):
        call_often(warpnorm.fuse(lambda x, factor: norm(x) * factor), *numbers)
    with pytest.warns(UserWarning, match=r"captured 32 times.*32 sizes of the last dimension"):
        call_often(warpnorm.fuse(norm), *((torch.ones(2, cols),) for cols in range(COLS, COLS + 32)))
