"""Graphs that are kept in the cache folder."""

import json
from pathlib import Path

import pytest
import torch

from warpnorm import settings
from warpnorm.problem import Graph, Literal, Node
from warpnorm.trace import store

GRAPH = Graph(
    ("xhat", "operand0"),
    (
        Node("t0", "mul", ("xhat", Literal.of(-0.0)), torch.float32),
        Node("t1", "where", (Literal.of(True), "t0", Literal.of(float("inf"))), torch.float64),
        Node("t2", "add", ("t1", Literal.of(3)), torch.int64),
    ),
    ("t2", Literal.of(float("nan")), Literal.of(1e-300), "operand0"),
)


class Traced:
    """Counts how often it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> tuple[Graph, ...]:
        self.count += 1
        return GRAPH, Graph(("c",), (), ("c",))


def test_what_was_traced_is_not_traced_again(tmp_path: Path) -> None:
    trace = Traced()
    with settings.override(cache_dir=tmp_path / "cache"):
        first = store.kept(("this", 1.0, torch.float32), trace)
        again = store.kept(("this", 1.0, torch.float32), trace)
        assert trace.count == 1
        store.kept(("this", 2.0, torch.float32), trace)
        assert trace.count == 2
    assert first == again == trace()
    values = [arg.value for node in again[0].nodes for arg in node.args if isinstance(arg, Literal)]
    assert [repr(value) for value in values] == ["-0.0", "True", "inf", "3"]
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "cache").iterdir()] == [0, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace('"mul"', '"system"'),
        lambda text: text.replace("torch.float32", "torch.load"),
        lambda text: text.replace('"t0"', '"abort(), t0"', 1),
        lambda text: text.replace('"t2", [', '"nobody", ['),
        lambda text: text.replace("3", "3; abort()"),
        lambda text: text.replace('"operand0"', '"operand0 + abort()"'),
        lambda text: text.replace('["t1", ["3"]]', '["t1"]'),
        lambda text: "[" * 100_000,
    ],
    ids=["cut", "empty", "other", "operator", "dtype", "name", "unknown", "number", "input", "fewer", "deep"],
)
def test_what_is_damaged_is_traced_anew(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = Traced()
    with settings.override(cache_dir=tmp_path):
        store.kept(("this",), trace)
        (path,) = tmp_path.iterdir()
        damaged = damage(path.read_text())
        assert damaged != path.read_text()
        path.write_text(damaged)
        assert store.kept(("this",), trace)[0] == GRAPH
    assert trace.count == 2
    assert json.loads(path.read_text()), "and kept again"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    trace = Traced()
    with settings.override(cache_dir=tmp_path / "file"):
        assert store.kept(("this",), trace)[0] == store.kept(("this",), trace)[0] == GRAPH
    assert trace.count == 2
