"""The pages tell the truth: their code runs, prints what they say and raises what they quote; names, options, files and
links that they mention exist. And each of these checks can fail.

On a page a fence says what a block is:
    python                  runs, after the blocks above it on the page, as one program
    python skip="why"       does not run here: it needs a GPU or another library
    python signature        how a function of the package is called
    text output             what the block above prints, `...` for anything, line breaks wherever they fit

`python tests/cpu/test_docs.py` writes what the blocks print today into the pages."""

import argparse
import ast
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import warpnorm
from warpnorm import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_SKIPPED = 3  # blocks of all pages
WIDEST = 118  # columns of what is printed
NORMS = "layer_norm|rms_norm|batch_norm|group_norm|instance_norm"
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
# Every page is a program of its own, forked from a process that has imported what takes seconds to import
RUNNER = """
import contextlib, io, json, linecache, os, signal, sys, traceback, types
import torch, warpnorm, torch._dynamo, torch.fx.experimental.symbolic_shapes

def run(program):
    names = sys.modules["__main__"] = types.ModuleType("__main__")  # where torch.compile looks for them
    printed = []
    torch.manual_seed(0)
    for line, source in program:
        linecache.cache["example.py"] = len(source), None, source.splitlines(True), "example.py"
        with contextlib.redirect_stdout(io.StringIO()) as text:
            try:
                exec(compile(source, "example.py", "exec"), vars(names))
            except BaseException:
                return {"error": f"the block at line {line}\\n{traceback.format_exc()}"}
        printed.append(text.getvalue())
    return {"printed": printed}

for request in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(400)
        print(json.dumps(run(json.loads(request))), file=sys.__stdout__, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps({"error": f"the page ended its process with status {status}"}), flush=True)
"""


class Block(NamedTuple):
    """`line` is where it begins on its page, `start` and `stop` are the places of its text."""

    kind: str
    text: str
    line: int
    start: int
    stop: int


def blocks(page: str) -> list[Block]:
    return [
        Block(f"{f[1]} {f[2].strip()}".strip(), f[3], page[: f.start(3)].count("\n"), *f.span(3))
        for f in FENCE.finditer(page)
    ]


def prose(page: str) -> str:
    """A page without its blocks, fenced or indented."""
    return re.sub(r"^ {4}.*$", "", FENCE.sub("", page), flags=re.MULTILINE)


def code(page: str) -> list[str]:
    """What stands in backticks, and the fenced blocks."""
    return [*re.findall(r"`([^`\n]+)`", prose(page)), *(block.text for block in blocks(page))]


@cache
def runner() -> "subprocess.Popen[str]":
    unset = ("WARPNORM_ROUTE", "WARPNORM_CC", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUNNER]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def printed(page: str) -> dict[int, str]:
    """What the blocks that run print, by their lines."""
    program = [(block.line, block.text) for block in blocks(page) if block.kind == "python"]
    process = runner()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(program) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert "error" not in answer, answer["error"]
    return dict(zip([line for line, _ in program], answer["printed"], strict=True))


@pytest.fixture(autouse=True, scope="module")
def one_runner() -> Iterator[None]:
    yield
    if runner.cache_info().currsize:
        runner().communicate()
        runner.cache_clear()


def expected(page: str) -> Iterator[tuple[Block, Block | None]]:
    """Every block that runs, and what is said to be printed."""
    following = [*blocks(page)[1:], None]
    for block, after in zip(blocks(page), following, strict=True):
        if block.kind == "python":
            yield block, after if after is not None and after.kind == "text output" else None


def is_printed(said: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(said, found, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def check_blocks(page: str) -> None:
    found = printed(page)
    for block, output in expected(page):
        where = f"the block at line {block.line}"
        if output is not None:
            assert is_printed(output.text, found[block.line]), f"{where} prints\n{found[block.line]}"
        is_shown = output is not None or not found[block.line] or "print(warpnorm.explain(" in block.text
        assert is_shown, f"{where} prints what the page does not show:\n{found[block.line]}"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("path", PAGES, ids=name)
WITH_CODE = [path for path in PAGES if any(block.kind == "python" for block in blocks(path.read_text()))]


@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_code_runs_and_prints_what_is_said(path: Path) -> None:
    check_blocks(path.read_text())


def test_pages_are_there() -> None:
    names = {name(path) for path in PAGES}
    norms = {f"docs/norms/{norm}.md" for norm in NORMS.split("|")}
    others = ("index", "getting_started", "fusing", "how_it_works", "derivations", "moving", "performance")
    assert names >= norms | {f"docs/{other}.md" for other in others}


def test_few_blocks_are_skipped() -> None:
    skipped = [block for path in PAGES for block in blocks(path.read_text()) if block.kind.startswith("python skip")]
    assert len(skipped) <= MOST_SKIPPED
    for block in skipped:
        assert re.fullmatch(r'python skip="needs [^"]+"', block.kind), block.kind
        ast.parse(block.text)


def check_kinds(page: str) -> None:
    """No block escapes by a word that nobody knows."""
    known = ("", "python", "python signature", "text output")
    for block in blocks(page):
        assert block.kind in known or block.kind.startswith("python skip="), f"line {block.line}: {block.kind}"


@every_page
def test_kinds_of_blocks(path: Path) -> None:
    check_kinds(path.read_text())


def parameters(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]


def check_signatures(page: str) -> None:
    for block in blocks(page):
        if block.kind == "python signature":
            made: dict[str, Callable[..., object]] = {}
            exec(f"def {block.text.strip()}: ...", made)
            function = re.match(r"\w+", block.text)
            assert function
            assert parameters(made[function[0]]) == parameters(getattr(warpnorm, function[0]))


def test_signatures() -> None:
    for norm in NORMS.split("|"):
        page = (ROOT / f"docs/norms/{norm}.md").read_text()
        assert [b.text.split("(")[0] for b in blocks(page) if b.kind == "python signature"] == [norm]
        check_signatures(page)
        rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
        assert rows == {parameter for parameter, *_ in parameters(getattr(warpnorm, norm))}, "the table of arguments"


def check_names(page: str) -> None:
    """Of the package and of PyTorch, wherever they stand."""
    for root, path in set(re.findall(r"(?<![\w./])(warpnorm|torch)((?:\.[A-Za-z_]\w*)+)", page)):
        found = importlib.import_module(root)
        for part in path.split(".")[1:]:
            if not hasattr(found, part) and inspect.ismodule(found):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


@every_page
def test_names_exist(path: Path) -> None:
    check_names(path.read_text())


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def check_commands(page: str) -> None:
    """`warpnorm COMMAND --option`, `--option` alone, `make target` and environment variables."""
    known = commands()
    options = {option for command in known.values() for option in command._option_string_actions}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = (ROOT / "warpnorm/settings.py").read_text() + (ROOT / "tests/selection.py").read_text()
    for text in code(page):
        for command, rest in re.findall(r"^(?:\$ )?warpnorm +([a-z]\w*)([^\n#]*)", text, re.MULTILINE):
            assert command in known, text
            own = known[command]._option_string_actions
            assert [o for o in re.findall(r"(?<!\S)--[\w-]+", rest) if o not in own] == [], text
        if re.fullmatch(r"--[\w-]+", text):
            assert text in options
        for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
            assert target in targets, text
    for variable in re.findall(r"WARPNORM_[A-Z_]+", page):
        assert variable in settings, variable


@every_page
def test_commands_and_settings_exist(path: Path) -> None:
    check_commands(path.read_text())


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def check_links(page: str, folder: Path) -> None:
    """Files, folders and pictures that are linked, headings in them, and files that are only named."""
    own = re.sub(r"`[^`\n]*`", "", prose(page))
    for link in re.findall(r"\]\(([^)\s]+)\)", own):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (folder / target).resolve() if target else None
        assert path is None or path.exists(), link
        if anchor:
            text = path.read_text() if path else page
            assert anchor in map(slug, re.findall(r"^#+ (.+)$", text, re.MULTILINE)), link
    for named in re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|md|c|h|toml))`", prose(page)):
        found = any(path.match(named) for path in ROOT.rglob(Path(named).name))
        assert found or named == "example.py", named


@every_page
def test_links_lead_somewhere(path: Path) -> None:
    check_links(path.read_text(), path.parent)


def check_quotes(page: str) -> None:
    """A message is quoted where it is printed, and so checked; never in prose."""
    outside = re.findall(rf"(?:{NORMS}): \w+ (?:is|has|must)\b.*|cannot be (?:fused|captured): .*", prose(page))
    assert outside == []


@every_page
def test_errors_are_quoted_where_they_are_raised(path: Path) -> None:
    check_quotes(path.read_text())


class Lie(NamedTuple):
    name: str
    page: str
    check: Callable[[str], None]


def fenced(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```\n"


RAISES = "try:\n    float('x')\nexcept ValueError as error:\n    print(error)"
LIES = [
    Lie("raises", fenced("python", "1 / 0"), check_blocks),
    Lie("fails", fenced("python", "assert 1 == 2"), check_blocks),
    Lie("no_such_name", fenced("python", "import warpnorm\nwarpnorm.swap"), check_blocks),
    Lie("no_namespace", fenced("python", "x = 1\ndel x") + fenced("python", "x"), check_blocks),
    Lie("prints_else", fenced("python", "print(1)") + fenced("text output", "2"), check_blocks),
    Lie("prints_more", fenced("python", "print(1, 2)") + fenced("text output", "1"), check_blocks),
    Lie("other_error", fenced("python", RAISES) + fenced("text output", "another message"), check_blocks),
    Lie("unshown", fenced("python", RAISES), check_blocks),
    Lie("no_error", fenced("python", RAISES.replace("'x'", "'1'")) + fenced("text output", "a message"), check_blocks),
    Lie("unknown_kind", fenced("python noqa", "1 / 0"), check_kinds),
    Lie("other_language", fenced("py", "1 / 0"), check_kinds),
    Lie("signature", fenced("python signature", "rms_norm(input, weight=None)"), check_signatures),
    Lie("default", fenced("python signature", "group_norm(input, num_groups, weight=None, bias=None, eps=1e-6, *,\n"
        "out=None, return_stats=False)"), check_signatures),
    Lie("name", "call `warpnorm.nn.SwitchNorm`", check_names),
    Lie("torch_name", "as `torch.nn.functional.batch_normal`", check_names),
    Lie("command", "run `warpnorm measure`", check_commands),
    Lie("option", fenced("", "warpnorm explain layer_norm --colour"), check_commands),
    Lie("option_of_another", "run `warpnorm explain layer_norm --quick`", check_commands),
    Lie("option_alone", "with `--colour` too", check_commands),
    Lie("target", "run `make coffee`", check_commands),
    Lie("variable", "set `WARPNORM_SPEED`", check_commands),
    Lie("link", "see [there](nowhere.md)", lambda page: check_links(page, ROOT)),
    Lie("picture", "![a picture](docs/none.svg)", lambda page: check_links(page, ROOT)),
    Lie("anchor", "see [there](README.md#nowhere)", lambda page: check_links(page, ROOT)),
    Lie("file", "`plan/chosen.py` decides", lambda page: check_links(page, ROOT)),
    Lie("quote", "it says `layer_norm: weight has shape (3,)`", check_quotes),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_page_that_lies_fails(lie: Lie) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError)):
        lie.check(lie.page)


def test_a_page_that_does_not_passes() -> None:
    page = (
        "`warpnorm.nn` and `torch.nn`, `warpnorm explain layer_norm --backward`, `--quick`, `make test`, "
        "[here](README.md), `plan/choose.py`\n"
        + fenced("python", "x = 1")
        + fenced("python", f"print(x, 'two  words')\n{RAISES}")
        + fenced("text output", "1 two\nwords\ncould not ... to float: 'x'")
        + fenced('python skip="needs a GPU"', "1 / 0")
    )
    for check in (check_blocks, check_kinds, check_signatures, check_names, check_commands, check_quotes):
        check(page)
    check_links(page, ROOT)


def renew(path: Path) -> None:
    """Writes what the blocks print; what is there stays where it still holds."""
    page = path.read_text()
    found = printed(page)
    for block, output in reversed(list(expected(page))):
        if output is not None and not is_printed(output.text, found[block.line]):
            lines = [textwrap.fill(line, WIDEST, subsequent_indent="    ") if len(line) > WIDEST else line
                     for line in found[block.line].splitlines()]  # fmt: skip
            page = page[: output.start] + "\n".join(lines) + "\n" + page[output.stop :]
    path.write_text(page)


if __name__ == "__main__":
    for page_with_code in WITH_CODE:
        renew(page_with_code)


def test_getting_started_denies_nothing_that_is_there() -> None:
    """It said for long that there is no SyncBatchNorm."""
    text = " ".join((ROOT / "docs/getting_started.md").read_text().split())
    denied = [name for name in (*warpnorm.nn.__all__, "DTensor") if f"no {name}" in text]
    assert denied == []
    assert "(scaling.md)" in text
