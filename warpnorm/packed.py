"""RMSNorm of the parts of a packed tensor, each with a weight of its own. Forward is a fused function of all parts, one
launch; backward a launch for each part, which reads that part's gradient where it lies and writes into the packed one:
nothing is put together before or after."""

from collections.abc import Sequence
from typing import Any

import torch

from warpnorm import pipeline, routing, settings
from warpnorm.fuse import Fused, arrange, is_large_call
from warpnorm.launch.autograd import are_batched, as_input, is_differentiated
from warpnorm.norms import RMS_NORM
from warpnorm.problem import COLUMN, FULL, Call, View
from warpnorm.reference import Affine, Itself, differentiating
from warpnorm.repeat import forget_refused

DIM = -2  # along which parts lie
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_CACHE = 4096
_seen: dict[Any, "Seen"] = {}


def normalize(
    fused: Fused,
    owner: Any,
    others: Sequence[Any],
    x: torch.Tensor,
    sizes: tuple[int, ...],
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...] | None:
    """(*parts, the rest of x), where x has a gradient and kernels or native code run; `fused` is called with the parts that
    have a norm as one tensor, and `others`."""
    tensors = (x, *weights)
    if not (torch.is_grad_enabled() and x.requires_grad and any(sizes)) or routing.is_seen_through(tensors):
        return None
    if not _are_plain(x, weights) or any(t.is_neg() for t in tensors):
        return None
    key = (fused, owner.eps, sizes, x.device, settings.current(), *map(View.of, tensors))
    seen = _seen.get(key)
    if seen is None:
        seen = _look(fused, owner, (x.narrow(DIM, 0, sum(sizes)), *others), weights, sizes)
        if seen is None:
            return None
        if len(_seen) >= LARGEST_CACHE:
            _seen.clear()
        _seen[key] = seen
    return PackedNorm.apply(seen, others, *tensors) if seen.is_worth_it else None


def _are_plain(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Each part has a vector of its own, and all are computed in the same dtype: a part's backward reads the statistics of
    them all."""
    first = weights[0]
    if first.dtype not in DTYPES or any(w is first for w in weights[1:]):
        return False
    kinds = {(w.shape, w.dtype, w.device, w.is_contiguous()) for w in weights}
    return kinds == {(x.shape[-1:], first.dtype, x.device, True)}


def _look(
    fused: Fused, owner: Any, given: tuple[Any, ...], weights: Sequence[torch.Tensor], sizes: tuple[int, ...]
) -> "Seen | None":
    """At a call that was not seen before; `given` are the arguments of `fused`."""
    request = fused.request(owner, given, {})
    prepared = fused.prepare(request)
    route = routing.route(given[0], *weights, is_large=is_large_call(prepared.captured.call, request.tensors))
    known = (*given, *weights)
    order = [next((k for k, t in enumerate(known) if t is tensor), None) for tensor in request.tensors]
    if None in order:  # a weight that is computed anew each time it is read
        return None
    call, operands = arrange(prepared, request.tensors)
    is_worth_it = route == "kernels" or (route == "native" and pipeline.takes(call, operands))
    return Seen(sizes, call, prepared, order, is_worth_it)


class Seen:
    """A call, `order` of whose tensors is that of (all parts, *others, *weights), and the launches that it needed so far."""

    def __init__(
        self, sizes: tuple[int, ...], call: Call, prepared: Any, order: Sequence[Any], is_worth_it: bool
    ) -> None:
        self.sizes, self.call, self.prepared, self.order = sizes, call, prepared, order
        self.is_worth_it = is_worth_it  # and not left to PyTorch's operators
        self.launches: dict[Any, Any] = {}

    def forward(self, x: torch.Tensor, others: Sequence[Any], weights: Sequence[Any]) -> tuple[torch.Tensor, Any]:
        given = (x.narrow(DIM, 0, sum(self.sizes)), *others, *weights)
        _, operands = arrange(self.prepared, [given[i] for i in self.order])
        outputs = pipeline.empty_outputs(self.call, operands, given[0].shape, x.device)
        launch = self.launches.get(())
        if launch is None:
            views = tuple(map(View.of, (*operands, *outputs)))
            launch = self.launches[()] = pipeline.prepare_forward(self.call, views, x.device, None)
        try:
            statistics = launch(operands, outputs, None)
        except RuntimeError as error:
            forget_refused(error, self.launches, x.device)
            outputs, statistics = pipeline.forward(self.call, operands)
        return outputs[0], statistics

    def backward(
        self, operands: tuple[torch.Tensor, ...], grad: torch.Tensor, statistics: Any, wanted: tuple[int, ...],
        into: dict[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """The gradients of one part and its weight."""
        call = Call(RMS_NORM, 1, self.call.eps, Itself(), Affine(True, False), (FULL, COLUMN), (operands[0].dtype,))
        views, places = tuple(map(View.of, (*operands, grad))), tuple((i, View.of(t)) for i, t in into.items())
        launch = self.launches.get((views, wanted, places))
        if grad.is_neg():
            return pipeline.backward(call, operands, (grad,), statistics, wanted, into=into)
        if launch is None:
            launch = pipeline.prepare_backward(call, views, grad.device, (0,), wanted, None, places)
            if len(self.launches) >= LARGEST_CACHE:
                self.launches.clear()
            self.launches[views, wanted, places] = launch
        found = into | {i: torch.empty_like(operands[i]) for i in wanted if i not in into}
        try:
            launch(operands, (grad,), statistics, tuple(found[i] for i in wanted))
        except RuntimeError as error:
            forget_refused(error, self.launches, grad.device)
            return pipeline.backward(call, operands, (grad,), statistics, wanted, into=into)
        return found


class PackedNorm(torch.autograd.Function):
    """(what was seen, others, x, *weights) -> (*parts, the rest of x)."""

    @staticmethod
    def forward(
        ctx: Any, seen: Seen, others: Sequence[Any], x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normalized, statistics = seen.forward(x, others, weights)
        ctx.seen = seen
        ctx.save_for_backward(x, *weights, *statistics)
        ctx.set_materialize_grads(False)
        parts = torch.unsafe_split_with_sizes(normalized, seen.sizes, DIM)  # each may be written into
        return *parts, x.narrow(DIM, sum(seen.sizes), x.shape[DIM] - sum(seen.sizes))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, *weights, rstd = ctx.saved_tensors
        seen, needed = ctx.seen, ctx.needs_input_grad[2:]
        if is_differentiated() or are_batched(grads):
            return None, None, *_by_definition(seen.call.eps, seen.sizes, (x, *weights), grads, needed)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if routing.is_native(x.device):
            pipeline.reuse_memory((grad_x,), seen.call)
        rstd = rstd.view(-1, sum(seen.sizes))
        found: list[torch.Tensor | None] = []
        start = 0
        for size, weight, needs_weight, grad in zip(seen.sizes, weights, needed[1:], grads, strict=False):
            into = {0: grad_x.narrow(DIM, start, size)}
            of_part: dict[int, torch.Tensor] = {}
            if grad is not None and grad.numel() == 0:
                of_part = {1: torch.zeros_like(weight)}
            elif grad is not None:
                operands = (x.narrow(DIM, start, size), weight)
                statistics = (rstd.narrow(1, start, size).contiguous(),)
                wanted = (0, *[1] * needs_weight)
                of_part = seen.backward(operands, grad, statistics, wanted, into)
            else:
                into[0].zero_()
            found.append(of_part.get(1))
            start += size
        rest, grad = grad_x.narrow(DIM, start, x.shape[DIM] - start), grads[-1]
        rest.zero_() if grad is None else rest.copy_(grad)
        return None, None, grad_x, *found


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
