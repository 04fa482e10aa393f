"""What the compiler makes of the kernels, for GPUs that are not here: the plans that `choose.py` picks, compiled for
NVIDIA's and AMD's targets, and the machine code read."""

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton

import warpnorm
from warpnorm import pipeline
from warpnorm.codegen import bind
from warpnorm.fuse import NOTHING, arrange
from warpnorm.launch.backward import BackwardLaunch
from warpnorm.launch.forward import ForwardLaunch
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.plan import choose
from warpnorm.plan.device import KNOWN, Device
from warpnorm.plan.plan import ROW, TEAM, Plan
from warpnorm.problem import COLUMN, FULL, BackwardProblem, Call, ForwardProblem, View
from warpnorm.reference import Affine, Itself

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NVIDIA = ("sm_80", "sm_90", "sm_100")
NORMS = (LAYER_NORM, RMS_NORM)


def call_and_views(norm: Norm, cols: int, dtype: torch.dtype, rows: int = 64) -> tuple[Call, tuple[View, ...]]:
    """A norm with all its parameters on contiguous operands."""
    count = 3 if norm.is_centered else 2
    call = Call(norm, 1, 1e-5, Itself(), Affine(True, count == 3), (FULL, COLUMN, COLUMN)[:count], (dtype,))
    return call, (View((rows, cols), (cols, 1), dtype), *[View((cols,), (1,), dtype)] * (count - 1))


def forward_problem(norm: Norm, cols: int, dtype: torch.dtype, rows: int = 64) -> ForwardProblem:
    call, views = call_and_views(norm, cols, dtype, rows)
    return pipeline.forward_problem(call, (*views, views[0]))[0]


def backward_problem(norm: Norm, cols: int, dtype: torch.dtype) -> BackwardProblem:
    call, views = call_and_views(norm, cols, dtype)
    return pipeline.backward_problem(call, (*views, views[0]), (0,), tuple(range(len(views))))[0]


def compile_both(norm: Norm, cols: int, dtype: torch.dtype, device: Device) -> list[tuple[str, Plan, object]]:
    forward, backward = forward_problem(norm, cols, dtype), backward_problem(norm, cols, dtype)
    plans = choose.forward(forward, device), choose.backward(backward, device)
    return [
        ("forward", plans[0], bind.forward(forward, plans[0], device, 0).compiled),
        ("backward", plans[1], bind.backward(backward, plans[1], device, 0).compiled),
    ]


def local_memory(cubin: bytes) -> int:
    """Bytes of stack and local memory that a thread uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found, report
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("target", NVIDIA)
def test_bfloat16_is_widened_by_pairs(target: str) -> None:
    """Where that is quicker: the upper of two takes an instruction less. A row that lies in registers as it does in memory,
    or is carried along, leaves it to the compiler."""
    problem, device = forward_problem(LAYER_NORM, 131072, torch.bfloat16), KNOWN[target]
    plan = choose.forward(problem, device)
    assert plan.pattern == TEAM
    assert "cvt.f32.bf16" not in bind.forward(problem, plan, device, 0).compiled.asm["ptx"]
    backward = backward_problem(LAYER_NORM, 131072, torch.bfloat16)
    plan = choose.backward(backward, device)
    code = bind.backward(backward, plan, device, 0).compiled.asm["ptx"]
    assert ("and.b32" in code and "0xffff0000" in code) == (not plan.keeps)


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_two_level_reduction(norm: Norm, target: str) -> None:
    """Butterfly shuffles inside a warp; between warps, shared memory and a barrier, which one warp does not need."""
    several_warps = compile_both(norm, 4096, torch.bfloat16, KNOWN[target])
    for direction, plan, kernel in several_warps:
        assert plan.warps > 1
        code = kernel.asm["ptx"]
        assert code.count("shfl.sync.bfly") >= 5, direction
        assert "st.shared" in code, direction
        assert "bar.sync" in code, direction
    _, plan, kernel = compile_both(norm, 512, torch.bfloat16, KNOWN[target])[0]
    assert plan.warps == 1
    assert kernel.asm["ptx"].count("shfl.sync.bfly") >= 5
    assert "st.shared" not in kernel.asm["ptx"]


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [128, 760, 4096, 16384])  # 760: aligned rows, not a power of two
def test_sixteen_byte_accesses(cols: int, dtype: torch.dtype, target: str) -> None:
    """Every load and store of an aligned half-precision row moves 16 bytes: through registers or straight to shared
    memory. 8 in the backward of rows in blocks, where more warps gain more."""
    for norm in NORMS:
        for direction, plan, kernel in compile_both(norm, cols, dtype, KNOWN[target]):
            assert plan.pattern == ROW or cols > 8192
            code = kernel.asm["ptx"]
            words = 4 if direction == "forward" or plan.chunks == 1 else min(plan.block_cols // (plan.warps * 64), 4)
            wide_loads = len(re.findall(rf"ld\.global\S*\.v{words}\.b32", code)) + len(
                re.findall(rf"cp\.async\.c[ag]\S* .*0x{4 * words:x}", code)
            )
            assert wide_loads > 0, direction
            assert re.search(rf"st\.global\S*\.v{words}\.b32", code), direction
            singles = re.findall(r"(?:ld|st)\.global\S*\.[bu]16", code)
            # but for sums over few rows, one for each column, by programs of their own or a lone one
            allowed = (4 if norm.is_centered else 2) if direction == "backward" and plan.pattern == ROW else 0
            assert len([s for s in singles if s.startswith("ld")]) == 0, f"{direction}: single elements are loaded"
            assert len(singles) <= allowed, f"{direction}: single elements are stored"


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize(("cols", "dtype"), [(57344, torch.bfloat16), (40960, torch.float16), (32768, torch.float32)])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_wide_rows_lie_in_registers(norm: Norm, cols: int, dtype: torch.dtype, target: str) -> None:
    problem = forward_problem(norm, cols, dtype)
    plan = choose.forward(problem, KNOWN[target])
    assert (plan.pattern, plan.recomputes) == (ROW, True)
    assert local_memory(bind.forward(problem, plan, KNOWN[target], 0).compiled.asm["cubin"]) == 0


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize(
    ("cols", "dtype"), [(131_072, torch.bfloat16), (300_008, torch.float16), (65_536, torch.float32)]
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_teams_share_long_rows(norm: Norm, cols: int, dtype: torch.dtype, target: str) -> None:
    """So many programs as are told fit on a multiprocessor: they all run at the same time, or the launch fails."""
    problem, device = forward_problem(norm, cols, dtype), KNOWN[target]
    plan = choose.forward(problem, device)
    assert plan.pattern == TEAM
    assert plan.programs * plan.splits <= plan.per_unit * device.units
    kernel = bind.forward(problem, plan, device, 0).compiled
    assert local_memory(kernel.asm["cubin"]) == 0
    assert plan.per_unit * (kernel.metadata.shared + 1024) <= device.shared_bytes
    limit = re.search(r"\.maxnreg (\d+)", kernel.asm["ptx"])
    assert limit
    assert int(limit[1]) * plan.warps * 32 * plan.per_unit <= device.registers_per_unit


@pytest.mark.parametrize("target", NVIDIA)
def test_threads_of_a_team_find_one_mean(target: str) -> None:
    """Each has the mean of one part, times its columns: rounded before it is added to another's, in both threads. So is
    their mean before a part's is held against it: a division that may be off by two units is fused with that, and then
    nobody learns what the mean is rounded off by."""
    problem = forward_problem(LAYER_NORM, 10_007, torch.float32)
    plan = choose.forward(problem, KNOWN[target])
    assert plan.pattern == TEAM
    code = bind.forward(problem, plan, KNOWN[target], 0).compiled.asm["ptx"]
    merged = re.findall(r"vote\.sync\.any.*?div\.rn\.f32", code, re.DOTALL)  # as soon as all messages are there
    assert merged
    assert all("mul.rn.f32" in part and "shfl" in part and "fma" not in part for part in merged)
    assert "div.full" not in code


WIDTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 100, 1023, 4095, 8191, 16383, 1536, 5120, 12288]
WIDTHS += [80, 192, 320, 448, 896, 4000, 48, 112, 640, 1000, 2000, 7680]  # in blocks, of which the last may be masked
WIDTHS += [50, 255, 300, 1002, 4094, 8188]  # alone, or few at a time


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(cols, torch.float64) for cols in (2047, 4096, 8192, 16384)]
    + [(cols, dtype) for cols in WIDTHS for dtype in (torch.float32, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_no_local_memory(norm: Norm, cols: int, dtype: torch.dtype, target: str) -> None:
    """For every class of widths up to 16,384, aligned and odd, with all parameters and their gradients."""
    for direction, plan, kernel in compile_both(norm, cols, dtype, KNOWN[target]):
        # RMSNorm backward keeps 16384 sums in registers: some bytes do not fit, and yet it is faster than a team. So does
        # LayerNorm's twice 12288 of float32, at 93 % of copy speed; and of 1023 eight programs fit on a B200, which lack two
        case = (norm, cols, direction, plan.pattern)
        allowed = {(RMS_NORM, 16384, "backward", ROW): 32, (LAYER_NORM, 12288, "backward", ROW): 8}.get(case, 0)
        if (*case[:3], target) == (LAYER_NORM, 1023, "backward", "sm_100"):
            allowed = 8
        # Of a team whose elements are moved alone, the one program that needs masks lacks some registers; with as many as
        # it needs for all, LayerNorm backward of 50257 columns reaches 43 % of copy speed, and 48 so
        if plan.pattern == TEAM and cols % 8:
            allowed = 80 if dtype == torch.bfloat16 else 16
        assert local_memory(kernel.asm["cubin"]) <= allowed, f"{direction} with {plan}"


@pytest.mark.parametrize("cols", [100, 1024, 8192, 16384, 40000])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_amd(norm: Norm, cols: int) -> None:
    device = KNOWN["gfx942"]
    for direction, plan, kernel in compile_both(norm, cols, torch.bfloat16, device):
        assert "global_load" in kernel.asm["amdgcn"] or "buffer_load" in kernel.asm["amdgcn"], direction
        assert kernel.metadata.shared <= device.shared_bytes, f"{direction} with {plan}"


@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_plans_fit_the_shared_memory(target: str) -> None:
    device = KNOWN[target]
    for norm in NORMS:
        for dtype in (torch.float64, torch.bfloat16):
            for cols in (4096, 16384, 65536):
                for direction, plan, kernel in compile_both(norm, cols, dtype, device):
                    assert kernel.metadata.shared <= device.shared_bytes, f"{direction} of {cols} {dtype} with {plan}"


def test_plans_do_not_depend_on_the_rows() -> None:
    device = KNOWN["sm_90"]
    for cols in (1, 100, 4096, 16384, 100_000):
        problems = {forward_problem(LAYER_NORM, cols, torch.bfloat16, rows) for rows in (1, 2, 3, 1000, 1 << 20)}
        assert len({choose.forward(problem, device) for problem in problems}) == 1
        assert len(problems) == 1


SHARED = [64, 96, 320, 1000, 1024, 4000, 4096, 5120, 8192, 12_288, 24_576, 65_536, 131_072]
SHARED += [33, 66, 100, 127, 130, 260, 300, 511, 1002, 4095, 12_300, 50_258]  # not whole vectors


def adaptive(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", SHARED)
def test_plans_do_not_depend_on_the_samples(cols: int, dtype: torch.dtype) -> None:
    """Scale and shift of each sample are loaded once where there is one, and for each row where each has one."""
    fused = warpnorm.fuse(adaptive)
    for target in (*NVIDIA, "gfx942"):
        found, gradients = set(), set()
        for samples, positions in ((1, 1), (1, 5), (3, 1), (3, 5)):
            x = torch.empty(samples, positions, cols, dtype=torch.bfloat16)
            scale, shift = (torch.empty(samples, 1, cols, dtype=dtype) for _ in range(2))
            request = fused.request(NOTHING, (x, scale, shift), {})
            call, operands = arrange(fused.prepare(request), request.tensors)
            problem, _ = pipeline.forward_problem(call, (*map(View.of, operands), View.of(x)))
            found.add((choose.forward(problem, KNOWN[target]), problem.has_long_mantissas, problem.has_vectors))
            problem, _ = pipeline.backward_problem(call, (*map(View.of, operands), View.of(x)), (0,), (0,))
            gradients.add(choose.backward(problem, KNOWN[target]))
        assert len(found) == len(gradients) == 1


@pytest.mark.parametrize("units", [1, 8, 14, 40])
def test_small_gpus_have_programs(units: int) -> None:
    """Fewer than a team takes: another pattern runs."""
    device = replace(KNOWN["sm_90"], units=units)
    for norm in NORMS:
        for cols in (16_384, 131_072, 262_144):
            plans = (
                choose.forward(forward_problem(norm, cols, torch.bfloat16), device),
                choose.backward(backward_problem(norm, cols, torch.bfloat16), device),
            )
            assert all(plan.programs > 0 for plan in plans if plan.pattern == TEAM)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_launches_are_described_as_they_were_compiled(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter of the machine code has a slot or a value; what is not loaded on a GPU is not described."""
    device = KNOWN["sm_90"]
    call, views = call_and_views(norm, 4096, torch.bfloat16, rows=256)
    wanted = tuple(range(len(views)))
    forward, forward_space = pipeline.forward_problem(call, (*views, views[0]))
    backward, backward_space = pipeline.backward_problem(call, (*views, views[0]), (0,), wanted)
    plan, back_plan, sum_plan = (
        choose.forward(forward, device),
        choose.backward(backward, device),
        Plan(ROW, 128, 32, 8),
    )
    kernels = [
        bind.forward(forward, plan, device, 0), bind.backward(backward, back_plan, device, 0),
        bind.column_sum(backward, sum_plan, device, 0),
    ]  # fmt: skip
    forth = ForwardLaunch(forward, plan, forward_space, kernels[0], 1e-5)
    back = BackwardLaunch(backward, back_plan, backward_space, kernels[1], None, kernels[2], sum_plan)
    assert forth.described(range(len(views)), 1) is None
    for kernel in kernels:
        monkeypatch.setattr(kernel.compiled, "function", 1)
    (launch,), _ = forth.described(range(len(views)), 1)
    partials, launches, _ = back.described(len(views))
    assert len(partials) == len(views) - 1
    few = BackwardLaunch(backward, back_plan, backward_space._replace(rows=64), kernels[1], None, kernels[2], sum_plan)
    partials, (alone,), _ = few.described(len(views))
    assert partials == ()
    assert len(alone[-1]) == len(launches[0][-1])
    for kernel, described in zip(kernels, (launch, *launches), strict=True):
        function, *grid, threads, shared, is_chained, is_cooperative, params = described
        assert (function, threads) == (1, 32 * kernel.compiled.metadata.num_warps)
        assert (is_chained, is_cooperative) == (True, False)
        assert min(grid) > 0
        assert shared == kernel.compiled.metadata.shared
        assert len(params) == len(re.findall(r"_param_\d+,?\n", kernel.compiled.asm["ptx"].split("{")[0]))
    count = len(views) + 1 + len(norm.statistics)  # in order: operands, the output, statistics
    assert [slot for slot, _ in launch[-1] if slot >= 0] == list(range(count))


def test_a_lone_column_is_rounded_alike_both_ways() -> None:
    """Backward computes c anew: were only forward to fuse products with sums, c would not be its own mean."""
    for _, _, kernel in compile_both(LAYER_NORM, 1, torch.float32, KNOWN["sm_90"]):
        assert kernel.metadata.enable_fp_fusion is False  # type: ignore[attr-defined]


def test_rows_of_512_columns_behind_a_prologue() -> None:
    """Two of them at a time would spill, as would two rows of float64."""

    def gated(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.silu(x) * r, x.shape[-1:], w)

    for dtype in (torch.float32, torch.float64):
        x, r = (torch.empty(64, 512, dtype=dtype, device="meta").requires_grad_() for _ in range(2))
        w = torch.empty(512, dtype=dtype, device="meta").requires_grad_()
        found = warpnorm.explain(gated, x, r, w, target="sm_90").backward
        assert found is not None
        kernel = bind.backward(found.problem, found.plan, KNOWN["sm_90"], 0).compiled
        assert local_memory(kernel.asm["cubin"]) == 0, dtype


def test_a_long_walk_is_written_once() -> None:
    """Not with masks and without, where much is computed: backward of a gate took 8 seconds to compile then."""

    def gated(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.silu(x) * r, x.shape[-1:])

    def length(cols: int) -> int:
        x, r = (torch.empty(64, cols, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in range(2))
        found = warpnorm.explain(gated, x, r, target="sm_90").backward
        assert found is not None
        assert found.plan.pattern == TEAM
        return len(bind.backward(found.problem, found.plan, KNOWN["sm_90"], 0).compiled.asm["ptx"])

    assert length(20_000) <= 1.25 * length(20_480)


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("cols", [72, 96, 192, 512, 1024, 2048])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_no_product_is_rounded_here_and_fused_there(norm: Norm, cols: int, target: str) -> None:
    """Which of the two it is where it is added up the compiler decides by what stands around it: tiles of few rows and of
    many would have other bits, and so would those for which nobody asks for the gradients that are sums over rows."""
    call, views = call_and_views(norm, cols, torch.float32)
    for wanted in (tuple(range(len(views))), (0,)):
        problem = pipeline.backward_problem(call, (*views, views[0]), (0,), wanted)[0]
        plan = choose.backward(problem, KNOWN[target])
        ptx = bind.backward(problem, plan, KNOWN[target], 0).compiled.asm["ptx"]
        rounded, fused = (
            {frozenset(pair) for pair in re.findall(rf"\b{operator}\.f32\s+%r\d+, (%r\d+), (%r\d+)", ptx)}
            for operator in ("mul", r"fma\.rn")
        )
        assert rounded
        assert not rounded & fused


@pytest.mark.parametrize("cols", [2048, 4096, 5120, 8192, 12_288, 16_384])
def test_nor_do_plans_behind_a_prologue(cols: int) -> None:
    """An operand with a value for each sample lies full in memory where a sample is a row, and along a column of one."""

    def activated(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.gelu(x + r), x.shape[-1:])

    def plan(samples: int, rows: int) -> Plan:
        x, r = (torch.empty(samples, n, cols, dtype=torch.bfloat16, device="meta") for n in (rows, 1))
        return warpnorm.explain(activated, x, r, target="sm_90").forward.plan

    assert len({plan(4, 1), plan(4, 16), plan(1, 16)}) == 1
