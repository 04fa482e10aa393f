"""A user's function runs once on fake tensors, and what it does is written down: elementwise operators, views of inputs,
one norm. Anything else is refused at the user's own line."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from warpnorm.errors import FusionError
from warpnorm.problem import Literal
from warpnorm.trace import operators
from warpnorm.trace.expression import CAST, DROPOUT, RELABEL, Constant
from warpnorm.trace.fakes import is_fake, is_pointwise, memory

aten = torch.ops.aten
# Operators in place whose overloads have other names than those of what gives a new tensor
INSTEAD = {aten.pow_.Scalar: aten.pow.Tensor_Scalar, aten.pow_.Tensor: aten.pow.Tensor_Tensor}
OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# What PyTorch compares a tensor with has the tensor's dtype
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
AS_TENSOR = {getattr(aten, name).Scalar for name in COMPARISONS} | {aten.hardshrink.default}
COMPARED = {getattr(aten, name).Tensor for name in COMPARISONS}
READS_A_VALUE = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.item.default,
    aten.allclose.default,
}  # fmt: skip


@dataclass(frozen=True)
class Move:
    """A view operator on an input; `args` follow the tensor, `pick` chooses among several results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    pick: int | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.target(tensor, *self.args, **dict(self.kwargs))
        return result if self.pick is None else result[self.pick]

    def of_user(self, tensor: torch.Tensor) -> torch.Tensor:
        """`reshape` is recorded as a view: where a tensor's strides have none, it is a copy."""
        if self.target in (aten.view.default, aten._unsafe_view.default):
            return tensor.reshape(self.args[0])
        if self.target is aten.view_as_real.default:  # of a conjugate there is none
            tensor = tensor.resolve_conj()
        return self(tensor)


@dataclass(frozen=True, eq=False)
class Source:
    """An input, seen through views."""

    index: int
    moves: tuple[Move, ...]
    fake: torch.Tensor


@dataclass(frozen=True, eq=False)
class Result:
    """What an operator gave; its arguments are Sources, Results, Literals, or what PyTorch takes beside tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    fake: torch.Tensor
    line: str
    depends_on_norm: bool


Recorded = Source | Result | Literal


@dataclass(frozen=True)
class NormCall:
    """The one norm: what it normalizes, over how many dimensions, in how many groups of channels, and the name of the
    process group whose ranks share its rows, if any."""

    norm: str
    c: Recorded
    col_dims: int
    eps: float
    groups: int
    ranks: str
    line: str


@dataclass(frozen=True)
class Running:
    """Running statistics that a call averages its own into."""

    mean: Source
    variance: Source
    momentum: float


@dataclass(frozen=True)
class Counted:
    """An input of one integer that a call adds a number to."""

    source: Source
    number: int


def user_line() -> str:
    """`file:line` of the innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"


def refuse(what: str, why: str, instead: str) -> FusionError:
    return FusionError(f"{user_line()}: {what} cannot be fused: {why}; {instead}")


_library = torch.library.Library("warpnorm", "FRAGMENT")
_library.define("normalize(Tensor c, int col_dims, str norm, float eps, int groups, str ranks) -> Tensor")
_library.define("average(Tensor running_mean, Tensor running_var, float momentum) -> Tensor")
_library.define("relabel(Tensor x, ScalarType dtype) -> Tensor")
_library.define("dropout(Tensor x, float p) -> Tensor")


@torch.library.register_fake("warpnorm::normalize", lib=_library)
def _(c: torch.Tensor, col_dims: int, norm: str, eps: float, groups: int, ranks: str) -> torch.Tensor:
    return torch.empty_like(c)


@torch.library.register_fake("warpnorm::average", lib=_library)
def _(running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float) -> torch.Tensor:
    return torch.empty_like(running_mean)


@torch.library.register_fake("warpnorm::relabel", lib=_library)
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("warpnorm::dropout", lib=_library)
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


normalize = torch.ops.warpnorm.normalize
average = torch.ops.warpnorm.average
relabel = torch.ops.warpnorm.relabel
dropout = torch.ops.warpnorm.dropout

# What to write instead of operators that are often part of something that can be fused
A_NORM = "write it as F.rms_norm, F.layer_norm or another norm of PyTorch's, or call it outside of the fused function"
ADVICE = dict.fromkeys(("mean", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"), A_NORM)
ADVICE["glu"] = "write a * torch.sigmoid(b) with a, b = x.chunk(2, -1)"


class Recorder(TorchDispatchMode):
    """Sees every operator below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to say so imports PyTorch's compiler
        return False

    def __init__(self, inputs: Mapping[int, tuple[int, torch.Tensor]]) -> None:
        """`inputs`: the id of each real tensor -> its number and its fake."""
        super().__init__()
        self.inputs = inputs
        self.values: Any = WeakIdKeyDictionary()  # of the tensors that somebody still holds
        for i, fake in inputs.values():
            self.values[fake] = Source(i, (), fake)
        self.norm: NormCall | None = None
        self.effects: list[Running | Counted] = []
        self.dropouts = 0
        self._averages: set[int] = set()
        self._moved: dict[
            tuple[int, str], tuple[Result, Result]
        ] = {}  # with what was moved, so that its id stays its own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func in READS_A_VALUE:
            if any(
                isinstance(e, Counted) and memory(e.source.fake) == memory(self._faked(args[0])) for e in self.effects
            ):
                raise refuse(
                    "a norm with momentum=None", "its momentum depends on how often it was called", "give a momentum"
                )
            raise refuse(
                _name(func),
                "the function branches on, or reads, the value of a tensor",
                "use torch.where, or decide outside of the fused function",
            )
        if func is aten.lift_fresh.default and not is_fake(args[0]):
            return self._constant(args[0])
        args, kwargs = self._faked(args), self._faked(kwargs)
        self._check_averaged(func, args)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._remember(result, self._recorded(func, args, kwargs, result))
        elif isinstance(result, list | tuple) and func.is_view:
            for k, part in enumerate(result):
                move = Move(func, tuple(args[1:]), tuple(kwargs.items()), k)
                self._remember(part, self._seen_through(self.value_of(args[0]), move, part))
        elif func is aten.log_sigmoid_forward.default:
            recorded = Result("aten.log_sigmoid.default", (self.value_of(args[0]),), (), result[0], user_line(), False)
            self._remember(result[0], _depending(recorded))
        elif any(isinstance(r, torch.Tensor) for r in (result if isinstance(result, tuple | list) else ())):
            raise self._not_elementwise(func)
        return result

    def _faked(self, tree: Any) -> Any:
        """The user's own tensors (parameters, closures) replaced by their fakes."""
        if isinstance(tree, torch.Tensor) and not is_fake(tree):
            if id(tree) not in self.inputs:
                raise refuse(
                    f"a tensor of shape {tuple(tree.shape)}",
                    "it is neither an argument nor a tensor that the function is known to read",
                    "pass it as an argument",
                )
            return self.inputs[id(tree)][1]
        if isinstance(tree, list | tuple):
            return type(tree)(self._faked(part) for part in tree)
        return {k: self._faked(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    def _remember(self, tensor: torch.Tensor, recorded: Recorded) -> None:
        self.values[tensor] = recorded

    def value_of(self, tensor: torch.Tensor) -> Recorded:
        if tensor not in self.values:
            tensor = self._faked(tensor)
        return self.values[tensor]

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() != 1:
            raise refuse(
                f"torch.tensor of shape {tuple(tensor.shape)}",
                "values that are made inside the function have nowhere to be read from",
                "make it outside, and pass it as an argument",
            )
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)  # by the fake mode beneath
        with _disable_current_modes():
            number = tensor.item()
        self._remember(fake, Literal.of(number))
        return fake

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> Recorded:
        if func is normalize.default:
            return self._normalized(args, result)
        if func is average.default:
            return self._averaged(args)
        if func in operators.FILLED:
            return Literal.of(operators.as_kept(operators.FILLED[func](args), result.dtype))
        if func in operators.EMPTY:
            return Literal.of(0)
        if func is aten.detach.default:  # a view to PyTorch, the end of a gradient to us
            value = self.value_of(args[0])
            return value if isinstance(value, Literal) else self._operation(func, args, kwargs, result)
        if func.is_view or func is aten._unsafe_view.default:
            return self._seen_through(
                self.value_of(args[0]), Move(func, tuple(args[1:]), tuple(kwargs.items())), result
            )
        if not is_pointwise(func):
            raise self._not_elementwise(func)
        if operators.writes(func):
            return self._written(func, args, kwargs, result)
        return self._operation(func, args, kwargs, result)

    def _operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> Recorded:
        name = str(func)
        values = tuple(self._argument(arg) for arg in args)
        named = tuple((k, self._argument(v)) for k, v in kwargs.items() if k not in ("memory_format", "layout"))
        if func is aten.clone.default and not isinstance(self.value_of(args[0]), Literal):
            return self._copied(self.value_of(args[0]), result)
        if func in (aten.clone.default, aten.alias.default, aten.lift_fresh.default):
            return self.value_of(args[0])
        if func is aten._to_copy.default:
            if "device" in kwargs and torch.device(kwargs["device"]) != args[0].device:
                raise refuse("a copy to another device", "a kernel runs on one device", "move the tensor outside")
            if kwargs.get("dtype", args[0].dtype) == args[0].dtype:
                value = self.value_of(args[0])
                return value if isinstance(value, Literal) else self._copied(value, result)
            named = (("dtype", kwargs["dtype"]),)
        if func in AS_TENSOR and len(args) > 1 and args[0].is_floating_point():
            values = (values[0], Literal.of(operators.as_kept(values[1].value, args[0].dtype)), *values[2:])
        if func in COMPARED and _promotes_to_double(*args[:2]):  # a boolean does not say so
            values = tuple(map(self._widened, args, values))
        if func is relabel.default:
            name, values = RELABEL, values[:1]
        if func is dropout.default:
            name, values = DROPOUT, (*values, Literal.of(self.dropouts))
            self.dropouts += 1
        if func is aten.remainder.Scalar_Tensor:  # which PyTorch does not differentiate
            name, values = "aten.remainder.Tensor", (Constant(values[0], result.dtype), values[1])
        if func in (aten.floor_divide.default, aten.floor_divide.Scalar):
            name, named = "aten.div.Tensor_mode", (("rounding_mode", "floor"),)
            second = values[1]
            values = (values[0], Constant(second, result.dtype) if isinstance(second, Literal) else second)
        if func is aten.masked_fill.Tensor and isinstance(values[2], Source | Result):  # a value is a whole tensor here
            filled = values[2] if args[2].dtype == args[0].dtype else self._cast(values[2], args[0])
            name, values = "aten.where.self", (values[1], filled, values[0])
        if func is aten.nan_to_num.default:
            named = _nan_to_num_bounds(args, kwargs)
            values = values[:1]
        return _depending(Result(name, values, named, result, user_line(), False))

    def _widened(self, tensor: torch.Tensor, value: Any) -> Any:
        if tensor.dtype == torch.float64 or not isinstance(value, Source | Result):
            return value
        return self._cast(value, tensor.to(torch.float64))

    def _cast(self, value: Recorded, result: torch.Tensor) -> Result:
        return _depending(Result(CAST, (value,), (("dtype", result.dtype),), result, user_line(), False))

    def _copied(self, value: Recorded, result: torch.Tensor) -> Result:
        return _depending(Result("aten.clone.default", (value,), (), result, user_line(), False))

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            value = self.value_of(arg)
            return Constant(value, arg.dtype) if isinstance(value, Literal) else value
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            arg = int(arg) if isinstance(arg, torch.SymInt) else float(arg)  # type: ignore[arg-type]  # a guard: other sizes, another record
        if isinstance(arg, bool | int | float):
            return Literal.of(arg)
        return tuple(self._argument(part) for part in arg) if isinstance(arg, list | tuple) else arg

    def _normalized(self, args: Sequence[Any], result: torch.Tensor) -> Result:
        c, col_dims, norm, eps, groups, ranks = args
        if self.norm is not None:
            raise refuse(f"a second norm, {norm}", f"the first is at {self.norm.line}", "fuse each one by itself")
        self.norm = NormCall(norm, self.value_of(c), col_dims, eps, groups, ranks, user_line())
        return Result("warpnorm.normalize.default", (self.norm.c,), (), result, user_line(), True)

    def _averaged(self, args: Sequence[Any]) -> Recorded:
        mean, variance = (self.value_of(buffer) for buffer in args[:2])
        if not (isinstance(mean, Source) and isinstance(variance, Source)):
            raise refuse(
                "a norm with running statistics that are computed inside the function",
                "they have nowhere to be written to",
                "pass the buffers",
            )
        self.effects.append(Running(mean, variance, args[2]))
        self._averages |= {memory(buffer) for buffer in args[:2]}
        return Literal.of(0)

    def _check_averaged(self, func: Any, args: Sequence[Any]) -> None:
        if self._averages and any(isinstance(arg, torch.Tensor) and memory(arg) in self._averages for arg in args):
            raise refuse(
                f"{_name(func)} of running statistics after the norm",
                "they are averaged when all is computed",
                "read them outside of the fused function",
            )

    def _counted(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an operator counts the calls, as BatchNorm does: the one write into an input that is kept."""
        value = self.value_of(args[0])
        is_counter = isinstance(value, Source) and args[0].ndim == 0 and args[0].dtype == torch.int64
        number = self._argument(args[1]) if func is aten.add_.Tensor else None
        number = number.literal if isinstance(number, Constant) else number
        if not is_counter or not isinstance(number, Literal) or not isinstance(number.value, int):
            return False
        self.effects.append(Counted(value, number.value))  # type: ignore[arg-type]
        return True

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> Recorded:
        """An operator that writes into its first argument gives it a new value."""
        if kwargs.get("out") is not None:
            raise refuse(f"{_name(func)} with out=", "a fused function returns new tensors", "leave out= away")
        target = args[0]
        storage = memory(target)
        if self._counted(func, args):
            self.values[target] = self._operation(aten.add.Tensor, args, kwargs, result)
            return self.values[target]
        if any(memory(fake) == storage for _, fake in self.inputs.values()):
            raise refuse(
                f"{_name(func)}, which writes into an input,",
                "a fused function must leave its inputs as they are",
                "use the operator that gives a new tensor, or clone() the input first",
            )
        if any(t is not target and memory(t) == storage for t in list(self.values)):
            raise refuse(
                f"{_name(func)}, which writes into a view or into a tensor that has views,",
                "the views would change too",
                "use the operator that gives a new tensor",
            )
        if func is aten.copy_.default:
            written = self._operation(aten._to_copy.default, (args[1],), {"dtype": target.dtype}, result)
        elif func in (aten.zero_.default, aten.fill_.Scalar):
            written = Literal.of(operators.as_kept(0 if func is aten.zero_.default else args[1], target.dtype))
        else:
            packet = getattr(aten, func._schema.name.split("::")[1].removesuffix("_"))
            plain = INSTEAD.get(func) or getattr(packet, func._overloadname)
            promoted = plain(*args, **kwargs)
            written = self._operation(plain, args, kwargs, promoted)
            if promoted.dtype != target.dtype:
                written = self._cast(written, result)
        self.values[target] = written
        return written

    def _seen_through(self, value: Recorded, move: Move, result: torch.Tensor) -> Recorded:
        """A view of an input is another input; a view of a result is the same operator on views of its arguments."""
        if isinstance(value, Literal):
            return value
        if isinstance(value, Source):
            return Source(value.index, (*value.moves, move), result)
        if move.target is aten.view.dtype:
            raise refuse(_name(move.target), "a computed value has no bits in memory", "use to(), or look at an input")
        if value.depends_on_norm:
            raise refuse(
                _name(move.target),
                "after the norm a tensor has to keep the shape of the normalized one",
                "reshape what the fused function returns",
            )
        if value.target == DROPOUT:
            raise refuse(_name(move.target), "it changes the shape of what dropout gave", "reshape before the dropout")
        key = (id(value), str(move))
        if key not in self._moved:
            args = tuple(self._moved_argument(arg, value.fake, move) for arg in value.args)
            kwargs = tuple((k, self._moved_argument(arg, value.fake, move)) for k, arg in value.kwargs)
            self._moved[key] = value, Result(value.target, args, kwargs, result, value.line, False)
        return self._moved[key][1]

    def _moved_argument(self, arg: Any, like: torch.Tensor, move: Move) -> Any:
        if not isinstance(arg, Source | Result):
            return arg
        fake = arg.fake
        is_spread = fake.shape != like.shape
        if is_spread:
            spread = Move(aten.expand.default, (tuple(like.shape),), ())
            arg = self._seen_through(arg, spread, fake.expand(like.shape))
            fake = arg.fake
        try:
            moved = move(fake) if is_spread else move.of_user(fake)
        except (RuntimeError, ValueError):
            raise refuse(
                _name(move.target), "it mixes rows of a broadcast tensor", "reshape before the tensors are combined"
            ) from None
        return self._seen_through(arg, move, moved)

    def _not_elementwise(self, func: Any) -> FusionError:
        name = _name(func)
        instead = ADVICE.get(name.removeprefix("aten.").split(".")[0], "call it outside of the fused function")
        return refuse(name, "it is not an elementwise operator, a view or a norm", instead)


def _promotes_to_double(first: torch.Tensor, second: torch.Tensor) -> bool:
    """A lone number of float64 does so only beside another, or beside an integer."""
    pairs = ((first, second), (second, first))
    return any(a.dtype == torch.float64 and (a.ndim > 0 or b.ndim == 0 or not b.is_floating_point()) for a, b in pairs)


def _name(func: Any) -> str:
    return str(func).removesuffix(".default")


def _depending(result: Result) -> Result:
    parts = [*result.args, *(arg for _, arg in result.kwargs)]
    depends = any(isinstance(arg, Result) and arg.depends_on_norm for arg in parts)
    return Result(result.target, result.args, result.kwargs, result.fake, result.line, depends)


def _nan_to_num_bounds(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[str, Literal], ...]:
    """The bounds of the tensor's own dtype, which is not the one that a kernel computes in."""
    names = ("nan", "posinf", "neginf")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    largest = torch.finfo(args[0].dtype).max if args[0].is_floating_point() else 0.0
    usual = {"nan": 0.0, "posinf": largest, "neginf": -largest}
    return tuple((n, Literal.of(usual[n] if given.get(n) is None else float(given[n]))) for n in names)
