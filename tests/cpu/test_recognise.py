"""What `patch` takes for a norm: what computes one in every way that is asked, and nothing that almost does."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from cpu.test_patch import COLS, CentredNorm, GatedAfter, GatedBefore, OfWeight, PlusOne, Root, both, rows


def rms(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight


def of(forward: Callable[..., Any], **attributes: Any) -> torch.nn.Module:
    """A module with a weight, an eps and this forward."""

    def __init__(self: Any) -> None:  # noqa: N807
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.rand(COLS) + 0.5)
        self.eps = 1e-6
        vars(self).update(attributes)

    return type("SomeNorm", (torch.nn.Module,), {"__init__": __init__, "forward": forward})()


class Keeper:
    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        module.last = x
        return rms(module, x)


ALMOST = {
    "eps_outside": lambda s, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * s.weight,
    "no_eps": lambda s, x: x / x.pow(2).mean(-1, keepdim=True).sqrt() * s.weight,
    "by_length": lambda s, x: F.normalize(x, dim=-1) * COLS**0.5 * s.weight,
    "unbiased": lambda s, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + s.eps).sqrt() * s.weight,
    "dropout": lambda s, x: F.dropout(rms(s, x), 0.5, s.training),
    "in_training": lambda s, x: rms(s, x) * (1.0 if s.training else 2.0),
    "clamped": lambda s, x: rms(s, x.clamp(-50, 50)),
    "detached": lambda s, x: x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + s.eps) * s.weight,
    "keeps": lambda s, x: Keeper()(s, x),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_a_norm_is_left(name: str, is_training: bool) -> None:
    module = of(ALMOST[name]).train(is_training)
    assert warpnorm.patch(module).swapped == ()


def test_an_unbiased_variance_of_many_columns_is_seen() -> None:
    module = of(ALMOST["unbiased"])
    module.weight = torch.nn.Parameter(torch.ones(8192))
    assert warpnorm.patch(module).swapped == ()


def with_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    return of(lambda s, x: rms(SimpleNamespace(eps=s.eps, weight=change(s.weight)), x))


class ChangedNorm(CentredNorm):
    """A LayerNorm whose bias, or weight, is changed before use."""

    def __init__(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.name, self.change = name, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = {"alpha": self.alpha, "beta": self.beta}
        parameters[self.name] = self.change(parameters[self.name])
        return CentredNorm.forward(SimpleNamespace(**parameters), x)  # type: ignore[arg-type]


class Plus(torch.nn.Module):
    """Gemma's, of a weight above -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(COLS)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms(SimpleNamespace(eps=self.eps, weight=1 + self.weight.clamp(min=-1)), x)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "relu": torch.relu,
    "leaky": lambda p: F.leaky_relu(p, 0.5),
    "not_negative": lambda p: p.clamp(min=0),
    "clamped": lambda p: p.clamp(-2, 2),
    "clamped_far_out": lambda p: p.clamp(-1e5, 1e5),
    "not_small": lambda p: torch.where(p.abs() < 0.01, p * 0, p),
    "not_zero": lambda p: torch.where(p == 0, torch.ones_like(p), p),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_are_changed_before_use(name: str) -> None:
    """Ones of which the usual values, about one, are what they were."""
    change = CHANGES[name]
    for module in (with_weight(change), ChangedNorm("alpha", change), ChangedNorm("beta", change)):
        report = warpnorm.patch(module)
        assert report.swapped == ()
        assert "something else than a norm where parameters are" in report.left[0].what


def test_an_offset_does_not_hide_a_clamp() -> None:
    assert warpnorm.patch(Plus()).swapped == ()


AROUND: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "clamped": (lambda s, x: rms(s, x.clamp(-1e4, 1e4)), "inputs are large"),
    "of_halves": (lambda s, x: rms(s, x.clamp(-65504, 65504)), "inputs are large"),
    "below": (lambda s, x: rms(s, x.clamp(max=1e6)), "inputs are large"),
    "variance": (
        lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(max=1e12) + s.eps) * s.weight,
        "inputs are large",
    ),
    "output": (lambda s, x: rms(s, x).clamp(-100, 100), "parameters are large"),
    "of_numbers": (lambda s, x: torch.nan_to_num(rms(s, x)), "inputs are NaN or infinite"),
    "numbers_first": (lambda s, x: rms(s, torch.nan_to_num(x)), "inputs are NaN or infinite"),
    "nan_alone": (
        lambda s, x: rms(s, torch.where(x.isnan(), torch.zeros_like(x), x)), "inputs are NaN or infinite"
    ),
    "to_finite": (
        lambda s, x: rms(s, x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)), "inputs are NaN or infinite"
    ),
    "gates": (lambda s, x, gate: rms(s, x) * F.silu(gate.clamp(-1e4, 1e4)), "gates are large"),
    "gates_of_numbers": (
        lambda s, x, gate: rms(s, x * F.silu(torch.nan_to_num(gate))), "gates are NaN or infinite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_norm_is_seen_and_named(name: str) -> None:
    forward, where = AROUND[name]
    report = warpnorm.patch(of(forward))
    assert report.swapped == ()
    assert report.left[0].what == f"it computes something else than a norm where {where}"


@pytest.mark.parametrize("is_rounded", [True, False])
def test_what_is_something_else_in_16_bits_is_named(is_rounded: bool) -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        if is_rounded:  # a small difference of two that are large
            mean = x.mean(-1, keepdim=True)
            variance = (x.pow(2).mean(-1, keepdim=True) - mean.pow(2)).clamp(min=0)
            return (x - mean) * torch.rsqrt(variance + s.eps) * s.weight
        return rms(s, x) * (1.0 if x.dtype == torch.float32 else 2.0)

    said = "or rounds on the way, where inputs are bfloat16 and parameters float32"
    assert warpnorm.patch(of(forward)).left[0].what == f"it computes something else than a norm, {said}"


def test_dtypes_by_no_rule_are_named_as_such() -> None:
    report = warpnorm.patch(of(lambda s, x: rms(s, x).double()))
    assert report.left[0].what == "the dtype of its result follows none of the rules known"


@pytest.mark.parametrize("cols", [2, 3, 64, 4096])
@pytest.mark.parametrize("kind", [Root, PlusOne, OfWeight, GatedBefore, GatedAfter])
def test_plain_norms_of_any_width_are_found(kind: Any, cols: int) -> None:
    assert len(warpnorm.patch(kind(dim=cols)).swapped) == 1


@pytest.mark.parametrize("route", ["reference", "auto"])
def test_plain_norms_are_found_by_any_route(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPNORM_ROUTE", route)
    for module in (Root(), PlusOne(), CentredNorm(), WideLayerNorm(COLS), GatedBefore(), GatedAfter(), PixelNorm()):
        assert len(warpnorm.patch(module).swapped) == 1, module


class PixelNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-8)


class CentredPixelNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        return x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()


class PixelNormOfDim(PixelNorm):
    """An attribute that is called as a width often is, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 1


class DensePixelNorm(PixelNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).contiguous()


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("kind", [PixelNorm, CentredPixelNorm, PixelNormOfDim, DensePixelNorm])
def test_channels_are_those_of_images_too(kind: Any, is_channels_last: bool) -> None:
    """Of two dimensions the channels are the last one; that alone is no reason to leave images as they are."""
    module, twin = kind(), kind()
    report = warpnorm.patch(module)
    assert report.swapped[0].what.endswith("norm over channels")
    assert type(module).recipe.ndims == (2, 3, 4, 5)  # type: ignore[attr-defined]
    for shape in ((4, COLS), (2, COLS, 5), (2, COLS, 5, 6), (2, COLS, 3, 4, 5)):
        x = torch.randn(shape)
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last else x
        for found, right in zip(both(module, (x,)), both(twin, (x,)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert module(x).stride() == twin(x).stride()
    with pytest.raises(IndexError):
        module(torch.randn(COLS))


def test_channels_of_images_compiled() -> None:
    module, x = PixelNorm(), torch.randn(2, COLS, 5, 6)
    right = module(x)
    warpnorm.patch(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), right, rtol=1e-5, atol=1e-5)
    assert compiled(x).stride() == right.stride()


class ByDims(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if x.ndim == 4 else super().forward(x)


def test_dimensions_that_mean_something_else() -> None:
    """Of four dimensions it norms the channels, of others the last one."""
    module = ByDims(COLS)
    twin = copy.deepcopy(module)
    report = warpnorm.patch(module)
    assert report.swapped[0].what == "layer_norm with weight and bias over channels of inputs of 4 dimensions"
    for shape in ((2, COLS), (2, 3, COLS), (2, COLS, 5, COLS), (2, COLS, 5, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), twin(x))


def test_arguments_that_look_like_others() -> None:
    def gated(s: Any, x: Any, gate: Any = None, residual: Any = None) -> torch.Tensor:
        x = x if residual is None else x + residual
        return rms(s, x if gate is None else x * F.silu(gate))

    module, x, other = of(gated), rows(), rows()
    twin = copy.deepcopy(module)
    assert len(warpnorm.patch(module).swapped) == 1
    for arguments in ({"residual": other}, {"gate": other}, {"gate": other, "residual": x}, {}, {"residual": None}):
        torch.testing.assert_close(module(x, **arguments), twin(x, **arguments))
    flagged = of(lambda s, x, norm=True: rms(s, x) if norm else x)
    assert len(warpnorm.patch(flagged).swapped) == 1
    assert flagged(x, None).equal(x)
    assert flagged(x, False).equal(x)
    torch.testing.assert_close(flagged(x, True), rms(flagged, x))


def test_modules_that_differ_inside() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return rms(SimpleNamespace(eps=s.eps, weight=s.weight + 1 if s._plus else s.weight), x)

    one = of(forward, _plus=False)
    model = torch.nn.Sequential(one, copy.deepcopy(one))
    model[1]._plus = True
    x = rows()
    right = model(x)
    assert len(warpnorm.patch(model).swapped) == 2
    torch.testing.assert_close(model(x), right)


def test_sums_that_are_larger_than_a_half_has() -> None:
    """The residual stream of a T5 in float16 is float32, and larger."""
    module = OfWeight().half()
    x = rows() * 1e6
    right = module(x)
    assert len(warpnorm.patch(module).swapped) == 1
    found = module(x)
    assert found.dtype == torch.float16
    assert found.isfinite().all()
    torch.testing.assert_close(found, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("of_gate", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_others(of_input: torch.dtype, of_gate: torch.dtype) -> None:
    always = of(
        lambda s, x: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + s.eps) * s.weight.float()
    )
    gated = of(lambda s, x, gate: rms(s, x) * F.silu(gate))
    for module, given in ((always, (rows().to(of_input),)), (gated, (rows().to(of_input), rows().to(of_gate)))):
        module.to(torch.bfloat16)
        right = module(*given)
        assert len(warpnorm.patch(module).swapped) == 1
        assert module(*given).dtype == right.dtype


def test_results_that_lie_as_they_did() -> None:
    """A hand-written norm over channels gives a contiguous result."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return s.weight[:, None, None] * ((x - mean) / torch.sqrt(variance + s.eps))

    module, x = of(forward), torch.randn(2, COLS, 4, 4)
    right = module(x)
    assert len(warpnorm.patch(module).swapped) == 1
    assert module(x).stride() == right.stride()
    torch.testing.assert_close(module(x), right)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")], ids=range(3))
def test_modes_of_the_caller_do_not_matter(mode: Any) -> None:
    module = Root()
    with mode():
        assert len(warpnorm.patch(module).swapped) == 1


def test_gates_of_double_precision() -> None:
    right = of(lambda s, x, gate: rms(s, x * F.silu(gate))).double()
    x, gate = rows().double(), rows().double()
    expected = right(x, gate)
    assert len(warpnorm.patch(right).swapped) == 1
    torch.testing.assert_close(right(x, gate), expected, rtol=1e-12, atol=1e-12)


def test_changed_classes_are_left_and_said() -> None:
    class Closed(Root):
        def __init_subclass__(cls, *, name: str) -> None: ...

    own = Root()
    own.forward = lambda x: x  # type: ignore[method-assign]
    parametrized = torch.nn.LayerNorm(COLS)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "weight", torch.nn.Identity())
    model = torch.nn.Sequential(Closed(), own, parametrized, torch.nn.LayerNorm(COLS), warpnorm.nn.AddRMSNorm(COLS))
    report = warpnorm.patch(model)
    assert [change.name for change in report.swapped] == ["3"]
    assert [change.name for change in report.left] == ["0", "1", "2"]
    torch.nn.utils.parametrize.register_parametrization(model[3], "weight", torch.nn.Identity())
    back = warpnorm.unpatch(model)
    assert (back.swapped, len(back.left)) == ((), 1)
    torch.nn.utils.parametrize.remove_parametrizations(model[3], "weight")
    assert len(warpnorm.unpatch(model).swapped) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtypes_do_not_matter(dtype: torch.dtype) -> None:
    module, before = Root(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert len(warpnorm.patch(module).swapped) == 1
    finally:
        torch.set_default_dtype(before)


class WideLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return wide.to(x.dtype)


def test_sums_over_many_rows_stay_as_accurate() -> None:
    module = WideLayerNorm(64).bfloat16()
    x, grad = torch.randn(2, 4096, 64).bfloat16()
    exact = grad.double().sum(0)
    errors = []
    for _ in range(2):
        module.zero_grad()
        module(x).backward(grad)
        errors.append(float((module.bias.grad.double() - exact).norm() / exact.norm()))
        warpnorm.patch(module)
    assert errors[1] <= 1.5 * errors[0]


class WithModules(torch.nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = torch.nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


def test_norms_with_modules_in_them_are_named() -> None:
    report = warpnorm.patch(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), WithModules(8)))
    assert [(change.name, change.what) for change in report.left] == [("1", "it has modules in it")]


def test_a_parametrization_is_no_norm() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    assert warpnorm.patch(model).left == ()


def test_double_precision_beside_a_single_weight() -> None:
    module, x = OfWeight(), rows().double()
    right = module(x)
    assert len(warpnorm.patch(module).swapped) == 1
    assert module(x).dtype == right.dtype == torch.float64
