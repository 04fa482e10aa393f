"""How a GPU's wall times and memory are taken, with a device that is made up."""

from collections.abc import Iterator

import pytest
import torch

from warpnorm.bench import timing


class Memory:
    """Of a device: `late` is what an earlier call's results still hold when a call begins."""

    def __init__(self, late: Iterator[int]) -> None:
        self.held, self.peak, self.late = 0, 0, late

    def call(self) -> None:
        self.peak = max(self.peak, self.held)
        self.held = 0  # the last results go, and as much comes
        self.peak = max(self.peak, 1000)

    def begin(self) -> int:
        self.held = next(self.late)
        return self.held

    def reset(self) -> None:
        self.peak = self.held


def test_memory_that_is_let_go_late_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(iter((990, 0, 990)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", memory.begin)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", memory.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory.peak)
    assert timing.peak_memory(memory.call) == 1000


def test_the_first_calls_of_a_loop_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still but in calls: the first twenty take ten times as long."""
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += 1e-2 if calls <= 20 else 1e-3

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.wall_time(call) == pytest.approx(1.0)
