"""Drawings of a reduction: what they show is what the compiled code does."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from warpnorm.bench import draw, inside
from warpnorm.cli import main
from warpnorm.codegen import reduction
from warpnorm.codegen.reduction import Reduction

CASES = {  # norm, shape, dtype, layout, backward, target, lanes to a row, warps to a row: why
    "row": ("layer_norm", (64, 4096), "bf16", "nchw", False, "sm_90", 32, 4),  # the usual one
    "narrow": ("rms_norm", (64, 128), "bf16", "nchw", False, "sm_90", 16, 1),  # two rows to a warp
    "wide": ("rms_norm", (8, 16384), "bf16", "nchw", False, "sm_90", 32, 16),  # many warps
    "walked": ("layer_norm", (2, 1 << 20), "bf16", "nchw", False, "sm_90", 32, 8),  # a tile is part of a row
    "team": ("layer_norm", (8, 131072), "bf16", "nchw", False, "sm_90", 32, 4),  # of the part of one program
    "in_blocks": ("layer_norm", (8, 5120), "bf16", "nchw", False, "sm_90", 32, 4),  # and here it is one of five
    "backward": ("rms_norm", (64, 2048), "fp32", "nchw", True, "sm_80", 32, 4),  # another kernel, another GPU
    "amd": ("rms_norm", (64, 8192), "bf16", "nchw", False, "gfx942", 64, 8),  # 64 lanes
    "across": ("batch_norm", (8, 64, 16, 16), "fp16", "nhwc", False, "sm_90", 4, 4),  # lanes along rows first
}


def drawing(name: str) -> draw.Drawing:
    norm, shape, dtype, layout, backward, target, *_ = CASES[name]
    case = inside.case(norm, shape, dtype, layout, backward)
    return inside.drawn(case, inside.explained(case, target, False), target)


@pytest.mark.parametrize("name", CASES)
def test_every_column_has_one_thread(name: str) -> None:
    drawn = drawing(name)
    assert (drawn.lanes, drawn.warps) == CASES[name][-2:]
    held = sorted(
        column
        for warp in range(drawn.warps)
        for lane in range(drawn.lanes)
        for first, last in drawn.reduction.columns(warp, lane)
        for column in range(first, last + 1)
    )
    assert held == list(range(drawn.reduction.cols))
    assert drawn.reduction.elements * drawn.lanes * drawn.warps == drawn.reduction.cols


@pytest.mark.parametrize("name", ["row", "wide", "walked", "in_blocks"])
def test_masks_are_those_of_the_code(name: str) -> None:
    drawn = drawing(name)
    one = (*drawn.reduction.lane_masks, *drawn.reduction.warp_masks)
    assert drawn.masks == one * drawn.reduction.count
    assert drawn.reduction.lane_masks == (16, 8, 4, 2, 1)


@pytest.mark.parametrize("name", CASES)
def test_every_lane_ends_with_the_sum(name: str) -> None:
    drawn = drawing(name)
    masks = drawn.reduction.lane_masks
    stride = masks[-1] if masks else 1
    last = draw.rounds(range(1, drawn.lanes + 1), masks, stride)[-1]
    assert last == [sum(range(1, drawn.lanes + 1))] * drawn.lanes


def test_text_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "row.svg"
    assert main(["explain", "layer_norm", "--shape", "64x4096", "--target", "sm_90", "--draw", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "warp 0  lane 1   columns 8-15, 1032-1039, 2056-2063, 3080-3087" in printed
    assert "xor 16   18  20  22" in printed
    assert "1 + 17 = 18" in printed
    (last,) = [line.split() for line in printed.splitlines() if line.strip().startswith("xor 1 ") and "=" in line]
    assert last == ["xor", "1", *["528"] * 32, "256", "+", "272", "=", "528"]
    assert "one writes 2112; barrier; every thread reads it." in printed
    texts = [text.text for text in ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("528") == 32 + 4  # lanes, and words of shared memory
    assert "xor 16" in texts


def test_a_lone_element_for_each_thread_needs_no_addition() -> None:
    lone = Reduction(1, 32, (1, 1), (1, 32), (1, 1), (1, 0))
    shown = draw.text(draw.Drawing("lone", drawing("row").plan, lone, None))
    assert "Each thread holds one element." in shown
    assert "no shared memory, no barrier" in shown


def test_a_place_that_cannot_be_written_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert main(["explain", "layer_norm", "--shape", "64x4096", "--draw", str(tmp_path / "file" / "row.svg")]) == 2
    out, err = capsys.readouterr()
    assert (out, "--draw: cannot write to" in err) == ("", True)


def test_what_reduces_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reduction, "read", lambda kernel: None)
    assert main(["explain", "rms_norm", "--shape", "8x64", "--target", "sm_90", "--draw"]) == 2
    assert "rms_norm forward 8 x 64 bf16 reduces nothing along a row" in capsys.readouterr().err
