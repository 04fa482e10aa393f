"""A run on a console: a line that says how far it is, and at the end what failed, as code."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from warpnorm.fuzz.check import forced_route
from warpnorm.fuzz.kinds import Choice
from warpnorm.fuzz.run import Found, Limits, fuzz
from warpnorm.fuzz.workers import fuzz_by_workers


def run_fuzz(console: Console, limits: Limits, seed: int, device: str, words: Sequence[str], jobs: int = 1) -> Found:
    Choice.of(words)  # before any process starts
    by = f"{forced_route(device)}, {jobs} processes" if jobs > 1 else forced_route(device)
    console.print(f"seed {seed}, on {device} by {by}", highlight=False)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("the first functions are compiled")

        def tell(found: Found) -> None:
            if found.cases:
                progress.update(task, description=found.summary)

        if jobs > 1:
            found = fuzz_by_workers(jobs, limits, seed, device, words, tell)
        else:
            found = fuzz(limits, seed, device, words, tell)
    for number, failure in enumerate(found.failures, 1):
        console.rule(f"failure {number}: --seed {failure.seed}", style="red")
        console.print(failure.why, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(failure.code, markup=False, highlight=False, soft_wrap=True)
    console.print(found.summary, highlight=False, soft_wrap=True)
    return found
