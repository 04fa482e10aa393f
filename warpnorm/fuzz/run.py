"""Calls until the time is up: rounds of some batches, each with a seed of its own, which repeats it. What fails is made
simpler, and the rounds go on."""

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from warpnorm.errors import WarpnormError
from warpnorm.fuzz import batches as drawn
from warpnorm.fuzz.case import Case
from warpnorm.fuzz.check import WrongError, check, forced_route, is_lost, names_of, quiet
from warpnorm.fuzz.draws import Draws, simplest
from warpnorm.fuzz.kinds import Choice

BATCHES = 3  # in a round
SHRINKING = 120.0  # seconds at most for one failure
MOST_FAILURES = 10


class TimeIsUpError(Exception):
    """Also where so many cases are done, or failures found."""


@dataclass(frozen=True)
class Failure:
    case: Case
    why: str
    seed: int  # of the round
    device: str

    @property
    def code(self) -> str:
        return self.case.code(self.device, names_of(self.case))


@dataclass
class Found:
    """What a run did."""

    seed: int
    seconds: float = 0.0
    cases: int = 0
    functions: int = 0
    failures: list[Failure] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def summary(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9)
        wrong = f"{len(self.failures)} failure{'' if len(self.failures) == 1 else 's'}"
        return (
            "interrupted: " * self.is_interrupted
            + f"{self.cases} cases in {self.functions} functions, {rate:.0f} a second, {wrong}; seed {self.seed}"
        )

    @property
    def record(self) -> dict[str, Any]:
        """As data."""
        failures = [{"seed": f.seed, "why": f.why, "code": f.code} for f in self.failures]
        return vars(self) | {"seconds": round(self.seconds, 1), "failures": failures}


@dataclass(frozen=True)
class Limits:
    """When a run ends, whichever comes first."""

    seconds: float
    cases: int | None = None
    functions: int | None = None

    def are_met(self, found: Found) -> bool:
        counts = ((self.cases, found.cases), (self.functions, found.functions), (MOST_FAILURES, len(found.failures)))
        return found.seconds > self.seconds or any(most is not None and count >= most for most, count in counts)


class Watch(Protocol):
    """Who is told what a run does, and ends it by TimeIsUpError."""

    def begin(self, seed: int) -> None:
        """A round."""

    def function(self) -> None: ...

    def case(self, case: Case) -> None: ...

    def trial(self, case: Case) -> None:
        """Something simpler than what failed."""

    def failure(self, failure: Failure) -> None: ...


def run_rounds(seeds: Iterable[int], device: str, words: Sequence[str], watch: Watch) -> None:
    """Until `watch` ends it, or the device is lost."""
    choice, route = Choice.of(words), forced_route(device)
    for seed in seeds:
        watch.begin(seed)
        draws = Draws(seed)
        for _ in range(BATCHES):
            batch = drawn.batch(draws, choice, route, device == "cuda")
            watch.function()
            for case, choices in zip(batch.cases, batch.choices, strict=True):
                watch.case(case)
                try:
                    check(case, device)
                except Exception as error:
                    failed = [(case, _said(error))]  # each simpler than the one before
                    try:
                        _simplify(choices, choice, route, device, watch, failed)
                    finally:
                        watch.failure(Failure(*failed[-1], seed, device))
                    if is_lost(device):
                        return
                    break  # the others of its function may well be wrong in the same way


def _simplify(
    choices: list[int], choice: Choice, route: str, device: str, watch: Watch, failed: list[tuple[Case, str]]
) -> None:
    since = time.monotonic()

    def fails(case: Case) -> bool:
        watch.trial(case)
        try:
            check(case, device)
        except Exception as error:
            failed.append((case, _said(error)))
            return True
        return False

    def is_over() -> bool:
        return time.monotonic() > since + SHRINKING or is_lost(device)

    simplest(choices, lambda draws: drawn.single(draws, choice, route, device == "cuda"), fails, is_over)


def _said(error: Exception) -> str:
    if isinstance(error, (WrongError, WarpnormError)):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


class Here:
    """A run in this process, which counts for itself."""

    def __init__(self, found: Found, limits: Limits, tell: Callable[[Found], None]) -> None:
        self.found, self._limits, self._tell, self._start = found, limits, tell, time.monotonic()

    def begin(self, seed: int) -> None:
        self._go_on()

    def function(self) -> None:
        self._go_on()
        self.found.functions += 1

    def case(self, case: Case) -> None:
        self.found.seconds = time.monotonic() - self._start
        if self.found.seconds > self._limits.seconds or self.found.cases == self._limits.cases:
            raise TimeIsUpError
        self.found.cases += 1
        self._tell(self.found)

    def trial(self, case: Case) -> None:
        pass

    def failure(self, failure: Failure) -> None:
        self.found.failures.append(failure)

    def _go_on(self) -> None:
        self.found.seconds = time.monotonic() - self._start
        if self._limits.are_met(self.found):
            raise TimeIsUpError


def fuzz(
    limits: Limits,
    seed: int,
    device: str,
    words: Sequence[str] = (),
    tell: Callable[[Found], None] = lambda found: None,
) -> Found:
    """In this process."""
    found, start = Found(seed), time.monotonic()
    try:
        with quiet():
            run_rounds(itertools.count(seed), device, words, Here(found, limits, tell))
    except TimeIsUpError:
        pass
    except KeyboardInterrupt:
        found.is_interrupted = True
    found.seconds = time.monotonic() - start
    return found
