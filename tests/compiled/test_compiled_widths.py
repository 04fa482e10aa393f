"""How rows of any width are moved and shared, read from code compiled for GPUs that are not here: by vectors, by few
elements or one by one, in blocks, by as many programs as fit."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from compiled.test_compiled import (
    NORMS,
    NVIDIA,
    backward_problem,
    compile_both,
    forward_problem,
)
from warpnorm.codegen import bind, listing
from warpnorm.norms import LAYER_NORM, Norm
from warpnorm.plan import choose, grid
from warpnorm.plan.device import KNOWN
from warpnorm.plan.plan import ROW, TEAM


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("cols", [50, 100, 300, 1002, 1004, 4094, 4092, 12_298, 12_300, 50_258, 50_260])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_rows_that_begin_at_few_bytes(norm: Norm, cols: int, target: str) -> None:
    """Multiples of 4 or 8: no element of such a row is loaded alone."""
    for _, _, kernel in compile_both(norm, cols, torch.bfloat16, KNOWN[target]):
        words = 1 if cols % 4 else 2
        code = kernel.asm["ptx"]
        several = rf"ld\.global\S*\.(?:v{words}\.)?b32" if words > 1 else r"ld\.global\S*\.b32"
        assert re.search(several, code) or re.search(rf"cp\.async\.ca\S* .*0x{4 * words:x}", code)
        alone = re.findall(r"ld\.global\S*\.[bu]16", code)
        assert len(alone) <= (8 if cols <= 512 else 0), "parameters of narrow rows may be"


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize(
    "cols",
    [33, 50, 100, 127, 255, 300, 511, 1002, 1023, 2047, 4095, 8191, 64, 128, 320, 768, 1024, 2048, 4096, 5120, 8192],
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_programs_that_walk_rows_fit(norm: Norm, cols: int, target: str) -> None:
    """As many as are launched for a multiprocessor run on it. The compiler takes what registers it likes if it is not told:
    of 4095 columns half of the programs would wait for the others, and LayerNorm backward takes 1.6 times as long."""
    device = KNOWN[target]
    problem = backward_problem(norm, cols, torch.bfloat16)
    plan = choose.backward(problem, device)
    registers = listing.read(bind.backward(problem, plan, device, 0)).registers
    assert registers
    granted = -(-registers // 8) * 8 * plan.warps * 32
    assert plan.programs // device.units * granted <= device.registers_per_unit


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_rows_moved_alone_are_loaded_once(norm: Norm, target: str) -> None:
    """There is no pipeline for them: memory brings the next row to L2 meanwhile, and the one before stays in registers, two
    halves to each. Of a thread 32 columns, of both copies of the kernel: parameters, the first row, the next."""
    problem = forward_problem(norm, 50_257, torch.bfloat16)
    plan = choose.forward(problem, KNOWN[target])
    assert (plan.pattern, plan.block_cols, plan.warps) == (TEAM, 1024, 1)
    code = bind.forward(problem, plan, KNOWN[target], 0).compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.[bu]16", code)) == 2 * 32 * (4 if norm.is_centered else 3)
    assert code.count("prefetch.global.L2") == 2
    pipelined = forward_problem(norm, 131_072, torch.bfloat16)
    plan = choose.forward(pipelined, KNOWN[target])
    assert "prefetch" not in bind.forward(pipelined, plan, KNOWN[target], 0).compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("cols", "dtype", "block"),
    [
        (72, torch.bfloat16, (16, 5)),  # five eighths
        (96, torch.bfloat16, (32, 3)),  # three quarters
        (200, torch.bfloat16, (64, 4)),  # seven eighths, of which the last is not full: four quarters
        (224, torch.bfloat16, (32, 7)),
        (320, torch.float32, (128, 3)),
        (640, torch.float16, (128, 5)),
        (768, torch.float16, (256, 3)),
        (1000, torch.bfloat16, (256, 4)),
        (4000, torch.bfloat16, (512, 8)),
        (256, torch.bfloat16, (256, 1)),
        (77, torch.bfloat16, (16, 5)),  # elements are moved alone
        (101, torch.bfloat16, (128, 1)),
        (100, torch.bfloat16, (32, 4)),  # four at a time
        (80, torch.float64, (128, 1)),
    ],
)
def test_rows_that_fill_no_power_of_two_come_in_blocks(cols: int, dtype: torch.dtype, block: tuple[int, int]) -> None:
    """So that few threads have nothing to load, and only the last block is masked."""
    for rows in (1, 4096):
        plan = choose.forward(forward_problem(LAYER_NORM, cols, dtype, rows), KNOWN["sm_90"])
        assert (plan.block_cols, plan.chunks) == block
        assert plan.block_rows == grid.few_rows(plan) or plan.chunks == 1  # a row's bits are those of one among many


def normalized(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def normalized_float8(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:]).to(torch.float8_e4m3fn)


def normalized_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(torch.where(mask, x, 0.0), x.shape[-1:])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [64, 96, 128, 256, 320, 33, 50, 100, 127, 300])
@pytest.mark.parametrize("function", [normalized, normalized_float8, normalized_masked], ids=lambda f: f.__name__)
def test_a_thread_has_the_same_part_of_a_row_among_few_and_many(
    function: Callable[..., torch.Tensor], cols: int, dtype: torch.dtype, target: str
) -> None:
    """Or its sum would round in another way: tiles of both sizes that are reduced have as many columns to a thread."""
    x, mask = (torch.empty(64, cols, dtype=kind, device="meta") for kind in (dtype, torch.bool))
    found = warpnorm.explain(function, x, mask, target=target).forward
    code = bind.forward(found.problem, found.plan, KNOWN[target], 0).compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<{(sizePerThread = \[1, \d+\])", code))
    reduced = re.findall(r'"tt.reduce"(?:.*\n)+?.*}\) : \(tensor<(\d+)x\d+xf32, (#\w+)>', code)
    assert {found.plan.block_rows, grid.few_rows(found.plan)} == {int(rows) for rows, _ in reduced}
    assert len({layouts[layout] for _, layout in reduced}) == 1


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [64, 72, 96, 160, 200, 256, 320, 512, 33, 42, 44, 48, 50, 100, 127, 255, 300, 511])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_a_thread_has_the_same_part_of_a_row_among_few_and_many_backward(
    norm: Norm, cols: int, dtype: torch.dtype, target: str
) -> None:
    """The same rows give the same gradients, also where nobody asks for those that are summed."""
    problem = backward_problem(norm, cols, dtype)
    plan = choose.backward(problem, KNOWN[target])
    code = bind.backward(problem, plan, KNOWN[target], 0).compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<{(sizePerThread = \[1, \d+\])", code))
    reduced = re.findall(r'"tt.reduce"(?:.*axis = 1.*\n)(?:.*\n)+?.*}\) : \(tensor<(\d+)x(\d+)xf32, (#\w+)>', code)
    rows = {plan.block_rows, grid.lone_rows(plan)}
    ours = [(int(height), layout) for height, width, layout in reduced if int(width) == plan.block_cols]
    assert rows == {height for height, _ in ours}
    assert len({layouts[layout] for _, layout in ours}) == 1


@pytest.mark.parametrize("cols", [12_296, 50_256, 50_257, 65_536, 151_936])
def test_a_team_has_no_program_too_many(cols: int) -> None:
    """Or one, as widths that differ by a thirty-second of a power of two at the most share their kernels."""
    for norm in NORMS:
        plan = choose.backward(backward_problem(norm, cols, torch.bfloat16), KNOWN["sm_90"])
        least = -(-cols // (plan.block_cols * plan.chunks))
        assert plan.pattern == ROW or least <= plan.splits <= least + 1


def test_masked_rows_that_no_team_takes_stay_in_registers() -> None:
    """Of 15000 columns: where programs cannot wait for each other, and where the gradient of x is not asked for."""
    x = torch.empty(64, 15000, device="meta", dtype=torch.bfloat16)
    w = torch.empty(15000, device="meta", dtype=torch.bfloat16).requires_grad_()

    def pattern(target: str, needs_grad: bool) -> str:
        found = warpnorm.explain(
            lambda x, w: F.rms_norm(x, x.shape[-1:], w), x.requires_grad_(needs_grad), w, target=target
        ).backward
        assert found is not None
        return found.plan.pattern

    assert [pattern("sm_90", True), pattern("sm_90", False), pattern("gfx942", True)] == [TEAM, ROW, ROW]
