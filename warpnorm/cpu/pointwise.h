/* Elementwise functions for generated code, written so that the compiler can vectorize the loops that call them: no
   branches, no errno. Suffix f: float, d: double. NaN and infinities behave. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_f(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float from_bits_f(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE uint64_t bits_d(double x) { uint64_t b; memcpy(&b, &x, 8); return b; }
INLINE double from_bits_d(uint64_t b) { double x; memcpy(&x, &b, 8); return x; }

/* Moments of all that was seen so far, joined by Chan's formula with those of `count` numbers, of whose deviations from a
   pivot there are the sum and the sum of squares. */

#define JOIN(T, s) \
    INLINE void join_##s(T *mean, T *m2, double *seen, double pivot, T off, T squares, double count) { \
        double all = *seen + count; \
        T shift = off / (T)count, delta = (T)pivot + shift - *mean, inside = squares - shift * off; \
        *m2 += (inside < 0 ? 0 : inside) + delta * delta * (T)(*seen / all * count); \
        *mean += delta * (T)(count / all); \
        *seen = all; \
    }
JOIN(double, f) JOIN(long double, d)

/* 16 bits, rounded to nearest even */

INLINE float load_bf16(uint16_t h) { return from_bits_f((uint32_t)h << 16); }
INLINE uint16_t store_bf16(float x) {
    uint32_t b = bits_f(x);
    uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
INLINE float load_fp16(uint16_t h) {
    uint32_t magnitude = ((uint32_t)h & 0x7fffu) << 13;
    uint32_t usual = bits_f(from_bits_f(magnitude) * 0x1p112f); /* subnormals too */
    uint32_t special = magnitude | 0x7f800000u;
    return from_bits_f((magnitude >= 0x0f800000u ? special : usual) | (((uint32_t)h & 0x8000u) << 16));
}
INLINE uint16_t store_fp16(float x) {
    uint32_t b = bits_f(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
    /* below 2^-14 by adding a number whose last bit is worth 2^-24 */
    uint32_t small = bits_f(from_bits_f(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t usual = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t code = magnitude < 0x38800000u ? small : usual;
    code = magnitude >= 0x477ff000u ? 0x7c00u : code;
    code = magnitude > 0x7f800000u ? 0x7e00u : code;
    return (uint16_t)(code | sign);
}
INLINE float round_fp16_f(float x) { return load_fp16(store_fp16(x)); }
INLINE float round_bf16_f(float x) { return load_bf16(store_bf16(x)); }
INLINE double round_fp16_d(double x) { return round_fp16_f((float)x); }
INLINE double round_bf16_d(double x) { return round_bf16_f((float)x); }
INLINE double round_fp32_d(double x) { return (float)x; }

/* 8 bits, rounded to nearest even. TOO_LARGE is what PyTorch makes of a number past the largest e4m3fn */

INLINE float load_e5m2(uint8_t b) { return load_fp16((uint16_t)((uint16_t)b << 8)); }
INLINE float load_e4m3fn(uint8_t b) {
    uint32_t sign = ((uint32_t)b & 0x80u) << 24, magnitude = (uint32_t)b & 0x7fu;
    uint32_t usual = bits_f(from_bits_f(magnitude << 20) * 0x1p120f); /* subnormals too */
    return from_bits_f((magnitude == 0x7fu ? 0x7fc00000u : usual) | sign);
}
INLINE uint8_t store_e5m2(float x) {
    uint32_t b = bits_f(x), magnitude = b & 0x7fffffffu;
    uint32_t small = bits_f(from_bits_f(magnitude) + 128.0f) - 0x43000000u; /* whose last bit is worth 2^-16 */
    uint32_t usual = (magnitude - 0x38000000u + 0xfffffu + ((magnitude >> 21) & 1u)) >> 21;
    uint32_t code = magnitude < 0x38800000u ? small : usual;
    code = magnitude >= 0x47800000u ? 0x7cu : code;
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(code | (b >> 24 & 0x80u));
}
INLINE uint8_t store_e4m3fn(float x) {
    uint32_t b = bits_f(x), magnitude = b & 0x7fffffffu;
    uint32_t small = bits_f(from_bits_f(magnitude) + 16384.0f) - 0x46800000u; /* whose last bit is worth 2^-9 */
    uint32_t usual = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    uint32_t code = magnitude < 0x3c800000u ? small : usual;
    code = magnitude > 0x43e80000u ? TOO_LARGE : code;
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(code | (b >> 24 & 0x80u));
}
INLINE float round_e4m3fn_f(float x) { return load_e4m3fn(store_e4m3fn(x)); }
INLINE double round_e4m3fn_d(double x) { return round_e4m3fn_f((float)x); }
INLINE float round_e5m2_f(float x) { return load_e5m2(store_e5m2(x)); }
INLINE double round_e5m2_d(double x) { return round_e5m2_f((float)x); }

/* blocks of them, by the processor's own instruction where it has one */

#ifdef __F16C__
#include <immintrin.h>
#endif

INLINE void stage_fp16(float *to, const uint16_t *from, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16) {
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
    }
#endif
#ifdef __F16C__
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++) to[i] = load_fp16(from[i]);
}
INLINE void unstage_fp16(uint16_t *to, const float *from, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16) {
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#ifdef __F16C__
    for (; i + 8 <= count; i += 8) {
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; i++) to[i] = store_fp16(from[i]);
}

/* float */

/* Of x, which may be NaN, and a number: NaN or that number, whichever takes one instruction. On x86 that is a choice, on ARM,
   where a choice takes five if one of both may be NaN, the library's function, which has the number then */
#ifdef __aarch64__
INLINE float at_most_f(float x, float most) { return fminf(x, most); }
INLINE float at_least_f(float x, float least) { return fmaxf(x, least); }
INLINE float or_nan_f(float r, float x) { return from_bits_f(bits_f(r) | -(uint32_t)(x != x)); }
#else
INLINE float at_most_f(float x, float most) { return x > most ? most : x; }
INLINE float at_least_f(float x, float least) { return x < least ? least : x; }
INLINE float or_nan_f(float r, float x) { (void)x; return r; }
#endif

/* e^r of -ln(2)/2 <= r <= ln(2)/2, where y = r + n ln(2) */
INLINE float exp_rest_f(float y, float n) {
    float r = fmaf(n, -0.693145752f, y);
    r = fmaf(n, -1.42860677e-6f, r);
    float p = 1.37805939e-3f;
    p = fmaf(p, r, 8.37312452e-3f);
    p = fmaf(p, r, 4.16695364e-2f);
    p = fmaf(p, r, 1.66664720e-1f);
    p = fmaf(p, r, 4.99999851e-1f);
    p = fmaf(p, r, 1.0f);
    return fmaf(p, r, 1.0f);
}
INLINE float power_of_two_f(int32_t n) { return from_bits_f((uint32_t)(n + 127) << 23); }
INLINE float exp_of_number_f(float x) {
    float y = at_least_f(at_most_f(x, 89.0f), -104.0f);
    float n = rintf(y * 1.44269504f);
    float p = exp_rest_f(y, n);
    int32_t whole = (int32_t)n, half = whole >> 1; /* in two steps: the result may be subnormal, or infinite */
    p *= power_of_two_f(half);
    return p * power_of_two_f(whole - half);
}
INLINE float exp_f(float x) { return or_nan_f(exp_of_number_f(x), x); }
/* of -87 <= x <= 88, where the result is an ordinary number */
INLINE float exp_within_f(float x) {
    float n = rintf(x * 1.44269504f);
    return exp_rest_f(x, n) * power_of_two_f((int32_t)n);
}
/* 1 / d of 1 <= d < 2^126: a first guess is off by an eighth, each step cubes that; a division takes twice as long on x86 */
#ifdef __aarch64__
INLINE float inverse_f(float d) { return 1.0f / d; }
#else
INLINE float inverse_f(float d) {
    float r = from_bits_f(0x7ef311c7u - bits_f(d));
    float e = fmaf(-d, r, 1.0f);
    r = fmaf(r, fmaf(e, e, e), r);
    e = fmaf(-d, r, 1.0f);
    return fmaf(r, fmaf(e, e, e), r);
}
#endif
INLINE float sigmoid_f(float x) {
    float y = at_most_f(at_least_f(x, -87.0f), 87.0f); /* past these there is nothing to see but zero and one */
    float n = rintf(y * -1.44269504f);
    float r = inverse_f(fmaf(exp_rest_f(-y, n), power_of_two_f((int32_t)n), 1.0f));
    return or_nan_f(x < -88.0f ? 0.0f : r, x);
}
INLINE float tanh_f(float x) {
    float s = x * x, size = fabsf(x);
    float p = -5.70498872745e-3f;
    p = fmaf(p, s, 2.06390887954e-2f);
    p = fmaf(p, s, -5.37397155531e-2f);
    p = fmaf(p, s, 1.33314422036e-1f);
    p = fmaf(p, s, -3.33332819422e-1f);
    float near = copysignf(fmaf(p * s, x, x), x);
    float far = copysignf(1.0f - 2.0f * inverse_f(exp_within_f(2.0f * at_most_f(size, 40.0f)) + 1.0f), x);
    return size >= 0.625f ? far : near; /* which is NaN where x is */
}
INLINE float erf_f(float x) {
    float size = fabsf(x), t = at_most_f(size, 4.0f), s = t * t; /* past which it is one */
    float far = fmaf(-1.72853470e-5f, t, 3.83197126e-4f);
    float u = fmaf(-3.88396438e-3f, t, 2.42546219e-2f);
    far = fmaf(far, s, u);
    far = fmaf(far, t, -1.06777877e-1f);
    far = fmaf(far, t, -6.34846687e-1f);
    far = fmaf(far, t, -1.28717512e-1f);
    far = fmaf(far, t, -t);
    far = copysignf(1.0f - exp_within_f(far), x);
    float near = -5.96761703e-4f;
    near = fmaf(near, s, 4.99119423e-3f);
    near = fmaf(near, s, -2.67681349e-2f);
    near = fmaf(near, s, 1.12819925e-1f);
    near = fmaf(near, s, -3.76125336e-1f);
    near = fmaf(near, s, 1.28379166e-1f);
    near = fmaf(near, x, x);
    return size > 0.927734375f ? far : near;
}

/* what the C library has; erf and tanh of double too. VECTOR_MATH: it has them for whole vectors, off by four units in the
   last place at the most, by a third of one in the mean */

#ifdef VECTOR_MATH
#define VECTOR(one) \
    __attribute__((__simd__("notinbranch"))) extern float one##f(float); \
    __attribute__((__simd__("notinbranch"))) extern double one(double);
VECTOR(exp) VECTOR(expm1) VECTOR(exp2) VECTOR(log) VECTOR(log2) VECTOR(log10) VECTOR(log1p) VECTOR(sin) VECTOR(cos)
VECTOR(tan) VECTOR(asin) VECTOR(acos) VECTOR(atan) VECTOR(sinh) VECTOR(cosh) VECTOR(tanh) VECTOR(erf) VECTOR(erfc)
__attribute__((__simd__("notinbranch"))) extern float powf(float, float);
__attribute__((__simd__("notinbranch"))) extern double pow(double, double);
#endif

#define BOTH(name, one) \
    INLINE float name##_f(float x) { return one##f(x); } \
    INLINE double name##_d(double x) { return one(x); }
BOTH(expm1, expm1) BOTH(exp2, exp2) BOTH(log, log) BOTH(log2, log2) BOTH(log10, log10) BOTH(log1p, log1p) BOTH(sqrt, sqrt)
BOTH(sin, sin) BOTH(cos, cos) BOTH(tan, tan) BOTH(asin, asin) BOTH(acos, acos) BOTH(atan, atan) BOTH(sinh, sinh)
BOTH(cosh, cosh) BOTH(erfc, erfc) BOTH(floor, floor) BOTH(ceil, ceil) BOTH(round, rint) BOTH(trunc, trunc) BOTH(abs, fabs)
#if defined(__aarch64__) && !defined(VECTOR_MATH)
/* off by one unit in the last place at the most, as PyTorch's is */
INLINE double power_of_two_d(int64_t n) { return from_bits_d((uint64_t)(n + 1023) << 52); }
INLINE double exp_d(double x) {
    double y = fmax(fmin(x, 710.0), -746.0), n = rint(y * 1.4426950408889634);
    double r = fma(n, -0x1.abc9e3b39803fp-56, fma(n, -0x1.62e42fefa39efp-1, y));
    double p = 1.0 / 6227020800;
    p = fma(p, r, 1.0 / 479001600);
    p = fma(p, r, 1.0 / 39916800);
    p = fma(p, r, 1.0 / 3628800);
    p = fma(p, r, 1.0 / 362880);
    p = fma(p, r, 1.0 / 40320);
    p = fma(p, r, 1.0 / 5040);
    p = fma(p, r, 1.0 / 720);
    p = fma(p, r, 1.0 / 120);
    p = fma(p, r, 1.0 / 24);
    p = fma(p, r, 1.0 / 6);
    p = fma(p, r, 0.5);
    p = fma(p, r * r, r) + 1.0;
    int64_t whole = (int64_t)n, half = whole >> 1; /* in two steps: the result may be subnormal, or infinite */
    p = p * power_of_two_d(half) * power_of_two_d(whole - half);
    return from_bits_d(bits_d(p) | -(uint64_t)(x != x));
}
#else
INLINE double exp_d(double x) { return exp(x); }
#endif
INLINE double tanh_d(double x) { return tanh(x); }
INLINE double erf_d(double x) { return erf(x); }
INLINE double sigmoid_d(double x) { return 1.0 / (1.0 + exp_d(-x)); }

#define GENERIC(T, s, one) \
    INLINE T rsqrt_##s(T x) { return (T)1 / sqrt_##s(x); } \
    INLINE T pow_##s(T x, T y) { return pow##one(x, y); } \
    INLINE T fmod_##s(T x, T y) { return fmod##one(x, y); } \
    INLINE T maximum_##s(T x, T y) { return (x > y) | (x != x) ? x : y; } /* NaN where either is */ \
    INLINE T minimum_##s(T x, T y) { return (x < y) | (x != x) ? x : y; } \
    INLINE T sign_##s(T x) { return (T)((x > 0) - (x < 0)); } \
    INLINE T remainder_##s(T x, T y) { \
        T rest = fmod##one(x, y); \
        return (rest != 0) & ((rest < 0) != (y < 0)) ? rest + y : rest; \
    }
GENERIC(float, f, f) GENERIC(double, d, )
INLINE int64_t maximum_i(int64_t x, int64_t y) { return x > y ? x : y; }
INLINE int64_t minimum_i(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t sign_i(int64_t x) { return (x > 0) - (x < 0); }
INLINE int64_t abs_i(int64_t x) { return x < 0 ? (int64_t)(0 - (uint64_t)x) : x; }

INLINE int32_t signbit_f(float x) { return (int32_t)(bits_f(x) >> 31); }
INLINE int32_t signbit_d(double x) { return (int32_t)(bits_d(x) >> 63); }

/* Of a dropout: whether an element is kept, drawn from its number. trace/dropout.py has the same in PyTorch. */
typedef struct { uint32_t word[4]; } draw_t;
INLINE draw_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b, c3 = (uint32_t)a, c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    draw_t found = {{c0, c1, c2, c3}};
    return found;
}
INLINE draw_t draw(int64_t seed, int64_t offset, int64_t number, uint32_t stream) {
    uint32_t last = (uint32_t)(((offset >> 32) & 0x7FFF) << 16) | stream | 0x80000000u;
    return philox((uint32_t)number, (uint32_t)(number >> 32), (uint32_t)offset, last, (uint32_t)seed, (uint32_t)(seed >> 32));
}
INLINE int32_t keep(int64_t seed, int64_t offset, int64_t element, uint32_t threshold, uint32_t stream) {
    draw_t found = draw(seed, offset, element >> 2, stream);
    uint32_t even = element & 2 ? found.word[2] : found.word[0], odd = element & 2 ? found.word[3] : found.word[1];
    return (element & 1 ? odd : even) >= threshold;
}
/* The words of `count` elements from `first` on: where they begin, of eight more at the most. */
INLINE const uint32_t *draw_all(uint32_t *words, int64_t seed, int64_t offset, int64_t first, int64_t count, uint32_t stream) {
    const int64_t from = first >> 2, draws = ((first + count + 3) >> 2) - from;
#pragma omp simd
    for (int64_t k = 0; k < draws; k++) {
        draw_t found = draw(seed, offset, from + k, stream);
        words[4 * k] = found.word[0], words[4 * k + 1] = found.word[1];
        words[4 * k + 2] = found.word[2], words[4 * k + 3] = found.word[3];
    }
    return words + (first & 3);
}
