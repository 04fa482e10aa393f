"""Contract: the compiled launcher runs a call that was seen before where it is plain, and leaves every other to Python."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import warpnorm
from kernel_contracts.repeat_contract import COLS, FRESH, operands
from warpnorm import repeat, settings
from warpnorm.errors import InputError, InputTypeError
from warpnorm.launch import launcher

if not launcher.compiler() or settings.is_interpreting():
    pytest.skip("there is no compiled launcher", allow_module_level=True)


class Quick:
    """The compiled look-up, and how often it found something."""

    def __init__(self, module: Any) -> None:
        self.module, self.found = module, 0

    def __call__(self, *key: Any) -> Any:
        output = self.module.call(*key)
        self.found += output is not None
        return output


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Quick]:
    repeat._seen.clear()
    with settings.override(launcher="compiled", keep_bytes=next(FRESH)):
        counted = Quick(launcher.find(repeat._set_up, 0))
        monkeypatch.setattr(repeat, "quick", counted)
        yield counted


def seen(*given: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        output = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    return output


def test_plain_calls_are_found(quick: Quick, device: str) -> None:
    x, w, b = operands(6, device)
    expected = F.layer_norm(x, (COLS,), w, b)
    seen(x, w, b)
    assert quick.found == 1
    calls = {
        "list": lambda: warpnorm.layer_norm(x, [COLS], w, b),
        "number": lambda: warpnorm.layer_norm(x, COLS, w, b),
        "size": lambda: warpnorm.layer_norm(x, x.shape[1:], w, b),
        "keywords": lambda: warpnorm.layer_norm(x, (COLS,), bias=b, weight=w, eps=1e-5),
        "parameters": lambda: warpnorm.layer_norm(x, (COLS,), torch.nn.Parameter(w), torch.nn.Parameter(b)),
        "fresh": lambda: warpnorm.layer_norm(x.clone(), (COLS,), w.clone(), b.clone()),
    }
    for name, call in calls.items():
        before = quick.found
        output = call()
        assert quick.found == before + 1, name
        torch.testing.assert_close(output, expected, msg=name)
        assert output.is_contiguous()
        assert type(output) is torch.Tensor


def test_where_no_gradient_is_recorded(quick: Quick, device: str) -> None:
    given = [o.requires_grad_() for o in operands(6, device)]
    expected = seen(*given)
    assert expected.grad_fn is not None
    with torch.no_grad():
        output = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    assert not output.requires_grad
    assert output.equal(expected)
    with torch.inference_mode():
        plain = [o.detach().clone() for o in given]
        output = seen(*plain)
        assert output.is_inference()
        mixed = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
        assert mixed.is_inference()
    assert output.equal(expected)
    assert quick.found == 1 + 1 + 3 + 1
    assert warpnorm.layer_norm(given[0], (COLS,), *given[1:]).requires_grad
    # Of these autograd saves copies
    warpnorm.layer_norm(given[0], (COLS,), plain[1], given[2]).sum().backward()
    assert given[0].grad is not None


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return function(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")  # of tracing
def test_whatever_looks_on_sees_the_call(quick: Quick, device: str) -> None:
    x, w, b = operands(6, device)
    expected = seen(x, w, b)
    norm = lambda x: warpnorm.layer_norm(x, (COLS,), w, b)  # noqa: E731
    with Seen() as mode:
        norm(x)
    assert "layer_norm" in mode.names
    before = quick.found
    with Dispatched() as dispatched:
        norm(x)
    assert dispatched.count > 0
    assert isinstance(norm(x.as_subclass(Wrapped)), Wrapped)
    torch.testing.assert_close(torch.vmap(norm)(x.view(2, 3, COLS)).view(6, COLS), expected)
    value, pushed = torch.func.jvp(norm, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(pushed, torch.zeros_like(x), atol=1e-4, rtol=0)
    with torch.autograd.forward_ad.dual_level():
        dual = norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    gradient = torch.func.grad(lambda x: norm(x).sum())(x)
    plain = torch.func.grad(lambda x: F.layer_norm(x, (COLS,), w, b).sum())(x)
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-4)
    traced = torch.jit.trace(norm, x[:4])
    torch.testing.assert_close(traced(x), expected)
    meta = warpnorm.layer_norm(x.to("meta"), (COLS,), w.to("meta"), b.to("meta"))
    assert meta.is_meta
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        norm(x.to_sparse())
    assert quick.found == before
    norm(x)
    assert quick.found == before + 1


def test_settings_are_asked_each_time(quick: Quick, device: str) -> None:
    given = operands(6, device)
    seen(*given)
    before = quick.found
    with settings.override(route="reference"):
        seen(*given)
    with settings.override(launcher="python"):
        seen(*given)
    assert quick.found == before
    warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    assert quick.found == before + 1


@pytest.mark.parametrize("needed", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_gradients(needed: tuple[int, ...], quick: Quick, device: str) -> None:
    leaves = [o.requires_grad_(bool(need)) for o, need in zip(operands(6, device), needed, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.randn(6, COLS, device=device)
    found = []
    for _ in range(5):
        output = warpnorm.layer_norm(leaves[0], (COLS,), *leaves[1:])
        found.append(torch.autograd.grad(output, wanted, grad, retain_graph=True))
        found.append(torch.autograd.grad(output, wanted, grad))
    assert quick.found == 3
    expected = torch.autograd.grad(F.layer_norm(leaves[0], (COLS,), *leaves[1:]), wanted, grad)
    for gradients in found:
        for a, first, b in zip(gradients, found[0], expected, strict=True):
            assert a.equal(first)  # the same bits, whoever launches
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert a.grad_fn is None


def test_gradients_that_nobody_asks_for(quick: Quick, device: str) -> None:
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    grad = torch.randn(6, COLS, device=device)
    for _ in range(5):
        output = warpnorm.layer_norm(x, (COLS,), w, b)
        (found,) = torch.autograd.grad(output, (w,), grad)
        (expected,) = torch.autograd.grad(F.layer_norm(x, (COLS,), w, b), (w,), grad)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_autograd_looks_after_what_is_saved(quick: Quick, device: str) -> None:
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    seen(x, w, b)
    output = warpnorm.layer_norm(x, (COLS,), w, b)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    output = warpnorm.layer_norm(x, (COLS,), w, b)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()
    output = warpnorm.layer_norm(x, (COLS,), w, b)
    output.add_(1)  # which backward does not read
    output.sum().backward()
    assert quick.found == 4


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints(is_reentrant: bool, quick: Quick, device: str) -> None:
    """The first call saves as many tensors as the ones that are found."""
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    for _ in range(4):
        run = lambda x: warpnorm.layer_norm(x, (COLS,), w, b).square()  # noqa: E731
        x.grad = None
        checkpoint(run, x, use_reentrant=is_reentrant).sum().backward()
        expected = torch.autograd.grad(F.layer_norm(x, (COLS,), w, b).square().sum(), x)
        torch.testing.assert_close(x.grad, expected[0], rtol=1e-4, atol=1e-4)
    assert quick.found > 4


def test_hooks_on_saved_tensors_and_gradients(quick: Quick, device: str) -> None:
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    seen(x, w, b)
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to(device)):
        output = warpnorm.layer_norm(x, (COLS,), w, b)
    assert packed == [x.shape, w.shape, b.shape, (6,), (6,)]
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), x),
        torch.autograd.grad(F.layer_norm(x, (COLS,), w, b).square().sum(), x), rtol=1e-4, atol=1e-4,
    )  # fmt: skip

    class StopError(Exception):
        pass

    def refuse(_: torch.Tensor) -> None:
        raise StopError

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t), pytest.raises(StopError):
        warpnorm.layer_norm(x, (COLS,), w, b)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, refuse):
        output = warpnorm.layer_norm(x, (COLS,), w, b)
    with pytest.raises(StopError):
        output.sum().backward()
    output = warpnorm.layer_norm(x, (COLS,), w, b)
    doubled: list[Any] = []
    output.grad_fn.register_hook(lambda given, _: doubled.append(len(given)))
    output.sum().backward()
    assert doubled == [3]


def test_threads(quick: Quick, device: str) -> None:
    given = [o.requires_grad_() for o in operands(6, device)]
    expected = seen(*given)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(50):
            output = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
            gradient = torch.autograd.grad(output.square().sum(), given[0])[0]
            if not output.equal(expected) or not gradient.isfinite().all():
                wrong.append(output)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    most = 4 if device == "cuda" else 0  # first calls of threads that have no context of CUDA yet, which are Python's
    assert 201 - most <= quick.found <= 201


def test_modules(quick: Quick, device: str) -> None:
    module = warpnorm.nn.LayerNorm(COLS, device=device)
    x = torch.randn(6, COLS, device=device, requires_grad=True)
    for _ in range(4):
        module(x).square().sum().backward()
    assert quick.found == 2
    assert module.weight.grad is not None


def test_rows_that_are_gone(quick: Quick, device: str) -> None:
    """An input without rows or memory is never looked at."""
    x, w, b = operands(6, device)
    seen(x, w, b)
    for _ in range(3):
        assert warpnorm.layer_norm(x[:0], (COLS,), w, b).shape == (0, COLS)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError)):
        warpnorm.layer_norm(freed, (COLS,), w, b)


@pytest.mark.filterwarnings("ignore")  # a prototype
def test_nested_tensors_are_left_to_pytorch(quick: Quick, device: str) -> None:
    seen(*operands(6, device))
    x, w, b = torch.randn(6, 64), torch.randn(64), torch.randn(64)
    with settings.override(route="auto"):
        found = warpnorm.layer_norm(torch.nested.nested_tensor([x[:2], x[2:]]), (64,), w, b)
    for part, rows in zip(found.unbind(), (x[:2], x[2:]), strict=True):
        torch.testing.assert_close(part, F.layer_norm(rows, (64,), w, b))


def test_forward_gradients_of_backward(quick: Quick, device: str) -> None:
    """The tangent is that of what comes later, and reaches the norm with its gradient."""
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    seen(x, w, b)
    head, tangent = (torch.randn(COLS, 3, device=device) for _ in range(2))
    before, found = quick.found, []
    for norm in (warpnorm.layer_norm, F.layer_norm):
        with torch.autograd.forward_ad.dual_level():
            loss = (norm(x, (COLS,), w, b) @ torch.autograd.forward_ad.make_dual(head, tangent)).square().sum()
            gradient = torch.autograd.grad(loss, w)[0]
            found.append(torch.autograd.forward_ad.unpack_dual(gradient).tangent)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-3)
    assert quick.found == before


@pytest.mark.parametrize("first", [0, 4])
def test_freed_operands_are_refused(first: int, quick: Quick, device: str) -> None:
    """Also where a tensor begins within what was freed."""
    x, w, b = (o.requires_grad_() for o in operands(6, device))
    for _ in range(5):
        warpnorm.layer_norm(x, (COLS,), w, b).sum().backward()
    hidden = torch.randn(6 + first, COLS, device=device)[first:].requires_grad_()
    output = warpnorm.layer_norm(hidden, (COLS,), w, b)
    hidden.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        torch.autograd.grad(output, w, torch.ones_like(output))
    with pytest.raises(RuntimeError, match="no memory"):
        warpnorm.layer_norm(hidden, (COLS,), w, b)
    torch.testing.assert_close(seen(x, w, b), F.layer_norm(x, (COLS,), w, b))


def test_large_scratch_is_nobodys_for_long(quick: Quick, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "LARGEST_SCRATCH", 0)
    monkeypatch.setattr(repeat, "_scratch", {})
    given = operands(6, device)
    torch.testing.assert_close(seen(*given), F.layer_norm(given[0], (COLS,), *given[1:]))
    assert quick.found == 0


def test_no_operand_is_none(quick: Quick, device: str) -> None:
    """A word of zeros is the smallest tensor's, not nobody's."""
    x, w, _ = operands(6, device)
    seen(x, w)
    memory = torch.zeros(6 * COLS * 4 + 64, dtype=torch.uint8, device=device)
    with pytest.raises((InputError, InputTypeError)):
        warpnorm.layer_norm(x, (COLS,), w, memory[1])
    assert not memory.any()


def test_equal_settings_are_the_same(quick: Quick, device: str) -> None:
    given = operands(6, device)
    fused = warpnorm.fuse(lambda x, w: F.rms_norm(x * 2, (COLS,), w))
    for _ in range(3):
        with settings.override(cache_dir=settings.current().cache_dir):
            seen(*given)
            for _ in range(2):
                fused(*given[:2])
    assert quick.found == (1 + 1) + (3 + 2) + (3 + 2)


def test_a_default_device_changes_nothing(quick: Quick, device: str) -> None:
    given = operands(6, device)
    seen(*given)
    before = quick.found
    with torch.device("meta"):
        output = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
        with Seen() as mode:
            warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    assert output.device.type == torch.device(device).type
    assert "layer_norm" in mode.names
    assert quick.found > before
