"""Contract: every operator that may stand in a fused function, before the norm and after it, value and gradients, is as
accurate as the plain function in the same dtype. The truth is the plain function in float64."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from accuracy import Error, assert_accurate
from warpnorm import settings
from warpnorm.trace.operators import TRITON

ROWS, COLS = 3, 40
DRAWS = 4  # PyTorch's error is the worst of as many inputs: one small input may be easy by chance
EPS_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps

# Away from every integer, half and bound below, both as they are and over their root mean square, which is the same for
# every draw: no rounding moves one of them past a step or a kink. Each with how many of 40 columns it has.
STEP_SIZES = {0.3828125: 16, 0.8359375: 12, 1.3671875: 8, 1.859375: 2, 3.21875: 2}
DIVISOR_SIZES = {0.4375: 10, 0.890625: 10, 1.765625: 10, 2.609375: 10}  # the quotients are away from integers too


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=generator, dtype=torch.float64)


def positive(generator: torch.Generator) -> torch.Tensor:
    return 0.5 + 1.5 * torch.rand(ROWS, COLS, generator=generator, dtype=torch.float64)


def steps(generator: torch.Generator, sizes: dict[float, int] = STEP_SIZES) -> torch.Tensor:
    values = torch.tensor([size for size, count in sizes.items() for _ in range(count)], dtype=torch.float64)
    order = torch.rand(ROWS, COLS, generator=generator).argsort(1)
    return values[order] * torch.where(torch.rand(ROWS, COLS, generator=generator) < 0.5, -1, 1)


def divisors(generator: torch.Generator) -> torch.Tensor:
    return steps(generator, DIVISOR_SIZES)


Domain = Callable[[torch.Generator], torch.Tensor]
ONE, TWO, THREE = (normal,), (normal, normal), (normal, normal, normal)
STEPS, PAIRS = (steps,), (steps, divisors)


class Row(NamedTuple):
    """One operator, the domain of each of its operands, and why it is here."""

    name: str
    function: Callable[..., torch.Tensor]
    domains: tuple[Domain, ...]
    why: str

    def operands(self, seed: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [domain(generator).to(device, dtype) for domain in self.domains]


ARITHMETIC = (
    Row("add", lambda x, y: x + y, TWO, "two tensors"),
    Row("add_number", lambda x: F.silu(x) + 1.5, ONE, "a tensor and a number"),
    Row("add_alpha", lambda x, y: torch.add(x, y, alpha=1.7), TWO, "alpha is a factor of the second"),
    Row("sub", lambda x, y: x - y, TWO, "two tensors"),
    Row("sub_alpha", lambda x, y: x.sub(y, alpha=0.3), TWO, "alpha is a factor of the second"),
    Row("number_minus", lambda x: 2.5 - x, ONE, "rsub with a number"),
    Row("rsub_alpha", lambda x, y: torch.rsub(x, y, alpha=0.5), TWO, "alpha is a factor of the first"),
    Row("mul", lambda x, y: x * y, TWO, "two tensors"),
    Row("mul_number", lambda x, y: x * 3 + y, TWO, "an integer beside a floating tensor"),
    Row("div", lambda x, y: x / y, (normal, positive), "two tensors"),
    Row("div_number", lambda x, y: x / 3 + y, TWO, "not a product with a rounded third"),
    Row("number_over", lambda x: 2.0 / x, (positive,), "a reciprocal and a product"),
    Row("div_trunc", lambda x, y: y * torch.div(x, y, rounding_mode="trunc"), PAIRS, "towards zero"),
    Row("div_floor", lambda x, y: y * torch.div(x, y, rounding_mode="floor"), PAIRS, "towards minus infinity"),
    Row("floor_divide", lambda x, y: x * (x.detach() // y.detach()), PAIRS, "the operator //, which has no gradient"),
    Row("floor_divide_number", lambda x: x * (x.detach() // 0.75), STEPS, "by a number"),
    Row("fmod", lambda x, y: torch.fmod(x, y), PAIRS, "the sign is the dividend's"),
    Row("fmod_number", lambda x: torch.fmod(x, 0.75), STEPS, "by a number"),
    Row("remainder", lambda x, y: x % y, PAIRS, "the sign is the divisor's"),
    Row("remainder_number", lambda x: torch.remainder(x, 0.75), STEPS, "by a number"),
    Row("number_remainder", lambda x, y: x * (2.5 % y.detach()), PAIRS, "of a number, which has no gradient"),
    Row("neg", lambda x, y: -x * y, TWO, "the operator -"),
    Row("neg_zero", lambda x, y: torch.where(1 / -F.relu(x.detach()) < 0, y, x), PAIRS, "1 / -0 is minus infinity"),
    Row("abs", torch.abs, STEPS, "a kink at zero"),
    Row("sign_of_nan", lambda x, y: y * (2 + torch.sign(x.detach().log())), PAIRS, "of NaN it is zero"),
    Row("sign", lambda x, y: y * x.sign(), PAIRS, "no gradient for x"),
    Row("sgn", lambda x, y: y * torch.sgn(x), PAIRS, "the same for real numbers"),
    Row("reciprocal", torch.reciprocal, (positive,), "1 / x"),
    Row("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.7), THREE, "with a factor"),
    Row("addcdiv", lambda x, y, z: x.addcdiv(y, z, value=-1.3), (normal, normal, positive), "with a factor"),
    Row("lerp", lambda x, y: torch.lerp(x, y, 0.3), TWO, "the weight is a number below a half"),
    Row("lerp_past_half", lambda x, y: torch.lerp(x, y, 0.8), TWO, "above a half PyTorch starts from the end"),
    Row("lerp_tensor", torch.lerp, THREE, "the weight is a tensor"),
    Row("copysign", torch.copysign, PAIRS, "of one the size, of the other the sign"),
)
POWERS = (
    Row("square", torch.square, ONE, "x * x"),
    Row("pow_2", lambda x, y: x**2 + y, TWO, "a product"),
    Row("pow_3", lambda x: x**3, ONE, "a product of negative numbers too"),
    Row("pow_5", lambda x: x**5, ONE, "an odd power of negative numbers"),
    Row("pow_fractional", lambda x: x**1.7, (positive,), "by logarithms"),
    Row("pow_half", lambda x: x**0.5, (positive,), "a root"),
    Row("pow_minus_half", lambda x: x**-0.5, (positive,), "a reciprocal root"),
    Row("pow_minus_1", lambda x: x**-1, (positive,), "a reciprocal"),
    Row("pow_minus_2", lambda x: x**-2.0, (positive,), "a reciprocal square"),
    Row("pow_negative", lambda x: x**-2.3, (positive,), "a negative fractional exponent"),
    Row("pow_1", lambda x, y: x**1 * y, TWO, "the same value again"),
    Row("pow_tensor", torch.pow, (positive, normal), "the exponent has a gradient"),
    Row("pow_number_base", lambda x: 1.7**x, ONE, "a number to the power of a tensor"),
    Row("sqrt", torch.sqrt, (positive,), "exactly rounded"),
    Row("rsqrt", torch.rsqrt, (positive,), "1 / sqrt(x)"),
    Row("exp", torch.exp, ONE, "the base e"),
    Row("exp2", torch.exp2, ONE, "the base 2"),
    Row("expm1", lambda x: torch.expm1(x * 0.1), ONE, "exp(x) - 1 would lose digits near zero"),
    Row("log", torch.log, (positive,), "the base e"),
    Row("log2", torch.log2, (positive,), "the base 2"),
    Row("log10", torch.log10, (positive,), "the base 10"),
    Row("log1p", lambda x: torch.log1p(x * 0.1), ONE, "log(1 + x) would lose digits near zero"),
    Row("xlogy", torch.xlogy, (normal, positive), "x * log(y)"),
    Row("logaddexp", torch.logaddexp, TWO, "made of others"),
)
CURVES = (
    Row("sin", torch.sin, ONE, "its gradient is cos"),
    Row("cos", torch.cos, ONE, "its gradient is -sin"),
    Row("tan", lambda x: torch.tan(x * 0.25), ONE, "away from its poles"),
    Row("asin", lambda x: torch.asin(x * 0.15), ONE, "inside of [-1, 1]"),
    Row("acos", lambda x: torch.acos(x * 0.15), ONE, "inside of [-1, 1]"),
    Row("atan", torch.atan, ONE, "defined everywhere"),
    Row("sinh", torch.sinh, ONE, "its gradient is cosh"),
    Row("cosh", torch.cosh, ONE, "its gradient is sinh"),
    Row("tanh", torch.tanh, ONE, "a saturated curve"),
    Row("erf", torch.erf, ONE, "gelu is made of it"),
    Row("erfc", torch.erfc, ONE, "1 - erf would lose digits"),
    Row("sigmoid", torch.sigmoid, ONE, "a saturated curve"),
    Row("logit", lambda x: torch.logit(x * 0.1 + 0.5), ONE, "the inverse of sigmoid"),
    Row("silu", F.silu, ONE, "x * sigmoid(x)"),
    Row("mish", F.mish, ONE, "x * tanh(softplus(x))"),
    Row("gelu", F.gelu, ONE, "by erf"),
    Row("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), ONE, "by tanh"),
    Row("softplus", F.softplus, ONE, "a soft relu"),
    Row("softplus_beta", lambda x: F.softplus(x * 4, beta=2.0, threshold=3.0), STEPS, "linear above its threshold"),
    Row("sigmoid_far", lambda x, y: y * torch.sigmoid(x * 60), PAIRS, "where exp of the argument overflows"),
    Row("silu_far", lambda x: F.silu(x * 60), STEPS, "where exp of the argument overflows"),
    Row("mish_far", lambda x: F.mish(x * 60), STEPS, "where exp of the argument overflows"),
    Row("gelu_far", lambda x: F.gelu(x * 60), STEPS, "where its gradient is 0 or 1"),
    Row("logsigmoid_far", lambda x: F.logsigmoid(x * 60), STEPS, "where exp of the argument overflows"),
    Row("logaddexp_far", lambda x, y: torch.logaddexp(x * 60, y * 60), PAIRS, "where exp of the arguments overflows"),
    Row("elu", lambda x: F.elu(x, alpha=0.7), STEPS, "a kink at zero"),
    Row("selu", F.selu, STEPS, "elu with fixed numbers"),
    Row("celu", lambda x: F.celu(x, alpha=1.3), STEPS, "elu without its kink"),
    Row("logsigmoid", F.logsigmoid, ONE, "keeps a buffer in PyTorch"),
    Row("softsign", F.softsign, STEPS, "x / (1 + |x|)"),
    Row("tanhshrink", F.tanhshrink, ONE, "x - tanh(x)"),
)
PIECES = (
    Row("relu", F.relu, STEPS, "zero below zero"),
    Row("leaky_relu", lambda x: F.leaky_relu(x, 0.2), STEPS, "a slope below zero"),
    Row("hardtanh", lambda x: F.hardtanh(x, -0.9, 1.2), STEPS, "bounds of its own"),
    Row("relu6", lambda x: F.relu6(x * 2.3), STEPS, "bounded by 6"),
    Row("hardswish", lambda x: F.hardswish(x * 2), STEPS, "zero below -3, x above 3"),
    Row("hardsigmoid", lambda x: F.hardsigmoid(x * 2), STEPS, "a line between -3 and 3"),
    Row("hardshrink", F.hardshrink, STEPS, "zero around zero"),
    Row("softshrink", F.softshrink, STEPS, "zero around zero, without a step"),
    Row("threshold", lambda x: F.threshold(x, 0.5, -1.0), STEPS, "another value below"),
    Row("clamp", lambda x: x.clamp(-0.5, 1.0), STEPS, "two numbers"),
    Row("clamp_below", lambda x: torch.clamp(x, min=-0.5), STEPS, "a lower bound alone"),
    Row("clamp_above", lambda x: torch.clamp_max(x, 1.0), STEPS, "an upper bound alone"),
    Row("clamp_tensors", lambda x, y: torch.clamp(x, -y.abs(), y.abs()), PAIRS, "bounds with gradients"),
    Row("clamp_one_tensor", lambda x, y: x.clamp(min=y), PAIRS, "a lower bound with a gradient"),
    Row("minimum", torch.minimum, PAIRS, "of two tensors"),
    Row("maximum", torch.maximum, PAIRS, "of two tensors"),
    Row("floor", lambda x: x + torch.floor(x), STEPS, "no gradient of its own"),
    Row("ceil", lambda x: x + torch.ceil(x), STEPS, "no gradient of its own"),
    Row("round", lambda x: x + torch.round(x), STEPS, "no gradient of its own"),
    Row("round_tenths", lambda x: x + torch.round(x * 0.1, decimals=1), STEPS, "to decimals"),
    Row("round_tens", lambda x: x + torch.round(x * 10, decimals=-1), STEPS, "to a negative number of decimals"),
    Row("trunc", lambda x: x + torch.trunc(x), STEPS, "no gradient of its own"),
    Row("frac", torch.frac, STEPS, "what trunc leaves"),
    Row("where", lambda x, y: torch.where(x > y, x, y * y), PAIRS, "two tensors"),
    Row("where_number", lambda x, y: torch.where(x > y, x, 0.5), PAIRS, "a tensor and a number"),
    Row("where_numbers", lambda x, y: x * torch.where(x > y, -0.25, 0.5), PAIRS, "two numbers"),
    Row("masked_fill", lambda x, y: x.masked_fill(y > 0, 0.7), PAIRS, "with a number"),
    Row("signbit", lambda x, y: torch.where(torch.signbit(x), x, y), PAIRS, "a bit of a number"),
    Row("isnan", lambda x, y: torch.where(torch.log(x).isnan(), y, x), PAIRS, "log is NaN below zero"),
    Row("isinf", lambda x, y: torch.where(torch.isinf(F.relu(x).log()), y, x), PAIRS, "log is -Inf at zero"),
    Row("isfinite", lambda x, y: torch.where(torch.isfinite(x.log()), x, y), PAIRS, "neither of the two"),
    Row("nan_to_num", lambda x, y: y + torch.nan_to_num(torch.log(x)), PAIRS, "zero for NaN"),
    Row(
        "nan_to_num_bounds",
        lambda x, y: y + torch.nan_to_num(y.sign() * F.relu(x).log(), posinf=2.0, neginf=-3.0),
        PAIRS,
        "a number for each infinity",
    ),
)


def _compared(compare: Callable[[Any, Any], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, y: torch.where(compare(x.round(), y.round()), x, y) + y * compare(x, 0.5)


def _of_signs(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, y: torch.where(combine(x > 0, y > 0), x, y)


COMPARISONS = (
    *(Row(f.__name__, _compared(f), PAIRS, "of tensors, of which many are equal, and of a tensor and a number") for f in
      (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)),
    *(Row(f"bool_{f.__name__}", _of_signs(f), PAIRS, "of comparisons, as Python writes it") for f in
      (operator.and_, operator.or_, operator.xor)),
    *(Row(f.__name__, _of_signs(f), PAIRS, "of comparisons") for f in
      (torch.logical_and, torch.logical_or, torch.logical_xor)),
    Row("logical_and_of_numbers", lambda x, y: y + x * torch.logical_and(x.trunc(), y.trunc()), PAIRS, "not of booleans"),
    Row("logical_not", lambda x, y: y * torch.logical_not(x.trunc()), PAIRS, "whether a number is zero"),
    Row("invert", lambda x, y: torch.where(~(x > y), x, y), PAIRS, "of a comparison"),
    Row("bits", lambda x, y: y * ((x.to(torch.int32) & 3) | (y.to(torch.int32) ^ ~x.to(torch.int32))), PAIRS,
        "of integers"),
    Row("shift", lambda x, y: y * (x.to(torch.int32) << 2), PAIRS, "a product"),
)  # fmt: skip


def _by_way_of(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda x, y: y * x.to(dtype).to(y.dtype)


CASTS = (
    *(Row(str(dtype).removeprefix("torch."), _by_way_of(dtype), TWO, "rounded on the way, there and back") for dtype in
      (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
    *(Row(str(dtype).removeprefix("torch."), _by_way_of(dtype), PAIRS, "few bits are left") for dtype in
      (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)),
    Row("uint8", lambda x, y: y * (x.abs() * 4.5).to(torch.uint8), PAIRS, "an integer in a product"),
    Row("uint8_and_int8", lambda x, y: y * ((x.abs() * 4.5).to(torch.uint8) - (y * 4.5).to(torch.int8)), PAIRS,
        "int16 together"),
    Row("uint8_below_int8", lambda x, y: torch.where((x.abs() * 4.5).to(torch.uint8) < (y * 4.5).to(torch.int8), x, y),
        PAIRS, "compared as int16"),
    Row("widened", lambda x, y: (x.double() * y).to(y.dtype), TWO, "computed in float64"),
    Row("type_as", lambda x, y: (x * x).type_as(y), TWO, "a cast to what is there already"),
)  # fmt: skip

TABLE = (*ARITHMETIC, *POWERS, *CURVES, *PIECES, *COMPARISONS, *CASTS)
DROPOUT = Row("dropout", F.dropout, ONE, "draws, so its values are held elsewhere: in fuse_contract.py")
USES = ("prologue", "epilogue")


@cache
def plain(row: Row, use: str) -> Callable[..., torch.Tensor]:
    function = row.function
    if use == "prologue":
        return lambda *operands: F.layer_norm(function(*operands), (COLS,))
    return lambda x, *others: function(F.rms_norm(x, (COLS,), eps=1e-5), *others)


@cache
def fused(row: Row, use: str) -> Callable[..., torch.Tensor]:
    return warpnorm.fuse(plain(row, use))


Named = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """The tensors that a function returns, and the gradient of every operand that can have one."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]

    @staticmethod
    def of(function: Callable[..., Any], operands: Sequence[torch.Tensor], seed: int) -> "Found":
        """Every output's gradient is drawn from `seed`."""
        leaves = [operand.detach().requires_grad_(is_differentiable(operand)) for operand in operands]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, grads_for(outputs, seed), strict=True) if o.requires_grad]
        gradients = torch.autograd.grad(
            [o for o, _ in pairs],
            [leaf for leaf in leaves if leaf.requires_grad],
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        return Found(tuple(o.detach() for o in outputs), tuple(g.clone() for g in gradients))

    @property
    def named(self) -> Named:
        named = {f"output {k}": output for k, output in enumerate(self.outputs)}
        return named | {f"gradient {k}": gradient for k, gradient in enumerate(self.gradients)}


def is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def grads_for(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1000)  # not what the operands were drawn from
    grads = [torch.randn(output.shape, generator=generator).bfloat16() for output in outputs]
    return [grad.to(output.device, output.dtype) for grad, output in zip(grads, outputs, strict=True)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors as small as these take PyTorch longer to share among threads than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def check_fused(
    function: Callable[..., Any],
    plain: Callable[..., Any],
    make: Callable[[int], Sequence[torch.Tensor]],
    draws: int = DRAWS,
    own_draws: int = 1,
    find: Callable[..., Found] = Found.of,
) -> None:
    """The one tolerance rule of tests/accuracy.py for a whole function: `make` gives the operands for a seed, `find` runs
    `function`. A gradient of few elements needs several draws of our own. The truth is no better than float64, where
    PyTorch is held against it in float32, and both may be off."""
    operands = [make(seed) for seed in range(draws)]
    ours = [find(function, operands[seed], seed).named for seed in range(own_draws)]
    exact = [Found.of(plain, widened(operands[seed]), seed).named for seed in range(own_draws)]
    theirs = Found.of(plain, operands[0], 0).named
    assert list(ours[0]) == list(theirs)
    for name, result in ours[0].items():
        assert (result.dtype, result.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert result.is_floating_point() or result.equal(exact[0][name]), name
    narrow = [[o.float() if o.dtype == torch.float64 else o for o in some] for some in operands]
    found = [Found.of(plain, some, seed).named for seed, some in enumerate(narrow)]
    truth = [Found.of(plain, widened(some), seed).named for seed, some in enumerate(narrow)]
    for name in (name for name, result in theirs.items() if result.is_floating_point()):
        sizes = torch.stack([t[name] for t in truth]).abs()
        errors = [error_over([f], [t], name, sizes) for f, t in zip(found, truth, strict=True)]
        unit = 2 * EPS_RATIO if theirs[name].dtype == torch.float64 else 1.0
        allowed = Error(*(unit * max(kind) for kind in zip(*errors, strict=True)))
        assert_accurate(name, error_over(ours, exact, name, sizes), allowed, theirs[name].dtype)


def widened(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [operand.double() if is_differentiable(operand) else operand for operand in operands]


def error_over(results: list[Named], truth: list[Named], name: str, sizes: torch.Tensor) -> Error:
    """Of the results together, relative to the true sizes of all draws: one draw may come out close to zero."""
    errors = torch.stack([r[name].double() - t[name].double() for r, t in zip(results, truth, strict=True)]).abs()
    if errors.numel() == 0:
        return Error(0.0, 0.0)
    mean, largest = sizes.double().square().mean().sqrt(), sizes.double().max()
    return Error(float(errors.square().mean().sqrt() / (mean or 1)), float(errors.max() / (largest or 1)))


# The interpreter is slow: there every row runs before the norm in one dtype and after it in the other
RUNS = [(use, dtype) for use in USES for dtype in (torch.float32, torch.bfloat16)]
RUNS = [RUNS[0], RUNS[3]] if settings.is_interpreting() else RUNS


@pytest.mark.parametrize(("use", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_operator(row: Row, use: str, dtype: torch.dtype, device: str) -> None:
    check_fused(fused(row, use), plain(row, use), lambda seed: row.operands(seed, dtype, device))


def test_every_row_of_the_operator_table_is_reached(device: str) -> None:
    reached = set()
    for row in (*TABLE, DROPOUT):
        for use in USES:
            leaves = [operand.requires_grad_() for operand in row.operands(0, torch.float32, device)]
            explained = warpnorm.explain(fused(row, use), *leaves)
            assert explained.backward is not None
            graphs = (explained.forward.problem.prologue, explained.forward.problem.epilogue)
            graphs += (explained.backward.problem.epilogue_vjp, explained.backward.problem.prologue_vjp)
            reached |= {node.operator for graph in graphs for node in graph.nodes}
    assert reached == set(TRITON)
