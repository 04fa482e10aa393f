"""Elementwise functions that Triton's language does not have, or not as PyTorch rounds them; generated source calls them
as `ours`. `place` says where a tile lies: row numbers, column offsets, columns of a row, and the mask."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice as library

from warpnorm.kernels.sums import sums_of
from warpnorm.trace.dropout import OUR_STREAMS

__all__ = ["sums_of"]  # which generated source calls too

FROM_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 high; shl.b32 high, $2, 16; mov.b32 $0, high; and.b32 high, $2, 0xffff0000; mov.b32 $1, high; }"
)
FROM_FLOAT16 = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)
AS_FLOAT16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
FIRST_STREAM = tl.constexpr(OUR_STREAMS)
# What is too large for a float8_e4m3fn is NaN up to PyTorch 2.12, and the largest number from then on
TOO_LARGE = tl.constexpr(int(torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).view(torch.uint8)))
MOVE = tl.constexpr("mov.b32 $0, $1;")
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def held(x, PACK: tl.constexpr):
    """x, but the compiler does not know it: what follows from x is computed again after this, instead of kept in
    registers from before. PACK values are 32 bits. On NVIDIA's GPUs alone."""
    return tl.inline_asm_elementwise(MOVE, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=PACK)


@triton.jit
def widened(x):
    """A half in float32, but the compiler does not know that it is: see `bind.py`. On NVIDIA's GPUs alone."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(FROM_BFLOAT16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(FROM_FLOAT16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def rounded(x):
    """x, but the compiler does not know what it is a product of, to add that up before it is rounded. On NVIDIA's GPUs
    alone."""
    if x.dtype == tl.float64:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=d,d", [x], dtype=x.dtype, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(MOVE, "=f,f", [x], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def as_it_is(x):
    return x


@triton.jit
def kept(x):
    """A float32 as a half, two of them one register, but the compiler does not know what it was. On NVIDIA's GPUs alone."""
    return tl.inline_asm_elementwise(AS_FLOAT16, "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def as_words(low, high):
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | low


@triton.jit
def as_halves(words, DTYPE: tl.constexpr):
    return tl.join(words.to(tl.uint16).to(DTYPE, bitcast=True), (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True))


@triton.jit
def packed(x):
    """Neighbours of two bytes each as one word: (rows, cols) -> (rows, cols // 2)."""
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return as_words(low, high)


@triton.jit
def unpacked(words, DTYPE: tl.constexpr):
    return tl.reshape(as_halves(words, DTYPE), (words.shape[0], words.shape[1] * 2))


@triton.jit
def packed_apart(x):
    """The same of those that lie half of all columns apart: where each is moved alone, they are one thread's."""
    low, high = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return as_words(low, high)


@triton.jit
def unpacked_apart(words, DTYPE: tl.constexpr):
    return tl.reshape(tl.permute(as_halves(words, DTYPE), (0, 2, 1)), (words.shape[0], words.shape[1] * 2))


@triton.jit
def lines(first, cols, COLS: tl.constexpr, LINE: tl.constexpr):
    """Of COLS columns from the first one on, those at which memory has another line of LINE columns."""
    return tl.minimum(first + tl.arange(0, max(COLS // LINE, 1)) * LINE, cols - 1)


@triton.jit
def prefetch(pointers):
    """Has memory bring what lies there to L2, without waiting for it. On NVIDIA's GPUs alone."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def unordered(x):
    """Offsets, of which the compiler does not know that they follow each other: see `bind.py`. On NVIDIA's GPUs alone."""
    if x.dtype == tl.int64:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(MOVE, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def divide(x, y):
    # `/` is off by two units in the last place in float32
    if x.dtype == tl.float32:
        x, y = tl.broadcast(x, y)
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def reciprocal(x):
    return divide(tl.full((1, 1), 1.0, x.dtype), x)


@triton.jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def rsqrt(x):
    return reciprocal(sqrt(x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + library.exp(-x))


@triton.jit
def quick_divide(x, y):
    return x / y  # off by two units in the last place


@triton.jit
def quick_sigmoid(x):
    # The product is a sign that the next instruction takes; a minus would be one of its own
    return library.fast_dividef(tl.full((1, 1), 1.0, tl.float32), 1.0 + library.fast_expf(x * -1.0))


@triton.jit
def quick_tanh(x):
    """Near zero the first terms of the series, for the relative error."""
    square = x * x
    near_zero = x * (((-0.0539682540 * square + 0.1333333333) * square - 0.3333333333) * square + 1.0)
    rest = library.fast_dividef(tl.full((1, 1), 2.0, tl.float32), 1.0 + library.fast_expf(x * 2.0))
    return tl.where(tl.abs(x) < 0.25, near_zero, 1.0 - rest)


@triton.jit
def quick_erf(x):
    """Near zero the first terms of the series, for the relative error."""
    square = x * x
    near_zero = x * (((-0.0268661706 * square + 0.1128379167) * square - 0.3761263890) * square + 1.1283791671)
    return tl.where(tl.abs(x) < 0.25, near_zero, quick_erf_beside_one(x))


@triton.jit
def quick_erf_beside_one(x):
    """Off by 1e-7, where nobody sees the relative error: 1 - 2^p(|x|), p fitted to the logarithm of erfc so that the error
    is the same everywhere. Beyond 4.3 it falls below -29."""
    size = tl.abs(x)
    p = -4.5360924559645355e-05 * size + 0.0004455242305994034
    p = p * size - 0.0014894879423081875
    p = p * size - 0.0007745649782009423
    p = p * size + 0.02825363352894783
    p = p * size - 0.1484815925359726
    p = p * size - 0.9184163808822632
    p = p * size - 1.6279085874557495
    result = (1.0 - tl.exp2(p * size)).to(tl.int32, bitcast=True)
    signed = result | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def normal_distribution(x):
    """(1 + erf(x / sqrt(2))) / 2: as above, of what is left beyond |x|. Off by 8e-6 in proportion, for negative x too, by
    4e-5 from -3 on and 3e-4 from -5 on: a half rounds by 5e-4, and the next better polynomial is an instruction longer."""
    size = tl.abs(x)
    p = -1.4106079788689385e-06 * size + 5.298547330312431e-05
    p = p * size - 0.0008632347453385592
    p = p * size + 0.008251617662608624
    p = p * size - 0.05346496403217316
    p = p * size - 0.4589162766933441
    p = p * size - 1.1510999202728271
    rest = tl.exp2(p * size - 1.0)
    return tl.where(x < 0.0, rest, 1.0 - rest)


@triton.jit
def quick_gelu(x):
    return x * normal_distribution(x)


@triton.jit
def gelu_slope_of(x, distribution):
    return distribution + x * tl.exp2(-0.7213475204444817 * x * x - 1.3257480647361592)


@triton.jit
def quick_gelu_slope(x):
    return gelu_slope_of(x, normal_distribution(x))


@triton.jit
def negate(x):
    # a minus is `0 - x` in Triton, which is not -0.0 for zero
    if x.dtype.is_floating():
        return x * -1.0
    else:
        return -x


@triton.jit
def maximum(x, y):
    """NaN where either is."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def minimum(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)  # zero for NaN, as in PyTorch


@triton.jit
def signbit(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def remainder(x, y):
    """With the sign of the divisor."""
    rest = library.fmod(x, y)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def draw(seed, offset, number, STREAM):
    """Four words, from a number."""
    offset = offset.to(tl.int64)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    drawn = (offset & 0xFFFFFFFF).to(tl.uint32) + low * 0
    last = ((((offset >> 32) & 0x7FFF) << 16) | STREAM | FIRST_STREAM).to(tl.uint32) + low * 0
    return tl.philox(seed.to(tl.int64), low, high, drawn, last)


@triton.jit
def keep(seed, offset, place, THRESHOLD, SCALE, STREAM, IS_BY_FOUR: tl.constexpr):
    """Of a dropout: SCALE or zero, drawn from the element's number. trace/dropout.py has the same in PyTorch. IS_BY_FOUR:
    rows have a multiple of four columns, so that four neighbours of a row have the words of one draw."""
    COLS: tl.constexpr = place[1].shape[0]
    if IS_BY_FOUR and COLS % 4 == 0:
        ROWS: tl.constexpr = place[0].shape[0]
        even, _ = tl.split(tl.reshape(place[1], (COLS // 4, 2, 2)))
        first, _ = tl.split(even)
        number = place[0].to(tl.int64)[:, None] * (place[2] // 4) + (first // 4)[None, :]
        a, b, c, d = draw(seed, offset, number, STREAM)
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS))
    else:
        element = place[0].to(tl.int64)[:, None] * place[2] + place[1][None, :]
        a, b, c, d = draw(seed, offset, element >> 2, STREAM)
        which = (element & 3).to(tl.int32)
        word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    return tl.where(word >= tl.full((1, 1), THRESHOLD, tl.uint32), SCALE, 0.0)


@triton.jit
def to_e4m3fn(x):
    """float32 -> the bits of a float8_e4m3fn, to nearest even, as PyTorch rounds."""
    bits = x.to(tl.int32, bitcast=True)
    sign_bit = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # below 2^-6 by adding a number whose last bit is worth 2^-9
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    odd = (magnitude >> 20) & 1
    usual = (magnitude - 0x3C000000 + 0x7FFFF + odd) >> 20
    code = tl.where(magnitude < 0x3C800000, small, usual)
    code = tl.where(magnitude > 0x43E80000, TOO_LARGE, code)  # 464, half a step past the largest
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign_bit).to(tl.uint8)


@triton.jit
def to_e4m3fn_at_once(x):
    """The same, by an instruction that NVIDIA's GPUs have from compute capability 8.9 on. What is too large is the largest
    number for it."""
    if TOO_LARGE == 0x7F:
        x = tl.where(tl.abs(x) > 464.0, float("nan"), x)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3fn(code):
    bits = code.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def by_way_of_e4m3fn(x):
    return from_e4m3fn(to_e4m3fn(x))


@triton.jit
def to_e5m2(x):
    """float32 -> the bits of a float8_e5m2, to nearest even, infinite where it is too large, as PyTorch rounds."""
    bits = x.to(tl.int32, bitcast=True)
    sign_bit = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # below 2^-14 by adding a number whose last bit is worth 2^-16
    small = (magnitude.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    odd = (magnitude >> 21) & 1
    usual = (magnitude - 0x38000000 + 0xFFFFF + odd) >> 21
    code = tl.where(magnitude < 0x38800000, small, usual)
    code = tl.where(magnitude >= 0x47800000, tl.where(magnitude > 0x7F800000, 0x7F, 0x7C), code)
    return (code | sign_bit).to(tl.uint8)


@triton.jit
def from_e5m2(code):
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def by_way_of_e5m2(x):
    return from_e5m2(to_e5m2(x))
