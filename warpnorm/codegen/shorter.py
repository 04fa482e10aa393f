"""Formulas that a graph holds and that have a shorter form, where an error of some 2^-22 does not show."""

from dataclasses import replace
from math import pi, sqrt

from warpnorm.problem import Graph, Literal, Node, Value

# A pattern is an operator and its arguments: patterns, numbers, or the name of what it is a formula of
Pattern = tuple["str | Pattern | float", ...]

_X = "x"
_DISTRIBUTION: Pattern = ("add", ("erf", ("mul", _X, sqrt(0.5))), 1)
_DENSITY: Pattern = ("mul", ("exp", ("mul", ("mul", _X, _X), -0.5)), 1 / sqrt(2 * pi))
# As PyTorch spells gelu and its gradient
SHORTER: dict[str, Pattern] = {
    "gelu": ("mul", ("mul", _X, 0.5), _DISTRIBUTION),
    "gelu_slope": ("add", ("mul", _DISTRIBUTION, 0.5), ("mul", _X, _DENSITY)),
}
COMMUTES = ("add", "mul")


def shortened(graph: Graph) -> Graph:
    """The same graph with the operators of `SHORTER`, without the nodes that nobody reads any more."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        for operator, pattern in SHORTER.items():
            found: dict[str, Value] = {}
            if _matches(node.name, pattern, nodes, found):
                nodes[node.name] = replace(node, operator=operator, args=(found[_X],))
    if all(nodes[node.name] is node for node in graph.nodes):
        return graph
    needed = {value for value in graph.outputs if isinstance(value, str)}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(arg for arg in nodes[node.name].args if isinstance(arg, str))
    return replace(graph, nodes=tuple(nodes[node.name] for node in graph.nodes if node.name in needed))


def _matches(value: Value, pattern: "str | Pattern | float", nodes: dict[str, Node], found: dict[str, Value]) -> bool:
    if isinstance(pattern, str):
        return isinstance(value, str) and found.setdefault(pattern, value) == value
    if not isinstance(pattern, tuple):
        return isinstance(value, Literal) and abs(value.value - pattern) < 1e-12
    node = nodes.get(value) if isinstance(value, str) else None
    operator, *args = pattern
    if node is None or node.operator != operator or len(node.args) != len(args):
        return False
    for given in (node.args, node.args[::-1])[: 2 if operator in COMMUTES else 1]:
        bound = dict(found)
        if all(_matches(a, p, nodes, bound) for a, p in zip(given, args, strict=True)):
            found.update(bound)
            return True
    return False
