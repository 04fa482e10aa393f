"""How the programs of one launch of pattern `column` tell each other numbers: by words in memory that are zero until they
are there. A number that is zero itself is sent as -0. No word is written twice, so nothing has to be ordered."""

import triton
import triton.language as tl

# The word $1, read at $2; as long as it is zero, it is read again, not so often that it keeps the memory from others. Every
# thread sees to what it has read itself.
WAIT = tl.constexpr(
    """{
    .reg .pred is_there;
    .reg .bBITS word;
    mov.bBITS word, $1;
    again:
    setp.ne.sBITS is_there, word, 0;
    @is_there bra done;
    nanosleep.u32 100;
    ld.relaxed.gpu.global.bBITS word, [$2];
    bra again;
    done:
    mov.bBITS $0, word;
    }"""
)
WAIT_32 = tl.constexpr(WAIT.value.replace("BITS", "32"))
WAIT_64 = tl.constexpr(WAIT.value.replace("BITS", "64"))


@triton.jit
def send(pointers, values, mask):
    """Words that are not zero."""
    bits = values.to(pointers.dtype.element_ty, bitcast=True)
    if pointers.dtype.element_ty == tl.int64:
        bits = tl.where(bits == 0, -9223372036854775808, bits)
    else:
        bits = tl.where(bits == 0, -2147483648, bits)
    tl.store(pointers, bits, mask=mask)


@triton.jit
def ask(pointers, offsets, mask, WAITS: tl.constexpr):
    """For two numbers, which `receive` then waits for: what is loaded between comes meanwhile."""
    return ask_one(pointers[0] + offsets, mask, WAITS), ask_one(pointers[1] + offsets, mask, WAITS)


@triton.jit
def receive(words, pointers, offsets, mask, COMPUTE: tl.constexpr, WAITS: tl.constexpr):
    """Two numbers of each row, once they are there. Without WAITS they are: who sends them came before."""
    first = receive_one(words[0], pointers[0] + offsets, mask, COMPUTE, WAITS)
    return first, receive_one(words[1], pointers[1] + offsets, mask, COMPUTE, WAITS)


@triton.jit
def ask_one(pointers, mask, WAITS: tl.constexpr):
    return tl.load(pointers, mask=mask, other=1, volatile=WAITS)


@triton.jit
def mask_of_rows(row_mask, HAS_ONE: tl.constexpr):
    """Of those of the lines of a tile. All threads read the number of a lone row: once each, as long as it is no tensor."""
    if HAS_ONE:
        return True
    else:
        return row_mask


@triton.jit
def for_lines(pair, HAS_ONE: tl.constexpr):
    """Two numbers for the row of each line."""
    if HAS_ONE:
        return tl.full((1,), 0.0, pair[0].dtype) + pair[0], tl.full((1,), 0.0, pair[1].dtype) + pair[1]
    else:
        return pair


@triton.jit
def receive_one(words, pointers, mask, COMPUTE: tl.constexpr, WAITS: tl.constexpr):
    if WAITS:
        addresses = pointers.to(tl.int64)
        if words.dtype == tl.int64:
            words = tl.inline_asm_elementwise(WAIT_64, "=l,l,l", [words, addresses], tl.int64, is_pure=False, pack=1)
        else:
            words = tl.inline_asm_elementwise(WAIT_32, "=r,r,l", [words, addresses], tl.int32, is_pure=False, pack=1)
    return tl.where(mask, words.to(COMPUTE, bitcast=True), 0.0)
