"""The fuzzer: it finds nothing where nothing is wrong, and what is wrong it finds, shrinks and prints as code."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from warpnorm import functional, settings
from warpnorm.cli import main
from warpnorm.fuzz import batches, check, run
from warpnorm.fuzz.case import LAYOUTS, VALUES, Case, Operand
from warpnorm.fuzz.draws import Draws
from warpnorm.fuzz.kinds import Choice
from warpnorm.fuzz.run import Limits

F32 = torch.float32
PLAIN = ("plain", "rms_norm", "float32", "contiguous")


@pytest.mark.parametrize("words", [("plain",), ("fused", "rms_norm", "batch_norm", "float32")], ids=" ".join)
def test_a_short_run_finds_nothing(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SHAPES", 1)
    found = run.fuzz(Limits(60, functions=2), 3, "cpu", words)
    assert found.failures == [], [(failure.why, failure.code) for failure in found.failures]
    assert found.functions == 2
    assert found.cases > 2


def test_a_seed_repeats_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Case] = []
    monkeypatch.setattr(run, "check", lambda case, device: met.append(case))
    monkeypatch.setattr(run, "BATCHES", 3)
    for _ in range(2):
        run.fuzz(Limits(60, functions=6), 7, "cpu")
    half = len(met) // 2
    assert met[:half] == met[half:]
    again = met[:half]
    met.clear()
    run.fuzz(Limits(60, functions=3), 8, "cpu")  # the second round by itself
    assert met == again[-len(met) :]
    assert len({case.ours for case in again}) > 3


def test_a_gpu_gets_large_calls_too() -> None:
    drawn = [batches.batch(Draws(seed), Choice(), "kernels", True) for seed in range(60)]
    sizes = {case.operands[0].shape for batch in drawn for case in batch.cases}
    assert max(map(prod, sizes)) <= batches.LARGEST_ON_GPU * 2
    assert sum(prod(size) > batches.LARGEST for size in sizes) > len(sizes) // 10
    assert any(size[-1] > 50_000 for size in sizes), "rows that no program holds"
    assert any(len(size) == 4 and size[2] == size[3] >= 28 and size[1] >= 16 for size in sizes), "images"
    for batch in drawn[:5]:
        for case, choices in zip(batch.cases, batch.choices, strict=True):
            assert batches.single(Draws(given=choices), Choice(), "kernels", True) == case, "by itself"


def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.rms_norm

    def wrong(*args: Any, eps: float, **kwargs: Any) -> Any:
        """For rows of several columns alone."""
        return right(*args, eps=eps * 1.5 if args[0].shape[-1] > 4 else eps, **kwargs)

    monkeypatch.setattr(functional, "rms_norm", wrong)
    monkeypatch.setattr(run, "forced_route", lambda device: "reference")
    monkeypatch.setattr(run, "MOST_FAILURES", 1)
    monkeypatch.setattr(check, "DRAWS", 4)
    (failure,) = run.fuzz(Limits(60), 1, "cpu", PLAIN).failures
    assert failure.why.startswith("output 0: ")
    x = failure.case.operands[0]
    assert x.shape[-1] == 5, "the fewest columns"
    assert x.shape.count(1) == len(x.shape) - 1, "one row"
    assert len(failure.case.operands) == 1, "no weight"
    with check.poisoned():
        exec(failure.code, {})
    assert "import warpnorm" in failure.code


def test_a_round_says_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fail(case: Case, device: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise check.WrongError("late")

    monkeypatch.setattr(run, "check", fail)
    monkeypatch.setattr(run, "BATCHES", 1)
    monkeypatch.setattr(run, "MOST_FAILURES", 1)
    (failure,) = run.fuzz(Limits(60), 5, "cpu", PLAIN).failures
    assert failure.why == "late"
    assert failure.seed > 5


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kernel that reached past its memory every call fails, simpler ones too."""

    def fail(case: Case, device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run, "check", fail)
    monkeypatch.setattr(run, "is_lost", lambda device: True)
    found = run.fuzz(Limits(60), 5, "cpu", PLAIN)
    assert found.cases == 1
    (failure,) = found.failures
    assert failure.case == batches.batch(Draws(5), Choice.of(PLAIN), check.forced_route("cpu"), False).cases[0]


RIGHT = Case("return x0 * 2", "return x0 * 2", (Operand((4, 5), F32, wants_grad=False),))
WRONG = {
    "changed its inputs": replace(RIGHT, ours="y = x0 * 2\nx0.zero_()\nreturn y"),
    "other bits": replace(
        RIGHT, ours="y = x0 * 2\nreturn torch.where(torch.rand(4, 5) < 0.3, torch.nextafter(y, y + 1), y)"
    ),
    "raises RuntimeError": replace(RIGHT, ours="return x0 @ x0"),
    "dtype torch.float64": replace(RIGHT, ours="return x0.double() * 2"),
    "shape (5, 4)": replace(RIGHT, ours="return x0.mT * 2"),
    "not finite": replace(RIGHT, ours="return torch.empty_like(x0)"),
    "mean error": replace(RIGHT, ours="return x0 * 2.00001"),
    "results are": replace(RIGHT, ours="return x0 * 2, x0"),
    "gradient of x0": replace(
        RIGHT, ours="return x0 * 2 + (x0 - x0.detach())", operands=(Operand((4, 5), F32),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_a_check_sees(what: str) -> None:
    with check.quiet():
        check.check(RIGHT, "cpu")
        with pytest.raises(check.WrongError) as raised:
            check.check(WRONG[what].seeded(4), "cpu")
    assert what in str(raised.value)
    assert torch.are_deterministic_algorithms_enabled() is False


def test_what_a_dtype_cannot_hold_is_no_error() -> None:
    """The gradient of a float16 weight, where every input is close to 1e-18: it rounds to zero."""
    call = "{0}.batch_norm(x0, None, None, training=True, weight=x1)"
    operands = (Operand((9, 1), F32, values="tiny"), Operand((1,), torch.float16))
    check.check(
        Case("return " + call.format("warpnorm"), "return " + call.format("F"), operands, is_widened=True), "cpu"
    )


BATCH = "m, v = x1.clone(), x2.clone()\nreturn {0}.batch_norm(x0, m, v, training=True, eps=1e-05), m, v"
F16, F64 = torch.float16, torch.float64
NO_ERRORS = {
    "PyTorch's float64 adds up one after another": Case(
        "return warpnorm.instance_norm(x0)", "return F.instance_norm(x0)", (Operand((3, 1, 8191), F64),)
    ),
    "PyTorch itself overflows in several dtypes": Case(
        BATCH.format("warpnorm"),
        BATCH.format("F"),
        (
            Operand((32, 16), F16, "transposed", "huge"),
            Operand((16,), F32, wants_grad=False),
            Operand((16,), F32, values="positive", wants_grad=False),
        ),
        is_mixed=True,
    ),
    "a kink at zero, where a row of one column is": Case(
        "return F.relu(F.layer_norm(x0, x0.shape[-1:]))",
        "return F.relu(F.layer_norm(x0, x0.shape[-1:]))",
        (Operand((5, 1), F32),),
        is_fused=True,
        kinks="F.layer_norm(x0, x0.shape[-1:])",
    ),
}


@pytest.mark.parametrize("what", NO_ERRORS)
def test_what_is_no_error(what: str) -> None:
    with check.quiet():
        check.check(NO_ERRORS[what], "cpu")


@pytest.mark.parametrize("is_lost", [False, True])
def test_where_pytorch_itself_fails_halfway(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its second computation, on other numbers: that is no error of ours, unless it fails for want of the device."""
    calls: list[int] = []
    original = check._results

    def results(case: Case, function: Any, operands: Any, draw: int) -> Any:
        calls.append(1)
        if len(calls) > 2 and function is not case.of_ours:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return original(case, function, operands, draw)

    wrong = replace(RIGHT, ours="return x0 * 2.00001", operands=(Operand((4, 5), F32),))
    monkeypatch.setattr(check, "_results", results)
    monkeypatch.setattr(check, "_truth", lambda case, operands, draw=0: original(case, case.of_theirs, operands, draw))
    monkeypatch.setattr(check, "is_lost", lambda device: is_lost)
    with check.quiet():
        if is_lost:
            with pytest.raises(check.TheirError, match="cuDNN"):
                check.check(wrong, "cpu")
        else:
            check.check(wrong, "cpu")
    assert len(calls) > 2


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_are_what_they_say(layout: str, values: str) -> None:
    operand = Operand((4, 5, 6), F32, layout, values)
    made = operand.make(3, "cpu")
    assert made.shape == (4, 5, 6)
    assert made.is_contiguous() == (layout in ("contiguous", "flipped"))
    assert made.equal(operand.make(3, "cpu"))
    assert made.equal(eval(operand.text(3, "cpu"), {"torch": torch}))
    assert Operand((0, 5), F32, layout, values).make(0, "cpu").shape == (0, 5)
    assert Operand((), F32, layout, values).make(0, "cpu").shape == ()


def test_words_leave_less() -> None:
    choice = Choice.of(["fused", "rms_norm", "layer_norm", "float16"])
    assert choice.forms == ("fused",)
    assert choice.norms == ("rms_norm", "layer_norm")
    assert choice.dtypes == ("float16",)
    assert choice.layouts == Choice().layouts


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with settings.override(route="reference"):
        assert main(["fuzz", "--minutes", "0.03", "--seed", "7", "--device", "cpu", "--only", *PLAIN]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 7, on cpu")
    assert "0 failures; seed 7" in printed


def test_the_command_fails_where_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(case: Case, device: str) -> None:
        raise check.WrongError("output 0: wrong")

    monkeypatch.setattr(run, "check", fail)
    monkeypatch.setattr(run, "BATCHES", 1)
    monkeypatch.setattr(run, "MOST_FAILURES", 2)
    assert main(["fuzz", "--seed", "7", "--device", "cpu", "--only", *PLAIN]) == 1
    printed = capsys.readouterr().out
    assert "failure 2: --seed 8" in printed
    assert "output 0: wrong" in printed
    assert "return warpnorm.rms_norm(x0, x0.shape[-1:]" in printed
    assert "2 failures; seed 7" in printed


def test_the_command_ends_after_so_many_cases(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--seed", "7", "--device", "cpu", "--cases", "5", "--json", str(tmp_path / "run.json")]
    with settings.override(route="reference"):
        assert main(["fuzz", *options, "--only", *PLAIN]) == 0
    assert "5 cases in 1 functions" in capsys.readouterr().out
    written = json.loads((tmp_path / "run.json").read_text())
    assert (written["cases"], written["failures"], written["only"]) == (5, [], list(PLAIN))


SAID = {
    "--cases is 0": ["--cases", "0"],
    "--jobs is -1": ["--jobs", "-1"],
    "--only layer": ["--only", "layer"],
    "--minutes is 0.0": ["--minutes", "0"],
    "there is no GPU here": ["--device", "cuda"],
}


def test_the_interpreter_is_left_to_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It truncates bfloat16: an rms_norm of one value was reported as wrong."""
    monkeypatch.setattr(settings, "is_interpreting", lambda: True)
    assert main(["fuzz", "--device", "cpu"]) == 2
    assert "tests/interpreter/test_fuzz.py" in capsys.readouterr().err


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_be_is_said(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "GPU" in what and torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["fuzz", *SAID[what]]) == 2
    assert what in capsys.readouterr().err
