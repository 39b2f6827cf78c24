/* Makes, dequantizes and multiplies by matrices in the canonical form (dot.h).

   Rows are shared out by OpenMP, over the runtime and the threads that torch already has. */

#include "dot.h"

/* ---- dequantize: rows [rows, K] to float32 or bfloat16 ---- */

INLINE halves8 narrow_weights(floats8 values) { /* weights are never NaN */
    words8 bits = (words8)values;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves8);
}

INLINE void dequantize_row(const uint8_t *packed, const bf16 *scale, const bf16 *offset, void *out, int64_t K,
                           int bits, int64_t group, int dtype) {
    for (int64_t k = 0; k < K; k += CHUNK) {
        floats8 values[VECTORS];
        unpack_chunk(packed + k * bits / 8, bits, values);
        for (int v = 0; v < VECTORS; v++) {
            floats8 weight = values[v] * widen(scale[k / group]) + widen(offset[k / group]);
            halves8 rounded = narrow_weights(weight);
            if (dtype == FLOAT32)
                memcpy((float *)out + k + LANES * v, &weight, sizeof weight);
            else
                memcpy((bf16 *)out + k + LANES * v, &rounded, sizeof rounded);
        }
    }
}

#ifdef HAS_BF16_DOT
/* All 16 values of a group are computed and rounded once; its nibbles then only select among them. */
static void dequantize_row_4bit_bf16(const uint8_t *packed, const bf16 *scale, const bf16 *offset, bf16 *out, int64_t K,
                                     int64_t group) {
    const __m512 levels = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    for (int64_t g = 0; g < K / group; g++) {
        __m512 exact = _mm512_fmadd_ps(levels, _mm512_set1_ps(widen(scale[g])), _mm512_set1_ps(widen(offset[g])));
        __m256i table = (__m256i)_mm512_cvtneps_pbh(exact);
        for (int64_t k = g * group; k < (g + 1) * group; k += CHUNK) {
            __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(packed + k / 2)));
            __m256i high = _mm256_srli_epi16(bytes, 4);
            _mm256_storeu_si256((__m256i *)(out + k), _mm256_permutexvar_epi16(bytes, table));
            _mm256_storeu_si256((__m256i *)(out + k + 16), _mm256_permutexvar_epi16(high, table));
        }
    }
}
#endif

#define EACH_ROW(bits) \
    _Pragma("omp parallel for schedule(static)") for (int64_t n = 0; n < rows; n++) \
        dequantize_row(packed + n * K * bits / 8, scale + n * groups, offset + n * groups, \
                       (char *)out + n * K * (dtype == FLOAT32 ? 4 : 2), K, bits, group, dtype)

void river_dequantize(const uint8_t *packed, const bf16 *scale, const bf16 *offset, void *out, int64_t rows, int64_t K,
                      int64_t bits, int64_t group, int64_t dtype) {
    const int64_t groups = K / group;
#ifdef HAS_BF16_DOT
    if (bits == 4 && dtype == BFLOAT16) {
#pragma omp parallel for schedule(static)
        for (int64_t n = 0; n < rows; n++)
            dequantize_row_4bit_bf16(packed + n * K / 2, scale + n * groups, offset + n * groups, (bf16 *)out + n * K,
                                     K, group);
        return;
    }
#endif
    switch (bits) {
    case 2: EACH_ROW(2); break;
    case 3: EACH_ROW(3); break;
    case 4: EACH_ROW(4); break;
    case 8: EACH_ROW(8); break;
    }
}

/* ---- multiply: y[M, N] = x[M, K] W[N, K]^T for a few rows M ---- */

/* Whether bfloat16 x is multiplied as it is; else river_linear wants float32 x. */
int64_t river_takes_bf16(int64_t bits) {
#ifdef HAS_BF16_DOT
    return bits == 4;
#else
    (void)bits;
    return 0;
#endif
}

/* x [M, K] and y [M, N] of `dtype`. Needs M * K / group floats of stack. */
void river_linear(const void *x, const uint8_t *packed, const bf16 *scale, const bf16 *offset, void *y, int64_t M,
                  int64_t N, int64_t K, int64_t bits, int64_t group, int64_t dtype) {
    const problem p = {x, packed, scale, K, group, bits, dtype};
    const int64_t groups = K / group;
    if (M == 0) return;
    float stack[M * groups], *sums = stack; /* the pointer: threads share it, each would copy the array */
    group_sums(x, sums, M * groups, group, (int)dtype);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++)
        for (int64_t m = 0; m < M; m += ROWS_AT_ONCE) {
            int rows = M - m < ROWS_AT_ONCE ? (int)(M - m) : ROWS_AT_ONCE;
            float result[ROWS_AT_ONCE];
            dot_rows(&p, rows, m, n, result);
            for (int r = 0; r < rows; r++) {
                float value = result[r] + offset_term(offset + n * groups, sums + (m + r) * groups, groups);
                if (dtype == FLOAT32)
                    ((float *)y)[(m + r) * N + n] = value;
                else
                    ((bf16 *)y)[(m + r) * N + n] = narrow(value);
            }
        }
}

/* ---- quantize: HQQ (hqq.core.optimize.optimize_weights_proximal_legacy), each group by itself ----

   HQQ looks for the zero of `weight = (q - zero) * scale` by half-quadratic splitting: round, take the errors that are
   large enough to be outliers off the weights, and set zero to the mean of q - (weight - outliers) / scale. It stops
   all groups when their mean error no longer falls; here each group goes on until its own zero stays. */

#define HQQ_ROUNDS 20
#define HQQ_BETA 10.0f
#define HQQ_NORM 0.7f
#define HQQ_OUTLIER 0.17f /* errors below beta^(-1 / (2 - norm)) = 0.1701 are no outliers: shrinking leaves nothing */
#define COMFORTABLE_RANGE 0.125f
#define NARROW_STEP 1e-4f /* HQQ clamps the inverse scale at 2e4: groups with steps below twice that are scaled up */
#define MOST_IN_GROUP 256

INLINE float level(float steps, float top) { /* a NaN becomes 0 */
    float q = rintf(steps);
    return q > 0 ? q < top ? q : top : 0;
}

/* What of the errors of a group counts as outliers, in steps. */
static float outliers(const float *x, int64_t n, float inverse, float zero, float top) {
    float total = 0;
    for (int64_t k = 0; k < n; k++) {
        float error = x[k] - (level(x[k] * inverse + zero, top) - zero) / inverse;
        float kept = fabsf(error) - powf(fabsf(error), HQQ_NORM - 1) / HQQ_BETA;
        if (kept > 0) total += copysignf(kept, error) * inverse;
    }
    return total;
}

static float settled_zero(const float *x, int64_t n, float inverse, float zero, float top) {
    const float step = 1 / inverse;
    for (int round = 0; round < HQQ_ROUNDS; round++) {
        const float before = zero;
        float worst = 0, shift = 0;
#pragma omp simd reduction(+ : shift) reduction(max : worst)
        for (int64_t k = 0; k < n; k++) {
            float steps = x[k] * inverse, q = level(steps + zero, top), apart = fabsf(q - zero - steps);
            worst = apart > worst ? apart : worst;
            shift += q - steps;
        }
        if (worst * step > HQQ_OUTLIER) shift += outliers(x, n, inverse, zero, top);
        zero = shift / (float)n;
        if (zero == before) break;
    }
    return zero;
}

/* One group: its scale and offset as stored, and its values of 0..top against these. */
static void quantize_group(const float *w, int64_t n, int bits, bf16 *scale, bf16 *offset, uint8_t *q) {
    const float top = (float)((1 << bits) - 1), half = (float)(1 << (bits - 1));
    float low = w[0], high = w[0], x[MOST_IN_GROUP];
    for (int64_t k = 1; k < n; k++) {
        low = w[k] < low ? w[k] : low;
        high = w[k] > high ? w[k] : high;
    }
    const float spread = high - low;
    *scale = 0;
    *offset = narrow(low);
    if (spread > 0) {
        float lift = 1, center = 0;
        if (spread < NARROW_STEP * top) { /* by a power of two, which changes no digit */
            int exponent = ilogbf(COMFORTABLE_RANGE / spread);
            lift = ldexpf(1, exponent > 120 ? 120 : exponent);
            center = low / 2 + high / 2;
        }
        for (int64_t k = 0; k < n; k++) x[k] = (w[k] - center) * lift;
        const float inverse = top / (spread * lift);
        const float zero = settled_zero(x, n, inverse, -(low - center) * lift * inverse, top);
        const float step = 1 / inverse / lift;
        *scale = narrow(step);
        *offset = narrow((half - zero) * step + center);
    }
    const float step = widen(*scale), base = widen(*offset);
    for (int64_t k = 0; k < n; k++) q[k] = step == 0 ? (uint8_t)half : (uint8_t)level((w[k] - base) / step + half, top);
}

/* The inverse of unpack_chunk: `width` bits of each of 32 values, from bit `done` on, into 4 * width bytes. */
INLINE void pack_plane(const uint8_t *q, int width, int done, uint8_t *plane) {
    for (int i = 0; i < 4 * width; i++) {
        int byte = 0;
        for (int j = 0; j < 8 / width; j++) byte |= ((q[i + 4 * width * j] >> done) & ((1 << width) - 1)) << (j * width);
        plane[i] = (uint8_t)byte;
    }
}

static void pack_chunk(const uint8_t *q, int64_t bits, uint8_t *packed) {
    switch (bits) {
    case 2: pack_plane(q, 2, 0, packed); break;
    case 3: pack_plane(q, 2, 0, packed); pack_plane(q, 1, 2, packed + 8); break;
    case 4: pack_plane(q, 4, 0, packed); break;
    case 8: memcpy(packed, q, CHUNK); break;
    }
}

/* weight [rows, K], finite float32. On the calling thread alone: callers share blocks of rows out. */
void river_quantize(const float *weight, uint8_t *packed, bf16 *scale, bf16 *offset, int64_t rows, int64_t K,
                    int64_t bits, int64_t group) {
    uint8_t q[MOST_IN_GROUP];
    for (int64_t g = 0; g < rows * K / group; g++) {
        quantize_group(weight + g * group, group, (int)bits, scale + g, offset + g, q);
        for (int64_t k = 0; k < group; k += CHUNK) pack_chunk(q + k, bits, packed + (g * group + k) * bits / 8);
    }
}

int64_t river_most_in_group(void) { return MOST_IN_GROUP; }
