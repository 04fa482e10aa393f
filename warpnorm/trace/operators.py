"""The one table of what a prologue or an epilogue may hold: primitive operator -> Triton expression. `{0}`, `{1}` stand for
the arguments. Everything else that is elementwise is made of these by PyTorch's own decompositions, and so are all
gradients. One more operator is one more row here and one more test case."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.utils._python_dispatch import _disable_current_modes

from warpnorm.errors import OperatorError

aten = torch.ops.aten
prims = torch.ops.prims

# An argument is in the dtype of computation where the result is floating, else as PyTorch has it. `library` is the
# mathematical library of the GPU, `ours` the functions of kernels/pointwise.py.
TRITON: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "ours.divide({0}, {1})",
    "neg": "ours.negate({0})",
    "abs": "tl.abs({0})",
    "sign": "ours.sign({0})",
    "exp": "library.exp({0})",
    "exp2": "library.exp2({0})",
    "expm1": "library.expm1({0})",
    "log": "library.log({0})",
    "log2": "library.log2({0})",
    "log10": "library.log10({0})",
    "log1p": "library.log1p({0})",
    "sqrt": "ours.sqrt({0})",
    "rsqrt": "ours.rsqrt({0})",
    "reciprocal": "ours.reciprocal({0})",
    "pow": "library.pow({0}, {1})",
    "sin": "library.sin({0})",
    "cos": "library.cos({0})",
    "tan": "library.tan({0})",
    "asin": "library.asin({0})",
    "acos": "library.acos({0})",
    "atan": "library.atan({0})",
    "sinh": "library.sinh({0})",
    "cosh": "library.cosh({0})",
    "tanh": "library.tanh({0})",
    "erf": "library.erf({0})",
    "erfc": "library.erfc({0})",
    "sigmoid": "ours.sigmoid({0})",
    "relu": "ours.maximum({0}, 0)",
    "maximum": "ours.maximum({0}, {1})",
    "minimum": "ours.minimum({0}, {1})",
    "fmod": "library.fmod({0}, {1})",
    "remainder": "ours.remainder({0}, {1})",
    "floor": "library.floor({0})",
    "ceil": "library.ceil({0})",
    "round": "library.nearbyint({0})",
    "trunc": "library.trunc({0})",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
    "signbit": "ours.signbit({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)",
    "logical_not": "{0} == 0",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
    "keep": "ours.keep({0}, {1}, place, {2}, {3}, {4}, {5})",
    "convert": "",  # a cast, written by codegen/pointwise.py
}
# The same in C: `{s}` is the suffix of a function of cpu/pointwise.h, for float, double or integers.
C: dict[str, str] = {
    **{name: name + "_{s}({0})" for name in (
        "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "sigmoid", "floor", "ceil", "round", "trunc",
    )},
    **{name: name + "_{s}({0}, {1})" for name in ("pow", "maximum", "minimum", "fmod", "remainder")},
    **{name: f"({{0}} {sign} {{1}})" for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="),
        ("gt", ">"), ("ge", ">="), ("bitwise_and", "&"), ("bitwise_or", "|"), ("bitwise_xor", "^"),
    )},
    "neg": "(-{0})",
    "reciprocal": "(1 / {0})",
    "relu": "maximum_{s}({0}, 0)",
    "isnan": "({0} != {0})",
    "isinf": "(abs_{s}({0}) == INFINITY)",
    "signbit": "signbit_{s}({0})",
    "logical_and": "(({0} != 0) & ({1} != 0))",
    "logical_or": "(({0} != 0) | ({1} != 0))",
    "logical_xor": "(({0} != 0) ^ ({1} != 0))",
    "logical_not": "({0} == 0)",
    "bitwise_not": "(~{0})",
    "where": "({0} ? {1} : {2})",
    "keep": "",  # both written by cpu/writer.py
    "convert": "",
}  # fmt: skip
# Where every result is rounded to 16 bits or less, these do: off by some 2^-22, and a third of the instructions
TRITON_HALF: dict[str, str] = {
    "div": "ours.quick_divide({0}, {1})",
    "reciprocal": "1.0 / {0}",
    "exp": "library.fast_expf({0})",
    "sigmoid": "ours.quick_sigmoid({0})",
    "tanh": "ours.quick_tanh({0})",
    "erf": "ours.quick_erf({0})",
    "erf_beside_one": "ours.quick_erf_beside_one({0})",
    "gelu": "ours.quick_gelu({0})",  # these two are found in graphs, by codegen/shorter.py
    "gelu_slope": "ours.quick_gelu_slope({0})",
    "normal_distribution": "ours.normal_distribution({0})",  # this one is in none, but see KEPT
    "rsqrt": "tl.rsqrt({0})",
    "sqrt": "tl.sqrt({0})",
}
# Of these, what takes long and is made of one value between zero and one, of the same argument, that a tile's second visit
# finds as a half: which value, and what follows from it, {1} (codegen/kept.py)
KEPT: dict[str, tuple[str, str]] = {
    "gelu": ("normal_distribution", "{0} * {1}"),
    "gelu_slope": ("normal_distribution", "ours.gelu_slope_of({0}, {1})"),
}
# Finite for every finite argument: a masked lane, which holds zeros, stays finite behind these.
TOTAL = frozenset({
    "add", "sub", "mul", "neg", "abs", "sign", "sigmoid", "relu", "tanh", "erf", "erfc", "maximum", "minimum", "sin", "cos",
    "floor", "ceil", "round", "trunc", "isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge", "where", "exp", "expm1", "exp2",
    "logical_and", "logical_or", "logical_xor", "logical_not", "atan", "keep", "log1p",
})  # fmt: skip
# Of these, those that do not grow faster than their arguments
TAME = frozenset({"add", "sub", "mul", "neg", "abs", "sign", "sigmoid", "relu", "tanh", "maximum", "minimum", "where",
    "eq", "ne", "lt", "le", "gt", "ge"})  # fmt: skip

FILLED: dict[Any, Callable[[Sequence[Any]], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    aten.zeros_like.default: lambda args: 0,
    aten.zeros.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten._efficientzerotensor.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.ones.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
}
EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default, aten.new_empty.default}
# Operators that hand on one of their arguments, and which
SAME = {
    aten.alias.default: 0,
    aten.detach.default: 0,
    aten.clone.default: 0,
    aten.lift_fresh_copy.default: 0,
    aten.expand.default: 0,
    aten.copy_.default: 1,
    aten.copy.default: 1,
}
CASTS = {aten._to_copy.default, prims.convert_element_type.default}
SPELLINGS = {"true_divide": "div", "square": "pow", "special_erf": "erf", "absolute": "abs"}


DECOMPOSITIONS = "torch._decomp.decompositions"
# Of those that lie elsewhere, the formulas that need nothing around them
PLAIN = frozenset({
    "addcdiv", "addcmul", "celu", "elu", "frac", "gelu", "leaky_relu", "rsub", "softplus", "softshrink", "threshold",
})  # fmt: skip


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's: of what is not primitive, and of the gradients."""
    names = [
        "addcdiv", "addcmul", "celu", "clamp", "clamp_max", "clamp_min", "copysign", "elu", "elu_backward", "floor_divide",
        "frac", "gelu", "gelu_backward", "hardshrink", "hardsigmoid", "hardsigmoid_backward", "hardswish",
        "hardswish_backward", "hardtanh", "hardtanh_backward", "heaviside", "leaky_relu", "leaky_relu_backward", "lerp",
        "log_sigmoid_backward", "log_sigmoid_forward", "logit", "logit_backward", "masked_fill", "nan_to_num",
        "native_dropout_backward", "prelu", "rsub", "sgn", "sigmoid_backward", "silu", "silu_backward",
        "softplus", "softplus_backward", "softshrink", "square", "tanh_backward", "threshold", "threshold_backward", "xlogy",
    ]  # fmt: skip
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    found = get_decompositions([getattr(aten, name) for name in names])
    table |= {target: _formula(function) for target, function in found.items()}
    return table | {
        aten.add.Tensor: lambda x, y, alpha=1: NotImplemented if alpha == 1 else x + y * alpha,
        aten.sub.Tensor: lambda x, y, alpha=1: NotImplemented if alpha == 1 else x - y * alpha,
        aten.__lshift__.Scalar: lambda x, places: _shifted(x, places),
        aten.floor_divide.default: lambda x, y: _divide(x, y, rounding_mode="floor"),
        aten.clamp.default: _clamp,
        aten.clamp.Tensor: _clamp,
        aten.pow.Tensor_Scalar: _power,
        aten.square.default: lambda x: x * x,
        aten.fmod.Scalar: lambda x, y: torch.fmod(x, torch.full_like(x, y)),
        aten.round.decimals: lambda x, *, decimals: torch.round(x * 10.0**decimals) / 10.0**decimals,
        aten.div.Tensor_mode: _divide,
        aten.hardshrink_backward.default: lambda grad, x, lambd: torch.where(x.abs() <= lambd, 0.0, grad),
        aten.mish.default: lambda x: x * _mish_gate(x)[0],
        aten.mish_backward.default: _mish_backward,
        aten.softshrink_backward.default: lambda grad, x, lambd: torch.where(x.abs() <= lambd, 0.0, grad),
    }


def _formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition without what PyTorch wraps around it: arguments are in the dtype of computation already, and the
    wrappers import a compiler, which takes a second."""
    plain = inspect.unwrap(function)
    return plain if plain.__module__ == DECOMPOSITIONS or plain.__name__ in PLAIN else function


def _divide(x: torch.Tensor, y: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Rounded as PyTorch rounds: the floor of an inexact quotient is taken of the exact one."""
    if rounding_mode is None:
        return torch.true_divide(x, y)
    if rounding_mode == "trunc":
        return torch.trunc(torch.true_divide(x, y))
    y = y if isinstance(y, torch.Tensor) else torch.full_like(x, y)
    rest = torch.fmod(x, y)
    quotient = torch.true_divide(x - rest, y)
    quotient = torch.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    rounded = torch.floor(quotient)
    rounded = torch.where(quotient - rounded > 0.5, rounded + 1, rounded)
    return torch.where(y == 0, torch.true_divide(x, y), rounded)


def _shifted(x: torch.Tensor, places: int) -> Any:
    """A product, where the factor is a number of this dtype."""
    return x * (1 << places) if 0 <= places < 8 * x.dtype.itemsize - 1 and not x.is_floating_point() else NotImplemented


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    dtype = x.dtype
    for bound in (low, high):
        dtype = dtype if bound is None else torch.promote_types(dtype, torch.result_type(x, bound))
    x = x.to(dtype)
    if low is not None:
        x = torch.maximum(x, low.to(dtype) if isinstance(low, torch.Tensor) else torch.full_like(x, low))
    if high is not None:
        x = torch.minimum(x, high.to(dtype) if isinstance(high, torch.Tensor) else torch.full_like(x, high))
    return x


def _mish_gate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """tanh(softplus(x)), and half of what it lacks to one: with e = exp(x) and n = e * (e + 2) they are n / (n + 2) and
    1 / (n + 2), a third of the instructions of a logarithm and a tanh."""
    power = torch.exp(x)
    n = power * (power + 2.0)
    rest = 1.0 / (n + 2.0)
    return torch.where(x > 20.0, 1.0, n * rest), rest


def _mish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """1 - tanh^2 is 4 * rest * (1 - rest)."""
    gate, rest = _mish_gate(x)
    return grad * (gate + x * torch.sigmoid(x) * (4.0 * rest * (1.0 - rest)))


def _power(x: torch.Tensor, exponent: float) -> Any:
    """The powers that are a product or a root, as PyTorch computes them."""
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    if x.is_floating_point() and exponent == 1:
        return x.clone()
    if x.is_floating_point() and exponent in (0.5, -0.5):
        return x.sqrt() if exponent > 0 else x.rsqrt()
    if x.is_floating_point() and exponent in (-1, -2):
        return (x if exponent == -1 else x * x).reciprocal()
    return NotImplemented


def spelled(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """A row of the table, and the arguments in its order."""
    name = str(target).split(".")[1]
    name = name if name.startswith("__") else name.removesuffix("_")  # `add_`, but not `__rshift__`
    name = SPELLINGS.get(name, name)
    if target in CASTS:
        return "convert", tuple(args[:1])
    if name == "keep":
        return name, tuple(args[1:])
    if any(kwargs.get(name) not in (None, usual) for name, usual in (("alpha", 1), ("rounding_mode", None))):
        raise OperatorError(f"{target} with {', '.join(kwargs)} has no row in the table")
    return name, tuple(args)


def is_cast(name: str) -> bool:
    return name == "convert"


def writes(target: Any) -> bool:
    """Whether the first argument is written to."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def as_kept(value: Any, dtype: torch.dtype) -> float | int | bool:
    """The number that a tensor of that dtype has of it."""
    with _disable_current_modes():
        return torch.tensor(as_number(value, dtype), dtype=dtype, device="cpu").item()


def as_number(value: Any, dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float(value)
    return bool(value) if dtype == torch.bool else int(value)


INTEGER_TOO = frozenset({
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "convert", "maximum", "minimum", "mul", "neg",
    "relu", "sign", "sub", "where",
})  # fmt: skip


def check(operator: str, dtype: torch.dtype) -> None:
    """`dtype` is what PyTorch gives the result."""
    if operator in TRITON and not dtype.is_floating_point and dtype != torch.bool and operator not in INTEGER_TOO:
        raise OperatorError(f"{operator} of integers has no row in the table; convert them to floating point first")
    if operator not in TRITON:
        raise OperatorError(f"{operator} is not among the operators that can be fused: {', '.join(sorted(TRITON))}")
