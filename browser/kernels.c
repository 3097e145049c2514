// The arithmetic of the page: products with weights of eight bits, norms, attention, probabilities, and the noise of
// diffusion/noise.py. Compiled to kernels.wasm by `python -m browser.compile_kernels`, which nobody else needs.
//
// Matrices are of float32 and lie row by row. Weights are [out, in], of eight bits with one scale a row, or of float32
// without; `in` is a multiple of 4, and at most WIDEST.
#include <stdint.h>
#include <wasm_simd128.h>

#define WIDEST 16384
#define EXPORT(name) __attribute__((export_name(#name)))

static float panel[4 * WIDEST];

static v128_t exp4(v128_t x) {  // as Cephes has it: relative error 2e-7
  x = wasm_f32x4_pmax(wasm_f32x4_splat(-87.3f), wasm_f32x4_pmin(wasm_f32x4_splat(88.3f), x));
  v128_t n = wasm_f32x4_nearest(wasm_f32x4_mul(x, wasm_f32x4_splat(1.44269504f)));
  x = wasm_f32x4_sub(x, wasm_f32x4_mul(n, wasm_f32x4_splat(0.693359375f)));
  x = wasm_f32x4_add(x, wasm_f32x4_mul(n, wasm_f32x4_splat(2.12194440e-4f)));
  static const float c[] = {1.9875691e-4f, 1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 0.5f, 1, 1};
  v128_t y = wasm_f32x4_splat(c[0]);
  for (int i = 1; i < 8; i++) y = wasm_f32x4_add(wasm_f32x4_mul(y, x), wasm_f32x4_splat(c[i]));
  v128_t power = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127)), 23);
  return wasm_f32x4_mul(y, power);
}

static float sum4(v128_t x) {
  return (wasm_f32x4_extract_lane(x, 0) + wasm_f32x4_extract_lane(x, 1))
       + (wasm_f32x4_extract_lane(x, 2) + wasm_f32x4_extract_lane(x, 3));
}

// y = x wᵀ · scale + bias. Four rows of weights at a time are widened into `panel`, four inputs of each in turn, for all
// rows of x; with two rows of x at a time all sums stay in the sixteen registers that every processor has.
EXPORT(multiply) void multiply(const float *x, const void *w, const float *scale, const float *bias, float *y,
                               int rows, int in, int out) {
  for (int n = 0; n < out; n += 4) {
    for (int j = 0; j < 4; j++) {
      long row = (long)(n + j < out ? n + j : out - 1) * in;
      for (int k = 0; k < in; k += 4) {
        v128_t own = scale ? wasm_v128_load32_zero((const int8_t *)w + row + k) : wasm_v128_load((const float *)w + row + k);
        v128_t whole = wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(own));
        wasm_v128_store(panel + 4 * k + 4 * j, scale ? wasm_f32x4_convert_i32x4(whole) : own);
      }
    }
    for (int r = 0; r < rows; r += 2) {
      const float *own[2] = {x + (long)r * in, x + (long)(r + 1 < rows ? r + 1 : r) * in};
      v128_t s[2][4];
      for (int j = 0; j < 4; j++) s[0][j] = s[1][j] = wasm_f32x4_splat(0);
      for (int k = 0; k < in; k += 4) {
        v128_t a = wasm_v128_load(own[0] + k), b = wasm_v128_load(own[1] + k);
        for (int j = 0; j < 4; j++) {
          v128_t v = wasm_v128_load(panel + 4 * k + 4 * j);
          s[0][j] = wasm_f32x4_add(s[0][j], wasm_f32x4_mul(a, v));
          s[1][j] = wasm_f32x4_add(s[1][j], wasm_f32x4_mul(b, v));
        }
      }
      for (int i = 0; i < 2 && r + i < rows; i++)
        for (int j = 0; j < 4 && n + j < out; j++)
          y[(long)(r + i) * out + n + j] = sum4(s[i][j]) * (scale ? scale[n + j] : 1) + (bias ? bias[n + j] : 0);
    }
  }
}

// Rows of a table of eight bits.
EXPORT(look_up) void look_up(const int *ids, const int8_t *table, const float *scale, float *y, int rows, int dim) {
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < dim; k++) y[(long)r * dim + k] = table[(long)ids[r] * dim + k] * scale[ids[r]];
}

// Every row at mean 0 and variance 1, then times `scale` and moved by `shift`.
EXPORT(normalise) void normalise(const float *x, const float *shift, const float *scale, float *y, int rows, int dim) {
  for (int r = 0; r < rows; r++, x += dim, y += dim) {
    float mean = 0, square = 0;
    for (int k = 0; k < dim; k++) mean += x[k];
    mean /= dim;
    for (int k = 0; k < dim; k++) square += (x[k] - mean) * (x[k] - mean);
    float by = 1 / __builtin_sqrtf(square / dim + 1e-5f);
    for (int k = 0; k < dim; k++) y[k] = shift[k] + (x[k] - mean) * by * scale[k];
  }
}

// x += gate · y, or x += y.
EXPORT(add) void add(float *x, const float *y, const float *gate, int rows, int dim) {
  for (int r = 0; r < rows; r++, x += dim, y += dim)
    for (int k = 0; k < dim; k++) x[k] += gate ? gate[k] * y[k] : y[k];
}

// x Φ(x), with Φ after Abramowitz and Stegun (7.1.26): absolute error 1e-7. n is a multiple of 4.
EXPORT(gelu) void gelu(float *x, int n) {
  static const float c[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  for (int i = 0; i < n; i += 4) {
    v128_t v = wasm_v128_load(x + i), z = wasm_f32x4_mul(wasm_f32x4_abs(v), wasm_f32x4_splat(0.70710678f));
    v128_t one = wasm_f32x4_splat(1);
    v128_t t = wasm_f32x4_div(one, wasm_f32x4_add(one, wasm_f32x4_mul(wasm_f32x4_splat(0.3275911f), z)));
    v128_t p = wasm_f32x4_splat(c[0]);
    for (int k = 1; k < 5; k++) p = wasm_f32x4_add(wasm_f32x4_mul(p, t), wasm_f32x4_splat(c[k]));
    v128_t tail = wasm_f32x4_mul(wasm_f32x4_mul(p, t), exp4(wasm_f32x4_neg(wasm_f32x4_mul(z, z))));
    v128_t half = wasm_f32x4_mul(tail, wasm_f32x4_splat(0.5f));  // 1 − Φ(|x|)
    v128_t share = wasm_v128_bitselect(half, wasm_f32x4_sub(one, half), wasm_f32x4_lt(v, wasm_f32x4_splat(0)));
    wasm_v128_store(x + i, wasm_f32x4_mul(v, share));
  }
}

// Probabilities in the place of logits; −∞ has none.
EXPORT(softmax) void softmax(float *x, int rows, int n) {
  for (int r = 0; r < rows; r++, x += n) {
    float most = x[0], sum = 0;
    for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    int i = 0;
    v128_t sums = wasm_f32x4_splat(0);
    for (; i + 4 <= n; i += 4) {
      v128_t v = wasm_v128_load(x + i), far = wasm_f32x4_sub(v, wasm_f32x4_splat(most));
      v128_t p = wasm_v128_and(exp4(far), wasm_f32x4_gt(far, wasm_f32x4_splat(-87)));
      wasm_v128_store(x + i, p);
      sums = wasm_f32x4_add(sums, p);
    }
    sum = sum4(sums);
    for (; i < n; i++) {
      float far = x[i] - most;
      x[i] = far > -87 ? wasm_f32x4_extract_lane(exp4(wasm_f32x4_splat(far)), 0) : 0;
      sum += x[i];
    }
    for (i = 0; i < n; i++) x[i] /= sum;
  }
}

// The mean row of a table under probabilities.
EXPORT(mix) void mix(const float *p, const float *restrict table, float *restrict y, int rows, int n, int dim) {
  for (int r = 0; r < rows; r++, p += n, y += dim) {
    for (int k = 0; k < dim; k++) y[k] = 0;
    for (int i = 0; i < n; i++)
      if (p[i] > 0)
        for (int k = 0; k < dim; k++) y[k] += p[i] * table[(long)i * dim + k];
  }
}

// Queries and keys turned by their positions (cosines and sines [rows, dim / 2] of one head), then attention of every
// position to all. qkv is [rows, 3, heads, dim]; `scores` has room for one row.
EXPORT(attend) void attend(float *qkv, const float *cosine, const float *sine, float *scores, float *restrict y,
                           int rows, int heads, int dim) {
  int wide = heads * dim, half = dim / 2;
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < 2 * heads; h++) {
      float *v = qkv + (long)r * 3 * wide + h * dim;
      for (int k = 0; k < half; k++) {
        float a = v[k], b = v[k + half], c = cosine[r * half + k], s = sine[r * half + k];
        v[k] = a * c - b * s, v[k + half] = b * c + a * s;
      }
    }
  float by = 1 / __builtin_sqrtf((float)dim);
  for (int h = 0; h < heads; h++)
    for (int r = 0; r < rows; r++) {
      const float *q = qkv + (long)r * 3 * wide + h * dim;
      for (int c = 0; c < rows; c++) {
        const float *k = qkv + (long)c * 3 * wide + wide + h * dim;
        v128_t sum = wasm_f32x4_splat(0);
        int i = 0;
        for (; i + 4 <= dim; i += 4)
          sum = wasm_f32x4_add(sum, wasm_f32x4_mul(wasm_v128_load(q + i), wasm_v128_load(k + i)));
        scores[c] = sum4(sum);
        for (; i < dim; i++) scores[c] += q[i] * k[i];
        scores[c] *= by;
      }
      softmax(scores, 1, rows);
      float *out = y + (long)r * wide + h * dim;
      for (int k = 0; k < dim; k++) out[k] = 0;
      for (int c = 0; c < rows; c++) {
        const float *v = qkv + (long)c * 3 * wide + 2 * wide + h * dim;
        for (int k = 0; k < dim; k++) out[k] += scores[c] * v[k];
      }
    }
}

static uint64_t mix_bits(uint64_t z) {  // splitmix64
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The uniform numbers [rows, columns] that Python's `Noise(seed, [0])` gives for a step and a stream; columns 0: [rows],
// rows 0: one number.
EXPORT(uniform) void uniform(int seed, int stream, int step, int rows, int columns, float *y) {
  uint64_t key = mix_bits(mix_bits((uint64_t)seed) ^ (uint64_t)stream) & INT64_MAX;
  key = mix_bits(mix_bits(key) + (uint64_t)step);
  for (int r = 0; r < (rows ? rows : 1); r++) {
    uint64_t row = rows ? mix_bits(key + (uint64_t)r) : key;
    for (int c = 0; c < (columns ? columns : 1); c++) {
      uint64_t found = columns ? mix_bits(row + (uint64_t)c) : row;
      y[r * (columns ? columns : 1) + c] = ((float)(found >> 41 & 0x7FFFFF) + 0.5f) * 0x1p-23f;
    }
  }
}
