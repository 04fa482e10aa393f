"""Contract: fused functions over rows by the compiled launcher, with and without gradients."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import warpnorm
from kernel_contracts.launcher_contract import Quick
from kernel_contracts.repeat_contract import COLS, operands
from warpnorm import pipeline

FUSED = {
    "residual": (lambda x, r, w: (F.rms_norm(x + r, (COLS,), w), x + r), tuple),
    "activation": (lambda x, r, w: F.layer_norm(F.silu(x) * r, (COLS,), w), torch.Tensor),
    "operands in another order": (lambda x, r, w: F.rms_norm(r * w - x, (COLS,)), torch.Tensor),
    "a list": (lambda x, r, w: [F.rms_norm(x * r, (COLS,), w)], None),
    "an argument again": (lambda x, r, w: (F.rms_norm(x * r, (COLS,), w), x), None),
    "a view": (lambda x, r, w: F.rms_norm(x.flatten(0, 0) * r.view(-1, COLS), (COLS,), w), None),
    "drawn": (lambda x, r, w: F.rms_norm(F.dropout(x + r, 0.0), (COLS,), w), torch.Tensor),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_functions(name: str, quick: Quick, device: str) -> None:
    """With and without gradients; where more is to be done than a launch, Python does it."""
    function, kind = FUSED[name]
    fused = warpnorm.fuse(function)
    for needed in ((), (0, 1, 2), (2,), (0,), ()):
        for seed in range(3):
            x, w, r = (*operands(6, device, seed)[:2], torch.randn(6, COLS, device=device))
            given = [o.requires_grad_(k in needed) for k, o in enumerate((x, r, w))]
            found, expected = fused(*given), function(*given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert kind is None or type(found) is kind
            pairs = [_tensors(result) for result in (found, expected)]
            wanted = [o for o in given if o.requires_grad]
            if wanted:
                grads = [torch.randn_like(o) for o in pairs[0] if o.requires_grad]
                gradients = [
                    torch.autograd.grad([o for o in some if o.requires_grad], wanted, grads, allow_unused=True)
                    for some in pairs
                ]
                for a, b in zip(*gradients, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert quick.found == (0 if kind is None else 14)


def _tensors(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def test_fused_gradients_of_some_outputs_and_twice(quick: Quick, device: str) -> None:
    """One output has no gradient; gradients that are differentiated again; many at once; checkpoints."""

    def block(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + r
        return F.rms_norm(h, (COLS,), w), h

    fused = warpnorm.fuse(block)
    x, w, r = (*operands(6, device)[:2], torch.randn(6, COLS, device=device))
    given = [o.requires_grad_() for o in (x, r, w)]
    grads = torch.randn(3, 6, COLS, device=device)
    for _ in range(3):
        for pick in ((0,), (1,), (0, 1)):
            found, expected = ([function(*given)[i] for i in pick] for function in (fused, block))
            first, second = (
                torch.autograd.grad(some, given, [grads[i] for i in pick], create_graph=True, allow_unused=True)
                for some in (found, expected)
            )
            for a, b in zip(first, second, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
            if pick == (1,):  # whose gradient is the one that is given
                continue
            again = [torch.autograd.grad(some[0].square().sum(), given, allow_unused=True) for some in (first, second)]
            for a, b in zip(*again, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        many = [torch.autograd.grad(f(*given)[0], given, grads, is_grads_batched=True) for f in (fused, block)]
        for a, b in zip(*many, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        ends = [checkpoint(f, *given, use_reentrant=False) for f in (fused, block)]
        some = [torch.autograd.grad(y.square().sum() + h.sum(), given) for y, h in ends]
        for a, b in zip(*some, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert quick.found > 10


def test_fused_operands_that_need_more_for_their_gradient(quick: Quick, device: str) -> None:
    """A scale for each sample, whose gradient is a sum over rows, and an operand that no gradient reaches."""
    fused = warpnorm.fuse(lambda x, s, c: F.rms_norm(x, (COLS,)) * (1 + s) + c.detach())
    x, c = (torch.randn(4, 3, COLS, device=device) for _ in range(2))
    s = torch.randn(4, 1, COLS, device=device)
    for needs_grad in (False, True, False):
        for _ in range(3):
            given = [o.detach().clone().requires_grad_(needs_grad) for o in (x, s, c)]
            found, expected = fused(*given), fused.__wrapped__(*given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            if needs_grad:
                gradients = [torch.autograd.grad(o.sum(), given, allow_unused=True) for o in (found, expected)]
                assert gradients[0][2] is None
                for a, b in zip(gradients[0][:2], gradients[1][:2], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_fused_closures_and_constants(quick: Quick, device: str) -> None:
    x, w, _ = operands(6, device)
    scale = [2.0]
    fused = warpnorm.fuse(lambda x: F.rms_norm(x * scale[0] + 1.0, (COLS,)))
    for value in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        scale[0] = value
        torch.testing.assert_close(fused(x), F.rms_norm(x * value + 1.0, (COLS,)))
    assert quick.found == 5
    gain = warpnorm.fuse(lambda x: F.rms_norm(x, (COLS,), w))
    for _ in range(4):
        w.mul_(1.5)
        torch.testing.assert_close(gain(x), F.rms_norm(x, (COLS,), w))


def test_launches_outlive_the_caches(quick: Quick, device: str) -> None:
    fused = warpnorm.fuse(lambda x, r, w: F.layer_norm(x + r, (COLS,), w))
    x, w, r = (*operands(6, device)[:2], torch.randn(6, COLS, device=device))
    expected = F.layer_norm(x + r, (COLS,), w)
    for _ in range(3):
        fused(x, r, w)
    pipeline.prepare_forward.cache_clear()
    gc.collect()
    kept = [bytearray(64) for _ in range(10_000)] + [torch.randn(8) for _ in range(1000)]
    before = quick.found
    for _ in range(5):
        torch.testing.assert_close(fused(x, r, w), expected, rtol=1e-4, atol=1e-4)
    assert quick.found == before + 5
    assert len(kept) == 11_000


def test_masks_of_fused_functions(quick: Quick, device: str) -> None:
    """Operands that no gradient reaches."""
    fused = warpnorm.fuse(lambda x, m, w: F.rms_norm(torch.where(m, x, 0.0), (COLS,), w))
    x, w, _ = operands(6, device)
    mask = x > 0
    for needs_grad in (False, True):
        x.requires_grad_(needs_grad)
        for _ in range(3):
            torch.testing.assert_close(fused(x, mask, w), fused.__wrapped__(x, mask, w), rtol=1e-4, atol=1e-4)
    assert quick.found == 5
