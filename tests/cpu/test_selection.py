"""The cases that run under sanitizers are there, and the commands are those that CONTRIBUTING has."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from selection import SANITIZED, select_sanitized

TESTS = Path(__file__).resolve().parents[1]
KERNELS = TESTS.parent / "warpnorm" / "kernels"


def functions(*paths: Path) -> set[str]:
    return {
        node.name for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_sanitized_test_is_one_of_a_gpu() -> None:
    """One that was renamed would be left out without a word."""
    known = functions(*TESTS.glob("gpu/*.py"), *TESTS.glob("kernel_contracts/*.py"))
    assert {name for names in SANITIZED.values() for name in names} - known == set()


def commands() -> dict[str, str]:
    """By tool, of CONTRIBUTING."""
    text = (TESTS.parent / "CONTRIBUTING.md").read_text()
    found = re.findall(r"WARPNORM_TEST_SANITIZED=(\w+) \\\n\s+(compute-sanitizer .*)", text)
    return dict(found)


def test_every_tool_has_a_command() -> None:
    assert set(commands()) == set(SANITIZED)


def test_the_kernels_that_are_watched() -> None:
    ours = {name for name in functions(*KERNELS.glob("*.py")) if name.endswith("_kernel")}
    watched = {}
    for tool in ("memcheck", "racecheck"):
        pattern = re.search(r"--kernel-regex 'kns=(.*)'", commands()[tool])
        assert pattern
        watched[tool] = {name for name in ours if re.search(pattern[1], name)}
    assert watched["memcheck"] == ours
    assert {"row_forward_kernel", "row_backward_kernel", "column_sum_kernel"} <= watched["racecheck"]
    assert {f"{p}_{d}_kernel" for p in ("team", "held") for d in ("forward", "backward")} <= watched["racecheck"]


class Case(SimpleNamespace):
    __hash__ = object.__hash__


def selected(monkeypatch: pytest.MonkeyPatch, tool: str) -> list[str]:
    names = [
        f"{name}[{k}]" for name in (*SANITIZED["memcheck"], *SANITIZED["broken"], "test_other") for k in range(100)
    ]
    items: list[Any] = [Case(name=name, nodeid=name, path=TESTS / "gpu" / "test_x.py") for name in names]
    items.append(Case(name="test_of_a_cpu", nodeid="test_of_a_cpu", path=TESTS / "cpu" / "test_x.py"))
    monkeypatch.setenv("WARPNORM_TEST_SANITIZED", tool)
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    select_sanitized(config, items, "gpu")
    return [item.name for item in items]


@pytest.mark.parametrize("tool", SANITIZED)
def test_a_tool_has_its_share_of_its_tests(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picked = selected(monkeypatch, tool)
    assert picked.pop() == "test_of_a_cpu"
    for name, one_in in SANITIZED[tool].items():
        count = sum(case.startswith(f"{name}[") for case in picked)
        assert 50 / one_in <= count <= 200 / one_in
    assert {case.partition("[")[0] for case in picked} == set(SANITIZED[tool])


def test_without_a_tool_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = {case.partition("[")[0] for case in selected(monkeypatch, "")}
    assert picked == {*SANITIZED["memcheck"], "test_other", "test_of_a_cpu"}


def test_a_tool_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.UsageError, match="none of memcheck, racecheck, broken"):
        selected(monkeypatch, "leakcheck")
