/* Products of matrix rows in the canonical form of packing.py: what native.c and layer.c share.

   weight = (q - 2^(bits-1)) * scale + offset, one scale and offset (bfloat16) per `group` values of a row. A row is a
   sequence of chunks of 32 values; a chunk of 4 bits is 16 bytes whose low nibbles are values 0..15 and whose high
   nibbles are values 16..31 (packing.py describes the other widths). */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#include <immintrin.h>
#define HAS_BF16_DOT 1
#endif

#define CHUNK 32
#define LANES 8
#define VECTORS (CHUNK / LANES)
#define ROWS_AT_ONCE 4 /* activation rows that share one unpacking of the weights: their sums fit the registers */
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef uint8_t bytes8 __attribute__((vector_size(LANES)));
typedef uint16_t halves8 __attribute__((vector_size(2 * LANES)));
typedef int32_t ints8 __attribute__((vector_size(4 * LANES)));
typedef uint32_t words8 __attribute__((vector_size(4 * LANES)));
typedef float floats8 __attribute__((vector_size(4 * LANES)));
enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

INLINE bf16 narrow(float value) { /* to nearest even, as torch rounds */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN: rounding could make an infinity of it */
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE ints8 widen_bytes(bytes8 bytes) { /* in two steps: gcc 12 takes the one step lane by lane */
    return __builtin_convertvector(__builtin_convertvector(bytes, halves8), ints8);
}

/* Values 8v..8v+7 of a plane of `width` bits. Widened before they are shifted: vector units shift no bytes. */
INLINE ints8 plane_values(const uint8_t *plane, int width, int v) {
    bytes8 bytes;
    if (width == 1) { /* 4 bytes: byte j holds values j, j + 4, j + 8, ... */
        memcpy(&bytes, plane, 4);
        memcpy((uint8_t *)&bytes + 4, plane, 4);
        return (widen_bytes(bytes) >> ((ints8){0, 0, 0, 0, 1, 1, 1, 1} + 2 * v)) & 1;
    }
    memcpy(&bytes, plane + LANES * v % (4 * width), LANES);
    return (widen_bytes(bytes) >> (LANES * v / (4 * width) * width)) & ((1 << width) - 1);
}

/* The 32 values of a chunk, less their middle. `bits` is a constant wherever this is inlined. */
INLINE void unpack_chunk(const uint8_t *packed, int bits, floats8 *values) {
    for (int v = 0; v < VECTORS; v++) {
        ints8 q = plane_values(packed, bits == 3 ? 2 : bits, v);
        if (bits == 3) q |= plane_values(packed + 8, 1, v) << 2;
        values[v] = __builtin_convertvector(q - (1 << (bits - 1)), floats8);
    }
}

/* sums[m * groups + g] = sum of x over a group: what the offsets are multiplied by. */
static void group_sums(const void *x, float *sums, int64_t count, int64_t group, int dtype) {
    for (int64_t g = 0; g < count; g++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = g * group; k < (g + 1) * group; k++)
            sum += dtype == FLOAT32 ? ((const float *)x)[k] : widen(((const bf16 *)x)[k]);
        sums[g] = sum;
    }
}

INLINE float offset_term(const bf16 *offset, const float *sums, int64_t groups) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t g = 0; g < groups; g++) total += widen(offset[g]) * sums[g];
    return total;
}

/* One row of W against `M` rows of float32 x. */
INLINE void dot_float(int M, const float *x, const uint8_t *packed, const bf16 *scale, int64_t K, int bits,
                      int64_t group, float *result) {
    floats8 total[ROWS_AT_ONCE] = {{0}};
    for (int64_t k = 0; k < K; k += CHUNK) {
        floats8 values[VECTORS];
        unpack_chunk(packed + k * bits / 8, bits, values);
        for (int m = 0; m < M; m++) {
            floats8 sum = {0};
            for (int v = 0; v < VECTORS; v++) {
                floats8 activations;
                memcpy(&activations, x + m * K + k + LANES * v, sizeof activations);
                sum += values[v] * activations;
            }
            total[m] += sum * widen(scale[k / group]);
        }
    }
    for (int m = 0; m < M; m++) {
        result[m] = 0;
        for (int i = 0; i < LANES; i++) result[m] += total[m][i];
    }
}

#ifdef HAS_BF16_DOT
/* The same for 4 bits and bfloat16 x: products of bfloat16 pairs are summed in float32, scales multiply group sums. */
INLINE void dot_bf16_4bit(int M, const bf16 *x, const uint8_t *packed, const bf16 *scale, int64_t K, int64_t group,
                          float *result) {
    const __m512 levels = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    const __m256i table = (__m256i)_mm512_cvtneps_pbh(levels);
    __m256 total[ROWS_AT_ONCE];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int64_t g = 0; g < K / group; g++) {
        __m256 low_sum[ROWS_AT_ONCE], high_sum[ROWS_AT_ONCE], s = _mm256_set1_ps(widen(scale[g]));
        for (int m = 0; m < M; m++) low_sum[m] = high_sum[m] = _mm256_setzero_ps();
        for (int64_t k = g * group; k < (g + 1) * group; k += CHUNK) {
            __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(packed + k / 2)));
            __m256bh low = (__m256bh)_mm256_permutexvar_epi16(bytes, table);
            __m256bh high = (__m256bh)_mm256_permutexvar_epi16(_mm256_srli_epi16(bytes, 4), table);
            for (int m = 0; m < M; m++) {
                const __m256i *x_chunk = (const __m256i *)(x + m * K + k);
                low_sum[m] = _mm256_dpbf16_ps(low_sum[m], (__m256bh)_mm256_loadu_si256(x_chunk), low);
                high_sum[m] = _mm256_dpbf16_ps(high_sum[m], (__m256bh)_mm256_loadu_si256(x_chunk + 1), high);
            }
        }
        for (int m = 0; m < M; m++) total[m] = _mm256_fmadd_ps(_mm256_add_ps(low_sum[m], high_sum[m]), s, total[m]);
    }
    for (int m = 0; m < M; m++) {
        float lanes[8];
        _mm256_storeu_ps(lanes, total[m]);
        result[m] = (lanes[0] + lanes[4]) + (lanes[1] + lanes[5]) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    }
}
#endif

typedef struct {
    const void *x;
    const uint8_t *packed;
    const bf16 *scale;
    int64_t K, group, bits, dtype;
} problem;

/* `rows` and `bits` must be constants inside the dot products, for their loops to unroll and their sums to stay in
   registers: hence one call for each value. */
#define FOR_EACH_COUNT(rows, dot, ...) \
    switch (rows) { \
    case 1: dot(1, __VA_ARGS__); break; \
    case 2: dot(2, __VA_ARGS__); break; \
    case 3: dot(3, __VA_ARGS__); break; \
    case 4: dot(4, __VA_ARGS__); break; \
    }

static void dot_rows(const problem *p, int rows, int64_t m, int64_t n, float *result) {
    const uint8_t *packed = p->packed + n * p->K * p->bits / 8;
    const bf16 *scale = p->scale + n * (p->K / p->group);
#ifdef HAS_BF16_DOT
    if (p->dtype == BFLOAT16) {
        const bf16 *x = (const bf16 *)p->x + m * p->K;
        FOR_EACH_COUNT(rows, dot_bf16_4bit, x, packed, scale, p->K, p->group, result)
        return;
    }
#endif
    const float *x = (const float *)p->x + m * p->K;
    switch (p->bits) {
    case 2: FOR_EACH_COUNT(rows, dot_float, x, packed, scale, p->K, 2, p->group, result) break;
    case 3: FOR_EACH_COUNT(rows, dot_float, x, packed, scale, p->K, 3, p->group, result) break;
    case 4: FOR_EACH_COUNT(rows, dot_float, x, packed, scale, p->K, 4, p->group, result) break;
    case 8: FOR_EACH_COUNT(rows, dot_float, x, packed, scale, p->K, 8, p->group, result) break;
    }
}
