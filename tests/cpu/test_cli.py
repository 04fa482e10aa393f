"""The command line: what it prints and writes, and that its exit status tells whether anything was wrong."""

import json
from pathlib import Path

import pytest
import torch

from warpnorm import norms
from warpnorm.bench import cases, demo, rivals, run
from warpnorm.bench.timing import Timing
from warpnorm.cli import main


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real commands on shapes that take no time, on the CPU also where there is a GPU."""
    monkeypatch.setattr(demo, "SHAPES", {"cpu": (16, 64)})
    monkeypatch.setattr(cases, "all_cases", lambda device, is_quick: cases.grid(1 << 17))
    for module in (demo, run):
        monkeypatch.setattr(module, "default_device", lambda: "cpu")
    monkeypatch.setattr("warpnorm.cli.default_device", lambda: "cpu")
    monkeypatch.setattr(run, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(run, "time_calls", lambda functions, device, seconds: [run_once(f) for f in functions])


def run_once(function) -> Timing:  # type: ignore[no-untyped-def]
    function()
    return Timing(1.0, "wall")


def test_demo_covers_every_norm_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 2 * (len(norms.ALL) + 1) * 4  # and a fused form
    for word in (*(norm.name for norm in norms.ALL), "swish", "fp64", "fp32", "fp16", "bf16", "backward", "right"):
        assert word in printed
    assert "PyTorch's own operators" in printed


def wrong(workload: cases.Workload) -> rivals.Forward:
    def slightly(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = workload.function(*operands)
        return tuple(result * 1.01 for result in (results if isinstance(results, tuple) else (results,)))

    return slightly


@pytest.mark.parametrize("command", [["demo"], ["bench", "--rivals", "eager"]])
def test_a_wrong_result_is_said_and_fails(command: list[str], monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(run, "OURS", rivals.Rival("warpnorm", wrong, lambda device: None))
    assert main(command) == 1
    assert "wrong: layer_norm forward" in capsys.readouterr().out


def test_a_rival_that_raises_is_a_row(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    def broken(workload: cases.Workload) -> rivals.Forward:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(rivals, "ALL", (rivals.EAGER, rivals.Rival("broken", broken, lambda device: None)))
    path = tmp_path / "results.json"
    assert main(["bench", "--only", "rms_norm", "backward 4096 fp32", "--json", str(path)]) == 0
    assert "broken: RuntimeError: no such kernel" in capsys.readouterr().out
    written = json.loads(path.read_text())
    (result,) = written["results"]
    assert (result["norm"], result["direction"], result["dtype"]) == ("rms_norm", "backward", "fp32")
    by_name = {m["rival"]: m for m in result["measurements"]}
    assert by_name["warpnorm"]["is_right"]
    assert by_name["warpnorm"]["percent_of_copy"] == pytest.approx(result["least_bytes"] / 1e10 * 1e5)
    assert by_name["broken"]["ms"] is None


def test_a_rival_without_such_a_function_is_not_timed(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(rivals, "ALL", (rivals.Rival("narrow", lambda workload: None, lambda device: None),))
    assert main(["bench", "--only", "swish_layer_norm forward 1024"]) == 0
    assert " - " in capsys.readouterr().out


def test_missing_rivals_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "layer_norm forward 128", "--rivals", "eager", "liger"]) == 0
    assert "liger: needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["bench", "--rivals", "nobody"], ["bench", "--only", "no such case"]])
def test_what_does_not_exist_is_named(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    printed = capsys.readouterr().out
    assert command[-1].split()[0] in printed


def test_an_interrupt_keeps_what_is_done(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    rounds = iter(range(100))

    def interrupted(functions, device: str, seconds: float) -> list[Timing]:  # type: ignore[no-untyped-def]
        if next(rounds) == 1:
            raise KeyboardInterrupt
        return [run_once(function) for function in functions]

    monkeypatch.setattr(run, "time_calls", interrupted)
    assert main(["bench", "--rivals", "eager"]) == 130
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert sum(line.startswith("│") for line in printed.splitlines()) == 1


def test_least_bytes_counts_each_tensor_once() -> None:
    case = cases.BenchCase(cases.RMS, cases.BACKWARD, (10, 20), torch.bfloat16, why="input, gradient, gradient")
    assert case.least_bytes == 3 * 10 * 20 * 2


def test_a_rival_that_raises_when_timed_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(functions, device: str, seconds: float) -> list[Timing]:  # type: ignore[no-untyped-def]
        if len(functions) > 1:
            raise RuntimeError("one of them failed")
        return [run_once(function) for function in functions]

    monkeypatch.setattr(run, "time_calls", timed)
    assert main(["bench", "--only", "rms_norm forward 4096", "--rivals", "eager"]) == 0


def test_a_case_that_cannot_be_set_up_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(case: cases.BenchCase, device: str) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(run, "Subject", fail)
    assert main(["bench", "--only", "rms_norm forward 4096", "--rivals", "eager"]) == 1
    assert "eager: OutOfMemoryError: no memory left" in capsys.readouterr().out
