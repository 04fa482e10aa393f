"""A function of tensors becomes the graph of its elementwise operators, by `make_fx` over fake tensors."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from warpnorm.problem import Epilogue, Graph, operand_name
from warpnorm.trace.graph import from_fx

# Full shape for every input: the sums over broadcast axes are the kernel's work, not the graph's.
PROBE_SHAPE = (2, 3)

_lock = threading.Lock()


def pointwise(function: Callable[..., Any], inputs: Sequence[str]) -> Graph:
    """The graph of `function`, called with one full-shaped tensor for each name in `inputs`. Traced in a thread of its
    own, one at a time: tracing patches global state, and the caller's modes, hooks and default device are its own."""
    traced: list[Graph | BaseException] = []

    def trace() -> None:
        try:
            traced.append(_trace(function, inputs))
        except BaseException as error:
            traced.append(error)

    with _lock:
        thread = threading.Thread(target=trace, name="warpnorm-trace")
        thread.start()
        thread.join()
    if isinstance(traced[0], BaseException):
        raise traced[0]
    return traced[0]


def _trace(function: Callable[..., Any], inputs: Sequence[str]) -> Graph:
    probes = [torch.empty(PROBE_SHAPE, dtype=torch.float64) for _ in inputs]
    primitives: Any = core_aten_decompositions()
    traced = make_fx(function, decomposition_table=primitives, tracing_mode="fake")(*probes)
    traced.graph.eliminate_dead_code()
    return from_fx(traced.graph, tuple(inputs))


@cache
def forward_graphs(epilogue: Epilogue, operands: int) -> tuple[Graph, Graph]:
    """Prologue and epilogue of a plain norm: operand 0 as it is, then `epilogue` of xhat and the other operands."""
    names = [operand_name(i) for i in range(operands)]
    return pointwise(lambda c: c, names[:1]), pointwise(epilogue, ["xhat", *names[1:]])
