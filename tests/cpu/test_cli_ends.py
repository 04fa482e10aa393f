"""How commands end that are interrupted, or whose output cannot be written: in one line, and a status that says so; and that
the examples of their help do not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warpnorm import cli
from warpnorm.bench import cases, inside, run
from warpnorm.cli import main


def test_an_interrupt_anywhere_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inside, "explained", interrupted)
    monkeypatch.setattr(run.repeat, "prepare_launcher", interrupted)
    for command in (["explain", "layer_norm"], ["demo"], ["bench", "--quick"]):
        assert main(command) == 130
        assert capsys.readouterr().err == "warpnorm: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_output_that_cannot_be_written_is_said() -> None:
    """The sentence went to where nothing could be written either."""
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "warpnorm", "check"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert found.returncode == 2
    assert "No space left on device" in found.stderr
    assert "Traceback" not in found.stderr


def hear_interrupts() -> None:
    """Whoever runs the tests in the background of a shell is not interrupted by Ctrl-C, and neither is what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_before_the_first_call_ends_the_run_as_one() -> None:
    """Processes died of Ctrl-C while they started, and the run ended in their tracebacks."""
    command = [sys.executable, "-m", "warpnorm", "fuzz", "--seed", "7", "--device", "cpu", "--jobs", "2"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert started.stdout is not None
    first = started.stdout.readline()
    time.sleep(0.5)  # they are importing
    os.killpg(started.pid, signal.SIGINT)
    printed = first + started.communicate(timeout=100)[0]
    assert started.returncode == 130, printed
    assert "Traceback" not in printed
    assert re.search(r"interrupted: \d+ cases .* 0 failures; seed 7", printed)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed there")
def test_an_interrupt_while_others_compile_ends_them() -> None:
    """They died of it one by one, in their tracebacks, and who had started them waited for the rest."""
    command = [sys.executable, "-m", "warpnorm", "bench", "--quick", "--only", "layer_norm", "--jobs", "2"]
    started = subprocess.Popen(
        [*command, "--rivals", "eager"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=hear_interrupts,
    )  # fmt: skip
    children, ends = Path(f"/proc/{started.pid}/task/{started.pid}/children"), time.monotonic() + 60
    while started.poll() is None and time.monotonic() < ends and len(children.read_text().split()) < 3:
        time.sleep(0.05)  # until there are two, and what counts their files
    time.sleep(1)
    os.killpg(started.pid, signal.SIGINT)
    printed = started.communicate(timeout=30)[0]
    assert started.returncode == 130, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_examples_of_bench_have_cases_anywhere(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One named a shape that only GPUs are measured at, and was refused elsewhere."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    examples = [line.split() for line in capsys.readouterr().out.split("for example")[1].splitlines() if line]
    assert len(examples) >= 4
    for words in examples:
        parsed = cli._parser().parse_args(words[1:])
        assert cli._selected(parsed, cases.all_cases(device, parsed.quick))
