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
HEADS, HEAD_DIM = 8, 64
IMAGES = (3, 8, 48, 48)
ROOT = Path(__file__).resolve().parents[2]
MODULES: dict[str, Any] = {
    "LayerNorm": lambda: warpnorm.nn.LayerNorm(COLS),
    "RMSNorm": lambda: warpnorm.nn.RMSNorm(COLS),
    "GatedRMSNorm": lambda: warpnorm.nn.GatedRMSNorm(COLS),
    "AddLayerNorm": lambda: warpnorm.nn.AddLayerNorm(COLS),
    "AdaLayerNorm": lambda: warpnorm.nn.AdaLayerNorm(COLS, elementwise_affine=True),
    "QKNorm": lambda: warpnorm.nn.QKNorm(HEAD_DIM, 4, 2),
    "BatchNorm2d": lambda: warpnorm.nn.BatchNorm2d(IMAGES[1]),
    "BatchNormReLU2d": lambda: warpnorm.nn.BatchNormReLU2d(IMAGES[1]),
    "GroupNormSiLU": lambda: warpnorm.nn.GroupNormSiLU(4, IMAGES[1]),
}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "GatedRMSNorm": ((4, COLS),) * 2,
    "AddLayerNorm": ((4, COLS),) * 2,
    "AdaLayerNorm": ((4, 3, COLS), (4, COLS), (4, COLS)),
    "QKNorm": ((4, 5, HEADS, HEAD_DIM),),
    **dict.fromkeys(("BatchNorm2d", "BatchNormReLU2d", "GroupNormSiLU"), (IMAGES,)),
}


def given(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES.get(name, ((4, COLS),))]


def made(name: str) -> Any:
    """For evaluation, which has a result for each sample; weights are not those that it begins with."""
    module = MODULES[name]().eval()
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def leaves_of(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", MODULES)
def test_functional_call(name: str) -> None:
    module, twin, tensors = made(name), made(name), given(name)
    doubled = {key: 2 * value.detach() for key, value in module.named_parameters()}
    twin.load_state_dict({**module.state_dict(), **doubled})
    found = torch.func.functional_call(module, doubled, tuple(tensors))
    for ours, right in zip(leaves_of(found), leaves_of(twin(*tensors)), strict=True):
        assert torch.equal(ours, right)

    def total(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        results = leaves_of(torch.func.functional_call(module, parameters, tuple(tensors)))
        return torch.stack([result.square().sum() for result in results]).sum()

    by_func = torch.func.grad(total)(doubled)
    leaves = {key: value.clone().requires_grad_() for key, value in doubled.items()}
    total(leaves).backward()
    for key, leaf in leaves.items():
        torch.testing.assert_close(by_func[key], leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_vjp_and_vmap(name: str) -> None:
    module, tensors = made(name), given(name)
    right, pull = torch.func.vjp(lambda *given: tuple(leaves_of(module(*given))), *tensors)
    grads = [torch.ones_like(result) for result in right]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    plain = leaves_of(module(*leaves))
    torch.testing.assert_close(list(right), plain)
    torch.autograd.backward(plain, grads)
    for found, leaf in zip(pull(tuple(grads)), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-4, atol=1e-5)
    mapped = torch.func.vmap(lambda *given: module(*(tensor[None] for tensor in given)))(*tensors)
    for found, expected in zip(leaves_of(mapped), plain, strict=True):
        torch.testing.assert_close(found[:, 0], expected)


@pytest.mark.parametrize("name", MODULES)
def test_a_gradient_for_each_sample(name: str) -> None:
    """They add up to that of the batch."""
    module, tensors = made(name), given(name)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

    def total(parameters: dict[str, torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        results = leaves_of(torch.func.functional_call(module, {**parameters, **buffers}, given))
        return torch.stack([result.square().sum() for result in results]).sum()

    def of_sample(parameters: dict[str, torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        return total(parameters, *(tensor[None] for tensor in given))

    found = torch.func.vmap(torch.func.grad(of_sample), (None, *[0] * len(tensors)))(parameters, *tensors)
    right = torch.func.grad(total)(parameters, *tensors)
    for key, of_all in right.items():
        assert found[key].shape == (tensors[0].shape[0], *of_all.shape)
        torch.testing.assert_close(found[key].sum(0), of_all, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", MODULES)
def test_deterministic_algorithms(name: str) -> None:
    module, tensors = made(name), given(name)
    right = leaves_of(module(*tensors))
    torch.use_deterministic_algorithms(True)
    try:
        found = leaves_of(module(*tensors))
        torch.stack([result.sum() for result in found]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, expected in zip(found, right, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODULES)
def test_inference_mode_first(name: str, is_training: bool) -> None:
    """The first call of all is in it, on tensors that were made in it; gradients may come later."""
    module, twin = made(name).train(is_training), made(name).train(is_training)
    with torch.inference_mode():
        found = leaves_of(module(*given(name)))
    tensors = given(name)
    for ours, right in zip(found, leaves_of(twin(*tensors)), strict=True):
        assert torch.equal(ours, right)
        assert ours.is_inference()
    grads = []
    for one in (module, twin):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        torch.stack([result.square().sum() for result in leaves_of(one(*leaves))]).sum().backward()
        grads.append([tensor.grad for tensor in (*leaves, *one.parameters())])
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_built_on_the_meta_device(name: str) -> None:
    torch.set_default_device("meta")
    try:
        module = MODULES[name]().eval()
        assert all(parameter.is_meta for parameter in module.parameters())
        assert all(result.is_meta for result in leaves_of(module(*given(name))))
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]
    module = module.to_empty(device="cpu")
    module.load_state_dict(made(name).state_dict())
    for found, right in zip(leaves_of(module(*given(name))), leaves_of(made(name)(*given(name))), strict=True):
        assert torch.equal(found, right)


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
