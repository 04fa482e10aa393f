"""Contract: the gradients of packed heads, of which each part is written where it belongs, are those of plain PyTorch,
whatever lies where and whichever of them are wanted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernel_contracts.fuse_contract import drawn
from warpnorm import nn, packed

HEADS, COLS, EPS = (3, 2, 4), 72, 1e-5  # of queries, keys and values
ALL = sum(HEADS)


def module_of(device: str, dtype: torch.dtype = torch.float32) -> nn.QKNorm:
    module = nn.QKNorm(COLS, *HEADS[:2], EPS).to(device, dtype)
    with torch.no_grad():
        for k, weight in enumerate(module.parameters()):
            weight.copy_(drawn((COLS,), 90 + k, dtype, device))
    return module


def plain(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = x.split(HEADS, -2)
    return *(F.rms_norm(part, (COLS,), weight, EPS) for part, weight in zip((q, k), weights, strict=True)), v


def layouts(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "contiguous": drawn((4, 5, ALL, COLS), 1, dtype, device),
        "one token": drawn((ALL, COLS), 2, dtype, device),
        "of more": drawn((4, 5, ALL + 2, COLS + 8), 3, dtype, device)[..., 1:-1, :-8],
        "heads first": drawn((4, ALL, 5, COLS), 4, dtype, device).transpose(1, 2),
        "no token": drawn((0, ALL, COLS), 5, dtype, device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # float64 is held below
@pytest.mark.parametrize("name", layouts("cpu", torch.float32))
def test_packed_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    module, x = module_of(device, dtype), layouts(device, dtype)[name].requires_grad_()
    leaves, wide = [x, *module.parameters()], [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    found, right = module(x), plain(*wide)
    grads = [drawn((*o.shape[:-1], 2 * COLS), 10 + k, dtype, device)[..., ::2] for k, o in enumerate(found)]
    ours = torch.autograd.grad(found, leaves, grads)
    theirs = torch.autograd.grad(plain(*leaves), leaves, grads)
    truth = torch.autograd.grad(right, wide, [g.double() for g in grads])
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        mine, other = ((t.double() - c).norm() / (c.norm() + 1e-30) for t in (a, b))
        assert mine <= 1.5 * other + torch.finfo(dtype).eps, (mine, other)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("needed", [(True, True, True), (True, False, True), (False, True, False)], ids=str)
def test_some_parts_are_used_and_some_gradients_needed(needed: Any, used: tuple[int, ...], device: str) -> None:
    module, x = module_of(device), layouts(device, torch.float32)["contiguous"]
    leaves = [t.requires_grad_(need) for t, need in zip((x, *module.parameters()), needed, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    found, right = module(x), plain(*leaves)
    used = tuple(k for k in used if right[k].requires_grad)
    assert [o.requires_grad for o in found[:2]] == [True] * 2  # one operation has them all
    if used:
        grads = [drawn(right[k].shape, 20 + k, torch.float32, device) for k in used]
        ours, theirs = (
            torch.autograd.grad([o[k] for k in used], wanted, grads, allow_unused=True) for o in (found, right)
        )
        for a, b in zip(ours, theirs, strict=True):
            if b is None:
                assert a is None or not a.any()
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_gradient_beside_others(device: str) -> None:
    module, x = module_of(device), drawn((37, ALL, COLS), 6, torch.float32, device).requires_grad_()
    grads = [drawn((37, size, COLS), 30 + k, torch.float32, device) for k, size in enumerate(HEADS)]
    (whole,) = torch.autograd.grad(module(x), x, grads)
    for rows in (slice(0, 1), slice(5, 12)):
        part = x[rows].detach().requires_grad_()
        (found,) = torch.autograd.grad(module(part), part, [g[rows] for g in grads])
        assert found.equal(whole[rows])


def test_packed_gradients_are_written_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the gradient of x itself."""
    made = []
    backward = packed.Seen.backward

    def noted(self: Any, *args: Any) -> Any:
        made.append(args[-1][0])
        return backward(self, *args)

    monkeypatch.setattr(packed.Seen, "backward", noted)
    module, x = module_of(device), layouts(device, torch.float32)["contiguous"].requires_grad_()
    outputs = module(x)
    (found,) = torch.autograd.grad(outputs, x, [torch.ones_like(o) for o in outputs])
    assert [part.untyped_storage().data_ptr() for part in made] == [found.untyped_storage().data_ptr()] * 2
    assert [part.shape[-2] for part in made] == list(HEADS[:2])


def test_a_packed_call_that_was_seen_before(device: str) -> None:
    """With other weights, of other modules, and another eps."""
    for eps in (EPS, EPS, 0.5, EPS):
        module, x = module_of(device), drawn((3, ALL, COLS), 8, torch.float32, device).requires_grad_()
        module.eps = eps
        with torch.no_grad():
            module.q_weight.add_(eps)
        q, k, v = x.split(HEADS, -2)
        right = F.rms_norm(q, (COLS,), module.q_weight, eps), F.rms_norm(k, (COLS,), module.k_weight, eps), v
        leaves, grads = [x, *module.parameters()], [drawn(o.shape, 40, torch.float32, device) for o in right]
        found = module(x)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        ours, theirs = (torch.autograd.grad(o, leaves, grads) for o in (found, right))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_queries_and_keys_may_be_written_into(device: str) -> None:
    module, x = module_of(device), layouts(device, torch.float32)["contiguous"].requires_grad_()
    q, k, _ = module(x)
    right = plain(x, *module.parameters())
    q.mul_(2.0)
    k.add_(q[..., :2, :].detach())
    ours, theirs = (
        torch.autograd.grad(total, x)[0] for total in (q.sum() + k.sum(), 2 * right[0].sum() + right[1].sum())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_packed_gradients_differentiated_twice_and_many_at_once(device: str) -> None:
    module, x = module_of(device, torch.float64), drawn((2, ALL, COLS), 7, torch.float64, device).requires_grad_()
    leaves = [x, *module.parameters()]

    def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(("q_weight", "k_weight"), weights, strict=True)), x)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    q, _, _ = call(*leaves)
    grads = torch.stack([q.detach().sin(), q.detach().cos()])
    found = torch.autograd.grad(q, leaves[:2], grads, is_grads_batched=True, retain_graph=True)
    for k, grad in enumerate(grads):
        for a, b in zip(found, torch.autograd.grad(q, leaves[:2], grad, retain_graph=True), strict=True):
            torch.testing.assert_close(a[k], b)
