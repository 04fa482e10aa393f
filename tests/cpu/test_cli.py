"""The command line: what it prints and writes, and that its exit status tells whether anything was wrong."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from warpnorm import routing
from warpnorm.bench import block, cases, check, demo, inside, rivals, run, timing
from warpnorm.bench.cases import BACKWARD, BATCH, FORWARD, GROUP, INSTANCE, NC, NCHW, NHWC, BenchCase, Workload
from warpnorm.bench.timing import Timing
from warpnorm.cli import main

ALL_CASES = cases.all_cases


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real commands on shapes that take no time, on the CPU also where there is a GPU."""
    image = (4, 64, 3, 5)
    monkeypatch.setattr(demo, "SHAPES", {"cpu": {None: (16, 64), NCHW: image, NHWC: image, NC: (16, 64)}})
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
    kinds = ("rms_norm", "layer_norm", "swish_layer_norm", "batch_norm nchw", "batch_norm nhwc", "batch_norm nc")
    kinds += ("group_norm nchw", "instance_norm nchw")
    found = [tuple(cell.strip() for cell in row.split("│")[1:4]) for row in rows]
    dtypes = ("fp64", "fp32", "fp16", "bf16")
    assert found == [(kind, way, dtype) for kind in kinds for way in (FORWARD, BACKWARD) for dtype in dtypes]
    assert all(" right " in row for row in rows)
    assert ("native code" if routing.has_compiler() else "PyTorch's own operators") in printed


def wrong(workload: Workload) -> rivals.Forward:
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
    def broken(workload: Workload) -> rivals.Forward:
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
    printed = capsys.readouterr().err
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


def test_blocks_are_checked_and_timed_as_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(block, "CPU_SIZES", (((8, 64, 128), torch.float32),))  # large enough for one draw
    monkeypatch.setattr(cases, "all_cases", block.cases)
    monkeypatch.setattr(rivals, "_whole", lambda function: function)  # a compiler takes longer than all tests here
    monkeypatch.setattr(run, "time_steps", lambda functions, device, seconds: [run_once(f) for f in functions])
    assert main(["bench", "--only", "block", "--json", str(tmp_path / "cpu.json")]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["results"]
    assert [row["name"] for row in rows] == [f"{workload.name} step 8 x 64 x 128 fp32" for workload in block.WHY]
    for row, rival in zip(rows, ("eager", "eager", "torch.compile", "torch.compile"), strict=True):
        assert [(m["rival"], m["is_right"], m["ms"]) for m in row["measurements"]] == [
            ("warpnorm", True, 1.0),
            (rival, True, 1.0),
        ]


def test_least_bytes_counts_each_tensor_once() -> None:
    case = BenchCase(cases.RMS, BACKWARD, (10, 20), torch.bfloat16, why="input, gradient, gradient")
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
    def fail(case: BenchCase, device: str) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(run, "Subject", fail)
    assert main(["bench", "--only", "rms_norm forward 4096", "--rivals", "eager"]) == 1
    assert "eager: OutOfMemoryError: no memory left" in capsys.readouterr().out


def test_channel_norms_are_measured_in_every_layout() -> None:
    names = [case.name for case in ALL_CASES("cuda", is_quick=False)]
    shapes = ["nchw 64 x 256 x 56 x 56", "nhwc 64 x 256 x 56 x 56", "nchw 256 x 64 x 112 x 112"]
    shapes += ["nhwc 256 x 64 x 112 x 112", "nhwc 256 x 2048 x 7 x 7", "nc 65536 x 1024"]
    expected = [f"batch_norm {{}} {shape} {dtype}" for shape in shapes for dtype in ("fp16", "fp32")]
    more = [
        "nchw 256 x 2048 x 7 x 7",
        "nchw 32 x 2048 x 7 x 7",
        "nchw 256 x 1024 x 14 x 14",
        "nchw 32 x 1024 x 14 x 14",
    ]
    more += ["nchw 8 x 256 x 56 x 56", "nhwc 8 x 256 x 56 x 56", "nchw 256 x 256 x 56 x 56"]
    more += ["nchw 8 x 64 x 112 x 112", "nchw 64 x 1 x 1024 x 1024", "nc 2048 x 65536"]
    expected += [f"batch_norm {{}} {shape} fp16" for shape in more]
    expected += [f"group_norm {{}} {layout} 32 x 320 x 64 x 64 bf16" for layout in ("nchw", "nhwc")]
    by_channel = [name for name in names if name.startswith(("batch_norm ", "group_norm "))]
    assert by_channel == [name.format(direction) for direction in (FORWARD, BACKWARD) for name in expected]
    assert "rms_norm forward 32768 x 4096 bf16" in names
    for layout in ("nchw 64 x 256 x 56 x 56", "nhwc 64 x 256 x 56 x 56", "nc 65536 x 1024"):
        assert {f"batch_norm_eval {d} {layout} fp16" for d in (FORWARD, BACKWARD)} <= set(names)
    for fused in ("add_batch_norm_relu backward nhwc 64 x 256 x 56 x 56 fp16", "group_norm_silu forward nchw 32 x 320"):
        assert any(name.startswith(fused) for name in names), fused


def test_the_grid_of_small_batches_is_there() -> None:
    found = {case.name for case in ALL_CASES("cuda", is_quick=False)}
    for norm, direction, dtype in product(("layer_norm", "rms_norm"), (FORWARD, BACKWARD), ("fp32", "fp16")):
        for batch, hidden in product((1, 8, 32, 128, 512), (256, 512, 1024, 2048, 4096)):
            assert f"{norm} {direction} {batch} x {hidden} {dtype}" in found
    assert len(found) == len(ALL_CASES("cuda", is_quick=False)), "two cases of one name could not be told apart"


@pytest.mark.parametrize(("device", "channels"), [("cuda", 256), ("cpu", 64)])
def test_quick_cases_are_smaller_with_as_many_channels(device: str, channels: int) -> None:
    large, small = (
        next(case.shape for case in ALL_CASES(device, is_quick) if case.workload is BATCH) for is_quick in (False, True)
    )
    assert torch.Size(large).numel() == 8 * torch.Size(small).numel()
    assert large[1] == small[1] == channels


def image_case(workload: Workload, direction: str, dtype: torch.dtype = torch.float64, layout: str = NCHW) -> BenchCase:
    return BenchCase(workload, direction, (3, 64, 5, 2), dtype, why="a small one", layout=layout)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("layout", [NCHW, NHWC])
@pytest.mark.parametrize("workload", [BATCH, GROUP, INSTANCE], ids=lambda workload: workload.name)
def test_the_truth_is_pytorchs_function(workload: Workload, layout: str, direction: str) -> None:
    """The truth is spelled in primitive operators; in float64 it and PyTorch's are one."""
    subject = check.Subject(image_case(workload, direction, layout=layout), "cpu")
    assert subject.error(workload.function) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_operands_are_those_of_training(dtype: torch.dtype) -> None:
    wide = torch.float32 if dtype is torch.float16 else dtype
    for workload, expected in ((BATCH, wide), (GROUP, dtype)):
        subject = check.Subject(image_case(workload, FORWARD, dtype, NHWC), "cpu")
        for tensor in (*subject.full, *subject.grads):
            assert tensor.dtype is dtype
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in (*subject.parameters, *subject.buffers):
            assert (tensor.dtype, tensor.shape) == (expected, (64,))
        assert len(subject.buffers) == workload.buffers


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_nobody_sees_the_running_statistics_of_another(direction: str) -> None:
    subject = check.Subject(image_case(BATCH, direction), "cpu")
    before = [buffer.clone() for buffer in subject.buffers]
    seen = []

    def watched(*operands: torch.Tensor) -> torch.Tensor:
        seen.append(operands[-2:])
        return BATCH.function(*operands)

    calls = [subject.timed(watched) for _ in range(2)]
    for call in calls:
        call()
    subject.error(watched)
    assert len({buffer.data_ptr() for buffers in seen for buffer in buffers}) == 6
    assert all(a.equal(b) for a, b in zip(subject.buffers, before, strict=True))


@pytest.mark.parametrize("which", [0, 1], ids=["mean", "variance"])
def test_a_running_statistic_that_is_not_updated_is_wrong(which: int) -> None:
    subject = check.Subject(image_case(BATCH, FORWARD, torch.float16), "cpu")

    def forgetful(*operands: torch.Tensor) -> torch.Tensor:
        buffers = list(operands[-2:])
        buffers[which] = buffers[which].clone()
        return BATCH.function(*operands[:-2], *buffers)

    assert not check.is_right(subject.error(forgetful), subject.error(BATCH.function), torch.float16)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("layout", [NCHW, NHWC])
@pytest.mark.parametrize(("workload", "dim"), [(BATCH, 1), (GROUP, 0)], ids=["batch_norm", "group_norm"])
def test_large_cases_are_checked_at_both_ends(
    workload: Workload, dim: int, layout: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = check.Subject(image_case(workload, direction, layout=layout), "cpu")
    size = subject.case.shape[dim]
    monkeypatch.setattr(check, "CHECKED_ELEMENTS", 2 * subject.full[0].numel() // size)
    assert subject._picked().tolist() == [0, size - 1]
    assert subject.error(workload.function) < 1e-13
    for place in (0, size - 1):

        def wrong_at(*operands: torch.Tensor, place: int = place) -> torch.Tensor:
            scale = torch.ones([size if d == dim else 1 for d in range(4)], dtype=torch.float64)
            scale.select(dim, place).fill_(1.01)
            return workload.function(*operands) * scale[: operands[0].shape[0]]

        assert subject.error(wrong_at) > 1e-4


def bench_with(path: Path, *more: str) -> int:
    return main(["bench", "--only", "rms_norm forward", "--rivals", "eager", "--json", str(path), *more])


def test_what_is_done_is_kept_when_the_run_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured, path = [], tmp_path / "results.json"
    run_case = run._run_case

    def dies(case: BenchCase, *rest: object) -> run.CaseResult:
        measured.append(case.name)
        if len(measured) == 3:
            raise SystemExit(9)
        return run_case(case, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_run_case", dies)
    with pytest.raises(SystemExit):
        main(["bench", "--only", "rms_norm forward", "--rivals", "--json", str(path)])
    assert [result["name"] for result in json.loads(path.read_text())["results"]] == measured[:2]


def test_a_finished_run_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("warpnorm.bench.report._commit", lambda: "abc")
    path = tmp_path / "results.json"
    assert bench_with(path, "--dtype", "fp32") == 0
    first, *_ = json.loads(path.read_text())["results"]
    assert first["name"].startswith("rms_norm forward")
    first["measurements"][0]["ms"] = 12345.0
    path.write_text(json.dumps({**json.loads(path.read_text()), "results": [first]}))
    assert bench_with(path, "--resume") == 0
    results = json.loads(path.read_text())["results"]
    assert len(results) > 1
    assert [r["measurements"][0]["ms"] for r in results if r["name"] == first["name"]] == [12345.0]
    assert all(r["measurements"][0]["ms"] == 1.0 for r in results if r["name"] != first["name"])
    monkeypatch.setattr("warpnorm.bench.report._commit", lambda: "def")
    assert bench_with(path, "--resume") == 0
    assert all(r["measurements"][0]["ms"] == 1.0 for r in json.loads(path.read_text())["results"]), (
        "of other code: anew"
    )
    assert {"commit", "date", "machine", "device", "torch"} <= set(json.loads(path.read_text()))


def test_some_cases_are_measured_anew_and_the_others_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("warpnorm.bench.report._commit", lambda: "abc")
    path = tmp_path / "results.json"
    assert bench_with(path) == 0
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, "missing": {"quack": "not installed", "warpnorm": "nor this"}}))
    monkeypatch.setattr("warpnorm.bench.report._commit", lambda: "def")
    monkeypatch.setattr(run, "time_calls", lambda f, d, s: [Timing(7.0, "wall") for _ in f])
    assert bench_with(path, "--update", "--dtype", "fp32") == 0
    after = json.loads(path.read_text())
    assert [r["name"] for r in after["results"]] == [r["name"] for r in before["results"]]
    assert after["missing"] == {"quack": "not installed"}, "of rows that are kept"
    for record in after["results"]:
        is_new = record["dtype"] == "fp32"
        assert (record["measurements"][0]["ms"], record["commit"]) == ((7.0, "def") if is_new else (1.0, "abc"))
    path.write_text(json.dumps({**after, "torch": "1.0"}))
    assert bench_with(path, "--update") == 2
    assert "another machine or other versions" in capsys.readouterr().err
    assert json.loads(path.read_text())["torch"] == "1.0", "nothing was written"


def test_a_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {0: 1.0, 1: 0.9}  # ours, eager
    monkeypatch.setattr(run, "time_calls", lambda f, d, s: [Timing(times[k], "wall") for k in range(len(f))])
    path = tmp_path / "results.json"
    assert bench_with(path, "--fail-below", "0.8") == 0
    assert bench_with(path, "--fail-below", "0.95") == 1
    assert "0.90 of the best rival's speed" in capsys.readouterr().out


def test_shapes_and_dtypes_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    assert bench_with(path, "--shape", "32X4096", "64 x 2048", "--dtype", "bf16") == 0
    found = {(*r["shape"], r["dtype"]) for r in json.loads(path.read_text())["results"]}
    assert found == {(64, 2048, "bf16"), (32, 4096, "bf16")}
    capsys.readouterr()
    for arguments, said in (
        (("--shape", "3x3"), "there are"),
        (("--shape", "wide"), "4096x4096"),
        (("--dtype", "fp64"), "no such case has a dtype of fp64"),
    ):
        assert bench_with(path, *arguments) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "--resume"]) == 2
    assert "--resume needs --json" in capsys.readouterr().err


@pytest.mark.parametrize("norm", inside.WORKLOADS)
def test_explain_every_norm(norm: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "4x32x5x6" if inside.WORKLOADS[norm].parameter_dim == 1 else "2x3x2000"
    assert main(["explain", norm, "--shape", shape, "--dtype", "fp16", "--backward", "--target", "sm_80"]) == 0
    printed = capsys.readouterr().out
    for part in ("prologue", "plan ", "launch ", "memory ", "source of forward", "source of backward", "sm_80"):
        assert part in printed
    assert "C of" not in printed


def test_explain_shows_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rms_norm", "--shape", "6x2000"]) == 0
    assert ("C of forward" if routing.has_compiler() else "as plain PyTorch") in capsys.readouterr().out
    assert main(["explain", "layer_norm", "--shape", "6x32", "--dtype", "fp16"]) == 0
    assert "as plain PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["layer_norm", "--shape", "2000y"], "4096x4096"),
        (["layer_norm", "--shape", "8x²"], "4096x4096"),
        (["group_norm", "--shape", "4x31x5"], "do not divide 31 channels"),
        (["batch_norm", "--shape", "8"], "needs a shape with channels"),
        (["batch_norm", "--shape", "8x8", "--layout", "nhwc"], "channels last is for shapes such as"),
    ],
)
def test_explain_refuses_in_a_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_check_is_a_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    for name in ("warpnorm", "Python", "PyTorch", "Triton", "native code", "cache folder"):
        assert f"\n{name} " in f"\n{printed}"

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("nothing works")

    if routing.has_compiler():
        monkeypatch.setattr(inside.functional, "layer_norm", fail)
        assert main(["check"]) == 1
        assert "native code    RuntimeError: nothing works" in capsys.readouterr().out


def test_a_measurement_goes_on_while_times_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst at the start of it is outvoted."""
    parts = iter([[9.0] * 5, [9.0] * 4 + [1.0] * 3, [1.0] * 7, [1.0] * 7, [1.0] * 7, [1.0] * 7])
    taken = []

    def wall_times(functions: object, seconds: float) -> list[list[float]]:
        taken.append(seconds)
        return [next(parts)]

    monkeypatch.setattr(timing, "_wall_times", wall_times)
    assert timing.time_calls([lambda: None], "cpu", 0.5) == [Timing(9.0, "wall")], "two parts that agree are enough"
    assert taken == [0.25, 0.25]
    assert timing.time_calls([lambda: None], "cpu", 0.5)[0].ms == 1.0


WRONG = {  # arguments, and what is said
    "command": (["brench"], "there is no 'brench'; did you mean 'bench'?\nsee warpnorm --help"),
    "norm": (
        ["explain", "layernorm"],
        "there is no 'layernorm'; did you mean 'layer_norm'?\nsee warpnorm explain --help",
    ),
    "dtype": (["bench", "--dtype", "fp99x"], "there is no 'fp99x'; "),
    "far": (["tune", "softmax"], "there is no 'softmax'; there are layer_norm, rms_norm, batch_norm"),
    "nothing": ([], "required: command\nsee warpnorm --help"),
    "option": (["check", "--all"], "unrecognized arguments: --all\nsee warpnorm --help"),
    "number": (["bench", "--fail-below", "fast"], "invalid float value: 'fast'\nsee warpnorm bench --help"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_get_a_sentence_and_a_hint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, said = WRONG[name]
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("warpnorm: ")
    assert said in printed
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize("command", ["demo", "bench", "report", "explain", "tune", "check"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    options = [line.strip() for line in shown.split("options:")[-1].splitlines() if line.strip().startswith("--")]
    assert all(len(option.split()) > 1 for option in options), "each says what it does"
    assert shown.startswith(f"usage: warpnorm {command}")


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_run_case", lambda *args: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert bench_with(tmp_path) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    assert bench_with(tmp_path / "file" / "results.json") == 2
    assert "file" in capsys.readouterr().err
    monkeypatch.setattr("warpnorm.cli.run_fuzz", lambda *args: pytest.fail("run"))
    assert main(["fuzz", "--json", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--update"])
def test_what_is_no_result_file_is_not_overwritten(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    assert bench_with(path, option) == 2
    assert "is no result file of bench" in capsys.readouterr().err
    assert path.read_text() == '{"mine": 1}'
    assert bench_with(path, "--resume", "--update") == 2


@pytest.mark.parametrize("shape", ["99999999999x99999999999", "99999999999999999999x4"])
def test_a_shape_that_no_machine_has(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "layer_norm", "--shape", shape]) == 2
    assert "larger than this machine can have" in capsys.readouterr().err
