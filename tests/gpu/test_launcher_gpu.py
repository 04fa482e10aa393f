"""The compiled launcher, of kernels: streams, graphs, and backward without Python."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton

import warpnorm
from kernel_contracts.launcher_contract import *  # noqa: F403
from kernel_contracts.launcher_contract import COLS, Quick, operands, seen
from kernel_contracts.launcher_fuse_contract import *  # noqa: F403
from warpnorm import repeat


@pytest.fixture
def backwards_by_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    original = repeat.Repeat.backward

    def backward(self: Any, *rest: Any) -> Any:
        found.append(1)
        return original(self, *rest)

    monkeypatch.setattr(repeat.Repeat, "backward", backward)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cols", [64, 1024, 1100, 4095, 8192])
@pytest.mark.parametrize("rows", [1, 300])
def test_backward_without_python(
    rows: int, cols: int, dtype: torch.dtype, quick: Quick, device: str, backwards_by_python: list[int]
) -> None:
    if cols == 8192 and dtype == torch.float64:
        pytest.skip("of more launches than two")
    shapes = ((rows, cols), (cols,), (cols,))
    given = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    grad = torch.randn(rows, cols, device=device).to(dtype)
    found = []
    for _ in range(5):
        output = warpnorm.layer_norm(given[0], (cols,), *given[1:])
        found.append((output, *torch.autograd.grad(output, given, grad)))
    assert len(backwards_by_python) == 2  # of the second call, and of the first that is found
    assert quick.found == 3
    for results in found[1:]:
        assert all(a.equal(b) for a, b in zip(results, found[0], strict=True))


def test_streams(quick: Quick, device: str) -> None:
    given = [o.requires_grad_() for o in operands(6, device)]
    expected = seen(*given)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            x = torch.empty_like(given[0])
            torch.cuda._sleep(10_000_000)
            x.copy_(given[0].detach())  # whoever does not wait for this reads something else
            output = warpnorm.layer_norm(x, (COLS,), *given[1:])
        stream.synchronize()
        assert output.equal(expected)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_graphs(needs_grad: bool, quick: Quick, device: str) -> None:
    """The graph's memory is its own: what is called meanwhile does not write there."""
    given = [o.requires_grad_(needs_grad) for o in operands(6, device)]
    seen(*given)
    if needs_grad:
        for _ in range(3):
            torch.autograd.grad(warpnorm.layer_norm(given[0], (COLS,), *given[1:]).sum(), given)
    before = quick.found
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = warpnorm.layer_norm(given[0], (COLS,), *given[1:])
        gradients = torch.autograd.grad(output.sum(), given) if needs_grad else ()
    assert quick.found == before + 1
    with torch.no_grad():
        given[0].copy_(torch.randn_like(given[0]))
    seen(*operands(6, device, seed=5))
    graph.replay()
    expected = F.layer_norm(given[0], (COLS,), *given[1:])
    torch.testing.assert_close(output, expected)
    if needs_grad:
        for a, b in zip(gradients, torch.autograd.grad(expected.sum(), given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_profilers_are_told_of_launches(quick: Quick, device: str) -> None:
    given = operands(6, device)
    seen(*given)
    told: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(told.append)
    try:
        warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    finally:
        hook.remove(told.append)
    assert len(told) == 1
    before = quick.found
    warpnorm.layer_norm(given[0], (COLS,), *given[1:])
    assert quick.found == before + 1


def test_wrong_launches_are_said(quick: Quick, device: str) -> None:
    x = torch.randn(6, COLS, device=device)
    for _ in range(3):
        warpnorm.rms_norm(x, (COLS,))
    key = (warpnorm.norms.RMS_NORM, None, (COLS + 1,), x)
    of = repeat._seen[next(iter(repeat._seen))]
    like = (torch.empty_like(x, device="meta"),)
    *described, (launch,), shared = repeat.described(of.launch, x, like, (0,), False)
    wrong = (*launch[:4], 4096, *launch[5:])  # threads, of which a block has 1024 at the most
    assert quick.module.remember(key, *described, (wrong,), shared, (), (0,), 1, False, of, of.launch, True)
    with pytest.raises(RuntimeError, match="CUDA error"):
        quick.module.call(*key)
    torch.testing.assert_close(warpnorm.rms_norm(x, (COLS,)), F.rms_norm(x, (COLS,)))


def test_the_first_work_of_a_thread(quick: Quick, device: str) -> None:
    """Which has no context of CUDA yet."""
    given = operands(6, device)
    expected = seen(*given)
    found: list[Any] = []

    def work() -> None:
        for _ in range(2):
            found.append(warpnorm.layer_norm(given[0], (COLS,), *given[1:]))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 4
    assert all(output.equal(expected) for output in found)
