"""Contract: a fused function computes what the plain one does, values and gradients, whatever the broadcasting, the
strides, the dtypes and the plan, and where it writes in place. How it behaves is in fuse_behaviour_contract.py."""

import sys
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from cases import CASES, DTYPES, Case
from kernel_contracts.fuse_operators_contract import Found, check_fused, grads_for
from warpnorm import pipeline
from warpnorm.fuse import NOTHING, Fused, arrange
from warpnorm.plan.plan import LONG_ROW, ROW, TEAM, Plan

COLS = 24
LONG = 70_000


def layer(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)  # by default each dtype has its own


def drawn(shape: Sequence[int], seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(device, dtype)


def check(
    function: Callable[..., Any], shapes: Sequence[Sequence[int]], device: str, dtype: torch.dtype = torch.float32
) -> None:
    """Fused against plain, on one operand of each shape. Gradients of few elements take several draws."""

    def make(seed: int) -> list[torch.Tensor]:
        return [drawn(shape, 50 * seed + k, dtype, device) for k, shape in enumerate(shapes)]

    is_small = min(prod(shape) for shape in shapes) < COLS
    draws = 8 if LONG in shapes[0] else 24
    check_fused(warpnorm.fuse(function), function, make, draws if is_small else 4, 2 if is_small else 1)


# Broadcasting


class Spread(NamedTuple):
    """How an operand lies in the space of batch, time and columns."""

    name: str
    shape: Callable[[int, int, int], tuple[int, ...]]
    why: str


SPREADS = (
    Spread("full", lambda b, t, h: (b, t, h), "a residual"),
    Spread("column", lambda b, t, h: (h,), "a weight: its gradient is a sum over all rows"),
    Spread("columns_of_one_row", lambda b, t, h: (1, 1, h), "the same with the dimensions written out"),
    Spread("row", lambda b, t, h: (b, t, 1), "a number for each row: its gradient is a sum over columns"),
    Spread("scalar", lambda b, t, h: (), "a tensor without dimensions"),
    Spread("one", lambda b, t, h: (1,), "a tensor of one element"),
    Spread("sample", lambda b, t, h: (b, 1, h), "AdaLN: a row for each sample"),
    Spread("sample_scalar", lambda b, t, h: (b, 1, 1), "a number for each sample"),
    Spread("position", lambda b, t, h: (1, t, h), "a row for each position: rows of a group lie apart"),
    Spread("position_flat", lambda b, t, h: (t, h), "the same with a dimension less"),
    Spread("position_scalar", lambda b, t, h: (t, 1), "a number for each position"),
)
SIZES = {"several": (2, 3, COLS), "one_sample": (1, 3, COLS), "one_position": (2, 1, COLS), "one_row": (1, 1, COLS)}
SIZES |= {"one_column": (2, 3, 1), "long": (2, 2, LONG)}


def modulated(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`a` is read on both sides of the norm, and neither is linear in it."""
    h = x * torch.sigmoid(a * x) + x.sin()
    return layer(h) * torch.cos(a) + a * x, h


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: spread.name)
def test_fused_broadcasting(spread: Spread, size: str, device: str) -> None:
    check(modulated, [SIZES[size], spread.shape(*SIZES[size])], device)


@pytest.mark.parametrize("slopes", [1, COLS])
def test_slopes_of_one_number_or_one_a_channel(slopes: int, device: str) -> None:
    check(lambda x, slope: layer(F.prelu(x, slope)), ((6, COLS), (slopes,)), device)


def test_fused_long_rows_are_walked(device: str) -> None:
    x, a = (drawn(shape, 0, torch.float32, device).requires_grad_() for shape in ((2, 2, LONG), (LONG,)))
    explained = warpnorm.explain(modulated, x, a)
    assert explained.backward is not None
    assert (explained.forward.plan.pattern, explained.backward.plan.pattern) == (LONG_ROW, TEAM)


def every_spread(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x.sin()
    for other in others:
        h = h + 0.3 * torch.tanh(x * other)
    y = rms(h)
    for other in others:
        y = y + torch.sin(y * other) * 0.3
    return y, h


EVERY_SHAPE = [(4, 3, COLS), *(spread.shape(4, 3, COLS) for spread in SPREADS if spread.name != "columns_of_one_row")]


@pytest.mark.parametrize(
    "shapes",
    [((3, 1), (COLS,)), ((COLS,), (3, 1)), ((), (2, 3, COLS)), ((1,), (COLS,)), ((2, 1, COLS), (3, 1)),
     ((2, 1, 1), (3, COLS)), ((2, 1, COLS), (3, 1), (2, 3, 1)), ((COLS,), (2, 1, 1), (3, 1))],
    ids=str,
)  # fmt: skip
def test_fused_without_a_full_operand(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    """Together they are broadcast to the shape that is normalized."""
    check(every_spread, shapes, device)


FORWARD_PLANS = (
    Plan(ROW, 4, 32, 1),
    Plan(ROW, 1, 32, 1, programs=2, stages=2),
    Plan(LONG_ROW, 1, 16, 1),
)
BACKWARD_PLANS = (
    Plan(ROW, 1, 32, 1, programs=3),
    Plan(ROW, 4, 32, 2, programs=64),
    Plan(LONG_ROW, 1, 16, 1, programs=16),
)


def test_fused_every_kind_of_operand_at_once(device: str) -> None:
    """Two ways of grouping the rows among them, of which a kernel can sum for one."""
    check(every_spread, EVERY_SHAPE, device)


PLANNED = [("sample", plan, None) for plan in FORWARD_PLANS]
PLANNED += [(grouped, None, plan) for grouped in ("sample", "position") for plan in BACKWARD_PLANS]


@pytest.mark.parametrize(("grouped", "forward", "backward"), PLANNED, ids=str)
def test_fused_every_kind_of_operand_under_every_plan(
    grouped: str, forward: Plan | None, backward: Plan | None, device: str
) -> None:
    other = {"sample": "position", "position": "sample"}[grouped]
    shapes = [(4, 3, COLS), *(s.shape(4, 3, COLS) for s in SPREADS if not s.name.startswith(other))]

    def find(function: Fused, operands: Sequence[torch.Tensor], seed: int) -> Found:
        return planned(function, operands, seed, forward, backward)

    check_fused(
        warpnorm.fuse(every_spread),
        every_spread,
        lambda seed: [drawn(shape, 50 * seed + k, torch.float32, device) for k, shape in enumerate(shapes)],
        draws=48,
        own_draws=2,
        find=find,
    )


def planned(
    function: Fused, operands: Sequence[torch.Tensor], seed: int, forward: Plan | None, backward: Plan | None
) -> Found:
    """As Found.of, with plans forced. Every operand must want a gradient, in the order in which it is read first."""
    leaves = tuple(operand.detach().requires_grad_() for operand in operands)
    request = function.request(NOTHING, leaves, {})
    call, arranged = arrange(function.prepare(request), request.tensors)
    assert [o.shape for o in arranged] == [o.shape for o in operands], "one way of grouping is not expanded"
    outputs, statistics = pipeline.forward(call, arranged, plan=forward)
    wanted = tuple(range(len(operands)))
    found = pipeline.backward(call, arranged, grads_for(outputs, seed), statistics, wanted, plan=backward)
    return Found(tuple(o.detach() for o in outputs), tuple(found[i].detach() for i in wanted))


def test_fused_several_normalized_dimensions(device: str) -> None:
    def block(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        h = x
        for other in others:
            h = h + torch.sin(x * other)
        y = F.layer_norm(h, (4, 6))
        for other in others:
            y = y * torch.cos(other) + other
        return y

    shapes = ((4, 6), (4, 1), (6,), (3, 1, 1), (3, 4, 1), (2, 1, 1, 6), (2, 3, 1, 1), (2, 1, 4, 6))
    for shape in shapes:
        check(block, [(2, 3, 4, 6), shape], device)
    check(block, [(2, 3, 4, 6), *shapes], device)


def test_fused_numbers(device: str) -> None:
    def block(x: torch.Tensor, gain: float, /, *, shift: float = 0.25, is_squared: bool = False) -> torch.Tensor:
        h = x * x if is_squared else x
        return rms(h + shift) * gain

    fused = warpnorm.fuse(block)
    for args, kwargs in (
        ((2,), {}),
        ((2.0,), {"shift": 1}),
        ((-0.1,), {"is_squared": True}),
        ((True,), {"shift": 3e8}),
    ):
        check_fused(
            lambda x, args=args, kwargs=kwargs: fused(x, *args, **kwargs),
            lambda x, args=args, kwargs=kwargs: block(x, *args, **kwargs),
            lambda seed: [drawn((5, COLS), seed, torch.float32, device)],
        )


# Strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "past_65536"], ids=str)
def test_fused_layouts(case: Case, dtype: torch.dtype, device: str) -> None:
    def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = residual + F.silu(x)
        return F.layer_norm(h, h.shape[-case.col_dims :]) * x, h

    def make(seed: int) -> list[torch.Tensor]:  # of float32 both lie in this way, of bfloat16 one
        x, residual = case.make(dtype, device, seed), case.make(dtype, device, seed + 50)
        return [x, residual if dtype == torch.float32 else residual.contiguous()]

    check_fused(warpnorm.fuse(block), block, make)


class Views(NamedTuple):
    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    why: str


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return rms(F.silu(gate) * value)


def split(x: torch.Tensor) -> torch.Tensor:
    a, b, c = torch.split(x, [8, 8, 8], dim=-1)
    return layer(a * b) + c


def heads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = (x * x.sin()).view(x.shape[0], x.shape[1], 4, 6).transpose(1, 2)
    return rms(h) * y


VIEWS = (
    Views("chunk", swiglu, ((3, 2, 48),), "two halves of one tensor, and one gradient"),
    Views("split", split, ((5, 24),), "three parts, one of them after the norm"),
    Views("slices", lambda x: rms(x[..., :8] * x[..., 8:16]), ((5, 24),), "a part is not read"),
    Views("rows", lambda x, y: rms(x[1:] * y[:-1]), ((5, 24), (5, 24)), "neighbouring rows"),
    Views("select", lambda x: rms(x[:, 0] * x[:, 1].sin()), ((4, 2, 24),), "packed tensors"),
    Views("unbind", lambda x: rms(torch.mul(*x.unbind(1))), ((4, 2, 24),), "a list of views"),
    Views("unsqueeze", lambda x, a: layer(x * a.unsqueeze(1).sin()), ((2, 3, 24), (2, 24)), "AdaLN"),
    Views("none", lambda x, a: layer(x * a[:, None].sin()), ((2, 3, 24), (2, 24)), "the same"),
    Views("moved_result", lambda x, a: layer(x * a.sin().unsqueeze(1)), ((2, 3, 24), (2, 24)),
          "a view of what an operator gave"),
    Views("squeeze", lambda x, y: rms(x.squeeze(1) * y), ((4, 1, 24), (4, 24)), "a dimension less"),
    Views("heads", heads, ((2, 5, 24), (2, 4, 5, 6)), "an intermediate is reshaped and transposed"),
    Views("permute", lambda x, y: rms(x.permute(0, 2, 1) * y), ((4, 24, 6), (4, 6, 24)), "columns apart"),
    Views("expand", lambda x, a: rms(x * a.expand(2, 3, 24).sin()), ((2, 3, 24), (2, 1, 1)), "by hand"),
    Views("expanded_result", lambda x, a: rms(x * a.sin().expand_as(x)), ((2, 3, 24), (3, 1)), "by hand"),
    Views("flatten", lambda x, y: rms(x.flatten(0, 1) * y), ((2, 3, 24), (6, 24)), "rows in one axis"),
    Views("unflatten", lambda x: rms(x.unflatten(-1, (4, 6)).sin()), ((5, 24),), "columns in two axes"),
    Views("reshaped_broadcast", lambda x, a: rms((x * a).view(6, 24)).sin(), ((2, 3, 24), (24,)),
          "a view of a broadcast product"),
)  # fmt: skip


@pytest.mark.parametrize("views", VIEWS, ids=lambda views: views.name)
def test_fused_views(views: Views, device: str) -> None:
    check(views.function, views.shapes, device)


# Dtypes


def mixed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + F.silu(x)
    return rms(h) * weight, h


@pytest.mark.parametrize("kinds", list(product(DTYPES, repeat=3)), ids=lambda kinds: "-".join(map(str, kinds)))
def test_fused_mixed_dtypes(kinds: tuple[torch.dtype, ...], device: str) -> None:
    """Results have the dtype of PyTorch's promotion, gradients that of their operand."""
    shapes = ((3, 16), (3, 16), (16,))

    def make(seed: int) -> list[torch.Tensor]:
        return [drawn(s, 50 * seed + k, d, device) for k, (s, d) in enumerate(zip(shapes, kinds, strict=True))]

    check_fused(warpnorm.fuse(mixed), mixed, make, draws=3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_fused_integers_before_the_norm(dtype: torch.dtype, device: str) -> None:
    def scaled(image: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(image.to(mean.dtype) / 255 - torch.sigmoid(mean), mean.shape)

    def promoted(image: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(torch.where(image > 1, mean, image * mean.sin()) + image, mean.shape)

    def make(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randint(0, 120, (4, COLS), generator=generator).to(device, dtype)
        return [image, drawn((COLS,), seed, torch.float32, device)]

    for function in (scaled, promoted):
        check_fused(warpnorm.fuse(function), function, make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_float8_results_are_casts_of_the_others(dtype: torch.dtype, device: str) -> None:
    """Also below the smallest, past the largest, and of what is not a number."""

    def quantized(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = rms(x).float() * scale.float()
        return y.to(torch.float8_e4m3fn), y.to(torch.float8_e5m2), y

    x = drawn((40, 64), 0, dtype, device)
    x[3, 5], x[4, 6], x[5] = float("nan"), float("inf"), 0.0
    scale = torch.logspace(-8, 6, 40, dtype=torch.float64).view(40, 1).to(device, dtype)
    e4m3, e5m2, y = warpnorm.fuse(quantized)(x, scale)
    assert y.isnan().any()
    for found, dtype_of_found in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        assert found.dtype == dtype_of_found
        wanted = y.to(dtype_of_found)
        assert found.float().isnan().equal(wanted.float().isnan())
        is_number = ~wanted.float().isnan()
        assert found.view(torch.uint8)[is_number].equal(wanted.view(torch.uint8)[is_number])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fused_float8_inputs(dtype: torch.dtype, device: str) -> None:
    def dequantized(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return layer(code.float() * torch.exp(scale))

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()][:240].view(15, 16).to(device)
    check_fused(
        warpnorm.fuse(dequantized), dequantized, lambda seed: [codes, drawn((15, 1), seed, torch.float32, device)]
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fused_gradients_of_float8_operands(dtype: torch.dtype, device: str) -> None:
    """Of one that is summed over rows, and of one that is written where it lies."""

    def dequantized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer(x.float()) * weight.float()

    leaves = [
        drawn(shape, k, torch.float32, device).to(dtype).requires_grad_() for k, shape in enumerate(((4, 16), (16,)))
    ]
    grad = drawn((4, 16), 2, torch.float32, device)
    found = torch.autograd.grad(warpnorm.fuse(dequantized)(*leaves), leaves, grad)
    wanted = torch.autograd.grad(dequantized(*leaves), leaves, grad)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        # of two results within some float32 roundings of each other, one may be rounded up and the other down
        step = torch.finfo(dtype).eps * theirs.float().abs() + torch.finfo(dtype).smallest_normal
        assert ((mine.float() - theirs.float()).abs() <= step).all()


def test_fused_more_groups_than_a_grid_has(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Their gradient is then summed by PyTorch."""
    monkeypatch.setattr(sys.modules["warpnorm.trace.arrange"], "LARGEST_GROUPS", 3)
    check(modulated, [(4, 3, COLS), (4, 1, COLS)], device)
    x, a = (drawn(shape, 0, torch.float32, device).requires_grad_() for shape in ((4, 3, COLS), (4, 1, COLS)))
    explained = warpnorm.explain(modulated, x, a)
    assert explained.backward is not None
    assert {gradient.axes for gradient in explained.backward.problem.gradients} == {"full"}


# Writing in place, and no gradients


def added(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = x * r.sin()
    h += r
    h.mul_(2.5).clamp_(-3, 3)
    y = layer(h)
    y *= x
    y.add_(r, alpha=0.5)
    return y


def activated(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = F.silu(x * r, inplace=True)
    F.leaky_relu_(h, 0.1)
    return F.relu_(rms(F.hardtanh(h + r, inplace=True)))


def copied(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = x.clone()
    h += r.sin()
    copy = torch.zeros_like(h)
    copy.copy_(h * r)
    return rms(copy) + x


def without_gradient(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x * r)
    y = layer(gate * x + r)
    with torch.no_grad():
        scale = torch.tanh(y)
    return y * scale


def straight_through(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = x * r.sin()
    return rms(h + (h.round() - h).detach()) * r.detach()


@pytest.mark.parametrize(
    "function", [added, activated, copied, without_gradient, straight_through], ids=lambda f: f.__name__
)
def test_fused_in_place_and_without_gradient(function: Callable[..., torch.Tensor], device: str) -> None:
    check(function, [(3, COLS), (3, COLS)], device)


@pytest.mark.parametrize("cols", [72, 128])
def test_an_expanded_vector_is_no_scalar(cols: int, device: str) -> None:
    x, w = (drawn(shape, 70, torch.float32, device).requires_grad_() for shape in ((5, cols), (1,)))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (cols,), eps=1e-6) * w

    found, right = (call(x, w.expand(cols)) for call in (warpnorm.fuse(function), function))
    torch.testing.assert_close(found, right)
    grad = drawn((5, cols), 72, torch.float32, device)
    for a, b in zip(*(torch.autograd.grad(y, (x, w), grad) for y in (found, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
