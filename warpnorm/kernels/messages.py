"""What the programs of a team, of which all run at the same time, tell each other: sums, through global memory.

A message is one 64-bit word: a sum, and another whose last two bits say in which round it was sent, counted to four. It
arrives at once: whoever finds the round has the sums. Four boxes take turns and make a round: who sends its message number
n has the number n - 2 of everybody, who had then sent it and so had read the number n - 4, whose box this is. Numbers go on
from launch to launch, and nothing has to be cleared. A message may have several words. A sum that is never negative leaves
its sign to the round, and one bit less is rounded away."""

import triton
import triton.language as tl

BOXES = tl.constexpr(4)


def receiving(words: int, pack: int, is_asked: bool = False) -> tuple[str, str]:
    """Assembler that waits for some words to carry a round, and gives their halves; and its constraints. `pack` elements of
    each tensor are one thread's: addresses of the first word, of the second, the round; and the two halves of the first
    word, of the second. `is_asked`: the words were read before, if they had come by then, and are handed in first.

    A thread asks for all its words at once, and its warp goes on when they are all there: threads that go on alone would
    take the compiler's slow way through every shuffle after that. A second read, once another thread had seen the word
    arrive, would take as long as the wait. The word is sent by an atomic operation: an ordinary store is overtaken by those
    reads (RMSNorm backward, 16384 columns: 82 % of copy speed, 51 with a store)."""
    count = words * pack
    loads, asked, moves, tests = [], [], [], []
    for k in range(count):
        word, of_pack = divmod(k, pack)
        low, high = (f"${(2 * word + half) * pack + of_pack}" for half in range(2))
        address = (3 if is_asked else 2) * count
        round_of = f"${address + count + of_pack}"
        loads.append(f"ld.relaxed.gpu.global.b64 word_{k}, [${address + k}];")
        asked.append(f"mov.b64 word_{k}, ${2 * count + k};")
        moves.append(f"mov.b64 {{{low}, {high}}}, word_{k};")
        tests.append(f"and.b32 round, {high}, 3;")
        tests.append(f"setp.ne{'.or' if k else ''}.b32 is_other, round, {round_of}{', is_other' if k else ''};")
    lines = [
        "{",
        ".reg .pred is_other;",
        f".reg .b64 {', '.join(f'word_{k}' for k in range(count))};",
        ".reg .b32 round;",
        *(["bra.uni asked;"] if is_asked else []),
        "again:",
        *loads,
        *(["bra.uni here;", "asked:", *asked, "here:"] if is_asked else []),
        *moves,
        *tests,
        "vote.sync.any.pred is_other, is_other, 0xffffffff;",
        "@is_other bra again;",
        "}",
    ]
    constraints = ["=&r"] * (2 * count) + ["l"] * (count * (1 + is_asked)) + ["r"] * pack
    return "\n".join(lines), ",".join(constraints)


RECEIVE, FOR_ONE = map(tl.constexpr, receiving(1, 1))
RECEIVE_PAIR, FOR_PAIR = map(tl.constexpr, receiving(1, 2))
RECEIVE_TWO, FOR_TWO = map(tl.constexpr, receiving(2, 1))
RECEIVE_TWO_PAIRS, FOR_TWO_PAIRS = map(tl.constexpr, receiving(2, 2))
RECEIVE_ASKED, FOR_ONE_ASKED = map(tl.constexpr, receiving(1, 1, True))
RECEIVE_TWO_ASKED, FOR_TWO_ASKED = map(tl.constexpr, receiving(2, 1, True))
ASK = tl.constexpr("ld.relaxed.gpu.global.b64 $0, [$1];")
A_WARP = tl.constexpr(32)  # threads, whose sums take no shared memory
TWO_HALVES = tl.constexpr(64)  # programs whose messages come in two halves, of which a thread has one each


@triton.jit
def member():
    """Which program of its team this is: along the first axis or the last, of which one is 1 (`plan/grid.py`)."""
    return tl.program_id(0) + tl.program_id(2)


@triton.jit
def team_size():
    return tl.num_programs(0) * tl.num_programs(2)


@triton.jit
def team_number():
    return tl.program_id(1)


@triton.jit
def teams():
    return tl.num_programs(1)


@triton.jit
def last_message(mailbox, splits, WORDS: tl.constexpr = 1):
    """The number of the last message that this program sent: the boxes up to it are of the round of the first."""
    own = team_number() * BOXES * WORDS * splits + member()
    first = (tl.load(mailbox + own) >> 32).to(tl.int32) & 3
    number = first * BOXES
    for box in tl.static_range(1, BOXES):
        number += (((tl.load(mailbox + own + box * WORDS * splits) >> 32).to(tl.int32) & 3) == first).to(tl.int32)
    return number


@triton.jit
def box_of(mailbox, number, splits, WORD: tl.constexpr, WORDS: tl.constexpr):
    return mailbox + ((team_number() * BOXES + number % BOXES) * WORDS + WORD) * splits


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
    tl.atomic_xchg(box + member() + tl.arange(0, 1), (high << 32) | low, sem="relaxed", scope="gpu")


@triton.jit
def last_digit(number):
    """What a number that is never negative loses where it leaves its sign to the round: what is left of it, and the digit,
    as the sign of a zero."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits & -2).to(tl.float32, bitcast=True), (bits << 31).to(tl.float32, bitcast=True)


@triton.jit
def with_last_digit(number, digit):
    lowest = (digit.to(tl.int32, bitcast=True) >> 31) & 1
    return (number.to(tl.int32, bitcast=True) | lowest).to(tl.float32, bitcast=True)


@triton.jit
def wait_for(first, second, round, asked, COUNT: tl.constexpr, A_THREAD: tl.constexpr):
    """The halves of words, at the addresses `first`, and `second` if COUNT is 2. `asked`: the words as `ask` found them."""
    if len(asked) == 1:
        return tl.inline_asm_elementwise(
            RECEIVE_ASKED, FOR_ONE_ASKED, [asked[0], first, round], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    elif len(asked) == 2:
        return tl.inline_asm_elementwise(
            RECEIVE_TWO_ASKED, FOR_TWO_ASKED, [asked[0], asked[1], first, second, round],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    elif COUNT == 1 and A_THREAD == 1:
        return tl.inline_asm_elementwise(
            RECEIVE, FOR_ONE, [first, round], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    elif COUNT == 1:
        return tl.inline_asm_elementwise(
            RECEIVE_PAIR, FOR_PAIR, [first, round], dtype=(tl.int32, tl.int32), is_pure=False, pack=2
        )
    elif A_THREAD == 1:
        return tl.inline_asm_elementwise(
            RECEIVE_TWO, FOR_TWO, [first, second, round], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            RECEIVE_TWO_PAIRS, FOR_TWO_PAIRS, [first, second, round], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=2,
        )  # fmt: skip


@triton.jit
def messages(
    mailbox, number, splits, asked, MOST: tl.constexpr, WORD: tl.constexpr = 0, WORDS: tl.constexpr = 1,
    IS_POSITIVE: tl.constexpr = False, COUNT: tl.constexpr = 1, A_THREAD: tl.constexpr = 1,
):  # fmt: skip
    """The two numbers of every program of the team, which has `splits`, (MOST,), and which these are; COUNT: of two words,
    of which the first may be positive. Not as the columns of a tile: a thread would have several of them then, and wait for
    one after another. A_THREAD: two where a thread has two of them."""
    lanes = tl.arange(0, MOST)
    box = box_of(mailbox, number, splits, WORD, WORDS)
    words = (box + tl.minimum(lanes, splits - 1)).to(tl.int64)  # nobody waits for a program that is not there
    found = wait_for(words, words + splits * 8, lanes * 0 + ((number // BOXES) & 3), asked, COUNT, A_THREAD)
    first, second, here = told(found[0], found[1], lanes, splits, IS_POSITIVE)
    if COUNT == 1:
        return first, second, here
    else:
        third, fourth, _ = told(found[2], found[3], lanes, splits, False)
        return first, second, here, third, fourth


@triton.jit
def told(first, second, members, splits, IS_POSITIVE: tl.constexpr):
    """The two halves of words as numbers; those of programs that are not there are zero."""
    second = second & -4
    if IS_POSITIVE:
        second = (second >> 1) & 0x7FFFFFFF
    first = tl.where(members < splits, first.to(tl.float32, bitcast=True), 0.0)
    second = tl.where(members < splits, second.to(tl.float32, bitcast=True), 0.0)
    return first, second, members


@triton.jit
def messages_by_warps(mailbox, number, splits, asked, MOST: tl.constexpr, IS_POSITIVE: tl.constexpr = False):
    """A tuple of them, with as many in each as a warp has threads, so that their sums take no shared memory: one, or two
    (TWO_HALVES), if there are not more. For programs of few warps, each of which asks for all: LayerNorm at 262144 forward
    147 microseconds instead of 163, backward 239 instead of 246. Not for one number, RMSNorm backward 220 instead of 214,
    or many warps, BatchNorm of 64 x 256 x 56 x 56 backward 135 instead of 93."""
    if MOST == TWO_HALVES:
        threads = tl.arange(0, A_WARP)
        round = threads * 0 + ((number // BOXES) & 3)
        here, there = words_by_warps(mailbox, number, splits)
        first, second, first_there, second_there = wait_for(here, there, round, asked, 2, 1)
        return (
            told(first, second, threads, splits, IS_POSITIVE),
            told(first_there, second_there, threads + A_WARP, splits, IS_POSITIVE),
        )
    else:
        return (messages(mailbox, number, splits, asked, MOST, IS_POSITIVE=IS_POSITIVE),)


@triton.jit
def words_by_warps(mailbox, number, splits):
    """Where the words of those two lie."""
    box = box_of(mailbox, number, splits, 0, 1)
    threads = tl.arange(0, A_WARP)
    here = (box + tl.minimum(threads, splits - 1)).to(tl.int64)
    return here, (box + tl.minimum(threads + A_WARP, splits - 1)).to(tl.int64)


@triton.jit
def ask(mailbox, number, splits, MOST: tl.constexpr, IS_BY_WARPS: tl.constexpr):
    """The words of `messages`, or of `messages_by_warps`, as they are now: most have come by then, and what is loaded
    between this and the wait for the others comes at the same time."""
    if IS_BY_WARPS and MOST == TWO_HALVES:
        here, there = words_by_warps(mailbox, number, splits)
        return ask_one(here), ask_one(there)
    else:
        box = box_of(mailbox, number, splits, 0, 1)
        return (ask_one((box + tl.minimum(tl.arange(0, MOST), splits - 1)).to(tl.int64)),)


@triton.jit
def ask_one(words):
    return tl.inline_asm_elementwise(ASK, "=l,l", [words], dtype=tl.int64, is_pure=False, pack=1)


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
