"""What the programs of a call tell each other by: words of its own, or the mailbox of a stream."""

from typing import Any, NamedTuple

import torch

from warpnorm.kernels.messages import BOXES
from warpnorm.plan.plan import Plan

EMPTY, ZEROS, MAILBOX = range(3)


class Shared(NamedTuple):
    """Parts of one allocation, of so many words each, which may have to be cleared; or a mailbox of so many teams, programs
    of one, and words of a message."""

    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    kind: int = EMPTY

    def take(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if not self.sizes:
            return ()
        if self.kind == MAILBOX:
            teams, splits, length = self.sizes
            return (team_mailbox(teams, splits, length, device),)
        make = torch.zeros if self.kind == ZEROS else torch.empty
        return make(sum(self.sizes), dtype=self.dtype, device=device).split(self.sizes)

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
        _stock.append(torch.zeros(STOCK, dtype=torch.int64, device=device))
        _left[device] = STOCK
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, splits, length, words)
    box = _mailboxes.get(key)
    if box is None:
        if len(_mailboxes) >= MOST_MAILBOXES:
            _mailboxes.clear()
        box = _mailboxes[key] = torch.zeros(words, dtype=torch.int64, device=device)
    return box


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
