"""A call as a text, and back: what an exported program holds of it. A text is JSON of names and numbers alone; operators
come from PyTorch's elementwise ones and nothing in it is ever evaluated. One that says anything else is refused."""

import json
from collections.abc import Callable
from functools import lru_cache
from math import isnan
from typing import Any

import torch

from warpnorm import norms
from warpnorm.errors import InputError
from warpnorm.problem import NUMBER, Call, Literal
from warpnorm.reference import Affine, FixedAffine, Itself
from warpnorm.trace.at_hand import FromSum, Sum
from warpnorm.trace.expression import CAST, DROPOUT, RELABEL, Constant, Expression, Ref, Step, operator
from warpnorm.trace.fakes import is_pointwise
from warpnorm.trace.operators import writes

FORMAT = 1  # of the texts and of the operators that take them: compilers keep what they made of both
NORMS = {norm.name: norm for norm in norms.ALL}
AXES = ("full", "group", "column", "row", "group_scalar", "scalar", "number")


class _UnwritableError(ValueError):
    """Something that has no text, or a text that says nothing."""


@lru_cache(maxsize=4096)
def written(call: Call, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Of a call on operands that have these dtypes, but for numbers. None where there is no text for it: something is drawn
    in it."""
    try:
        fields = {
            "format": FORMAT, "operands": [_dtype(d) for d in dtypes], "norm": call.norm.name,
            "col_dims": call.col_dims, "eps": call.eps,
            "prologue": _function(call.prologue), "epilogue": _function(call.epilogue), "axes": call.axes,
            "outputs": [_dtype(d) for d in call.outputs], "compute": _dtype(call.compute),
            "detached": call.detached, "groups": call.groups,
        }  # fmt: skip
    except _UnwritableError:
        return None
    return json.dumps(fields, separators=(",", ":"))


@lru_cache(maxsize=4096)
def read(text: str) -> tuple[Call, tuple[torch.dtype, ...]]:
    """The call, and the dtypes of its operands."""
    try:
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise _UnwritableError("it is of another format")
        dtypes = tuple(map(_read_dtype, fields.pop("operands")))
        call = _call(**fields)
        if len(dtypes) != sum(axes != NUMBER for axes in call.axes):
            raise _UnwritableError(f"it has axes for other operands than {len(dtypes)}")
        return call, dtypes
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"this is not the text of a call that this version of warpnorm knows: {error}") from None


def _call(
    norm: str, col_dims: Any, eps: Any, prologue: Any, epilogue: Any, axes: list[Any], outputs: list[str], compute: str,
    detached: list[Any], groups: Any,
) -> Call:  # fmt: skip
    if isinstance(eps, bool) or not isinstance(eps, int | float) or isnan(eps):
        raise _UnwritableError(f"eps is {eps!r}")
    return Call(
        NORMS[norm], _count(col_dims), float(eps), _read_function(prologue), _read_function(epilogue),
        tuple(map(_read_axes, axes)), tuple(map(_read_dtype, outputs)), _read_dtype(compute),
        tuple(map(_count, detached)), _count(groups),
    )  # fmt: skip


def _function(function: Any) -> dict[str, Any]:
    for name, (kind, write, _) in FUNCTIONS.items():
        if type(function) is kind:
            return {name: write(function)}
    raise _UnwritableError(f"{function!r} has no text")


def _read_function(record: Any) -> Any:
    ((name, content),) = record.items()
    return FUNCTIONS[name][2](content)


def _expression(expression: Expression) -> dict[str, Any]:
    if any(step.target == DROPOUT for step in expression.steps):
        raise _UnwritableError("what is drawn has no text")
    return {
        "inputs": expression.inputs,
        "steps": [
            [s.name, s.target, [_argument(a) for a in s.args], {k: _argument(a) for k, a in s.kwargs}]
            for s in expression.steps
        ],
        "outputs": [_argument(o) for o in expression.outputs],
        "compute": _dtype(expression.compute),
        "is_single": expression.is_single,
    }


def _read_expression(record: dict[str, Any]) -> Expression:
    known = set(map(_name, record["inputs"]))
    steps = []
    for name, target, args, kwargs in record["steps"]:
        read_args = tuple(_read_argument(arg, known) for arg in args)
        read_kwargs = tuple((_name(k), _read_argument(arg, known)) for k, arg in kwargs.items())
        steps.append(Step(_name(name), _target(target), read_args, read_kwargs))
        known.add(name)
    outputs = tuple(_read_argument(output, known) for output in record["outputs"])
    compute = _read_dtype(record["compute"])
    return Expression(tuple(record["inputs"]), tuple(steps), outputs, compute, _flag(record["is_single"]))


def _argument(arg: Any) -> Any:
    if isinstance(arg, tuple | list):
        return [_argument(part) for part in arg]
    if arg is None or isinstance(arg, str):
        return arg
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, Literal):
        return {"number": arg.text}
    if isinstance(arg, Constant):
        return {"constant": [arg.literal.text, _dtype(arg.dtype)]}
    if isinstance(arg, torch.dtype):
        return {"dtype": _dtype(arg)}
    raise _UnwritableError(f"{arg!r} has no text")


def _read_argument(record: Any, known: set[str]) -> Any:
    if isinstance(record, list):
        return tuple(_read_argument(part, known) for part in record)
    if record is None or isinstance(record, str):
        return record
    ((kind, content),) = record.items()
    if kind == "ref":
        if content not in known:
            raise _UnwritableError(f"nothing is called {content!r}")
        return Ref(content)
    if kind == "number":
        return _literal(content)
    if kind == "constant":
        text, dtype = content
        return Constant(_literal(text), _read_dtype(dtype))
    if kind == "dtype":
        return _read_dtype(content)
    raise _UnwritableError(f"there is no argument of the kind {kind!r}")


def _literal(text: str) -> Literal:
    if text in ("True", "False"):
        return Literal.of(text == "True")
    return Literal.of(int(text) if text.lstrip("-").isdigit() else float(text))


def _target(target: str) -> str:
    """One of PyTorch's elementwise operators, which writes nowhere, or one of ours that stands for a number itself."""
    if target in (CAST, RELABEL):
        return target
    namespace, name, overload = target.split(".")
    if namespace != "aten" or not (name.isidentifier() and overload.isidentifier()) or name.startswith("__"):
        raise _UnwritableError(f"{target!r} is no operator")
    found = operator(target)
    if not isinstance(found, torch._ops.OpOverload) or not is_pointwise(found) or writes(found):
        raise _UnwritableError(f"{target!r} is not an elementwise operator")
    return target


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise _UnwritableError(f"{name!r} is no name")
    return name


def _count(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise _UnwritableError(f"{number!r} is no number of things")
    return number


def _flag(flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise _UnwritableError(f"{flag!r} is neither true nor false")
    return flag


def _number(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _UnwritableError(f"{number!r} is no number")
    return float(number)


def _read_axes(axes: Any) -> Any:
    if isinstance(axes, list):
        return tuple(map(_flag, axes))
    if axes not in AXES:
        raise _UnwritableError(f"there are no axes {axes!r}")
    return axes


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_dtype(name: str) -> torch.dtype:
    found = getattr(torch, _name(name), None)
    if not isinstance(found, torch.dtype):
        raise _UnwritableError(f"{name!r} is no dtype")
    return found


FUNCTIONS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (Itself, lambda _: [], lambda _: Itself()),
    "sum": (Sum, lambda _: [], lambda _: Sum()),
    "affine": (
        Affine,
        lambda f: [f.has_weight, f.has_bias, f.weight_offset],
        lambda r: Affine(_flag(r[0]), _flag(r[1]), _number(r[2])),
    ),
    "fixed_affine": (
        FixedAffine,
        lambda f: [f.eps, f.has_weight, f.has_bias],
        lambda r: FixedAffine(_number(r[0]), _flag(r[1]), _flag(r[2])),
    ),
    "from_sum": (
        FromSum,
        lambda f: [_function(f.epilogue), f.others, f.count],
        lambda r: FromSum(_read_function(r[0]), tuple(map(_count, r[1])), _count(r[2])),
    ),
    "expression": (Expression, _expression, _read_expression),
}
