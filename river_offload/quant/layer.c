/* One token of one text through a river layer of Llama's kind, in one call.

   y = m + MLP(norm(m)) with m = x + attention(norm(x)): what modeling_llama.py computes, with normed queries and keys
   (Qwen3), biases (Qwen2), heads turned in part (Phi-3) or queries scaled by their place (Ministral 3) where there are
   any. For one token the products are as short as the calls around them: a layer of a 135M model takes a third of the
   time here. In bfloat16 values are rounded where torch's operators round theirs.

   Between two barriers each thread computes a share of the rows of one or more matrices. What all of them read, the
   normed state, each makes for itself: that is quicker than to wait for one that does. */

#include "dot.h"

#define AHEAD 4096 /* bytes of a matrix that are on their way from memory: a page, at whose end the processor stops */
#define FOUR 4 /* rows of W that are multiplied at once */
#define KEYS_AT_ONCE 64 /* scored before they are weighed: bounds the working memory of a long text */

typedef struct {
    const uint8_t *packed;
    const bf16 *scale, *offset;
    const void *bias; /* NULL: none */
    int64_t rows, columns, group;
} matrix;

typedef struct {
    const void *weight; /* NULL: no norm */
    float epsilon;
} norm;

typedef struct {
    matrix q, k, v, o, gate, up, down;
    norm before_attention, before_mlp, of_queries, of_keys;
    int64_t heads, kv_heads, head_dim, bits, dtype; /* dtype: of states, norms, biases and cache */
    float scaling;
} layer;

/* Activations as the dot products take them. */
typedef struct {
    void *values;
    float *sums;
} operand;

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float load(const void *values, int64_t i, int dtype) {
    return dtype == FLOAT32 ? ((const float *)values)[i] : widen(((const bf16 *)values)[i]);
}

INLINE void store(void *values, int64_t i, int dtype, float value) {
    if (dtype == FLOAT32)
        ((float *)values)[i] = value;
    else
        ((bf16 *)values)[i] = narrow(value);
}

/* As an operator of torch hands it on. */
INLINE float settled(float value, int dtype) { return dtype == FLOAT32 ? value : widen(narrow(value)); }

/* Within 2e-7 of e^x (the polynomial of Cephes), in a form that the compiler vectorizes. */
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x; /* a NaN stays one */
    const float n = rintf(x * 1.44269504f);
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x)); /* ln 2 in two parts, which stay two */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const int32_t power = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return (p * r * r + r + 1) * scale;
}

static void rms_norm(const float *x, const norm *of, int64_t count, int dtype, float *y) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
    const float inverse = 1 / sqrtf(squares / (float)count + of->epsilon);
    for (int64_t i = 0; i < count; i++)
        y[i] = settled(load(of->weight, i, dtype) * settled(x[i] * inverse, dtype), dtype);
}

/* What activations are multiplied as. */
INLINE int dtype_of_dot(const layer *l) {
#ifdef HAS_BF16_DOT
    if (l->dtype == BFLOAT16 && l->bits == 4) return BFLOAT16;
#endif
    (void)l;
    return FLOAT32;
}

/* x, as settled, for matrices like m. */
static void prepare(const float *x, const layer *l, const matrix *m, operand *to) {
    const int dtype = dtype_of_dot(l);
    for (int64_t i = 0; i < m->columns; i++) store(to->values, i, dtype, x[i]);
    group_sums(to->values, to->sums, m->columns / m->group, m->group, dtype);
}

#ifdef HAS_BF16_DOT
/* Rows of W against one bfloat16 x as dot_bf16_4bit does it, but four at once: they share the loads of x and the sums
   across lanes, which tell where rows are short. Offsets included. */
static void dot_four_rows(const matrix *m, int64_t row, const operand *x, float *result) {
    const int64_t K = m->columns, groups = K / m->group;
    const uint8_t *packed = m->packed + row * K / 2;
    const bf16 *scale = m->scale + row * groups, *offset = m->offset + row * groups;
    const __m512 levels = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    const __m256i table = (__m256i)_mm512_cvtneps_pbh(levels);
    const int64_t ahead = larger(AHEAD, FOUR * K / 2);
    __m256 total[FOUR];
    for (int r = 0; r < FOUR; r++) total[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m256 low_sum[FOUR], high_sum[FOUR];
        for (int r = 0; r < FOUR; r++) {
            low_sum[r] = high_sum[r] = _mm256_setzero_ps();
            _mm_prefetch(packed + (r * K + g * m->group) / 2 + ahead, _MM_HINT_T0);
        }
        for (int64_t k = g * m->group; k < (g + 1) * m->group; k += CHUNK) {
            const __m256i *chunk = (const __m256i *)((const bf16 *)x->values + k);
            const __m256bh low_x = (__m256bh)_mm256_loadu_si256(chunk), high_x = (__m256bh)_mm256_loadu_si256(chunk + 1);
            for (int r = 0; r < FOUR; r++) {
                __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(packed + (r * K + k) / 2)));
                __m256bh low = (__m256bh)_mm256_permutexvar_epi16(bytes, table);
                __m256bh high = (__m256bh)_mm256_permutexvar_epi16(_mm256_srli_epi16(bytes, 4), table);
                low_sum[r] = _mm256_dpbf16_ps(low_sum[r], low_x, low);
                high_sum[r] = _mm256_dpbf16_ps(high_sum[r], high_x, high);
            }
        }
        for (int r = 0; r < FOUR; r++) {
            const __m256 s = _mm256_set1_ps(widen(scale[r * groups + g]));
            total[r] = _mm256_fmadd_ps(_mm256_add_ps(low_sum[r], high_sum[r]), s, total[r]);
        }
    }
    for (int64_t g = 0; g < groups; g += LANES) { /* past the last group nothing is read */
        const __mmask8 some = (__mmask8)(groups - g < LANES ? (1 << (groups - g)) - 1 : 255);
        const __m256 sums = _mm256_maskz_loadu_ps(some, x->sums + g);
        for (int r = 0; r < FOUR; r++) {
            __m256i halves = _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(some, offset + r * groups + g));
            total[r] = _mm256_fmadd_ps((__m256)_mm256_slli_epi32(halves, 16), sums, total[r]);
        }
    }
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(total[0], total[1]), _mm256_hadd_ps(total[2], total[3]));
    _mm_storeu_ps(result, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
#endif

/* Some rows of a product, with their biases: `count` of them, at most four. */
static void products(const layer *l, const matrix *m, int64_t row, int64_t count, const operand *x, float *y) {
    const int dtype = (int)l->dtype, dot = dtype_of_dot(l);
    const problem p = {x->values, m->packed, m->scale, m->columns, m->group, l->bits, dot};
    const int64_t groups = m->columns / m->group;
#ifdef HAS_BF16_DOT
    if (dot == BFLOAT16 && count == FOUR)
        dot_four_rows(m, row, x, y);
    else
#endif
        for (int64_t r = 0; r < count; r++) {
            dot_rows(&p, 1, 0, row + r, y + r);
            y[r] += offset_term(m->offset + (row + r) * groups, x->sums, groups);
        }
    for (int64_t r = 0; r < count; r++) {
        y[r] = settled(y[r], dtype);
        if (m->bias) y[r] = settled(y[r] + load(m->bias, row + r, dtype), dtype);
    }
}

/* Where a token stands: cos and sin of the first `turned` dimensions of a head, and what queries are multiplied by. */
typedef struct {
    const void *cos, *sin;
    int64_t turned;
    float query_scale;
} place;

/* A query or key with its norm, at its place. */
static void placed(const float *x, const norm *of, const layer *l, const place *at, float *y) {
    const int64_t half = at->turned / 2;
    const int dtype = (int)l->dtype;
    float normed[l->head_dim];
    if (of->weight) {
        rms_norm(x, of, l->head_dim, dtype, normed);
        x = normed;
    }
    for (int64_t i = 0; i < at->turned; i++) {
        const float other = i < half ? -x[i + half] : x[i - half];
        const float straight = settled(x[i] * load(at->cos, i, dtype), dtype);
        y[i] = settled(straight + settled(other * load(at->sin, i, dtype), dtype), dtype);
    }
    for (int64_t i = at->turned; i < l->head_dim; i++) y[i] = x[i];
}

/* Some keys and their values, [count, head_dim], into a softmax that goes on: its highest score, the sum of its
   exponentials, and the sum of the values they weigh. */
INLINE void attend(const layer *l, const float *query, const void *keys, const void *values, int64_t count, int dtype,
                   float *highest, float *total, float *weighed) {
    const int64_t D = l->head_dim;
    float scores[KEYS_AT_ONCE], top = *highest;
    for (int64_t t = 0; t < count; t++) {
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (int64_t i = 0; i < D; i++) score += query[i] * load(keys, t * D + i, dtype);
        scores[t] = score * l->scaling;
        top = scores[t] > top ? scores[t] : top;
    }
    const float fade = exponential(*highest - top);
    float sum = 0;
    for (int64_t t = 0; t < count; t++) scores[t] = exponential(scores[t] - top);
    for (int64_t t = 0; t < count; t++) sum += scores[t];
    for (int64_t i = 0; i < D; i++) weighed[i] *= fade;
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < D; i++) weighed[i] += scores[t] * load(values, t * D + i, dtype);
    *highest = top;
    *total = *total * fade + sum;
}

/* One head's attention to `cached` keys and its own; the first head of those that share keys and values stores them.
   qkv: the products of the three matrices, one after the other. keys, values: of these heads, [cached + 1, head_dim]. */
static void attention(const layer *l, int64_t head, const float *qkv, const place *at, void *keys, void *values,
                      int64_t cached, float *y) {
    const int64_t D = l->head_dim, shared = l->heads / l->kv_heads, kv = head / shared;
    const int dtype = (int)l->dtype, size = dtype == FLOAT32 ? 4 : 2;
    const float *own_value = qkv + (l->heads + l->kv_heads + kv) * D;
    float query[D], own_key[D], highest = -INFINITY, total = 0;
    placed(qkv + head * D, &l->of_queries, l, at, query);
    placed(qkv + (l->heads + kv) * D, &l->of_keys, l, at, own_key);
    for (int64_t i = 0; i < D; i++) {
        query[i] = settled(query[i] * at->query_scale, dtype);
        y[i] = 0;
    }
    attend(l, query, own_key, own_value, 1, FLOAT32, &highest, &total, y);
    for (int64_t t = 0; t < cached; t += KEYS_AT_ONCE) {
        const int64_t count = cached - t < KEYS_AT_ONCE ? cached - t : KEYS_AT_ONCE;
        const char *block_keys = (char *)keys + t * D * size, *block_values = (char *)values + t * D * size;
        if (dtype == FLOAT32)
            attend(l, query, block_keys, block_values, count, FLOAT32, &highest, &total, y);
        else
            attend(l, query, block_keys, block_values, count, BFLOAT16, &highest, &total, y);
    }
    for (int64_t i = 0; i < D; i++) y[i] = settled(y[i] / total, dtype);
    if (head % shared == 0)
        for (int64_t i = 0; i < D; i++) {
            store(keys, cached * D + i, dtype, own_key[i]);
            store(values, cached * D + i, dtype, own_value[i]);
        }
}

INLINE int64_t up_to_four(int64_t left) { return left < FOUR ? left : FOUR; }

/* x, y: [hidden]; cos, sin: [turned]; keys, values: [kv_heads, cached + 1, head_dim], each head `stride` values after
   the one before it; the last token is this one and is written. The stack holds the states: for an 8B model 130 KB,
   and 75 KB in each thread. */
void river_layer_token(const layer *l, const void *x, const void *cos, const void *sin, int64_t turned,
                       float query_scale, void *keys, void *values, int64_t stride, int64_t cached, void *y) {
    const place at = {cos, sin, turned, query_scale};
    const int dtype = (int)l->dtype;
    const int64_t hidden = l->q.columns, wide = l->q.rows, kv_wide = l->k.rows, inner = l->gate.rows;
    const int64_t head_bytes = stride * (dtype == FLOAT32 ? 4 : 2);
    float stack[hidden + 2 * wide + 2 * kv_wide + hidden + inner]; /* pointers: threads would copy an array */
    float *state = stack, *qkv = state + hidden, *attended = qkv + wide + 2 * kv_wide, *middle = attended + wide;
    float *activated = middle + hidden;
    for (int64_t i = 0; i < hidden; i++) state[i] = load(x, i, dtype);
#pragma omp parallel
    {
        const int64_t longest = larger(larger(hidden, wide), inner);
        float normed[hidden], values_of_operand[longest], sums[longest / CHUNK + 1];
        operand input = {values_of_operand, sums};
        rms_norm(state, &l->before_attention, hidden, dtype, normed);
        prepare(normed, l, &l->q, &input);
        const matrix *matrices[] = {&l->q, &l->k, &l->v};
        float *results[] = {qkv, qkv + wide, qkv + wide + kv_wide};
        for (int i = 0; i < 3; i++) {
#pragma omp for schedule(static) nowait
            for (int64_t n = 0; n < matrices[i]->rows; n += FOUR)
                products(l, matrices[i], n, up_to_four(matrices[i]->rows - n), &input, results[i] + n);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t h = 0; h < l->heads; h++) {
            const int64_t start = h / (l->heads / l->kv_heads) * head_bytes;
            void *own_keys = (char *)keys + start, *own_values = (char *)values + start;
            attention(l, h, qkv, &at, own_keys, own_values, cached, attended + h * l->head_dim);
        }
        prepare(attended, l, &l->o, &input);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < hidden; n += FOUR) {
            const int64_t count = up_to_four(hidden - n);
            float added[FOUR];
            products(l, &l->o, n, count, &input, added);
            for (int64_t i = 0; i < count; i++) middle[n + i] = settled(state[n + i] + added[i], dtype);
        }
        rms_norm(middle, &l->before_mlp, hidden, dtype, normed);
        prepare(normed, l, &l->gate, &input);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < inner; n += FOUR) {
            const int64_t count = up_to_four(inner - n);
            float gate[FOUR], up[FOUR];
            products(l, &l->gate, n, count, &input, gate);
            products(l, &l->up, n, count, &input, up);
            for (int64_t i = 0; i < count; i++)
                activated[n + i] = settled(settled(gate[i] / (1 + exponential(-gate[i])), dtype) * up[i], dtype);
        }
        prepare(activated, l, &l->down, &input);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < hidden; n += FOUR) {
            const int64_t count = up_to_four(hidden - n);
            float added[FOUR];
            products(l, &l->down, n, count, &input, added);
            for (int64_t i = 0; i < count; i++) store(y, n + i, dtype, middle[n + i] + added[i]);
        }
    }
}
