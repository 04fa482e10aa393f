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


@pytest.mark.parametrize("tied_first", [True, False], ids=["tied first", "tied last"])
def test_a_module_with_one_weight_for_both_beside_one_with_two(tied_first: bool, device: str) -> None:
    x = drawn((3, ALL, COLS), 9, torch.float32, device).requires_grad_()
    for is_tied in (tied_first, not tied_first, tied_first):
        module = module_of(device)
        if is_tied:
            module.k_weight = module.q_weight
        right = plain(x, module.q_weight, module.k_weight)
        found = module(x)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        grads = [drawn(o.shape, 50, torch.float32, device) for o in right]
        leaves = [x, *module.parameters()]
        for a, b in zip(*(torch.autograd.grad(o, leaves, grads) for o in (found, right)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


WEIGHTS = {
    "another dtype": lambda w: (w.double(), w),
    "one number": lambda w: (w[:1].clone(), w),
    "no dimension": lambda w: (w[0].clone(), w),
    "for each head": lambda w: (w.expand(HEADS[0] + HEADS[1], -1).clone(), w),
    "expanded": lambda w: (w[:1].expand(COLS), w),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_other_kinds(name: str, device: str) -> None:
    module, x = module_of(device), drawn((3, ALL, COLS), 11, torch.float32, device)
    leaves = [t.detach().requires_grad_() for t in (x, *WEIGHTS[name](drawn((COLS,), 12, torch.float32, device)))]

    def written(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both, v = x.split((HEADS[0] + HEADS[1], HEADS[2]), -2)
        is_query = (torch.arange(HEADS[0] + HEADS[1], device=device) < HEADS[0])[:, None]
        weight = torch.where(is_query, *weights)
        normalized = (F.rms_norm(both, (COLS,), None, EPS) * weight).to(x.dtype)
        return *normalized.split(HEADS[:2], -2), v

    found = torch.func.functional_call(module, dict(zip(("q_weight", "k_weight"), leaves[1:], strict=True)), leaves[0])
    right = written(*leaves)
    grads = [drawn(o.shape, 60, torch.float32, device) for o in right]
    for a, b in zip(*(torch.autograd.grad(o, leaves, grads) for o in (found, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_values_without_a_gradient_are_only_a_view(device: str) -> None:
    module, x = module_of(device), drawn((3, ALL, COLS), 13, torch.float32, device)
    module.k_weight.requires_grad_(False)
    q, k, v = module(x)
    assert not v.requires_grad
    (q.sum() + k.sum()).backward()
    right = torch.autograd.grad(plain(x, *module.parameters())[0].sum(), module.q_weight)[0]
    torch.testing.assert_close(module.q_weight.grad, right, rtol=1e-4, atol=1e-4)
    assert module.k_weight.grad is None


def test_neither_queries_nor_keys(device: str) -> None:
    x = drawn((3, ALL, COLS), 14, torch.float32, device).requires_grad_()
    outputs = nn.QKNorm(COLS, 0, 0).to(device)(x)
    (found,) = torch.autograd.grad(outputs, x, [torch.ones_like(o) for o in outputs])
    assert found.equal(torch.ones_like(x))


def test_a_class_with_a_norm_of_its_own(device: str) -> None:
    class Doubled(nn.QKNorm):
        def _normalize(self, x: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
            return 2 * x

    x = drawn((3, ALL, COLS), 15, torch.float32, device).requires_grad_()
    q, _, _ = Doubled(COLS, *HEADS[:2]).to(device)(x)
    assert q.equal(2 * x[:, : HEADS[0]])


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
