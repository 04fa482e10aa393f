"""The compiled launcher, of native code."""

import gc

import pytest
import torch

import warpnorm
from kernel_contracts.launcher_contract import *  # noqa: F403
from kernel_contracts.launcher_contract import Quick
from kernel_contracts.launcher_fuse_contract import *  # noqa: F403
from warpnorm.cpu.run import NativeBackward

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,)], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "of_weight", "is_taken"),
    [(3, 2048, dtype, dtype, True) for dtype in DTYPES]
    + [(3, 2048, torch.bfloat16, torch.float32, True), (100, 2048, torch.float32, torch.float32, True)]
    + [(200, 2048, torch.float32, torch.float32, False), (8, 32768, torch.float32, torch.float32, False)],
    ids=[*map(str, DTYPES), "weights of another dtype", "parts", "many parts", "many sums"],
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_small_backward_is_the_launchers(
    norm: str, rows: int, cols: int, dtype: torch.dtype, of_weight: torch.dtype, is_taken: bool, wanted: tuple[int, ...],
    quick: Quick, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of few parts, which may be more than there are threads, and few sums."""
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
    assert bool(calls) != (is_taken or (wanted == (0,) and rows * cols < 300_000))
    assert calls or all(a.equal(b) for a, b in zip(ours, by_python, strict=True))
