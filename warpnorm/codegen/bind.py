"""A hand-written kernel, the functions generated for a problem, and a plan become something to launch: a kernel
compiled for a target (no GPU needed), or an interpreted one. Triton's own guesses about arguments play no part: what
the compiler is told about alignment and divisors is what the problem says."""

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from warpnorm.codegen import cache, pointwise
from warpnorm.kernels.column import (
    column_backward_kernel,
    column_forward_kernel,
    column_merge_kernel,
    column_statistics_kernel,
    column_sums_kernel,
)
from warpnorm.kernels.column_sum import column_sum_kernel
from warpnorm.kernels.long_row import long_row_backward_kernel, long_row_forward_kernel, long_row_sums_kernel
from warpnorm.kernels.row import row_backward_kernel, row_forward_kernel
from warpnorm.kernels.team import team_backward_kernel
from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN, LONG_ROW, ROW, TEAM, Plan
from warpnorm.problem import (
    LARGEST_CLASS,
    NUMBER,
    VECTOR_BYTES,
    BackwardProblem,
    ForwardProblem,
    Operand,
    Problem,
)

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
COMPUTE = {torch.float64: tl.float64, torch.float32: tl.float32}
ALIGNED = VECTOR_BYTES  # PyTorch's allocators align what we allocate ourselves

_lock = threading.RLock()


def _once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Each kernel is compiled once, also when two threads ask for it at the same time."""
    built: dict[tuple[Any, ...], BoundKernel | None] = {}

    @wraps(build)
    def get(*key: Any) -> BoundKernel | None:
        if key not in built:
            with _lock:
                if key not in built:
                    built[key] = build(*key)
        return built[key]

    get.built = built  # type: ignore[attr-defined]
    return get


class BoundKernel:
    """One kernel for one target, loaded on the GPU that is current at its first launch."""

    def __init__(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        constants: dict[str, Any],
        plan: Plan,
        device: Device,
        has_fused_multiply_add: bool = True,
    ) -> None:
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.kernel, self.constants = kernel, constants
        self.compiled: Any = None
        if not device.is_interpreter:
            signature = {name: _types(argument) for name, argument in arguments.items()}
            signature |= dict.fromkeys(constants, "constexpr")
            source = ASTSource(kernel, signature, constants, _attributes(arguments))
            target = GPUTarget(device.backend, device.arch, device.warp_size)
            options = {"num_warps": plan.warps, "enable_fp_fusion": has_fused_multiply_add}
            if plan.pattern == TEAM:
                options["launch_cooperative_grid"] = True  # all programs run at the same time, or the launch fails
            self.compiled = triton.compile(source, target=target, options=options)

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """The device of the arguments must be the current one."""
        if self.compiled is None:
            self.kernel[grid](*arguments, **self.constants)
        else:
            self.compiled[(*grid, 1, 1)[:3]](*arguments, *self.constants.values())


class Argument:
    """A kernel's argument as the compiler sees it: its type, and a number that divides it."""

    __slots__ = ("divisor", "type")

    def __init__(self, type: str, divisor: int = 1) -> None:
        self.type, self.divisor = type, divisor


@_once
def forward(problem: ForwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel:
    functions = cache.load(pointwise.forward_source(problem))
    arguments = {
        "operands": _pointers(problem, problem.operands),
        "outputs": _pointers(problem, problem.outputs),
        "statistic_ptrs": _statistics(problem),
        **_geometry(problem, problem.operands + problem.outputs),
        "eps": Argument(TYPES[problem.compute]),
    }
    if plan.pattern == COLUMN:
        arguments = _lines(problem, plan, arguments, problem.operands + problem.outputs)
        constants = _functions(functions, "load_columns", "load_lines", "load_tiles", "prologue", "epilogue", "store")
        constants |= _walk(problem, plan) | {"HAS_STATISTIC": problem.norm.is_computed}
        return BoundKernel(column_forward_kernel, arguments, constants, plan, device)
    constants = _functions(functions, "load_columns", "load_rows", "prologue", "epilogue", "store")
    constants |= {"IS_CENTERED": problem.norm.is_centered, "IS_EXACT": _is_exact(problem, plan)}
    if plan.pattern == ROW:
        constants |= {"BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols, "STAGES": plan.stages}
        constants |= {"IS_PERSISTENT": plan.programs > 0, "IS_CORRECTED": problem.has_long_mantissas}
        return BoundKernel(row_forward_kernel, arguments, constants, plan, device)
    constants |= {"COMPUTE": COMPUTE[problem.compute], "BLOCK_COLS": plan.block_cols, "STAGES": plan.stages}
    return BoundKernel(long_row_forward_kernel, arguments, constants, plan, device)


@_once
def backward(problem: BackwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel:
    constants = _functions(
        cache.load(pointwise.backward_source(problem)), "load_columns", "load_rows", "row_numbers", "prologue",
        "epilogue_vjp", "prologue_vjp", "store", "store_row_sums", "accumulate", "store_partials",
    )  # fmt: skip
    constants |= {
        "ACCUMULATORS": len(problem.accumulated),
        "NEEDS_SUMS": problem.needs_grad_xhat,
        "IS_CENTERED": problem.norm.is_centered,
        "COMPUTE": COMPUTE[problem.compute],
    }
    written = tuple(problem.gradients[i] for i in problem.written)
    operands = problem.operands + problem.grad_outputs
    arguments = {
        "operands": _pointers(problem, operands),
        "gradients": _pointers(problem, written),
        "partials": tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in problem.reduced),
    }
    geometry = {"statistic_ptrs": _statistics(problem), **_geometry(problem, operands + problem.gradients, True)}
    constants |= {"BLOCK_COLS": plan.block_cols, "IS_EXACT": _is_exact(problem, plan), "STAGES": plan.stages}
    if plan.pattern == COLUMN:
        constants = _functions(
            cache.load(pointwise.backward_source(problem)), "load_columns", "load_lines", "load_tiles", "prologue",
            "epilogue_vjp", "prologue_vjp", "store", "accumulate_lines", "store_lines",
        )  # fmt: skip
        constants |= _walk(problem, plan) | {"HAS_STATISTIC": problem.norm.is_computed, "REDUCED": len(problem.reduced)}
        constants["NEEDS_SUMS"] = problem.needs_grad_xhat
        sums = {"sum_ptrs": _pair(problem) if _has_sums(problem) else ()}
        arguments = _lines(problem, plan, arguments | sums | geometry, operands + problem.gradients)
        return BoundKernel(column_backward_kernel, arguments, constants, plan, device)
    if plan.pattern == TEAM:
        constants |= {"SPLITS": plan.splits, "CHUNKS": plan.chunks, "HAS_GROUPS": problem.has_groups}
        mailbox = {"mailbox": Argument("*i64", ALIGNED)}
        return BoundKernel(team_backward_kernel, arguments | mailbox | geometry, constants, plan, device)
    if plan.pattern == ROW:
        constants |= _functions(cache.load(pointwise.backward_source(problem)), "hold")
        constants |= {"BLOCK_ROWS": plan.block_rows, "RECOMPUTES": plan.recomputes and device.backend == "cuda"}
        # The gradient of a lone column is a product minus its own mean: zero if the product is rounded both times
        is_fused = problem.cols_class > 1
        return BoundKernel(row_backward_kernel, arguments | geometry, constants, plan, device, is_fused)
    sums = {"sum_ptrs": _statistics(problem)}
    return BoundKernel(long_row_backward_kernel, arguments | sums | geometry, constants, plan, device)


@_once
def backward_sums(problem: BackwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel | None:
    """The first launch of a `long_row` or `column` backward, where the prologue needs a gradient."""
    if plan.pattern not in (LONG_ROW, COLUMN) or not _has_sums(problem):
        return None
    if plan.pattern == COLUMN:
        functions = ("load_columns", "load_lines", "load_tiles", "prologue", "epilogue_vjp")
        constants = _functions(cache.load(pointwise.backward_source(problem)), *functions) | _walk(problem, plan)
        operands = problem.operands + problem.grad_outputs
        arguments = {"operands": _pointers(problem, operands), "piece_ptrs": _pair(problem)}
        arguments |= {"statistic_ptrs": _statistics(problem)}
        arguments = _lines(problem, plan, arguments, operands + problem.gradients)
        return BoundKernel(column_sums_kernel, arguments, constants, plan, device)
    constants = _functions(
        cache.load(pointwise.backward_source(problem)), "load_columns", "load_rows", "row_numbers", "prologue",
        "epilogue_vjp",
    )  # fmt: skip
    constants |= {
        "IS_CENTERED": problem.norm.is_centered,
        "COMPUTE": COMPUTE[problem.compute],
        "BLOCK_COLS": plan.block_cols,
        "IS_EXACT": _is_exact(problem, plan),
        "STAGES": plan.stages,
    }
    operands = problem.operands + problem.grad_outputs
    arguments = {
        "operands": _pointers(problem, operands),
        "sum_ptrs": _statistics(problem),
        "statistic_ptrs": _statistics(problem),
        **_geometry(problem, operands + problem.gradients),
    }
    return BoundKernel(long_row_sums_kernel, arguments, constants, plan, device)


@_once
def line_statistics(problem: ForwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel | None:
    """The first launch of a `column` forward that has a statistic to compute."""
    if plan.pattern != COLUMN or not problem.norm.is_computed:
        return None
    functions = cache.load(pointwise.forward_source(problem))
    constants = _functions(functions, "load_columns", "load_lines", "load_tiles", "prologue")
    constants |= _walk(problem, plan)
    arguments = {"operands": _pointers(problem, problem.operands), "piece_ptrs": _pair(problem)}
    arguments = _lines(problem, plan, arguments, problem.operands + problem.outputs, has_pieces=False)
    return BoundKernel(column_statistics_kernel, arguments, constants, plan, device)


def row_statistics(problem: ForwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel | None:
    """The second."""
    if not problem.norm.is_computed:
        return None
    return _merge(problem.compute, len(problem.norm.statistics), plan, device, index)


@_once
def _merge(compute: torch.dtype, statistics: int, plan: Plan, device: Device, index: int) -> BoundKernel:
    pointer, number = Argument("*" + TYPES[compute], ALIGNED), Argument("i64")
    arguments: dict[str, Any] = {"piece_ptrs": (pointer, pointer), "statistic_ptrs": (pointer,) * statistics}
    arguments |= dict.fromkeys(("rows", "pieces", "inner_rows", "cols", "part_cols"), number)
    arguments["eps"] = Argument(TYPES[compute])
    constants = {"COMPUTE": COMPUTE[compute], "STATISTICS": statistics}
    constants |= {"BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols}
    return BoundKernel(column_merge_kernel, arguments, constants, plan, device)


def column_sum(problem: BackwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel | None:
    """The last launch of a backward, where a gradient is a sum."""
    return gradient_sums(problem, problem.reduced, plan, device, index) if problem.reduced else None


def gradient_sums(
    problem: BackwardProblem, which: tuple[int, ...], plan: Plan, device: Device, index: int
) -> BoundKernel:
    dtypes = tuple(problem.gradients[i].dtype for i in which)
    return _column_sum(problem.compute, dtypes, plan, device, index)


def piece_sums(problem: BackwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel:
    """The sums over rows of a norm by channel, from those of their pieces."""
    return _column_sum(problem.compute, (problem.compute,) * 2, plan, device, index)


@_once
def _column_sum(
    compute: torch.dtype, dtypes: tuple[torch.dtype, ...], plan: Plan, device: Device, index: int
) -> BoundKernel:
    arguments = {
        "partials": tuple(Argument("*" + TYPES[compute], ALIGNED) for _ in dtypes),
        "sums": tuple(Argument("*" + TYPES[dtype], ALIGNED) for dtype in dtypes),
        "groups": tuple(Argument("i64") for _ in dtypes),
        "heights": tuple(Argument("i64") for _ in dtypes),
        "widths": tuple(Argument("i64") for _ in dtypes),
        "blocks": Argument("i64"),
    }
    constants = {
        "COUNT": len(dtypes),
        "COMPUTE": COMPUTE[compute],
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
    }
    return BoundKernel(column_sum_kernel, arguments, constants, plan, device)


def _is_exact(problem: Problem, plan: Plan) -> bool:
    """Whether the blocks of columns together are as wide as a row."""
    if plan.pattern == LONG_ROW:
        return problem.is_exact and plan.block_cols <= problem.cols_class
    return problem.is_exact and plan.block_cols * plan.chunks * plan.splits == problem.cols_class


def _has_sums(problem: BackwardProblem) -> bool:
    return problem.needs_grad_xhat and problem.norm.is_computed


def _walk(problem: Problem, plan: Plan) -> dict[str, Any]:
    """The constants of every walk by tiles of lines."""
    constants = {"COMPUTE": COMPUTE[problem.compute], "BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols}
    constants |= {"IS_WALKED": plan.is_walked, "STAGES": plan.stages, "HAS_PIECES": problem.has_pieces}
    constants["IS_CORRECTED"] = problem.has_long_mantissas
    constants["IS_EXACT"] = problem.cols_divisor % plan.block_cols == 0
    return constants | {"HAS_FULL_BLOCKS": problem.rows_divisor % plan.block_rows == 0}


def _lines(
    problem: Problem, plan: Plan, arguments: dict[str, Any], tensors: Sequence[Operand], has_pieces: bool = True
) -> dict[str, Any]:
    """The arguments, and where the lines lie."""
    first = {k: v for k, v in arguments.items() if k not in ("strides", "sizes", "rows", "groups", "cols", "eps")}
    geometry = _geometry(problem, tensors)
    pieces = ("pieces", "inner_rows") if has_pieces else ("inner_rows",)
    between = {name: Argument("i64") for name in pieces}
    first |= {k: geometry[k] for k in ("strides", "sizes", "rows")} | between
    return first | {"cols": geometry["cols"], "part_cols": Argument("i64", plan.block_cols)}


def _pair(problem: Problem) -> tuple[Argument, ...]:
    """Of a mean and squares, or of the two sums."""
    return (Argument("*" + TYPES[problem.compute], ALIGNED),) * 2


def _functions(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name.upper(): getattr(module, name) for name in names}


def _pointers(problem: Problem, operands: Sequence[Operand]) -> tuple[Argument, ...]:
    return tuple(
        Argument(TYPES[problem.compute if operand.dtype.is_floating_point else operand.dtype])
        if operand.axes == NUMBER
        else Argument("*" + TYPES[operand.dtype], ALIGNED if operand.is_aligned else 1)
        for operand in operands
    )


def _statistics(problem: Problem) -> tuple[Argument, ...]:
    return tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in problem.norm.statistics)


def _geometry(problem: Problem, tensors: Sequence[Operand], has_groups: bool = False) -> dict[str, Any]:
    strides = sorted(
        {stride for tensor in tensors for stride in tensor.row_strides + tensor.col_strides if stride.literal is None},
        key=lambda stride: stride.slot,
    )
    return {
        "strides": tuple(Argument("i64", stride.divisor) for stride in strides),
        "sizes": tuple(Argument("i64", divisor) for divisor in problem.size_divisors),
        "rows": Argument("i64", problem.rows_divisor),
        **({"groups": Argument("i64")} if has_groups else {}),
        "cols": Argument("i32" if problem.cols_class <= LARGEST_CLASS else "i64", problem.cols_divisor),
    }


def _types(argument: Any) -> Any:
    return tuple(map(_types, argument)) if isinstance(argument, tuple) else argument.type


def _attributes(arguments: dict[str, Any]) -> dict[tuple[int, ...], list[list[Any]]]:
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, argument in enumerate(arguments.values()):
        paths = {(i, k): a for k, a in enumerate(argument)} if isinstance(argument, tuple) else {(i,): argument}
        for path, leaf in paths.items():
            if leaf.divisor > 1:
                attributes[path] = [["tt.divisibility", leaf.divisor]]
    return attributes
