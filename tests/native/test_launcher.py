"""The compiled launcher, of native code."""

import gc

import pytest
import torch

import warpnorm
from kernel_contracts.launcher_contract import *  # noqa: F403
from kernel_contracts.launcher_contract import Quick
from kernel_contracts.launcher_fuse_contract import *  # noqa: F403
from warpnorm import settings
from warpnorm.cpu.run import NativeBackward

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,)], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "of_weight", "is_taken"),
    [(3, 2048, dtype, dtype, True) for dtype in DTYPES]
    + [(3, 2048, torch.bfloat16, torch.float32, True), (100, 2048, torch.float32, torch.float32, True)]
    + [(700, 2048, torch.float32, torch.float32, True), (4, 131072, torch.float32, torch.float32, False)],
    ids=[*map(str, DTYPES), "weights of another dtype", "parts", "large gradients", "many sums"],
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_small_backward_is_the_launchers(
    norm: str, rows: int, cols: int, dtype: torch.dtype, of_weight: torch.dtype, is_taken: bool, wanted: tuple[int, ...],
    quick: Quick, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of few sums."""
    vectors = 2 if norm == "layer_norm" else 1
    wanted = tuple(i for i in wanted if i <= vectors)
    operands = [torch.randn(rows, cols).to(dtype), *(torch.randn(cols).to(of_weight) for _ in range(vectors))]
    operands = [operand.requires_grad_(i in wanted) for i, operand in enumerate(operands)]
    leaves, grad = [operands[i] for i in wanted], torch.randn(rows, cols).to(dtype)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(getattr(warpnorm, norm)(operands[0], (cols,), *operands[1:], eps=1e-5), leaves, grad)

    by_python, calls = gradients(), []
    for _ in range(3):
        gradients()
    monkeypatch.setattr(NativeBackward, "__call__", lambda self, *args: calls.append(args))
    gc.collect()
    ours = gradients()
    assert bool(calls) != (is_taken or wanted == (0,))
    assert calls or all(a.equal(b) for a, b in zip(ours, by_python, strict=True))


def test_a_backward_is_shared_by_as_many_threads_as_there_are(quick: Quick) -> None:
    """Each has sums of its own, in whose order the gradients of parameters are added."""
    x, w = torch.randn(300, 1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    grad, before = torch.randn(300, 1000), torch.get_num_threads()

    def gradients(threads: int) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(threads)
        return torch.autograd.grad(warpnorm.rms_norm(x, 1000, w), (x, w), grad)

    try:
        with settings.override(launcher="python"):
            expected = {threads: gradients(threads) for threads in (1, 2, 3)}
        for threads in (2, 2, 2, 1, 1, 1, 3, 3, 3, 2, 1):
            found = gradients(threads)
            assert all(a.equal(b) for a, b in zip(found, expected[threads], strict=True))
    finally:
        torch.set_num_threads(before)
