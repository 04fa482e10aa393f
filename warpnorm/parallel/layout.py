"""How a call is split over a mesh: which dimension of its elements each dimension of the mesh splits, and how operands,
results and gradients are placed then. Of shapes and placements alone, so that rules and calls use the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpnorm.errors import InputError
from warpnorm.norms import CHANNEL, GROUPS
from warpnorm.problem import Call


class Placed(NamedTuple):
    """An operand as a layout sees it: what it is called, its whole shape, and its placements."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Any, ...]


class Layout(NamedTuple):
    """`dims`: of each dimension of the mesh, the dimension of the call's elements that it splits; None where all ranks have
    the same. `shape` is that of the elements."""

    call: Call
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]

    @staticmethod
    def of(call: Call, operands: Sequence[Placed]) -> "Layout":
        """Operands that have all elements say how these are split; the others follow. What cannot be is an InputError."""
        from torch.distributed.tensor import Replicate, Shard

        shape = tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
        leading = [o for o in operands if tuple(o.shape) == shape] or operands
        dims: list[int | None] = []
        for mesh_dim in range(len(operands[0].placements)):
            found: dict[int, Placed] = {}
            for operand in operands:
                placement = operand.placements[mesh_dim]
                if type(placement) is not Shard and not isinstance(placement, Replicate):
                    raise InputError(
                        f"{call.norm.name}: {operand.name} is placed as {shown(operand.placements)}, but must be Shard or "
                        "Replicate: redistribute it first"
                    )
                if type(placement) is Shard and operand in leading:
                    found[placement.dim % len(operand.shape) + len(shape) - len(operand.shape)] = operand
            if len(found) > 1:
                both = " and ".join(f"{o.name} as {shown(o.placements)}" for o in found.values())
                raise InputError(f"{call.norm.name}: {both} are split in different ways: redistribute one of them")
            dims.append(next(iter(found), None))
        return Layout(call, shape, tuple(dims))

    @property
    def shared(self) -> tuple[int, ...]:
        """The dimensions of the mesh whose ranks share rows."""
        return tuple(m for m, dim in enumerate(self.dims) if dim is not None and not self._is_apart(dim))

    def _is_apart(self, dim: int) -> bool:
        """Whether rows stay whole where this dimension is split."""
        if not self.call.norm.is_computed:
            return True
        if self.call.norm.rows == CHANNEL:
            return dim == 1
        return dim == 0 if self.call.norm.rows == GROUPS else dim < len(self.shape) - self.call.col_dims

    def operand(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """The placements of an operand, or of a result, of this whole shape: split along with the elements, if it can be."""
        from torch.distributed.tensor import Replicate, Shard

        placements = []
        for dim in self.dims:
            own = -1 if dim is None else dim - (len(self.shape) - len(shape))
            is_split = own >= 0 and shape[own] == self.shape[own + len(self.shape) - len(shape)]
            placements.append(Shard(own) if is_split else Replicate())
        return tuple(placements)

    def gradient(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """The same of its gradient, of which each rank has a part where the operand is not split but elements are."""
        from torch.distributed.tensor import Partial, Replicate

        placements = zip(self.dims, self.operand(shape), strict=True)
        return tuple(Partial() if dim is not None and isinstance(p, Replicate) else p for dim, p in placements)

    def statistic(self) -> tuple[Any, ...]:
        """Of what has one number for each row, and the shape of the rows."""
        from torch.distributed.tensor import Replicate, Shard

        is_channel = self.call.norm.rows == CHANNEL
        return tuple(Replicate() if dim is None else Shard(0 if is_channel else dim) for dim in self.dims)


def shown(placements: Sequence[Any]) -> str:
    return f"({', '.join(map(repr, placements))})"
