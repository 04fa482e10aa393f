"""A traced `torch.fx` graph becomes the frozen record of a pointwise graph, or an error names what does not fit."""

import operator
from typing import Any

import torch

from warpnorm.errors import OperatorError
from warpnorm.problem import Graph, Node, Value
from warpnorm.trace import operators


def from_fx(traced: torch.fx.Graph, inputs: tuple[str, ...]) -> Graph:
    names: dict[torch.fx.Node, Value] = {}
    nodes: list[Node] = []
    outputs: tuple[Value, ...] = ()
    free_inputs = iter(inputs)

    def value(arg: Any) -> Value:
        if isinstance(arg, torch.fx.Node):
            return names[arg]
        if isinstance(arg, bool | int | float):
            return arg
        raise OperatorError(f"a traced function may hold tensors and numbers, not {arg!r}")

    for node in traced.nodes:
        if node.op == "placeholder":
            names[node] = next(free_inputs)
        elif node.op == "output":
            result = node.args[0]
            outputs = tuple(value(arg) for arg in (result if isinstance(result, tuple | list) else (result,)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            name = str(node.target)
            operators.check(name)
            if node.kwargs:
                raise OperatorError(f"{name} with {', '.join(node.kwargs)} cannot be fused")
            names[node] = f"t{len(nodes)}"
            nodes.append(Node(f"t{len(nodes)}", name, tuple(value(arg) for arg in node.args)))
        else:
            raise OperatorError(f"{node.target} cannot be fused: it is not an elementwise operator on tensors")
    return Graph(inputs, tuple(nodes), outputs)
