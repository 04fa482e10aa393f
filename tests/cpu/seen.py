"""What a compiler was given: the names of the operators in the graphs that reach a backend, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Seen:
    """A backend for `torch.compile` that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self.frames = 0
        self._inner = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.frames += 1
        return self._inner(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(operators(graph))
        return make_boxed_func(graph.forward)


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """Without what only takes tuples apart or looks at a tensor in another way."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    plain = (
        "getitem",
        "view",
        "detach",
        "sym_size",
        "select",
        "slice",
        "expand",
        "alias",
        "unsqueeze",
        "chunk",
        "split",
    )
    return [name for name in names if not any(word in name for word in plain)]
