"""What norms by channel would reach, channels last, if all programs were resident and kept blocks of their input in shared
memory until the statistics are there: forward and backward of BatchNorm, which keeps as many of the first blocks as there is
room for and reads the others again, and GroupNorm, which keeps a sample in the memory of a team. The package has no such
pattern; `python benchmarks/experiments/kept_in_shared_memory.py` says whether one would pay, beside what the package reaches
today. Needs a GPU with 228 KB of shared memory on a multiprocessor.

On an H200, BatchNorm of 64 x 256 x 56 x 56 fp16, in microseconds: with the first quarter kept the second visit takes 34.5,
without 42; kept were the last blocks, which L2 has, 41. But the first visit takes 37 to 41 here, and the launch of its own
that the package has 32; the exchange takes 5. So this reaches 55 % of copy speed at the most, the package 60, and a first
visit as good as its own would make it 70. GroupNorm, kept whole, reaches 35: a sample is loaded, reduced, exchanged and
stored in turn, 28 for each round of 8 samples where the memory needs 10."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from kept_kernels import backward, forward, group_forward, group_forward_by_copies

import warpnorm
from warpnorm.bench import timing

SHARED = 233472  # bytes of a multiprocessor, of which every program has 1,024 that are not its own
Tensors = tuple[torch.Tensor, ...]
Way = tuple[int, int, int, int]  # programs of a multiprocessor, warps of each, blocks that it loads at once, and stages


class Kernel:
    """All its programs run at the same time and have so many slots each; `counters` are zero before it begins."""

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], constants: dict[str, int], grid: tuple[int, int], slots: int,
        way: Way, counters: torch.Tensor,
    ) -> None:  # fmt: skip
        per_unit, warps = way[:2]
        registers = min(65536 // (32 * warps * per_unit) // 8 * 8, 255)
        compiled = function.warmup(
            *arguments, **constants, grid=grid, num_warps=warps, num_stages=1, maxnreg=registers,
            launch_cooperative_grid=True,
        )  # fmt: skip
        own, shared = compiled.metadata.shared, constants["OWN"] + slots * constants["THREADS"] * 16
        if own > constants["OWN"] or (shared + 1024) * per_unit > SHARED:
            raise ValueError(f"{own} bytes are Triton's own, and {shared} all together")
        compiled.metadata = compiled.metadata._replace(shared=shared)
        compiled.packed_metadata = tuple(shared if number == own else number for number in compiled.packed_metadata)
        launch = compiled[(*grid, 1)]
        self.used = f"{compiled.n_regs} registers, {compiled.n_spills} bytes spilled"
        self.launch, self.counters, self.arguments = launch, counters, (*arguments, *constants.values())

    def __call__(self) -> None:
        self.counters.zero_()
        self.launch(*self.arguments)


def batch_norm(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, b: torch.Tensor, way: Way, units: int, is_kept: bool
) -> tuple[tuple[Kernel, Kernel], tuple[torch.Tensor, ...], str]:
    """Forward and backward of x in (rows, C), their results, and which part of the input is kept."""
    per_unit, warps, unroll, stages = way
    rows, C = x.shape
    BC = min(C, 256)
    BP = warps * 32 * (16 // x.element_size()) // BC
    by_cols = C // BC
    P = units * per_unit // by_cols
    steps = -(-rows // (P * BP * unroll))
    counters = torch.zeros(2, dtype=torch.int32, device=x.device)
    partial = torch.empty(2 * C * P, device=x.device)
    mean, rstd, dw, db = (torch.empty(C, device=x.device) for _ in range(4))
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    threads = warps * 32
    step_bytes = threads * 16 * unroll
    own = [max(1024 * warps, (stages - 1) * step_bytes * tensors) for tensors in (1, 2)]
    constants = {"C": C, "BP": BP, "BC": BC, "U": unroll, "OWN": 0, "THREADS": threads}
    constants |= {"P2": triton.next_power_of_2(max(P, 32)), "STAGES": stages}
    kept = [
        min(steps, (SHARED // per_unit - 1024 - bytes_of) // (step_bytes * tensors)) if is_kept else 0
        for bytes_of, tensors in zip(own, (1, 2), strict=True)
    ]
    of_forward = (x, y, w, b, counters, partial, mean, rstd, rows, steps, kept[0], 1e-5)
    of_backward = (x, dy, dx, w, counters, partial, mean, rstd, dw, db, rows, steps, kept[1])
    kernels = (
        Kernel(forward, of_forward, constants | {"OWN": own[0]}, (P, by_cols), kept[0] * unroll, way, counters),
        Kernel(backward, of_backward, constants | {"OWN": own[1]}, (P, by_cols), 2 * kept[1] * unroll, way, counters),
    )
    return kernels, (y, dx, dw, db), f"{kept[0] / steps:.2f} and {kept[1] / steps:.2f} kept"


def group_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int, way: Way, team: int, units: int, function: Any
) -> tuple[Kernel, torch.Tensor]:
    """Forward of x in (samples, pixels, C), and its result."""
    per_unit, warps, unroll, _ = way
    samples, pixels, C = x.shape
    BC = 64
    BP = warps * 32 * 8 // BC
    blocks = pixels // (team * BP * unroll)
    if blocks * team * BP * unroll != pixels:
        raise ValueError(f"{pixels} pixels are no whole blocks")
    teams = min(units * per_unit // team, samples)
    counters = torch.zeros(samples, dtype=torch.int32, device=x.device)
    told = torch.empty(samples * 2 * team * groups, device=x.device)
    scratch = torch.empty(teams * team * (2 * C + 2 * groups), device=x.device)
    y = torch.full_like(x, float("nan"))
    CG = C // groups
    constants = {
        "C": C, "G": groups, "CG": CG, "CG2": triton.next_power_of_2(CG), "BLOCKS": blocks, "BP": BP, "BC": BC,
        "U": unroll, "OWN": 4096, "THREADS": warps * 32, "T": team, "T2": triton.next_power_of_2(team),
    }  # fmt: skip
    arguments = (x, y, w, b, counters, told, scratch, samples, pixels, 1e-5)
    return Kernel(function, arguments, constants, (teams, team), C // BC * blocks * unroll, way, counters), y


def check(found: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    error = ((found.double() - truth).norm() / truth.norm()).item()
    if not error < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[found.dtype]:
        raise ValueError(f"{what} is off by {error:.1e}")


def truth_of(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = [tensor.double().requires_grad_() for tensor in (x, w, b)]
    y = F.batch_norm(wide[0], None, None, wide[1], wide[2], True, 0.1, 1e-5)
    return y.detach(), *torch.autograd.grad(y, wide, dy.double())


def speed(call: Callable[[], Any], size: int, bandwidth: float) -> str:
    return f"{100 * size / bandwidth / (timing.time_calls([call], 'cuda', 0.1)[0].ms * 1e-3):.0f} %"


def batch_norm_speed(tensors: Tensors, truth: Tensors, way: Way, units: int, is_kept: bool, bandwidth: float) -> str:
    kernels, results, kept = batch_norm(*tensors, way, units, is_kept)
    for kernel in kernels:
        kernel()
    for found, true, name in zip(results, truth, ("y", "dx", "dw", "db"), strict=True):
        check(found, true, name)
    size = tensors[0].numel() * tensors[0].element_size()
    told = [f"{speed(kernel, n * size, bandwidth)} ({kernel.used})" for kernel, n in zip(kernels, (2, 3), strict=True)]
    return f"{' / '.join(told)}, {kept}"


def group_norm_speed(
    tensors: Tensors, true: torch.Tensor, way: Way, team: int, units: int, function: Any, bandwidth: float
) -> str:
    kernel, y = group_norm(*tensors, 32, way, team, units, function)
    kernel()
    check(y, true, "y")
    return f"{speed(kernel, 4 * y.numel(), bandwidth)} ({kernel.used})"


def attempt(what: str, measure: Callable[..., str], *arguments: Any) -> None:
    try:
        print(f"  {what:16} {measure(*arguments)}", flush=True)
    except (ValueError, RuntimeError, triton.runtime.errors.OutOfResources) as error:
        print(f"  {what:16} {str(error)[:200]}", flush=True)


BATCH_NORMS = (
    (64 * 56 * 56, 256, torch.float16), (64 * 56 * 56, 256, torch.float32), (256 * 112 * 112, 64, torch.float16),
    (65536, 1024, torch.float16), (256 * 7 * 7, 2048, torch.float16),
)  # fmt: skip
WAYS = ((3, 8, 4, 1), (2, 8, 8, 1), (2, 8, 4, 3), (3, 8, 2, 3), (4, 8, 1, 4), (1, 16, 4, 3), (2, 16, 1, 4))
TEAMS = (
    ((2, 8, 4, 1), 32), ((2, 8, 2, 1), 32), ((5, 8, 2, 1), 64), ((2, 16, 2, 1), 32), ((4, 4, 4, 1), 64),
)  # fmt: skip


def main() -> None:
    units, bandwidth = torch.cuda.get_device_properties(0).multi_processor_count, timing.copy_bandwidth("cuda")
    torch.manual_seed(0)
    for rows, C, dtype in BATCH_NORMS:
        x, dy = (torch.randn(rows, C, device="cuda", dtype=dtype) for _ in range(2))
        w, b = (torch.randn(C, device="cuda") for _ in range(2))
        today = partial(warpnorm.functional.batch_norm, x, None, None, w, b, True)
        told = speed(today, 2 * x.numel() * x.element_size(), bandwidth)
        print(f"BatchNorm {rows} x {C} {dtype}: forward today {told}", flush=True)
        truth = truth_of(x, dy, w, b)
        for way in WAYS:
            for is_kept in (True, False):
                attempt(f"{way}", batch_norm_speed, (x, dy, w, b), truth, way, units, is_kept, bandwidth)
    x = torch.randn(32, 4096, 320, device="cuda", dtype=torch.bfloat16)
    w, b = (torch.randn(320, device="cuda") for _ in range(2))
    image = x.view(32, 64, 64, 320).permute(0, 3, 1, 2)
    told = speed(partial(warpnorm.functional.group_norm, image, 32), 4 * x.numel(), bandwidth)
    print(f"GroupNorm 32 x 320 x 64 x 64: forward today {told}", flush=True)
    true = F.group_norm(x.double().transpose(1, 2), 32, w.double(), b.double(), 1e-5).transpose(1, 2)
    for function in (group_forward, group_forward_by_copies):
        print(f" {function.__name__}")
        for way, team in TEAMS:
            attempt(f"{way} by {team}", group_norm_speed, (x, w, b), true, way, team, units, function, bandwidth)


if __name__ == "__main__":
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are recorded on any but the default one
        main()
