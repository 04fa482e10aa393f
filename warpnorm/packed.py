"""RMSNorm of the parts of a packed tensor, each with a weight of its own. Forward is a fused function of all parts, one
launch; backward a launch for each part, which reads that part's gradient where it lies and writes into the packed one:
nothing is put together before or after."""

from collections.abc import Sequence
from typing import Any

import torch

from warpnorm import pipeline
from warpnorm.fuse import Fused, arrange, is_large_call
from warpnorm.launch.autograd import are_batched, as_input, is_differentiated
from warpnorm.norms import RMS_NORM
from warpnorm.problem import COLUMN, FULL, Call
from warpnorm.reference import Affine, Itself, differentiating

DIM = -2  # along which parts lie


def normalize(
    fused: Fused,
    owner: Any,
    others: Sequence[Any],
    x: torch.Tensor,
    sizes: Sequence[int],
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...] | None:
    """(*parts, the rest of x), where that has gradients and kernels or native code run; `fused` is called with the parts
    that have a norm as one tensor, and `others`."""
    tensors = (x, *weights)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors) or pipeline.is_seen_through(tensors):
        return None
    request = fused.request(owner, (x.narrow(DIM, 0, sum(sizes)), *others), {})
    prepared = fused.prepare(request)
    route = pipeline.route(x, *weights, is_large=is_large_call(prepared.captured.call, request.tensors))
    if route == "reference":
        return None
    call, operands = arrange(prepared, request.tensors)
    if route == "native" and not pipeline.takes(call, operands):
        return None
    return PackedNorm.apply(call, operands, tuple(sizes), *tensors)


class PackedNorm(torch.autograd.Function):
    """(call, its operands, sizes of the parts, x, *weights) -> (*parts, the rest of x)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, operands: Sequence[Any], sizes: tuple[int, ...], x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        (normalized,), statistics = pipeline.forward(call, operands)
        ctx.eps, ctx.sizes = call.eps, sizes
        ctx.save_for_backward(x, *weights, *statistics)
        ctx.set_materialize_grads(False)
        parts = torch.unsafe_split_with_sizes(normalized, sizes, DIM)  # each may be written into
        return *parts, x.narrow(DIM, sum(sizes), x.shape[DIM] - sum(sizes))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, *weights, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if is_differentiated() or are_batched(grads):
            return None, None, None, *_by_definition(ctx.eps, ctx.sizes, (x, *weights), grads, needed)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
        if grad_x is not None and pipeline.is_native(x.device):
            pipeline.reuse_memory((grad_x,))
        rstd = rstd.view(-1, sum(ctx.sizes))
        call = Call(RMS_NORM, 1, ctx.eps, Itself(), Affine(True, False), (FULL, COLUMN), (x.dtype,))
        found: list[torch.Tensor | None] = []
        start = 0
        for size, weight, needs_weight, grad in zip(ctx.sizes, weights, needed[1:], grads, strict=False):
            into = {} if grad_x is None else {0: grad_x.narrow(DIM, start, size)}
            of_part: dict[int, torch.Tensor] = {}
            if grad is not None and grad.numel() == 0:
                of_part = {1: torch.zeros_like(weight)}
            elif grad is not None:
                operands = (x.narrow(DIM, start, size), weight)
                statistics = (rstd.narrow(1, start, size).contiguous(),)
                wanted = (*into, *[1] * needs_weight)
                of_part = pipeline.backward(call, operands, (grad,), statistics, wanted, into=into)
            elif into:
                into[0].zero_()
            found.append(of_part.get(1))
            start += size
        if grad_x is not None:
            rest, grad = grad_x.narrow(DIM, start, x.shape[DIM] - start), grads[-1]
            rest.zero_() if grad is None else rest.copy_(grad)
        return None, None, None, grad_x, *found


def _by_definition(
    eps: float,
    sizes: Sequence[int],
    tensors: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients of x and the weights by PyTorch's operators, with a history."""
    is_differentiated_again = torch.is_grad_enabled()
    with differentiating():
        inputs = [as_input(tensor) for tensor in tensors]
        x, *weights = inputs
        *parts, rest = x.split((*sizes, x.shape[DIM] - sum(sizes)), DIM)
        dtype = pipeline.compute_dtype([tensor.dtype for tensor in tensors])
        outputs = [
            (torch.nn.functional.rms_norm(part.to(dtype), part.shape[-1:], None, eps) * weight.to(dtype)).to(x.dtype)
            for part, weight in zip(parts, weights, strict=True)
        ]
        given = [(o, g) for o, g in zip((*outputs, rest), grads, strict=True) if g is not None]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in given], wanted, [g for _, g in given],
                create_graph=is_differentiated_again, allow_unused=True,
            )
        )  # fmt: skip
    return [next(found) if need else None for need in needed]
