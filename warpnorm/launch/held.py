"""The launches of one call of a norm by channel, of pattern `held`: one forward; one backward, and the sums of those
gradients that are sums over rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warpnorm.codegen import along
from warpnorm.launch.backward import ChannelBackwardLaunch
from warpnorm.launch.forward import ForwardLaunch
from warpnorm.launch.shared import Shared, mailbox
from warpnorm.plan import grid
from warpnorm.space import Space


@dataclass(frozen=True)
class HeldForwardLaunch(ForwardLaunch):
    def steps(
        self, operands: Any, outputs: Any, statistics: Any, shared: Any, of_running: tuple[Any, Any]
    ) -> Iterator[tuple[Any, ...]]:
        programs = grid.launched(self.plan, self.programs)
        yield self.kernel, programs, operands, outputs, *shared, statistics, *self.geometry, *of_running

    @cached_property
    def units(self) -> int:
        return self.space.statistics

    @cached_property
    def shared(self) -> Shared:
        """Of a message: a mean and M2, and of long mantissas what the mean is rounded off by."""
        return mailbox(self.plan, *self.programs, 2 if self.problem.has_long_mantissas else 1)

    @cached_property
    def geometry(self) -> tuple[Any, ...]:
        return *_lines(self.space), *_rows(self.space), self.eps


@dataclass(frozen=True)
class HeldBackwardLaunch(ChannelBackwardLaunch):
    def main_steps(
        self, read: Any, written: Any, merged: Any, partials: Any, statistics: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        lines = (*_lines(self.space), self.space.rows)
        others = (written, merged, partials, *shared, statistics, *lines, *_rows(self.space))
        programs = grid.launched(self.plan, grid.held(self.plan, self.space))
        yield self.kernel, programs, read, *others

    @cached_property
    def shared(self) -> Shared:
        length = -(-along.sent(self.problem) // along.sums_a_word(self.problem))
        return mailbox(self.plan, *grid.held(self.plan, self.space), length)


def _lines(space: Space) -> tuple[Any, ...]:
    return space.strides, space.sizes


def _rows(space: Space) -> tuple[Any, ...]:
    return space.statistics, space.pieces, space.inner_rows, space.cols
