"""A hand-written kernel, the functions generated for a problem, and a plan become something to launch. Triton's own guesses
about arguments play no part: what the compiler is told about alignment and divisors is what the problem says."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from warpnorm.codegen import along, cache, pointwise, rewritten
from warpnorm.codegen.arguments import (
    ALIGNED,
    TYPES,
    geometry_of,
    of_lines,
    of_pieces,
    pointers,
    statistics,
    with_mailbox,
)
from warpnorm.codegen.kernel import Argument, BoundKernel
from warpnorm.kernels.blocks import keep_nothing, prefetch_nothing
from warpnorm.kernels.column import column_backward_kernel, column_forward_kernel
from warpnorm.kernels.column_sum import column_sum_kernel
from warpnorm.kernels.held import held_backward_kernel, held_forward_kernel
from warpnorm.kernels.long_row import long_row_backward_kernel, long_row_forward_kernel, long_row_sums_kernel
from warpnorm.kernels.pointwise import as_it_is, rounded
from warpnorm.kernels.row import row_backward_kernel, row_forward_kernel
from warpnorm.kernels.team import ask_for, ask_nothing, team_backward_kernel, team_forward_kernel
from warpnorm.locks import Lock
from warpnorm.plan import grid, needs
from warpnorm.plan.device import Device
from warpnorm.plan.grid import LARGEST_MERGE, merge_rows
from warpnorm.plan.plan import ALL, COLUMN, FIRST, HELD, JOINT, LONG_ROW, ROW, TEAM, Plan
from warpnorm.problem import (
    BackwardProblem,
    ForwardProblem,
    Problem,
    width_step,
)

COMPUTE = {torch.float64: tl.float64, torch.float32: tl.float32}
MERGED = 512  # elements of a block of rows and their pieces, at the most: others need the registers
FLOAT8_ARCH = 89  # whose instructions make float8 of float32
LARGEST_CACHE = 4096  # kernels of a kind; then the oldest goes, but for launches that have it

_lock = Lock()
_unbuilt = object()  # what was built may be nothing


def _once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Each kernel is compiled once, also when two threads ask for it at the same time."""
    built: dict[tuple[Any, ...], Any] = {}

    @wraps(build)
    def get(*key: Any) -> BoundKernel | None:
        found = built.get(key, _unbuilt)
        if found is _unbuilt:
            with _lock:
                found = built.get(key, _unbuilt)
                if found is _unbuilt:
                    found = build(*key)
                    while len(built) >= LARGEST_CACHE:
                        del built[next(iter(built))]
                    built[key] = found
        return found

    get.built = built  # type: ignore[attr-defined]
    return get


Load = Callable[[str], ModuleType]


def _or_otherwise(build: Callable[..., Any]) -> Callable[..., Any]:
    """Triton moves conversions of layouts to before values are widened or broadcast, and may get its own code out of order,
    which it then refuses (triton-lang/triton issues 6733 and 8257). What it does not know to be widening it leaves where it
    is; and where it does not know which addresses follow each other, as where x is strided and its results are not, there is
    nothing to convert. Every process compiles such a kernel twice or three times, and sees what Triton says of each refusal;
    how fast the last is has not been measured. Where a held row is computed twice, it is widened so at once: LLVM widens all
    of a bfloat16 row before it begins, and backward of BatchNorm of 32 x 64 x 112 x 112 would have 656 bytes of every thread
    in memory, 23 % of copy speed. `explain` shows the source as it was written."""

    @wraps(build)
    def attempt(problem: Problem, plan: Plan, device: Device, index: int) -> Any:
        def load(source: str) -> ModuleType:
            return cache.load(rewritten.at_once(source) if has_float8 else source)

        def load_apart(source: str) -> ModuleType:
            return load(rewritten.widened_apart(source, problem))

        def load_unordered(source: str) -> ModuleType:
            return load_apart(rewritten.unordered(source))

        has_float8 = device.backend == "cuda" and int(device.arch) >= FLOAT8_ARCH
        ways = [load, load_apart, load_unordered] if device.backend == "cuda" else [load]
        if plan.pattern == HELD and plan.recomputes and device.backend == "cuda":
            ways.remove(load)
        elif device.backend == "cuda" and _is_quicker_apart(problem, plan):
            ways = [load_apart, load, load_unordered]
        *first, last = ways
        for way in first:
            try:
                return build(problem, plan, device, way)
            except RuntimeError as error:
                if "PassManager" not in str(error):
                    raise
        return build(problem, plan, device, last)

    return attempt


def _is_quicker_apart(problem: Problem, plan: Plan) -> bool:
    """Whether bfloat16 is better widened by pairs: the upper of two takes one instruction then, of the compiler two. In
    microseconds, gelu(x + b) -> RMSNorm backward at 1024, 4096 and 16384: 210, 231 and 319, and 218, 244 and 331 otherwise;
    h = x + r -> RMSNorm at 16384 477 and 507; LayerNorm at 131072 147 and 149. Not where a row lies in registers as it does
    in memory: LayerNorm at 65536 151 and 149, RMSNorm backward at 16384 207 and 203, GroupNorm 72 and 71; nor where a team
    carries it along, as single halves. Across lines it was not timed by itself."""
    has_vectors = problem.has_vectors or (plan.pattern == COLUMN and all(o.has_vectors_across for o in problem.tiles))
    if not has_vectors or all(operand.dtype != torch.bfloat16 for operand in problem.varying):
        return False
    if plan.pattern == ROW:
        return bool(problem.prologue.nodes)
    return plan.pattern in (TEAM, COLUMN) and not plan.keeps


def _is_fused(problem: Problem, plan: Plan, few_rows: int) -> bool:
    """Whether products may be fused with sums. Not of a lone column: its gradient is a product minus its own mean, which is
    zero if the product is rounded both times; and c minus its own mean is, if c is rounded as forward did. Nor where few
    rows come in smaller tiles and something is computed of them first: see `_round`."""
    return problem.cols_class > 1 and (few_rows == plan.block_rows or not problem.prologue.nodes)


def _can_chain(device: Device) -> bool:
    """Whether launches can be made ready before the one before them ends, which they wait for themselves. LayerNorm of 128 x
    1024 takes 1.5 us so and 1.9 otherwise, its backward 3.8 and 4.4. What runs by teams is launched in another way."""
    return device.backend == "cuda" and int(device.arch) >= 90


@_once
@_or_otherwise
def forward(problem: ForwardProblem, plan: Plan, device: Device, load: Load) -> BoundKernel:
    functions = load(pointwise.forward_source(problem))
    arguments = {
        "operands": pointers(problem, problem.operands),
        "outputs": pointers(problem, problem.outputs),
        "statistic_ptrs": statistics(problem),
        **geometry_of(problem, problem.operands + problem.outputs),
        "eps": Argument(TYPES[problem.compute]),
    }
    running = {"running_ptrs": tuple(Argument("*" + TYPES[dtype]) for dtype in problem.running)}
    wide = torch.float64 if torch.float64 in problem.running else problem.compute
    running["factors"] = tuple(Argument(TYPES[wide]) for _ in range(3 if problem.running else 0))
    if plan.pattern == COLUMN:
        arguments = of_lines(problem, plan, arguments, problem.operands + problem.outputs) | {"eps": arguments["eps"]}
        arguments |= running
        constants = _functions(functions, "load_columns", "load_lines", "load_tiles", "prologue", "epilogue")
        constants["STORE"] = functions.stream if plan.streams else functions.store
        constants |= _walk(problem, plan, device) | {"STATISTICS": len(problem.norm.statistics)}
        constants["HAS_RUNNING"] = bool(problem.running)
        return BoundKernel(column_forward_kernel, arguments, constants, plan, device)
    constants = _functions(functions, "load_columns", "load_rows", "prologue", "epilogue", "store")
    if plan.pattern == HELD:
        arguments = of_pieces(problem, arguments) | {"eps": arguments["eps"]} | running
        constants |= _functions(functions, "hold", "load_lines", "pack", "unpack", "nothing")
        constants |= _held(problem, plan, device)
        constants |= {"STATISTICS": len(problem.norm.statistics), "HAS_RUNNING": bool(problem.running)}
        constants["IS_CORRECTED"] = problem.has_long_mantissas
        return BoundKernel(held_forward_kernel, arguments, constants, plan, device)
    constants |= {"IS_CENTERED": problem.norm.is_centered, "IS_EXACT": _is_exact(problem, plan)}
    if plan.pattern == ROW:
        constants |= {"BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols, "STAGES": plan.stages}
        constants |= _functions(functions, "hold")
        constants |= {"CHUNKS": plan.chunks, "FULL_CHUNKS": _full_chunks(problem, plan), "IS_LATE": plan.late}
        # Mean and M2 in one visit, where a row would otherwise be widened once more
        is_short = plan.recomputes and plan.block_rows == 1 and not problem.has_long_mantissas
        is_at_once = is_short and problem.norm.is_centered and _is_exact(problem, plan)
        constants |= {"RECOMPUTES": _recomputes(plan, device), "IS_AT_ONCE": is_at_once}
        constants |= {"IS_PERSISTENT": plan.programs > 0, "IS_CORRECTED": problem.has_long_mantissas}
        constants |= {"KEEPS_VARIANCE": problem.norm.keeps_variance, "HAS_RUNNING": bool(problem.running)}
        constants |= {"IS_CHAINED": _can_chain(device), "FEW_ROWS": grid.few_rows(plan)}
        is_fused = _is_fused(problem, plan, constants["FEW_ROWS"])
        return BoundKernel(row_forward_kernel, arguments | running, constants, plan, device, is_fused)
    if plan.pattern == TEAM:
        constants |= _functions(functions, "hold")
        constants |= {"BLOCK_COLS": plan.block_cols, "CHUNKS": plan.chunks}
        constants |= {"SPLITS": plan.splits, "STAGES": plan.stages, "HAS_COPY": _has_copy(problem)}
        constants |= {"RECOMPUTES": _recomputes(plan, device), "IS_CORRECTED": problem.has_long_mantissas}
        constants |= _functions(functions, "pack_row", "unpack_row") | {
            "KEEPS": plan.keeps,
            "PREFETCH": _prefetch(functions, plan),
            "ASK": ask_for if plan.asks else ask_nothing,
        }
        return BoundKernel(team_forward_kernel, with_mailbox(arguments), constants, plan, device)
    constants |= {"COMPUTE": COMPUTE[problem.compute], "BLOCK_COLS": plan.block_cols, "STAGES": plan.stages}
    return BoundKernel(long_row_forward_kernel, arguments, constants, plan, device)


@_once
@_or_otherwise
def backward(problem: BackwardProblem, plan: Plan, device: Device, load: Load) -> BoundKernel:
    constants = _functions(
        load(pointwise.backward_source(problem)), "load_columns", "load_rows", "row_numbers", "prologue",
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
        "operands": pointers(problem, operands),
        "gradients": pointers(problem, written),
        "partials": tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in problem.reduced),
    }
    geometry = {"statistic_ptrs": statistics(problem), **geometry_of(problem, operands + problem.gradients, True)}
    constants |= {"BLOCK_COLS": plan.block_cols, "IS_EXACT": _is_exact(problem, plan), "STAGES": plan.stages}
    constants["HAS_NEXT"] = bool(problem.reduced) and _can_chain(device)
    if plan.pattern == COLUMN:
        constants = _functions(
            load(pointwise.backward_source(problem)), "load_columns", "load_lines", "load_tiles", "prologue",
            "epilogue_vjp", "prologue_vjp", "add_first", "settle", "store_merged", "store_first", "store_unmerged",
            "accumulate_last", "store_last",
        )  # fmt: skip
        functions = load(pointwise.backward_source(problem))
        constants["STORE"] = functions.stream if plan.streams else functions.store
        constants |= _walk(problem, plan, device) | {"NEEDS_SUMS": problem.needs_grad_xhat}
        constants |= {"FIRST_SUMS": len(along.sums(problem).summands), "LAST_SUMS": len(problem.left_last)}
        merged = problem.merged if plan.tasks != ALL else ()
        constants["MERGED"] = len(merged)
        left = grid.left(plan, problem)
        arguments["partials"] = tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in left)
        arguments["merged_ptrs"] = pointers(problem, [problem.gradients[k] for k in merged])
        constants["IS_LINEAR"] = pointwise.is_linear(problem)
        arguments = of_lines(problem, plan, arguments | geometry, operands + problem.gradients)
        return BoundKernel(column_backward_kernel, arguments, constants, plan, device)
    if plan.pattern == HELD:
        constants = _functions(
            load(pointwise.backward_source(problem)), "load_columns", "load_lines", "load_rows", "hold", "pack", "unpack",
            "nothing", "prologue", "epilogue_vjp", "prologue_vjp", "store", "add_first", "settle", "store_merged",
            "store_first", "accumulate_last", "store_last",
        )  # fmt: skip
        constants |= {"FIRST_SUMS": len(along.sums(problem).summands), "LAST_SUMS": len(problem.left_last)}
        constants |= {"MERGED": len(problem.merged), "COMPUTE": COMPUTE[problem.compute]} | _held(problem, plan, device)
        constants |= {"IS_ALIKE": problem.is_alike, "SENT": along.sent(problem), "A_WORD": along.sums_a_word(problem)}
        arguments["merged_ptrs"] = pointers(problem, [problem.gradients[k] for k in problem.merged])
        arguments["partials"] = tuple(Argument("*" + TYPES[problem.compute], ALIGNED) for _ in problem.left)
        arguments = of_pieces(problem, arguments | geometry)
        return BoundKernel(held_backward_kernel, arguments, constants, plan, device)
    if plan.pattern == TEAM:
        constants |= {"SPLITS": plan.splits, "CHUNKS": plan.chunks, "HAS_GROUPS": problem.has_groups}
        functions = load(pointwise.backward_source(problem))
        constants |= _functions(functions, "hold") | {"KEEP": _keep(functions, device)}
        constants |= {
            "HAS_COPY": _has_copy(problem),
            "KEEPS": plan.keeps,
            "PREFETCH": _prefetch(functions, plan),
            "ASK": ask_for if plan.asks else ask_nothing,
            "IS_EARLY": plan.early,
        }
        return BoundKernel(team_backward_kernel, with_mailbox(arguments | geometry), constants, plan, device)
    if plan.pattern == ROW:
        functions = load(pointwise.backward_source(problem))
        constants |= _functions(functions, "hold") | {"KEEP": _keep(functions, device)}
        constants["ROUND"] = _round(problem, device)
        constants |= {"BLOCK_ROWS": plan.block_rows, "CHUNKS": plan.chunks}
        constants["FULL_CHUNKS"] = _full_chunks(problem, plan)
        constants["SUM_ROWS"], constants["SUM_COLS"] = grid.sum_tile(plan, problem)
        constants["FEW_ROWS"] = grid.lone_rows(plan)
        constants |= {"RECOMPUTES": _recomputes(plan, device), "IS_LIGHT": _is_light(problem)}
        constants["HAS_GROUPS"] = not problem.norm.is_by_channel  # whose lines never come in groups
        constants["IS_CHAINED"] = _can_chain(device)
        totals = [problem.gradients[i] for i in problem.reduced] if constants["SUM_COLS"] else []
        arguments["totals"] = tuple(Argument("*" + TYPES[total.dtype], ALIGNED) for total in totals)
        geometry["row_programs"] = Argument("i32")
        is_fused = _is_fused(problem, plan, constants["FEW_ROWS"])
        return BoundKernel(row_backward_kernel, arguments | geometry, constants, plan, device, is_fused)
    sums = {"sum_ptrs": statistics(problem)}
    return BoundKernel(long_row_backward_kernel, arguments | sums | geometry, constants, plan, device)


@_once
@_or_otherwise
def backward_sums(problem: BackwardProblem, plan: Plan, device: Device, load: Load) -> BoundKernel | None:
    """The first launch of a `long_row` backward, where the prologue needs a gradient."""
    if plan.pattern != LONG_ROW or not problem.has_tasks:
        return None
    constants = _functions(
        load(pointwise.backward_source(problem)), "load_columns", "load_rows", "row_numbers", "prologue",
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
        "operands": pointers(problem, operands),
        "sum_ptrs": statistics(problem),
        "statistic_ptrs": statistics(problem),
        **geometry_of(problem, operands + problem.gradients),
    }
    return BoundKernel(long_row_sums_kernel, arguments, constants, plan, device)


def column_sum(problem: BackwardProblem, plan: Plan, device: Device, index: int) -> BoundKernel | None:
    """The last launch of a backward, where a gradient is a sum."""
    return gradient_sums(problem, problem.reduced, plan, device, index) if problem.reduced else None


def gradient_sums(
    problem: BackwardProblem, which: tuple[int, ...], plan: Plan, device: Device, index: int
) -> BoundKernel:
    """Of norms by channel in float64: there are not many."""
    dtypes = tuple(problem.gradients[i].dtype for i in which)
    added = torch.float64 if problem.norm.is_by_channel else problem.compute
    return _column_sum(problem.compute, added, dtypes, plan, device, index)


@_once
def _column_sum(
    compute: torch.dtype, added: torch.dtype, dtypes: tuple[torch.dtype, ...], plan: Plan, device: Device, index: int
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
        "COMPUTE": COMPUTE[added],
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        "IS_CHAINED": _can_chain(device),
    }
    return BoundKernel(column_sum_kernel, arguments, constants, plan, device)


def _held(problem: Problem, plan: Plan, device: Device) -> dict[str, Any]:
    """The constants of pattern `held`."""
    constants = {
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        "CHUNKS": plan.chunks,
        "MOST": plan.splits,
        "A_THREAD": min(2, max(1, plan.splits // (plan.warps * device.warp_size))),
        "STAGES": plan.stages,
        "IS_AHEAD": plan.ahead > 0 and plan.splits > 1,
    }
    is_exact = problem.cols_divisor % plan.block_cols == 0
    return constants | {"FULL_CHUNKS": plan.chunks - (not is_exact), "RECOMPUTES": _recomputes(plan, device)}


def _recomputes(plan: Plan, device: Device) -> bool:
    return plan.recomputes and device.backend == "cuda"  # whose assembler what is held is written for


def _keep(functions: ModuleType, device: Device) -> Any:
    return functions.keep if device.backend == "cuda" else keep_nothing


def _round(problem: BackwardProblem, device: Device) -> Any:
    """Of the gradient of xhat, which is added up as it is. Whether a product that is read elsewhere too is fused with a sum,
    the compiler decides by what stands around it, and tiles of few rows, of many, and of those for which nobody asks for
    sums over rows would have other bits. Wider rows have one kind of tile."""
    is_product = problem.needs_grad_xhat and problem.epilogue_vjp.outputs[0] not in problem.epilogue_vjp.inputs
    is_some = is_product and device.backend == "cuda" and problem.cols_class <= grid.WIDEST_FEW
    return rounded if is_some else as_it_is


def _is_light(problem: Problem) -> bool:
    """Whether c is what lies in memory, widened, which takes fewer registers to hold."""
    return not problem.prologue.nodes and all(o.dtype.itemsize < problem.compute.itemsize for o in problem.tiles)


def _prefetch(functions: ModuleType, plan: Plan) -> Any:
    return functions.prefetch_row if plan.ahead else prefetch_nothing


def _has_copy(problem: ForwardProblem | BackwardProblem) -> bool:
    """Whether programs of a team that have all columns of their part have a walk of their own, without masks. At 50257,
    where elements are moved alone: RMSNorm 69, LayerNorm 54, backward 56 and 48; 50, 44, 44 and 40 without. Of vectors:
    LayerNorm at 128256 84 and 81, at 50304 backward 66 and 61, but at 128256 60 and 67. Not where much is computed: it takes
    as long again to compile, 8 seconds of silu(x) * r -> LayerNorm at 20000 backward, where 2 will do."""
    return not problem.has_vectors or needs.is_quick(problem)


def _full_chunks(problem: Problem, plan: Plan) -> int:
    """How many blocks of columns no row of the problem has less of: it has more columns than the width less a step."""
    least = problem.width - width_step(problem.norm, problem.cols_class)
    return plan.chunks if _is_exact(problem, plan) else least // plan.block_cols


def _is_exact(problem: Problem, plan: Plan) -> bool:
    """Whether the blocks of columns together are as wide as a row."""
    if plan.pattern == LONG_ROW:
        return problem.is_exact and plan.block_cols <= problem.cols_class
    return problem.is_filled and plan.block_cols * plan.chunks * plan.splits == problem.width


def _walk(problem: Problem, plan: Plan, device: Device) -> dict[str, Any]:
    """The constants of every walk by tiles of lines."""
    if device.backend == "hip" and problem.has_tasks and plan.tasks == ALL:
        raise ValueError("on AMD's GPUs programs cannot wait for each other: each task needs a launch of its own")
    constants = {"COMPUTE": COMPUTE[problem.compute], "BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols}
    constants |= {"IS_WALKED": plan.is_walked, "STAGES": plan.stages, "HAS_PIECES": problem.has_pieces}
    constants |= {"IS_CORRECTED": problem.has_long_mantissas, "HAS_STATISTIC": problem.norm.is_computed}
    is_joint, is_exact = plan.tasks == JOINT, problem.cols_divisor % plan.block_cols == 0
    merge_cols = LARGEST_MERGE if is_joint else min(MERGED, 8 * plan.warps**3) // merge_rows(plan)
    constants |= {"MERGE_ROWS": merge_rows(plan), "MERGE_COLS": merge_cols, "MERGES": is_joint}
    # The interpreter runs programs one after another, unless it has teams
    constants["WAITS"] = plan.tasks == ALL and (device.has_teams or not device.is_interpreter)
    constants["HAS_FIRST"] = problem.has_tasks and plan.tasks in (ALL, FIRST)
    constants |= {"HAS_LAST": plan.tasks != FIRST, "BY_UNITS": plan.by_units, "IS_CHAINED": _can_chain(device)}
    constants |= {"IS_EXACT": is_exact, "TOGETHER": plan.together if is_exact else 1}
    return constants | {"HAS_FULL_BLOCKS": problem.rows_divisor % plan.block_rows == 0}


def _functions(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name.upper(): getattr(module, name) for name in names}
