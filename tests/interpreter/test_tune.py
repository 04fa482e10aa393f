"""The offline search: every plan that it tries computes the same, what does not is said, and today's choice comes first."""

import pytest
import torch
from rich.console import Console

from warpnorm import pipeline
from warpnorm.bench import inside, tune
from warpnorm.bench.cases import BenchCase
from warpnorm.plan import search
from warpnorm.plan.plan import Plan

CASES = {
    "narrow": inside.case("rms_norm", (6, 100), "fp32", "nchw", False),
    "row": inside.case("layer_norm", (3, 1000), "fp32", "nchw", False),
    "backward": inside.case("add_rms_norm", (5, 600), "fp32", "nchw", True),
    "by_channel": inside.case("batch_norm", (4, 8, 6, 6), "fp32", "nchw", True),
}


@pytest.fixture(autouse=True)
def few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time: every third plan."""
    alternatives = search.alternatives
    monkeypatch.setattr(search, "alternatives", lambda *args: alternatives(*args)[::3])


def tuned(case: BenchCase, times: dict[int, float] | None = None) -> tune.Trials:
    calls: list[int] = []

    def clock(call: object) -> float:
        calls.append(1)
        return (times or {}).get(len(calls), 2.0)

    return tune.tune(case, "cpu", Console(quiet=True), clock)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_is_right(name: str) -> None:
    trials = tuned(CASES[name])
    assert len(trials.all) > 3
    assert {trial.problem for trial in trials.all} == {None}
    assert len({trial.plan for trial in trials.all}) == len(trials.all)


def test_today_first_then_the_winners(capsys: pytest.CaptureFixture[str]) -> None:
    trials = tuned(CASES["narrow"], {1: 4.0, 3: 1.0})
    assert (trials.all[0].ms, trials.gain) == (4.0, 4.0)
    assert trials.best[0] is trials.all[2]
    tune.print_trials(trials, Console(width=140), 1e12)
    printed = capsys.readouterr().out
    assert "4.00 times today's speed" in printed
    assert tune.shown(trials.all[2].plan) in printed
    assert " today " in printed


def test_a_wrong_plan_and_one_that_does_not_fit_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, seen = pipeline.forward, []

    def sometimes_wrong(call: object, operands: object, plan: Plan | None = None) -> object:
        outputs, statistics = forward(call, operands, plan=plan)  # type: ignore[arg-type]
        seen.append(plan)
        if len(seen) == 4:
            raise RuntimeError("out of resource: shared memory")
        return tuple(output * 1.01 if len(seen) == 5 else output for output in outputs), statistics

    monkeypatch.setattr(pipeline, "forward", sometimes_wrong)
    trials = tuned(CASES["narrow"])
    problems = [trial.problem for trial in trials.all if trial.problem]
    assert problems[0] == "RuntimeError: out of resource: shared memory"
    assert problems[1].startswith("wrong: differs by 1.0e-02")
    assert len(problems) == 2
    tune.print_trials(trials, Console(width=140), 1e12)
    assert "wrong: differs by" in capsys.readouterr().out
    assert torch.isfinite(torch.tensor(trials.gain))
