"""A sample of problems, forward and backward, for sanitized builds. Arguments: `short` for fewer; `broken` for code that
reads one element too many, which a sanitizer must see."""

import ctypes
import sys

import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import settings
from warpnorm.cpu import build, fallback


def refuse(*_: object) -> None:
    raise AssertionError("the compiler refused")


fallback.FallbackForward.__call__ = fallback.FallbackBackward.__call__ = refuse  # type: ignore[method-assign, assignment]
load = build.load


def load_broken(text: str) -> ctypes.CDLL:
    return load(text.replace("j < cols;", "j <= cols;"))


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def silu_layer(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(x) * r, x.shape[-1:], w, b)


def adaptive(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:]) * (1 + scale) + shift


def gelu_after(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.rms_norm(x, x.shape[-1:], w))


def mish_before(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.mish(x) * gain, x.shape[-2:])


def batch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return warpnorm.batch_norm(x, None, None, w, b, True)


def residual_batch(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True) + r)


def group_silu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 3, w, b))


def scaled_batch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x * scale[:, None, None], None, None, None, None, True)


def running() -> None:
    x, mean, variance = torch.randn(5, 6, 7, 9), torch.zeros(6), torch.ones(6)
    expected = mean.clone(), variance.clone()
    for view in (x, last(x)):
        found = mean.clone(), variance.clone()
        torch.testing.assert_close(
            warpnorm.batch_norm(view, *found, training=True), F.batch_norm(x, *expected, training=True)
        )
        torch.testing.assert_close(found, expected)
        expected = mean.clone(), variance.clone()


def check(function, *operands: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    leaves = [o.detach().requires_grad_() for o in operands]
    wide = [o.detach().double().requires_grad_() for o in operands]
    with settings.override(route="reference"):
        expected = function(*wide)
    fused = function if function is batch else warpnorm.fuse(function)
    output = fused(*leaves)
    grad = torch.randn_like(output)
    found = (output, *torch.autograd.grad(output, leaves, grad))
    truth = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for a, b in zip(found, truth, strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm() + 1e-3, (function.__name__, a.dtype)


def main(is_short: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtype in dtypes[: 1 if is_short else 4]:
        x, r = torch.randn(2, 130, 515).to(dtype)
        w, b = torch.randn(2, 515).to(dtype)
        check(silu_layer, x, r, w, b)
        check(silu_layer, x[::2, 3:500], r[1::2, 3:500], w[:497], b[5:502])
        image, other = torch.randn(2, 5, 9, 11, 13).to(dtype)
        weight, bias = torch.randn(2, 9).to(dtype)
        for view in (image, last(image)):
            check(residual_batch, view, other, weight, bias)
            check(group_silu, view, weight, bias)
    images = torch.randn(3, 70, 20, 21)
    views = (last(images)[:, :, 1:, 3:], images, last(images), images[..., :1])
    for view in views[: 1 if is_short else 4]:
        check(batch, view, torch.randn(70), torch.randn(70))
        check(scaled_batch, view, torch.randn(70))
    check(adaptive, torch.randn(7, 33, 200), torch.randn(7, 1, 200), torch.randn(7, 1, 200))
    check(gelu_after, torch.randn(300, 1500), torch.randn(1500))
    check(mish_before, torch.randn(40, 12, 31), torch.randn(40, 1, 1))
    running()
    print("the sample ran")


if __name__ == "__main__":
    if "broken" in sys.argv:
        build.load = load_broken
    with settings.override(route="native"):
        main("short" in sys.argv or "broken" in sys.argv)
