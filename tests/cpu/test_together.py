"""Together with the rest of PyTorch: what a module or a fused one has to bear without a word about it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import warpnorm

COLS = 2048
ROOT = Path(__file__).resolve().parents[2]
MODULES: dict[str, Any] = {
    "LayerNorm": lambda: warpnorm.nn.LayerNorm(COLS),
    "RMSNorm": lambda: warpnorm.nn.RMSNorm(COLS),
    "GatedRMSNorm": lambda: warpnorm.nn.GatedRMSNorm(COLS),
}


def given(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, COLS) for _ in range(2 if name == "GatedRMSNorm" else 1)]


@pytest.mark.parametrize("name", MODULES)
def test_functional_call(name: str) -> None:
    module, tensors = MODULES[name](), given(name)
    doubled = {key: 2 * value.detach() for key, value in module.named_parameters()}
    expected = 2 * module(*tensors)
    torch.testing.assert_close(torch.func.functional_call(module, doubled, tuple(tensors)), expected)

    def total(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, tuple(tensors)).square().sum()

    by_func = torch.func.grad(total)(doubled)
    leaves = {key: value.clone().requires_grad_() for key, value in doubled.items()}
    total(leaves).backward()
    for key, leaf in leaves.items():
        torch.testing.assert_close(by_func[key], leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_vjp_and_vmap(name: str) -> None:
    module, tensors = MODULES[name](), given(name)
    right, pull = torch.func.vjp(module, *tensors)
    torch.testing.assert_close(right, module(*tensors))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    module(*leaves).backward(torch.ones_like(right))
    for found, leaf in zip(pull(torch.ones_like(right)), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(module)(*tensors), right)


@pytest.mark.parametrize("name", MODULES)
def test_deterministic_algorithms(name: str) -> None:
    module, tensors = MODULES[name](), given(name)
    right = module(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        found = module(*tensors)
        found.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, right)


@pytest.mark.parametrize("name", MODULES)
def test_inference_mode(name: str) -> None:
    module, tensors = MODULES[name](), given(name)
    right = module(*tensors).detach()
    with torch.inference_mode():
        found = module(*[tensor.clone() for tensor in tensors])
    assert torch.equal(found, right)
    assert found.is_inference()


@pytest.mark.parametrize("name", MODULES)
def test_built_on_the_meta_device(name: str) -> None:
    torch.set_default_device("meta")
    try:
        module = MODULES[name]()
        assert all(parameter.is_meta for parameter in module.parameters())
        assert module(*given(name)).is_meta
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]
    module = module.to_empty(device="cpu")
    module.load_state_dict(MODULES[name]().state_dict())
    assert torch.equal(module(*given(name)), MODULES[name]()(*given(name)))


def test_checkpoint_of_a_fused_function() -> None:
    fused = warpnorm.fuse(lambda x: F.rms_norm(x * 2, (COLS,)))
    (x,) = given("RMSNorm")
    x.requires_grad_()
    grad = torch.randn_like(x)
    (right,) = torch.autograd.grad(fused(x), x, grad)
    for use_reentrant in (False, True):
        kept = torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=use_reentrant)
        kept.backward(grad)
        assert torch.equal(x.grad, right)  # type: ignore[arg-type]
        x.grad = None


FIRST = """
import torch, warpnorm
from torch.utils.checkpoint import checkpoint
module = warpnorm.nn.AddRMSNorm(2048)
x, r = (torch.randn(4, 2048, requires_grad=True) for _ in range(2))
checkpoint(lambda x, r: module(x, r)[0], x, r, use_reentrant=False).sum().backward()
print(module.weight.grad.shape)
"""


def test_the_first_call_of_all_may_be_a_checkpoint() -> None:
    """Nothing that is kept while a function is captured is counted."""
    ran = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "torch.Size([2048])\n", ran.stderr
