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
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST_EXAMPLE = 60  # lines
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_four_uses_are_there() -> None:
    names = [path.stem for path in EXAMPLES]
    assert names == ["image_preprocessing", "own_norm", "residual_norm", "swish_layer_norm"]


@every_example
def test_runs_and_agrees(path: Path) -> None:
    unset = ("WARPNORM_ROUTE", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, path], env=environment, cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
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
