"""`patch` finds norms by what they compute, changes nothing but who computes it, and can be undone."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm.errors import InputTypeError

COLS = 16


class Root(torch.nn.Module):
    """RMSNorm as it is written most often, under a name that does not say so."""

    def __init__(self, eps: float = 1e-6, dim: int = COLS) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(dim) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.gain * wide.to(hidden_states.dtype)


class PlusOne(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.gain.float())).type_as(x)


class OfWeight(Root):
    """Its result has the dtype of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.gain * (wide.to(self.gain.dtype) if self.gain.dtype.itemsize == 2 else wide)


class CentredNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.randn(COLS))  # the bias comes first
        self.alpha = torch.nn.Parameter(torch.rand(COLS) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        return self.alpha * deviation / torch.sqrt(deviation.square().mean(-1, keepdim=True) + 1e-12) + self.beta


class Weightless(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class WeightlessNorm(Weightless):
    pass


class ChannelsFirst(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GatedBefore(Root):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else (x.float() * F.silu(gate.float())).to(x.dtype))


class GatedAfter(Root):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * F.silu(gate.float())).to(x.dtype)


class OneGroup(torch.nn.GroupNorm):
    """As in PoolFormer: it is a layer_norm of (rows, cols), and of images is none."""

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)


class OneGroupByHand(OneGroup):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


class WideEps(torch.nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-2)


class Unchecked(torch.nn.InstanceNorm2d):
    def _check_input_dim(self, input: torch.Tensor) -> None: ...


class Named(torch.nn.RMSNorm):
    """Its eps is None, which is no number to find a recipe by."""


class Twice(torch.nn.InstanceNorm2d):
    def _apply_instance_norm(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super()._apply_instance_norm(input)


class NormAndMore(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


class NormOfMax(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().amax(-1, keepdim=True) * self.gain


class NormOfHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, COLS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:]) * self.weight


class BrokenNorm(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 5)), COLS)


@dataclass(frozen=True)
class Found:
    make: Callable[[], torch.nn.Module]
    says: str
    given: Callable[[], tuple[torch.Tensor, ...]] = lambda: (rows(),)


FOUND = {
    "rms": Found(Root, "rms_norm with gain"),
    "eps": Found(lambda: Root(1e-2), "rms_norm with gain"),
    "plus_one": Found(PlusOne, "rms_norm with 1 + gain"),
    "dtype_of_weight": Found(OfWeight, "rms_norm with gain"),
    "centred": Found(CentredNorm, "layer_norm with alpha and beta"),
    "weightless": Found(WeightlessNorm, "rms_norm"),
    "channels_first": Found(lambda: ChannelsFirst(COLS), "over channels", lambda: (torch.randn(2, COLS, 4, 3),)),
    "gated_before": Found(GatedBefore, "rms_norm of x * silu(gate) with gain", lambda: (rows(), rows())),
    "gated_after": Found(GatedAfter, "rms_norm * silu(gate) with gain", lambda: (rows(), rows())),
    "layer_norm": Found(lambda: torch.nn.LayerNorm(COLS), "warpnorm.nn.LayerNorm"),
    "rms_norm": Found(lambda: torch.nn.RMSNorm(COLS, eps=1e-6), "warpnorm.nn.RMSNorm"),
    "group_norm": Found(lambda: torch.nn.GroupNorm(4, COLS), "nn.GroupNorm", lambda: (torch.randn(2, COLS, 3, 3),)),
    "batch_norm": Found(lambda: torch.nn.BatchNorm2d(COLS), "nn.BatchNorm2d", lambda: (torch.randn(2, COLS, 3, 3),)),
    "one_group": Found(lambda: OneGroup(COLS), "warpnorm.nn.GroupNorm", lambda: (torch.randn(2, COLS, 3, 3),)),
    "one_group_by_hand": Found(
        lambda: OneGroupByHand(COLS),
        "layer_norm with weight and bias of inputs of 2 dimensions",
        lambda: (torch.randn(2, COLS, 3, 3),),
    ),
    "other_arguments": Found(lambda: WideEps(COLS), "nn.BatchNorm2d", lambda: (torch.randn(2, COLS, 3, 3),)),
    "other_checks": Found(lambda: Unchecked(COLS), "nn.InstanceNorm2d", lambda: (torch.randn(2, COLS, 3, 3),)),
    "other_name": Found(lambda: Named(COLS), "warpnorm.nn.RMSNorm"),
    "instance_norm": Found(
        lambda: torch.nn.InstanceNorm2d(COLS, affine=True), "nn.InstanceNorm2d", lambda: (torch.randn(2, COLS, 3, 3),)
    ),
}


def both(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    output = module(*leaves)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    found = torch.autograd.grad((output.float() * weights).sum(), [*leaves, *module.parameters()])
    return [output.detach(), *found]


@pytest.mark.parametrize("name", FOUND)
def test_norms_are_found(name: str) -> None:
    case = FOUND[name]
    module, given = case.make(), case.given()
    twin = copy.deepcopy(module)
    report = warpnorm.patch(module)
    assert (len(report.swapped), report.left) == (1, ())
    assert report.swapped[0].what.endswith(case.says), report
    assert isinstance(module, type(twin))
    assert type(module) is not type(twin)
    for found, right in zip(both(module, given), both(twin, given), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    for found, right in zip(module.state_dict().items(), twin.state_dict().items(), strict=True):
        assert found[0] == right[0]
        assert found[1].equal(right[1])
    assert len(warpnorm.unpatch(module).swapped) == 1
    assert type(module) is type(twin)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: NormAndMore(COLS), "something else than a norm"),
        (NormOfMax, "something else than a norm"),
        (NormOfHeads, "not one or two vectors"),
        (BrokenNorm, "ZeroDivisionError: on purpose"),
        (lambda: torch.nn.SyncBatchNorm(COLS), "buffers"),
        (lambda: torch.nn.LazyBatchNorm1d(), "no shape yet"),
        (lambda: torch.nn.LocalResponseNorm(2), "something else than a norm"),
        (lambda: Twice(COLS), "something else than a norm"),
    ],
    ids=["and_more", "of_max", "of_heads", "broken", "sync", "lazy", "local_response", "twice"],
)
def test_others_are_left_and_it_is_said_why(make: Callable[[], torch.nn.Module], why: str) -> None:
    model = torch.nn.Sequential(make())
    kind = type(model[0])
    report = warpnorm.patch(model)
    assert report.swapped == ()
    assert [change.name for change in report.left] == ["0"]
    assert why in report.left[0].what
    assert why in str(report)
    assert type(model[0]) is kind


def test_what_is_no_norm_is_not_mentioned() -> None:
    report = warpnorm.patch(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.PReLU(4)))
    assert (report.swapped, report.left) == ((), ())
    assert str(report) == "swapped 0 of 0 norms"


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Root, PlusOne, OfWeight, WeightlessNorm])
def test_results_keep_their_dtypes(kind: Any, of_input: torch.dtype, of_weight: torch.dtype) -> None:
    module = kind().to(of_weight)
    right = module(rows().to(of_input))
    warpnorm.patch(module)
    assert module(rows().to(of_input)).dtype == right.dtype


def block() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(COLS, COLS), Root(), torch.nn.LayerNorm(COLS), torch.nn.Linear(COLS, COLS)
    )


def test_all_that_is_set_survives() -> None:
    model = block()
    model[2].weight = model[1].gain  # shared
    model[2].bias.requires_grad_(False)
    model.double().eval()
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("hook"))
    model[2].register_forward_pre_hook(lambda *_: seen.append("pre-hook"))
    parameters, modules = list(model.parameters()), list(model.modules())
    assert len(warpnorm.patch(model).swapped) == 2
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert model[2].weight is model[1].gain
    assert not model[2].bias.requires_grad
    assert not model[1].training
    assert model(rows().double()).dtype == torch.float64
    assert seen == ["hook", "pre-hook"]


def test_twice_and_back() -> None:
    model = torch.nn.Sequential(block(), warpnorm.nn.LayerNorm(COLS))
    kinds = [type(module) for module in model.modules()]
    assert len(warpnorm.patch(model).swapped) == 2
    assert warpnorm.patch(model).swapped == ()
    assert len(warpnorm.unpatch(model).swapped) == 2
    assert [type(module) for module in model.modules()] == kinds  # also what was ours before
    assert warpnorm.unpatch(model).swapped == ()


@pytest.mark.parametrize("name", ["rms", "plus_one", "gated_after", "layer_norm", "batch_norm"])
def test_copies_and_pickles_are_patched_too(name: str) -> None:
    module, given = FOUND[name].make(), FOUND[name].given()
    warpnorm.patch(module)
    right = both(module, given)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False),
    ):  # fmt: skip
        assert type(twin) is type(module)
        assert all(a.equal(b) for a, b in zip(both(twin, given), right, strict=True))
        warpnorm.unpatch(twin)
        assert type(twin) is not type(module)


def test_arguments_by_name_and_calls_that_the_probe_did_not_see() -> None:
    gated = GatedBefore()
    x, gate = rows(), rows()
    right, plain = gated(x, gate), gated(x)
    warpnorm.patch(gated)
    torch.testing.assert_close(gated(gate=gate, x=x), right)
    torch.testing.assert_close(gated(x), plain)
    torch.testing.assert_close(gated(x, None), plain)
    with pytest.raises(TypeError):
        gated(x, gat=gate)


def test_eps_that_is_changed_later_is_felt() -> None:
    module = Root()
    warpnorm.patch(module)
    module.variance_epsilon = 10.0
    x = rows()
    torch.testing.assert_close(module(x), Root.forward(module, x))


def test_the_probe_leaves_no_trace() -> None:
    """Neither in the model, nor in the generator, nor in what is counted."""
    model = block()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    warpnorm.patch(model)
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_probe_does_not_warn() -> None:
    """Of what it asks itself: PyTorch's InstanceNorm wonders about channels that nobody gave it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "something else than a norm" in warpnorm.patch(Twice(COLS)).left[0].what


def test_on_meta() -> None:
    with torch.device("meta"):
        model = block()
    assert len(warpnorm.patch(model).swapped) == 2
    assert model(torch.empty(2, COLS, device="meta")).is_meta


def test_compiled() -> None:
    model = torch.nn.Sequential(Root(), PlusOne(), torch.nn.LayerNorm(COLS), WeightlessNorm())
    x = rows()
    right = model(x)
    warpnorm.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), right)


@pytest.mark.parametrize("function", [warpnorm.patch, warpnorm.unpatch])
def test_what_is_no_model_is_refused(function: Any) -> None:
    with pytest.raises(InputTypeError, match=r"takes a torch\.nn\.Module, but got something of type Tensor"):
        function(torch.ones(2))
