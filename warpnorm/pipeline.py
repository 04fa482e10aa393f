"""THE MAP: the flow of one call. Read this first.

    functional / nn / fuse  ->  trace.capture  ->  space.describe  ->  plan.choose  ->  codegen.bind  ->  launch

`routing.py` decided before that the kernels or native code run, not PyTorch's own operators. `prepare_forward` and
`prepare_backward` walk that line once for each exact layout of the tensors; what they return is cached, and only launches.
Underneath, kernels are compiled once for each problem, and a problem knows no row count."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from warpnorm import routing, version
from warpnorm.errors import UnavailableError
from warpnorm.launch.autograd import Normalization
from warpnorm.plan import choose, grid, pieces, tiles, totals
from warpnorm.plan import device as devices
from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN, HELD, Plan
from warpnorm.problem import BackwardProblem, Call, ForwardProblem, Running, View, compute_dtype
from warpnorm.space import Space, describe_backward, describe_forward, fresh, shape_of
from warpnorm.trace import at_hand, capture, differentiate
from warpnorm.trace.graph import rounded_once

if TYPE_CHECKING:  # what imports Triton, which need not be there, is imported where it is used
    from warpnorm.cpu.fallback import FallbackBackward, FallbackForward
    from warpnorm.cpu.run import AcrossBackward, AcrossForward, NativeBackward, NativeForward
    from warpnorm.launch.backward import BackwardLaunch
    from warpnorm.launch.column import ColumnBackwardLaunch, ColumnForwardLaunch
    from warpnorm.launch.forward import ForwardLaunch
    from warpnorm.launch.held import HeldBackwardLaunch, HeldForwardLaunch

Tensors = Sequence[torch.Tensor | float]


def normalize(
    call: Call, operands: Tensors, out: torch.Tensor | None = None, running: Running | None = None
) -> tuple[torch.Tensor, ...]:
    """(*outputs, *statistics) of a call, by the kernels; differentiable unless it writes into `out`. The statistics are
    averaged into `running`."""
    if (
        out is None
        and torch.is_grad_enabled()
        and any(isinstance(o, torch.Tensor) and o.requires_grad for o in operands)
    ):
        return Normalization.apply(sys.modules[__name__], call, running, *operands)
    outputs, statistics = forward(call, operands, out, running=running)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # so that autograd knows whoever saved its old values
    return *outputs, *statistics


def forward(
    call: Call,
    operands: Tensors,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    running: Running | None = None,
    are_apart: bool = False,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The outputs and the statistics; these have memory of their own each if they are to lie apart."""
    operands = [in_memory(operand) for operand in operands]
    views = tuple(View.of(operand) for operand in operands)
    device = device_of(operands)
    shape = shape_of(views)
    outputs = (out,) if out is not None else empty_outputs(call, operands, shape, device)
    averaged = () if running is None else (running.mean.dtype, running.variance.dtype)
    of_outputs = tuple(map(View.of, outputs))
    launch: Any = prepare_forward(call, (*views, *of_outputs), device, plan, averaged)
    how = (
        {"is_apart": True} if are_apart and not routing.is_native(device) else {}
    )  # native code never has them together
    try:
        statistics = launch(operands, outputs, running, **how)
    except RuntimeError as error:
        if plan is not None or not refuses_teams(error, device):
            raise
        launch = prepare_forward(call, (*views, *of_outputs), device, None, averaged)
        statistics = launch(operands, outputs, running, **how)
    if running is not None:
        torch.autograd.graph.increment_version((running.mean, running.variance))
    return outputs, statistics


def backward(
    call: Call,
    operands: Tensors,
    grad_outputs: Sequence[torch.Tensor | None],
    statistics: Sequence[torch.Tensor],
    wanted: tuple[int, ...],
    plan: Plan | None = None,
    into: Mapping[int, torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """The gradients of the operands in `wanted` that depend on an output, written `into` what is there for an operand."""
    operands = [in_memory(operand) for operand in operands]
    given = tuple(i for i, grad in enumerate(grad_outputs) if grad is not None)
    grads = tuple(grad.resolve_neg() for grad in grad_outputs if grad is not None)
    views = tuple(View.of(tensor) for tensor in (*operands, *grads))
    wanted, same = without_twins(call, views, given, wanted)
    how = (call, views, grads[0].device, given, wanted)
    places = tuple((i, View.of(tensor)) for i, tensor in into.items()) if into else ()
    launch = prepare_backward(*how, plan, places)
    problem, found = launch.problem, dict(into or {})
    others = {i: g.dtype for i, g in zip(problem.wanted, problem.gradients, strict=True) if i not in found}
    made = empty_gradients(call, [operands[i] for i in others], [*others.values()])  # type: ignore[misc]
    found |= zip(others, made, strict=True)
    gradients = tuple(found[i] for i in problem.wanted)
    if gradients:
        try:
            launch(operands, grads, statistics, gradients)
        except RuntimeError as error:
            if plan is not None or not refuses_teams(error, grads[0].device):
                raise
            prepare_backward(*how, None, places)(operands, grads, statistics, gradients)
    found = {i: g.to(operands[i].dtype) for i, g in found.items()}  # type: ignore[union-attr]
    return found | {twin: found[i] for twin, i in same.items()}


@lru_cache(maxsize=4096)
def prepare_forward(
    call: Call,
    views: tuple[View, ...],
    device: torch.device,
    plan: Plan | None,
    running: tuple[torch.dtype, ...] = (),
) -> "ForwardLaunch | ColumnForwardLaunch | HeldForwardLaunch | NativeForward | AcrossForward | FallbackForward":
    if routing.is_native(device):
        from warpnorm.cpu import build, fallback, run

        problem, space = forward_problem(call, views, is_along=True)
        try:
            return run.prepare_forward(replace(problem, running=running), space, call.eps)
        except (build.CompilerError, OSError) as error:
            return fallback.FallbackForward(call, str(error))
    bind = binder()
    from warpnorm.launch.forward import ForwardLaunch

    target = devices.of(device)
    problem, space, plan = plan_forward(call, views, target, plan)
    problem = replace(problem, running=running)
    kernel = bind.forward(problem, plan, target, device.index)
    if plan.pattern == HELD:
        from warpnorm.launch.held import HeldForwardLaunch

        return HeldForwardLaunch(problem, plan, space, kernel, call.eps)
    if plan.pattern == COLUMN:
        from warpnorm.launch.column import ColumnForwardLaunch

        last = tiles.last_tasks(problem, plan, space)
        last_kernel = bind.forward(problem, last, target, device.index) if last else None
        return ColumnForwardLaunch(problem, plan, space, kernel, call.eps, last, last_kernel)
    return ForwardLaunch(problem, plan, space, kernel, call.eps)


@lru_cache(maxsize=4096)
def prepare_backward(
    call: Call,
    views: tuple[View, ...],
    device: torch.device,
    given: tuple[int, ...],
    wanted: tuple[int, ...],
    plan: Plan | None,
    into: tuple[tuple[int, View], ...] = (),
) -> "BackwardLaunch | ColumnBackwardLaunch | HeldBackwardLaunch | NativeBackward | AcrossBackward | FallbackBackward":
    if routing.is_native(device):
        from warpnorm.cpu import build, fallback, run

        problem, space = backward_problem(call, views, given, wanted, True, into)
        try:
            return run.prepare_backward(problem, space)
        except (build.CompilerError, OSError) as error:
            return fallback.FallbackBackward(call, problem, str(error))
    bind = binder()
    from warpnorm.launch.backward import BackwardLaunch

    target = devices.of(device)
    problem, space, plan = plan_backward(call, views, given, wanted, target, plan, into)
    kernel = bind.backward(problem, plan, target, device.index)
    if plan.pattern in (COLUMN, HELD):
        from warpnorm.launch.column import ColumnBackwardLaunch
        from warpnorm.launch.held import HeldBackwardLaunch

        sum_plan = totals.line(problem, target)
        column_sums = []
        for plan_of, is_tall in ((sum_plan, False), (totals.tall(problem, target), True)):
            left = grid.left(plan, problem)
            which = tuple(i for i in left if (grid.gradient_sum(plan, space, problem, i).width == 1) == is_tall)
            if which:
                column_sums.append((bind.gradient_sums(problem, which, plan_of, target, device.index), plan_of, which))
        if plan.pattern == HELD:
            return HeldBackwardLaunch(problem, plan, space, kernel, tuple(column_sums))
        last = tiles.last_tasks(problem, plan, space)
        last_kernel = bind.backward(problem, last, target, device.index) if last else None
        return ColumnBackwardLaunch(problem, plan, space, kernel, tuple(column_sums), last, last_kernel)
    sums = bind.backward_sums(problem, plan, target, device.index)
    sum_plan = totals.column(problem, plan, target)
    column_sum = bind.column_sum(problem, sum_plan, target, device.index)
    return BackwardLaunch(problem, plan, space, kernel, sums, column_sum, sum_plan)


def plan_forward(
    call: Call, views: Sequence[View], target: Device, plan: Plan | None = None
) -> tuple[ForwardProblem, Space, Plan]:
    """What the kernels run, by this plan or one that is chosen. Images of an odd size are read along their lines where these
    stay in registers, and otherwise across them."""
    problem, space = forward_problem(call, views)
    if space.is_odd and (plan is None or plan.pattern == HELD):
        along, lines = forward_problem(call, views, is_along=True)
        if stays := plan or pieces.held(along, lines, target):
            return along, lines, stays
    return problem, space, plan or choose.forward(problem, target, space)


def plan_backward(
    call: Call, views: Sequence[View], given: tuple[int, ...], wanted: tuple[int, ...], target: Device,
    plan: Plan | None = None, into: Sequence[tuple[int, View]] = (),
) -> tuple[BackwardProblem, Space, Plan]:  # fmt: skip
    """The same of the gradients."""
    problem, space = backward_problem(call, views, given, wanted, False, into)
    if space.is_odd and (plan is None or plan.pattern == HELD):
        along, lines = backward_problem(call, views, given, wanted, True, into)
        if stays := plan or pieces.held(along, lines, target):
            return along, lines, stays
    return problem, space, plan or choose.backward(problem, target, space)


def forward_problem(call: Call, views: Sequence[View], is_along: bool = False) -> tuple[ForwardProblem, Space]:
    """`views` are those of the operands, then of the outputs. `is_along`: images of an odd size too are read along their
    lines, as native code does."""
    dtypes, compute = inside(call, views)
    prologue, epilogue = capture.forward_graphs(call.prologue, call.epilogue, dtypes, compute)
    return describe_forward(call, views, (prologue, rounded_once(epilogue, call.outputs, compute)), is_along)


def backward_problem(
    call: Call, views: Sequence[View], given: tuple[int, ...], wanted: tuple[int, ...], is_along: bool = False,
    into: Sequence[tuple[int, View]] = (),
) -> tuple[BackwardProblem, Space]:  # fmt: skip
    """`views` are those of the operands, then of the outputs' gradients in `given`; `into` those of some operands'."""
    operands, dtypes = views[: len(call.axes)], inside(call, views)
    gradients = at_hand.gradients(call, *dtypes, given, wanted)
    graphs = differentiate.backward_graphs(call.prologue, call.epilogue, *dtypes, gradients)
    written = (dict(into).get(i) or fresh(operands[i], call.norm) for i in gradients.wanted)
    return describe_backward(call, (*views, *written), gradients, graphs, is_along)


def inside(call: Call, views: Sequence[View]) -> tuple[tuple[torch.dtype, ...], torch.dtype]:
    """The dtypes of the operands inside a kernel, and that of computation."""
    compute = compute_dtype([call.compute, *(view.dtype for view in views)])
    return capture.probe_dtypes([view.dtype for view in views[: len(call.axes)]], compute), compute


def binder() -> Any:
    """`codegen.bind`, which imports Triton."""
    try:
        from warpnorm.codegen import bind
    except ImportError as error:
        raise UnavailableError(
            f"the installed Triton is not one that the kernels are written for: {error}; install "
            f"{version.spelled(version.KNOWN_TRITON)}, or set WARPNORM_ROUTE=reference"
        ) from error
    return bind


def refuses_teams(error: RuntimeError, device: torch.device) -> bool:
    """Whether a launch failed since not all of its programs can run at the same time: on a device that cannot, or that is
    shared. Nothing was computed. From then on it gets other plans, of which `explain` tells."""
    if "cooperative" not in str(error) or not devices.of(device).has_teams:
        return False
    devices.refuse_teams(device)
    prepare_forward.cache_clear()
    prepare_backward.cache_clear()
    return True


@lru_cache(maxsize=4096)
def without_twins(
    call: Call, views: tuple[View, ...], given: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """The operands whose gradients are written, and of the others whose gradient is theirs too."""
    dtypes = inside(call, views)
    gradients = at_hand.gradients(call, *dtypes, given, wanted)
    written = tuple(fresh(views[i], call.norm) for i in gradients.wanted)
    same = at_hand.twins(call, *dtypes, gradients, written)
    return tuple(i for i in wanted if i not in same), same


def shortcut(call: Call, operands: Tensors) -> at_hand.Shortcut | None:
    """The same call of a sum that is one of its outputs, if it is."""
    views = tuple(map(View.of, operands))
    return at_hand.shortcut(call, tuple(view.dtype for view in views), *inside(call, views))


def empty_output(
    call: Call, operands: Tensors, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Contiguous, or for a norm by channel in the memory format of the first operand that has this shape."""
    if call.norm.is_by_channel:
        for operand in operands:
            if isinstance(operand, torch.Tensor) and operand.shape == shape:
                return torch.empty_like(operand, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_outputs(
    call: Call, operands: Tensors, shape: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    outputs = tuple([empty_output(call, operands, shape, dtype, device) for dtype in call.outputs])
    if routing.is_native(device):
        reuse_memory(outputs, call)
    return outputs


def empty_gradients(
    call: Call, operands: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, ...]:
    empty = torch.empty_like if call.norm.is_by_channel else _empty_contiguous
    gradients = tuple([empty(o, dtype=d) for o, d in zip(operands, dtypes, strict=True)])
    if gradients and routing.is_native(gradients[0].device):
        reuse_memory(gradients, call)
    return gradients


def reuse_memory(results: Sequence[torch.Tensor], call: Call) -> None:
    """Of earlier results on a CPU, for new ones."""
    from warpnorm.cpu import memory

    memory.reuse(results, call.norm.is_by_channel)


def _empty_contiguous(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def in_memory(operand: torch.Tensor | float) -> torch.Tensor | float:
    """A view that is negated when it is read (the imaginary part of a conjugate) is not what lies in memory."""
    return operand.resolve_neg() if isinstance(operand, torch.Tensor) else operand


def device_of(operands: Tensors) -> torch.device:
    return next(operand.device for operand in operands if isinstance(operand, torch.Tensor))


def takes(call: Call, operands: Tensors) -> bool:
    """Whether there is native code for a call; kernels take every call."""
    if not routing.is_native(device_of(operands)):
        return True
    operands = [in_memory(operand) for operand in operands]
    return takes_views(call, tuple(View.of(operand) for operand in operands), operands)


def takes_views(call: Call, views: tuple[View, ...], operands: Tensors) -> bool:
    """The same of tensors without memory."""
    shape = shape_of(views)
    outputs = (empty_output(call, operands, shape, d, torch.device("meta")) for d in call.outputs)
    return _takes(call, (*views, *(View(tuple(o.shape), o.stride(), o.dtype) for o in outputs)))


@lru_cache(maxsize=4096)
def _takes(call: Call, views: tuple[View, ...]) -> bool:
    from warpnorm.cpu.writer import can_write

    return can_write(forward_problem(call, views, is_along=True)[0])


def refusal(call: Call, views: tuple[View, ...]) -> str:
    """Why the compiler does not build a call, if it does not; `views` are those of the operands, then of the outputs."""
    if not _takes(call, views):
        return "there is no C for one of its dtypes"
    return getattr(prepare_forward(call, views, torch.device("cpu"), None), "why", "")


def native_text(problem: ForwardProblem | BackwardProblem) -> str:
    """The C that runs a problem on a CPU."""
    from warpnorm.cpu import run

    return run.text_of(problem)
