"""The fuzzer by several processes: they share the rounds, and one that dies is a failure by itself."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from warpnorm.cli import main
from warpnorm.fuzz import workers

PLAIN = ("plain", "rms_norm", "float32", "contiguous")


def test_a_process_that_dies_is_a_failure_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    killed: list[int] = []
    listen = workers._listen

    def listen_and_kill(some: Any, found: Any, device: str) -> None:
        listen(some, found, device)
        first = next(iter(some.values()), None)
        if first is not None and first.case is not None and not killed:
            killed.append(first.process.pid)
            os.kill(killed[0], signal.SIGSEGV)

    monkeypatch.setattr(workers, "_listen", listen_and_kill)
    monkeypatch.setenv("WARPNORM_CC", "")  # nothing is built
    path = tmp_path / "run.json"
    options = ["--seed", "7", "--device", "cpu", "--jobs", "2", "--cases", "400", "--json", str(path)]
    assert main(["fuzz", *options, "--only", *PLAIN]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("seed 7, on cpu by")
    assert "2 processes" in printed
    assert "died of SIGSEGV" in printed
    assert "1 failure; seed 7" in printed
    written = json.loads(path.read_text())
    assert written["cases"] >= 400
    (failure,) = written["failures"]
    assert failure["seed"] % 2 == 1, "the first process has every second round"
    assert "return warpnorm.rms_norm(x0" in failure["code"]
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_before_any_call_is_said() -> None:
    worker = workers.Worker(None, None, 0.0)  # type: ignore[arg-type]
    with pytest.raises(workers.UnavailableError, match="died of SIGKILL before its first call"):
        worker.failure("died of SIGKILL", "cuda")
