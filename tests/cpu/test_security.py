"""What may become code, and from where code is run: generated source holds nothing of a user but numbers, the cache folder
is the user's alone, and to load a module, a state_dict or a text runs nothing."""

import ast
import io
import json
import os
import pickle
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import folder, pipeline, routing, settings
from warpnorm.codegen import cache, expressions
from warpnorm.cpu import build
from warpnorm.errors import InputError, WarpnormError
from warpnorm.launch import call_text
from warpnorm.problem import Literal
from warpnorm.trace import store
from warpnorm.trace.operators import TRITON, TRITON_HALF, C

COLS = 2048
MARK = "smuggled"
CODE = f"1.0); {MARK}(); ("


# Generated source


class Spelled(float):
    """A number that says of itself what it is not."""

    def __repr__(self) -> str:
        return CODE

    __str__ = __format__ = lambda self, *_: CODE  # type: ignore[assignment]


class SpelledInt(int):
    def __repr__(self) -> str:
        return CODE

    __str__ = __format__ = lambda self, *_: CODE  # type: ignore[assignment]


class SpelledTensor(torch.Tensor):
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return CODE


@dataclass(frozen=True)
class Smuggler:
    """`make` gives a function, and arguments beside x."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    why: str


def closure(value: Any) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    return lambda: (lambda x: F.rms_norm(x * value, (COLS,)) + 1.5, ())


def argument(value: Any) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    return lambda: (lambda x, scale: F.rms_norm(x * scale, (COLS,)) + 1.5, (value,))


def named(name: str) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def function(x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x * 1.5, (COLS,))

        function.__name__ = function.__qualname__ = function.__module__ = function.__doc__ = name
        return function, ()

    return make


def parameter_named() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    space: dict[str, Any] = {"F": F}
    exec(f"def function(x, {MARK}):\n    {MARK}_too = x * {MARK}\n    return F.rms_norm({MARK}_too, ({COLS},))", space)
    return space["function"], (torch.randn(COLS),)


def mode() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return lambda x: F.rms_norm(F.gelu(x, approximate=CODE), (COLS,)), ()


SMUGGLERS = [
    Smuggler("float_in_closure", closure(Spelled(2.0)), "a class of numbers with its own repr"),
    Smuggler("int_in_closure", closure(SpelledInt(2)), "the same of whole numbers"),
    Smuggler("float_as_argument", argument(Spelled(2.0)), "handed over by value"),
    Smuggler("eps", lambda: (lambda x: F.rms_norm(x * 1.5, (COLS,), eps=Spelled(1e-3)), ()), "a number of the norm"),
    Smuggler("clamp", lambda: (lambda x: F.rms_norm(x.clamp(max=Spelled(2.0)), (COLS,)), ()), "by keyword"),
    Smuggler("string_in_closure", closure(CODE), "no number at all"),
    Smuggler("format_in_closure", closure("{0.__class__}"), "format characters"),
    Smuggler("string_as_mode", mode, "where PyTorch takes a string"),
    Smuggler("tensor_subclass", argument(torch.ones(COLS).as_subclass(SpelledTensor)), "a tensor with its own repr"),
    Smuggler("function_name", named(f"f():\n    {MARK}()\n\ndef g"), "a name that is code"),
    Smuggler("format_in_name", named("{0}{s}{}%s\x00\\" + MARK), "a name with format characters"),
    Smuggler("quotes_in_name", named(f'"""\n{MARK}()\n"""'), "it would end a docstring"),
    Smuggler("comment_in_name", named(f"*/ {MARK}(); /*"), "it would end a comment of C"),
    Smuggler("parameter_name", parameter_named, "a name that is one"),
]


def sources(function: Callable[..., Any], *args: Any) -> list[str]:
    found = warpnorm.explain(function, *args)
    directions = [d for d in (found.forward, found.backward) if d is not None]
    return [text for d in directions for text in (d.source, d.native or pipeline.native_text(d.problem))]


@pytest.mark.parametrize("case", SMUGGLERS, ids=lambda c: c.name)
def test_nothing_is_smuggled_into_source(case: Smuggler) -> None:
    function, others = case.make()
    x = torch.randn(2, COLS, requires_grad=True)
    try:
        texts = sources(function, x, *others)
    except (WarpnormError, TypeError, RuntimeError):  # refused
        return
    assert len(texts) == 4
    for text in texts:
        assert MARK not in text, case.why
        assert "__class__" not in text
    for text in texts[::2]:
        check_source(text)


def test_some_are_taken() -> None:
    """Not all of them are refused, so that the test above sees source."""
    taken = []
    for case in SMUGGLERS:
        function, others = case.make()
        try:
            sources(function, torch.randn(2, COLS, requires_grad=True), *others)
        except (WarpnormError, TypeError, RuntimeError):
            continue
        taken.append(case.name)
    assert {"eps", "function_name", "format_in_name", "quotes_in_name", "parameter_name"} <= set(taken)


TEXTS = {"Generated by warpnorm.", "inf", "-inf", "nan"}
MODULES = {"triton", "tl", "library", "ours"}
CALLED = {"float"}


def check_source(text: str) -> None:
    """Straight-line functions that call four modules and methods of values alone."""
    tree = ast.parse(text)
    kinds = {type(node).__name__ for node in tree.body}
    assert kinds <= {"Expr", "Import", "ImportFrom", "FunctionDef"}
    imported = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    assert imported == MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value in TEXTS, node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id in CALLED, node.func.id
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), node.attr
        assert not isinstance(node, ast.Lambda | ast.ClassDef | ast.Global | ast.JoinedStr | ast.While | ast.Try)


@pytest.mark.parametrize(
    "text",
    ["import os", "def f():\n    exec(1)", "x.__class__", "f = lambda: 0", "tl.load('other')", "class A: pass"],
)
def test_the_checker_sees(text: str) -> None:
    header = "import triton\nimport triton.language as tl\nfrom a import library\nfrom b import ours\n"
    check_source(header + "def f():\n    return tl.abs(float('inf'))\n")
    with pytest.raises(AssertionError):
        check_source(header + text)


def test_tables_hold_calls_and_places_alone() -> None:
    """Each row, with names in its places, is one expression: of functions that are there, and of nothing else."""
    for name, template in (*TRITON.items(), *TRITON_HALF.items()):
        if not template:
            continue
        tree = ast.parse(template.format(*"abcdef"), mode="eval")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert names <= {*"abcdef", "tl", "library", "ours", "place", "float"}, name
    for name, template in C.items():
        text = template.format(*"abcde", s="f")
        functions = set(re.findall(r"(\w+)\(", text))
        header = (Path(build.__file__).parent / "pointwise.h").read_text()
        assert ";" not in text, name
        for function in functions:
            assert function.removesuffix("_f") in header, function


@pytest.mark.parametrize(
    "number", [Spelled(2.5), SpelledInt(7), Spelled("-0.0"), True, -3, float("nan"), 10**30, 1e-320]
)
def test_a_number_is_spelled_by_python(number: float) -> None:
    literal = Literal.of(number)
    assert re.fullmatch(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf|nan)|True|False", literal.text), literal.text
    assert type(literal.value) in (bool, int, float)
    assert literal.value == number or number != number
    assert MARK not in expressions.literal(literal)


# Texts of exported programs


def text() -> dict[str, Any]:
    """Of a call that is fine."""
    steps = [
        ["a", "aten.mul.Tensor", [{"ref": "operand0"}, {"number": "2.5"}], {}],
        ["b", "aten.gelu.default", [{"ref": "a"}], {"approximate": "none"}],
    ]
    expression = {
        "inputs": ["operand0"], "steps": steps, "outputs": [{"ref": "b"}], "compute": "float32", "is_single": True,
    }  # fmt: skip
    return {
        "format": call_text.FORMAT, "operands": ["float32"], "norm": "rms_norm", "col_dims": 1, "eps": 1e-6,
        "prologue": {"expression": expression}, "epilogue": {"affine": [False, False, 0.0]}, "axes": ["full"],
        "outputs": ["float32"], "compute": "float32", "detached": [], "groups": 0,
    }  # fmt: skip


def steps_of(fields: dict[str, Any]) -> list[Any]:
    found: list[Any] = fields["prologue"]["expression"]["steps"]
    return found


@dataclass(frozen=True)
class Forgery:
    name: str
    forge: Callable[[dict[str, Any]], object]
    why: str


FORGERIES = [
    Forgery("name", lambda f: steps_of(f)[0].__setitem__(0, "a = exec('')"), "a step's name that is code"),
    Forgery("input", lambda f: f["prologue"]["expression"]["inputs"].__setitem__(0, "x); ("), "an input's name"),
    Forgery("number", lambda f: steps_of(f)[0][2].__setitem__(1, {"number": CODE}), "a number that is code"),
    Forgery("call", lambda f: steps_of(f)[0][2].__setitem__(1, {"number": "__import__('os')"}), "nothing is evaluated"),
    Forgery("list", lambda f: steps_of(f)[0][2].__setitem__(1, {"number": ["2"]}), "a number that is a list"),
    Forgery("reference", lambda f: steps_of(f)[0][2].__setitem__(0, {"ref": MARK}), "a name that nothing has"),
    Forgery("later", lambda f: steps_of(f)[0][2].__setitem__(0, {"ref": "b"}), "a step that comes later"),
    Forgery("kind", lambda f: steps_of(f)[0][2].__setitem__(0, {"object": "os.system"}), "an argument of another kind"),
    Forgery("operator", lambda f: steps_of(f)[0].__setitem__(1, "os.system.default"), "no operator of PyTorch's"),
    Forgery("file", lambda f: steps_of(f)[0].__setitem__(1, "aten.from_file.default"), "it would read a file"),
    Forgery("write", lambda f: steps_of(f)[0].__setitem__(1, "aten.mul_.Tensor"), "it would write into an input"),
    Forgery("method", lambda f: steps_of(f)[0].__setitem__(1, "aten.mul.__class__"), "an attribute, not an overload"),
    Forgery("namespace", lambda f: steps_of(f)[0].__setitem__(1, "aten.__init__.x"), "an attribute of Python's"),
    Forgery("dots", lambda f: steps_of(f)[0].__setitem__(1, "aten.mul.Tensor.__call__"), "a path"),
    Forgery("keyword", lambda f: steps_of(f)[1].__setitem__(3, {"a b": None}), "a keyword that is no name"),
    Forgery("dtype", lambda f: f.__setitem__("compute", "load"), "a function of torch's"),
    Forgery("norm", lambda f: f.__setitem__("norm", "__class__"), "a norm that is none"),
    Forgery("function", lambda f: f.__setitem__("epilogue", {"eval": ["1"]}), "a function that is none"),
    Forgery("eps", lambda f: f.__setitem__("eps", CODE), "a number of the norm"),
    Forgery("axes", lambda f: f.__setitem__("axes", [CODE]), "axes that are none"),
    Forgery("more", lambda f: f.__setitem__("hook", CODE), "a field that nobody knows"),
    Forgery("format", lambda f: f.__setitem__("format", call_text.FORMAT + 1), "a later version's"),
]


def test_the_text_is_fine() -> None:
    call, _ = call_text.read(json.dumps(text()))
    x = torch.randn(2, COLS)
    torch.testing.assert_close(pipeline.normalize(call, [x])[0], F.rms_norm(F.gelu(x * 2.5), (COLS,), None, 1e-6))


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda f: f.name)
def test_forged_texts_are_refused(forgery: Forgery) -> None:
    fields = text()
    forgery.forge(fields)
    with pytest.raises(InputError, match="not the text of a call"):
        call_text.read(json.dumps(fields))


@pytest.mark.parametrize("broken", ["", "null", "[]", "{}", "{", "[" * 100_000, '"' + CODE + '"', "1"])
def test_what_is_no_text_is_refused(broken: str) -> None:
    with pytest.raises(InputError, match="not the text of a call"):
        call_text.read(broken)


def test_a_mode_that_pytorch_refuses_reaches_no_source() -> None:
    fields = text()
    steps_of(fields)[1][3]["approximate"] = CODE
    with pytest.raises(RuntimeError):
        pipeline.normalize(call_text.read(json.dumps(fields))[0], [torch.randn(2, COLS)])


# The cache folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(folder, "_told", set())
    with settings.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


def be_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's: really so for root, otherwise as `stat` tells it."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        return
    look, look_at = os.stat, os.fstat

    def changed(found: os.stat_result) -> os.stat_result:
        is_it = found.st_ino == look(path).st_ino
        return os.stat_result((*found[:4], 54321, *found[5:])) if is_it else found

    monkeypatch.setattr(folder.os, "stat", lambda of, **how: changed(look(of, **how)))
    monkeypatch.setattr(folder.os, "fstat", lambda of: changed(look_at(of)))


def test_the_folder_is_made_for_the_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        assert folder.made() == home
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.private().stat().st_mode) == 0o700


@dataclass(frozen=True)
class Exposed:
    name: str
    expose: Callable[[Path, pytest.MonkeyPatch], object]
    says: str


EXPOSED = [
    Exposed("another_users", be_foreign, r"belongs to another user \(number 54321\), and code is run from it"),
    Exposed(
        "writable_by_all", lambda path, _: path.chmod(0o777), "can be written by other users, and code is run from it"
    ),
    Exposed("writable_by_a_group", lambda path, _: path.chmod(0o770), "can be written by other users"),
    Exposed("sticky", lambda path, _: path.chmod(0o1777), "can be written by other users"),
]


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such modes")
@pytest.mark.parametrize("case", EXPOSED, ids=lambda c: c.name)
def test_an_exposed_folder_is_refused(case: Exposed, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, a private folder instead, which all that is kept goes to; `explain` says so."""
    text = f"/* {case.name} {os.getpid()} */ int answer(void) {{ return 42; }}"
    home.mkdir(mode=0o700)
    (home / "theirs").write_text("")
    case.expose(home, monkeypatch)
    with pytest.warns(RuntimeWarning, match=case.says) as told:
        module = cache.load(f"# {text}")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert Path(str(module.__file__)).parent == folder.private()
        graphs = store.kept((text,), lambda: ())
        found = warpnorm.explain(lambda x: F.rms_norm(x, (COLS,)), torch.randn(2, COLS))
        if routing.has_compiler():
            assert build.load(text).answer() == 42
    assert graphs == ()
    assert re.search(case.says, found.refusal)
    assert f"cache      a temporary folder, since the cache folder {home}" in str(found)
    assert [path.name for path in home.iterdir()] == ["theirs"]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_folder_that_others_only_read_is_taken(mode: int, home: Path) -> None:
    home.mkdir()
    home.chmod(mode)
    assert folder.refusal(home) == ""
    assert folder.current() == home


@pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")
@pytest.mark.parametrize("expose", [be_foreign, lambda path, _: path.chmod(0o666)], ids=["foreign", "writable"])
def test_an_exposed_library_is_not_loaded(expose: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from a time when the folder was everybody's."""
    text = f"/* library {os.getpid()} {expose} */ int answer(void) {{ return 42; }}"
    build.load(text)
    (path,) = home.iterdir()
    before = path.stat().st_ino
    expose(path, monkeypatch)
    assert not folder.is_sealed(path)
    build._libraries.pop(text, None)  # if somebody has it
    assert build.load(text).answer() == 42
    monkeypatch.undo()
    assert path.stat().st_ino != before
    assert path.stat().st_uid == os.geteuid()


def test_what_triton_reads_is_the_text(home: Path) -> None:
    """Not the file, which may be another by then."""
    import inspect

    text = f"# {os.getpid()}\ndef answer():\n    return 42\n"
    module = cache.load(text)
    Path(str(module.__file__)).write_text(f"# other\ndef answer():\n    return {MARK}\n")
    assert inspect.getsource(module.answer) == "def answer():\n    return 42\n"
    Path(str(module.__file__)).unlink()
    assert inspect.getsource(module.answer) == "def answer():\n    return 42\n"


# Loading


class Trap:
    """Its pickle would run code."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return Trap.ran.append, ("ran",)


def modules() -> list[torch.nn.Module]:
    return [
        warpnorm.nn.LayerNorm(8), warpnorm.nn.RMSNorm(8), warpnorm.nn.BatchNorm2d(8), warpnorm.nn.GroupNorm(2, 8),
        warpnorm.nn.InstanceNorm2d(8, affine=True, track_running_stats=True), warpnorm.nn.AddRMSNorm(8),
    ]  # fmt: skip


@pytest.mark.parametrize("module", modules(), ids=lambda m: type(m).__name__)
def test_a_state_dict_is_tensors_alone(module: torch.nn.Module) -> None:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # which runs nothing
    assert state
    assert all(type(value) is torch.Tensor for value in state.values())
    module.load_state_dict(state)


def test_loading_a_state_dict_calls_nothing_in_it() -> None:
    file = io.BytesIO()
    torch.save({"weight": Trap()}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    module = warpnorm.nn.RMSNorm(8)
    with pytest.raises(RuntimeError):
        module.load_state_dict({"weight": Trap()})
    assert Trap.ran == []


def test_no_module_has_hooks_of_its_own_for_loading() -> None:
    """Nothing of ours is called with what was read."""
    for module in modules():
        for name in ("__reduce__", "__reduce_ex__", "__setstate__", "_load_from_state_dict", "load_state_dict"):
            found = next(kind for kind in type(module).__mro__ if name in vars(kind))
            assert not found.__module__.startswith("warpnorm"), (type(module).__name__, name)
        assert not module._load_state_dict_pre_hooks


def test_the_package_evaluates_generated_source_alone() -> None:
    """`exec` stands in one place, and where `warpnorm fuzz` runs the calls that it draws; `pickle` in none."""
    root = Path(warpnorm.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval"):
                found.append(f"{node.func.id} in {path.relative_to(root)}")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{name} in {path.relative_to(root)}" for name in names if name in ("pickle", "marshal", "shelve")
            ]
            is_shell = isinstance(node, ast.keyword) and node.arg == "shell"
            found += [f"shell in {path.relative_to(root)}"] * is_shell
    assert sorted(found) == ["eval in fuzz/case.py", "exec in codegen/cache.py", "exec in fuzz/case.py"]
