"""Access pattern `team`: a row is shared by SPLITS programs that run at the same time, each with BLOCK_COLS of its columns
in registers. They exchange the sums over their columns through global memory, so every element is read once. The loop over
rows is that of `row.py`; here is the exchange.

A message is one 64-bit word: a sum, and another whose last two bits are the number of the exchange, counted round to four.
It arrives at once: whoever finds the number has the sums. Two boxes take turns, so that the number before in the same box
is off by two: a program writes into a box again only after it has read the other box of everybody, who had then read this
one. Numbers go on from launch to launch, and nothing has to be cleared."""

import triton
import triton.language as tl

# Waits for the word at $2 to carry the number $3, and gives its two halves. Every thread waits for itself: a second read,
# once another thread had seen the word arrive, would take as long as the wait. The word is sent by an atomic operation: an
# ordinary store is overtaken by those reads (RMSNorm backward, 16384 columns: 82 % of copy speed, 51 with a store).
RECEIVE = tl.constexpr(
    """{
    .reg .pred is_other;
    .reg .b64 word;
    .reg .b32 low, high, number;
    again:
    ld.relaxed.gpu.global.b64 word, [$2];
    mov.b64 {low, high}, word;
    and.b32 number, high, 3;
    setp.ne.b32 is_other, number, $3;
    @is_other bra again;
    mov.b32 $0, low;
    mov.b32 $1, high;
    }"""
)


@triton.jit
def last_exchange(mailbox, SPLITS: tl.constexpr):
    """The number of the last exchange that this program took part in: of its words in the two boxes, the later one."""
    own = tl.program_id(0) * 2 * SPLITS + tl.program_id(1)
    first = (tl.load(mailbox + own) >> 32).to(tl.int32) & 3
    second = (tl.load(mailbox + own + SPLITS) >> 32).to(tl.int32) & 3
    return tl.where(((second - first) & 3) == 1, second, first)


@triton.jit
def exchange(sums, mailbox, number, SPLITS: tl.constexpr, IS_CENTERED: tl.constexpr):
    """The sums over the team of each program's sums, (1,), added in the same order by all."""
    number = number & 3
    box = mailbox + (tl.program_id(0) * 2 + (number & 1)) * SPLITS
    low = sums[0].to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    if IS_CENTERED:
        high = ((sums[1].to(tl.int32, bitcast=True) & -4) | number).to(tl.int64)
    else:
        high = tl.zeros((1,), tl.int64) + number
    tl.atomic_xchg(box + tl.program_id(1) + tl.arange(0, 1), (high << 32) | low, sem="relaxed", scope="gpu")
    members = tl.arange(0, SPLITS)
    first, second = tl.inline_asm_elementwise(
        RECEIVE, "=r,=r,l,r", [(box + members).to(tl.int64), members * 0 + number],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    total = tl.zeros((1,), tl.float32) + tl.sum(first.to(tl.float32, bitcast=True), 0)
    if IS_CENTERED:
        return total, tl.zeros((1,), tl.float32) + tl.sum((second & -4).to(tl.float32, bitcast=True), 0)
    else:
        return (total,)
