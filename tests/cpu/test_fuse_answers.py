"""What a function asks of its tensors and does beside its results, when it is fused: answered as for the plain function, or
refused in words that say what to do."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warpnorm
from warpnorm import settings
from warpnorm.errors import FusionError

COLS = 80


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """Else such small calls run as the plain functions that they are held against."""
    with settings.override(route="native"):
        yield


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, COLS, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weight() -> Tensor:
    return torch.rand(COLS, generator=torch.Generator().manual_seed(1))


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def assert_same(function: Callable[..., Any], fused: Any, *args: Any) -> None:
    torch.testing.assert_close(fused(*args), function(*args))


def of_parameters(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x) * (weight + 1 if isinstance(weight, nn.Parameter) else weight)


def of_parameters_and_rows(x: Tensor, weight: Tensor) -> Tensor:
    return of_parameters(x, weight) * x.shape[0]


@pytest.mark.parametrize("function", [of_parameters, of_parameters_and_rows])
def test_a_parameter_is_one(function: Callable[..., Any], x: Tensor, weight: Tensor) -> None:
    """Whatever was there first."""
    parameter, fused = nn.Parameter(weight), warpnorm.fuse(function)
    for given in (weight, parameter, weight):
        assert_same(function, fused, x, given)
    assert_same(function, warpnorm.fuse(function), x, parameter)


def test_a_parameter_elsewhere(x: Tensor, weight: Tensor) -> None:
    class Owner:
        kept = weight

    def function(x: Tensor) -> Tensor:
        return of_parameters(x, Owner.kept)

    fused = warpnorm.fuse(function)
    assert_same(function, fused, x)
    Owner.kept = nn.Parameter(weight)
    assert_same(function, fused, x)


def test_what_is_made_of_a_parameter_is_none(x: Tensor, weight: Tensor) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return of_parameters(x, weight * 2)

    assert_same(function, warpnorm.fuse(function), x, nn.Parameter(weight))


TYPES: dict[str, Callable[[Tensor], Any]] = {
    "is": lambda x: type(x) is torch.Tensor,
    "name": lambda x: type(x) is Tensor,
    "equal": lambda x: type(x) == torch.Tensor,  # noqa: E721
    "in": lambda x: type(x) in (torch.Tensor, nn.Parameter),
    "reversed": lambda x: torch.Tensor is type(x),
    "class": lambda x: x.__class__ is torch.Tensor,
}


@pytest.mark.parametrize("ask", TYPES.values(), ids=TYPES)
def test_the_type_of_a_tensor_is_not_compared(ask: Callable[[Tensor], Any], x: Tensor) -> None:
    with pytest.raises(FusionError, match=r"compares a type with `.*Tensor`.*; use isinstance"):
        warpnorm.fuse(lambda x: norm(x) * (3 if ask(x) else 1))(x)


def test_other_types_are_compared(x: Tensor) -> None:
    def function(x: Tensor, factor: Any) -> Tensor:
        return norm(x) * (factor if type(factor) is float else 3) * (2 if isinstance(x, (float, torch.Tensor)) else 1)

    fused = warpnorm.fuse(function)
    for factor in (2.0, 2, True):
        assert_same(function, fused, x, factor)


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "_is_view": lambda x: x._is_view(),
    "_base": lambda x: x._base is None,
    "dim_order": lambda x: x.dim_order() == (0, 1),
    "is_conj": lambda x: x.is_conj(),
    "torch.is_neg": torch.is_neg,
    "is_inference": lambda x: x.is_inference(),
    "is_shared": lambda x: x.is_shared(),
    "untyped_storage": lambda x: x.untyped_storage().nbytes() > 9,
    "_version": lambda x: x._version > 0,
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_of_memory_are_refused(ask: Callable[[Tensor], Any], x: Tensor) -> None:
    with pytest.raises(FusionError, match=r"a look at the .* of a tensor cannot be fused.*; decide outside"):
        warpnorm.fuse(lambda x: norm(x) * (3 if ask(x) else 1))(x)


def scaled(y: Tensor, weight: Any) -> Tensor:
    return y * weight * weight.scale


def scaled_if(y: Tensor, weight: Any) -> Tensor:
    return y * weight * getattr(weight, "scale", 3.0)


@pytest.mark.parametrize("helper", [scaled, scaled_if])
@pytest.mark.parametrize("is_given", [True, False])
def test_attributes_of_tensors(helper: Callable[..., Tensor], is_given: bool, x: Tensor, weight: Any) -> None:
    """That a helper reads, of an argument and of a tensor from outside: a number, a tensor, and none."""

    def outside(x: Tensor) -> Tensor:
        return helper(norm(x), weight)

    def given(x: Tensor, weight: Tensor) -> Tensor:
        return helper(norm(x), weight)

    function: Any = given if is_given else outside
    fused, args = warpnorm.fuse(function), (x, weight) if is_given else (x,)
    weight.unread = object()
    for scale in (2.0, 5.0, weight * 3, weight * 4):
        weight.scale = scale
        assert_same(function, fused, *args)
    assert len(fused._captured) == 3
    del weight.scale
    if helper is scaled_if:
        assert_same(function, fused, *args)


def test_an_attribute_that_cannot_be_compared(x: Tensor, weight: Any) -> None:
    weight.scale = object()
    with pytest.raises(FusionError, match="`the attribute scale of a tensor` is of type object"):
        warpnorm.fuse(lambda x, weight: scaled(norm(x), weight))(x, weight)


@pytest.mark.skipif(not hasattr(nn, "Buffer"), reason="has no buffers of a class of their own")
def test_a_buffer_is_one(x: Tensor, weight: Tensor) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return norm(x) * (weight + 1 if isinstance(weight, nn.Buffer) else weight)

    fused = warpnorm.fuse(function)
    for given in (weight, nn.Buffer(weight.clone()), weight):
        assert_same(function, fused, x, given)


class Factor:
    value = 2.0


@functools.singledispatch
def factor(value: Any) -> float:
    return 1.0


@factor.register
def _(value: torch.Tensor) -> float:
    return Factor.value


@functools.singledispatch
def factor_of_parameters(value: Any) -> float:
    return 1.0


@factor_of_parameters.register
def _(value: nn.Parameter) -> float:
    return 3.0


class Dispatching:
    @functools.singledispatchmethod
    def factor(self, value: Any) -> float:
        return 1.0

    @factor.register
    def _(self, value: torch.Tensor) -> float:
        return Factor.value


def test_implementations_that_are_dispatched_to(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return norm(x) * factor(x)

    fused = warpnorm.fuse(function)
    for value in (2.0, 9.0):
        monkeypatch.setattr(Factor, "value", value)
        assert_same(function, fused, x)


def test_dispatch_that_a_capture_cannot_follow(x: Tensor) -> None:
    owner = Dispatching()
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: norm(x) * factor_of_parameters(x),
        lambda x: norm(x) * owner.factor(x),
    )
    for function in functions:
        with pytest.raises(FusionError, match=r"chooses among implementations .*: call the one that is meant"):
            warpnorm.fuse(function)(x)


def enabled_inside(x: Tensor, weight: Tensor) -> Tensor:
    with torch.enable_grad():
        return norm(x) * weight


def test_gradients_are_not_enabled_inside(x: Tensor, weight: Tensor) -> None:
    parameter, fused = nn.Parameter(weight), warpnorm.fuse(enabled_inside)
    assert_same(enabled_inside, fused, x, parameter)
    assert fused(x, parameter).requires_grad
    with torch.no_grad(), pytest.raises(FusionError, match=r"enable_grad\(\) .*; enable them where .* is called"):
        fused(x, parameter)


def appended(x: Tensor, into: list[Any]) -> Tensor:
    into.append(norm(x))
    return into[-1] * 2


def assigned(x: Tensor, into: dict[str, Any]) -> Tensor:
    into["y"] = norm(x)
    return into["y"] * x.shape[0]


def taken(x: Tensor, into: dict[str, Any]) -> Tensor:
    return norm(x) * into.pop("factor")


def added(x: Tensor, into: set[Any]) -> Tensor:
    into.add("seen")
    return norm(x)


def replaced(x: Tensor, into: list[Any]) -> Tensor:
    into[0] = into[0] * 2
    return norm(x) + into[0]


CHANGES: list[tuple[Callable[..., Tensor], Callable[[], Any]]] = [
    (appended, list), (assigned, dict), (taken, lambda: {"factor": 2.0}), (added, set),
    (replaced, lambda: [torch.ones(COLS)]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "make"), CHANGES, ids=lambda part: getattr(part, "__name__", ""))
def test_changes_of_arguments_are_refused(function: Callable[..., Tensor], make: Callable[[], Any], x: Tensor) -> None:
    fused = warpnorm.fuse(function)
    with pytest.raises(FusionError, match=r"the function changes a.*; return "):
        fused(x, make())
    assert not fused._captured


def test_what_is_given_may_be_copied_and_changed(x: Tensor) -> None:
    def function(x: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
        options = {**options, "bias": more.pop("bias")}
        return norm(x) * options.pop("factor") + options["bias"]

    options = {"factor": 2.0}
    torch.testing.assert_close(warpnorm.fuse(function)(x, options, bias=1.0), norm(x) * 2 + 1)
    assert options == {"factor": 2.0}


def test_changes_outside_are_refused(x: Tensor) -> None:
    count, kept = {"calls": 0}, []

    def counted(x: Tensor) -> Tensor:
        count["calls"] += 1
        return norm(x)

    def keeping(x: Tensor) -> Tensor:
        kept.append(norm(x) * x.shape[0])
        return kept[-1]

    with pytest.raises(FusionError, match=r"changes something outside of it.*; return the value"):
        warpnorm.fuse(counted)(x)
    for _ in range(2):
        with pytest.raises(FusionError, match="a capture left there"):
            warpnorm.fuse(keeping)(x)


class Aliasing(nn.Module):
    last: Any = None

    @warpnorm.fuse
    def forward(self, x: Tensor) -> Tensor:
        me = self
        me.last = norm(x)
        return me.last * 1


def test_an_attribute_by_another_name(x: Tensor) -> None:
    with pytest.raises(FusionError, match="a capture left there"):
        Aliasing()(x)


CONJUGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "imag": lambda c: norm(c.imag),
    "both": lambda c: norm(c.real * c.imag),
    "inside": lambda c: norm(c.conj().imag),
    "as_real": lambda c: norm(torch.view_as_real(c.resolve_conj()).flatten(-2)),
}


@pytest.mark.parametrize("function", CONJUGATES.values(), ids=CONJUGATES)
def test_conjugates(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    fused, plain = warpnorm.fuse(function), torch.complex(x, x.flip(0))
    for is_conjugate in (False, True, False):
        leaf = plain.clone().requires_grad_()
        c = leaf.conj() if is_conjugate else leaf
        y, expected = fused(c), function(c)
        torch.testing.assert_close(y, expected)
        grads = [torch.autograd.grad(out.square().sum() + out.sum(), leaf, retain_graph=True) for out in (y, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def counted_after(x: Tensor, count: Tensor) -> Tensor:
    y = norm(x) * count.float()
    count.add_(1)
    return y


def counted_before(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return norm(x) * count.float()


@pytest.mark.parametrize("function", [counted_after, counted_before])
def test_a_counter_that_is_read(function: Callable[..., Tensor], x: Tensor) -> None:
    """It is another one when backward reads it."""
    x = x.double()
    fused, counts = warpnorm.fuse(function), [torch.tensor(3), torch.tensor(3)]
    for _ in range(3):
        grads = []
        for call, count in zip((function, fused), counts, strict=True):
            leaf = x.clone().requires_grad_()
            call(leaf, count).pow(3).sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
        assert counts[0] == counts[1]


def test_running_statistics_that_are_read(x: Tensor) -> None:
    """Before the norm they are what they were, also in backward, where PyTorch reads what they are by then."""
    images = x.view(4, 8, 10).double()

    def before(x: Tensor, mean: Tensor, variance: Tensor, factor: Tensor) -> Tensor:
        return F.batch_norm(x * factor.view(-1, 1), mean, variance, training=True) + 1

    def after(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, training=True) + mean.view(-1, 1)

    fused, grads, buffers = warpnorm.fuse(before), [], []
    for is_fused in (False, True):
        leaf, mean, variance = images.clone().requires_grad_(), torch.ones(8).double(), torch.ones(8).double()
        for _ in range(2):
            y = fused(leaf, mean, variance, mean) if is_fused else before(leaf, mean, variance, mean.clone())
            y.pow(3).sum().backward()
        grads.append(leaf.grad)
        buffers.append((mean, variance))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(*buffers)
    with pytest.raises(FusionError, match=r"running statistics after the norm .*; read them outside"):
        warpnorm.fuse(after)(images, torch.zeros(8), torch.ones(8))


class Decorated:
    factor = 2.0

    @torch.no_grad()
    @warpnorm.fuse
    def run(self, x: Tensor) -> Tensor:
        return norm(x) * self.factor


def test_a_method_beneath_another_decorator(x: Tensor) -> None:
    first, second = Decorated(), Decorated()
    second.factor = 3.0
    for owner in (first, second, first):
        result = owner.run(x.clone().requires_grad_())
        torch.testing.assert_close(result, norm(x) * owner.factor)
        assert not result.requires_grad
    with pytest.raises(FusionError, match="`an argument` is of type Decorated"):
        warpnorm.fuse(lambda owner, x: norm(x) * owner.factor)(first, x)


WORDS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "floor_divide": (
        lambda x, i: norm(x) + i // 2,
        r"aten\.div\.Tensor_mode with rounding_mode=floor .*integers.*; convert",
    ),
    "second": (lambda x, i: norm(x % 2.0) + i % 2, r"aten\.remainder\.Scalar .*integers.*; convert"),
    "right_shift": (
        lambda x, i: norm(x) + (i >> 1),
        r"aten\.__rshift__\.Scalar .*: __rshift__ is not among.*; or call it",
    ),
    "shift_by_tensor": (lambda x, i: norm(x) + (i << i), r"aten\.__lshift__\.Tensor .*; or call it outside"),
}


@pytest.mark.parametrize(("function", "words"), WORDS.values(), ids=WORDS)
def test_operators_of_integers(function: Callable[..., Tensor], words: str, x: Tensor) -> None:
    line = function.__code__.co_firstlineno
    with pytest.raises(FusionError, match=f"{__file__}:{line}: {words}"):
        warpnorm.fuse(function)(x, torch.arange(COLS))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_left_shifts(dtype: torch.dtype, x: Tensor) -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return norm(x) + (i << 2)

    given = torch.arange(COLS).to(dtype)
    assert_same(function, warpnorm.fuse(function), x, given)


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda x: norm(x.t().reshape(-1, 40)),
    "of_result": lambda x: norm((x * 2).t().reshape(-1, 40)),
    "contiguous": lambda x: norm(x.t().contiguous().view(5, -1)),
}


@pytest.mark.parametrize("function", RESHAPES.values(), ids=RESHAPES)
def test_reshapes_that_copy(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    fused = warpnorm.fuse(function)
    for given in (x, x.t().contiguous().t(), x):
        leaf = given.clone().requires_grad_()
        y, expected = fused(leaf), function(leaf)
        torch.testing.assert_close(y, expected)
        grads = [torch.autograd.grad(out.pow(3).sum(), leaf, retain_graph=True) for out in (y, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_no_momentum(x: Tensor) -> None:
    """Of a function it is as wrong as outside; of a module it is the mean of all batches."""
    images, mean, variance, module = x.view(4, 8, 10), torch.zeros(8), torch.ones(8), nn.BatchNorm1d(8, momentum=None)
    for buffers in ((mean, variance), (None, None)):
        function = functools.partial(F.batch_norm, training=True, momentum=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            function(images, *buffers)
        with pytest.raises(TypeError, match="batch_norm: momentum must be a float, but is None"):
            warpnorm.fuse(lambda x, *buffers, function=function: function(x, *buffers) * 2)(images, *buffers)
    with pytest.raises(FusionError, match=r"a norm with momentum=None .* how often .*; give a momentum"):
        warpnorm.fuse(lambda x: module(x) * 2)(images)
