"""THE MAP: the flow of one call. Read this first.

    functional / nn  ->  trace.capture  ->  problem.describe  ->  plan.choose  ->  codegen.bind  ->  launch

`route` decides between the kernels and PyTorch's own operators. `prepare_forward` and `prepare_backward` walk that
line once for each exact layout of the tensors; what they return is cached, and only launches. Underneath, kernels are
compiled once for each problem, and a problem knows no row count."""

import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from warpnorm import settings
from warpnorm.errors import UnavailableError
from warpnorm.launch.autograd import Normalization
from warpnorm.plan import choose
from warpnorm.plan import device as devices
from warpnorm.plan.plan import Plan
from warpnorm.problem import Call, View, describe_backward, describe_forward
from warpnorm.trace import capture, differentiate

if TYPE_CHECKING:  # what imports Triton, which need not be there, is imported where it is used
    from warpnorm.launch.backward import BackwardLaunch
    from warpnorm.launch.forward import ForwardLaunch

Tensors = Sequence[torch.Tensor | float]


def route(input: torch.Tensor, *parameters: torch.Tensor | float | None) -> str:
    """`kernels` or `reference`: the one place that decides."""
    forced = settings.current().route
    if forced == "kernels":
        if not has_triton():
            raise UnavailableError("the kernels need Triton, which is not installed; or set WARPNORM_ROUTE=auto")
        if not (input.is_cuda or settings.is_interpreting()):
            raise UnavailableError(
                f"the kernels need a GPU, but input is on {input.device}; or set WARPNORM_ROUTE=auto"
            )
    if forced != "auto":
        return forced
    if not input.is_cuda or input.numel() == 0 or not has_triton() or settings.is_interpreting():
        return "reference"
    return "reference" if is_seen_through((input, *parameters)) else "kernels"


def is_seen_through(tensors: Sequence[torch.Tensor | float | None]) -> bool:
    """Whether something traces or transforms the call, which sees PyTorch's operators only: compilers, `torch.func`,
    forward-mode gradients, dispatch modes, subclasses that may have no memory of their own."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or any(isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    )


@cache
def has_triton() -> bool:
    return sys.platform == "linux" and find_spec("triton") is not None


def normalize(call: Call, operands: Tensors, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(output, *statistics) of a call, by the kernels; differentiable unless it writes into `out`."""
    if (
        out is None
        and torch.is_grad_enabled()
        and any(isinstance(o, torch.Tensor) and o.requires_grad for o in operands)
    ):
        return Normalization.apply(sys.modules[__name__], call, *operands)
    output, statistics = forward(call, operands, out)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # so that autograd knows whoever saved its old values
    return output, *statistics


def forward(
    call: Call, operands: Tensors, out: torch.Tensor | None = None, plan: Plan | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    operands = [in_memory(operand) for operand in operands]
    input = operands[0]
    assert isinstance(input, torch.Tensor)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device) if out is None else out
    views = tuple(View.of(tensor) for tensor in (*operands, output))
    launch = prepare_forward(call, views, input.device, plan)
    return output, launch(operands, (output,))


def backward(
    call: Call,
    operands: Tensors,
    grad_output: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    wanted: tuple[int, ...],
    plan: Plan | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the operands in `wanted`."""
    operands = [in_memory(operand) for operand in operands]
    grad_output = grad_output.resolve_neg()
    gradients = tuple(torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in (operands[i] for i in wanted))  # type: ignore[union-attr]
    views = tuple(View.of(tensor) for tensor in (*operands, grad_output, *gradients))
    launch = prepare_backward(call, views, grad_output.device, wanted, plan)
    launch(operands, (grad_output,), statistics, gradients)
    return gradients


def in_memory(operand: torch.Tensor | float) -> torch.Tensor | float:
    """A view that is negated when it is read (the imaginary part of a conjugate) is not what lies in memory."""
    return operand.resolve_neg() if isinstance(operand, torch.Tensor) else operand


@lru_cache(maxsize=4096)
def prepare_forward(call: Call, views: tuple[View, ...], device: torch.device, plan: Plan | None) -> "ForwardLaunch":
    from warpnorm.codegen import bind
    from warpnorm.launch.forward import ForwardLaunch

    graphs = capture.forward_graphs(call.epilogue, len(call.axes))
    problem, space = describe_forward(call, views, graphs)
    target = devices.of(device)
    plan = plan or choose.forward(problem, target)
    kernel = bind.forward(problem, plan, target, device.index)
    return ForwardLaunch(problem, plan, space, kernel, call.eps)


@lru_cache(maxsize=4096)
def prepare_backward(
    call: Call, views: tuple[View, ...], device: torch.device, wanted: tuple[int, ...], plan: Plan | None
) -> "BackwardLaunch":
    from warpnorm.codegen import bind
    from warpnorm.launch.backward import BackwardLaunch

    graphs = differentiate.backward_graphs(call.epilogue, len(call.axes), wanted)
    problem, space = describe_backward(call, views, wanted, graphs)
    target = devices.of(device)
    plan = plan or choose.backward(problem, target)
    kernel = bind.backward(problem, plan, target, device.index)
    sums = bind.backward_sums(problem, plan, target, device.index)
    sum_plan = choose.column_sum(problem, target)
    column_sum = bind.column_sum(problem, sum_plan, target, device.index)
    return BackwardLaunch(problem, plan, space, kernel, sums, column_sum, sum_plan)
