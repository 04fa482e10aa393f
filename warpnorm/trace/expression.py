"""A captured piece of a user's function: PyTorch's operators in order, as a frozen record that can be called. Called with
tensors in the dtype of computation it computes in that dtype, whatever dtypes the user's tensors had; only the casts that
stand in the user's function round."""

from dataclasses import dataclass, field
from typing import Any

import torch

from warpnorm.problem import Literal
from warpnorm.trace.dropout import threshold

CAST = "aten._to_copy.default"
DROPOUT = "warpnorm.dropout"
RELABEL = "warpnorm.relabel"  # another dtype for PyTorch's promotion, the same value


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step, or an input."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Constant:
    """A tensor that holds one number everywhere."""

    literal: Literal
    dtype: torch.dtype

    def __str__(self) -> str:
        return str(self.literal)


@dataclass(frozen=True)
class Step:
    """`args` hold Refs, Constants, Literals, None, dtypes and strings; `line` is where the user wrote it."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    line: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        given = [*map(str, self.args), *(f"{name}={value}" for name, value in self.kwargs)]
        return f"{self.name} = {self.target}({', '.join(given)})"


@dataclass(frozen=True)
class Expression:
    """`inputs` are the names of the positional arguments. Returns a tuple, or the lone result if `is_single`."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    compute: torch.dtype
    is_single: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.inputs, self.steps, self.outputs, self.compute)))

    def __hash__(self) -> int:  # it is a key on every call
        return self._hash  # type: ignore[attr-defined]

    def __call__(self, *values: torch.Tensor | float) -> Any:
        found: dict[str, Any] = dict(zip(self.inputs, values, strict=True))

        def value(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return found[arg.name]
            if isinstance(arg, Constant):
                return self._filled(arg, values)
            return arg.value if isinstance(arg, Literal) else arg

        for step in self.steps:
            args, kwargs = [value(a) for a in step.args], {k: value(a) for k, a in step.kwargs}
            found[step.name] = self._run(step.target, args, kwargs)
        results = tuple(map(value, self.outputs))
        return results[0] if self.is_single else results

    def _run(self, target: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if target == RELABEL:
            return args[0]
        if target == CAST:
            return _cast(args[0], kwargs["dtype"], self.compute)
        if target == DROPOUT:
            return _dropout(*args)
        return operator(target)(*args, **kwargs)

    def _filled(self, constant: Constant, values: tuple[Any, ...]) -> torch.Tensor:
        device = next(v.device for v in values if isinstance(v, torch.Tensor))
        dtype = self.compute if constant.dtype.is_floating_point else constant.dtype
        return torch.full((), constant.literal.value, dtype=dtype, device=device)

    def __str__(self) -> str:
        lines = [f"  {step}" for step in self.steps]
        return "\n".join([f"({', '.join(self.inputs)}) ->", *lines, f"  return {', '.join(map(str, self.outputs))}"])


def operator(target: str) -> Any:
    """The overload behind a name such as `aten.silu.default`."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _cast(x: Any, dtype: torch.dtype, compute: torch.dtype) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if not dtype.is_floating_point:
        return x.to(dtype)
    return x.to(dtype).to(compute) if dtype.itemsize < compute.itemsize else x.to(compute)


def _dropout(x: torch.Tensor, seed: Any, offset: Any, p: float, stream: int) -> torch.Tensor:
    seed, offset = (n if isinstance(n, torch.Tensor) else torch.as_tensor(n, device="cpu") for n in (seed, offset))
    scale = 1.0 / (1.0 - p)
    return x * torch.ops.warpnorm.keep(x.detach(), seed, offset, threshold(p), scale, stream)
