"""The modules against those of `torch.nn`: whatever can be done to one can be done to the other, with the same result."""

import copy
import inspect
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import warpnorm
from cpu.truth import DTYPES, name_of, random


@dataclass(frozen=True)
class Case:
    name: str
    module: str
    why: str
    shape: int | list[int] | tuple[int, ...] = 8
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Ours and PyTorch's, with the same parameters that are not those they began with."""
        ours, theirs = (getattr(home, self.module)(self.shape, **self.arguments) for home in (warpnorm.nn, torch.nn))
        with torch.no_grad():
            for seed, (mine, its) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
                for parameter in (mine, its):
                    parameter.copy_(random(parameter.shape, parameter.dtype, seed))
        return ours, theirs


CASES = [
    Case("layer_norm", "LayerNorm", "the default"),
    Case("layer_norm_eps", "LayerNorm", "eps reaches the function", arguments={"eps": 0.5}),
    Case("layer_norm_two_dims", "LayerNorm", "a shape of two dimensions", shape=(2, 8)),
    Case("layer_norm_list", "LayerNorm", "a list becomes a tuple", shape=[2, 8]),
    Case("layer_norm_no_affine", "LayerNorm", "no parameters", arguments={"elementwise_affine": False}),
    Case("layer_norm_no_bias", "LayerNorm", "a weight alone", arguments={"bias": False}),
    Case("rms_norm", "RMSNorm", "the default: eps is None"),
    Case("rms_norm_eps", "RMSNorm", "eps reaches the function", arguments={"eps": 0.5}),
    Case("rms_norm_two_dims", "RMSNorm", "a shape of two dimensions", shape=(2, 8)),
    Case("rms_norm_no_affine", "RMSNorm", "no parameters", arguments={"elementwise_affine": False}),
    *(
        Case(f"{module.lower()}_{name_of(dtype)}", module, "parameters of this dtype", arguments={"dtype": dtype})
        for module in ("LayerNorm", "RMSNorm")
        for dtype in DTYPES[:1] + DTYPES[2:]
    ),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def dtype_of(case: Case) -> torch.dtype:
    return case.arguments.get("dtype", torch.float32)


def run(module: torch.nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    """The output, then the gradients of the input and of every parameter."""
    leaf = input.detach().clone().requires_grad_()
    output = module(leaf)
    return [output, *torch.autograd.grad(output.square().sum(), [leaf, *module.parameters()])]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


@by_case
def test_forward_and_backward_are_pytorchs(case: Case) -> None:
    ours, theirs = case.build()
    input = random((3, 2, 8), dtype_of(case), seed=7)
    assert_equal(run(ours, input), run(theirs, input))


@by_case
def test_is_pytorchs_in_every_attribute(case: Case) -> None:
    ours, theirs = (getattr(home, case.module)(case.shape, **case.arguments) for home in (warpnorm.nn, torch.nn))
    assert isinstance(ours, getattr(torch.nn, case.module))
    assert repr(ours) == repr(theirs)
    assert ours.extra_repr() == theirs.extra_repr()
    assert (ours.normalized_shape, ours.eps, ours.elementwise_affine) == (
        theirs.normalized_shape,
        theirs.eps,
        theirs.elementwise_affine,
    )
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert_equal(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("module", ["LayerNorm", "RMSNorm"])
def test_signatures_are_pytorchs(module: str) -> None:
    ours, theirs = (getattr(home, module) for home in (warpnorm.nn, torch.nn))
    assert inspect.signature(ours.__init__) == inspect.signature(theirs.__init__)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)


@by_case
def test_state_dict_goes_both_ways(case: Case) -> None:
    ours, theirs = case.build()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    input = random((3, 2, 8), dtype_of(case), seed=7)
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(float("nan"))
        result = target.load_state_dict(source.state_dict(), strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_equal(run(target, input), run(source, input))


@by_case
def test_copies_are_independent_and_equal(case: Case) -> None:
    module, _ = case.build()
    input = random((3, 2, 8), dtype_of(case), seed=7)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    expected = run(module, input)
    for copied in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ):
        assert type(copied) is type(module)
        assert_equal(run(copied, input), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(float("nan"))
        assert_equal(run(module, input), expected)


@pytest.mark.parametrize("module", ["LayerNorm", "RMSNorm"])
def test_is_built_on_a_device_and_moved(module: str) -> None:
    built = getattr(warpnorm.nn, module)(8, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in built.parameters()} == {("meta", torch.float64)}
    assert built(torch.empty(3, 8, device="meta", dtype=torch.float64)).is_meta
    ours = built.to_empty(device="cpu").to(torch.bfloat16)
    ours.reset_parameters()
    input = random((3, 8), torch.bfloat16)
    assert_equal(run(ours, input), run(getattr(torch.nn, module)(8, dtype=torch.bfloat16), input))


@pytest.mark.parametrize("module", ["LayerNorm", "RMSNorm"])
def test_stands_in_a_model(module: str) -> None:
    """Trained for three steps beside PyTorch's, hooks and all, it ends with the same weights."""
    states = []
    for home in (torch.nn, warpnorm.nn):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), getattr(home, module)(16), torch.nn.Linear(16, 1))
        seen: list[int] = []
        model[1].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(random((5, 8), seed=step)).square().mean().backward()
            optimizer.step()
        assert len(seen) == 3
        states.append(list(model.state_dict().values()))
    assert_equal(*states)


@pytest.mark.parametrize("module", ["LayerNorm", "RMSNorm"])
def test_refuses_as_the_function_does(module: str) -> None:
    with pytest.raises(warpnorm.InputError, match=r"normalized_shape is \(8,\), but input has shape \(3, 7\)"):
        getattr(warpnorm.nn, module)(8)(torch.randn(3, 7))
