"""Which path a call takes: what looks like a GPU tensor goes to the kernels, unless something traces or transforms the
call. No GPU is needed to ask."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import warpnorm
from warpnorm import routing, settings
from warpnorm.errors import UnavailableError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A tensor that says it is on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(settings, "is_interpreting", lambda: False)
    monkeypatch.setattr(routing, "has_triton", lambda: True)
    return torch.randn(2, 8)


def test_a_plain_call_takes_the_kernels(gpu: torch.Tensor) -> None:
    assert routing.route(gpu, torch.nn.Parameter(torch.ones(8)), None, 2.0) == "kernels"


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_fakes_do_not(gpu: torch.Tensor) -> None:
    assert routing.route(gpu.as_subclass(Subclass)) == "reference"
    assert routing.route(gpu, gpu.as_subclass(Subclass)) == "reference"
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 8))
        assert routing.route(fake) == "reference"


def seen(inside: Callable[[Callable[[torch.Tensor], torch.Tensor]], object], gpu: torch.Tensor) -> list[str]:
    routes = []

    def norm(x: torch.Tensor) -> torch.Tensor:
        routes.append(routing.route(gpu))
        return x * 1

    inside(norm)
    return routes


def test_transforms_do_not(gpu: torch.Tensor) -> None:
    assert seen(lambda norm: torch.func.vmap(norm)(torch.randn(2, 8)), gpu) == ["reference"]
    assert seen(lambda norm: torch.func.grad(lambda x: norm(x).sum())(torch.randn(8)), gpu) == ["reference"]
    assert set(seen(lambda norm: torch.jit.trace(norm, torch.randn(8)), gpu)[:1]) == {"reference"}
    with forward_ad.dual_level():
        assert routing.route(gpu) == "reference"
    assert routing.route(gpu) == "kernels"


def test_interpreter_and_missing_triton(gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "is_interpreting", lambda: True)
    assert routing.route(gpu) == "reference"
    monkeypatch.setattr(routing, "has_triton", lambda: False)
    assert routing.route(gpu) == "reference"
    with settings.override(route="kernels"), pytest.raises(UnavailableError, match="Triton"):
        routing.route(gpu)


def test_forced_kernels_refuse_a_cpu_tensor() -> None:
    with settings.override(route="kernels"), pytest.raises(UnavailableError, match="input is on cpu"):
        warpnorm.layer_norm(torch.randn(2, 8), (8,))


def test_compiled_calls_take_what_plain_ones_take() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, dtype=torch.float64)
    for function in (warpnorm.layer_norm, warpnorm.rms_norm):
        compiled = torch.compile(lambda x, w, f=function: f(x, (8,), w), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, w), function(x, (8,), w))


def test_out_on_meta() -> None:
    x = torch.randn(2, 4, device="meta")
    out = torch.empty_like(x)
    assert warpnorm.layer_norm(x, (4,), torch.ones(4, device="meta"), out=out) is out


@pytest.mark.parametrize("offset", [float("inf"), float("nan")])
def test_weight_offset_is_finite(offset: float) -> None:
    with pytest.raises(warpnorm.InputError, match=r"rms_norm: weight_offset is .* but must be finite"):
        warpnorm.rms_norm(torch.randn(2, 4), (4,), torch.ones(4), weight_offset=offset)


def test_tensors_without_memory_are_not_asked_for_it() -> None:
    """On a GPU that need not be there, also of a call whose like was seen before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeTensorMode():
            x, w = torch.empty(4, 64, device="cuda"), torch.empty(64, device="cuda")
            for output in (warpnorm.layer_norm(x, (64,), w), warpnorm.rms_norm(x, (64,), w)):
                assert (output.shape, output.device.type) == ((4, 64), "cuda")


def test_a_function_mode_sees_short_rows_too() -> None:
    """Which PyTorch's operator has, on a CPU: it is still our function that is called."""
    seen = []

    class Sees(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 64)
    with Sees():
        warpnorm.layer_norm(x, (64,))
    assert seen[0] is warpnorm.layer_norm
