"""A function of tensors becomes the graph of its primitive operators: it runs once on tensors of six elements, and what
reaches PyTorch's dispatcher is written down. As `make_fx` does, without the second that its import takes."""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from warpnorm.locks import Lock
from warpnorm.problem import Epilogue, Graph, Prologue, operand_name
from warpnorm.trace import operators, store
from warpnorm.trace.graph import from_fx

aten = torch.ops.aten
# Full shape for every input: the sums over broadcast axes are the kernel's work, not the graph's.
PROBE_SHAPE = (2, 3)

_lock = Lock()


def pointwise(function: Callable[..., Any], inputs: Sequence[str], dtypes: Sequence[torch.dtype]) -> Graph:
    """The graph of `function`, called with one full-shaped tensor for each name in `inputs`. Traced in a thread of its
    own, one at a time: the caller's modes, hooks and default device are its own."""
    traced: list[Graph | BaseException] = []

    def trace() -> None:
        try:
            traced.append(_trace(function, inputs, dtypes))
        except BaseException as error:
            traced.append(error)

    with _lock:
        thread = threading.Thread(target=trace, name="warpnorm-trace")
        thread.start()
        thread.join()
    if isinstance(traced[0], BaseException):
        raise traced[0]
    return traced[0]


def _trace(function: Callable[..., Any], inputs: Sequence[str], dtypes: Sequence[torch.dtype]) -> Graph:
    tape = Tape()
    probes = [tape.input(dtype) for dtype in dtypes]
    with tape:
        result = function(*probes)
    tape.graph.output(tape.named(result))
    return from_fx(tape.graph, tuple(inputs))


class Tape(TorchDispatchMode):
    """Writes down every operator below autograd; one that PyTorch takes apart is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.nodes: Any = WeakIdKeyDictionary()
        self.primitives = operators.decompositions()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to say so imports PyTorch's compiler
        return False

    def input(self, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.ones(PROBE_SHAPE, dtype=dtype, device="cpu")
        self._remember(tensor, self.graph.placeholder("input"))
        return tensor

    def named(self, values: Any) -> Any:
        """With the nodes of tensors in their place."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self.nodes[tensor], values)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            result = self.primitives.get(func, func.decompose)(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func is aten.lift_fresh.default:  # a number that the function made a tensor of
            result, node = args[0], self.graph.call_function(aten.full.default, ((), args[0].item()))
        else:
            result = func(*args, **kwargs)
            node = self.graph.call_function(func, self.named(args), self.named(kwargs))
        self._remember(result, node)
        return result

    def _remember(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        node.meta["val"] = tensor
        self.nodes[tensor] = node


def probe_dtypes(dtypes: Sequence[torch.dtype], compute: torch.dtype) -> tuple[torch.dtype, ...]:
    """What operands of these dtypes are inside a kernel."""
    return tuple(compute if dtype.is_floating_point else dtype for dtype in dtypes)


@lru_cache(maxsize=4096)
def forward_graphs(
    prologue: Prologue, epilogue: Epilogue, dtypes: tuple[torch.dtype, ...], compute: torch.dtype
) -> tuple[Graph, Graph]:
    """`dtypes` are those of the operands inside a kernel."""
    names = [operand_name(i) for i in range(len(dtypes))]

    def trace() -> tuple[Graph, ...]:
        before = pointwise(prologue, names, dtypes)
        return before, pointwise(epilogue, ["xhat", "c", *names], [compute, compute, *dtypes])

    before, after = store.kept(("forward", prologue, epilogue, dtypes, compute), trace)
    return before, after
