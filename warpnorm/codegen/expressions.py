"""One node of a graph becomes one line of Triton: the row of the operator table, its arguments in the dtype that the
operator computes in, numbers spelled so that they keep their precision."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from warpnorm.codegen.shorter import shortened
from warpnorm.problem import (
    BY_ROW,
    COLUMN,
    TILES,
    BackwardProblem,
    Graph,
    Literal,
    Node,
    Problem,
    Value,
    grad_output_name,
    operand_name,
)
from warpnorm.trace.dropout import WORDS
from warpnorm.trace.operators import TAME, TOTAL, TRITON, TRITON_HALF, is_cast

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
}
FLOAT8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}


def as_compute(value: str, dtype: torch.dtype, compute: torch.dtype) -> str:
    """A loaded value inside the kernel: floating ones in the dtype of computation, the others as they are."""
    if dtype in FLOAT8:
        return f"ours.from_{FLOAT8[dtype]}({value}).to({TYPES[compute]})"
    if not dtype.is_floating_point or dtype == compute:
        return value
    return f"{value}{_by_float32(dtype, compute)}.to({TYPES[compute]})"


def as_stored(value: str, compute: torch.dtype, dtype: torch.dtype) -> str:
    if dtype in FLOAT8:
        return f"ours.to_{FLOAT8[dtype]}({value}.to(tl.float32))"
    return f"{value}{_by_float32(compute, dtype)}.to({TYPES[dtype]})"


def _by_float32(source: torch.dtype, target: torch.dtype) -> str:
    """Between float64 and the halves by way of float32, which is where Triton converts."""
    is_far = source.is_floating_point and target.is_floating_point and {source.itemsize, target.itemsize} == {2, 8}
    return ".to(tl.float32)" if is_far else ""


def literal(value: Literal) -> str:
    number = value.value
    if isinstance(number, float) and (number != number or number in (float("inf"), -float("inf"))):
        return f'float("{number}")'
    return value.text


def as_written(graph: Graph, problem: Problem) -> Graph:
    """What there is code for: formulas may have a shorter form, and what only the longer one names is not there."""
    return shortened(graph) if problem.is_half else graph


def lines(
    graph: Graph, problem: Problem, second: Mapping[str, str] = MappingProxyType({}), loaded: int = 0
) -> list[str]:
    """One for each node of the graph as it is written. `second`: what nodes are at the second visit of a tile, which then
    has more values than were `loaded`."""
    dtypes = dtypes_of(graph, problem)
    graph = as_written(graph, problem)
    found = []
    for node in graph.nodes:
        template = TRITON.get(node.operator, "") if not is_cast(node.operator) else ""
        if problem.is_half:
            kind = "erf_beside_one" if node.operator == "erf" and _is_beside_one(node, graph) else node.operator
            template = TRITON_HALF.get(kind, template)
        expression = _expression(node, template, dtypes, problem)
        if node.name in second:
            expression = f"{second[node.name]} if len(values) > {loaded} else {expression}"
        found.append(f"{node.name} = {expression}")
    return found


def _is_beside_one(erf: Node, graph: Graph) -> bool:
    """As in gelu: all that reads it adds one, or minus one, so that its relative error is nobody's."""
    users = [node for node in graph.nodes if erf.name in node.args]
    ones = (-1, 1)
    are_sums = all(
        node.operator == "add" and any(isinstance(a, Literal) and a.value in ones for a in node.args) for node in users
    )
    return are_sums and erf.name not in graph.outputs


def dtypes_of(graph: Graph, problem: Problem) -> dict[str, torch.dtype]:
    """Inside the kernel, of a graph's inputs and nodes."""
    dtypes = dict.fromkeys(graph.inputs, problem.compute)
    for i, operand in enumerate(problem.operands):
        if not operand.dtype.is_floating_point:
            dtypes[operand_name(i)] = operand.dtype
    for node in graph.nodes:
        dtypes[node.name] = problem.compute if node.dtype.is_floating_point else node.dtype
    return dtypes


def _expression(node: Node, template: str, dtypes: dict[str, torch.dtype], problem: Problem) -> str:
    compute = problem.compute
    if is_cast(node.operator):
        return _cast(node, dtypes, compute)
    own = [dtypes[arg] for arg in node.args if isinstance(arg, str)]
    if node.operator == "keep":
        seed, offset, threshold, scale, stream = node.args
        assert isinstance(scale, Literal)
        # Of a norm by channel a tile may begin at any column
        is_by_four = problem.cols_divisor % WORDS == 0 and not problem.norm.is_by_channel
        return template.format(seed, offset, threshold, _number(scale, template, True, compute), stream, is_by_four)
    common = common_dtype(node, own, compute)
    args = []
    for k, arg in enumerate(node.args):
        is_condition = node.operator == "where" and k == 0
        if not isinstance(arg, str):
            args.append(_number(arg, template, common.is_floating_point, compute))
        elif is_condition or dtypes[arg] == common:
            args.append(arg)
        else:
            args.append(f"{arg}.to({TYPES[common]})")
    return template.format(*args)


def common_dtype(node: Node, own: list[torch.dtype], compute: torch.dtype) -> torch.dtype:
    """What an operator computes in: the dtype of its result, or if that is a boolean, what its arguments promote to."""
    if node.dtype != torch.bool:
        return compute if node.dtype.is_floating_point else node.dtype
    common = own[0] if node.operator != "where" else torch.bool
    for dtype in own if node.operator != "where" else ():
        common = torch.promote_types(common, dtype)
    is_float = common.is_floating_point or any(isinstance(a, Literal) and isinstance(a.value, float) for a in node.args)
    return compute if is_float else common


def _number(value: Literal, template: str, is_float: bool, compute: torch.dtype) -> str:
    """Triton takes a bare number for a float32, except beside a tensor in an arithmetic operator."""
    text = literal(value)
    if not is_float or ("(" not in template and compute == torch.float32):
        return f"({text})" if text.startswith("-") else text
    return f"tl.full((1, 1), {text}, {TYPES[compute]})"


def _cast(node: Node, dtypes: dict[str, torch.dtype], compute: torch.dtype) -> str:
    """Rounds to the dtype; a floating result is then in the dtype of computation again."""
    (arg,) = node.args
    text = arg if isinstance(arg, str) else f"tl.full((1, 1), {literal(arg)}, {TYPES[compute]})"
    source = dtypes[arg] if isinstance(arg, str) else compute
    target = node.dtype
    if target in FLOAT8:
        return f"ours.by_way_of_{FLOAT8[target]}({text}.to(tl.float32)).to({TYPES[compute]})"
    if target == torch.bool:
        return f"{text} != 0"
    if not target.is_floating_point:
        return f"{text}.to({TYPES[target]})"
    if target.itemsize >= compute.itemsize:
        return text if source == compute else f"{text}.to({TYPES[compute]})"
    if not source.is_floating_point:  # by way of float32, as PyTorch does
        text, source = f"{text}.to(tl.float32)", torch.float32
    return f"{text}{_by_float32(source, target)}.to({TYPES[target]}){_by_float32(target, compute)}.to({TYPES[compute]})"


def is_tile(value: str, graph: Graph, problem: Problem) -> bool:
    """Whether a value varies by row and by column, so that it has the shape of a tile."""
    reach: dict[str, tuple[bool, bool]] = dict.fromkeys(("xhat", "c", "grad_c"), (True, True))
    for i, operand in enumerate(problem.operands):
        reach[operand_name(i)] = (operand.axes in BY_ROW, operand.axes in (*TILES, COLUMN))
    if isinstance(problem, BackwardProblem):
        reach |= dict.fromkeys(map(grad_output_name, range(len(problem.grad_outputs))), (True, True))

    def of(arg: Value) -> tuple[bool, bool]:
        return reach[arg] if isinstance(arg, str) else (False, False)

    for node in graph.nodes:
        found = [of(arg) for arg in node.args]
        is_drawn = node.operator == "keep"
        reach[node.name] = (is_drawn or any(r for r, _ in found), is_drawn or any(c for _, c in found))
    return all(of(value))


def is_finite_where_masked(*graphs: Graph) -> bool:
    """Whether lanes without an element, whose operands are zero, cannot become NaN."""
    return all(node.operator in TOTAL for graph in graphs for node in graph.nodes)


def is_zero_where_masked(gradient: Graph, prologue: Graph) -> bool:
    """Whether the gradients of lanes without an element, where those that are given are zero, are zero whatever xhat is
    there. It may be far from zero, but the powers of it that few products make are finite."""
    products = sum(node.operator == "mul" for node in gradient.nodes)
    return not prologue.nodes and products <= 4 and all(node.operator in TAME for node in gradient.nodes)
