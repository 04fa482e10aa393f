"""Tensors without memory, on which a user's function runs while it is recorded. There are two kinds. Symbols: PyTorch's fake
tensors, where every size but the last is a symbol and a comparison with it is a guard; they bring a compiler, which takes a
second to import. Stand-ins: of the sizes of the call itself, enough for a function that never asks how many rows there are;
one that does is recorded with symbols instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from warpnorm.space import broadcast_shapes
from warpnorm.trace import operators

aten = torch.ops.aten
_tensor: Any = torch.Tensor
# Elementwise, but not marked so by every version of PyTorch
ALSO_POINTWISE = frozenset({
    "abs", "_to_copy", "alias", "celu", "clone", "copy", "detach", "elu", "fill", "floor_divide", "gelu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lift_fresh", "log_sigmoid_forward", "masked_fill", "mish",
    "nan_to_num", "rsub", "silu", "softplus", "softshrink", "threshold", "where", "zero",
})  # fmt: skip
SAME_SHAPE = frozenset({
    aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default,
})  # fmt: skip
COUNTING = frozenset({
    _tensor.numel, _tensor.nelement, _tensor.__len__, _tensor.nbytes.__get__, _tensor.is_same_size, torch.numel,
    torch.is_same_size,
})  # fmt: skip
OWN_MODE = "warpnorm"


class AskedForSizesError(Exception):
    """The function asks how many rows there are."""


class Symbols:
    """Contiguous, on the device of the real ones, and every dimension but the last a symbol if it is two or more."""

    def __init__(self, tensors: Sequence[torch.Tensor], are_symbolic: bool = True) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # brings sympy, which nobody needs before

        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=False)
        setattr(self.mode, OWN_MODE, True)
        self.symbols: dict[Any, tuple[int, int]] = {}
        self.fakes = []
        for i, tensor in enumerate(tensors):
            shape: Any = list(tensor.shape)
            for dim, size in enumerate(shape[:-1] if are_symbolic else ()):
                if size > 1:
                    shape[dim] = self._symbol(size, i, dim)
            with self.mode:
                self.fakes.append(_as_parameter(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor))

    def _symbol(self, size: int, tensor: int, dim: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"size{tensor}_{dim}")
        symbol = self.shape_env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.symbols[symbol] = (tensor, dim)
        return self.shape_env.create_symintnode(symbol, hint=size, source=source)

    def guards(self) -> tuple[Any, ...]:
        return tuple(guard.expr for guard in self.shape_env.guards)

    def seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return NotImplemented


@dataclass(frozen=True)
class SameSize:
    """Two dimensions that were alike in the recorded call, and so may have met."""

    first: tuple[int, int]
    second: tuple[int, int]

    def xreplace(self, sizes: Mapping[Any, int]) -> bool:
        return sizes[self.first] == sizes[self.second]


@dataclass(frozen=True)
class Exactly:
    """A dimension whose size something in the record was made of."""

    which: tuple[int, int]
    size: int

    def xreplace(self, sizes: Mapping[Any, int]) -> bool:
        return sizes[self.which] == self.size


class StandIns:
    """Contiguous, on the device of the real ones, with their sizes. Sizes that are alike have to stay alike."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.mode = _StandInMode()
        self.fakes: list[torch.Tensor] = []
        self.symbols: dict[Any, tuple[int, int]] = {}
        self._first: dict[int, tuple[int, int]] = {}
        self._guards = []
        for i, tensor in enumerate(tensors):
            elem = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.fakes.append(_as_parameter(StandIn(elem, tensor.device, self.mode), tensor))
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    self.symbols[i, dim] = i, dim
                    self.mode.known.add(size)
                    first = self._first.setdefault(size, (i, dim))
                    if first != (i, dim):
                        self._guards.append(SameSize(first, (i, dim)))

    def guards(self) -> tuple[Any, ...]:
        """Sizes that are alike stay alike, so that one dimension of a size stands for all."""
        pinned = [Exactly(self._first[size], size) for size in sorted(self.mode.pinned)]
        return (*self._guards, *pinned)

    def seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a question about sizes is answered with."""
        if func in COUNTING:
            raise self.mode.asked()
        if func == _tensor.shape.__get__:
            return Shape(args[0].shape, self.mode.asked)
        if func == _tensor.size:
            shape = Shape(args[0].shape, self.mode.asked)
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        return NotImplemented


class Shape(tuple[int, ...]):
    """A shape whose last size may be read: it is the one that a record is for."""

    asked: Any

    def __new__(cls, sizes: Sequence[int], asked: Any) -> "Shape":
        shape = super().__new__(cls, sizes)
        shape.asked = asked
        return shape

    def __getitem__(self, at: Any) -> Any:
        places = range(len(self))[at]
        if places in (len(self) - 1, range(len(self) - 1, len(self))) or places == range(0):
            return super().__getitem__(at)
        raise self.asked()

    def _ask(self, *args: Any) -> Any:
        raise self.asked()

    __iter__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __reversed__ = _ask
    __hash__ = __add__ = __radd__ = __mul__ = __rmul__ = __repr__ = index = count = numel = _ask


class StandIn(torch.Tensor):
    """What it is like, on which device it would be, and beside it a tensor on the device "meta" that knows who is whose
    view."""

    elem: torch.Tensor
    owner: "_StandInMode"

    @staticmethod
    def __new__(cls, elem: torch.Tensor, device: torch.device, owner: "_StandInMode") -> "StandIn":
        make: Any = torch.Tensor._make_wrapper_subclass
        stand_in = make(cls, elem.shape, strides=elem.stride(), dtype=elem.dtype, device=device)
        stand_in.elem, stand_in.owner = elem, owner
        return stand_in

    def __init__(self, elem: torch.Tensor, device: torch.device, owner: "_StandInMode") -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AskedForSizesError  # outside of its mode


class _StandInMode(TorchDispatchMode):
    """Runs an elementwise operator on one element, and a view on what knows of views."""

    was_asked = False

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()  # sizes of the inputs
        self.pinned: set[int] = set()  # of these, what the record holds on to

    def pin(self, size: int) -> None:
        if size > 1 and size not in self.known:
            raise self.asked()
        if size > 1:
            self.pinned.add(size)

    def asked(self) -> AskedForSizesError:
        self.was_asked = True
        return AskedForSizesError()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to say so imports PyTorch's compiler
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        if func.namespace == "warpnorm":
            dtype = args[1] if func is torch.ops.warpnorm.relabel.default else args[0].dtype
            return StandIn(_like(args[0].elem, dtype), args[0].device, self)
        if tensors and is_pointwise(func) and not func.is_view:
            return self._pointwise(func, args, kwargs, tensors)
        if tensors and func in SAME_SHAPE:
            elem = _like(args[0].elem, kwargs.get("dtype") or args[0].dtype)
            return StandIn(elem, torch.device(kwargs.get("device") or args[0].device), self)
        if not (self._is_sizeless(func, args) if tensors else self._is_scalar(func, args)):
            raise self.asked()
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device()))
        args, kwargs = pytree.tree_map_only(StandIn, lambda tensor: tensor.elem, (args, kwargs))
        return StandIn(func(*args, **kwargs | ({"device": "meta"} if not func.is_view else {})), device, self)

    @staticmethod
    def _is_sizeless(func: Any, args: Sequence[Any]) -> bool:
        """Whether a view means the same whatever the sizes are, and leaves the last one the last."""
        dims = args[0].ndim if isinstance(args[0], StandIn) else 0
        if func is aten.view.default:  # a parameter laid along channels
            return dims == 1 and set(args[1][1:]) == {1} and args[1][0] == -1
        if func is aten.transpose.int:
            return dims - 1 not in [dim % dims for dim in args[1:]]
        if func is aten.permute.default:
            return args[1][-1] % dims == dims - 1
        return func in (aten.alias.default, aten.detach.default, aten.unsqueeze.default)

    @staticmethod
    def _is_scalar(func: Any, args: Sequence[Any]) -> bool:
        """Whether it makes a tensor of one number."""
        is_sized = func in (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
        return func is aten.scalar_tensor.default or (is_sized and len(args[0]) == 0)

    def _pointwise(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[StandIn]) -> Any:
        shape = broadcast_shapes(tuple(tensor.shape for tensor in tensors))
        device = next((tensor.device for tensor in tensors if tensor.ndim), tensors[0].device)
        device = torch.device(kwargs.get("device") or device)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        ones, named = pytree.tree_map_only(StandIn, _one_element, (args, kwargs))
        result = func(*ones, **named)
        if operators.writes(func):
            if tuple(args[0].shape) != shape:
                raise self.asked()  # PyTorch says what is wrong
            return args[0]
        like = next((tensor.elem for tensor in tensors if tuple(tensor.shape) == shape), None)

        def of_all(one: torch.Tensor) -> torch.Tensor:
            if like is None:
                return StandIn(torch.empty(shape, dtype=one.dtype, device="meta"), device, self)
            return StandIn(_like(like, one.dtype), device, self)

        return pytree.tree_map_only(torch.Tensor, of_all, result)


def _as_parameter(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The fake, which says that it is a Parameter if the tensor is one."""
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True  # which `isinstance` asks for
    return fake


def _like(elem: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Strides as PyTorch gives them to a result."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(elem.shape, elem.stride(), strict=True))
    if extent != elem.numel():
        return torch.empty(elem.shape, dtype=dtype, device="meta")
    return torch.empty_strided(elem.shape, elem.stride(), dtype=dtype, device="meta")


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones([1] * tensor.ndim, dtype=tensor.dtype, device="cpu")


def fixed_size(tensor: torch.Tensor, dim: int) -> int:
    """A size that the record holds on to: a call of another one is recorded anew."""
    size = tensor.shape[dim]
    if isinstance(tensor, StandIn):
        tensor.owner.pin(size)
    return int(size)


def is_fake(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor | StandIn)


def is_left(tensor: Any) -> bool:
    """Whether a capture left it behind, where the function put it."""
    return isinstance(tensor, StandIn) or getattr(getattr(tensor, "fake_mode", None), OWN_MODE, False)


def memory(tensor: torch.Tensor) -> int:
    """The same for two fakes if what is written to one is seen in the other."""
    return (tensor.elem if isinstance(tensor, StandIn) else tensor).untyped_storage()._cdata


def is_pointwise(func: Any) -> bool:
    name = func._schema.name.split("::")[1].removesuffix("_")
    return torch.Tag.pointwise in func.tags or name in ALSO_POINTWISE or func.namespace == "warpnorm"
