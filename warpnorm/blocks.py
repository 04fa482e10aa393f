"""Ready-made modules of what is fused most often, each a norm of PyTorch's with something around it, as one kernel: a few
lines under `fuse`. Parameters and their names are those of the norm; `nn.py` has them beside the drop-in modules."""

from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Proxy

from warpnorm import functional, packed, parallel, routing
from warpnorm.errors import InputError, InputTypeError
from warpnorm.functional import REFUSALS
from warpnorm.fuse import fuse, is_watched
from warpnorm.library import is_sharded
from warpnorm.trace import symbolic

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_queries: dict[tuple[int, int, torch.device], torch.Tensor] = {}  # which of so many heads are queries


class _AddNorm(torch.nn.Module):
    """A residual stream before the norm that the class after this one is; without a residual, x begins one."""

    def __init__(self, normalized_shape: Any, *args: Any, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(normalized_shape, *args, **kwargs)
        if not 0.0 <= dropout < 1.0:
            raise InputError(f"dropout is a probability of at least 0 and less than 1, but it is {dropout}")
        self.dropout = dropout

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, Proxy) and (call := symbolic.call_of(self, x, residual)) is not None:
            return call[0], call[1]
        try:
            return self._added(x, residual)
        except REFUSALS:
            others: dict[str, Any] = {} if residual is None else {"residual": residual}
            _check_beside(self, x, Real, **others)
            raise

    @fuse
    def _added(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dropout > 0.0 and self.training:
            x = F.dropout(x, self.dropout)
        h = x if residual is None else residual + x
        return self._normalized(h), h

    def _normalized(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}"


class AddLayerNorm(_AddNorm, torch.nn.LayerNorm):  # type: ignore[misc]
    """h = residual + dropout(x), or without a residual dropout(x); returns `(layer_norm(h), h)`: what a residual stream
    needs between two blocks. The arguments are those of `torch.nn.LayerNorm`; `dropout` is the probability of an element to
    be zero in training."""

    def _normalized(self, h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, self.normalized_shape, *_widened(h, self.weight, self.bias, self.eps))


class AddRMSNorm(_AddNorm, torch.nn.RMSNorm):  # type: ignore[misc]
    """h = residual + dropout(x), or without a residual dropout(x); returns `(rms_norm(h), h)`. The arguments are those of
    `torch.nn.RMSNorm`; `dropout` is the probability of an element to be zero in training."""


class GatedRMSNorm(torch.nn.RMSNorm):
    """`rms_norm(x) * silu(gate)`, or with `norm_before_gate=False` `rms_norm(x * silu(gate))`, as in Mamba2. The other
    arguments are those of `torch.nn.RMSNorm`."""

    def __init__(self, normalized_shape: Any, *args: Any, norm_before_gate: bool = True, **kwargs: Any) -> None:
        super().__init__(normalized_shape, *args, **kwargs)
        self.norm_before_gate = norm_before_gate

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if isinstance(x, Proxy) and (call := symbolic.call_of(self, x, gate)) is not None:
            return call
        try:
            return self._gated(x, gate)
        except REFUSALS:
            _check_beside(self, x, gate=gate)
            raise

    @fuse
    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm_before_gate:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps) * F.silu(gate)
        return F.rms_norm(x * F.silu(gate), self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm_before_gate={self.norm_before_gate}"


class AdaLayerNorm(torch.nn.LayerNorm):
    """`layer_norm(x) * (1 + scale) + shift`, where each sample has a scale and a shift of its own, as in a diffusion
    transformer: x is (samples, ..., cols), scale and shift are (samples, cols), or broadcast against x: one for all,
    (cols,), or one for each token, as many dimensions as x. There are no parameters unless `elementwise_affine=True` asks
    for them."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = False, bias: bool = True,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        if len(self.normalized_shape) > 1:
            raise InputError(f"AdaLayerNorm: normalizes over one dimension, but normalized_shape is {normalized_shape}")

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if isinstance(x, Proxy) and (call := symbolic.call_of(self, x, scale, shift)) is not None:
            return call
        try:
            return self._modulated(x, scale, shift)
        except REFUSALS:
            _check_beside(self, x, is_by_sample=True, scale=scale, shift=shift)
            raise

    @fuse
    def _modulated(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        normalized = F.layer_norm(x, self.normalized_shape, *_widened(x, self.weight, self.bias, self.eps))
        return normalized * (1 + _by_sample(scale, x.ndim)) + _by_sample(shift, x.ndim)


def _widened(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Any:
    """Parameters of at least as many bits as the input: PyTorch's operators, which run small inputs, take no others."""

    def wide(parameter: torch.Tensor | None) -> torch.Tensor | None:
        is_known = parameter is not None and not isinstance(x, Proxy)
        is_narrow = is_known and parameter.dtype.itemsize < x.dtype.itemsize  # type: ignore[union-attr]
        return parameter.to(x.dtype) if is_narrow else parameter  # type: ignore[union-attr]

    return wide(weight), wide(bias), eps


def _check_beside(
    module: torch.nn.Module, x: Any, numbers: type | tuple[()] = (), is_by_sample: bool = False, **others: Any
) -> None:
    """Refuses, in a sentence, what a module is given beside its input and does not broadcast against it; it may be one of
    `numbers`. Asked when a call has been refused, for it takes as long as a tenth of a small one. Whoever traces or
    transforms the call sees PyTorch's own refusals."""
    if isinstance(x, Proxy):
        return
    name = type(module).__name__
    for what, value in (("input", x), *others.items()):
        if not isinstance(value, torch.Tensor) and (value is x or not isinstance(value, numbers)):
            raise InputTypeError(f"{name}: {what} must be a tensor, but is of type {type(value).__name__}") from None
    if routing.is_seen_through((x, *others.values())):
        return
    for what, other in others.items():
        if not isinstance(other, torch.Tensor) or (other.shape == x.shape and other.device == x.device):
            continue
        shape = _by_sample(other, x.ndim).shape if is_by_sample else other.shape
        if any(1 != a != b != 1 for a, b in zip(reversed(shape), reversed(x.shape), strict=False)):
            raise InputError(
                f"{name}: {what} has shape {tuple(other.shape)}, but input has shape {tuple(x.shape)}: it must be that one, "
                "or broadcast against it"
            ) from None
        if other.device != x.device and other.ndim > 0:
            raise InputError(f"{name}: {what} is on {other.device}, but input is on {x.device}") from None


def _by_sample(modulation: torch.Tensor, dims: int) -> torch.Tensor:
    """(samples, cols) as (samples, 1, ..., cols)."""
    if modulation.ndim in (0, 1, dims):
        return modulation
    if modulation.ndim > dims or any(size != 1 for size in modulation.shape[1:-1]):
        raise InputError(
            f"AdaLayerNorm: scale or shift has shape {tuple(modulation.shape)}, but x has {dims} dimensions, so it must be"
            f" (samples, cols), (cols,), or broadcast against x with {dims} dimensions"
        ) from None
    return modulation.view(modulation.shape[0], *(1,) * (dims - 2), modulation.shape[-1])


class _BatchNormReLU2d(torch.nn.BatchNorm2d):
    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """A batch that is refused is not counted, and leaves the running statistics as they are."""
        if isinstance(input, Proxy) and (call := symbolic.call_of(self, input, residual)) is not None:
            return call
        self._check_input_dim(input)
        counter = self.num_batches_tracked if self.training and self.track_running_stats else None
        check_counter(counter)
        momentum = self.momentum
        if momentum is None:  # the mean of all batches
            momentum = 0.0 if counter is None else 1.0 / (float(counter) + 1.0)
        if self.momentum is None and counter is not None:  # a number that changes: not one to capture
            if residual is not None:
                _check_beside(self, input, Real, residual=residual)
            normalized = self._normalized(input, momentum)
            output = F.relu(normalized if residual is None else normalized + residual)
        elif residual is None:
            output = self._alone(input, momentum)
        else:
            try:
                output = self._with(input, residual, momentum)
            except REFUSALS:
                _check_beside(self, input, Real, residual=residual)
                raise
        if counter is not None:
            counter.add_(1)
        return output

    def _normalized(self, x: torch.Tensor, momentum: float) -> torch.Tensor:
        """Compiled, by PyTorch's operator where it takes the dtypes: an export would keep what ours asserts of a result that
        is replaced by the fused one."""
        given: Any = self._given(x, momentum)
        if not torch.compiler.is_compiling():
            return functional.batch_norm(*given)  # type: ignore[return-value]
        dtypes = {tensor.dtype for tensor in given[1:5] if tensor is not None}
        is_taken = dtypes <= {x.dtype} or (dtypes == {torch.float32} and x.dtype in (torch.float16, torch.bfloat16))
        norm: Any = F.batch_norm if is_taken else functional.batch_norm
        return norm(*given)

    def _given(self, x: torch.Tensor, momentum: float) -> tuple[Any, ...]:
        """The arguments of a batch norm: without running statistics evaluation too is by those of the batch."""
        is_averaged = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if is_averaged else (None, None)
        training = self.training or (mean is None and variance is None)
        return x, mean, variance, self.weight, self.bias, training, momentum, self.eps

    @fuse
    def _alone(self, x: torch.Tensor, momentum: float) -> torch.Tensor:
        return F.relu(self._normalized(x, momentum))

    @fuse
    def _with(self, x: torch.Tensor, residual: torch.Tensor, momentum: float) -> torch.Tensor:
        return F.relu(self._normalized(x, momentum) + residual)


class BatchNormReLU2d(_BatchNormReLU2d):
    """`relu(batch_norm(x))`, or with a residual `relu(batch_norm(x) + residual)`, in training and evaluation; the arguments
    are those of `torch.nn.BatchNorm2d`. With `momentum=None`, where each batch counts less than the one before, training
    is not fused: the norm comes first, then the rest. `torch.nn.SyncBatchNorm.convert_sync_batchnorm` takes it for a
    BatchNorm alone and would drop the rest; `warpnorm.nn.SyncBatchNorm.convert_sync_batchnorm` does not."""


class SyncBatchNormReLU2d(_BatchNormReLU2d):
    """`BatchNormReLU2d` of the batch that all ranks of `process_group` (None: all ranks) hold together:
    `relu(batch_norm(x))`, or with a residual `relu(batch_norm(x) + residual)`. In training one collective forward and one
    backward; norm, residual and ReLU are one kernel after it."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _normalized(self, x: torch.Tensor, momentum: float) -> torch.Tensor:
        if not self.training or parallel.exchange.world_size(self.process_group) == 1:
            return super()._normalized(x, momentum)
        return parallel.batch_norm(*self._given(x, momentum), group=self.process_group)


def check_counter(counter: torch.Tensor | None) -> None:
    """Raises what counting would, before the running statistics are written: inside `torch.func`, and of what was made in
    inference mode."""
    if counter is None or torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active() or (not is_watched() and counter.is_inference()):
        counter.add_(0)


class GroupNormSiLU(torch.nn.GroupNorm):
    """`silu(group_norm(x))`, as before each convolution of a diffusion U-Net; the arguments are those of
    `torch.nn.GroupNorm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Proxy) and (call := symbolic.call_of(self, input)) is not None:
            return call
        return self._activated(input)

    @fuse
    def _activated(self, input: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(input, self.num_groups, *_widened(input, self.weight, self.bias, self.eps)))


class QKNorm(torch.nn.Module):
    """RMSNorm of the queries and keys of packed attention, over each head, by one kernel and without a copy: x is
    (..., heads of q + heads of k + heads of v, head_dim), contiguous or not. Returns `(q, k, v)` in the dtype of x; v is a
    view of it. q and k have a weight each, `q_weight` and `k_weight`, of head_dim."""

    def __init__(
        self, head_dim: int, q_heads: int, k_heads: int, eps: float = 1e-6,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if head_dim < 1 or q_heads < 0 or k_heads < 0:
            raise InputError(
                f"QKNorm: head_dim must be positive, q_heads and k_heads not negative, but they are {head_dim}, {q_heads} "
                f"and {k_heads}"
            )
        self.head_dim, self.q_heads, self.k_heads, self.eps = head_dim, q_heads, k_heads, eps
        self.q_weight = torch.nn.Parameter(torch.ones(head_dim, device=device, dtype=dtype))
        self.k_weight = torch.nn.Parameter(torch.ones(head_dim, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if isinstance(x, Proxy) and (call := symbolic.call_of(self, x)) is not None:
            return call[0], call[1], call[2]
        count = self.q_heads + self.k_heads
        if x.ndim < 2 or x.shape[-1] != self.head_dim or x.shape[-2] < count:
            raise InputError(
                f"QKNorm: takes (..., heads, {self.head_dim}) with at least {count} heads, but input has shape "
                f"{tuple(x.shape)}"
            )
        others = (_beside(x, self._is_query(x.device)),)
        sizes, weights = (self.q_heads, self.k_heads), (self.q_weight, self.k_weight)
        is_own = type(self)._normalize is QKNorm._normalize  # and no other class's
        if is_own and (found := packed.normalize(QKNorm._normalize, self, others, x, sizes, weights)):
            return found[0], found[1], found[2]
        both, v = x.split(
            (count, x.shape[-2] - count), -2
        )  # unlike those of slices, their gradients are put together once
        normalized = self._normalize(both, *others)
        if routing.is_left_alone((x,)):  # vmap has no rule for the other
            return *normalized.split((self.q_heads, self.k_heads), -2), v
        q, k = torch.unsafe_split_with_sizes(normalized, (self.q_heads, self.k_heads), -2)  # either may be written into
        return q, k, v

    def _is_query(self, device: torch.device) -> torch.Tensor:
        """(heads, 1): no buffer, which `to_empty` would empty, and nothing of the module's, which may move elsewhere."""
        key = self.q_heads, self.k_heads, device
        found = None if routing.is_seen_through(()) else _queries.get(key)
        if found is None:
            with torch.inference_mode(False):  # kept, and then read where there are gradients
                found = torch.arange(self.q_heads + self.k_heads, device=device)[:, None] < self.q_heads
            is_of_graph = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not is_of_graph and not routing.is_seen_through((found,)):
                _queries[key] = found
        return found

    @fuse
    def _normalize(self, x: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
        weight = torch.where(is_query, self.q_weight, self.k_weight)
        return (F.rms_norm(x, x.shape[-1:], None, self.eps) * weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, q_heads={self.q_heads}, k_heads={self.k_heads}, eps={self.eps}"


def _beside(x: Any, known: torch.Tensor) -> Any:
    """What every rank knows, as an operand beside x: beside a DTensor one that is replicated."""
    if not is_sharded(x):
        return known
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(known, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


class RMSNormFloat8(torch.nn.RMSNorm):
    """`rms_norm(x) / scale` in float8, for a scale that is known beforehand, a tensor of one number: values that float8 does
    not have become the nearest that it has. The other arguments are those of `torch.nn.RMSNorm`. For inference: there is
    no gradient."""

    def __init__(
        self, normalized_shape: Any, *args: Any, float8: torch.dtype = torch.float8_e4m3fn, **kwargs: Any
    ) -> None:
        super().__init__(normalized_shape, *args, **kwargs)
        if float8 not in FLOAT8:
            raise InputError(f"RMSNormFloat8: float8 is one of {', '.join(map(str, FLOAT8))}, but it is {float8}")
        self.float8 = float8
        self.largest = torch.finfo(float8).max

    @torch.no_grad()
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        try:
            return self._quantized(x, scale)
        except REFUSALS:
            _check_beside(self, x, Real, scale=scale)
            raise

    @fuse
    def _quantized(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, self.normalized_shape, self.weight, self.eps) / scale
        return y.clamp(-self.largest, self.largest).to(self.float8)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8={self.float8}"
