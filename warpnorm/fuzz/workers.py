"""Several processes share a run: of N each takes every Nth round. One that dies is a failure itself, of the call that it
was in, and the others go on."""

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

from warpnorm.errors import UnavailableError
from warpnorm.fuzz.case import Case
from warpnorm.fuzz.check import quiet
from warpnorm.fuzz.run import Failure, Found, Limits, TimeIsUpError, run_rounds
from warpnorm.interrupts import deaf, leave_to_parent

HANGING = 300.0  # seconds after which a call will not end
ENDING = 30.0  # seconds that a process has to end what it is at
TICK = 0.2


class Sender:
    """A run in a process that others count for: it says where it is before it goes there, and ends when it is told
    anything."""

    def __init__(self, wire: connection.Connection) -> None:
        self._wire = wire

    def begin(self, seed: int) -> None:
        self._wire.send(("begin", seed))

    def function(self) -> None:
        self._wire.send(("function", None))

    def case(self, case: Case) -> None:
        self._say("case", case)

    def trial(self, case: Case) -> None:
        self._say("trial", case)

    def failure(self, failure: Failure) -> None:
        self._wire.send(("failure", failure))

    def _say(self, what: str, case: Case) -> None:
        if self._wire.poll():
            raise TimeIsUpError
        self._wire.send((what, case))


def work(wire: connection.Connection, first: int, step: int, device: str, words: Sequence[str]) -> None:
    """What a process does."""
    leave_to_parent()
    with suppress(TimeIsUpError, BrokenPipeError), quiet():
        run_rounds(itertools.count(first, step), device, words, Sender(wire))
    with suppress(BrokenPipeError):
        wire.send(("end", None))


@dataclass
class Worker:
    process: BaseProcess
    wire: connection.Connection
    since: float
    seed: int = 0
    case: Case | None = None
    has_ended: bool = False

    def hear(self, found: Found) -> bool:
        """Takes in one message; False where there will be no more."""
        try:
            what, content = self.wire.recv()
        except (EOFError, OSError):
            return False
        self.since = time.monotonic()
        if what == "begin":
            self.seed = content
        elif what == "function":
            found.functions += 1
        elif what in ("case", "trial"):
            self.case = content
            found.cases += what == "case"
        elif what == "failure":
            found.failures.append(content)
        else:
            self.has_ended = True
        return not self.has_ended

    def failure(self, why: str, device: str) -> Failure:
        if self.case is None:
            raise UnavailableError(f"a process of the run {why} before its first call")
        return Failure(self.case, why, self.seed, device)

    @property
    def how_it_died(self) -> str:
        code = self.process.exitcode or 0
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended by itself, with exit code {code}"


def fuzz_by_workers(
    jobs: int,
    limits: Limits,
    seed: int,
    device: str,
    words: Sequence[str] = (),
    tell: Callable[[Found], None] = lambda found: None,
) -> Found:
    """As run.fuzz, by several processes."""
    found, start = Found(seed), time.monotonic()
    workers: dict[Any, Worker] = {}
    try:
        for job in range(jobs):
            worker = _start(seed + job, jobs, device, words)
            workers[worker.wire] = worker
        while workers and not limits.are_met(found):
            _listen(workers, found, device)
            found.seconds = time.monotonic() - start
            tell(found)
    except KeyboardInterrupt:
        found.is_interrupted = True
    finally:
        found.seconds = time.monotonic() - start
        _end(workers, found, device)
    return found


def _start(first: int, step: int, device: str, words: Sequence[str]) -> Worker:
    context = get_context("spawn")
    wire, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, first, step, device, tuple(words)), daemon=True)
    with deaf():  # seconds pass until it gets to `work`
        process.start()
    theirs.close()
    return Worker(process, wire, time.monotonic())


def _listen(workers: dict[Any, Worker], found: Found, device: str) -> None:
    """To those that have something to say, for a moment; the dead ones are buried."""
    for wire in connection.wait(list(workers), TICK):
        worker = workers[wire]
        if worker.hear(found):
            continue
        del workers[wire]
        worker.process.join(ENDING)
        if not worker.has_ended:
            found.failures.append(worker.failure(worker.how_it_died, device))
    for wire, worker in list(workers.items()):
        if time.monotonic() > worker.since + HANGING:
            del workers[wire]
            worker.process.kill()
            worker.process.join(ENDING)
            found.failures.append(worker.failure(f"does not end: {HANGING:.0f} seconds have passed", device))


def _end(workers: dict[Any, Worker], found: Found, device: str) -> None:
    """All are told to; what they still find is heard, what they still count is not."""
    for wire in workers:
        with suppress(OSError):
            wire.send("end")
    late, until = Found(found.seed), time.monotonic() + ENDING
    with suppress(KeyboardInterrupt):
        while workers and time.monotonic() < until:
            _listen(workers, late, device)
    found.failures += late.failures
    for worker in workers.values():
        worker.process.kill()
        worker.process.join()
