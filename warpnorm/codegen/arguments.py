"""The arguments of kernels as the compiler is told of them: which are pointers, and what divides addresses, strides and
sizes. Triton's own guesses play no part: it is what the problem says."""

from collections.abc import Sequence
from typing import Any

import torch

from warpnorm.codegen.kernel import Argument
from warpnorm.plan import grid
from warpnorm.plan.plan import Plan
from warpnorm.problem import LARGEST_CLASS, NUMBER, VECTOR_BYTES, BackwardProblem, Operand, Problem

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "u8",  # their bits
    torch.float8_e5m2: "u8",
}
ALIGNED = VECTOR_BYTES  # PyTorch's allocators align what we allocate ourselves


def of_pieces(problem: Problem, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of pattern `held`, but for eps and running statistics."""
    number = number_type(problem)
    named = ("operands", "outputs", "gradients", "merged_ptrs", "partials")
    return {
        **{name: arguments[name] for name in named if name in arguments},
        "mailbox": Argument("*i64", ALIGNED),
        "statistic_ptrs": arguments["statistic_ptrs"],
        "strides": arguments["strides"],
        "sizes": arguments["sizes"],
        **({"rows": arguments["rows"]} if isinstance(problem, BackwardProblem) else {}),
        "statistics": Argument(number),
        "pieces": Argument(number),
        "inner": Argument(number),
        "cols": arguments["cols"],
    }


def with_mailbox(arguments: dict[str, Any]) -> dict[str, Any]:
    """Before the statistics."""
    names = list(arguments)
    before = names[: names.index("statistic_ptrs")]
    return {name: arguments[name] for name in before} | {"mailbox": Argument("*i64", ALIGNED)} | arguments


def of_lines(problem: Problem, plan: Plan, arguments: dict[str, Any], tensors: Sequence[Operand]) -> dict[str, Any]:
    """The arguments, words for what programs tell each other, and where the lines lie."""
    named = ("operands", "outputs", "gradients", "merged_ptrs", "partials")
    word = Argument(f"*i{8 * problem.compute.itemsize}", ALIGNED)
    pair = (word, word) if problem.has_tasks else ()
    is_backward = isinstance(problem, BackwardProblem)
    more = (word,) * len(arguments["merged_ptrs"]) if is_backward else pair[: problem.has_long_mantissas]
    geometry = geometry_of(problem, tensors)
    offset = number_type(problem)
    divisor = min(problem.rows_divisor, plan.block_rows)
    layout = {"block_stride": divisor, "limit": problem.rows_divisor, "unit_stride": plan.block_rows}
    return {
        **{name: arguments[name] for name in named if name in arguments},
        "piece_ptrs": pair + more,
        "row_ptrs": pair,
        "statistic_ptrs": arguments["statistic_ptrs"],
        "strides": geometry["strides"],
        "sizes": geometry["sizes"],
        "rows": Argument(offset, problem.rows_divisor),
        "statistics": Argument("i64"),
        "layout": tuple(Argument(offset, layout.get(name, 1)) for name in grid.Layout._fields),
        "order": tuple(Argument("i32") for _ in grid.Order._fields),
        "reciprocals": (Argument("u32"), Argument("i32")) * 5,
        "cols": Argument(offset, geometry["cols"].divisor),
        "spans": (Argument(offset, plan.block_cols), Argument(offset, plan.block_cols), Argument(offset)),
        "first_tasks": tuple(Argument(offset) for _ in range(5)),
    }


def pointers(problem: Problem, operands: Sequence[Operand]) -> tuple[Argument, ...]:
    """Where rows begin anywhere, and each element is moved alone or beside few others, nobody is told that a weight lies
    better: threads would have 8 neighbours of it each, and the same columns of a row, lane by lane 16 bytes apart."""
    is_told = problem.has_vectors or problem.norm.is_by_channel

    def told(operand: Operand) -> int:
        most = VECTOR_BYTES if is_told else problem.neighbours * operand.dtype.itemsize if problem.neighbours > 1 else 1
        return min(operand.alignment, most)

    return tuple(
        Argument(TYPES[problem.compute if operand.dtype.is_floating_point else operand.dtype])
        if operand.axes == NUMBER
        else Argument("*" + TYPES[operand.dtype], told(operand))
        for operand in operands
    )


def statistics(problem: Problem) -> tuple[Argument, ...]:
    norm = problem.norm
    names = norm.saved if isinstance(problem, BackwardProblem) else norm.statistics
    return tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in names)


def geometry_of(problem: Problem, tensors: Sequence[Operand], has_groups: bool = False) -> dict[str, Any]:
    strides = sorted(
        {stride for tensor in tensors for stride in tensor.row_strides + tensor.col_strides if stride.literal is None},
        key=lambda stride: stride.slot,
    )
    of_rows = number_type(problem)
    has_one_axis = all(len(tensor.row_strides) == 1 for tensor in tensors)
    of_sizes = of_rows if problem.norm.is_by_channel or not has_one_axis else column_type(problem)
    return {
        "strides": tuple(Argument("i64", stride.divisor) for stride in strides),
        "sizes": tuple(Argument(of_sizes, divisor) for divisor in problem.size_divisors),
        "rows": Argument(of_rows, problem.rows_divisor),
        **({"groups": Argument(of_rows)} if has_groups else {}),
        "cols": Argument(column_type(problem), problem.cols_divisor),
    }


def number_type(problem: Problem) -> str:
    return "i64" if problem.has_long_numbers else "i32"


def column_type(problem: Problem) -> str:
    return "i32" if problem.cols_class <= LARGEST_CLASS else "i64"
