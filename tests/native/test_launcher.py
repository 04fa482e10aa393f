"""The compiled launcher, of native code."""

import pytest
import torch

import warpnorm
from kernel_contracts.launcher_contract import *  # noqa: F403
from kernel_contracts.launcher_contract import Quick
from kernel_contracts.launcher_fuse_contract import *  # noqa: F403
from warpnorm.cpu.run import NativeBackward

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("rows", "dtype", "is_taken"),
    [(3, dtype, True) for dtype in DTYPES] + [(100, torch.float32, True), (200, torch.float32, False)],
    ids=[str(dtype) for dtype in DTYPES] + ["parts", "large"],
)
def test_a_small_backward_is_the_launchers(
    rows: int,
    dtype: torch.dtype,
    is_taken: bool,
    wanted: tuple[int, ...],
    quick: Quick,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few parts, which may be more than there are threads."""
    shapes = ((rows, 2048), (2048,), (2048,))
    operands = [torch.randn(shape).to(dtype).requires_grad_(i in wanted) for i, shape in enumerate(shapes)]
    leaves, grad = [operands[i] for i in wanted], torch.randn(rows, 2048).to(dtype)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(warpnorm.layer_norm(operands[0], (2048,), *operands[1:]), leaves, grad)

    by_python, calls = gradients(), []
    for _ in range(3):
        gradients()
    monkeypatch.setattr(NativeBackward, "__call__", lambda self, *args: calls.append(args))
    ours = gradients()
    assert bool(calls) != is_taken
    assert not is_taken or all(a.equal(b) for a, b in zip(ours, by_python, strict=True))
