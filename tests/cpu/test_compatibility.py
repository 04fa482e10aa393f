"""What docs/stability.md promises: public names and their arguments, keys of state_dicts, fields of result files, texts and
operators of exported programs, and the versions it runs with. `stable_names.json` is added to, never changed."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import library, pipeline, version
from warpnorm.bench import report, results
from warpnorm.launch import call_text

ROOT = Path(__file__).resolve().parents[2]
NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("stable_names.json").read_text())
PAGE = (ROOT / "docs" / "stability.md").read_text()
HOMES = (warpnorm, warpnorm.nn, warpnorm.parallel)


def breaks(promised: list[list[Any]], found: list[inspect.Parameter]) -> list[str]:
    """What a caller of yesterday would trip over; a new argument that need not be given is none."""
    by_name = {p.name: p for p in found}
    wrong = []
    for name, kind, default in promised:
        if name not in by_name:
            wrong.append(f"{name} is gone")
        elif by_name[name].kind.name != kind:
            wrong.append(f"{name} is {by_name[name].kind.name}")
        elif default is not None and repr(by_name[name].default) != default:
            wrong.append(f"{name} is {by_name[name].default!r} by default")
    positional = [name for name, kind, _ in promised if kind == "POSITIONAL_OR_KEYWORD"]
    now = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    if now[: len(positional)] != positional:
        wrong.append(f"the order is {now}")
    known = {name for name, *_ in promised}
    new = [p for p in found if p.name not in known and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return wrong + [f"{p.name} has to be given" for p in new if p.default is p.empty]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_public_is(name: str) -> None:
    home, _, last = name.rpartition(".")
    found = getattr(next(h for h in HOMES if h.__name__ == home), last)
    promised = NAMES[name]
    if isinstance(found, type) and issubclass(found, Exception):
        assert set(promised) <= {base.__name__ for base in found.__mro__}, "whoever catches it"
        assert issubclass(found, warpnorm.WarpnormError)
    elif promised is not None:
        assert breaks(promised, list(inspect.signature(found).parameters.values())) == []


def test_what_is_public_is_promised() -> None:
    public = {f"{home.__name__}.{name}" for home in HOMES for name in home.__all__}
    assert public == set(NAMES), "add it to stable_names.json"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a, c, b=2: 0, "the order"),
        (lambda a, *, b=2: 0, "b is KEYWORD_ONLY"),
        (lambda a, b=3: 0, "3 by default"),
        (lambda a: 0, "b is gone"),
        (lambda a, b=2, *, c: 0, "c has to be given"),
        (lambda a, b=2, c=3, *, d=4: 0, None),
    ],
    ids=["moved", "keyword", "default", "gone", "required", "added"],
)
def test_the_checker_sees(change: Any, says: str | None) -> None:
    promised = [["a", "POSITIONAL_OR_KEYWORD", None], ["b", "POSITIONAL_OR_KEYWORD", "2"]]
    found = breaks(promised, list(inspect.signature(change).parameters.values()))
    assert (says in " ".join(found)) if says else not found


STATES: dict[str, tuple[Any, str]] = {
    "LayerNorm": (lambda of: of.LayerNorm(8), "weight bias"),
    "RMSNorm": (lambda of: of.RMSNorm(8), "weight"),
    "GroupNorm": (lambda of: of.GroupNorm(2, 8), "weight bias"),
    "BatchNorm1d": (lambda of: of.BatchNorm1d(8), "weight bias running_mean running_var num_batches_tracked"),
    "BatchNorm3d": (lambda of: of.BatchNorm3d(8, affine=False), "running_mean running_var num_batches_tracked"),
    "InstanceNorm2d": (lambda of: of.InstanceNorm2d(8, affine=True), "weight bias"),
    "SyncBatchNorm": (lambda of: of.SyncBatchNorm(8), "weight bias running_mean running_var num_batches_tracked"),
}


@pytest.mark.parametrize("name", STATES)
def test_state_dicts_are_pytorchs(name: str) -> None:
    make, keys = STATES[name]
    ours, theirs = make(warpnorm.nn), make(torch.nn)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == keys.split()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


FIELDS = (
    "warpnorm commit date torch triton cuda driver python machine device copy_bandwidth missing is_interrupted results"
)
OF_ROW = "name norm direction shape layout dtype least_bytes why measurements"
OF_MEASUREMENT = "rival error is_right ms method percent_of_copy wall_ms peak_bytes problem"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_result_files_of_before_are_read(path: Path) -> None:
    written = json.loads(path.read_text())
    assert set(FIELDS.split()) <= set(written)
    assert all(set(OF_ROW.split()) <= set(row) for row in written["results"])
    assert all(set(OF_MEASUREMENT.split()) <= set(m) for row in written["results"] for m in row["measurements"])
    (found,) = results.read_files([path])
    assert len(found.rows) == len(written["results"])


def test_result_files_have_the_fields() -> None:
    fields = set(FIELDS.split()) - {"copy_bandwidth", "missing", "is_interrupted", "results"}
    assert fields <= set(report.head("here"))


# Of format 1: half of a transformer's block, as version 0.1.0 wrote it. It is added to, never changed
TEXT = (
    '{"format":1,"operands":["float32","float32","float32"],"norm":"layer_norm","col_dims":1,"eps":1e-05,'
    '"prologue":{"expression":{"inputs":["operand0","operand1",'
    '"operand2"],"steps":[["s0","aten.silu.default",[{"ref":"operand0"}],{}],["s1","aten.mul.Tensor",[{"ref":"s0"},'
    '{"number":"2.5"}],{}],["s2","aten.add.Tensor",[{"ref":"s1"},{"ref":"operand1"}],{}]],"outputs":[{"ref":"s2"}],'
    '"compute":"float32","is_single":true}},"epilogue":{"expression":{"inputs":["xhat","c","operand0","operand1",'
    '"operand2"],"steps":[["s0","aten.mul.Tensor",[{"ref":"xhat"},{"ref":"operand2"}],{}],["s1","aten._to_copy.default",'
    '[{"ref":"s0"}],{"dtype":{"dtype":"float16"}}]],"outputs":[{"ref":"s1"},{"ref":"c"}],"compute":"float32",'
    '"is_single":false}},"axes":[[true,true],[true,true],[false,true]],"outputs":["float16","float32"],'
    '"compute":"float32","detached":[],"groups":0}'
)


def test_texts_of_before_are_read() -> None:
    call, dtypes = call_text.read(TEXT)
    assert call_text.written(call, dtypes) == TEXT
    x, residual, weight = torch.randn(2, 2048), torch.randn(2, 2048), torch.randn(2048)
    y, h, *_ = pipeline.normalize(call, [x, residual, weight])
    torch.testing.assert_close(h, F.silu(x) * 2.5 + residual)
    torch.testing.assert_close(y, F.layer_norm(h, (2048,), weight).half())


def test_operators_of_exported_programs() -> None:
    assert library
    found = [str(getattr(torch.ops.warpnorm, name).default._schema) for name in ("norm", "norm_backward")]
    assert found == [
        "warpnorm::norm(Tensor[] operands, float[] numbers, str call) -> Tensor[]",
        "warpnorm::norm_backward(Tensor[] grad_outputs, int[] given, Tensor[] operands, float[] numbers, "
        "Tensor[] statistics, int[] wanted, str call) -> Tensor[]",
    ]


def test_versions_are_said_once() -> None:
    """By the code, by what installs it, and by the page."""
    about = (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", warpnorm.__version__)
    assert warpnorm.__version__ == version.VERSION
    assert f'"torch>={version.spelled(version.TORCH)}"' in about
    assert f'"triton>={version.spelled(version.TRITON)};' in about
    (python,) = re.findall(r'requires-python = ">=(.*)"', about)
    for name, least in (("Python", python), ("PyTorch", version.spelled(version.TORCH)),
                        ("Triton", version.spelled(version.TRITON))):  # fmt: skip
        assert re.search(rf"^\| {name} \| {re.escape(least)} \|", PAGE, re.MULTILINE), name


def test_the_changelog_has_the_version_or_what_comes() -> None:
    (first, *_) = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first.split()[0] in ("Unreleased", version.VERSION)


def test_the_page_tells_of_the_format() -> None:
    assert f"format {call_text.FORMAT}" in PAGE
