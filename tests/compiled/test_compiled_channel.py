"""What the compiler makes of the kernels by channel, for GPUs that are not here: everything that a call would launch, by
the plans that `choose.py` picks."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from compiled.test_compiled import NVIDIA, local_memory
from kernel_contracts.channel_fuse_contract import wide_results
from warpnorm import pipeline
from warpnorm.codegen import bind, cache
from warpnorm.codegen import kernel as of_kernels
from warpnorm.codegen.kernel import BoundKernel
from warpnorm.fuse import NOTHING, arrange
from warpnorm.launch.shared import MAILBOX
from warpnorm.norms import BATCH_NORM, FIXED_NORM, GROUP_NORM, Norm
from warpnorm.plan import choose, grid
from warpnorm.plan import device as devices
from warpnorm.plan.device import KNOWN
from warpnorm.plan.plan import COLUMN, HELD, ROW, Plan
from warpnorm.problem import FULL, Axes, Call, View
from warpnorm.reference import Affine, FixedAffine, Itself


@dataclass(frozen=True)
class Case:
    name: str
    norm: Norm
    shape: tuple[int, ...]
    is_last: bool
    groups: int = 0
    is_held: bool = False  # in registers, on NVIDIA's GPUs

    def call(self, dtype: torch.dtype, samples: int = 0) -> tuple[Call, tuple[View, ...]]:
        """With both parameters, which are float32 for batch norm, as in mixed precision."""
        shape = (samples or self.shape[0], *self.shape[1:])
        memory_format = torch.channels_last if self.is_last else torch.contiguous_format
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
        of_channel = dtype if self.norm is GROUP_NORM else torch.float32
        parameter = View((shape[1], 1, 1), (1, 1, 1), of_channel)
        epilogue: Any = FixedAffine(1e-5, True, True) if self.norm is FIXED_NORM else Affine(True, True)
        views = (View(shape, strides, dtype), *[parameter] * (4 if self.norm is FIXED_NORM else 2))
        mask: Axes = (False, True, False, False)
        axes = (FULL, *[mask] * (len(views) - 1))
        return Call(self.norm, 1, 1e-5, Itself(), epilogue, axes, (dtype,), groups=self.groups), views

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("batch_nchw", BATCH_NORM, (64, 256, 56, 56), False, is_held=True),
    Case("batch_many", BATCH_NORM, (1100, 256, 56, 56), False),
    Case("batch_last", BATCH_NORM, (64, 256, 56, 56), True),
    Case("evaluation_nchw", FIXED_NORM, (64, 256, 56, 56), False),
    Case("evaluation_last", FIXED_NORM, (64, 256, 56, 56), True),
    Case("group_nchw", GROUP_NORM, (32, 320, 64, 64), False, 32, is_held=True),
    Case("group_long", GROUP_NORM, (32, 64, 160, 160), False, 32),
    Case("group_last", GROUP_NORM, (32, 320, 64, 64), True, 32),
    Case("instance_last", GROUP_NORM, (32, 320, 64, 64), True, 320),
)
ARE_WHOLE = ("kernel", "first_kernel", "last_kernel")  # which read the input; the others read what is left of it


def compile_all(
    case: Case, dtype: torch.dtype, target: str, monkeypatch: pytest.MonkeyPatch, pattern: str | None = None
) -> list[tuple[str, str, Any]]:
    """(direction, name, compiled kernel) of everything that a call launches."""
    pattern = pattern or (HELD if case.is_held and target in NVIDIA else COLUMN)
    monkeypatch.setattr(devices, "of", lambda device: KNOWN[target])
    call, views = case.call(dtype)
    views = (*views, views[0])  # of the output, and of its gradient
    wanted = (0, len(views) - 3, len(views) - 2)
    gpu = torch.device("cuda", 0)
    launches = {
        "forward": pipeline.prepare_forward.__wrapped__(call, views, gpu, None),
        "backward": pipeline.prepare_backward.__wrapped__(call, views, gpu, (0,), wanted, None),
    }
    found = []
    for direction, launch in launches.items():
        assert launch.plan.pattern == pattern
        kernels = {name: value for name, value in vars(launch).items() if isinstance(value, BoundKernel)}
        if "last_kernel" in kernels:  # it alone writes results
            kernels["first_kernel"] = kernels.pop("kernel")
        kernels |= {f"sum {i}": kernel for i, (kernel, *_) in enumerate(getattr(launch, "column_sums", ()))}
        found += [(direction, name, kernel.compiled) for name, kernel in kernels.items()]
    return found


TARGETS = [(target, dtype) for target in NVIDIA for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("target", "dtype"), [t for t in TARGETS if t[0] == "sm_90" or t[1] == torch.bfloat16], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sixteen_byte_accesses_and_no_local_memory(
    case: Case, dtype: torch.dtype, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the lines or across them, as memory runs."""
    for direction, name, kernel in compile_all(case, dtype, target, monkeypatch):
        code = kernel.asm["ptx"]
        if name in ARE_WHOLE:
            loads = re.findall(r"ld\.global\S*\.v4\.b32", code) + re.findall(r"cp\.async\.cg\S* .*0x10", code)
            assert loads, f"{direction} {name}"
        if name in ("kernel", "last_kernel"):
            assert re.search(r"st\.global\S*\.v4\.b32", code), direction
        assert local_memory(kernel.asm["cubin"]) == 0, f"{direction} {name}"
        assert kernel.metadata.shared <= KNOWN[target].shared_bytes, f"{direction} {name}"


@pytest.mark.parametrize(
    ("shape", "target"),
    [((64, 256, 56, 56), "sm_80"), ((64, 256, 56, 56), "sm_90"), ((256, 64, 112, 112), "sm_90")],
    ids=str,
)
def test_programs_that_wait_for_each_other_fit(shape: tuple[int, ...], target: str) -> None:
    """So many as are told on a multiprocessor: they all run at the same time, or the launch fails."""
    device = KNOWN[target]
    call, views = Case("batch", BATCH_NORM, shape, False).call(torch.float16)
    forward, space = pipeline.forward_problem(call, (*views, views[0]))
    backward, lines = pipeline.backward_problem(call, (*views, views[0]), (0,), (0, 1, 2))
    of_forward, of_backward = choose.forward(forward, device, space), choose.backward(backward, device, lines)
    kernels = (
        (of_forward, bind.forward(forward, of_forward, device, 0)),
        (of_backward, bind.backward(backward, of_backward, device, 0)),
    )
    assert any(plan.pattern == HELD for plan, _ in kernels)
    for plan, kernel in ((plan, kernel.compiled) for plan, kernel in kernels if plan.pattern == HELD):
        assert plan.programs == plan.per_unit * device.units >= -(-space.pieces // plan.block_rows)
        assert plan.per_unit * (kernel.metadata.shared + 1024) <= device.shared_bytes
        limit = re.search(r"\.maxnreg (\d+)", kernel.asm["ptx"])
        assert limit
        assert int(limit[1]) * plan.warps * 32 * plan.per_unit <= device.registers_per_unit


LONG = (
    Case("few_images", BATCH_NORM, (8, 256, 56, 56), False, is_held=True),
    Case("long_lines", BATCH_NORM, (32, 64, 112, 112), False, is_held=True),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_halves_that_barely_fit(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes do not: of bfloat16, widened all at once, it was 656, and a third of the speed."""
    for direction, name, kernel in compile_all(case, dtype, "sm_90", monkeypatch):
        assert local_memory(kernel.asm["cubin"]) <= 64, f"{direction} {name}"


def test_a_row_begun_ahead_carries_what_was_loaded_alone() -> None:
    """Not what was computed of it too, for which a thread has no registers."""
    x = torch.empty(64, 256, 56, 56, device="meta")
    shifted = lambda x, b: F.batch_norm(x + b, None, None, training=True)  # noqa: E731
    found = warpnorm.explain(shifted, x, torch.empty(256, 1, 1, device="meta"), target="sm_90", asm=True).forward
    assert (found.plan.ahead, found.plan.recomputes) == (1, True)
    assert [listing.spilled_bytes for listing in found.listings.values()] == [0]


def masked_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(torch.where(mask, x, 0.0), x.shape[-1:])


def masked_images(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(torch.where(mask, x, 0.0), None, None, training=True)


@pytest.mark.parametrize(
    ("function", "shape"), [(masked_rows, (4096, 8192)), (masked_images, (64, 256, 56, 56))], ids=["row", "held"]
)
def test_truth_values_are_no_assemblers(function: Any, shape: tuple[int, ...]) -> None:
    """Where what was loaded is held, so that it is computed again: of truth values the compiler ended the process."""
    x = torch.empty(shape, dtype=torch.float16, device="meta", requires_grad=True)
    found = warpnorm.explain(function, x, torch.empty(shape, dtype=torch.bool, device="meta"), target="sm_90", asm=True)
    assert found.backward is not None
    assert (found.backward if function is masked_rows else found.forward).plan.recomputes
    for direction in (found.forward, found.backward):
        assert all(listing.spilled_bytes <= 16 for listing in direction.listings.values())


def test_few_small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two columns are tall. When their programs merged so many rows each, that took two minutes to compile."""
    case = Case("few_small_images", BATCH_NORM, (2, 12, 5, 6), False)
    for direction, name, kernel in compile_all(case, torch.float16, "sm_90", monkeypatch):
        assert local_memory(kernel.asm["cubin"]) == 0, f"{direction} {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 64, 16, 16), (64, 64, 8, 8), (32, 64, 16, 8)], ids=str)
@pytest.mark.parametrize("function", [F.relu, F.silu], ids=lambda f: f.__name__)
def test_rows_that_one_program_holds(function: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tiles were laid out as the sums of a row, each element computed by eight threads: up to 4,448 bytes of a thread lay in
    memory."""

    def normalized(x: torch.Tensor) -> torch.Tensor:
        return function(F.batch_norm(x, None, None, training=True))

    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    found = warpnorm.explain(normalized, x, target="sm_90", asm=True)
    assert found.backward is not None
    for direction in (found.forward, found.backward):
        assert [listing.spilled_bytes for listing in direction.listings.values()] == [0] * len(direction.listings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_amd_by_channel(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for direction, name, kernel in compile_all(case, dtype, "gfx942", monkeypatch):
        code = kernel.asm["amdgcn"]
        assert "global_load" in code or "buffer_load" in code, f"{direction} {name}"
        if name in ("kernel", "last_kernel"):
            assert re.search(r"(global|buffer)_store_dwordx4", code), direction
        assert kernel.metadata.shared <= KNOWN["gfx942"].shared_bytes, f"{direction} {name}"


def test_amd_refuses_plans_that_wait() -> None:
    call, views = CASES[0].call(torch.float32)
    problem, _ = pipeline.forward_problem(call, (*views, views[0]))
    with pytest.raises(ValueError, match="a launch of its own"):
        bind.forward(problem, Plan(COLUMN, 1, 64, 4), KNOWN["gfx942"], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_rows_side_by_side_are_read_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 8 vectors: whole rows in a tile, whose memory runs across them."""
    case = Case("batch_of_vectors", BATCH_NORM, (8, 65_536, 1, 1), True)
    for direction, name, kernel in compile_all(case, dtype, "sm_90", monkeypatch, ROW):
        code = kernel.asm["ptx"]
        if name == "kernel":
            assert re.search(r"ld\.global\S*\.v4\.b32", code) or re.search(r"cp\.async\.cg\S* .*0x10", code), direction
            assert re.search(r"st\.global\S*\.v4\.b32", code), direction
        assert local_memory(kernel.asm["cubin"]) == 0, f"{direction} {name}"


@pytest.mark.parametrize("target", NVIDIA)
def test_odd_images_are_read_by_whole_vectors(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32: none of 7 x 7 begins at one, but where memory runs across positions 64 of them fill 16."""
    case = Case("batch_odd", BATCH_NORM, (256, 2048, 7, 7), False)
    for direction, name, kernel in compile_all(case, torch.float32, target, monkeypatch):
        if name in ARE_WHOLE:
            code = kernel.asm["ptx"]
            assert re.search(r"ld\.global\S*\.v4\.b32", code) or re.search(r"cp\.async\.cg\S* .*0x10", code), direction
        assert local_memory(kernel.asm["cubin"]) == 0, f"{direction} {name}"


@pytest.mark.parametrize(
    "shape", [(256, 1024, 14, 14), (32, 1024, 14, 14), (64, 512, 22, 22), (16, 2048, 7, 7)], ids=str
)
@pytest.mark.parametrize("target", NVIDIA)
def test_odd_images_stay_in_registers(target: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of 14 x 14 are moved by half vectors, those of 7 x 7, in few images, alone."""
    case = Case("batch_odd", BATCH_NORM, shape, False, is_held=True)
    for direction, name, kernel in compile_all(case, torch.float16, target, monkeypatch):
        if name == "kernel":
            code = kernel.asm["ptx"]
            size = r"\.b16" if shape[-1] == 7 else r"\.v2\.b32"
            assert re.search(rf"ld\.global\S*{size}", code), direction
            assert re.search(rf"st\.global\S*{size}", code), direction
        assert local_memory(kernel.asm["cubin"]) == 0, f"{direction} {name}"


@pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "channels_last"])
def test_plans_do_not_depend_on_the_samples(is_last: bool) -> None:
    """A sample's groups have the same bits in every batch: so they have the same parts, in whose order sums are made."""
    for size in (2, 7, 56, 200):
        for groups in (1, 8, 64):
            case = Case("group", GROUP_NORM, (1, 64, size, size), is_last, groups)
            parts = set()
            for samples in (1, 2, 3, 64, 1000):
                call, views = case.call(torch.bfloat16, samples)
                problem, space = pipeline.forward_problem(call, (*views, views[0]))
                plan = choose.forward(problem, KNOWN["sm_90"])
                parts.add((problem, plan, grid.spans(plan, space) if plan.pattern == COLUMN else space.cols))
            assert len(parts) == 1, f"{groups} groups of {size} x {size}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_launcher_takes_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of a call that was seen before, forward and backward: tensors have numbers, each of them some place, and
    what is averaged by the momentum of the call is told so."""
    monkeypatch.setattr(devices, "of", lambda device: KNOWN["sm_90"])
    call, views = case.call(torch.float16)
    gpu, has_running = torch.device("cuda", 0), case.norm is BATCH_NORM
    running = (torch.float32, torch.float32) if has_running else ()
    forward: Any = pipeline.prepare_forward.__wrapped__(call, (*views, views[0]), gpu, None, running)
    wanted = (0, len(views) - 2, len(views) - 1)
    backward: Any = pipeline.prepare_backward.__wrapped__(call, (*views, views[0]), gpu, (0,), wanted, None)
    for kernel in kernels_of(forward) + kernels_of(backward):
        kernel.compiled.function = 1  # where it would lie on a GPU
    of_running = (1, 2) if has_running else ()
    operands = [i for i in range(len(views) + len(of_running)) if i not in of_running]
    launches, shared = forward.described(operands, 1, of_running)
    statistics = len(case.norm.statistics)
    expected = set(range(len(views) + len(of_running) + 1 + statistics + parts(shared)))
    assert {slot for launch in launches for slot, *_ in launch[-1] if slot >= 0} == expected
    factors = [param[2:] for launch in launches for param in launch[-1] if param[0] == -2]
    size = case.shape[0] * case.shape[2] * case.shape[3]
    assert factors == ([(1.0, -1.0), (0.0, 1.0), (0.0, size / (size - 1))] if has_running else []) * len(launches)
    partials, launches, shared = backward.described(len(views))
    expected = set(range(len(views) + statistics + 1 + len(wanted) + len(partials) + parts(shared)))
    found = {slot for launch in launches for slot, *_ in launch[-1] if slot >= 0}
    assert found <= expected
    assert found >= set(range(len(views) + statistics, len(views) + statistics + 1 + len(wanted)))


def kernels_of(launch: Any) -> list[BoundKernel]:
    found = [
        launch.kernel,
        getattr(launch, "last_kernel", None),
        *(sums[0] for sums in getattr(launch, "column_sums", ())),
    ]
    return [kernel for kernel in found if kernel is not None]


def parts(shared: Any) -> int:
    sizes, _, kind = shared
    return 1 if kind == MAILBOX else len(sizes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", NVIDIA)
def test_what_triton_refuses_is_written_in_another_way(
    target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves that are widened, and stored as float32: it gets its own code out of order. Other failures are told."""
    monkeypatch.setattr(devices, "of", lambda device: KNOWN[target])
    x, gain = torch.empty(2, 128, 16, dtype=dtype).mT, torch.empty(1, 1, 1)
    fused = warpnorm.fuse(wide_results)
    request = fused.request(NOTHING, (x, gain), {})
    call, operands = arrange(fused.prepare(request), request.tensors)
    views = (*map(View.of, operands), *[View.of(torch.empty_like(x, dtype=torch.float32))] * 3)
    sources: list[str] = []

    def load(source: str, original: Any = cache.load) -> Any:
        sources.append(source)
        return original(source)

    monkeypatch.setattr(cache, "load", load)
    launch = pipeline.prepare_forward.__wrapped__(call, views, torch.device("cuda", 0), None)
    assert "ours.widened(values[0])" in sources[-1]
    assert launch.last_kernel.compiled.asm["cubin"]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    bind.forward.built.clear()
    monkeypatch.setattr(of_kernels, "_compile", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.prepare_forward.__wrapped__(call, views, torch.device("cuda", 0), None)


def squared_sines(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x + torch.sin(x) * torch.sin(x)
    y = F.rms_norm(h, h.shape[-1:])
    return y * torch.sin(y), y, h * y


@pytest.mark.parametrize("target", NVIDIA)
def test_what_triton_refuses_twice_is_written_in_a_third_way(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided rows with results that are not: what is loaded and what is stored lie in different registers, and it gets its
    own code out of order where nothing is widened. Found by `warpnorm fuzz --device cuda --seed 240021`."""
    sources: list[str] = []

    def load(source: str, original: Any = cache.load) -> Any:
        sources.append(source)
        return original(source)

    monkeypatch.setattr(cache, "load", load)
    x = torch.empty(24576, device="meta")[::2]
    (listing,) = warpnorm.explain(squared_sines, x, target=target, asm=True).forward.listings.values()
    assert listing.store_bytes == (4,)
    assert [line.count("ours.unordered(") for line in sources[-1].splitlines() if "tl.load(" in line] == [2]
    assert [line.count("ours.unordered(") for line in sources[-1].splitlines() if "tl.store(" in line] == [2] * 3
