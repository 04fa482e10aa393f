"""`explain`: its fields, its text, bytes counted by hand, and the code of GPUs that are not here; nothing is computed."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warpnorm
from cpu.truth import random
from warpnorm import FusionError, InputError, InputTypeError, routing, settings
from warpnorm.explain import Direction, Explanation
from warpnorm.plan.plan import LONG_ROW, ROW, TEAM

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def block(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + F.silu(x)
    return F.layer_norm(h, h.shape[-1:], weight, bias), h


def dropped(x: Tensor, p: float = 0.25) -> Tensor:
    return F.rms_norm(F.dropout(x, p), x.shape[-1:])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.scale = 3.0

    @warpnorm.fuse
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale)


def operands(rows: int, cols: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> list[Tensor]:
    """Of the block."""
    shapes = ((rows, cols), (rows, cols), (cols,), (cols,))
    return [random(shape, dtype, seed, requires_grad) for seed, shape in enumerate(shapes)]


def names(direction: Direction | None) -> list[str]:
    assert direction is not None
    return [name for name, _ in direction.launches]


def test_block() -> None:
    found = warpnorm.explain(block, *operands(4, 8))
    assert (found.name, found.target) == ("block", "sm_90")
    assert found.norm == "layer_norm over the last 1 of 2 dimensions, eps 1e-05"
    assert sorted(found.operands) == [
        "bias: 8 float32, column",
        "residual: 4x8 float32, full",
        "weight: 8 float32, column",
        "x: 4x8 float32, full",
    ]
    assert found.outputs == (torch.float32, torch.float32)
    assert [word in found.prologue for word in ("aten.silu", "aten.add", "aten.mul")] == [True, True, False]
    assert [word in found.epilogue for word in ("aten.silu", "aten.add", "aten.mul")] == [False, True, True]
    assert found.backward is not None
    for direction in (found.forward, found.backward):
        assert direction.plan.why
        assert direction.listings == {}
        compile(direction.source, "source", "exec")
        assert "ours.sigmoid" in direction.source, "what silu is made of"
        assert "@triton.jit\ndef prologue(" in direction.source
    assert "def epilogue(" in found.forward.source
    assert "def epilogue_vjp(" in found.backward.source


def test_text_holds_every_part() -> None:
    found = warpnorm.explain(block, *operands(4, 8))
    text = str(found)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == f"block: {found.norm}"
    assert "runs       as plain PyTorch, because its rows are so small that this is quicker" in lines
    assert "target     sm_90, assumed: the tensors are on no GPU" in lines
    assert "\ntarget     sm_80\n" in str(warpnorm.explain(block, *operands(4, 8), target="sm_80"))
    assert all(operand in lines for operand in found.operands)
    for direction in (found.forward, found.backward):
        assert direction is not None
        assert f"why        {direction.plan.why}" in lines
        assert direction.source in text
        for name, grid in direction.launches:
            assert f"launch     {name} on {' x '.join(map(str, grid))} programs" in lines
        moved, least = direction.bytes_moved, direction.least_bytes
        assert f"memory     {moved} bytes moved, {least} bytes is the least ({moved / least:.2f} times)" in lines
    assert [word for word in ("prologue", "epilogue", "forward", "backward") if word not in text] == []
    assert "Explanation(" not in text
    assert "MB moved" in str(warpnorm.explain(block, *operands(64, 4096)))


def test_bytes_by_hand() -> None:
    """Four rows of eight float32 are 128 bytes, a parameter 32; a row's two statistics are eight."""
    found = warpnorm.explain(block, *operands(4, 8))
    full, column, statistics = 128, 32, 4 * 8
    read, written = 2 * full + 2 * column, 2 * full
    assert found.forward.least_bytes == read + written == 576
    assert found.forward.bytes_moved == read + written + statistics == 608
    assert found.backward is not None
    # x, residual, the weight and both gradients are read; the bias is not. What has rows is read again, to be summed
    read, written = 4 * full + column, 2 * full + 2 * column
    assert found.backward.least_bytes == read + written
    assert found.backward.bytes_moved == read + written + statistics + 4 * full
    # Of many rows every program leaves a partial row for each parameter, which is written and read
    many = warpnorm.explain(block, *operands(1000, 8)).backward
    assert many is not None
    (_, (programs, _)), (name, _) = many.launches
    assert name == "column_sum_kernel"
    assert many.bytes_moved == many.least_bytes + 1000 * 8 + 2 * 2 * column * programs


@pytest.mark.parametrize("cols", [8, 100, 1024, 4096, 16384, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_and_bytes(cols: int, dtype: torch.dtype) -> None:
    found = warpnorm.explain(block, *operands(4, cols, dtype))
    assert found.backward is not None
    assert len(found.forward.launches) == 1
    for direction in (found.forward, found.backward):
        assert 0 < direction.least_bytes <= direction.bytes_moved
        assert direction.plan.why
        assert all(min(grid) > 0 for _, grid in direction.launches)
    if found.backward.plan.pattern == ROW:
        assert names(found.backward) == ["row_backward_kernel"], (
            "few rows are summed by other programs of the same launch"
        )
        many = warpnorm.explain(block, *operands(200, cols, dtype)).backward
        assert many is not None
        assert names(many) == ["row_backward_kernel", "column_sum_kernel"]
    if cols == 65536:
        assert (found.forward.plan.pattern, found.backward.plan.pattern) == (LONG_ROW, TEAM)
        assert names(found.backward) == ["team_backward_kernel", "column_sum_kernel"]
        assert found.forward.bytes_moved > 1.3 * found.forward.least_bytes, "long rows are read twice"
    if cols <= 4096:
        assert {found.forward.plan.pattern, found.backward.plan.pattern} == {ROW}


def test_backward_is_of_the_tensors_that_want_a_gradient() -> None:
    plain = operands(4, 8, requires_grad=False)
    found = warpnorm.explain(block, *plain)
    assert found.backward is None
    assert "backward   no tensor requires a gradient" in str(found)
    plain[0].requires_grad_()
    found = warpnorm.explain(block, *plain)
    assert names(found.backward) == ["row_backward_kernel"], "no sum over rows, nothing to add up"


def test_a_norm_alone() -> None:
    found = warpnorm.explain(warpnorm.layer_norm, random((4, 8)), (8,), weight=random((8,)), eps=0.5)
    assert found.name == "layer_norm"
    assert found.norm == "layer_norm over the last 1 of 2 dimensions, eps 0.5"
    assert found.operands == ("input: 4x8 float32, full", "weight: 8 float32, column")
    assert "aten" not in found.prologue
    assert found.epilogue.count("aten") == found.epilogue.count("aten.mul") == 1
    assert found.forward.least_bytes == 2 * 128 + 32


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


IMAGES = torch.ones(8, 64, 56, 56)
LARGE = torch.ones(2, 64, 80, 80)
# A norm of ours, its arguments, and whether native code runs it where it is not fused
STANDING_ALONE: dict[str, tuple[Any, tuple[Any, ...], bool]] = {
    "rows": (warpnorm.nn.LayerNorm(512), (torch.ones(64, 512),), routing.has_launcher()),
    "rows_forward": (warpnorm.nn.LayerNorm(512).forward, (torch.ones(64, 512),), routing.has_launcher()),
    "rows_partial": (
        partial(warpnorm.layer_norm, normalized_shape=512),
        (torch.ones(64, 512),),
        routing.has_launcher(),
    ),
    "long_rows": (warpnorm.nn.LayerNorm(2048), (torch.ones(64, 2048),), True),
    "half": (warpnorm.layer_norm, (half(512, 4096), (4096,)), True),
    "rms": (warpnorm.rms_norm, (half(512, 4096), (4096,)), True),
    "rms_short": (warpnorm.nn.RMSNorm(128), (torch.ones(64, 128),), True),
    "batch": (warpnorm.nn.BatchNorm2d(64), (IMAGES,), True),
    "batch_half": (warpnorm.nn.BatchNorm2d(64).half(), (IMAGES.half(),), False),
    "batch_evaluation": (warpnorm.nn.BatchNorm2d(64).eval(), (IMAGES,), False),
    "batch_of_vectors": (warpnorm.nn.BatchNorm1d(1024), (torch.ones(640, 1024),), False),
    "batch_of_ranks": (warpnorm.nn.SyncBatchNorm(64), (IMAGES,), True),
    "group": (warpnorm.nn.GroupNorm(8, 64), (IMAGES,), False),
    "group_large": (warpnorm.nn.GroupNorm(8, 64), (LARGE,), True),
    "group_last": (warpnorm.nn.GroupNorm(8, 64), (LARGE.to(memory_format=torch.channels_last),), False),
    "instance_medium": (warpnorm.nn.InstanceNorm2d(64), (IMAGES,), True),
    "instance_last": (warpnorm.nn.InstanceNorm2d(64), (IMAGES.to(memory_format=torch.channels_last),), True),
    "instance_last_small": (
        warpnorm.nn.InstanceNorm2d(64),
        (IMAGES[..., :32, :32].to(memory_format=torch.channels_last),),
        False,
    ),
    "group_of_one": (warpnorm.nn.GroupNorm(64, 64), (IMAGES,), True),
    "instance": (warpnorm.nn.InstanceNorm2d(64, track_running_stats=True), (LARGE,), True),
    "fused": (warpnorm.fuse(warpnorm.layer_norm), (torch.ones(64, 512), (512,)), True),
}


@pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")
@pytest.mark.parametrize("name", STANDING_ALONE)
def test_a_norm_alone_says_what_runs(name: str) -> None:
    """Each was explained as if it were fused, and said to run as native code where PyTorch's operator does."""
    function, given, is_native = STANDING_ALONE[name]
    route = warpnorm.explain(function, *given).route
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        function(*given)
    assert is_native == (not any("norm" in event.name for event in seen.function_events))
    assert route.startswith(
        "as native code on the CPU" if is_native else "as plain PyTorch, because its operator is as"
    )


@pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")
def test_short_rows_are_pytorchs_without_a_launcher() -> None:
    """Python takes longer than the operator, if few rows are that short."""
    with settings.override(launcher="python"):
        route = warpnorm.explain(warpnorm.layer_norm, torch.ones(64, 1024), 1024).route
        assert route.startswith("as plain PyTorch, because its operator is as quick")
        assert warpnorm.explain(warpnorm.layer_norm, torch.ones(64, 1025), 1025).route.startswith("as native code")
        x = torch.randn(64, 1024)
        torch.testing.assert_close(warpnorm.layer_norm(x, 1024), F.layer_norm(x, (1024,)), rtol=0, atol=0)


def test_a_fused_method() -> None:
    module = Scaled()
    for function in (module.forward, warpnorm.fuse(module.forward), warpnorm.fuse(module)):
        found = warpnorm.explain(function, random((2, 3, 8)))
        assert found.norm == "rms_norm over the last 1 of 3 dimensions, eps 1e-06"
        assert "3.0" in found.prologue
        assert len(found.operands) == 2
        assert found.backward is not None, "the weight is a parameter"
    assert warpnorm.explain(module.forward, random((4, 8))).name == "Scaled.forward"
    assert warpnorm.explain(module.forward, random((4, 8))).operands[0] == "x: 4x8 float32, full"


def test_ready_made_modules() -> None:
    for module in (warpnorm.nn.BatchNormReLU2d(8), warpnorm.nn.SyncBatchNormReLU2d(8), warpnorm.nn.GroupNormSiLU(2, 8)):
        found = warpnorm.explain(module, random((4, 8, 6, 6)))
        assert len(found.forward.launches) >= 1
        assert "relu" in found.epilogue or "sigmoid" in found.epilogue or "silu" in found.epilogue


def test_what_the_user_calls_things() -> None:
    scale = random((8,))
    fused = warpnorm.fuse(lambda pair, *, inside: F.layer_norm(pair[0] * pair[1][0] + inside["b"] * scale, (8,)))
    found = warpnorm.explain(fused, (random((4, 8)), random((4, 4, 8))), inside={"b": random((4, 1))})
    shown = [operand.split(":")[0] for operand in found.operands]
    assert [name for name in ("pair[0]", "pair[1].select", "inside['b']") if name not in shown] == []
    assert sum("row" in operand for operand in found.operands) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_code_of_a_gpu_that_is_not_here(target: str) -> None:
    pytest.importorskip("triton")
    found = warpnorm.explain(block, *operands(8, 4096, torch.bfloat16), asm=True, target=target)
    assert found.target == target
    assert found.backward is not None
    for direction in (found.forward, found.backward):
        assert sorted(direction.listings) == sorted(names(direction))
        for name, listing in direction.listings.items():
            assert listing.shuffles > 0, name
            assert listing.barriers > 0, name
            assert not listing.spilled_bytes, name
            assert listing.store_bytes, name
            assert f"compiled   {name}: shuffles {listing.shuffles}, " in str(found)
        main = direction.listings[names(direction)[0]]
        assert 16 in main.load_bytes
        assert 16 in main.store_bytes
        is_backward = direction is found.backward  # whose sums over rows are stored one by one
        assert 2 not in (*main.load_bytes, *(() if is_backward else main.store_bytes)), "no element is moved by itself"


def test_odd_rows_are_loaded_one_by_one() -> None:
    pytest.importorskip("triton")
    found = warpnorm.explain(block, *operands(8, 1023, torch.bfloat16, requires_grad=False), asm=True)
    (listing,) = found.forward.listings.values()
    assert max(listing.load_bytes) < 16


@pytest.mark.parametrize("target", TARGETS)
def test_plans_are_those_of_the_target(target: str) -> None:
    found = warpnorm.explain(block, *operands(4096, 4096, torch.bfloat16), target=target)
    units = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}[target]
    assert found.backward is not None
    assert found.backward.launches[0][1][0] % units == 0, "persistent programs on every unit"


@pytest.mark.parametrize("target", ["sm_70", "", "cpu"])
def test_unknown_target(target: str) -> None:
    with pytest.raises(InputError, match=f"target is '{target}', but must be one of sm_80, sm_90, sm_100, gfx942"):
        warpnorm.explain(block, *operands(4, 8), target=target)


def test_nothing_is_computed_and_nothing_drawn() -> None:
    """Results of four terabytes could not be, and a mask would move the generator."""
    huge = torch.zeros(1, 4096).expand(1 << 28, 4096)
    before = torch.get_rng_state()
    for function in (warpnorm.fuse(dropped), dropped):
        found = warpnorm.explain(function, huge)
        assert found.operands[0].startswith("x: 268435456x4096 float32")
        assert "0.25" in found.prologue
        assert found.forward.least_bytes > 1 << 42
    assert torch.equal(torch.get_rng_state(), before)
    x = random((4, 8))
    values, version = x.clone(), x._version
    warpnorm.explain(dropped, x)
    assert torch.equal(x, values)
    assert x._version == version
    assert torch.equal(torch.get_rng_state(), before)


def test_route_says_why() -> None:
    def route(*given: Any) -> str:
        return warpnorm.explain(block, *given).route

    assert route(*operands(4, 8)) == "as plain PyTorch, because its rows are so small that this is quicker"
    assert route(*operands(0, 8)) == "as plain PyTorch, because its tensors have no elements"
    with settings.override(route="reference"):
        assert route(*operands(4, 8)) == "as plain PyTorch, because the setting WARPNORM_ROUTE is reference"
    meta = [operand.to("meta") for operand in operands(4, 8)]
    assert route(*meta) == "as plain PyTorch, because its tensors are on meta"


@pytest.mark.parametrize("shape", [(0, 6, 5, 5), (8, 6, 0, 3), (8, 0, 3, 3), (0, 6)], ids=str)
def test_what_has_no_elements_launches_nothing(shape: tuple[int, ...]) -> None:
    """Batches of no images ended in a ZeroDivisionError of the plan."""
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    for function in (
        lambda x, weight: F.batch_norm(x, None, None, weight, training=True),
        lambda x, weight: F.group_norm(x, 2, weight),
        lambda x, weight: F.layer_norm(x, x.shape[1:]) * 2,
        lambda x, weight: F.layer_norm(x, x.shape[-1:]) * (1 + x[:, :1]),
    ):
        found = warpnorm.explain(function, x, weight)
        assert "no elements" in found.route
        assert found.forward.launches == found.backward.launches == ()  # type: ignore[union-attr]
        assert found.forward.bytes_moved == 0


def test_refuses_what_fuse_refuses() -> None:
    with pytest.raises(FusionError, match=r"aten\.cumsum"):
        warpnorm.explain(lambda x: F.layer_norm(x.cumsum(-1), (8,)), random((4, 8)))
    with pytest.raises(InputTypeError, match="takes a function, but got something of type int"):
        warpnorm.explain(3, random((4, 8)))


def test_explaining_a_function_captures_it_for_its_calls() -> None:
    fused = warpnorm.fuse(block)
    assert isinstance(warpnorm.explain(fused, *operands(4, 8)), Explanation)
    captured = dict(fused._captured)
    assert len(captured) == 1
    fused(*operands(5, 8))
    assert fused._captured == captured
