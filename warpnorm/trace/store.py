"""Graphs that were traced before, in the cache folder: to trace may take PyTorch's compiler, which takes a second to import.
A file holds names and numbers alone; one that is damaged, or says what it may not, is traced anew."""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from warpnorm import folder
from warpnorm.problem import Graph, Literal, Node, Value
from warpnorm.trace.operators import TRITON, C, is_cast
from warpnorm.version import VERSION

HERE = Path(__file__).parent
NAME = re.compile(r"[a-z_]+[0-9]*", re.ASCII)  # as our own are: they become source


def kept(what: tuple[Any, ...], trace: Callable[[], tuple[Graph, ...]]) -> tuple[Graph, ...]:
    """The graphs of `what`, whose text says all that they depend on."""
    key = hashlib.sha256("\0".join([*map(repr, what), torch.__version__, _version()]).encode()).hexdigest()[:32]
    name = f"graphs_{key}.json"
    try:
        return tuple(map(_graph, json.loads(folder.read(folder.current() / name)[0])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not there, or damaged
        pass
    graphs = trace()
    with suppress(OSError):  # a read-only or full home
        folder.write(folder.made() / name, json.dumps([_record(graph) for graph in graphs]))
    return graphs


@cache
def _version() -> str:
    """Of all that makes graphs."""
    files = [*sorted(HERE.glob("*.py")), HERE.parent / "reference.py"]
    return VERSION + hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _record(graph: Graph) -> dict[str, Any]:
    nodes = [[n.name, n.operator, list(map(_value_record, n.args)), str(n.dtype)] for n in graph.nodes]
    return {"inputs": graph.inputs, "nodes": nodes, "outputs": list(map(_value_record, graph.outputs))}


def _value_record(value: Value) -> str | list[str]:
    return value if isinstance(value, str) else [value.text]


def _graph(record: dict[str, Any]) -> Graph:
    nodes = []
    for name, operator, args, dtype in record["nodes"]:
        kind = getattr(torch, dtype.removeprefix("torch."))
        if not (isinstance(kind, torch.dtype) and operator in C and len(args) == _arity(operator)):
            raise ValueError(operator)
        nodes.append(Node(name, operator, tuple(map(_value, args)), kind))
    known = {*record["inputs"], *(node.name for node in nodes)}
    if not all(NAME.fullmatch(name) for name in known):
        raise ValueError("what is no name")
    outputs = tuple(map(_value, record["outputs"]))
    used = [value for values in (*(node.args for node in nodes), outputs) for value in values]
    if not all(isinstance(value, Literal) or value in known for value in used):
        raise ValueError("an unknown name")
    return Graph(tuple(record["inputs"]), tuple(nodes), outputs)


@cache
def _arity(operator: str) -> int:
    return 1 if is_cast(operator) else len(set(re.findall(r"\{\d\}", TRITON[operator])))


def _value(record: str | list[str]) -> Value:
    if isinstance(record, str):
        return record
    (text,) = record
    if text in ("True", "False"):
        return Literal.of(text == "True")
    return Literal.of(int(text) if text.lstrip("-").isdigit() else float(text))
