"""What is computed at the first visit of a tile and would be computed again at the second, when its sums are known: values
between zero and one that take many instructions. They are kept as halves, by pairs, among the values of the tile: it then
has more of them than were loaded, by which the functions know that they are called a second time."""

from collections.abc import Iterator
from dataclasses import replace

from warpnorm.codegen import expressions
from warpnorm.problem import BackwardProblem, Graph, Node, Problem, Value
from warpnorm.trace.operators import KEPT

# A value as what it is made of, whatever the nodes are called: an operator, its dtype and its arguments
Key = tuple[object, ...] | Value


def values(problem: Problem) -> Graph:
    """A graph of them alone: each of its outputs is kept."""
    nodes: dict[Key, Node] = {}
    outputs: list[Value] = []
    for (of_kept, _), (arg, by_name) in _kept(problem).items():
        name = f"kept{len(outputs)}"
        nodes[name] = Node(name, of_kept, (_copy(arg, by_name, nodes),), problem.compute)
        outputs.append(name)
    inputs = dict.fromkeys(name for graph in _graphs(problem) for name in graph.inputs)
    return Graph(tuple(inputs), tuple(nodes.values()), tuple(outputs))


def second(graph: Graph, problem: Problem, loaded: int) -> dict[str, str]:
    """What the nodes of a graph, as it is written, are at the second visit, by their names: a tile has `loaded` values and
    then what is kept."""
    by_name = {node.name: node for node in graph.nodes}
    order = list(_kept(problem))
    lines = {}
    for node, of_kept, arg in _found(graph, problem) if order else ():
        key = (of_kept, _key(arg, by_name))
        if key in order:
            lines[node.name] = KEPT[node.operator][1].format(arg, f"ours.widened(values[{loaded + order.index(key)}])")
    return lines


def _graphs(problem: Problem) -> tuple[Graph, ...]:
    """As they are written. Not what stands after the norm: plans are not made for more registers there."""
    if not isinstance(problem, BackwardProblem) or not problem.is_half:
        return ()
    return tuple(expressions.as_written(graph, problem) for graph in (problem.prologue, problem.prologue_vjp))


def _kept(problem: Problem) -> dict[tuple[str, Key], tuple[str, dict[str, Node]]]:
    """Which values and of what; and the name of that, among the nodes of some graph that has it."""
    kept: dict[tuple[str, Key], tuple[str, dict[str, Node]]] = {}
    for graph in _graphs(problem):
        by_name = {node.name: node for node in graph.nodes}
        for _, of_kept, arg in _found(graph, problem):
            kept.setdefault((of_kept, _key(arg, by_name)), (arg, by_name))
    return kept


def _found(graph: Graph, problem: Problem) -> Iterator[tuple[Node, str, str]]:
    """The nodes of which a value is kept, which value that is, and of what: that is there at the first visit, and a tile."""
    for node in graph.nodes:
        if node.operator in KEPT and isinstance(arg := node.args[0], str):
            is_there = "grad_c" not in replace(graph, outputs=(arg,)).dependencies([0])
            if is_there and expressions.is_tile(arg, graph, problem):
                yield node, KEPT[node.operator][0], arg


def _key(value: Value, by_name: dict[str, Node]) -> Key:
    node = by_name.get(value) if isinstance(value, str) else None
    return value if node is None else (node.operator, node.dtype, *(_key(arg, by_name) for arg in node.args))


def _copy(value: Value, by_name: dict[str, Node], nodes: dict[Key, Node]) -> Value:
    """The name of the same value among `nodes`, which it is added to."""
    node = by_name.get(value) if isinstance(value, str) else None
    if node is None:
        return value
    key = _key(value, by_name)
    if key not in nodes:
        args = tuple(_copy(arg, by_name, nodes) for arg in node.args)
        nodes[key] = replace(node, name=f"of_kept{len(nodes)}", args=args)
    return nodes[key].name
