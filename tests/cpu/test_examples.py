"""The examples run as a user runs them, on the CPU: they agree with plain PyTorch, show what they become, and fail when
they are wrong."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ("gpt", "resnet")  # longer ones, of which `training.py` is a part
LONGER = (*TRAINING, "training", "distributed")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in LONGER)
LONGEST_EXAMPLE = 60  # lines
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: Path, *arguments: str, ranks: int = 0) -> "subprocess.CompletedProcess[str]":
    unset = ("WARPNORM_ROUTE", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    by_ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    command = [sys.executable, *by_ranks, str(path), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT.parent, capture_output=True, text=True, check=False)


def test_the_four_uses_are_there() -> None:
    names = [path.stem for path in EXAMPLES]
    assert names == ["image_preprocessing", "own_norm", "residual_norm", "swish_layer_norm"]


@every_example
def test_runs_and_agrees(path: Path) -> None:
    ran = run(path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "on cpu" in ran.stdout
    found = re.search(r"largest difference to plain PyTorch.*: (\S+e[+-]\d+)", ran.stdout)
    assert found, ran.stdout
    assert float(found[1]) < 1e-2
    assert re.search(r"^launch +\w+_forward_kernel on [\dx ]+ programs$", ran.stdout, re.MULTILINE)
    assert re.search(r"^memory .* moved, .* is the least", ran.stdout, re.MULTILINE)


@every_example
def test_fails_when_it_is_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = load(path)
    monkeypatch.setattr(module, "TOLERANCE", 0.0)  # nothing is below it
    assert module.main() == 1
    assert "largest difference" in capsys.readouterr().out


@every_example
def test_is_short_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < LONGEST_EXAMPLE
    assert len(ast.get_docstring(ast.parse(text)) or "") > 100
    assert "sys.exit(main())" in text


@pytest.mark.parametrize(("name", "norms"), [("gpt", ("fused",)), ("resnet", ("warpnorm",))])
def test_training(name: str, norms: tuple[str, ...]) -> None:
    ran = run(ROOT / "examples" / f"{name}.py", "--steps", "6", "--norms", *norms)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split("│")[1:-1] for line in ran.stdout.splitlines() if line.startswith("│")]
    assert tuple(row[0].strip() for row in rows) == norms
    for _norms, first, last, ms, peak in rows:
        assert float(last) < float(first)
        assert min(float(ms), float(peak)) > 0
    assert "6/6" in ran.stderr
    if "warpnorm" in norms:
        assert "swapped 7 of 7 norms" in ran.stderr


@pytest.mark.parametrize("name", TRAINING)
def test_training_refuses(name: str) -> None:
    ran = run(ROOT / "examples" / f"{name}.py", "--steps", "2")
    assert ran.returncode == 2
    assert "at least 4" in ran.stderr


def test_distributed() -> None:
    """Two ranks train what one process trains, and say what they sent: 7 norms each way, then 5."""
    ran = run(ROOT / "examples" / "distributed.py", "--steps", "4", ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    differences = [float(found) for found in re.findall(r"largest difference to one process: (\S+)", ran.stdout)]
    assert len(differences) == 2
    assert max(differences) < 1e-3
    assert re.findall(r"norms sent (\d+) messages", ran.stdout) == ["14", "10"]
