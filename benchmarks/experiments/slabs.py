"""What BatchNorm would reach, channels last, if a team of programs held a slab of its input in registers: some channels of
all positions, of which a position has 32 to 128 bytes side by side. The input is then read once; the next slab is on its way
into shared memory while the programs exchange the means and M2 of this one, or backward its sums. The package has no such
pattern and reads twice there, by which 67 % of copy speed are all. `python benchmarks/experiments/slabs.py` says whether
one would pay, beside what the package reaches today, and beside the same visits without an exchange, whose results are
wrong: what the memory makes of that order. Needs a GPU with 228 KB of shared memory on a multiprocessor. Not measured yet.

Counted, of 64 x 256 x 56 x 56 in float16: a slab of 32 channels is 12.8 MB, 97 KB for each of 132 multiprocessors, and as
much is on its way. At copy speed it takes 3 microseconds to be read and as long to be written; the exchange takes 2 to 3, in
which only reads are under way. Compiled it is 20 instructions an element, 35 microseconds of all schedulers for all slabs,
of which those of one slab have to wait for each other: more than half of what the memory needs for float16, but a third for
float32."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import warpnorm
from warpnorm.bench import timing
from warpnorm.kernels.messages import BOXES, box_of, last_message
from warpnorm.kernels.pointwise import held

SHARED, REGISTERS = 227 * 1024, 65536  # bytes and 32-bit registers of a multiprocessor
AT_ONCE = 8  # messages that a thread asks for


def receiving(count: int) -> tuple[str, str]:
    """Assembler that waits for `count` words to carry a round, asking for all of them each time, and its constraints."""
    words = [f"word_{i}" for i in range(count)]
    asm = [f"{{ .reg .pred is_other; .reg .b64 {', '.join(words)}; .reg .b32 round; again:"]
    asm += [f"ld.relaxed.gpu.global.b64 {word}, [${2 * count + i}];" for i, word in enumerate(words)]
    asm += [f"mov.b64 {{${i}, ${count + i}}}, {word};" for i, word in enumerate(words)]
    for i in range(count):
        asm.append(f"and.b32 round, ${count + i}, 3;")
        asm.append(f"setp.ne{'.or' if i else ''}.b32 is_other, round, ${3 * count}{', is_other' if i else ''};")
    asm.append("@is_other bra again; }")
    return "\n".join(asm), ",".join(["=&r"] * 2 * count + ["l"] * count + ["r"] * count)


RECEIVE, CONSTRAINTS = map(tl.constexpr, receiving(AT_ONCE))
A_THREAD = tl.constexpr(AT_ONCE)


@triton.jit
def send_lines(first, second, mailbox, number, splits, LINES: tl.constexpr):
    """Two numbers of each line; the second loses two bits."""
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = (((second.to(tl.int32, bitcast=True) + 2) & -4) | ((number // BOXES) & 3)).to(tl.int64)
    at = box_of(mailbox, number, splits, 0, LINES) + tl.arange(0, LINES) * splits + tl.program_id(1)
    tl.atomic_xchg(at, (high << 32) | low, sem="relaxed", scope="gpu")


@triton.jit
def receive_lines(mailbox, number, splits, LINES: tl.constexpr, MOST: tl.constexpr):
    """Those of every program, (LINES, MOST) each, zero where there is none."""
    lanes = tl.arange(0, MOST)[None, :]
    words = tl.arange(0, LINES)[:, None] * splits + tl.minimum(lanes, splits - 1)
    first, second = tl.inline_asm_elementwise(
        RECEIVE, CONSTRAINTS,
        [(box_of(mailbox, number, splits, 0, LINES) + words).to(tl.int64), words * 0 + ((number // BOXES) & 3)],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=A_THREAD,
    )  # fmt: skip
    first, second = first.to(tl.float32, bitcast=True), (second & -4).to(tl.float32, bitcast=True)
    is_there = lanes < splits
    return tl.where(is_there, first, 0.0), tl.where(is_there, second, 0.0)


@triton.jit
def load_slab(x_ptr, slab, rows, C, LINES: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    lines = slab * LINES + tl.arange(0, LINES)
    tiles = ()
    for k in tl.static_range(CHUNKS):
        at = (tl.program_id(1) * CHUNKS + k) * BLOCK + tl.arange(0, BLOCK)
        tiles += (tl.load(x_ptr + at[:, None] * C + lines[None, :], mask=(at < rows)[:, None], other=0.0),)
    return tiles


@triton.jit
def reciprocal_root(x):
    """By one step from what the hardware has: a thread has eight lines of every tile, and a division is ten instructions."""
    root = tl.rsqrt(x)
    return root * (1.5 - 0.5 * x * root * root)


@triton.jit
def in_registers(tiles, CHUNKS: tl.constexpr, PACK: tl.constexpr):
    found = ()
    for k in tl.static_range(CHUNKS):
        found += (held(tiles[k], PACK),)
    return found


@triton.jit
def forward(
    x_ptr, y_ptr, w_ptr, b_ptr, mailbox, mean_ptr, rstd_ptr, rows, C, slabs, eps,
    LINES: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, STAGES: tl.constexpr,
    PACK: tl.constexpr, IS_TOLD: tl.constexpr,
):  # fmt: skip
    splits, me = tl.num_programs(1), tl.program_id(1)
    number = last_message(mailbox, splits, LINES) + 1
    members = tl.arange(0, MOST)
    counts = tl.minimum(tl.maximum(rows - members * (CHUNKS * BLOCK), 0), CHUNKS * BLOCK).to(tl.float32)
    share = 1.0 / tl.minimum(tl.maximum(rows - me * (CHUNKS * BLOCK), 1), CHUNKS * BLOCK).to(tl.float32)
    of_all = 1.0 / rows.to(tl.float32)
    for slab in tl.range(tl.program_id(0), slabs, tl.num_programs(0), num_stages=STAGES):
        lines = slab * LINES + tl.arange(0, LINES)
        tiles = load_slab(x_ptr, slab, rows, C, LINES, BLOCK, CHUNKS)
        total = tl.zeros((BLOCK, LINES), tl.float32)
        for k in tl.static_range(CHUNKS):
            total += tiles[k].to(tl.float32)
        mean = tl.sum(total, 0) * share
        tiles = in_registers(tiles, CHUNKS, PACK)
        squares = tl.zeros((BLOCK, LINES), tl.float32)
        for k in tl.static_range(CHUNKS):
            at = (me * CHUNKS + k) * BLOCK + tl.arange(0, BLOCK)
            off = tl.where((at < rows)[:, None], tiles[k].to(tl.float32) - mean[None, :], 0.0)
            squares += off * off
        total = tl.sum(squares, 0)
        tiles = in_registers(tiles, CHUNKS, PACK)
        if IS_TOLD:
            send_lines(mean, total, mailbox, number, splits, LINES)
            means, parts = receive_lines(mailbox, number, splits, LINES, MOST)
            mean = tl.sum(means * counts[None, :], 1) * of_all
            off = means - mean[:, None]
            total = tl.sum(parts + counts[None, :] * off * off, 1)
            number += 1
        rstd = reciprocal_root(total * of_all + eps)
        if me == 0:
            tl.store(mean_ptr + lines, mean)
            tl.store(rstd_ptr + lines, rstd)
        factor, shift = rstd * tl.load(w_ptr + lines), tl.load(b_ptr + lines)
        for k in tl.static_range(CHUNKS):
            at = (me * CHUNKS + k) * BLOCK + tl.arange(0, BLOCK)
            y = (tiles[k].to(tl.float32) - mean[None, :]) * factor[None, :] + shift[None, :]
            tl.store(y_ptr + at[:, None] * C + lines[None, :], y.to(y_ptr.dtype.element_ty), mask=(at < rows)[:, None])


@triton.jit
def backward(
    x_ptr, dy_ptr, dx_ptr, w_ptr, mailbox, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, C, slabs,
    LINES: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, STAGES: tl.constexpr,
    PACK: tl.constexpr, IS_TOLD: tl.constexpr,
):  # fmt: skip
    splits, me = tl.num_programs(1), tl.program_id(1)
    number = last_message(mailbox, splits, LINES) + 1
    of_all = 1.0 / rows.to(tl.float32)
    for slab in tl.range(tl.program_id(0), slabs, tl.num_programs(0), num_stages=STAGES):
        lines = slab * LINES + tl.arange(0, LINES)
        mean, rstd, w = tl.load(mean_ptr + lines), tl.load(rstd_ptr + lines), tl.load(w_ptr + lines)
        xs = load_slab(x_ptr, slab, rows, C, LINES, BLOCK, CHUNKS)
        dys = load_slab(dy_ptr, slab, rows, C, LINES, BLOCK, CHUNKS)
        total = tl.zeros((BLOCK, LINES), tl.float32)
        along = tl.zeros((BLOCK, LINES), tl.float32)
        for k in tl.static_range(CHUNKS):
            dy = dys[k].to(tl.float32)
            total += dy
            along += dy * ((xs[k].to(tl.float32) - mean[None, :]) * rstd[None, :])
        sums = tl.sum(total, 0), tl.sum(along, 0)
        xs, dys = in_registers(xs, CHUNKS, PACK), in_registers(dys, CHUNKS, PACK)
        if IS_TOLD:
            send_lines(sums[0], sums[1], mailbox, number, splits, LINES)
            told = receive_lines(mailbox, number, splits, LINES, MOST)
            sums = tl.sum(told[0], 1), tl.sum(told[1], 1)
            number += 1
        if me == 0:
            tl.store(db_ptr + lines, sums[0])
            tl.store(dw_ptr + lines, sums[1])
        flat, steep = sums[0] * of_all, sums[1] * of_all
        for k in tl.static_range(CHUNKS):
            at = (me * CHUNKS + k) * BLOCK + tl.arange(0, BLOCK)
            xhat = (xs[k].to(tl.float32) - mean[None, :]) * rstd[None, :]
            dx = (dys[k].to(tl.float32) - flat[None, :] - xhat * steep[None, :]) * (rstd * w)[None, :]
            there = (at < rows)[:, None]
            tl.store(dx_ptr + at[:, None] * C + lines[None, :], dx.to(dx_ptr.dtype.element_ty), mask=there)


class Way(NamedTuple):
    """Channels of a slab, warps of a program, programs of a multiprocessor, and of a team."""

    lines: int
    warps: int
    per_unit: int
    splits: int


class Case(NamedTuple):
    rows: int
    C: int
    dtype: torch.dtype
    forward: tuple[Way, ...]
    backward: tuple[Way, ...]

    def constants(self, way: Way) -> dict[str, int]:
        block = way.warps * 32 * (16 // self.dtype.itemsize) // way.lines
        constants = {"LINES": way.lines, "BLOCK": block, "CHUNKS": -(-self.rows // (way.splits * block)), "STAGES": 2}
        return constants | {"MOST": triton.next_power_of_2(way.splits), "PACK": 4 // self.dtype.itemsize}


CASES = (
    Case(
        64 * 56 * 56, 256, torch.float16,
        (Way(32, 16, 1, 132), Way(32, 16, 1, 128), Way(32, 8, 1, 132), Way(32, 8, 2, 256), Way(16, 16, 1, 128)),
        (Way(16, 16, 1, 132), Way(16, 16, 1, 128), Way(16, 8, 1, 132), Way(16, 8, 2, 256), Way(32, 8, 1, 132)),
    ),
    Case(
        64 * 56 * 56, 256, torch.float32,
        (Way(16, 16, 1, 132), Way(16, 16, 1, 128), Way(16, 8, 2, 256)),
        (Way(8, 16, 1, 132), Way(8, 16, 1, 128), Way(8, 8, 2, 256)),
    ),
    Case(
        65536, 1024, torch.float16,
        (Way(32, 16, 1, 64), Way(64, 16, 1, 128), Way(32, 16, 1, 32), Way(64, 8, 2, 128)),
        (Way(16, 16, 1, 64), Way(32, 16, 1, 128), Way(32, 16, 1, 64), Way(32, 8, 2, 128)),
    ),
    Case(
        256 * 7 * 7, 2048, torch.float16,
        (Way(32, 16, 1, 8), Way(64, 16, 1, 16), Way(64, 8, 2, 32)),
        (Way(32, 16, 1, 16), Way(64, 16, 1, 32), Way(32, 8, 2, 16)),
    ),
)  # fmt: skip


class Launch:
    """All its programs run at the same time."""

    def __init__(self, function: triton.JITFunction, case: Case, way: Way, is_told: bool, *arguments: object) -> None:
        slabs = case.C // way.lines
        teams = min(slabs, torch.cuda.get_device_properties(0).multi_processor_count * way.per_unit // way.splits)
        constants = case.constants(way) | {"IS_TOLD": is_told}
        mailbox = torch.zeros(teams * 4 * way.lines * way.splits, dtype=torch.int64, device="cuda")
        given = [mailbox if argument is None else argument for argument in (*arguments, case.rows, case.C, slabs)]
        given += [1e-5] if function is forward else []
        self.call = partial(
            function[(teams, way.splits)], *given, **constants, num_warps=way.warps, launch_cooperative_grid=True,
            maxnreg=min(REGISTERS // (32 * way.warps * way.per_unit) // 8 * 8, 255),
        )  # fmt: skip
        self.compiled = self.call()

    @property
    def used(self) -> str:
        kernel = self.compiled
        return f"{kernel.n_regs} registers, {kernel.n_spills} spilled, {kernel.metadata.shared // 1024} KB"


def errors(found: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    return max(((f.double() - t).norm() / t.norm()).item() for f, t in zip(found, truth, strict=True))


def measured(case: Case, bandwidth: float) -> Iterator[str]:
    torch.manual_seed(0)
    x, dy = (torch.randn(case.rows, case.C, device="cuda", dtype=case.dtype) for _ in range(2))
    w, b = (torch.randn(case.C, device="cuda") for _ in range(2))
    wide = [tensor.double().requires_grad_() for tensor in (x, w, b)]
    true_y = F.batch_norm(wide[0], None, None, wide[1], wide[2], True, 0.1, 1e-5)
    true = torch.autograd.grad(true_y, wide, dy.double())
    size, rough = x.numel() * x.element_size(), {torch.float32: 1e-5, torch.float16: 1e-3}[case.dtype]

    def percent(call: object, tensors: int) -> str:
        return f"{100 * tensors * size / bandwidth / (timing.time_calls([call], 'cuda', 0.1)[0].ms * 1e-3):.0f} %"  # type: ignore[list-item]

    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, w, b)]
    ours = partial(warpnorm.functional.batch_norm, leaves[0], None, None, leaves[1], leaves[2], True)
    y = ours()
    yield f"forward today {percent(ours, 2)}, backward {percent(partial(torch.autograd.grad, y, leaves, dy, True), 3)}"
    mean, rstd, dw, db = (torch.empty(case.C, device="cuda") for _ in range(4))
    for function, ways, tensors in ((forward, case.forward, 2), (backward, case.backward, 3)):
        for way in ways:
            told = []
            for is_told in (True, False):
                out = torch.full_like(x, float("nan"))
                of_forward, of_backward = (x, out, w, b, None, mean, rstd), (x, dy, out, w, None, mean, rstd, dw, db)
                try:
                    launch = Launch(function, case, way, is_told, *(of_forward if function is forward else of_backward))
                    told.append(f"{percent(launch.call, tensors)} ({launch.used})")
                except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                    told.append(str(error)[:100])
                    break
                results = ((out,), (true_y.detach(),)) if function is forward else ((out, dw, db), true)
                if is_told and not errors(*results) < rough:
                    told[-1] += f" WRONG by {errors(*results):.1e}"
            yield f"  {function.__name__:8} {tuple(way)}: {', without an exchange '.join(told)}"
        # The statistics that backward reads are those of the last forward that was right
        mean.copy_(wide[0].detach().mean(0))
        rstd.copy_((wide[0].detach().var(0, correction=0) + 1e-5).rsqrt())


def main() -> None:
    bandwidth = timing.copy_bandwidth("cuda")
    for case in CASES:
        print(f"BatchNorm {case.rows} x {case.C} {case.dtype}", flush=True)
        for line in measured(case, bandwidth):
            print(line, flush=True)


if __name__ == "__main__":
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are recorded on any but the default one
        main()
