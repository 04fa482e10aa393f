"""What the programs of a team, of which all run at the same time, tell each other: sums, through global memory.

A message is one 64-bit word: a sum, and another whose last two bits say in which round it was sent, counted to four. It
arrives at once: whoever finds the round has the sums. Four boxes take turns and make a round: who sends its message number
n has the number n - 2 of everybody, who had then sent it and so had read the number n - 4, whose box this is. Numbers go on
from launch to launch, and nothing has to be cleared. A message may have several words. A sum that is never negative leaves
its sign to the round, and one bit less is rounded away."""

import triton
import triton.language as tl

BOXES = tl.constexpr(4)

# Waits for the word at $2 to carry the round $3, and gives its two halves. Every thread waits for itself: a second read,
# once another thread had seen the word arrive, would take as long as the wait. The word is sent by an atomic operation: an
# ordinary store is overtaken by those reads (RMSNorm backward, 16384 columns: 82 % of copy speed, 51 with a store).
RECEIVE = tl.constexpr(
    """{
    .reg .pred is_other;
    .reg .b64 word;
    .reg .b32 low, high, round;
    again:
    ld.relaxed.gpu.global.b64 word, [$2];
    mov.b64 {low, high}, word;
    and.b32 round, high, 3;
    setp.ne.b32 is_other, round, $3;
    @is_other bra again;
    mov.b32 $0, low;
    mov.b32 $1, high;
    }"""
)


@triton.jit
def last_message(mailbox, splits, WORDS: tl.constexpr = 1):
    """The number of the last message that this program sent: the boxes up to it are of the round of the first."""
    own = tl.program_id(0) * BOXES * WORDS * splits + tl.program_id(1)
    first = (tl.load(mailbox + own) >> 32).to(tl.int32) & 3
    number = first * BOXES
    for box in tl.static_range(1, BOXES):
        number += (((tl.load(mailbox + own + box * WORDS * splits) >> 32).to(tl.int32) & 3) == first).to(tl.int32)
    return number


@triton.jit
def box_of(mailbox, number, splits, WORD: tl.constexpr, WORDS: tl.constexpr):
    return mailbox + ((tl.program_id(0) * BOXES + number % BOXES) * WORDS + WORD) * splits


@triton.jit
def send(
    sums, mailbox, number, splits, IS_CENTERED: tl.constexpr, WORD: tl.constexpr = 0, WORDS: tl.constexpr = 1,
    IS_POSITIVE: tl.constexpr = False,
):  # fmt: skip
    """This program's sums, (1,), one or two (IS_CENTERED), to the others and to itself. The second is rounded: it loses two
    bits, or one (IS_POSITIVE)."""
    round = (number // BOXES) & 3
    low = sums[0].to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    if IS_CENTERED:
        bits = sums[1].to(tl.int32, bitcast=True)
        bits += tl.where(sums[1] == sums[1], 1 if IS_POSITIVE else 2, 0)  # the largest of NaN's would become a zero
        if IS_POSITIVE:
            bits = bits << 1
        high = ((bits & -4) | round).to(tl.int64)
    else:
        high = tl.zeros((1,), tl.int64) + round
    box = box_of(mailbox, number, splits, WORD, WORDS)
    tl.atomic_xchg(box + tl.program_id(1) + tl.arange(0, 1), (high << 32) | low, sem="relaxed", scope="gpu")


@triton.jit
def messages(
    mailbox, number, splits, MOST: tl.constexpr, WORD: tl.constexpr = 0, WORDS: tl.constexpr = 1,
    IS_POSITIVE: tl.constexpr = False,
):  # fmt: skip
    """The two numbers of every program of the team, which has `splits`, (MOST,), and which these are. Not as the columns of
    a tile: a thread would have several of them then, and wait for one after another."""
    lanes = tl.arange(0, MOST)
    members = tl.minimum(lanes, splits - 1)  # nobody waits for a program that is not there
    first, second = tl.inline_asm_elementwise(
        RECEIVE, "=r,=r,l,r",
        [(box_of(mailbox, number, splits, WORD, WORDS) + members).to(tl.int64), members * 0 + ((number // BOXES) & 3)],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    second = second & -4
    if IS_POSITIVE:
        second = (second >> 1) & 0x7FFFFFFF
    first = tl.where(lanes < splits, first.to(tl.float32, bitcast=True), 0.0)
    second = tl.where(lanes < splits, second.to(tl.float32, bitcast=True), 0.0)
    return first, second, lanes


MULTIPLY_32, MULTIPLY_64 = tl.constexpr("mul.rn.f32 $0, $1, $2;"), tl.constexpr("mul.rn.f64 $0, $1, $2;")


@triton.jit
def product(a, b):
    """Of what is added up next, each number by a thread of its own. Rounded all the same: a thread that adds its product to
    another's before it rounds it has another sum than that one, and so on; each would find a mean of its own."""
    if a.dtype == tl.float64:
        return tl.inline_asm_elementwise(MULTIPLY_64, "=d,d,d", [a, b], dtype=tl.float64, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(MULTIPLY_32, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def of_row(number):
    return tl.zeros((1,), tl.float32) + number
