"""A fused function on DTensors: its call on what lies here of its operands. Operands are seen through the function's views
as DTensors, so that nothing is taken from the wrong place; what cannot be run in this way is an InputError that says why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpnorm.errors import InputError
from warpnorm.library import is_sharded
from warpnorm.norms import GROUPS
from warpnorm.parallel.layout import Layout, Placed, shown
from warpnorm.parallel.shards import Here
from warpnorm.trace import fusion
from warpnorm.trace.arrange import Prepared

aten = torch.ops.aten
# Views that leave something away, and where they say of which dimension
CUTS = dict.fromkeys((aten.select.int, aten.slice.Tensor, aten.unbind.int), 0)
CUTS |= dict.fromkeys((aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default), 1)


class Opened(NamedTuple):
    """`prepared` is for `operands`, which lie here; `tensors` are the function's, with what lies here of the running
    statistics; `group` shares the rows, if anybody does."""

    prepared: Prepared
    operands: list[torch.Tensor]
    tensors: list[torch.Tensor]
    group: Any
    layout: Layout
    mesh: Any

    def placed(self, output: torch.Tensor) -> Any:
        """A result as a DTensor."""
        from torch.distributed.tensor import DTensor

        placements, shape = self.layout.operand(self.layout.shape), self.layout.shape
        strides, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (output.stride(dim), -dim)):
            strides[dim], step = step, step * max(shape[dim], 1)
        if output.is_contiguous():
            strides = list(torch.empty(shape, device="meta").stride())
        return DTensor.from_local(
            output, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )


def opened(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> Opened:
    operands, layout, mesh = placed(prepared, tensors)
    local = [_here(operand, layout) if is_sharded(operand) else operand for operand in operands]
    group = mesh.get_group(layout.shared[0]) if layout.shared else None
    return Opened(alone(prepared), local, _buffers(prepared.captured, tensors, layout), group, layout, mesh)


def alone(prepared: Prepared) -> Prepared:
    """For operands that are seen through views already."""
    inputs = tuple(fusion.Input(k, ()) for k in range(len(prepared.inputs)))
    return prepared._replace(inputs=inputs, order=None)


def placed(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Layout, Any]:
    """The operands, DTensors through the function's views, how they are split, and their mesh."""
    captured = prepared.captured
    name = captured.call.norm.name
    if captured.draws:
        raise InputError(f"{name}: what is drawn for a DTensor has to be drawn by PyTorch, so that ranks agree")
    if captured.ranks:
        raise InputError(f"{name}: a DTensor says itself which ranks share its rows: call the norm of warpnorm instead")
    pairs = zip(prepared.inputs, captured.names, strict=True)
    operands: list[Any] = [_seen(i, tensors, what) for i, what in pairs]
    meshes = [operand.device_mesh for operand in operands if is_sharded(operand)]
    if not meshes:
        raise InputError(f"{name}: none of its operands is a DTensor")
    for what, operand in zip(captured.names, operands, strict=True):
        if not is_sharded(operand) and operand.ndim > 0:
            raise InputError(f"{name}: other operands are DTensors, but {what} is not: distribute it too")
    if any(mesh != meshes[0] for mesh in meshes):
        raise InputError(f"{name}: its operands are on different meshes")
    return operands, layout_of(captured, operands), meshes[0]


def stand_ins(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> tuple[Prepared, list[torch.Tensor], str]:
    """Of a call that is described, not run: what it is prepared for, empty tensors like what lies here of its operands, and
    how it runs. Whole ones where it runs as plain PyTorch."""
    try:
        operands, layout, mesh = placed(prepared, tensors)
        _buffers(prepared.captured, tensors, layout)
    except InputError as error:
        return prepared, [_empty_like(tensor, tensor.shape) for tensor in tensors], f"as plain PyTorch, because {error}"
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    found = []
    for operand in operands:
        shape = list(operand.shape)
        for size, rank, placement in zip(mesh.shape, coordinate, layout.operand(shape), strict=True):
            if placement.is_shard():
                longest = -(-shape[placement.dim] // size)
                shape[placement.dim] = max(min(longest, shape[placement.dim] - rank * longest), 0)
        found.append(_empty_like(operand, shape))
    how = f", on what lies here of DTensors that are placed as {shown(layout.operand(layout.shape))}"
    if layout.shared:
        how += ", in three steps: ranks share its rows, so its statistics are taken first and exchanged"
    return alone(prepared), found, how


def _empty_like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    empty = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def _seen(input: fusion.Input, tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """A tensor through views."""
    tensor = tensors[input.index]
    for move in input.moves:
        is_cut = is_sharded(tensor) and move.target in CUTS
        tensor = _cut(tensor, move, name) if is_cut else move.of_user(tensor)
    return tensor


def _cut(tensor: Any, move: Any, name: str) -> Any:
    """A part of what lies here: PyTorch gathers the gradient of one that it cuts out itself."""
    from torch.distributed.tensor import DTensor, Shard

    at, named = CUTS[move.target], dict(move.kwargs)
    dim = (move.args[at] if len(move.args) > at else named.get("dim", 0)) % tensor.ndim
    part = move(torch.empty(tensor.shape, device="meta"))
    if part.shape == tensor.shape:  # as x[:, None] begins
        return tensor
    placements = []
    for placement in tensor.placements:
        if isinstance(placement, Shard):
            own = placement.dim % tensor.ndim
            if own == dim:
                raise InputError(f"{name} is placed as {shown(tensor.placements)}, and cut along what is split")
            placement = Shard(own - (own > dim and part.ndim < tensor.ndim))
        placements.append(placement)
    local = move.of_user(Here.apply(tensor, tensor.placements))
    shape, stride = part.shape, part.contiguous().stride()
    return DTensor.from_local(local, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def layout_of(captured: fusion.Captured, operands: Sequence[Any]) -> Layout:
    call = captured.call
    placed = [
        Placed(what, tuple(operand.shape), operand.placements)
        for what, operand in zip(captured.names, operands, strict=True)
        if is_sharded(operand)
    ]
    layout = Layout.of(call, placed)
    shared = layout.shared
    at = f"{call.norm.name}: {placed[0].name} is placed as {shown(placed[0].placements)}"
    if shared and call.norm.rows == GROUPS:
        raise InputError(f"{at}, but a group's channels must lie on one rank: shard samples")
    if len(shared) > 1:
        raise InputError(
            f"{at}, and {len(shared)} dimensions of the mesh split what is normalized; one may: flatten the mesh, or "
            "redistribute it"
        )
    if call.norm.rows == GROUPS and captured.effects and any(dim is not None for dim in layout.dims):
        raise InputError(f"{at}, but running statistics are averaged over all samples: use track_running_stats=False")
    return layout


def _here(operand: Any, layout: Layout) -> torch.Tensor:
    wanted = layout.operand(operand.shape)
    gradients = layout.gradient(operand.shape)
    if operand.placements != wanted:
        operand = operand.redistribute(placements=wanted)
    return Here.apply(operand, gradients)


def _buffers(captured: fusion.Captured, tensors: Sequence[Any], layout: Layout) -> list[torch.Tensor]:
    """Running statistics lie as channels do, or are the same everywhere."""
    from torch.distributed.tensor import Replicate, Shard

    found = list(tensors)
    by_channel = tuple(Shard(0) if dim == 1 else Replicate() for dim in layout.dims)
    for effect in captured.effects:
        is_count = isinstance(effect, fusion.Count)
        for buffer in (effect.counter,) if isinstance(effect, fusion.Count) else (effect.mean, effect.variance):
            tensor: Any = tensors[buffer.index]
            wanted = (Replicate(),) * len(layout.dims) if is_count else by_channel
            if is_sharded(tensor) and (tensor.placements != wanted or buffer.moves):
                raise InputError(
                    f"{captured.call.norm.name}: a running statistic is placed as {shown(tensor.placements)}, but must be "
                    f"placed as {shown(wanted)}"
                )
            if not is_sharded(tensor) and Shard(0) in wanted:
                raise InputError(
                    f"{captured.call.norm.name}: channels are split, but a running statistic is not a DTensor"
                )
            if is_sharded(tensor):
                found[buffer.index] = tensor.to_local()
    return found
