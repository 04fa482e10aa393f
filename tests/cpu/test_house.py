"""The rules that every file of the package keeps: imports run one way, the environment has one reader, kernels know no
affine, a new tensor lies where it is said. All are read off the syntax tree; nothing of the package is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "warpnorm"
FILES = sorted(ROOT.rglob("*.py"))
LINE = (
    "errors, settings, locks, folder, interrupts < problem, norms, space < reference, trace < plan < kernels < codegen"
    " < launch, cpu < routing < pipeline < library < repeat < repeat_channels, repeat_fused < functional"
    " < parallel < fuse, explain < packed < blocks < nn < integrate < bench, fuzz < cli"
)
LEVEL = {name.strip(): level for level, names in enumerate(LINE.split("<")) for name in names.split(",")}
LEVEL |= {
    "version": 0,
    "arguments": LEVEL["functional"],
    "compiled": LEVEL["functional"],
    "absorb": LEVEL["pipeline"],
    "__init__": len(LEVEL),
    "__main__": len(LEVEL),
}
NEIGHBOURS = {
    ("problem", "norms"),
    ("space", "problem"),
    ("space", "norms"),
    ("functional", "arguments"),
    ("compiled", "functional"),
    ("fuse", "compiled"),
    ("explain", "fuse"),
    ("settings", "errors"),
    ("folder", "settings"),
    ("folder", "locks"),
}  # who may import whom on one level
LONGEST_FILE = 500  # lines


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def home(module: str) -> str:
    """The entry of the line that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """What of the package a module imports, wherever the import stands: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = [f"{base}.{n.name}" if f"{base}.{n.name}" in MODULES else base for n in node.names]
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):  # import_module("..."), __import__
            found = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "warpnorm")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    own = home(module)
    if own not in LEVEL:
        return [f"{module} has no place on the line"]
    return [
        f"{module} imports {other}"
        for other in imported_modules(source, module, is_package)
        if own != (theirs := home(other)) and (own, theirs) not in NEIGHBOURS
        if theirs not in LEVEL or LEVEL[theirs] >= LEVEL[own]
    ]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_one_way(path: Path) -> None:
    assert violations(path.read_text(), module_name(path), path.name == "__init__.py") == []


@dataclass(frozen=True)
class Offence:
    name: str
    module: str
    source: str
    why: str
    is_package: bool = False


OFFENCES = [
    Offence("upwards", "warpnorm.problem", "from warpnorm.plan import choose", "a lower level imports a higher one"),
    Offence("same_level", "warpnorm.trace.graph", "import warpnorm.reference", "neighbours do not know each other"),
    Offence("wrong_way_round", "warpnorm.norms", "import warpnorm.problem", "problem may import norms, not so back"),
    Offence("space_below", "warpnorm.problem", "from warpnorm.space import Space", "the records know no layout"),
    Offence("fuse_below", "warpnorm.functional", "from warpnorm.fuse import fuse", "the norms do not need fusion"),
    Offence("from_the_top", "warpnorm.nn", "from warpnorm import layer_norm", "a name of the public package"),
    Offence("in_function", "warpnorm.kernels.row", "def f():\n    from warpnorm.codegen import bind", "hidden inside"),
    Offence(
        "for_type_checkers",
        "warpnorm.plan.plan",
        "if TYPE_CHECKING:\n    from warpnorm.pipeline import route",
        "a reader follows it all the same",
    ),
    Offence("relative", "warpnorm.launch.forward", "from ..pipeline import route", "spelled with dots"),
    Offence("relative_package", "warpnorm.trace", "from .. import nn", "dots count from the folder", is_package=True),
    Offence("by_name", "warpnorm.plan.choose", "importlib.import_module('warpnorm.bench')", "spelled as a string"),
    Offence("bench", "warpnorm.integrate.patch", "import warpnorm.bench.timing", "nobody imports bench but cli"),
    Offence("unplaced", "warpnorm.helpers", "", "every module has its place"),
    Offence("unplaced_target", "warpnorm.nn", "import warpnorm.helpers", "every module has its place"),
]


@pytest.mark.parametrize("offence", OFFENCES, ids=lambda o: o.name)
def test_checker_sees(offence: Offence) -> None:
    assert len(violations(offence.source, offence.module, offence.is_package)) == 1, offence.why


def test_checker_takes_what_is_allowed() -> None:
    source = (
        "import torch\nfrom warpnorm import settings\nfrom .graph import from_fx\nfrom warpnorm.problem import Graph"
    )
    assert violations(source, "warpnorm.trace.capture") == []
    assert set(imported_modules(source, "warpnorm.trace.capture")) == {
        "warpnorm.settings",
        "warpnorm.trace.graph",
        "warpnorm.problem",
    }


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file_is_short_and_says_what_it_holds(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path} does not open with a docstring"
    assert len(text.splitlines()) <= LONGEST_FILE


def environment_uses(source: str) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    used = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            used.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            used += [alias.name for alias in node.names if alias.name in names]
    return used


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "settings.py"], ids=module_name)
def test_only_settings_reads_the_environment(path: Path) -> None:
    assert environment_uses(path.read_text()) == []


def test_environment_checker_sees_every_spelling() -> None:
    for source in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ", "o.environ"):
        assert len(environment_uses(source)) == 1
    assert environment_uses((ROOT / "settings.py").read_text())


def identifiers(source: str) -> set[str]:
    fields = ("id", "attr", "arg", "name", "asname")
    return {
        value
        for node in ast.walk(ast.parse(source))
        for field in fields
        if isinstance(value := getattr(node, field, None), str)
    }


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=module_name)
def test_kernels_know_no_affine(path: Path) -> None:
    words = {word for name in identifiers(path.read_text()) for word in name.lower().split("_")}
    assert words & {"weight", "weights", "bias", "affine", "gamma", "beta"} == set()


def test_identifiers_are_found_wherever_they_stand() -> None:
    source = "def weight(a, *, bias=1):\n    b.c(d=e)\nimport f as g"
    assert identifiers(source) == {"weight", "a", "bias", "b", "c", "d", "e", "f", "g"}


MAKERS = frozenset({
    "empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn",
    "randint", "scalar_tensor",
})  # fmt: skip
OF_COMMANDS = ("bench", "fuzz")  # which have the process to themselves


def tensors_without_device(source: str) -> Iterator[int]:
    """The lines of calls of PyTorch's that make a tensor on whatever device is the default."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            calls = ast.unparse(node.func)
            named = {keyword.arg for keyword in node.keywords}
            is_made = any(calls == f"torch.{name}" or f"torch.{name} " in f"{calls} " for name in MAKERS)
            if is_made and not named & {"device", None}:
                yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_new_tensor_says_where_it_lies(path: Path) -> None:
    """Under `torch.set_default_device` it would be somewhere else: native code was handed a null pointer by "meta"."""
    if path.relative_to(ROOT).parts[0] not in OF_COMMANDS:
        assert list(tensors_without_device(path.read_text())) == []


def test_tensor_checker_sees_every_spelling() -> None:
    for text in ("torch.zeros(3)", "x = torch.empty(2, dtype=d).unbind()", "(torch.empty if a else torch.zeros)(3)"):
        assert list(tensors_without_device(text)) == [1], text
    for text in ("torch.zeros(3, device=d)", "torch.empty_like(x)", "torch.zeros(3, **options)", "self.zeros(3)"):
        assert list(tensors_without_device(text)) == [], text
