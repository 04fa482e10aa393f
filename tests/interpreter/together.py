"""All programs of a launch at the same time, as a GPU runs them that share a row: each is a thread, one runs at a time, and
it makes room for another, drawn at random, where it waits for a message and around each that it sends. Programs that all
wait are found out."""

import ctypes
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from warpnorm.kernels.messages import RECEIVE
from warpnorm.launch import forward, held
from warpnorm.plan.plan import HELD, TEAM

PATIENCE = 100  # turns in a row in which nobody comes further, for each program


class StuckError(Exception):
    """All programs wait."""


class Programs:
    """Of one launch. `turn` is the one that runs."""

    def __init__(self, grid: tuple[int, ...], seed: int) -> None:
        self.places = list(np.ndindex(*grid))
        self.left = set(range(len(self.places)))
        self.turn, self.waited = 0, 0
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.error: BaseException | None = None

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        threads = [threading.Thread(target=self._run, args=(i, function, arguments)) for i in range(len(self.places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self, program: int, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            self._take(program)
            function(**arguments)
        except BaseException as error:
            with self.changed:
                self.error = self.error or error
        finally:
            with self.changed:
                self.left.discard(program)
                self.waited = 0
                self._give()

    def make_room(self, waits: bool = False) -> None:
        """For any program, perhaps the one that asks; `waits`: it cannot go on."""
        program = self.turn
        with self.changed:
            self.waited = self.waited + 1 if waits else 0
            if self.waited > PATIENCE * len(self.left):
                raise StuckError(f"{len(self.left)} of {len(self.places)} programs wait for messages that nobody sends")
            self._give()
        self._take(program)

    def _give(self) -> None:
        if self.left:
            self.turn = self.random.choice(sorted(self.left))
        self.changed.notify_all()

    def _take(self, program: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == program or self.error is not None)
            if self.error is not None:
                raise StuckError("another program failed")
        interpreter.interpreter_builder.set_grid_idx(*self.places[program])


class Gathered:
    """Stands for the function that the interpreter calls program by program: the last call runs all."""

    def __init__(self, function: Any, programs: Programs) -> None:
        self.__globals__, self.__name__ = function.__globals__, function.__name__
        self.__signature__ = inspect.signature(function)
        self.function, self.programs, self.calls = function, programs, 0

    def __call__(self, **arguments: Any) -> None:
        self.calls += 1
        if self.calls == len(self.programs.places):
            self.programs.run(self.function, arguments)


class Found:
    """What an instruction of the assembler gave."""

    def __init__(self, *results: np.ndarray) -> None:
        self.results = results

    def get_result(self, i: int) -> Any:
        return interpreter.TensorHandle(self.results[i], tl.int32)


@contextmanager
def at_once(seed: int = 0) -> Iterator[None]:
    """Launches of these patterns in a `with` block run their programs so; `seed` draws the order."""
    running: list[Programs] = []
    boxes: dict[Any, torch.Tensor] = {}
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    exchange = builder.create_atomic_rmw

    def launch_at_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.fn.__name__.startswith((TEAM, HELD)):
            running.append(Programs((*self.grid, 1, 1)[:3], seed + len(running)))
            self.fn = Gathered(self.fn, running[-1])
        launch(self, *args, **kwargs)

    def receive(self: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Found:
        assert asm == RECEIVE.value
        addresses, rounds = (value.data for value in values)
        while True:
            words = [ctypes.c_uint64.from_address(int(address)).value for address in addresses.ravel()]
            halves = np.array(words, np.uint64).view(np.int32).reshape(-1, 2)
            if (halves[:, 1] & 3 == rounds.ravel()).all():
                return Found(*(half.reshape(addresses.shape).copy() for half in halves.T))
            running[-1].make_room(waits=True)

    def send(self: Any, *arguments: Any) -> Any:
        running[-1].make_room()
        found = exchange(self, *arguments)
        running[-1].make_room()
        return found

    def box(teams: int, splits: int, length: int, device: torch.device) -> torch.Tensor:
        return boxes.setdefault((teams, splits, length), torch.zeros(teams * 4 * splits * length, dtype=torch.int64))

    replaced: list[tuple[Any, str, Any]] = [
        (interpreter.GridExecutor, "__call__", launch_at_once), (builder, "create_inline_asm", receive),
        (builder, "create_atomic_rmw", send), (forward, "team_mailbox", box), (held, "team_mailbox", box),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
