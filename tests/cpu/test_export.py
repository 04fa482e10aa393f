"""`torch.export` of modules and fused functions with a dynamic number of rows: one operator for each, the program runs in
another process that imports torch and warpnorm alone, and as compiled C++ where AOTInductor finds a compiler."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from cpu.seen import operators
from warpnorm import routing
from warpnorm.errors import InputError

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")

COLS = 2048
IMAGE = (32, 64, 64)
# How each fused module is made, and the shapes of a sample of what it is given; a number has none
MODULES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "AddLayerNorm": (lambda: warpnorm.nn.AddLayerNorm(COLS), ((COLS,), (COLS,))),
    "GatedRMSNorm": (lambda: warpnorm.nn.GatedRMSNorm(COLS), ((COLS,), (COLS,))),
    "AdaLayerNorm": (lambda: warpnorm.nn.AdaLayerNorm(COLS), ((6, COLS), (COLS,), (COLS,))),
    "QKNorm": (lambda: warpnorm.nn.QKNorm(1024, 4, 2), ((5, 8, 1024),)),
    "RMSNormFloat8": (lambda: warpnorm.nn.RMSNormFloat8(COLS), ((COLS,), ())),
    "BatchNormReLU2d": (lambda: warpnorm.nn.BatchNormReLU2d(32), (IMAGE, IMAGE)),
    "SyncBatchNormReLU2d": (lambda: warpnorm.nn.SyncBatchNormReLU2d(32), (IMAGE,)),
    "GroupNormSiLU": (lambda: warpnorm.nn.GroupNormSiLU(4, 32), (IMAGE,)),
}
ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import sys, torch, warpnorm
program = torch.export.load(sys.argv[1]).module()
x, right = torch.load(sys.argv[2])
assert torch.equal(program(x), right)
print("done")
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.add = warpnorm.nn.LayerNorm(COLS), warpnorm.nn.AddRMSNorm(COLS)
        self.scale = torch.nn.Parameter(torch.randn(COLS))

    @warpnorm.fuse
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.rms_norm(x * self.scale, (COLS,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self.add(self.norm(x), x)
        return self.scaled(y) + h


def exported(net: torch.nn.Module, strict: bool = False) -> Any:
    shapes = {"x": {0: torch.export.Dim("rows", max=1 << 20)}}
    return torch.export.export(net, (torch.randn(6, COLS),), dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["python", "dynamo"])
def test_any_number_of_rows(strict: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    program = exported(net, strict)
    assert operators(program.run_decompositions({}).graph_module) == ["warpnorm.norm.default"] * 3 + ["aten.add.Tensor"]
    for count in (2, 7, 64):
        x = torch.randn(count, COLS)
        assert torch.equal(program.module()(x), net(x)), count


def test_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(9, COLS)
    program = exported(net)
    torch.export.save(program, tmp_path / "net.pt2")
    torch.save((x, net(x).detach()), tmp_path / "right.pt")
    command = [sys.executable, "-c", LOADED, str(tmp_path / "net.pt2"), str(tmp_path / "right.pt")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout == "done\n", result.stderr


def test_another_dtype_is_refused() -> None:
    program = exported(warpnorm.nn.RMSNorm(COLS)).module()
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(InputError, match="this program was made for float32, float32, but got"):
            program(torch.randn(4, COLS, dtype=dtype))


@pytest.mark.parametrize("name", MODULES)
def test_every_fused_module(name: str) -> None:
    """One operator for each, any number of samples, saved and loaded."""
    torch.manual_seed(0)
    make, shapes = MODULES[name]
    module = make().eval()
    samples = torch.export.Dim("samples", min=2, max=1 << 16)

    def given(count: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(count, *shape) if shape else torch.tensor(0.1) for shape in shapes)

    dynamic = tuple({0: samples} if shape else {} for shape in shapes)
    program = torch.export.export(module, given(4), dynamic_shapes=dynamic).run_decompositions({})
    found = [str(node.target) for node in program.graph.nodes]
    assert found.count("warpnorm.norm.default") == 1
    assert not any(
        word in target for target in found for word in ("layer_norm", "rms_norm", "batch_norm", "group_norm")
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for count in (2, 7):
        tensors = given(count)
        results, right = loaded(*tensors), module(*tensors)
        for ours, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, right)), strict=True):
            assert torch.equal(ours.float(), expected.float())


def test_by_channel() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(warpnorm.nn.BatchNorm2d(32), warpnorm.nn.GroupNormSiLU(4, 32))
    example = (torch.randn(4, 32, 64, 64),)
    net.eval()
    program = torch.export.export(net, example, dynamic_shapes=({0: torch.export.Dim("samples", min=2)},))
    x = torch.randn(7, 32, 64, 64)
    torch.testing.assert_close(program.module()(x), net(x))


def test_aot_inductor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    package = torch._inductor.aoti_compile_and_package(exported(net), package_path=str(tmp_path / "net.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for count in (2, 9):
            x = torch.randn(count, COLS)
            torch.testing.assert_close(loaded(x), net(x))
