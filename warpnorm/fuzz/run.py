"""Calls until the time is up: rounds of some batches, each with a seed of its own, which repeats it. What fails is
shrunk, and the rounds go on."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from warpnorm.errors import UnavailableError, WarpnormError
from warpnorm.fuzz.case import Case
from warpnorm.fuzz.check import WrongError, check, forced_route, names_of, poisoned

BATCHES = 9  # in a round; from 10 on hypothesis begins with small ones
SHRINKING = 120.0  # seconds at most for one failure
MOST_FAILURES = 10


class TimeIsUpError(BaseException):
    """Past hypothesis, which catches exceptions."""


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
    batches: int = 0
    rounds: int = 0
    failures: list[Failure] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def summary(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9)
        wrong = f"{len(self.failures)} failure{'' if len(self.failures) == 1 else 's'}"
        return f"{self.cases} cases in {self.batches} functions, {rate:.0f} a second, {wrong}; seed {self.seed}"


def fuzz(
    seconds: float,
    seed: int,
    device: str,
    words: Sequence[str] = (),
    batches: int | None = None,
    tell: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Until the time is up, or so many batches are done."""
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as seeded

        from warpnorm.fuzz import strategies
    except ModuleNotFoundError as error:
        raise UnavailableError("fuzz needs hypothesis: pip install hypothesis") from error
    strategy = strategies.batches(strategies.Choice.of(words), forced_route(device))
    found, start = Found(seed), time.monotonic()
    chosen = settings(
        max_examples=BATCHES, deadline=None, database=None, report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def run_round(own_seed: int) -> None:
        failed: list[tuple[Case, str]] = []  # each simpler than the one before
        since = 0.0

        def run_batch(cases: list[Case]) -> None:
            nonlocal since
            now = time.monotonic()
            if failed and now > since + SHRINKING:
                raise TimeIsUpError
            if not failed:
                if now > start + seconds or (batches is not None and found.batches >= batches):
                    raise TimeIsUpError
                found.batches += 1
            for case in cases:
                if not failed:
                    found.cases += 1
                    found.seconds = time.monotonic() - start
                    tell(found)
                try:
                    check(case, device)
                except Exception as error:
                    since = since or time.monotonic()
                    failed.append((case, _said(error)))
                    raise

        try:
            seeded(own_seed)(chosen(given(strategy)(run_batch)))()
        except TimeIsUpError:
            if not failed:
                raise
        except Exception:
            if not failed:
                raise
        finally:
            if failed:
                found.failures.append(Failure(*failed[-1], own_seed, device))

    try:
        with poisoned():
            while len(found.failures) < MOST_FAILURES:
                run_round(seed + found.rounds)
                found.rounds += 1
    except TimeIsUpError:
        pass
    except KeyboardInterrupt:
        found.is_interrupted = True
    found.seconds = time.monotonic() - start
    return found


def _said(error: Exception) -> str:
    if isinstance(error, (WrongError, WarpnormError)):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def run_fuzz(console: Console, minutes: float, seed: int, device: str, words: Sequence[str]) -> Found:
    """With a line that says how far it is, and what failed at the end."""
    console.print(f"seed {seed}, on {device} by {forced_route(device)}", highlight=False)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("the first functions are compiled")
        found = fuzz(60 * minutes, seed, device, words, tell=lambda f: progress.update(task, description=f.summary))
    for number, failure in enumerate(found.failures, 1):
        console.rule(f"failure {number}: --seed {failure.seed}", style="red")
        console.print(failure.why, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(failure.code, markup=False, highlight=False, soft_wrap=True)
    console.print(found.summary, highlight=False, soft_wrap=True)
    return found
