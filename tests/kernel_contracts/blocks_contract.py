"""Contract: the ready-made modules compute what is written out here in plain PyTorch, forward and backward, as accurately as
it does, whatever they run by."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warpnorm import nn

COLS = 64
SCALE = 0.05


def tokens(count: int = 2) -> Callable[[], list[torch.Tensor]]:
    return lambda: list(torch.randn(count, 3, 5, COLS, dtype=torch.float64))


def images(count: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: list(torch.randn(count, 4, 8, 6, 6, dtype=torch.float64))


PAIR = tokens()


@dataclass(frozen=True)
class Block:
    """A module, what it is given, and what it computes; `by_sample` are vectors for each sample."""

    make: Callable[[], torch.nn.Module]
    plain: Callable[..., Any]
    given: Callable[[], list[torch.Tensor]] = PAIR
    by_sample: int = 0


def add_layer(m: Any, x: torch.Tensor, r: torch.Tensor) -> Any:
    return F.layer_norm(x + r, (COLS,), m.weight, m.bias, m.eps), x + r


def add_rms(m: Any, x: torch.Tensor, r: torch.Tensor) -> Any:
    return F.rms_norm(x + r, (COLS,), m.weight, m.eps), x + r


def ada(m: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Any:
    return F.layer_norm(x, (COLS,), m.weight, m.bias, m.eps) * (1 + scale[:, None]) + shift[:, None]


def batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, m.training, m.momentum, m.eps)


def qk(m: Any, x: torch.Tensor) -> Any:
    q, k, v = x.split([2, 1, 2], -2)
    return F.rms_norm(q, (COLS,), m.q_weight, m.eps), F.rms_norm(k, (COLS,), m.k_weight, m.eps), v


BLOCKS = {
    "add_layer_norm": Block(lambda: nn.AddLayerNorm(COLS), add_layer),
    "add_rms_norm": Block(lambda: nn.AddRMSNorm(COLS, eps=1e-6), add_rms),
    "gated": Block(
        lambda: nn.GatedRMSNorm(COLS, 1e-6), lambda m, x, g: F.rms_norm(x, (COLS,), m.weight, m.eps) * F.silu(g)
    ),
    "gated_first": Block(
        lambda: nn.GatedRMSNorm(COLS, 1e-6, norm_before_gate=False),
        lambda m, x, g: F.rms_norm(x * F.silu(g), (COLS,), m.weight, m.eps),
    ),
    "ada": Block(lambda: nn.AdaLayerNorm(COLS), ada, tokens(1), 2),
    "ada_affine": Block(lambda: nn.AdaLayerNorm(COLS, elementwise_affine=True), ada, tokens(1), 2),
    "batch_relu": Block(lambda: nn.BatchNormReLU2d(8), lambda m, x: F.relu(batch(m, x)), images(1)),
    "batch_add_relu": Block(lambda: nn.BatchNormReLU2d(8), lambda m, x, r: F.relu(batch(m, x) + r), images(2)),
    "group_silu": Block(
        lambda: nn.GroupNormSiLU(2, 8), lambda m, x: F.silu(F.group_norm(x, 2, m.weight, m.bias, m.eps)), images(1)
    ),
    "qk": Block(lambda: nn.QKNorm(COLS, 2, 1), qk, tokens(1)),
}


def given_to(block: Block, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = block.given()
    x += list(torch.randn(block.by_sample, x[0].shape[0], COLS, dtype=torch.float64))
    return [t.to(device, dtype) for t in x]


def random_parameters(module: torch.nn.Module) -> None:
    for p in module.parameters():
        torch.nn.init.uniform_(p, 0.5, 1.5)


def results(function: Callable[..., Any], module: torch.nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [*leaves, *module.parameters()]
    grads = [torch.linspace(-1, 1, o.numel(), device=o.device).to(o.dtype).view(o.shape) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, wanted, grads), *module.buffers()]


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, dtype: torch.dtype, is_training: bool, device: str) -> None:
    block = BLOCKS[name]
    module = block.make().to(device, dtype).train(is_training)
    random_parameters(module)
    given = given_to(block, device, dtype)
    twin, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    found = results(module, module, given)
    plain = results(lambda *t: block.plain(twin, *t), twin, given)
    truth = results(lambda *t: block.plain(exact, *t), exact, [t.double() for t in given])
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            mine, theirs = ((t.double() - c.double()).norm() / (c.double().norm() + 1e-30) for t in (a, b))
            assert mine <= 1.5 * theirs + torch.finfo(dtype).eps, (mine, theirs)


@pytest.mark.parametrize("float8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8(float8: torch.dtype, device: str) -> None:
    module = nn.RMSNormFloat8(COLS, 1e-6, float8=float8).to(device)
    random_parameters(module)
    x = torch.randn(7, COLS, device=device)
    x[3, 5] = 1e3  # past the largest
    scale = torch.tensor(SCALE, device=device)
    found = module(x, scale)
    largest = torch.finfo(float8).max
    right = (F.rms_norm(x.double(), (COLS,), module.weight.double(), 1e-6) / SCALE).clamp(-largest, largest)
    assert found.dtype == float8
    assert not found.requires_grad
    step = 2.0 ** (-3 if float8 == torch.float8_e4m3fn else -2)
    assert ((found.double() - right).abs() <= step / 2 * right.abs() * 1.001 + 2.0**-9).all()
