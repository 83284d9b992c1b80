// What a block of a GPT does to its activations between the matrix products on a CPU, in one pass each where PyTorch's
// operations take several: LayerNorm or RMSNorm, GELU, dropout with the sum of the residual stream.

#include <algorithm>
#include <cmath>

#include "cpu_kernels.h"

struct BlockNorm {
  int64_t rows, n, itemsize, centred, threads; // itemsize: of y and grad; x is fp32
  const float *x, *weight, *bias;              // (rows, n), (n), (n) or null
  void *y;                                     // forwards
  const void *grad;                            // backwards
  float *grad_x, *grad_weight, *grad_bias;     // (rows, n), (CHUNKS, n), (CHUNKS, n) or null
  double eps;
};

struct Pointwise {
  int64_t n, itemsize, dropped, seed, threads; // itemsize: of y and grad_y, and in GELU of all
  const void *x, *y, *grad;                    // of the residual stream x and grad are fp32
  void *out;
};

constexpr int64_t BLOCK = 64; // elements of one draw of random bytes

// GELU is x Phi(x), its derivative Phi(x) + x phi(x), with the normal distribution Phi = phi'. Less 1/2 both are odd:
// x p(x^2) / q(x^2) to 3e-7 where |x| <= EDGE, fitted by least squares; at EDGE they are 0 and 1, to 1e-7 and 4e-7.
constexpr float EDGE = 5.6f;

inline float normal_distribution(float x) {
  float s = x * x;
  float p = ((((2.2145311e-8f * s + 6.3565293e-6f) * s + 1.7385063e-4f) * s + 4.7072587e-3f) * s + 3.4376096e-2f) * s;
  float q = ((((1.1802117e-6f * s + 7.5101882e-5f) * s + 1.9129775e-3f) * s + 2.8940082e-2f) * s + 2.5283381e-1f) * s;
  return 0.5f + x * (p + 0.39894223f) / (q + 1);
}

inline float gelu_derivative(float x) {
  float s = x * x;
  float p = ((((1.9216721e-7f * s + 3.5899287e-5f) * s + 1.9751840e-5f) * s + 1.4226067e-2f) * s - 3.0975331e-2f) * s;
  float q = ((((8.9281684e-6f * s + 1.9205199e-4f) * s + 3.5226385e-3f) * s + 4.0983751e-2f) * s + 2.9451960e-1f) * s;
  return 0.5f + x * (p + 0.79788536f) / (q + 1);
}

template <class F> void each_row(const BlockNorm &c, F work) { // in CHUNKS for any number of threads
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t chunk = 0; chunk < CHUNKS; chunk++)
    for (int64_t r = chunk * c.rows / CHUNKS; r < (chunk + 1) * c.rows / CHUNKS; r++) work(chunk, r, c.x + r * c.n);
}

inline void moments(const BlockNorm &c, const float *x, float &mean, float &scale) {
  float sum = 0, squares = 0;
  if (c.centred)
#pragma omp simd reduction(+ : sum)
    for (int64_t e = 0; e < c.n; e++) sum += x[e];
  mean = sum / c.n;
#pragma omp simd reduction(+ : squares)
  for (int64_t e = 0; e < c.n; e++) squares += (x[e] - mean) * (x[e] - mean);
  scale = 1 / std::sqrt(squares / c.n + float(c.eps));
}

template <class T> void norm_forward(const BlockNorm &c) {
  each_row(c, [&](int64_t, int64_t r, const float *x) {
    T *y = static_cast<T *>(c.y) + r * c.n;
    float mean, scale, part[BLOCK];
    moments(c, x, mean, scale);
    for (int64_t start = 0; start < c.n; start += BLOCK) {
      int64_t n = std::min(BLOCK, c.n - start);
      const float *from = x + start, *weight = c.weight + start, *bias = c.bias ? c.bias + start : nullptr;
#pragma omp simd
      for (int64_t e = 0; e < n; e++) part[e] = (from[e] - mean) * scale * weight[e] + (bias ? bias[e] : 0);
      store(y + start, part, n);
    }
  });
}

// with u = (x - mean) s and v = dy weight: dx = (v - mean(v) - u mean(v u)) s, without mean(v) where none was taken
template <class T> void norm_backward(const BlockNorm &c) {
  each_row(c, [&](int64_t chunk, int64_t r, const float *x) {
    const T *grad = static_cast<const T *>(c.grad) + r * c.n;
    float *grad_x = c.grad_x + r * c.n, *grad_weight = c.grad_weight + chunk * c.n;
    float mean, scale, sum = 0, along = 0;
    moments(c, x, mean, scale);
#pragma omp simd reduction(+ : sum, along)
    for (int64_t e = 0; e < c.n; e++) {
      float u = (x[e] - mean) * scale, g = to_float(grad[e]), v = g * c.weight[e];
      grad_weight[e] += g * u;
      sum += v;
      along += v * u;
    }
    if (c.grad_bias)
#pragma omp simd
      for (int64_t e = 0; e < c.n; e++) c.grad_bias[chunk * c.n + e] += to_float(grad[e]);
    sum = c.centred ? sum / c.n : 0, along /= c.n;
#pragma omp simd
    for (int64_t e = 0; e < c.n; e++)
      grad_x[e] = (to_float(grad[e]) * c.weight[e] - sum - (x[e] - mean) * scale * along) * scale;
  });
}

template <class F> void each_block(const Pointwise &c, F work) {
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t block = 0; block < (c.n + BLOCK - 1) / BLOCK; block++)
    work(block, block * BLOCK, std::min(c.n, (block + 1) * BLOCK));
}

// for each element of a block: what dropout multiplies it with
inline void kept(const Pointwise &c, int64_t block, float (&factor)[BLOCK]) {
  uint8_t bytes[BLOCK];
  if (!c.dropped) return std::fill(factor, factor + BLOCK, 1.f);
  random_bytes(c.seed, block, bytes);
  float scale = 256.f / (256 - c.dropped);
#pragma omp simd
  for (int64_t e = 0; e < BLOCK; e++) factor[e] = bytes[e] >= c.dropped ? scale : 0;
}

// out = x + dropout(y)
template <class T> void residual_forward(const Pointwise &c) {
  const float *x = static_cast<const float *>(c.x);
  const T *y = static_cast<const T *>(c.y);
  float *out = static_cast<float *>(c.out);
  each_block(c, [&](int64_t block, int64_t start, int64_t end) {
    float factor[BLOCK];
    kept(c, block, factor);
#pragma omp simd
    for (int64_t e = start; e < end; e++) out[e] = x[e] + to_float(y[e]) * factor[e - start];
  });
}

template <class T> void residual_backward(const Pointwise &c) {
  const float *grad = static_cast<const float *>(c.grad);
  T *grad_y = static_cast<T *>(c.out);
  each_block(c, [&](int64_t block, int64_t start, int64_t end) {
    float factor[BLOCK];
    kept(c, block, factor);
#pragma omp simd
    for (int64_t e = start; e < end; e++) factor[e - start] *= grad[e];
    store(grad_y + start, factor, end - start);
  });
}

void gelu_of(const Pointwise &c) {
  const bf16 *x = static_cast<const bf16 *>(c.x), *grad = static_cast<const bf16 *>(c.grad);
  bf16 *out = static_cast<bf16 *>(c.out);
  each_block(c, [&](int64_t, int64_t start, int64_t end) {
    float y[BLOCK];
    if (grad)
#pragma omp simd
      for (int64_t e = start; e < end; e++)
        y[e - start] = to_float(grad[e]) * gelu_derivative(std::min(std::max(to_float(x[e]), -EDGE), EDGE));
    else
#pragma omp simd
      for (int64_t e = start; e < end; e++) {
        float v = std::max(to_float(x[e]), -EDGE);
        y[e - start] = v * normal_distribution(std::min(v, EDGE));
      }
    store(out + start, y, end - start);
  });
}

extern "C" void block_norm(const BlockNorm *c) {
  bool half = c->itemsize == 2;
  if (c->grad) half ? norm_backward<bf16>(*c) : norm_backward<float>(*c);
  else half ? norm_forward<bf16>(*c) : norm_forward<float>(*c);
}
extern "C" void residual(const Pointwise *c) {
  bool half = c->itemsize == 2;
  if (c->grad) half ? residual_backward<bf16>(*c) : residual_backward<float>(*c);
  else half ? residual_forward<bf16>(*c) : residual_forward<float>(*c);
}
extern "C" void gelu(const Pointwise *c) { gelu_of(*c); }
