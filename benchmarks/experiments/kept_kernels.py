"""The kernels of `kept_in_shared_memory.py`. A block has 16 bytes for each thread, which puts them in a slot behind Triton's
own shared memory and loads them itself: nothing has to be synchronized. Whoever loads must have the elements that it stored:
the values pass through a load of global memory that is masked where they are kept, and both have the layout of that load."""

import triton
import triton.language as tl

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
    .reg .b32 count;
    again:
    ld.acquire.gpu.global.b32 count, [$1];
    setp.ge.s32 is_there, count, $2;
    @is_there bra done;
    nanosleep.u32 20;
    bra again;
    done:
    mov.b32 $0, count;
}""")


@triton.jit
def arrive(counter):
    """All that this program stored is there for whoever waits for its count."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, programs):
    """Each warp asks for the same word, and not for what it will read: of words that many ask for few arrive."""
    tl.inline_asm_elementwise(
        WAIT, "=r,l,r", [counter.to(tl.int64), programs.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
    tl.debug_barrier()


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
def forward(
    x_ptr, y_ptr, w_ptr, b_ptr, counters_ptr, partial_ptr, mean_ptr, rstd_ptr, rows, steps, kept, eps,
    C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OWN: tl.constexpr,
    THREADS: tl.constexpr, P2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs (P, C // BC). Step s of program p is block s * P + p; U steps at a time; the first `kept` are kept: the last
    ones are in L2."""
    p = tl.program_id(0)
    P = tl.num_programs(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    lines, there = block_of(p, rows, BP)
    pivot = tl.load(addresses(x_ptr, tl.minimum(lines, rows - 1), cols, C)).to(tl.float32)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for s in tl.range(0, kept):
        tiles = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            keep(tiles[u], s * U + u, OWN, THREADS)
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            total, squares = add(tiles[u], there, pivot, total, squares)
    for s in tl.range(kept, steps, num_stages=STAGES):
        tiles = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        for u in tl.static_range(U):
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            total, squares = add(tiles[u], there, pivot, total, squares)
    count = tl.maximum(tl.cdiv(rows - (p * BP + tl.arange(0, BP)), P * BP), 0).to(tl.float32)[:, None]
    shift = total / tl.maximum(count, 1.0)
    mean = pivot + shift
    m2 = squares - total * shift
    mean_p = tl.sum(count * mean, 0) / tl.maximum(tl.sum(count), 1.0)
    off = mean - mean_p[None, :]
    tl.store(partial_ptr + cols.to(tl.int64) * P + p, mean_p)
    tl.store(partial_ptr + (C + cols).to(tl.int64) * P + p, tl.sum(m2 + count * off * off, 0))
    arrive(counters_ptr)
    programs = P * tl.num_programs(1)
    if tl.program_id(1) * P + p < C:
        wait(counters_ptr, programs)
    for c in tl.range(tl.program_id(1) * P + p, C, P * tl.num_programs(1)):  # some programs merge a channel each
        q = tl.arange(0, P2)
        means = tl.load(partial_ptr + c * P + q, mask=q < P, other=0.0)
        m2s = tl.load(partial_ptr + (C + c) * P + q, mask=q < P, other=0.0)
        counts = counts_of(q, P, rows, BP)
        mean_c = tl.sum(counts * means) / rows
        off_c = means - mean_c
        rstd = 1.0 / tl.sqrt(tl.sum(m2s + counts * off_c * off_c) / rows + eps)
        tl.store(mean_ptr + c, mean_c)
        tl.store(rstd_ptr + c, rstd)
    if tl.program_id(1) * P + p < C:
        arrive(counters_ptr + 1)
    w = tl.load(w_ptr + cols).to(tl.float32)
    b = tl.load(b_ptr + cols).to(tl.float32)
    wait(counters_ptr + 1, tl.minimum(programs, C))
    mean_c = tl.load(mean_ptr + cols)
    rstd_c = tl.load(rstd_ptr + cols)
    scale = rstd_c * w
    bias = b - mean_c * scale
    for s in tl.range(0, steps - kept, num_stages=STAGES):
        tiles = load_step(x_ptr, steps - 1 - s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of(((steps - 1 - s) * U + u) * P + p, rows, BP)
            y = tiles[u].to(tl.float32) * scale[None, :] + bias[None, :]
            tl.store(addresses(y_ptr, lines, cols, C), y.to(y_ptr.dtype.element_ty), mask=there[:, None])
    for s in tl.range(0, kept):
        tiles = load_step(x_ptr, s, 0, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            y = recall(tiles[u], s * U + u, OWN, THREADS).to(tl.float32) * scale[None, :] + bias[None, :]
            tl.store(addresses(y_ptr, lines, cols, C), y.to(y_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def backward(
    x_ptr, dy_ptr, dx_ptr, w_ptr, counters_ptr, partial_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, steps,
    kept, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OWN: tl.constexpr,
    THREADS: tl.constexpr, P2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    P = tl.num_programs(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    mean = tl.load(mean_ptr + cols)[None, :]
    total = tl.zeros((BP, BC), tl.float32)
    products = tl.zeros((BP, BC), tl.float32)
    for s in tl.range(0, kept):
        xs = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        dys = load_step(dy_ptr, s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            keep(xs[u], (s * U + u) * 2, OWN, THREADS)
            keep(dys[u], (s * U + u) * 2 + 1, OWN, THREADS)
            dy = dys[u].to(tl.float32)  # zero where there is none
            total += dy
            products += dy * (xs[u].to(tl.float32) - mean)
    for s in tl.range(kept, steps, num_stages=STAGES):
        xs = load_step(x_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        dys = load_step(dy_ptr, s, -1, rows, cols, C, BP, U, "evict_last")
        for u in tl.static_range(U):
            dy = dys[u].to(tl.float32)
            total += dy
            products += dy * (xs[u].to(tl.float32) - mean)
    tl.store(partial_ptr + cols.to(tl.int64) * P + p, tl.sum(total, 0))
    tl.store(partial_ptr + (C + cols).to(tl.int64) * P + p, tl.sum(products, 0))
    arrive(counters_ptr)
    programs = P * tl.num_programs(1)
    if tl.program_id(1) * P + p < C:
        wait(counters_ptr, programs)
    for c in tl.range(tl.program_id(1) * P + p, C, P * tl.num_programs(1)):
        q = tl.arange(0, P2)
        db = tl.sum(tl.load(partial_ptr + c * P + q, mask=q < P, other=0.0))
        dw = tl.sum(tl.load(partial_ptr + (C + c) * P + q, mask=q < P, other=0.0)) * tl.load(rstd_ptr + c)
        tl.store(db_ptr + c, db)
        tl.store(dw_ptr + c, dw)
    if tl.program_id(1) * P + p < C:
        arrive(counters_ptr + 1)
    w = tl.load(w_ptr + cols).to(tl.float32)
    wait(counters_ptr + 1, tl.minimum(programs, C))
    db_c = tl.load(db_ptr + cols)
    dw_c = tl.load(dw_ptr + cols)
    mean_c = tl.load(mean_ptr + cols)
    rstd_c = tl.load(rstd_ptr + cols)
    scale = rstd_c * w
    by_x = -scale * rstd_c * dw_c / rows
    bias = -scale * db_c / rows - by_x * mean_c
    for s in tl.range(0, steps - kept, num_stages=STAGES):
        xs = load_step(x_ptr, steps - 1 - s, -1, rows, cols, C, BP, U, "evict_first")
        dys = load_step(dy_ptr, steps - 1 - s, -1, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of(((steps - 1 - s) * U + u) * P + p, rows, BP)
            dx = dys[u].to(tl.float32) * scale[None, :] + (xs[u].to(tl.float32) * by_x[None, :] + bias[None, :])
            tl.store(addresses(dx_ptr, lines, cols, C), dx.to(dx_ptr.dtype.element_ty), mask=there[:, None])
    for s in tl.range(0, kept):
        xs = load_step(x_ptr, s, 0, rows, cols, C, BP, U, "evict_first")
        dys = load_step(dy_ptr, s, 0, rows, cols, C, BP, U, "evict_first")
        for u in tl.static_range(U):
            lines, there = block_of((s * U + u) * P + p, rows, BP)
            x = recall(xs[u], (s * U + u) * 2, OWN, THREADS).to(tl.float32)
            dy = recall(dys[u], (s * U + u) * 2 + 1, OWN, THREADS).to(tl.float32)
            dx = dy * scale[None, :] + (x * by_x[None, :] + bias[None, :])
            tl.store(addresses(dx_ptr, lines, cols, C), dx.to(dx_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def settle(
    mine, told, counter, t, count, eps, C: tl.constexpr, G: tl.constexpr, CG: tl.constexpr, CG2: tl.constexpr,
    T: tl.constexpr, T2: tl.constexpr,
):  # fmt: skip
    """From means and M2 of the channels of this program's pixels, which are in `mine`, to the mean and rstd of each group
    of the sample: the programs of the team tell each other those of their part."""
    g = tl.arange(0, G)
    inside = tl.arange(0, CG2)
    mask = (inside < CG)[None, :]
    channels = g[:, None] * CG + inside[None, :]
    means = tl.load(mine + channels, mask=mask, other=0.0)
    mean_g = tl.sum(means, 1) / CG
    off_g = tl.where(mask, means - mean_g[:, None], 0.0)
    m2_g = tl.sum(tl.load(mine + C + channels, mask=mask, other=0.0) + off_g * off_g * count, 1)
    tl.store(told + t * G + g, mean_g)
    tl.store(told + (T + t) * G + g, m2_g)
    arrive(counter)
    wait(counter, tl.full((), T, tl.int32))
    q = tl.arange(0, T2)
    there = (q < T)[:, None] & (g < G)[None, :]
    all_means = tl.load(told + q[:, None] * G + g[None, :], mask=there, other=0.0)
    m2s = tl.load(told + (T + q)[:, None] * G + g[None, :], mask=there, other=0.0)
    mean_s = tl.sum(all_means, 0) / T
    off_s = tl.where(there, all_means - mean_s[None, :], 0.0)
    var = tl.sum(m2s + off_s * off_s * (count * CG), 0) / (T * count * CG)
    tl.store(mine + 2 * C + g, mean_s)
    tl.store(mine + 2 * C + G + g, 1.0 / tl.sqrt(var + eps))


@triton.jit
def group_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, counters_ptr, told_ptr, scratch_ptr, samples, pixels, eps, C: tl.constexpr, G: tl.constexpr,
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
        settle(mine, told_ptr + sample * (2 * T * G), counters_ptr + sample, t, count, eps, C, G, CG, CG2, T, T2)
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
    x_ptr, y_ptr, w_ptr, b_ptr, counters_ptr, told_ptr, scratch_ptr, samples, pixels, eps, C: tl.constexpr, G: tl.constexpr,
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
        settle(mine, told_ptr + sample * (2 * T * G), counters_ptr + sample, t, count, eps, C, G, CG, CG2, T, T2)
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
