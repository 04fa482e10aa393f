"""Slots of shared memory, in which a program keeps what it has loaded from one visit to the next. They lie at the end of it,
behind what the compiler itself uses; `codegen/kernel.py` asks for so much more. A slot has 16 bytes for each thread, which
stores them and later loads them itself, so that nothing has to be synchronized. It must have the same elements then: what
comes out of a slot passes through the load that put it there, masked, and both have the layout of that load."""

import triton
import triton.language as tl

THREAD_BYTES = 16  # of a slot

# The address of what a thread has in the slot SLOT; below zero there is none
PLACE = """
    .reg .pred is_slot;
    .reg .b32 place, more, threads;
    setp.ge.s32 is_slot, SLOT, 0;
    mov.u32 threads, %ntid.x;
    mad.lo.u32 more, SLOT, threads, threads;
    mov.u32 place, %tid.x;
    sub.u32 place, place, more;
    shl.b32 place, place, 4;
    mov.u32 more, %dynamic_smem_size;
    add.u32 place, place, more;
    mov.u32 more, global_smem;
    add.u32 place, place, more;"""
PUT = """{PLACE
    @is_slot st.shared.v4.b32 [place], {WORDS};
    RESULTS
}"""
TAKE = """{PLACE
    .reg .b32 word<4>;
    mov.b32 word0, $4;
    mov.b32 word1, $5;
    mov.b32 word2, $6;
    mov.b32 word3, $7;
    @is_slot ld.shared.v4.b32 {word0, word1, word2, word3}, [place];
    mov.b32 $0, word0;
    mov.b32 $1, word1;
    mov.b32 $2, word2;
    mov.b32 $3, word3;
}"""


def _put(results: int) -> tl.constexpr:
    """Instructions must have results: bytes, which nobody reads."""
    words = ", ".join(f"${results + k}" for k in range(4))
    place = PLACE.replace("SLOT", f"${results + 4}")
    empty = " ".join(f"mov.b32 ${k}, 0;" for k in range(results))
    return tl.constexpr(PUT.replace("PLACE", place).replace("WORDS", words).replace("RESULTS", empty))


def _operands(results: int, slots: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=r"] * results + ["r"] * (4 + slots)))


PUT_WORDS, PUT_HALVES = _put(1), _put(2)
TAKE_16_BYTES = tl.constexpr(TAKE.replace("PLACE", PLACE.replace("SLOT", "$8")))
OF_PUT_WORDS, OF_PUT_HALVES = _operands(1, 4), _operands(2, 8)
OF_WORDS, OF_HALVES = _operands(4, 4), _operands(4, 8)


@triton.jit
def put(values, slot):
    """Into the slot, if it is not below zero: 16 bytes for each thread."""
    slots = tl.zeros(values.shape, tl.int32) + slot
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
        tl.inline_asm_elementwise(PUT_HALVES, OF_PUT_HALVES, [bits, slots], dtype=tl.int8, is_pure=False, pack=8)
    else:
        bits = values.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(PUT_WORDS, OF_PUT_WORDS, [bits, slots], dtype=tl.int8, is_pure=False, pack=4)


@triton.jit
def take(values, slot):
    """What is in the slot; the values, if it is below zero."""
    slots = tl.zeros(values.shape, tl.int32) + slot
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
        found = tl.inline_asm_elementwise(
            TAKE_16_BYTES, OF_HALVES, [bits, slots], dtype=tl.int16, is_pure=False, pack=8
        )
        return found.to(values.dtype, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        found = tl.inline_asm_elementwise(TAKE_16_BYTES, OF_WORDS, [bits, slots], dtype=tl.int32, is_pure=False, pack=4)
        return found.to(values.dtype, bitcast=True)
