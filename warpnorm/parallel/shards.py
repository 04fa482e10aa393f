"""The functions of `warpnorm` on DTensors: they run on what lies on this rank, and the result is placed as the input is.
Rows that are whole here need nobody; rows that ranks share go to `functional.py` beside this file; nothing is gathered. A
gradient of parameters is reduced once, in backward. What cannot work is refused in one sentence."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpnorm import compiled, functional, library
from warpnorm.errors import InputError
from warpnorm.parallel import functional as parallel
from warpnorm.parallel import rules


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One call of a function of `warpnorm.functional` whose input is a DTensor."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    name, input = function.__name__, given["input"]
    if given["out"] is not None:
        raise InputError(f"{name}: out= cannot be used with a DTensor; leave it away")
    if given["return_stats"]:
        raise InputError(f"{name}: return_stats= cannot be used with a DTensor; call it on its to_local()")
    if function in (functional.layer_norm, functional.rms_norm):
        return _over_rows(function, name, input, given)
    return _by_channel(function, name, input, given)


def _over_rows(function: Callable[..., Any], name: str, input: Any, given: dict[str, Any]) -> Any:
    shape = functional.arguments.resolve_shape(name, input, given["normalized_shape"], given["normalized_dim"])
    row_dims = input.ndim - len(shape)
    shared = _sharded(name, input, lambda dim: dim >= row_dims)
    wanted = {mesh_dim: input.placements[mesh_dim].dim - row_dims for mesh_dim in shared}
    parameters = {
        what: _parameter(name, what, given.get(what), input, wanted) for what in ("weight", "bias") if what in given
    }
    local = _here(input, input.placements)
    own = tuple(local.shape[row_dims:])
    if not shared:
        output = function(local, own, **parameters, eps=given["eps"], weight_offset=given["weight_offset"])
    else:
        if given["weight_offset"] or not isinstance(parameters["weight"], torch.Tensor | None):
            raise InputError(f"{name}: a weight_offset or a number as weight cannot be used where ranks share a row")
        split = parallel.layer_norm if function is functional.layer_norm else parallel.rms_norm
        group = _group(name, input, shared, "normalizes over")
        output = split(local, own, **parameters, eps=given["eps"], group=group)
    return _placed(output, input)


def _by_channel(function: Callable[..., Any], name: str, input: Any, given: dict[str, Any]) -> Any:
    is_batch, is_group = function is functional.batch_norm, function is functional.group_norm
    is_computed = given.get("training", given.get("use_input_stats", True))
    by_channel = _sharded(name, input, lambda dim: dim == 1)
    by_place = _sharded(name, input, lambda dim: dim > 1)
    by_sample = _sharded(name, input, lambda dim: dim == 0)
    if by_channel and is_group:
        raise InputError(
            f"group_norm: input is placed as {_shown(input)}, but a group's channels must lie on one rank: shard samples"
        )
    if by_place and is_computed and not is_batch:
        raise InputError(
            f"{name}: input is placed as {_shown(input)}, but a sample's channel must lie on one rank: shard samples"
        )
    is_tracked = given.get("running_mean") is not None
    if by_sample and is_computed and is_tracked and not is_batch:
        raise InputError(
            f"{name}: input is placed as {_shown(input)}, but running statistics are averaged over all samples: use "
            "track_running_stats=False, or shard channels"
        )
    wanted = dict.fromkeys(by_channel, 0)
    names = [n for n in ("weight", "bias", "running_mean", "running_var") if n in given]
    tensors = {what: _parameter(name, what, given[what], input, wanted) for what in names}
    rest = {n: v for n, v in given.items() if n not in (*names, "input", "out", "return_stats")}
    local = _here(input, input.placements)
    shared = (*by_sample, *by_place)
    if is_batch and is_computed and shared:
        group = _group(name, input, shared, "takes its statistics over")
        return _placed(parallel.batch_norm(local, **tensors, **rest, group=group), input)
    return _placed(function(local, **tensors, **rest), input)


def _sharded(name: str, input: Any, asked: Callable[[int], bool]) -> tuple[int, ...]:
    """The dimensions of the mesh over which a dimension that is asked for is split."""
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for mesh_dim, placement in enumerate(input.placements):
        if type(placement) is Shard:
            if asked(placement.dim % input.ndim):
                found.append(mesh_dim)
        elif not isinstance(placement, Replicate):
            raise InputError(
                f"{name}: input is placed as {_shown(input)}, but must be Shard or Replicate: redistribute it first"
            )
    return tuple(found)


def _group(name: str, input: Any, shared: Sequence[int], does: str) -> Any:
    """The process group of the one dimension of the mesh whose ranks share rows."""
    if len(shared) > 1:
        raise InputError(
            f"{name}: input is placed as {_shown(input)}, and {does} what {len(shared)} dimensions of the mesh split; one "
            "may: flatten the mesh, or redistribute the input"
        )
    return input.device_mesh.get_group(shared[0])


def _parameter(name: str, what: str, parameter: Any, input: Any, wanted: dict[int, int]) -> Any:
    """What lies here of a parameter or a running statistic that is split as `wanted` (dimension of the mesh -> its own), and
    whole on all other ranks. Its gradient is partial where samples are split."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(parameter, torch.Tensor) or (parameter.ndim == 0 and not isinstance(parameter, DTensor)):
        return parameter
    is_buffer = what.startswith("running")
    if not isinstance(parameter, DTensor):
        if is_buffer and not wanted:
            return parameter
        raise InputError(f"{name}: input is a DTensor, but {what} is not: distribute it too, with distribute_module")
    if parameter.device_mesh != input.device_mesh:
        raise InputError(f"{name}: input is on {input.device_mesh}, but {what} is on {parameter.device_mesh}")
    placements = tuple(Shard(wanted[i]) if i in wanted else Replicate() for i in range(input.device_mesh.ndim))
    if is_buffer:
        if parameter.placements != placements:
            raise InputError(f"{name}: {what} is placed as {_shown(parameter)}, but must be placed as {placements}")
        return parameter.to_local()
    gradients = tuple(
        own if i in wanted or isinstance(placement, Replicate) else Partial()
        for i, (placement, own) in enumerate(zip(input.placements, placements, strict=True))
    )
    if parameter.placements != placements:
        parameter = parameter.redistribute(placements=placements)
    return _here(parameter, gradients)


def _here(tensor: Any, gradients: Sequence[Any]) -> torch.Tensor:
    """What lies here, differentiable; its gradient is placed as `gradients`."""
    if torch.compiler.is_compiling():
        if tuple(gradients) != tuple(tensor.placements):
            tensor = tensor.redistribute(placements=tensor.placements)  # backward reduces what is partial
        return tensor.to_local(grad_placements=gradients)
    return Here.apply(tensor, tuple(gradients))


class Here(torch.autograd.Function):
    """(DTensor, placements of its gradient) -> what lies here: a plain tensor, also where a collective was on its way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, gradients: tuple[Any, ...]) -> torch.Tensor:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        ctx.mesh, ctx.placements, ctx.gradients = tensor.device_mesh, tensor.placements, gradients
        ctx.layout = tensor.shape, tensor.stride()
        local = tensor._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor

        shape, stride = ctx.layout
        grad = DTensor.from_local(grads[0], ctx.mesh, ctx.gradients, run_check=False, shape=shape, stride=stride)
        if ctx.gradients != tuple(ctx.placements):
            grad = grad.redistribute(placements=ctx.placements)
        return grad, None


def _placed(output: torch.Tensor, input: Any) -> Any:
    from torch.distributed.tensor import DTensor

    stride = input.stride() if output.stride() == input._local_tensor.stride() else _contiguous(input.shape)
    return DTensor.from_local(
        output, input.device_mesh, input.placements, run_check=False, shape=input.shape, stride=stride
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _shown(tensor: Any) -> str:
    return f"({', '.join(map(repr, tensor.placements))})"


functional.on_shards = run  # which is below this file, and does not know it
library.on_shards = rules.register
compiled.on_shards = rules.takes
compiled.SHARED = (parallel.batch_norm, parallel.layer_norm, parallel.rms_norm)
