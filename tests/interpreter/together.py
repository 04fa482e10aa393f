"""Programs of a launch at the same time, as a GPU runs them: those of a team all, others as many as there is room for, which
begin in the order of their numbers. Each is a thread, one runs at a time, and it makes room for another, drawn at random,
where it waits for numbers and around sending them. Programs that all wait are found out."""

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
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from warpnorm.kernels.messages import (
    ASK,
    MULTIPLY_32,
    MULTIPLY_64,
    RECEIVE,
    RECEIVE_ASKED,
    RECEIVE_PAIR,
    RECEIVE_TWO,
    RECEIVE_TWO_ASKED,
    RECEIVE_TWO_PAIRS,
)
from warpnorm.kernels.pointwise import MOVE, PREFETCH
from warpnorm.kernels.words import WAIT_32, WAIT_64
from warpnorm.launch import shared
from warpnorm.plan.plan import HELD, TEAM

PATIENCE = 100  # turns in a row in which nobody comes further, for each program


class StuckError(Exception):
    """All programs wait."""


class Programs:
    """Of one launch, of which `room` run at the same time. `turn` is the one that goes on."""

    def __init__(self, grid: tuple[int, ...], seed: int, room: int | None) -> None:
        self.places = list(np.ndindex(*reversed(grid)))  # x runs fastest
        self.waiting = list(range(len(self.places)))
        self.running: dict[int, threading.Thread] = {}
        self.room = room or len(self.places)
        self.turn, self.turns_without = 0, 0
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.error: BaseException | None = None
        self.is_done = False

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        with self.changed:
            while (self.waiting or self.running) and self.error is None:
                while self.waiting and len(self.running) < self.room:
                    program = self.waiting.pop(0)
                    self.running[program] = threading.Thread(target=self._run, args=(program, function, arguments))
                    self.running[program].start()
                before = len(self.running)
                self._give()
                self.changed.wait_for(lambda before=before: len(self.running) < before or self.error is not None)
            self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def _run(self, program: int, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        error: BaseException | None = None
        try:
            self._take(program)
            function(**arguments)
        except BaseException as raised:
            error = raised
        with self.changed:
            self.error = self.error or error
            del self.running[program]
            self.turn, self.turns_without = -1, 0
            self.changed.notify_all()

    def make_room(self, waits: bool = False) -> None:
        """For any program, perhaps the one that asks; `waits`: it cannot go on."""
        program = self.turn
        with self.changed:
            self.turns_without = self.turns_without + 1 if waits else 0
            if self.turns_without > PATIENCE * len(self.running):
                raise StuckError(f"{len(self.running)} of {len(self.places)} programs wait for what nobody sends")
            self._give()
        self._take(program)

    def _give(self) -> None:
        self.turn = self.random.choice(sorted(self.running))
        self.changed.notify_all()

    def _take(self, program: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == program or self.error is not None)
            if self.error is not None:
                raise StuckError("another program failed")
        interpreter.interpreter_builder.set_grid_idx(*reversed(self.places[program]))


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

    def __init__(self, *results: np.ndarray, dtype: Any = None) -> None:
        self.results, self.dtype = results, dtype

    def get_result(self, i: int) -> Any:
        found = self.results[i]
        return interpreter.TensorHandle(found, self.dtype or (tl.int64 if found.dtype.itemsize == 8 else tl.int32))


@contextmanager
def at_once(seed: int = 0, room: int = 4) -> Iterator[list[str]]:
    """Launches of kernels that wait, in a `with` block, run their programs so; `seed` draws the order, and of programs that
    are no team `room` run at the same time. Gives the instructions that somebody waited in vain at."""
    running: list[Programs] = []
    waits: list[str] = []
    boxes: dict[Any, torch.Tensor] = {}
    of_operands: list[tuple[int, int]] = []  # where those of the last launch lie, and end
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    exchange, store = builder.create_atomic_rmw, builder.create_masked_store

    def launch_at_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.fn.__name__.startswith((TEAM, HELD)) or kwargs.get("WAITS"):
            grid = (*self.grid, 1, 1)[:3]
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            starts = [tensor.untyped_storage().data_ptr() for tensor in tensors]
            sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
            of_operands[:] = [(first, first + size) for first, size in zip(starts, sizes, strict=True)]
            running.append(Programs(grid, seed + len(running), room if kwargs.get("WAITS") else None))
            self.fn = Gathered(self.fn, running[-1])
            launch(self, *args, **kwargs)
            running[-1].is_done = True
        else:
            launch(self, *args, **kwargs)

    def wait(self: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Found:
        if asm == MOVE.value:
            return Found(values[0].data, dtype=values[0].dtype)
        if asm == PREFETCH.value:
            places = values[0].data[..., None]
            inside = [(places >= first) & (places < end) for first, end in of_operands]
            assert np.any(inside, axis=0).all(), "what is brought to L2 lies in an operand"
            return Found(np.zeros(values[0].data.shape, np.int32))
        if asm == ASK.value:
            return Found(_read(values[0].data, np.int64).reshape(values[0].data.shape))
        if asm in (RECEIVE_TWO.value, RECEIVE_TWO_PAIRS.value):
            *words, round = values
            found = [wait(self, RECEIVE.value, "", [word, round], types, is_pure, pack) for word in words]
            return Found(*(half for word in found for half in word.results))
        if asm in (RECEIVE_ASKED.value, RECEIVE_TWO_ASKED.value):
            *words, round = values
            asked, addresses = words[: len(words) // 2], words[len(words) // 2 :]
            halves = [word.data.astype(np.int64).view(np.int32).reshape(-1, 2) for word in asked]
            if all((half[:, 1] & 3 == round.data.ravel()).all() for half in halves):
                shape = round.data.shape
                return Found(*(half.reshape(shape).copy() for word in halves for half in word.T))
            again = RECEIVE if len(addresses) == 1 else RECEIVE_TWO
            return wait(self, again.value, "", [*addresses, round], types, is_pure, pack)
        first, second = (value.data for value in values)
        if asm in (MULTIPLY_32.value, MULTIPLY_64.value):
            return Found(first * second)
        while True:
            if asm in (RECEIVE.value, RECEIVE_PAIR.value):
                halves = _read(first, np.uint64).view(np.int32).reshape(-1, 2)
                if (halves[:, 1] & 3 == second.ravel()).all():
                    return Found(*(half.reshape(first.shape).copy() for half in halves.T))
            else:
                assert asm in (WAIT_32.value, WAIT_64.value)
                words = np.where(first.ravel() == 0, _read(second, first.dtype), first.ravel())
                if words.all():
                    return Found(words.reshape(first.shape))
            waits.append(asm)
            running[-1].make_room(waits=True)

    def making_room(operation: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, *arguments: Any) -> Any:
            programs = running[-1] if running and not running[-1].is_done else None
            if programs:
                programs.make_room()
            found = operation(self, *arguments)
            if programs:
                programs.make_room()
            return found

        return replaced

    def box(teams: int, splits: int, length: int, device: torch.device) -> torch.Tensor:
        return boxes.setdefault((teams, splits, length), torch.zeros(teams * 4 * splits * length, dtype=torch.int64))

    replaced: list[tuple[Any, str, Any]] = [
        (interpreter.GridExecutor, "__call__", launch_at_once), (builder, "create_inline_asm", wait),
        (builder, "create_atomic_rmw", making_room(exchange)), (builder, "create_masked_store", making_room(store)),
        (shared, "team_mailbox", box),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield waits
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _read(addresses: np.ndarray, dtype: Any) -> np.ndarray:
    words = [ctypes.string_at(int(address), np.dtype(dtype).itemsize) for address in addresses.ravel()]
    return np.frombuffer(b"".join(words), dtype).copy()
