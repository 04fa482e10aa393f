"""`explain`: what a function becomes. The captured graph, the problem, the plan and why, the generated source, the
launches and the bytes that they move, and on request what the compiled code holds; also for a GPU that is not here."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from warpnorm import folder, functional, pipeline, routing, settings
from warpnorm.codegen import pointwise
from warpnorm.errors import InputError
from warpnorm.fuse import NOTHING, Fused, Prepared, arrange, fuse, is_large_call, leader
from warpnorm.library import is_sharded
from warpnorm.norms import GROUP_NORM, TRACKED_NORM
from warpnorm.parallel import functional as parallel
from warpnorm.parallel.opened import stand_ins
from warpnorm.plan import device as devices
from warpnorm.plan import grid, totals
from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN, HELD, LONG_ROW, ROW, Plan
from warpnorm.plan.tiles import last_tasks
from warpnorm.problem import NUMBER, TILES, BackwardProblem, Call, ForwardProblem, Operand, View, operand_name
from warpnorm.space import Space
from warpnorm.trace import at_hand

DEFAULT_TARGET = "sm_90"
NATIVE = "as native code on the CPU"
NOTHING_RUNS: dict[str, Any] = {"launches": (), "bytes_moved": 0, "least_bytes": 0}
# Called as they are, not fused: PyTorch's operator is as quick in more cases. Modules are known by where they are written
ALONE = (
    functional.layer_norm, functional.rms_norm, functional.batch_norm, functional.group_norm, functional.instance_norm,
    parallel.layer_norm, parallel.rms_norm, parallel.batch_norm,
)  # fmt: skip
MODULES = ("warpnorm.nn", "warpnorm.parallel.modules")
LAST_TASKS = ", last tasks"  # of pattern `column`, where they have a kernel of their own


@dataclass(frozen=True)
class Direction:
    """Forward or backward: the problem, the plan with its reason, generated source, launches as (kernel, programs: teams and
    those of one), the bytes that they move and the least that any way would have to (every tensor read or written once).
    `listings` holds what the compiled code of each kernel contains, where that was asked for. `native` is the C that runs
    instead on a CPU."""

    problem: ForwardProblem | BackwardProblem
    plan: Plan
    source: str
    launches: tuple[tuple[str, tuple[int, ...]], ...]
    bytes_moved: int
    least_bytes: int
    listings: dict[str, Any]
    native: str = ""  # C, where native code runs it

    def lines(self) -> list[str]:
        plan = self.plan
        sizes = f"{plan.block_rows} x {plan.block_cols}, {plan.warps} warps, {plan.stages} stages"
        blocks = f", a row is {plan.chunks} of them" * (plan.pattern == ROW and plan.chunks > 1)
        shared = f", {plan.programs} programs" * bool(plan.programs) + f", {plan.splits} to a row" * (plan.splits > 1)
        lines = [
            f"plan       {plan.pattern}: tiles of {sizes}{blocks}{shared}",
            f"why        {plan.why}",
            *(f"launch     {name} on {' x '.join(map(str, size))} programs" for name, size in self.launches),
            f"memory     {_megabytes(self.bytes_moved)} moved, {_megabytes(self.least_bytes)} is the least "
            f"({self.bytes_moved / max(self.least_bytes, 1):.2f} times)",
        ]
        return lines + [f"compiled   {name}: {listing}" for name, listing in self.listings.items()]


@dataclass(frozen=True)
class Explanation:
    """Prints as a report; every part of it is a field."""

    name: str
    norm: str
    prologue: str
    epilogue: str
    operands: tuple[str, ...]
    outputs: tuple[torch.dtype, ...]
    route: str
    target: str
    forward: Direction
    backward: Direction | None
    is_assumed: bool = False  # the target, for tensors on no GPU
    refusal: str = ""  # why nothing is kept in the cache folder

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.norm}",
            f"runs       {self.route}",
            f"target     {self.target}" + ", assumed: the tensors are on no GPU" * self.is_assumed,
            *[f"cache      a temporary folder, since {self.refusal}"] * bool(self.refusal),
            "",
            "operands",
            *(f"  {operand}" for operand in self.operands),
            "",
            "prologue   " + _indented(self.prologue),
            "epilogue   " + _indented(self.epilogue),
        ]
        for title, direction in (("forward", self.forward), ("backward", self.backward)):
            if direction is not None:
                lines += ["", title, *(f"  {line}" for line in direction.lines())]
        if self.backward is None:
            lines += ["", "backward   no tensor requires a gradient"]
        for title, direction in (("forward", self.forward), ("backward", self.backward)):
            if direction is not None:
                kind = "C" if direction.native else "source"
                lines += ["", f"{kind} of {title}", "", direction.native or direction.source]
        return "\n".join(lines)


def explain(
    function: Callable[..., Any], *args: Any, asm: bool = False, target: str | None = None, **kwargs: Any
) -> Explanation:
    """What `function`, fused or not yet, becomes when it is called with these arguments. Nothing is computed.

    asm: also compile, and count in the code: shuffles, barriers, widths of loads and stores, registers, spills.
    target: the GPU to plan and compile for, which need not be here: one of sm_80, sm_90, sm_100, gfx942. By default the
        one that the tensors are on, and sm_90 for tensors on a CPU.
    """
    return explain_call(function, args, kwargs, asm, target, _is_alone(function))


def explain_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asm: bool, target: str | None,
    is_alone: bool,
) -> Explanation:  # fmt: skip
    """`is_alone`: of a norm that is called as it is, which `function` stands for."""
    fused, owner = _fused(function)
    request = fused.request(owner, args, kwargs)
    prepared = fused.prepare(request)
    tensors, on_shards = request.tensors, ""
    if any(map(is_sharded, tensors)):
        prepared, tensors, on_shards = stand_ins(prepared, tensors)
        is_alone = False
    device_at_hand = leader(tensors).device
    if target is not None and target not in devices.KNOWN:
        raise InputError(f"explain: target is {target!r}, but must be one of {', '.join(devices.KNOWN)}")
    if target is None and device_at_hand.type == "cuda":
        device, shown = devices.of(device_at_hand), torch.cuda.get_device_name(device_at_hand)
    else:
        shown = target or DEFAULT_TARGET
        device = devices.KNOWN[shown]
    made = _explanation(fused, prepared, tensors, device, shown, device_at_hand, asm, target is None, is_alone)
    return replace(made, route=made.route + on_shards if on_shards.startswith(",") else on_shards or made.route)


def _is_alone(function: Any) -> bool:
    """Whether it is a norm of ours that was not given to `fuse`, a function or a module."""
    while type(function) is functools.partial:
        function = function.func
    if getattr(function, "__name__", "") == "forward":
        function = getattr(function, "__self__", function)
    if isinstance(function, torch.nn.Module):
        return getattr(type(function).forward, "__module__", None) in MODULES
    return any(function is known for known in ALONE)


def _fused(function: Callable[..., Any]) -> tuple[Fused, Any]:
    bound: Any = getattr(function, "func", None)
    if isinstance(function, functools.partial) and getattr(bound, "__func__", None) is Fused.run:
        return bound.__self__, function.args[0]  # a fused method, bound to its owner
    return fuse(function), NOTHING


def _explanation(
    fused: Fused,
    prepared: Prepared,
    tensors: Sequence[torch.Tensor],
    device: Device,
    shown: str,
    device_at_hand: torch.device,
    asm: bool,
    is_here: bool,
    is_alone: bool,
) -> Explanation:
    call, operands = arrange(prepared, tensors)
    views = [View.of(operand) for operand in operands] + [View.of(0)] * (2 * prepared.captured.draws)
    shape = torch.broadcast_shapes(*(o.shape for o in operands))  # type: ignore[union-attr]
    outputs = [
        View.of(pipeline.empty_output(call, operands, shape, dtype, torch.device("meta"))) for dtype in call.outputs
    ]
    described_views, is_empty = views, 0 in shape
    if is_empty:  # there is no plan for it: that of a small one is shown, without launches
        views, outputs = ([_not_empty(view, call) for view in some] for some in (views, outputs))
    problem, space, plan = pipeline.plan_forward(call, (*views, *outputs), device)
    wanted = tuple(i for i, o in enumerate(operands) if isinstance(o, torch.Tensor) and o.requires_grad)
    backward = None
    if wanted:
        given = tuple(k for k, dtype in enumerate(call.outputs) if dtype.is_floating_point)
        grads = [outputs[k] for k in given]
        short = at_hand.shortcut(call, tuple(v.dtype for v in views), *pipeline.inside(call, views))
        kept, of_call = views, call
        if short is not None:  # backward is that of the sum
            kept, of_call = short.of(outputs, views), short.call
            wanted = tuple(k for k, which in enumerate(short.kept) if any(i in wanted for i in which))
        wanted, _ = pipeline.without_twins(of_call, (*kept, *grads), given, wanted)
        planned = pipeline.plan_backward(of_call, (*kept, *grads), given, wanted, device)
        backward = _backward(*planned, kept, grads, device, asm)
    forward = _forward(problem, space, plan, views, outputs, device, asm)
    if is_empty:
        forward = replace(forward, **NOTHING_RUNS)
        backward = replace(backward, **NOTHING_RUNS) if backward is not None else None
    route = _route(tensors, device_at_hand, call, operands if is_alone else ())
    if route == NATIVE:
        why = pipeline.refusal(call, (*views, *outputs))
        route = f"as plain PyTorch, because native code does not do it: {why}" if why else route
    if route == NATIVE and is_here:  # not where a GPU was asked for
        problem, _ = pipeline.forward_problem(call, (*views, *outputs), is_along=True)
        forward = replace(forward, native=pipeline.native_text(problem))
        if backward is not None:
            problem_of, _ = pipeline.backward_problem(of_call, (*kept, *grads), given, wanted, is_along=True)
            backward = replace(backward, native=pipeline.native_text(problem_of))
        if not call.norm.is_by_channel and space.cols <= routing.SMALL_COMPILED_ROW:
            route += f"; under torch.compile, up to {routing.SMALL_COMPILED_ROW} columns, as plain PyTorch"
    if prepared.captured.ranks:
        route += (
            f", in three steps: ranks of the process group {prepared.captured.ranks} share its rows, so its statistics are "
            "taken first and exchanged; what is below is of one process that has the rows"
        )
    names = [*prepared.captured.names, *["seed", "offset"] * prepared.captured.draws]
    described = tuple(
        f"{name}: {'x'.join(map(str, view.shape)) or 'scalar'} {str(view.dtype).removeprefix('torch.')}, {operand.axes}"
        for name, view, operand in zip(names, described_views, problem.operands, strict=False)
    )
    return Explanation(
        name=getattr(fused, "__qualname__", "function"),
        norm=_norm(call, len(shape)),
        prologue=_readable(str(call.prologue), names),
        epilogue=_readable(str(call.epilogue), names),
        operands=described,
        outputs=call.outputs,
        route=route,
        target=shown,
        forward=forward,
        backward=backward,
        is_assumed=is_here and device_at_hand.type != "cuda",
        refusal=folder.refusal(settings.current().cache_dir),
    )


def _not_empty(view: View, call: Call) -> View:
    """With sizes in place of none that groups of channels divide."""
    return view._replace(shape=tuple(size or max(1, call.groups) for size in view.shape))


def _norm(call: Call, dims: int) -> str:
    if not call.norm.is_by_channel:
        return f"{call.norm.name} over the last {call.col_dims} of {dims} dimensions, eps {call.eps:g}"
    of = f" of {call.groups} groups of channels" if call.groups else ", channel by channel"
    return f"{call.norm.name}{of}, eps {call.eps:g}"


def _route(
    tensors: Sequence[torch.Tensor], device: torch.device, call: Call, alone: Sequence[torch.Tensor | float]
) -> str:
    """`alone` are the operands of a norm that stands alone."""
    is_large = is_large_call(call, tensors)
    is_small = "its rows are so small that this is quicker"
    if is_large and alone:
        input = max((o for o in alone if isinstance(o, torch.Tensor)), key=torch.Tensor.numel)
        norm = GROUP_NORM if call.norm == TRACKED_NORM else call.norm
        cols = prod(input.shape[max(input.ndim - call.col_dims, 0) :])
        is_large = routing.is_large_input(norm, input, cols, call.groups)
        is_small = "its operator is as quick where this norm stands alone"
    route = routing.route(leader(tensors), *tensors, is_large=is_large)
    if route == "kernels":
        return "by the kernels below"
    if route == "native":
        return NATIVE
    if settings.current().route == "reference":
        return "as plain PyTorch, because the setting WARPNORM_ROUTE is reference"
    why = "its tensors have no elements" if leader(tensors).numel() == 0 else f"its tensors are on {device}"
    if device.type == "cuda" and not routing.has_triton():
        why = routing.why_no_triton()
    if device.type == "cpu" and leader(tensors).numel() > 0:
        why = routing.why_no_compiler() if is_large and not routing.has_compiler() else is_small
    return f"as plain PyTorch, because {why}"


def _forward(
    problem: ForwardProblem, space: Space, plan: Plan, views: Sequence[View], outputs: Sequence[View], device: Device,
    asm: bool,
) -> Direction:  # fmt: skip
    least = _bytes(views, problem.operands) + _bytes(outputs, problem.outputs)
    statistics = len(problem.norm.statistics) * space.statistics * problem.compute.itemsize
    is_read_twice = plan.pattern == LONG_ROW or (plan.pattern == COLUMN and problem.norm.is_computed)
    again = _bytes(views, problem.operands, TILES) if is_read_twice else 0
    listings: dict[str, Any] = {}
    name = f"{plan.pattern}_forward_kernel"
    launches: tuple[tuple[str, tuple[int, ...]], ...] = ((name, grid.forward(plan, space)),)
    last = last_tasks(problem, plan, space)
    if plan.pattern == COLUMN:
        launches = tuple(_tasks(name, grid.column(plan, last, space, problem.has_tasks), last))
    if asm:
        from warpnorm.codegen import bind, listing

        listings[name] = listing.read(bind.forward(problem, plan, device, 0))
        if last is not None:
            listings[name + LAST_TASKS] = listing.read(bind.forward(problem, last, device, 0))
    return Direction(
        problem, plan, pointwise.forward_source(problem), launches, least + statistics + again, least, listings
    )


def _backward(
    problem: BackwardProblem, space: Space, plan: Plan, views: Sequence[View], grads: Sequence[View], device: Device,
    asm: bool,
) -> Direction:  # fmt: skip
    graphs = (problem.prologue, problem.epilogue_vjp, problem.prologue_vjp)
    used = {name for graph in graphs for name in graph.used_inputs}
    loaded = [i for i in range(len(views)) if operand_name(i) in used]
    read = sum(_bytes([views[i]], [problem.operands[i]]) for i in loaded) + _bytes(grads, problem.grad_outputs)
    written = sum(_bytes([views[i]], [problem.operands[i]]) for i in problem.wanted)
    tiles = _bytes(views, problem.operands, TILES) + _bytes(grads, problem.grad_outputs)
    has_sums = plan.pattern in (LONG_ROW, COLUMN) and problem.needs_grad_xhat and problem.norm.is_computed
    times = 2 if has_sums else 1
    statistics = len(problem.norm.saved) * space.statistics * problem.compute.itemsize * (1 + 2 * has_sums)
    last = last_tasks(problem, plan, space)
    left = grid.left(plan, problem) if plan.pattern in (COLUMN, HELD) else problem.reduced
    sums = [grid.gradient_sum(plan, space, problem, i) for i in left]
    partials = 2 * sum(s.numel for s in sums) * problem.compute.itemsize
    of_sums = grid.sum_programs(plan, space, problem)
    if of_sums:
        partials, times = 0, 2  # what others sum they read once more
    of_rows, of_parts = grid.row_programs(plan, space, problem), grid.backward(plan, space)[1]
    launches: list[tuple[str, tuple[int, ...]]] = [(_kernel_name(plan), (of_rows + of_sums, of_parts))]
    sum_plan = totals.column(problem, plan, device)
    if plan.pattern == COLUMN:
        launches = _tasks(_kernel_name(plan), grid.column(plan, last, space, problem.has_tasks), last)
    if plan.pattern in (COLUMN, HELD):
        sum_plan = totals.line(problem, device)
    if has_sums and plan.pattern == LONG_ROW:
        launches = [("long_row_sums_kernel", (space.rows, 1)), *launches]
    if sums and not of_sums:
        launches.append(("column_sum_kernel", _sum_grid(sums, sum_plan)))
    listings: dict[str, Any] = {}
    if asm:
        from warpnorm.codegen import bind, listing

        kernels = {_kernel_name(plan): bind.backward(problem, plan, device, 0)}
        kernels["long_row_sums_kernel"] = bind.backward_sums(problem, plan, device, 0)
        if last is not None:
            kernels[_kernel_name(plan) + LAST_TASKS] = bind.backward(problem, last, device, 0)
        kernels["column_sum_kernel"] = None if of_sums else bind.column_sum(problem, sum_plan, device, 0)
        listings = {name: listing.read(kernel) for name, kernel in kernels.items() if kernel is not None}
    least = read + written
    moved = least + (times - 1) * tiles + statistics + partials
    return Direction(problem, plan, pointwise.backward_source(problem), tuple(launches), moved, least, listings)


def _tasks(
    name: str, steps: Sequence[tuple[Plan, grid.Order, int]], last: Plan | None
) -> list[tuple[str, tuple[int, ...]]]:
    return [(name + LAST_TASKS if step is last else name, (programs, 1)) for step, _order, programs in steps]


def _sum_grid(sums: Sequence[grid.Sum], plan: Plan) -> tuple[int, int]:
    blocks = -(-max(s.width for s in sums) // plan.block_cols)
    return blocks * max(s.groups for s in sums), len(sums)


def _kernel_name(plan: Plan) -> str:
    return f"{plan.pattern}_backward_kernel"


def _bytes(views: Sequence[View], operands: Sequence[Operand], axes: Sequence[str] | None = None) -> int:
    """Of the elements that are there; an expanded tensor has fewer than its shape says."""
    total = 0
    for view, operand in zip(views, operands, strict=False):
        if operand.axes != NUMBER and (axes is None or operand.axes in axes):
            own = prod(size for size, stride in zip(view.shape, view.strides, strict=True) if stride)
            total += own * view.dtype.itemsize
    return total


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count} bytes"


def _readable(text: str, names: Sequence[str]) -> str:
    """With the user's names of the operands."""
    return re.sub(r"\boperand(\d+)\b", lambda found: names[int(found[1])], text)


def _indented(text: str) -> str:
    return text.replace("\n", "\n           ")
