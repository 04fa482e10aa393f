"""A function of tensors becomes the graph of its primitive operators, by `make_fx` over fake tensors."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from warpnorm.problem import Epilogue, Graph, Prologue, operand_name
from warpnorm.trace import operators, store
from warpnorm.trace.graph import from_fx

# Full shape for every input: the sums over broadcast axes are the kernel's work, not the graph's.
PROBE_SHAPE = (2, 3)

_lock = threading.Lock()


def pointwise(function: Callable[..., Any], inputs: Sequence[str], dtypes: Sequence[torch.dtype]) -> Graph:
    """The graph of `function`, called with one full-shaped tensor for each name in `inputs`. Traced in a thread of its
    own, one at a time: tracing patches global state, and the caller's modes, hooks and default device are its own."""
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
    from torch.fx.experimental.proxy_tensor import make_fx  # which takes a second

    probes = [torch.empty(PROBE_SHAPE, dtype=dtype) for dtype in dtypes]
    primitives: Any = operators.decompositions()
    traced = make_fx(function, decomposition_table=primitives, tracing_mode="fake")(*probes)
    return from_fx(traced.graph, tuple(inputs))


def probe_dtypes(dtypes: Sequence[torch.dtype], compute: torch.dtype) -> tuple[torch.dtype, ...]:
    """What operands of these dtypes are inside a kernel."""
    return tuple(compute if dtype.is_floating_point else dtype for dtype in dtypes)


@cache
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
