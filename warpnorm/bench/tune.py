"""The offline search: every plan that could run a norm, checked against today's choice and timed on this GPU. Nothing is
changed by it; what wins belongs into `plan/choose.py`, with the measurement beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from warpnorm import pipeline
from warpnorm.bench.cases import BACKWARD, BenchCase
from warpnorm.bench.check import Subject
from warpnorm.bench.run import in_a_line
from warpnorm.fuse import NOTHING, arrange, fuse
from warpnorm.plan import device as devices
from warpnorm.plan import search
from warpnorm.plan.plan import Plan
from warpnorm.problem import View

SHOWN = 10
# A plan may sum in another order than today's: by how many roundings of a result it may differ
ROUNDINGS = 8


@dataclass
class Trial:
    plan: Plan
    ms: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Trials:
    """`all` begins with today's choice."""

    case: BenchCase
    all: list[Trial]

    @property
    def best(self) -> list[Trial]:
        return sorted((t for t in self.all if t.ms is not None), key=lambda t: t.ms or 0.0)

    @property
    def gain(self) -> float | None:
        """Today's time over the best one's."""
        today, best = self.all[0].ms, self.best
        return today / best[0].ms if today and best and best[0].ms else None


def tune(case: BenchCase, device: str, console: Console, clock: Callable[[Callable[[], object]], float]) -> Trials:
    """`clock` gives the milliseconds of a call."""
    run, plans = _prepared(case, device)
    trials = [Trial(plan) for plan in plans]
    expected = run(plans[0])
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(case.name, total=len(trials))
        try:
            for trial in trials:
                _try(trial, run, expected, clock)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("interrupted: plans that were tried are below")
    return Trials(case, trials)


def _prepared(case: BenchCase, device: str) -> tuple[Callable[[Plan | None], Sequence[torch.Tensor]], tuple[Plan, ...]]:
    """A case as a function of the plan, and the plans."""
    subject = Subject(case, device)
    leaves = [tensor.requires_grad_() for tensor in (*subject.full, *subject.parameters)]
    fused = fuse(case.workload.function)
    request = fused.request(NOTHING, (*leaves, *subject.buffers), {})
    call, operands = arrange(fused.prepare(request), request.tensors)
    wanted = tuple(i for i, o in enumerate(operands) if isinstance(o, torch.Tensor) and o.requires_grad)
    operands = [o.detach() if isinstance(o, torch.Tensor) else o for o in operands]
    target = devices.of(torch.device(device))
    outputs, statistics = pipeline.forward(call, operands)
    views = tuple(map(View.of, operands))
    if case.direction == BACKWARD:
        given = tuple(range(len(subject.grads)))
        planned = pipeline.plan_backward(call, (*views, *map(View.of, subject.grads)), given, wanted, target)
        plans = search.alternatives(planned[0], planned[2], target)

        def backward(plan: Plan | None) -> Sequence[torch.Tensor]:
            return list(pipeline.backward(call, operands, subject.grads, statistics, wanted, plan).values())

        return backward, plans
    problem, _, chosen = pipeline.plan_forward(call, (*views, *map(View.of, outputs)), target)
    plans = search.alternatives(problem, chosen, target)
    return lambda plan: pipeline.forward(call, operands, plan=plan)[0], plans


def _try(
    trial: Trial,
    run: Callable[[Plan | None], Sequence[torch.Tensor]],
    expected: Sequence[torch.Tensor],
    clock: Callable[[Callable[[], object]], float],
) -> None:
    try:
        for found, right in zip(run(trial.plan), expected, strict=True):
            difference = (found.double() - right.double()).norm() / right.double().norm()
            if not difference <= ROUNDINGS * torch.finfo(right.dtype).eps:
                trial.problem = f"wrong: differs by {difference:.1e} from today's"
                return
        trial.ms = clock(lambda: run(trial.plan))
    except Exception as error:  # it does not fit on this device
        trial.problem = in_a_line(error)


def print_trials(trials: Trials, console: Console, copy_bandwidth: float) -> None:
    today, best = trials.all[0], trials.best
    table = Table(title=f"{trials.case.name}: {len(best)} of {len(trials.all)} plans run", title_justify="left")
    for heading in ("", "plan", "microseconds", "% of copy", "of today's time"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    rows = best[:SHOWN] + [today] * (today not in best[:SHOWN])
    for trial in rows:
        mark = "today" if trial is today else str(best.index(trial) + 1)
        table.add_row(mark, shown(trial.plan), *_numbers(trial, today, trials.case, copy_bandwidth))
    console.print(table)
    wrong = [trial for trial in trials.all if trial.problem and trial.problem.startswith("wrong")]
    for trial in wrong:
        console.print(f"{shown(trial.plan)}: {trial.problem}", style="red")
    if trials.gain is not None:
        said = f"{trials.gain:.2f} times today's speed" if trials.gain > 1.01 else "today's choice is as fast as any"
        console.print(f"the best: {said}")


def _numbers(trial: Trial, today: Trial, case: BenchCase, copy_bandwidth: float) -> tuple[str, str, str]:
    if trial.ms is None:
        return trial.problem or "not tried", "-", "-"
    percent = case.least_bytes / copy_bandwidth * 1e3 / trial.ms * 100
    return f"{trial.ms * 1e3:.1f}", f"{percent:.0f}", f"{trial.ms / today.ms:.2f}" if today.ms else "-"


def shown(plan: Plan) -> str:
    """What differs from one plan to another, in words."""
    words = [f"{plan.pattern} {plan.block_rows} x {plan.block_cols}", f"{plan.warps} warps"]
    words += [f"{plan.programs} programs"] * bool(plan.programs) + [f"{plan.splits} to a row"] * (plan.splits > 1)
    words += [f"{plan.chunks} chunks"] * (plan.chunks != 1) + [f"{plan.stages} stages"] * (plan.stages > 1)
    words += [f"{plan.ahead} ahead"] * bool(plan.ahead) + ["late"] * plan.late + ["recomputes"] * plan.recomputes
    words += ["keeps"] * plan.keeps + ["early"] * plan.early + ["asks"] * plan.asks
    return ", ".join(words)
