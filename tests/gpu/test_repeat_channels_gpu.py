"""Norms by channel that were seen before, on a GPU: every pattern by the compiled launcher, streams, graphs, and backward
without Python."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.repeat_channels_contract import *  # noqa: F403
from kernel_contracts.repeat_channels_contract import buffers, fused_norms, images
from warpnorm import pipeline, repeat, repeat_channels, settings

# Of every pattern some: held by one program and by many, in tiles by turns and not, whole rows, across lines
SHAPES: dict[str, tuple[int, ...]] = {
    "held": (64, 32, 56, 56),
    "few": (8, 16, 14, 14),
    "long": (4, 3, 640, 640),
    "odd": (5, 7, 33, 31),
    "vectors": (512, 96),
    "one_channel": (16, 1, 128, 128),
}


def norms(of: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, running: list[torch.Tensor]) -> dict[str, Any]:
    found = {
        "training": lambda: of.batch_norm(x, *running, w, b, True),
        "evaluation": lambda: of.batch_norm(x, *running, w, b, False),
        "groups": lambda: of.group_norm(x, 1, w, b),
    }
    return found | ({"instances": lambda: of.instance_norm(x, None, None, w, b)} if x.ndim > 2 else {})


def operands(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> list[torch.Tensor]:
    x = torch.randn(shape, device=device).to(dtype)
    if layout == "nhwc" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return [x, *(torch.randn(shape[1], device=device) for _ in range(2))]


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    original = repeat_channels.ChannelRepeat.gradients

    def gradients(self: Any, *rest: Any) -> Any:
        found.append(1)
        return original(self, *rest)

    monkeypatch.setattr(repeat_channels.ChannelRepeat, "gradients", gradients)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", SHAPES)
def test_without_python(
    name: str, layout: str, dtype: torch.dtype, device: str, ways: list[str], by_launcher: str, backwards: list[int]
) -> None:
    """Bits are those of the first call, in the same memory format."""
    if by_launcher == "python":
        pytest.skip("it is Python")
    given = [o.requires_grad_() for o in operands(SHAPES[name], dtype, layout, device)]
    grad = torch.randn_like(given[0])
    running = [torch.full((SHAPES[name][1],), value, device=device) for value in (0.5, 2.0)]
    for kind in norms(warpnorm, *given, running):
        ways.clear()
        backwards.clear()
        found = []
        for _ in range(5):
            averaged = [t.clone() for t in running]
            output = norms(warpnorm, *given, averaged)[kind]()
            found.append((output, *averaged, *torch.autograd.grad(output, given, grad)))
        assert ways == ["long", "python", "compiled", "compiled", "compiled"], kind
        assert len(backwards) == 2, kind  # of the second call, and of the first that is found
        assert found[-1][0].stride() == found[0][0].stride()
        assert found[-1][3].stride() == found[0][3].stride()
        for results in found[1:]:
            assert all(a.equal(b) for a, b in zip(results, found[0], strict=True)), kind
        ways.clear()
        with torch.no_grad():
            averaged = [t.clone() for t in running]
            assert norms(warpnorm, *given, averaged)[kind]().equal(found[0][0]), kind
        assert ways == ["compiled"], kind
        assert all(a.equal(b) for a, b in zip(averaged, found[0][1:], strict=False)), kind


def test_streams(device: str, ways: list[str]) -> None:
    """Each has mailboxes of its own."""
    given = operands(SHAPES["held"], torch.float16, "nchw", device)
    running = [torch.full((32,), value, device=device) for value in (0.5, 2.0)]
    calls = norms(warpnorm, *given, running)
    expected = [calls["training"]() for _ in range(4)][-1]
    streams = [torch.cuda.Stream() for _ in range(3)]
    outputs = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(calls["training"]())
    torch.cuda.synchronize()
    assert all(output.equal(expected) for output in outputs)
    assert "long" not in ways[1:]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["held", "odd", "vectors"])
def test_graphs(name: str, needs_grad: bool, device: str) -> None:
    """The graph's memory and its mailboxes are its own."""
    shape = SHAPES[name]
    given = [o.requires_grad_(needs_grad) for o in operands(shape, torch.float32, "nchw", device)]
    running = [torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)]
    grad = torch.randn(shape, device=device)

    def step(of: Any, running: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        output = of.batch_norm(given[0], *running, *given[1:], True)
        return (output, *(torch.autograd.grad(output, given, grad) if needs_grad else ()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            step(warpnorm, running)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step(warpnorm, running)
    with torch.no_grad():
        given[0].copy_(torch.randn_like(given[0]))
    expected_running = [t.clone() for t in running]
    for _ in range(3):
        with torch.cuda.stream(stream):
            step(warpnorm, [t.clone() for t in running])
        stream.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = step(F, expected_running)
        for a, b in zip((*results, *running), (*expected, *expected_running), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_device_that_refuses_teams(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some call on: the others are right, by other plans."""
    given = operands(SHAPES["held"], torch.float16, "nchw", device)
    call = lambda: warpnorm.batch_norm(given[0], None, None, *given[1:], True)  # noqa: E731
    expected = [call() for _ in range(3)][-1]
    asked: list[int] = []

    def refuses(error: RuntimeError, device: torch.device) -> bool:
        asked.append(1)
        return "cooperative" in str(error)

    def fail(*_: Any) -> None:
        raise RuntimeError("too many blocks in cooperative launch")

    monkeypatch.setattr(pipeline, "refuses_teams", refuses)
    with settings.override(launcher="python"):
        (seen,) = repeat_channels._seen.values()
        with monkeypatch.context() as patch:
            patch.setattr(type(seen.launch), "into", fail)
            with pytest.raises(RuntimeError, match="cooperative"):
                call()  # here the other plan is refused too
        assert len(asked) >= 1
        assert not repeat_channels._seen
        torch.testing.assert_close(call(), expected)


def test_half_precision_under_autocast(device: str, ways: list[str], by_launcher: str) -> None:
    x, w, b = images(device, dtype=torch.float32)
    for _ in range(4):
        with torch.autocast("cuda", torch.float16):
            assert warpnorm.group_norm(x.half(), 3, w, b).dtype == F.group_norm(x.half(), 3, w, b).dtype
            assert warpnorm.batch_norm(x.half(), *buffers(device), w, b, True).dtype == torch.float16
    for _ in range(4):
        assert warpnorm.group_norm(x.half(), 3, w.half(), b.half()).dtype == torch.float16
    assert repeat.quick is None or ways[-1] == "compiled"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", ["relu", "silu"])
def test_fused_without_python(name: str, layout: str, device: str, ways: list[str], by_launcher: str) -> None:
    """Forward and backward, in the memory format of the input, and the bits of the first call."""
    if by_launcher == "python":
        pytest.skip("it is Python")
    fused = warpnorm.fuse(fused_norms()[name])
    x, w, b = operands((32, 48, 28, 28), torch.float16, layout, device)
    if name == "silu":
        w, b = w.half(), b.half()
    given = [o.requires_grad_() for o in (x, torch.randn_like(x), w, b)]
    grad = torch.randn_like(x)
    found = []
    for _ in range(5):
        averaged = [torch.full((48,), value, device=device) for value in (0.5, 2.0)]
        output = fused(*given, *averaged)
        found.append((output, *averaged, *torch.autograd.grad(output, given, grad)))
    assert ways == ["compiled"] * 4
    for results in found[1:]:
        assert results[0].stride() == found[0][0].stride()
        assert all(a.equal(c) for a, c in zip(results, found[0], strict=True))
