"""`warpnorm report`: its numbers are those of the result files, its page works in a browser, and what is no result file is
refused before anything is written."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from warpnorm.bench.documents import write_documents
from warpnorm.bench.palette import in_order
from warpnorm.bench.results import AHEAD, BEHIND, FAILED, LEVEL, large_grid, read_files
from warpnorm.cli import main

BANDWIDTH = 2e12
SHAPE = (4096, 4096)  # in fp32 a copy of it takes 67.1 microseconds
WRONG = "wrong: error 4.1e-07, eager PyTorch's 1.3e-07"
HOSTILE = "</script><script>window.broken = 1</script> | a_b *c* <b>"


def measured(rival: str, ms: float | None, problem: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "rival": rival,
        "error": 1e-7,
        "is_right": problem is None,
        "ms": ms,
        "method": "graph",
        "problem": problem,
    } | more


def row(
    norm: str = "rms_norm", direction: str = "forward", shape: tuple[int, ...] = SHAPE, **more: Any
) -> dict[str, Any]:
    tensors = 2 if direction == "forward" else 3
    size = {"fp32": 4, "bf16": 2}[more.get("dtype", "fp32")]
    for length in shape:
        size *= length
    found = {"norm": norm, "direction": direction, "shape": list(shape), "dtype": "fp32", "least_bytes": tensors * size}
    return found | {"why": "a reason", "measurements": [measured("warpnorm", 0.1), measured("eager", 0.2)]} | more


def result_file(path: Path, *rows: dict[str, Any], **more: Any) -> Path:
    head = {
        "device": "Some GPU",
        "copy_bandwidth": BANDWIDTH,
        "torch": "2.11.0",
        "commit": "abc1234",
        "date": "2026-01-02",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | {"results": rows} | more))
    return path


def mixed(path: Path) -> Path:
    """A row of each kind: ahead, level, behind, wrong, missing, small, by channel, and curves over several widths."""
    missing = measured("liger", None, "MissingFunctionError: liger has no batch_norm")
    widths = [row("layer_norm", way, (1 << 25 >> k, 1 << k)) for way in ("forward", "backward") for k in (10, 12, 14)]
    times = [measured("warpnorm", 0.1), measured("eager", 0.2), measured("torch.compile", 0.08)]
    level = [measured("warpnorm", 0.1), measured("eager", 0.101), measured("torch.compile", None, WRONG)]
    small = [measured("warpnorm", 0.003, wall_ms=0.02), measured("eager", 0.0045, wall_ms=0.018)]
    return result_file(
        path,
        *widths,
        row(measurements=times),
        row(direction="backward", measurements=level),
        row(shape=(8, 256), measurements=small),
        row("batch_norm", shape=(64, 256, 56, 56), layout="nhwc", measurements=[*times, missing]),
        driver="580.1",
        missing={"apex": "not installed"},
    )


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_tables_say_what_the_file_says(tmp_path: Path) -> None:
    write_documents([mixed(tmp_path / "gpu.json")], tmp_path / "out")
    text = (tmp_path / "out" / "performance.md").read_text()
    assert text.startswith("<!-- Made by `warpnorm report`")
    assert "| forward | 4096 x 4096 | fp32 | 67 | **84** | 34 | 0.80x |" in text
    assert "| backward | 4096 x 4096 | fp32 | **101** | - (wrong) | 100 | 1.01x |" in text
    assert f"- torch.compile, backward 4096 x 4096 fp32: {WRONG}" in text
    assert "| forward | 8 x 256 | fp32 | **3.0 / 20.0** | 4.5 / 18.0 | 1.50x | 0.90x |" in text
    assert "| forward | 64 x 256 x 56 x 56 | fp32 | nhwc |" in text
    assert "- liger has no batch_norm" in text
    for fact in ("- commit: abc1234", "- date: 2026-01-02", "- driver: 580.1", "- copy: 2.00 TB/s, read and written"):
        assert fact in text
    assert "- not measured: apex (not installed)" in text
    assert "CUDA graph" in text


def test_a_peak_that_cannot_be_is_not_said(tmp_path: Path) -> None:
    """Backward of 67 MB leaves a gradient of as much, unless it writes over what it is given, as liger does."""
    few, enough = 8_000_000, 4 * 4096 * 4096
    of = {"warpnorm": few, "eager": enough, "liger": few}
    file = result_file(
        tmp_path / "gpu.json",
        row(direction="backward", measurements=[measured(name, 0.1, peak_bytes=peak) for name, peak in of.items()]),
        row(direction="forward", measurements=[measured("warpnorm", 0.1, peak_bytes=few)]),
    )
    (found,) = read_files([file])
    assert [m.peak_bytes for m in found.rows[0].measured] == [None, enough, few]
    assert found.rows[1].measured[0].peak_bytes == few, "forward may write float8"


def test_steps_are_times(tmp_path: Path) -> None:
    times = [measured("warpnorm", 4.5, wall_ms=4.6), measured("torch.compile", 4.6, wall_ms=4.7)]
    write_documents(
        [result_file(tmp_path / "gpu.json", row("block", "step", (8, 1024, 2048), measurements=times))], tmp_path
    )
    text = (tmp_path / "performance.md").read_text()
    assert "Whole steps, microseconds of the device / of a whole call:" in text
    assert "| step | 8 x 1024 x 2048 | fp32 | **4500 / 4600** | 4600 / 4700 | 1.02x | 1.02x |" in text


def test_where_a_rival_is_ahead_is_listed(tmp_path: Path) -> None:
    write_documents([mixed(tmp_path / "gpu.json")], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    assert "| Some GPU | gpu | 10 | 7 | 1 | 2 |" in text
    assert "| Some GPU | gpu, whole calls | 1 | 0 | 0 | 1 |" in text
    assert lines_of(text, "| gpu |") == [
        "| gpu | rms_norm forward 4096 x 4096 fp32 | torch.compile | 25 % |",
        "| gpu | batch_norm forward nhwc 64 x 256 x 56 x 56 fp32 | torch.compile | 25 % |",
    ]


def test_no_rival_ahead_is_said(tmp_path: Path) -> None:
    write_documents([result_file(tmp_path / "gpu.json", row())], tmp_path)
    assert "In no row by more than 2 %." in (tmp_path / "performance.md").read_text()


@dataclass(frozen=True)
class Standing:
    name: str
    measurements: tuple[dict[str, Any], ...]
    standing: str
    why: str


STANDINGS = [
    Standing("ahead", (measured("warpnorm", 1.0), measured("eager", 1.03)), AHEAD, "by more than 2 %"),
    Standing("level", (measured("warpnorm", 1.0), measured("eager", 0.985)), LEVEL, "1.5 % is noise"),
    Standing("behind", (measured("warpnorm", 1.0), measured("eager", 1.5), measured("liger", 0.9)), BEHIND, "the best"),
    Standing("wrong_rival", (measured("warpnorm", 1.0), measured("eager", 0.5, WRONG)), "alone", "a wrong time is no time"),
    Standing("wrong", (measured("warpnorm", 0.1, WRONG), measured("eager", 0.5)), FAILED, "ours, whatever time it has"),
    Standing("silent", ({"rival": "warpnorm"}, measured("eager", 0.5)), FAILED, "neither time nor problem"),
    Standing("not_a_number", (measured("warpnorm", float("nan")), measured("eager", 0.5)), FAILED, "JSON may say so"),
]  # fmt: skip


@pytest.mark.parametrize("case", STANDINGS, ids=lambda case: case.name)
def test_where_a_row_stands(case: Standing, tmp_path: Path) -> None:
    path = result_file(tmp_path / "gpu.json", row(measurements=list(case.measurements)))
    (file,) = read_files([path])
    assert file.rows[0].standing() == case.standing, case.why
    write_documents([path], tmp_path)
    assert ("no time of warpnorm" in (tmp_path / "performance.md").read_text()) == (case.standing == FAILED)


def test_markdown_renders(tmp_path: Path) -> None:
    hostile = row(
        norm="odd_norm", measurements=[measured("warpnorm", 0.1), measured("eager", None, HOSTILE)], why=HOSTILE
    )
    write_documents([mixed(tmp_path / "gpu.json"), result_file(tmp_path / "b.json", hostile, device=HOSTILE)], tmp_path)
    html = MarkdownIt("commonmark").enable("table").render((tmp_path / "performance.md").read_text())
    assert len(re.findall("<table>", html)) == 7, "a summary, rivals ahead, and one or two for each norm"
    assert re.findall("<td></td>", html) == [], "as many cells as headings"
    assert "<p>|" not in html
    assert "<script" not in html
    assert "a_b *c* &lt;b&gt;" in html, "as it was written, not as Markdown"


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    path = mixed(tmp_path / "gpu.json")
    first, second = (write_documents([path], tmp_path / name) for name in ("one", "two"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


class DataElement(HTMLParser):
    """Finds the text of the element that holds the data, as a browser would cut it, and counts scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.scripts, self.is_inside = "", 0, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.is_inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = False

    def handle_data(self, data: str) -> None:
        self.text += data if self.is_inside else ""


def test_data_cannot_leave_its_element(tmp_path: Path) -> None:
    write_documents([result_file(tmp_path / "gpu.json", row(why=HOSTILE), device=HOSTILE)], tmp_path)
    element = DataElement()
    element.feed((tmp_path / "performance.html").read_text())
    assert element.scripts == 2
    (file,) = json.loads(element.text)["files"]
    assert (file["head"]["device"], file["rows"][0]["why"]) == (HOSTILE, HOSTILE)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    write_documents([mixed(tmp_path / "gpu.json")], tmp_path)
    page = (tmp_path / "performance.html").read_text()
    assert "default-src 'none'" in page
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert re.findall(r"<(?:link|img|iframe)|\bsrc=|@import|url\(|fetch\(", page) == []


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [result_file(tmp_path / folder / "gpu.json", row()) for folder in ("old", "new")]
    assert [file.label for file in read_files([*paths, paths[0]])] == ["gpu", "gpu-2"]


def test_the_picture_takes_the_large_grid(tmp_path: Path) -> None:
    sizes = [(1 << 15, 4096), (8, 4096), (1 << 17, 1024), (32776, 4095), (64, 256)]
    (file,) = read_files([result_file(tmp_path / "gpu.json", *(row(shape=size) for size in sizes))])
    widths = {width: found.shape[0] for width, found in large_grid(file.rows).items()}
    assert list(widths.items()) == [(1024, 1 << 17), (4095, 32776), (4096, 1 << 15)], "by width, without small batches"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(norm, way, (1 << 25 >> k, 1 << k), dtype="bf16") for norm in ("rms_norm", "layer_norm")
            for way in ("forward", "backward") for k in (10, 12)]  # fmt: skip
    path = result_file(tmp_path / "gpu.json", *rows, device="A $GPU$")
    first, second = (write_documents([path], tmp_path / name) for name in ("one", "two"))
    assert [p.name for p in first] == ["performance.md", "performance.html", "gpu.svg"]
    picture = first[-1].read_text()
    assert picture == second[-1].read_text()
    for text in ("A $GPU$", "RMSNorm, backward", ">4k<", ">warpnorm<", ">eager<"):
        assert text in picture
    assert "![Percent of copy speed by width on A $GPU$](gpu.svg)" in first[0].read_text()
    assert "not multiples of 8" not in picture


@pytest.mark.parametrize("widths", [(1024, 4095, 4096), (4095,), (300, 4095)], ids=str)
def test_widths_of_other_rows_stand_apart(widths: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row("rms_norm", way, ((1 << 27) // cols, cols), dtype="bf16")
        for way in ("forward", "backward")
        for cols in widths
    ]
    path = result_file(tmp_path / "gpu.json", *rows)
    written = write_documents([path], tmp_path / "out")
    has_picture = len(widths) > 1
    assert [p.name for p in written] == ["performance.md", "performance.html", *["gpu.svg"] * has_picture]
    if has_picture:
        picture = written[-1].read_text()
        assert (picture.count("not multiples of 8") > 0) == (1024 in widths)
        assert picture.count(">4095<") == 2


def test_libraries_have_one_order() -> None:
    assert in_order(["eager", "somebody", "quack", "warpnorm"]) == ("warpnorm", "quack", "eager", "somebody")


@dataclass(frozen=True)
class Refusal:
    name: str
    content: str | None
    said: str
    why: str


REFUSALS = [
    Refusal("absent", None, "there is no file", "a name with a mistake in it"),
    Refusal("not_json", "{", "it is not JSON", "a file that was cut off"),
    Refusal("other_json", '{"results": []}', "it lacks 'copy_bandwidth'", "JSON of something else"),
    Refusal("a_list", "[1]", "is no result file", "JSON, but no object"),
    Refusal("no_device", '{"copy_bandwidth": 1, "results": []}', "it lacks 'device'", "half a head"),
    Refusal("no_number", '{"copy_bandwidth": "fast", "device": "a", "results": []}', "is no result file", "a word"),
    Refusal("empty", '{"copy_bandwidth": 1, "device": "a", "results": []}', "has no results", "stopped at once"),
    Refusal(
        "half_a_row", '{"copy_bandwidth": 1, "device": "a", "results": [{"norm": "a"}]}', "it lacks", "no direction"
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_what_is_no_result_file_is_refused(case: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, good = tmp_path / "a.json", result_file(tmp_path / "good.json", row())
    if case.content is not None:
        path.write_text(case.content)
    assert main(["report", str(good), str(path), "--out", str(tmp_path / "out")]) == 2, case.why
    printed = " ".join(capsys.readouterr().err.split())
    assert case.said in printed
    assert "warpnorm bench --json" in printed
    assert not (tmp_path / "out").exists()


def test_files_of_a_checkout_are_found(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "there is no result file in benchmarks/results" in capsys.readouterr().err
    result_file(Path("benchmarks/results/gpu.json"), row())
    assert main(["report"]) == 0
    assert capsys.readouterr().out.splitlines() == ["wrote docs/performance.md", "wrote docs/performance.html"]
    assert main(["report", "--out", "benchmarks/results/gpu.json"]) == 2
    assert "--out names another folder" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    rows = [row(shape=(1 << 25 >> k, 1 << k), dtype="bf16") for k in (10, 12)]
    path = result_file(tmp_path / "gpu.json", *rows)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@dataclass(frozen=True)
class Opened:
    """The page after its scripts have run, and what the browser's console said."""

    html: str
    console: list[str]

    def names(self, table: str) -> list[str]:
        body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', self.html, re.DOTALL)
        return re.findall(r'<tr data-name="([^"]*)"', body[1]) if body else []


def opened(page: Path, chosen: str = "") -> Opened:
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom")
    options += ("--virtual-time-budget=2000", f"--user-data-dir={page.parent / 'profile'}")
    command = [str(BROWSER), *options, f"{page.resolve().as_uri()}#{chosen}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return Opened(run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line])


@needs_browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    before, after = mixed(tmp_path / "gpu.json"), tmp_path / "new" / "gpu.json"
    after.parent.mkdir()
    changed = json.loads(before.read_text())
    changed["results"][1]["measurements"][0]["ms"] = 0.15
    after.write_text(json.dumps(changed))
    write_documents([before, after], tmp_path)
    page = opened(tmp_path / "performance.html")
    assert page.console == []
    (file, _) = read_files([before, after])
    assert page.names("rows") == [r.name for r in file.rows]
    assert page.names("changes")[0] == file.rows[1].name, "the row that became slower comes first"
    assert "10 rows in both: 1 slower, 9 level within 2 %, 0 faster" in page.html
    assert len(re.findall(r"<path [^>]*class=\"line ", page.html)) >= 4, "a line for each library and direction"
    assert len(re.findall(r"<path [^>]*class=\"marker ", page.html)) >= 20
    assert "torch.compile: wrong" in page.html
    assert f'title="{WRONG}">\u2013 wrong</td>' in page.html


@dataclass(frozen=True)
class Choice:
    name: str
    chosen: str
    rows: tuple[str, ...]
    why: str


CHOICES = [
    Choice("words", "q=rms+backward", ("rms_norm backward 4096 x 4096 fp32",), "every word must match"),
    Choice(
        "selects",
        "norm=layer_norm&direction=forward&sort=-shape&q=x4096",
        ("layer_norm forward 8192 x 4096 fp32",),
        "select boxes and words together, a shape as it is typed",
    ),
    Choice(
        "rival_ahead",
        "behind=1&q=",
        ("rms_norm forward 4096 x 4096 fp32", "batch_norm forward nhwc 64 x 256 x 56 x 56 fp32"),
        "only where a rival is ahead",
    ),
]


@needs_browser
@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_the_address_filters_the_table(case: Choice, tmp_path: Path) -> None:
    write_documents([mixed(tmp_path / "gpu.json")], tmp_path)
    page = opened(tmp_path / "performance.html", case.chosen)
    assert page.console == []
    assert tuple(page.names("rows")) == case.rows, case.why
    assert f"{len(case.rows)} of 10 rows" in page.html


@needs_browser
def test_a_broken_page_is_seen(tmp_path: Path) -> None:
    write_documents([mixed(tmp_path / "gpu.json")], tmp_path)
    path = tmp_path / "performance.html"
    path.write_text(path.read_text().replace("function renderTable(", "function renderNothing("))
    page = opened(path)
    assert any("Uncaught ReferenceError" in line for line in page.console)
    assert page.names("rows") == []
