"""Contract: a sum that a fused function returns beside its norm is kept instead of what was added, and gradients that are
the same tensor are written once; nothing of the result changes for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.fuse_contract import drawn
from kernel_contracts.fuse_operators_contract import check_fused

COLS = 1200


def stream(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def first(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + x
    return h, F.layer_norm(h, h.shape[-1:]) * weight


def three(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual + 2 * weight
    return F.layer_norm(h, h.shape[-1:], weight), h


def alone(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x + residual, x.shape[-1:], weight, 1e-6)


def twice(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + x + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def read_again(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6) * x, h


def scaled(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = 0.4 * x + residual
    return F.layer_norm(h, h.shape[-1:], weight), h


def halved(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = (x + residual) * 0.5
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def gated(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x * residual + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def dropped(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = F.dropout(x, 0.3) + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def seeded(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    return warpnorm.fuse(dropped)(*args)


def masked(device: str, dtype: torch.dtype, rows: int) -> Callable[..., Any]:
    """The function of `seeded`, its mask at hand."""
    x, residual, weight = operands(device, dtype, rows=rows)
    mask = seeded(x, torch.zeros_like(residual), weight)[1] != 0
    assert 0 < mask.sum() < mask.numel()

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x * mask / 0.7 + residual
        return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h

    return plain


FUNCTIONS = (stream, first, three, alone, twice, read_again, scaled, halved, gated)


def operands(device: str, dtype: torch.dtype, seed: int = 0, rows: int = 6) -> list[torch.Tensor]:
    return [drawn(shape, 10 * seed + k, dtype, device) for k, shape in enumerate(((rows, COLS), (rows, COLS), (COLS,)))]


def leaves_of(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [o.requires_grad_() for o in operands(device, dtype)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_from_a_sum_are_accurate(function: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    check_fused(warpnorm.fuse(function), function, lambda seed: operands(device, dtype, seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_from_a_sum_with_dropout_are_accurate(dtype: torch.dtype, device: str) -> None:
    check_fused(seeded, masked(device, dtype, 6), lambda seed: operands(device, dtype, seed))


@pytest.mark.parametrize("function", [stream, first, scaled, halved, dropped], ids=lambda f: f.__name__)
def test_the_sum_is_kept_and_the_summands_are_not(function: Callable[..., Any], device: str) -> None:
    leaves = leaves_of(device)
    outputs = warpnorm.fuse(function)(*leaves)
    saved = {t.data_ptr() for t in outputs[0].grad_fn.saved_tensors if t is not None}  # none for numbers
    total = outputs[0 if function is first else 1]
    assert total.data_ptr() in saved
    assert not saved & {leaf.data_ptr() for leaf in leaves[:2]}
    assert leaves[2].data_ptr() in saved


@pytest.mark.parametrize("function", [three, alone, twice, read_again, gated], ids=lambda f: f.__name__)
def test_summands_are_kept_where_the_sum_is_not_enough(function: Callable[..., Any], device: str) -> None:
    leaves = leaves_of(device)
    outputs = warpnorm.fuse(function)(*leaves)
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    saved = {t.data_ptr() for t in output.grad_fn.saved_tensors}
    assert leaves[0].data_ptr() in saved


def test_a_sum_of_another_dtype_is_not_kept(device: str) -> None:
    x, residual, weight = leaves_of(device, torch.bfloat16)
    residual = residual.detach().float().requires_grad_()
    output, total = warpnorm.fuse(stream)(x, residual, weight)
    assert total.dtype == torch.float32
    assert x.data_ptr() in {t.data_ptr() for t in output.grad_fn.saved_tensors}
    found = torch.autograd.grad((output, total), (x, residual), (output.detach(), total.detach()))
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("function", [stream, alone], ids=lambda f: f.__name__)
def test_gradients_of_summands_are_one_tensor_but_never_in_two_leaves(
    function: Callable[..., Any], device: str
) -> None:
    leaves = leaves_of(device)
    outputs = warpnorm.fuse(function)(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(o) for o in outputs]
    found = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    assert found[0].data_ptr() == found[1].data_ptr()
    torch.autograd.backward(outputs, grads)
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()
    kept = leaves[1].grad.clone()
    leaves[0].grad.zero_()
    assert leaves[1].grad.equal(kept)


def test_gradients_of_summands_that_are_scaled_apart_are_tensors_of_their_own(device: str) -> None:
    def apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = 2 * x + 2 * residual
        return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h

    leaves = leaves_of(device)
    outputs = warpnorm.fuse(apart)(*leaves)
    found = torch.autograd.grad(outputs, leaves[:2], [torch.ones_like(o) for o in outputs])
    assert found[0].equal(found[1])
    assert found[0].data_ptr() != found[1].data_ptr()


def test_gradients_of_casts_are_tensors_of_their_own(device: str) -> None:
    x, residual, weight = leaves_of(device, torch.bfloat16)

    def wide(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float() + residual.float(), x.shape[-1:], weight.float(), 1e-6)

    found = torch.autograd.grad(warpnorm.fuse(wide)(x, residual, weight).sum(), (x, residual))
    assert found[0].equal(found[1])
    assert found[0].data_ptr() != found[1].data_ptr()


def test_what_runs_backward_is_explained(device: str) -> None:
    leaves = leaves_of(device)
    for function, operand_count in ((stream, 2), (alone, 3)):
        backward = warpnorm.explain(function, *leaves).backward
        assert backward is not None
        assert len(backward.problem.operands) == operand_count
        assert sum(gradient.axes == "full" for gradient in backward.problem.gradients) == 1
    backward = warpnorm.explain(dropped, *leaves).backward
    assert backward is not None
    assert sum(gradient.axes == "full" for gradient in backward.problem.gradients) == 2
    assert "keep" not in str(backward.problem.prologue)  # the mask is drawn once
    assert str(backward.problem.prologue_vjp).count("keep") == 1


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True), (False, False, True)], ids=str)
def test_only_some_gradients_are_needed(needed: tuple[bool, ...], device: str) -> None:
    leaves = [o.requires_grad_(need) for o, need in zip(operands(device, torch.float32), needed, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.randn_like(leaves[0]) for _ in range(2)]
    found = torch.autograd.grad(warpnorm.fuse(stream)(*leaves)[0], wanted, grads[0])
    expected = torch.autograd.grad(stream(*leaves)[0], wanted, grads[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_only_the_sum_has_a_gradient(device: str) -> None:
    leaves = leaves_of(device)
    _, total = warpnorm.fuse(stream)(*leaves)
    grad = torch.randn_like(total)
    for found in torch.autograd.grad(total, leaves[:2], grad):
        assert found.equal(grad)


def test_the_sum_changed_in_place_is_noticed_as_in_pytorch(device: str) -> None:
    for function in (stream, warpnorm.fuse(stream)):
        leaves = leaves_of(device)
        output, total = function(*leaves)
        with torch.no_grad():
            total.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        with torch.no_grad():  # but not what was added
            output, _ = function(*leaves)
            leaves[0].add_(1.0)


@pytest.mark.parametrize("function", [stream, alone, scaled, halved], ids=lambda f: f.__name__)
def test_from_a_sum_differentiated_twice(function: Callable[..., Any], device: str) -> None:
    leaves = [o.requires_grad_() for o in operands(device, torch.float64, rows=2)]
    assert torch.autograd.gradgradcheck(warpnorm.fuse(function), leaves, fast_mode=True)


def test_from_a_sum_with_dropout_differentiated_twice(device: str) -> None:
    leaves = [o.requires_grad_() for o in operands(device, torch.float64, rows=2)]
    assert torch.autograd.gradgradcheck(seeded, leaves, fast_mode=True)
    found = []
    for function in (seeded, masked(device, torch.float64, 2)):
        outputs = function(*leaves)
        first = torch.autograd.grad(outputs, leaves, [o.detach().sin() for o in outputs], create_graph=True)
        found.append(torch.autograd.grad([f.square().sum() for f in first], leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True), (False, False, True)], ids=str)
def test_with_dropout_only_some_gradients_are_needed(needed: tuple[bool, ...], device: str) -> None:
    found = []
    for function in (seeded, masked(device, torch.float32, 6)):
        leaves = [o.requires_grad_(need) for o, need in zip(operands(device, torch.float32), needed, strict=True)]
        output, total = function(*leaves)
        found.append(torch.autograd.grad(output, [t for t in leaves if t.requires_grad], total.detach().cos()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_many_gradients_at_once_from_a_sum_with_dropout(device: str) -> None:
    leaves = leaves_of(device)
    output, total = seeded(*leaves)
    grads = torch.stack([output.detach().sin(), total.detach().cos()])
    found = torch.autograd.grad(output, leaves, grads, is_grads_batched=True, retain_graph=True)
    for k, grad in enumerate(grads):
        for ours, theirs in zip(found, torch.autograd.grad(output, leaves, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(ours[k], theirs, rtol=1e-4, atol=1e-4)
