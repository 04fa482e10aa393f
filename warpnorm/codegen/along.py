"""What the first task of pattern `column` sums along lines in backward: the terms of the statistic, and the gradients that
the epilogue alone gives. What is the same along a line is a factor of its sum; sums that then are alike are one."""

from dataclasses import dataclass

from warpnorm.codegen import expressions
from warpnorm.problem import ALONG, BackwardProblem, Literal, Node, Value, operand_name


@dataclass(frozen=True)
class Sums:
    """`summands`: products, of which a sum is taken each. Of the terms, and of gradients that can be merged or not: which
    sum each is, and its factors."""

    summands: tuple[tuple[Value, ...], ...]
    terms: tuple[tuple[int, tuple[Value, ...]], ...]
    merged: tuple[tuple[int, tuple[Value, ...]], ...]
    left: tuple[tuple[int, tuple[Value, ...]], ...]


def sums(problem: BackwardProblem) -> Sums:
    graph = expressions.as_written(problem.epilogue_vjp, problem)
    constant = constant_along_lines(problem)
    nodes = {node.name: node for node in graph.nodes}
    whole = {name for name, dtype in expressions.dtypes_of(graph, problem).items() if not dtype.is_floating_point}
    first = problem.needs_grad_xhat + problem.needs_grad_c
    gradients = dict(zip(problem.wanted_of_epilogue, graph.outputs[first:], strict=True))
    found: list[tuple[Value, ...]] = []

    def sum_of(*values: Value) -> tuple[int, tuple[Value, ...]]:
        leaves = [leaf for value in values for leaf in _product(value, nodes, whole)]
        factors = tuple(leaf for leaf in leaves if isinstance(leaf, Literal) or leaf in constant)
        summand = tuple(sorted((leaf for leaf in leaves if leaf not in factors), key=str))
        if not summand:
            summand, factors = factors, ()
        if summand not in found:
            found.append(summand)
        return found.index(summand), factors

    terms = (sum_of(graph.outputs[0], "xhat"), sum_of(graph.outputs[0])) if problem.has_tasks else ()
    merged = tuple(sum_of(gradients[problem.wanted[k]]) for k in problem.merged)
    left = tuple(sum_of(gradients[problem.wanted[k]]) for k in problem.left_first)
    return Sums(tuple(found), terms, merged, left)


def sent(problem: BackwardProblem) -> int:
    """How many sums the programs of pattern `held` exchange."""
    return len(sums(problem).summands) if problem.is_alike else 2 + len(problem.merged)


def sums_a_word(problem: BackwardProblem) -> int:
    """Of their messages: the second of two loses digits that float32 gradients have."""
    has_long = any(problem.gradients[k].dtype.itemsize > 2 for k in problem.merged)
    return 1 if has_long or problem.has_long_mantissas else 2


def constant_along_lines(problem: BackwardProblem) -> set[str]:
    """The values of the epilogue's gradient that operands with one number for each line give, and numbers."""
    along = {operand_name(i) for i, operand in enumerate(problem.operands) if operand.axes in ALONG}
    for node in problem.epilogue_vjp.nodes:
        is_named = any(isinstance(arg, str) for arg in node.args)
        if is_named and all(isinstance(arg, Literal) or arg in along for arg in node.args):
            along.add(node.name)
    return along


def line_nodes(problem: BackwardProblem) -> list[str]:
    """The lines of code that give the values which are constant along lines."""
    constant = constant_along_lines(problem)
    code = expressions.lines(problem.epilogue_vjp, problem)
    nodes = expressions.as_written(problem.epilogue_vjp, problem).nodes
    return [line for node, line in zip(nodes, code, strict=True) if node.name in constant]


def _product(value: Value, nodes: dict[str, Node], whole: set[str]) -> list[Value]:
    """What it is the product of; `whole` are integers and booleans."""
    node = nodes.get(value) if isinstance(value, str) else None
    if node is None or node.operator != "mul" or any(arg in whole for arg in (node.name, *node.args)):
        return [value]
    return [leaf for arg in node.args for leaf in _product(arg, nodes, whole)]
