"""A traced `torch.fx` graph becomes the frozen record of a pointwise graph, or an error names what does not fit. Numbers
are folded, and what writes into a value gives a new one."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from warpnorm.errors import OperatorError
from warpnorm.problem import Graph, Literal, Node, Value
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
            return Literal.of(arg)
        raise OperatorError(f"a traced function may hold tensors and numbers, not {arg!r}")

    for node in traced.nodes:
        if node.op == "placeholder":
            names[node] = next(free_inputs)
        elif node.op == "output":
            result = node.args[0]
            outputs = tuple(value(arg) for arg in (result if isinstance(result, tuple | list) else (result,)))
        elif node.op != "call_function" or node.target is operator.getitem:
            raise OperatorError(f"{node.target} cannot be fused: it is not an elementwise operator on tensors")
        else:
            names[node] = _node(node, value, nodes)
            if operators.writes(node.target):
                names[node.args[0]] = names[node]
    return Graph(inputs, _alive(nodes, outputs), outputs)


def _node(node: torch.fx.Node, value: Any, nodes: list[Node]) -> Value:
    """The value of one operator: a number, something that is there already, or a new node."""
    target: Any = node.target
    if target in operators.FILLED:
        filled = operators.FILLED[target](node.args)
        return Literal.of(operators.as_number(filled, node.meta["val"].dtype))
    if target in operators.SAME:
        return value(node.args[operators.SAME[target]])
    if target in operators.EMPTY:
        return Literal.of(float("nan"))
    name, args = operators.spelled(target, node.args, node.kwargs)
    dtype = node.meta["val"].dtype
    if name == "add" and dtype == torch.bool:
        name = "logical_or"  # as PyTorch has it
    operators.check(name, dtype)
    values = tuple(value(arg) for arg in args)
    if name == "where" and isinstance(values[0], Literal):
        return values[1] if values[0].value else values[2]
    if all(isinstance(v, Literal) for v in values) and not operators.is_cast(name):
        return _folded(target, node, values, dtype)
    nodes.append(Node(f"t{len(nodes)}", name, values, dtype))
    return nodes[-1].name


def _folded(target: Any, node: torch.fx.Node, values: tuple[Value, ...], dtype: torch.dtype) -> Literal:
    """An operator on numbers alone, by PyTorch itself."""
    numbers = iter(values)
    args = [
        torch.tensor(literal.value, dtype=arg.meta["val"].dtype, device="cpu")
        if isinstance(arg, torch.fx.Node)
        else arg
        for arg, literal in zip(node.args, numbers, strict=False)
        if isinstance(literal, Literal)
    ]
    return Literal.of(operators.as_number(target(*args, **node.kwargs).item(), dtype))


def rounded_once(graph: Graph, dtypes: Sequence[torch.dtype], compute: torch.dtype) -> Graph:
    """Without the casts of outputs to what they are stored as, since storing rounds; and to what they are computed in."""
    nodes = {node.name: node for node in graph.nodes}

    def before(value: Value, dtype: torch.dtype) -> Value:
        node = nodes.get(value) if isinstance(value, str) else None
        if node is None or not operators.is_cast(node.operator):
            return value
        of = nodes.get(node.args[0]) if isinstance(node.args[0], str) else None
        is_stored_so = node.dtype == dtype or (node.dtype.is_floating_point and node.dtype.itemsize >= compute.itemsize)
        is_real = of is not None and of.dtype.is_floating_point and dtype.is_floating_point
        return before(node.args[0], dtype) if is_stored_so and is_real else value

    outputs = tuple(before(value, dtype) for value, dtype in zip(graph.outputs, dtypes, strict=True))
    return graph if outputs == graph.outputs else Graph(graph.inputs, _alive(list(graph.nodes), outputs), outputs)


def _alive(nodes: list[Node], outputs: tuple[Value, ...]) -> tuple[Node, ...]:
    needed = set(outputs)
    alive = []
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.args)
            alive.append(node)
    return tuple(reversed(alive))
