"""What norms by channel would reach, channels last, if all programs were resident and kept blocks of their input in shared
memory until the statistics are there: forward and backward of BatchNorm, which keeps as many of the last blocks as there is
room for and reads the others again, and GroupNorm, which keeps a sample in the memory of a team. The package has no such
pattern; `python benchmarks/experiments/kept_in_shared_memory.py` says whether one would pay, beside what the package reaches
today. Needs a GPU with 228 KB of shared memory on a multiprocessor.

A block has 16 bytes for each thread, which stores them in a slot behind Triton's own shared memory and loads them itself:
nothing has to be synchronized. Whoever loads must have the elements that it stored: the values pass through a load of global
memory that is masked where they are kept, so that both have the layout of that load."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import warpnorm
from warpnorm.bench import timing

# Triton's own shared memory ends where what is kept begins
KEEP_16 = tl.constexpr("""{
    .reg .u32 a, t;
    mov.u32 a, global_smem;
    mov.u32 t, %tid.x;
    mad.lo.u32 a, t, 16, a;
    add.u32 a, a, $6;
    st.shared.v4.b32 [a], {$2, $3, $4, $5};
    mov.u32 $0, 0;
    mov.u32 $1, 0;
}""")
RECALL = tl.constexpr("""{
    .reg .u32 a, t;
    .reg .b32 v0, v1, v2, v3;
    .reg .pred is_kept;
    mov.u32 a, global_smem;
    mov.u32 t, %tid.x;
    mad.lo.u32 a, t, 16, a;
    add.u32 a, a, $8;
    setp.ge.s32 is_kept, $8, 0;
    mov.b32 v0, $4;
    mov.b32 v1, $5;
    mov.b32 v2, $6;
    mov.b32 v3, $7;
    @is_kept ld.shared.v4.b32 {v0, v1, v2, v3}, [a];
    mov.b32 $0, v0;
    mov.b32 $1, v1;
    mov.b32 $2, v2;
    mov.b32 $3, v3;
}""")
KEEP_32 = tl.constexpr("""{
    .reg .u32 a, t;
    mov.u32 a, global_smem;
    mov.u32 t, %tid.x;
    mad.lo.u32 a, t, 16, a;
    add.u32 a, a, $5;
    st.shared.v4.b32 [a], {$1, $2, $3, $4};
    mov.u32 $0, 0;
}""")


@triton.jit
def keep(values, slot, OWN: tl.constexpr, THREADS: tl.constexpr):
    place = tl.zeros(values.shape, tl.int32) + (OWN + slot * THREADS * 16)
    if values.dtype == tl.float32:
        tl.inline_asm_elementwise(KEEP_32, "=r,f,f,f,f,r,r,r,r", [values, place], dtype=tl.int8, is_pure=False, pack=4)
    else:
        tl.inline_asm_elementwise(
            KEEP_16, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [values, place], dtype=tl.int8, is_pure=False, pack=8
        )


@triton.jit
def recall(values, slot, OWN: tl.constexpr, THREADS: tl.constexpr):
    """What was kept in a slot; `values` where that is below zero."""
    place = tl.zeros(values.shape, tl.int32) + tl.where(slot < 0, -1, OWN + slot * THREADS * 16)
    if values.dtype == tl.float32:
        WIDE: tl.constexpr = "=f,=f,=f,=f,f,f,f,f,r,r,r,r"
        return tl.inline_asm_elementwise(RECALL, WIDE, [values, place], dtype=tl.float32, is_pure=False, pack=4)
    elif values.dtype == tl.float16:
        HALF: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r"
        return tl.inline_asm_elementwise(RECALL, HALF, [values, place], dtype=tl.float16, is_pure=False, pack=8)
    else:
        HALF: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r"
        return tl.inline_asm_elementwise(RECALL, HALF, [values, place], dtype=tl.bfloat16, is_pure=False, pack=8)


WAIT = tl.constexpr("""{
    .reg .pred is_there;
    .reg .b64 word;
    again:
    ld.relaxed.gpu.global.b64 word, [$1];
    setp.ne.s64 is_there, word, 0;
    @is_there bra done;
    nanosleep.u32 50;
    bra again;
    done:
    mov.b64 $0, word;
}""")


@triton.jit
def pack(a, b):
    """Two floats in a word that is not zero."""
    word = (a.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(word == 0, -9223372036854775808, word)


@triton.jit
def wait(pointers, mask):
    # who is masked waits for nobody: the first word is there
    word = tl.inline_asm_elementwise(WAIT, "=l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1)
    first = tl.where(mask, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    return first, tl.where(mask, word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def block_of(index, rows, BP: tl.constexpr):
    lines = index * BP + tl.arange(0, BP)
    return lines, lines < rows


@triton.jit
def addresses(x_ptr, lines, cols, C):
    return x_ptr + lines.to(tl.int64)[:, None] * C + cols[None, :]


@triton.jit
def load_step(x_ptr, step, slot, rows, cols, C, BP: tl.constexpr, U: tl.constexpr, POLICY: tl.constexpr):
    """U blocks; those that are kept (slot >= 0) are not loaded."""
    P = tl.num_programs(0)
    tiles = ()
    for u in tl.static_range(U):
        lines, there = block_of((step * U + u) * P + tl.program_id(0), rows, BP)
        mask = (there & (slot < 0))[:, None]
        tile = tl.load(addresses(x_ptr, lines, cols, C), mask=mask, other=0.0, eviction_policy=POLICY)
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def counts_of(q, P, rows, BP: tl.constexpr):
    """Rows of the programs q: whole rounds, and what is left."""
    full = rows // (P * BP)
    rest = tl.minimum(tl.maximum(rows - full * (P * BP) - q * BP, 0), BP)
    return tl.where(q < P, full * BP + rest, 0).to(tl.float32)


@triton.jit
def add(x, there, pivot, total, squares):
    d = tl.where(there[:, None], x.to(tl.float32) - pivot, 0.0)
    return total + d, squares + d * d


@triton.jit
def one(number):
    return tl.zeros((1,), tl.float32) + number


@triton.jit
def forward(
    x_ptr, y_ptr, w_ptr, b_ptr, partial_ptr, result_ptr, mean_ptr, rstd_ptr, rows, steps, kept, eps,
    C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OWN: tl.constexpr,
    THREADS: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    """Programs (P, C // BC). Step s of program p is block s * P + p; U steps at a time; the last `kept` of them are kept."""
    p = tl.program_id(0)
    P = tl.num_programs(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    lines, there = block_of(p, rows, BP)
    pivot = tl.load(addresses(x_ptr, tl.minimum(lines, rows - 1), cols, C)).to(tl.float32)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    free = steps - kept  # of U blocks each
    for s in tl.range(0, free):
        tiles = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        for u in tl.static_range(U):
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            total, squares = add(tiles[u], there, pivot, total, squares)
    for s in tl.range(free, steps):
        tiles = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            keep(tiles[u], (s - free) * U + u, OWN, THREADS)
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            total, squares = add(tiles[u], there, pivot, total, squares)
    count = tl.maximum(tl.cdiv(rows - (p * BP + tl.arange(0, BP)), P * BP), 0).to(tl.float32)[:, None]
    shift = total / tl.maximum(count, 1.0)
    mean = pivot + shift
    m2 = squares - total * shift
    mean_p = tl.sum(count * mean, 0) / tl.maximum(tl.sum(count), 1.0)
    off = mean - mean_p[None, :]
    tl.atomic_xchg(
        partial_ptr + cols.to(tl.int64) * P + p,
        pack(mean_p, tl.sum(m2 + count * off * off, 0)),
        sem="relaxed",
        scope="gpu",
    )
    for c in tl.range(tl.program_id(1) * P + p, C, P * tl.num_programs(1)):  # some programs merge a channel each
        q = tl.arange(0, P2)
        means, m2s = wait(partial_ptr + c * P + tl.minimum(q, P - 1), q < P)
        counts = counts_of(q, P, rows, BP)
        mean_c = tl.sum(counts * means) / rows
        off_c = means - mean_c
        rstd = 1.0 / tl.sqrt(tl.sum(m2s + counts * off_c * off_c) / rows + eps)
        tl.atomic_xchg(result_ptr + c + tl.arange(0, 1), pack(one(mean_c), one(rstd)), sem="relaxed", scope="gpu")
        tl.store(mean_ptr + c, mean_c)
        tl.store(rstd_ptr + c, rstd)
    w = tl.load(w_ptr + cols).to(tl.float32)
    b = tl.load(b_ptr + cols).to(tl.float32)
    mean_c, rstd_c = wait(result_ptr + cols, cols < C)
    scale = rstd_c * w
    bias = b - mean_c * scale
    for s in tl.range(0, steps):
        slot = (kept - 1 - s) * U  # of those before the kept ones below zero
        tiles = load_step(x_ptr, steps - 1 - s, slot, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of(((steps - 1 - s) * U + u) * P + p, rows, BP)
            y = (
                recall(tiles[u], tl.where(slot < 0, -1, slot + u), OWN, THREADS).to(tl.float32) * scale[None, :]
                + bias[None, :]
            )
            tl.store(addresses(y_ptr, lines, cols, C), y.to(y_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def backward(
    x_ptr, dy_ptr, dx_ptr, w_ptr, partial_ptr, result_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, steps,
    kept, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OWN: tl.constexpr,
    THREADS: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    P = tl.num_programs(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    mean = tl.load(mean_ptr + cols)[None, :]
    total = tl.zeros((BP, BC), tl.float32)
    products = tl.zeros((BP, BC), tl.float32)
    free = steps - kept
    for s in tl.range(0, free):
        xs = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        dys = load_step(dy_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        for u in tl.static_range(U):
            dy = dys[u].to(tl.float32)  # zero where there is none
            total += dy
            products += dy * (xs[u].to(tl.float32) - mean)
    for s in tl.range(free, steps):
        xs = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        dys = load_step(dy_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            keep(xs[u], ((s - free) * U + u) * 2, OWN, THREADS)
            keep(dys[u], ((s - free) * U + u) * 2 + 1, OWN, THREADS)
            dy = dys[u].to(tl.float32)
            total += dy
            products += dy * (xs[u].to(tl.float32) - mean)
    tl.atomic_xchg(
        partial_ptr + cols.to(tl.int64) * P + p, pack(tl.sum(total, 0), tl.sum(products, 0)), sem="relaxed", scope="gpu"
    )
    for c in tl.range(tl.program_id(1) * P + p, C, P * tl.num_programs(1)):
        q = tl.arange(0, P2)
        totals, productss = wait(partial_ptr + c * P + tl.minimum(q, P - 1), q < P)
        db = tl.sum(totals)
        dw = tl.sum(productss) * tl.load(rstd_ptr + c)
        tl.atomic_xchg(result_ptr + c + tl.arange(0, 1), pack(one(db), one(dw)), sem="relaxed", scope="gpu")
        tl.store(db_ptr + c, db)
        tl.store(dw_ptr + c, dw)
    w = tl.load(w_ptr + cols).to(tl.float32)
    db_c, dw_c = wait(result_ptr + cols, cols < C)
    mean_c = tl.load(mean_ptr + cols)
    rstd_c = tl.load(rstd_ptr + cols)
    scale = rstd_c * w
    by_x = -scale * rstd_c * dw_c / rows
    bias = -scale * db_c / rows - by_x * mean_c
    for s in tl.range(0, steps):
        slot = (kept - 1 - s) * U
        xs = load_step(x_ptr, steps - 1 - s, slot, rows, cols, C, BP, U, "evict_first")
        dys = load_step(dy_ptr, steps - 1 - s, slot, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of(((steps - 1 - s) * U + u) * P + p, rows, BP)
            x = recall(xs[u], tl.where(slot < 0, -1, (slot + u) * 2), OWN, THREADS).to(tl.float32)
            dy = recall(dys[u], tl.where(slot < 0, -1, (slot + u) * 2 + 1), OWN, THREADS).to(tl.float32)
            dx = dy * scale[None, :] + (x * by_x[None, :] + bias[None, :])
            tl.store(addresses(dx_ptr, lines, cols, C), dx.to(dx_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def group_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, words_ptr, scratch_ptr, samples, pixels, eps, C: tl.constexpr, G: tl.constexpr,
    CG: tl.constexpr, CG2: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, OWN: tl.constexpr, THREADS: tl.constexpr, T: tl.constexpr, T2: tl.constexpr,
):  # fmt: skip
    """GroupNorm of (samples, pixels, C): programs (teams, T), each has BLOCKS * U * BP pixels of a sample and keeps them, by
    C // BC blocks of channels, one after the other."""
    t = tl.program_id(1)
    me = (tl.program_id(0) * T + t).to(tl.int64)
    PARTS: tl.constexpr = C // BC
    count = BLOCKS * U * BP
    mine = scratch_ptr + me * (2 * C + 2 * G)
    for sample in tl.range(tl.program_id(0), samples, tl.num_programs(0)):
        base = x_ptr + sample * pixels * C
        out = y_ptr + sample * pixels * C
        for part in tl.range(0, PARTS):
            cols = part * BC + tl.arange(0, BC)
            pivot = tl.load(base + t * count * C + cols).to(tl.float32)
            total = tl.zeros((BP, BC), tl.float32)
            squares = tl.zeros((BP, BC), tl.float32)
            for s in tl.static_range(BLOCKS):
                tiles = ()
                for u in tl.static_range(U):
                    lines = t * count + (s * U + u) * BP + tl.arange(0, BP)
                    tiles = tiles + (tl.load(addresses(base, lines, cols, C), eviction_policy="evict_first"),)  # noqa: RUF005
                for u in tl.static_range(U):
                    keep(tiles[u], (part * BLOCKS + s) * U + u, OWN, THREADS)
                    d = tiles[u].to(tl.float32) - pivot[None, :]
                    total += d
                    squares += d * d
            shift = tl.sum(total, 0) / count
            tl.store(mine + cols, pivot + shift)
            tl.store(mine + C + cols, tl.sum(squares, 0) - shift * shift * count)
        tl.debug_barrier()
        g = tl.arange(0, G)
        inside = tl.arange(0, CG2)
        mask = (inside < CG)[None, :]
        channels = g[:, None] * CG + inside[None, :]
        means = tl.load(mine + channels, mask=mask, other=0.0)
        mean_g = tl.sum(means, 1) / CG
        off = tl.where(mask, means - mean_g[:, None], 0.0)
        m2_g = tl.sum(tl.load(mine + C + channels, mask=mask, other=0.0) + off * off * count, 1)
        told = words_ptr + sample * (T * G)
        tl.atomic_xchg(told + t * G + g, pack(mean_g, m2_g), sem="relaxed", scope="gpu")
        q = tl.arange(0, T2)
        there = (q < T)[:, None] & (g < G)[None, :]
        means, m2s = wait(told + tl.minimum(q, T - 1)[:, None] * G + g[None, :], there)
        mean_s = tl.sum(means, 0) / T
        off = tl.where(there, means - mean_s[None, :], 0.0)
        var = tl.sum(m2s + off * off * (count * CG), 0) / (T * count * CG)
        tl.store(mine + 2 * C + g, mean_s)
        tl.store(mine + 2 * C + G + g, 1.0 / tl.sqrt(var + eps))
        tl.debug_barrier()
        for part in tl.range(0, PARTS):
            cols = part * BC + tl.arange(0, BC)
            scale = tl.load(mine + 2 * C + G + cols // CG) * tl.load(w_ptr + cols).to(tl.float32)
            bias = tl.load(b_ptr + cols).to(tl.float32) - tl.load(mine + 2 * C + cols // CG) * scale
            for s in tl.static_range(BLOCKS):
                for u in tl.static_range(U):
                    lines = t * count + (s * U + u) * BP + tl.arange(0, BP)
                    none = tl.load(addresses(base, lines, cols, C), mask=(lines < 0)[:, None], other=0.0)
                    y = recall(none, (part * BLOCKS + s) * U + u, OWN, THREADS).to(tl.float32)
                    y = y * scale[None, :] + bias[None, :]
                    tl.store(addresses(out, lines, cols, C), y.to(y_ptr.dtype.element_ty))
        tl.debug_barrier()


COPY = tl.constexpr(
    "{ .reg .u32 a; mov.u32 a, global_smem; add.u32 a, a, $2; cp.async.cg.shared.global [a], [$1], 16; mov.b32 $0, 0; }"
)
ARRIVED = tl.constexpr("cp.async.wait_all; mov.b32 $0, 0;")


@triton.jit
def by_each_thread(INSTRUCTIONS: tl.constexpr, THREADS: tl.constexpr):
    tl.inline_asm_elementwise(INSTRUCTIONS, "=r,r", [tl.arange(0, THREADS)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy_part(
    base, first, part, C: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, OWN: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """The blocks of one part of the channels are on their way into their slots when this returns. Their 16 bytes will be
    where `recall` looks for them, if it has the elements of a row one after another, as loads have."""
    vectors = tl.arange(0, BC // 8)
    for block in tl.static_range(BLOCKS):
        lines = first + block * BP + tl.arange(0, BP)
        addresses_of = base + lines[:, None] * C + (part * BC + vectors * 8)[None, :]
        place = (
            OWN
            + (part * BLOCKS + block) * THREADS * 16
            + (tl.arange(0, BP)[:, None] * (BC // 8) + vectors[None, :]) * 16
        )
        tl.inline_asm_elementwise(
            COPY, "=r,l,r", [addresses_of.to(tl.int64), place], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def group_forward_by_copies(
    x_ptr, y_ptr, w_ptr, b_ptr, words_ptr, scratch_ptr, samples, pixels, eps, C: tl.constexpr, G: tl.constexpr,
    CG: tl.constexpr, CG2: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
    OWN: tl.constexpr, THREADS: tl.constexpr, T: tl.constexpr, T2: tl.constexpr,
):  # fmt: skip
    """The same, but what is kept is copied into its slots, without registers, and that of the next sample while the results
    of this one are stored. U is no matter."""
    t = tl.program_id(1)
    me = (tl.program_id(0) * T + t).to(tl.int64)
    PARTS: tl.constexpr = C // BC
    OF_PART: tl.constexpr = BLOCKS * U
    count = OF_PART * BP
    mine = scratch_ptr + me * (2 * C + 2 * G)
    for part in tl.static_range(PARTS):
        copy_part(x_ptr + tl.program_id(0) * pixels * C, t * count, part, C, OF_PART, BP, BC, OWN, THREADS)
    for sample in tl.range(tl.program_id(0), samples, tl.num_programs(0)):
        base = x_ptr + sample * pixels * C
        out = y_ptr + sample * pixels * C
        by_each_thread(ARRIVED, THREADS)
        tl.debug_barrier()
        for part in tl.static_range(PARTS):
            cols = part * BC + tl.arange(0, BC)
            total = tl.zeros((BP, BC), tl.float32)
            squares = tl.zeros((BP, BC), tl.float32)
            pivot = tl.zeros((BP, BC), tl.float32)
            for block in tl.static_range(OF_PART):
                lines = t * count + block * BP + tl.arange(0, BP)
                none = tl.load(addresses(base, lines, cols, C), mask=(lines < 0)[:, None], other=0.0)
                x = recall(none, part * OF_PART + block, OWN, THREADS).to(tl.float32)
                if block == 0:
                    pivot = x
                else:
                    total += x - pivot
                    squares += (x - pivot) * (x - pivot)
            shift = total / OF_PART
            lane_mean = pivot + shift
            mean = tl.sum(lane_mean, 0) / BP
            off = lane_mean - mean[None, :]
            tl.store(mine + cols, mean)
            tl.store(mine + C + cols, tl.sum(squares - total * shift + off * off * OF_PART, 0))
        tl.debug_barrier()
        g = tl.arange(0, G)
        inside = tl.arange(0, CG2)
        mask = (inside < CG)[None, :]
        channels = g[:, None] * CG + inside[None, :]
        means = tl.load(mine + channels, mask=mask, other=0.0)
        mean_g = tl.sum(means, 1) / CG
        off_g = tl.where(mask, means - mean_g[:, None], 0.0)
        m2_g = tl.sum(tl.load(mine + C + channels, mask=mask, other=0.0) + off_g * off_g * count, 1)
        told = words_ptr + sample * (T * G)
        tl.atomic_xchg(told + t * G + g, pack(mean_g, m2_g), sem="relaxed", scope="gpu")
        q = tl.arange(0, T2)
        there = (q < T)[:, None] & (g < G)[None, :]
        all_means, m2s = wait(told + tl.minimum(q, T - 1)[:, None] * G + g[None, :], there)
        mean_s = tl.sum(all_means, 0) / T
        off_s = tl.where(there, all_means - mean_s[None, :], 0.0)
        var = tl.sum(m2s + off_s * off_s * (count * CG), 0) / (T * count * CG)
        tl.store(mine + 2 * C + g, mean_s)
        tl.store(mine + 2 * C + G + g, 1.0 / tl.sqrt(var + eps))
        tl.debug_barrier()
        following = sample + tl.num_programs(0)
        for part in tl.static_range(PARTS):
            cols = part * BC + tl.arange(0, BC)
            scale = tl.load(mine + 2 * C + G + cols // CG) * tl.load(w_ptr + cols).to(tl.float32)
            bias = tl.load(b_ptr + cols).to(tl.float32) - tl.load(mine + 2 * C + cols // CG) * scale
            for block in tl.static_range(OF_PART):
                lines = t * count + block * BP + tl.arange(0, BP)
                none = tl.load(addresses(base, lines, cols, C), mask=(lines < 0)[:, None], other=0.0)
                x = recall(none, part * OF_PART + block, OWN, THREADS).to(tl.float32)
                y = x * scale[None, :] + bias[None, :]
                tl.store(addresses(out, lines, cols, C), y.to(y_ptr.dtype.element_ty))
            tl.debug_barrier()
            if following < samples:
                copy_part(x_ptr + following * pixels * C, t * count, part, C, OF_PART, BP, BC, OWN, THREADS)


SHARED = 233472  # bytes of a multiprocessor, of which every program has 1,024 that are not its own
Tensors = tuple[torch.Tensor, ...]
Way = tuple[int, int, int]  # programs of a multiprocessor, warps of a program, and blocks that it loads at once


class Kernel:
    """All its programs run at the same time and have so many slots each; `words` are zero before it begins."""

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], constants: dict[str, int], grid: tuple[int, int], slots: int,
        way: Way, words: torch.Tensor,
    ) -> None:  # fmt: skip
        per_unit, warps, _ = way
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
        self.launch, self.words, self.arguments = launch, words, (*arguments, *constants.values())

    def __call__(self) -> None:
        self.words.zero_()
        self.launch(*self.arguments)


def batch_norm(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, b: torch.Tensor, way: Way, units: int, is_kept: bool
) -> tuple[tuple[Kernel, Kernel], tuple[torch.Tensor, ...], str]:
    """Forward and backward of x in (rows, C), their results, and which part of the input is kept."""
    per_unit, warps, unroll = way
    rows, C = x.shape
    BC = min(C, 256)
    BP = warps * 32 * (16 // x.element_size()) // BC
    by_cols = C // BC
    P = units * per_unit // by_cols
    steps = -(-rows // (P * BP * unroll))
    words = torch.zeros(C * P + C, dtype=torch.int64, device=x.device)
    mean, rstd, dw, db = (torch.empty(C, device=x.device) for _ in range(4))
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    threads, own = warps * 32, 1024 * warps
    constants = {
        "C": C, "BP": BP, "BC": BC, "U": unroll, "OWN": own, "THREADS": threads, "P2": triton.next_power_of_2(max(P, 32)),
    }  # fmt: skip
    room = (SHARED // per_unit - 1024 - own) // (threads * 16 * unroll) if is_kept else 0
    kept = min(steps, room), min(steps, room // 2)
    result = words[C * P :]
    of_forward = (x, y, w, b, words, result, mean, rstd, rows, steps, kept[0], 1e-5)
    of_backward = (x, dy, dx, w, words, result, mean, rstd, dw, db, rows, steps, kept[1])
    kernels = (
        Kernel(forward, of_forward, constants, (P, by_cols), kept[0] * unroll, way, words),
        Kernel(backward, of_backward, constants, (P, by_cols), 2 * kept[1] * unroll, way, words),
    )
    return kernels, (y, dx, dw, db), f"{kept[0] / steps:.2f} and {kept[1] / steps:.2f} kept"


def group_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int, way: Way, team: int, units: int, function: Any
) -> tuple[Kernel, torch.Tensor]:
    """Forward of x in (samples, pixels, C), and its result."""
    per_unit, warps, unroll = way
    samples, pixels, C = x.shape
    BC = 64
    BP = warps * 32 * 8 // BC
    blocks = pixels // (team * BP * unroll)
    if blocks * team * BP * unroll != pixels:
        raise ValueError(f"{pixels} pixels are no whole blocks")
    teams = min(units * per_unit // team, samples)
    words = torch.zeros(samples * team * groups, dtype=torch.int64, device=x.device)
    scratch = torch.empty(teams * team * (2 * C + 2 * groups), device=x.device)
    y = torch.full_like(x, float("nan"))
    CG = C // groups
    constants = {
        "C": C, "G": groups, "CG": CG, "CG2": triton.next_power_of_2(CG), "BLOCKS": blocks, "BP": BP, "BC": BC,
        "U": unroll, "OWN": 4096, "THREADS": warps * 32, "T": team, "T2": triton.next_power_of_2(team),
    }  # fmt: skip
    arguments = (x, y, w, b, words, scratch, samples, pixels, 1e-5)
    return Kernel(function, arguments, constants, (teams, team), C // BC * blocks * unroll, way, words), y


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
WAYS = ((5, 8, 2), (4, 8, 4), (4, 8, 2), (3, 8, 4), (2, 16, 4), (2, 16, 2))
TEAMS = (
    ((2, 8, 4), 32), ((2, 8, 2), 32), ((5, 8, 2), 64), ((5, 8, 1), 64), ((2, 16, 2), 32), ((2, 16, 1), 32), ((4, 4, 4), 64),
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
    main()
