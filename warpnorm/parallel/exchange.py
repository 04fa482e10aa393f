"""What ranks tell each other of a norm: forward the count, mean and variance of their part of every row, backward two sums
of every row. All gather all parts and merge them in the order of ranks, in float64: all hold the same bits."""

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warpnorm.errors import InputError

LARGEST_EXACT = 1 << 24  # integers below it are float32s: a larger count is sent as two numbers
HEADER = 3  # numbers before the statistics: the count, and how many rows there are
# What a rank will do in backward, told beside the count: it runs without gradients; it has them, but its input needs none;
# its input needs one
ABSENT, IDLE, NEEDING = 0, 1, 2
STANCES = 3


@dataclass(eq=False)
class Tally:
    """What this rank sent: messages, and their bytes."""

    messages: int = 0
    bytes: int = 0


_tallies: list[Tally] = []


@contextmanager
def tally() -> Iterator[Tally]:
    """Counts what norms tell other ranks inside a `with` block; what a compiler runs is not seen."""
    counted = Tally()
    _tallies.append(counted)
    try:
        yield counted
    finally:
        _tallies.remove(counted)


class Merged(NamedTuple):
    """Of all ranks: mean and biased variance of each row, float64, the number of values in a row, and what each rank will do
    in backward; no mean where the norm is not centred."""

    mean: torch.Tensor | None
    variance: torch.Tensor
    total: torch.Tensor
    stances: torch.Tensor


def world_size(group: Any) -> int:
    """How many ranks share a row; one where nothing was initialized, as in a program that was started alone."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise InputError(f"this process, rank {dist.get_rank()}, does not belong to the process group that was given")
    return size


def initialized() -> Any:
    """What decides whether there are ranks at all: the process group of all of them, or nothing."""
    return dist.group.WORLD if dist.is_available() else None


def present() -> Hashable:
    """The same for the key of a table, which must not hold it: a group that is destroyed ends its threads only when nobody
    has it any more, and one of those that runs on while the interpreter ends can take the process with it."""
    return None if (world := initialized()) is None else weakref.ref(world)


def rank_in(group: Any) -> int:
    return dist.get_rank(group) if world_size(group) > 1 else 0


def name_of(group: Any) -> str:
    """Of a process group whose ranks have something to tell each other; empty where there is one rank."""
    if world_size(group) == 1:
        return ""
    return str((initialized() if group is None else group).group_name)


def group_of(name: str) -> Any:
    found: Any = dist.distributed_c10d._resolve_process_group
    return found(name)


def stance(needs_gradient: bool) -> int:
    """Of this rank, whose input needs a gradient or not."""
    if not torch.is_grad_enabled():
        return ABSENT
    return NEEDING if needs_gradient else IDLE


def is_needed(stances: torch.Tensor) -> bool:
    """Whether some rank needs the sums of all in backward. Waits for a GPU, so it is asked where this rank needs none."""
    return bool((stances == NEEDING).any())


def check_stances(stances: torch.Tensor) -> None:
    """Before backward waits for somebody who will not come. A GPU is not asked: there the timeout ends it."""
    if not stances.is_cuda and not torch.compiler.is_compiling() and bool((stances == ABSENT).any()):
        missing = ", ".join(str(rank) for rank, own in enumerate(stances.tolist()) if own == ABSENT)
        raise InputError(
            f"ranks that share a norm take part in its backward together, but rank {missing} of the group ran forward "
            "without gradients: leave no_grad away there, or use it on all ranks"
        )


def merge_moments(count: int, mean: torch.Tensor | None, variance: torch.Tensor, group: Any, own: int) -> Merged:
    """`mean` and `variance` are of `count` values in each row here; zeros where there are none. `own` is what this rank
    will do in backward. One collective."""
    rows = variance.numel()
    numbers = (count // LARGEST_EXACT * STANCES + own, count % LARGEST_EXACT, rows % LARGEST_EXACT)
    header = [variance.new_full((1,), number) for number in numbers]
    parts = [variance] if mean is None else [mean, variance]
    gathered = gather(torch.cat([*header, *parts]), group).double()
    _check_rows(gathered[:, HEADER - 1], numbers[-1])
    stances = gathered[:, 0].remainder(STANCES)
    counts = (gathered[:, 0] - stances) / STANCES * LARGEST_EXACT + gathered[:, 1]
    total = in_order(counts)
    share = (counts / total.clamp(min=1.0))[:, None]
    variances = gathered[:, -rows:] if rows else gathered[:, :0]
    if mean is None:
        return Merged(None, in_order(share * variances), total, stances)
    means = gathered[:, HEADER : HEADER + rows]
    merged = in_order(share * means)
    return Merged(merged, in_order(share * (variances + (means - merged).square())), total, stances)


def anchor(merged: Merged, like: torch.Tensor) -> torch.Tensor | None:
    """What makes a rank whose input needs no gradient take part in backward, where another's does; nothing where none does.
    A compiler cannot be asked: there all ranks need it, or none."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_needed(merged.stances):
        return None
    return torch.zeros((), device=like.device, requires_grad=True)


def in_two(mean: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a dtype holds of a float64, and what it does not."""
    first = mean.to(dtype)
    return first, (mean - first.double()).to(dtype)


def gradient_terms(sums: list[torch.Tensor], rstd: torch.Tensor, count: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """What c gets by way of its statistics: an offset, unless the norm is not centred, and a slope along its deviation.
    `sums` are the gradients of mean, if there is one, and rstd here. All ranks send the same, whichever way they compute.
    One collective; docs/scaling.md has the derivation."""
    *of_mean, of_rstd = add_up(sums, group)
    count = count.clamp(min=1.0)
    slope = -of_rstd * rstd.double().pow(3) / count
    return [term.to(rstd.dtype) for term in (*(total / count for total in of_mean), slope)]


def add_up(parts: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """The sums of these, each in float64, over all ranks. One collective."""
    gathered = gather(torch.cat([part.reshape(-1) for part in parts]), group).double()
    total = in_order(gathered).split([part.numel() for part in parts])
    return [whole.view(part.shape) for whole, part in zip(total, parts, strict=True)]


def gather(message: torch.Tensor, group: Any) -> torch.Tensor:
    """(ranks, numbers) of equally long messages, the same on all ranks."""
    group = initialized() if group is None else group
    if torch.compiler.is_compiling():
        return _traced(message, group)
    device, ranks = message.device, dist.get_world_size(group)
    if message.is_cuda and dist.get_backend(group) == "gloo":
        message = message.cpu()
    for counted in _tallies:
        counted.messages, counted.bytes = counted.messages + 1, counted.bytes + message.nbytes
    gathered = message.new_empty(ranks * message.shape[0])
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # up to PyTorch 2.12
    all_gather(gathered, message, group=group)
    return gathered.view(ranks, -1).to(device) if message.numel() else gathered.view(ranks, 0).to(device)


def _traced(message: torch.Tensor, group: Any) -> torch.Tensor:
    """The same by an operator that compilers know. To import it takes two seconds: it brings PyTorch's compiler."""
    from torch.distributed import _functional_collectives as collectives

    all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    return all_gather(message, 0, group).view(-1, message.shape[0])


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, neighbours first, by additions of whole tensors: the same bits on any device."""
    while parts.shape[0] > 1:
        pairs = parts.shape[0] // 2 * 2
        parts = torch.cat([parts[0:pairs:2] + parts[1:pairs:2], parts[pairs:]])
    return parts[0]


def _check_rows(theirs: torch.Tensor, own: int) -> None:
    """What differs in length is not gathered as it was sent, but its header tells. A GPU is not waited for: it stops."""
    if torch.compiler.is_compiling():
        return
    if theirs.is_cuda:
        torch._assert_async((theirs == own).all(), "ranks that share a norm have different numbers of rows or channels")
    elif not bool((theirs == own).all()):
        found = ", ".join(f"{rows:g}" for rows in theirs.tolist())
        raise InputError(
            f"ranks that share a norm must have the same number of rows or channels, but there are {own} here, and the "
            f"ranks sent {found}"
        )
