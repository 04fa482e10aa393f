"""What the programs of a call tell each other by: words of its own, memory that a stream lends, or the stream's mailbox."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from warpnorm.kernels.messages import BOXES
from warpnorm.launch.lasting import LARGEST_LOAN, lasting, new_lender
from warpnorm.locks import Lock
from warpnorm.plan.plan import Plan

EMPTY, ZEROS, MAILBOX = range(3)


class Shared(NamedTuple):
    """Parts of one allocation, of so many words each, which may have to be cleared; or a mailbox of so many teams, programs
    of one, and words of a message."""

    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    kind: int = EMPTY

    def take(self, device: torch.device, memory: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """`memory`: bytes that are at hand, `nbytes` of them."""
        if not self.sizes:
            return ()
        if self.kind == MAILBOX:
            teams, splits, length = self.sizes
            return (team_mailbox(teams, splits, length, device),)
        words = (
            torch.empty(sum(self.sizes), dtype=self.dtype, device=device) if memory is None else memory.view(self.dtype)
        )
        return (words.zero_() if self.kind == ZEROS else words).split(self.sizes)

    @property
    def nbytes(self) -> int:
        return 0 if self.kind == MAILBOX else sum(self.sizes) * self.dtype.itemsize

    @property
    def parts(self) -> int:
        """How many tensors are taken."""
        return 1 if self.kind == MAILBOX else len(self.sizes)

    @property
    def described(self) -> tuple[tuple[int, ...], int, int]:
        """As the compiled launcher takes it."""
        sizes = self.sizes
        if self.kind == MAILBOX:
            teams, splits, length = sizes
            sizes = (_words(teams, splits, length), *sizes)
        return sizes, self.dtype.itemsize, self.kind


MOST_LENDERS = 64
APART = 256  # bytes: each part begins at a multiple of them
_lenders: dict[Any, torch.Tensor] = {}
_lock = Lock()
Parts = tuple[torch.Tensor, ...]


@contextmanager
def lent(
    sizes: Sequence[int], dtype: torch.dtype, shared: Shared, device: torch.device
) -> Iterator[tuple[Parts, Parts]]:
    """Tensors of so many elements, and what programs share, for launches in the block. Another thread waits with its own:
    the same memory is cleared for it."""
    padded = [-(-size * dtype.itemsize // APART) * APART for size in sizes]
    need = sum(padded) + shared.nbytes
    if not 0 < need <= LARGEST_LOAN or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield tuple([torch.empty(size, dtype=dtype, device=device) for size in sizes]), shared.take(device)
        return
    with _lock:
        *parts, words, _ = _lender(device).split([*padded, shared.nbytes, LARGEST_LOAN - need])
        ours = [part.view(dtype)[:size] for part, size in zip(parts, sizes, strict=True)]
        yield tuple(ours), shared.take(device, words)


def _lender(device: torch.device) -> torch.Tensor:
    """Of the current stream: others may run beside it."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    memory = _lenders.get(key)
    if memory is None:
        if len(_lenders) >= MOST_LENDERS:
            _lenders.clear()
        memory = _lenders[key] = new_lender(device)
    return memory


def mailbox(plan: Plan, teams: int, splits: int, length: int = 1) -> Shared:
    """A lone program tells nobody."""
    return Shared((1,)) if plan.splits == 1 else Shared((teams, splits, length), kind=MAILBOX)


# Streams and teams of other sizes are few, or come one after another. A launch that still waits on its stream has what is
# dropped: memory of a stream is given to later work of the same stream alone
MOST_MAILBOXES = 256
_mailboxes: dict[Any, torch.Tensor] = {}
# Cleared words for the mailboxes of graphs: 1 MB at a time, 16 at the most. They are never given back, since graphs do not
# say when they are gone
STOCK, MOST_STOCKS = 1 << 17, 16
_stock: list[torch.Tensor] = []
_left: dict[torch.device, int] = {}


def team_mailbox(teams: int, splits: int, length: int, device: torch.device) -> torch.Tensor:
    """Where the programs of a team leave their sums for each other, in messages of `length` words: one for each stream,
    whose launches come one after another, and for each kind of team, whose programs have then all sent equally many."""
    words = _words(teams, splits, length)
    if torch.cuda.is_current_stream_capturing():  # the graph may be replayed beside anything
        return _from_stock(words, device)
    if _left.get(device, 0) < STOCK // 2 and len(_stock) < MOST_STOCKS:
        _stock.append(_zeros(STOCK, device))
        _left[device] = STOCK
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, splits, length, words)
    box = _mailboxes.get(key)
    if box is None:
        if len(_mailboxes) >= MOST_MAILBOXES:
            _mailboxes.clear()
        box = _mailboxes[key] = _zeros(words, device)
    return box


def _zeros(words: int, device: torch.device) -> torch.Tensor:
    return lasting(lambda: (torch.zeros(words, dtype=torch.int64, device=device),), device)[0]


def _words(teams: int, splits: int, length: int) -> int:
    return teams * BOXES.value * splits * length


def _from_stock(words: int, device: torch.device) -> torch.Tensor:
    """A mailbox for a launch in a graph, which nobody else ever has: one that was cleared beforehand, as long as there are,
    so that the graph need not do so."""
    left = _left.get(device, 0) - -(-words // 2) * 2  # each begins at a multiple of 16 bytes
    if left < 0:
        return torch.zeros(words, dtype=torch.int64, device=device)
    _left[device] = left
    stock = next(stock for stock in reversed(_stock) if stock.device == device)
    return stock[left : left + words]
