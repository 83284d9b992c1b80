// The operations between a block's matmuls on a CPU: LayerNorm or RMSNorm, GELU, dropout with the residual sum. Each
// takes one pass over memory where PyTorch's operations take several.

#include <algorithm>
#include <cmath>

#include "kernels.h"

struct BlockNorm {
  int64_t rows, n, centred, threads;
  const float *x, *weight, *bias;              // (rows, n), (n), (n) or null
  void *y;                                     // of the forward pass
  const void *grad;                            // of the backward pass
  float *grad_x, *grad_weight, *grad_bias;     // (rows, n), (CHUNKS, n), (CHUNKS, n) or null
  double eps;
};

struct Pointwise {
  int64_t n, dropped, seed, threads;
  const void *x, *y, *grad;                    // of the residual stream x and grad are fp32
  void *out;
};

constexpr int64_t BLOCK = 64; // elements of one draw of random bytes

// GELU is x Phi(x), its derivative Phi(x) + x phi(x), with the normal distribution Phi = phi'. Minus 1/2 both are odd:
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

template <class F> void each_row(const BlockNorm &c, F work) { // in CHUNKS, whatever the number of threads
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t chunk = 0; chunk < CHUNKS; chunk++)
    for (int64_t r = chunk * c.rows / CHUNKS; r < (chunk + 1) * c.rows / CHUNKS; r++) work(chunk, r, c.x + r * c.n);
}

inline void moments(const BlockNorm &c, const float *x, float &mean, float &scale) {
  float first = x[0]; // taken out of the sum, so that the mean of equal channels is exact
  auto away = [=](auto like, int64_t e) { return load<decltype(like)>(x + e) - first; };
  mean = c.centred ? first + sum_of_channels(c.n, away) / c.n : 0;
  float squares = sum_of_channels(c.n, [=](auto like, int64_t e) {
    auto d = load<decltype(like)>(x + e) - mean;
    return d * d;
  });
  scale = 1 / std::sqrt(squares / c.n + float(c.eps));
}

template <class T> void norm_forward(const BlockNorm &c) {
  each_row(c, [&](int64_t, int64_t r, const float *x) {
    const float *weight = c.weight, *bias = c.bias;
    float mean, scale;
    moments(c, x, mean, scale);
    store_channels(static_cast<T *>(c.y) + r * c.n, c.n, [=](auto like, int64_t e) {
      using V = decltype(like);
      V y = (load<V>(x + e) - mean) * scale * load<V>(weight + e);
      return bias ? y + load<V>(bias + e) : y;
    });
  });
}

// with u = (x - mean) s and v = dy weight: dx = (v - mean(v) - u mean(v u)) s, without mean(v) if not centred
template <class T> void norm_backward(const BlockNorm &c) {
  each_row(c, [&](int64_t chunk, int64_t r, const float *x) {
    const T *grad = static_cast<const T *>(c.grad) + r * c.n;
    const float *weight = c.weight;
    float *grad_x = c.grad_x + r * c.n, *grad_weight = c.grad_weight + chunk * c.n;
    float mean, scale;
    moments(c, x, mean, scale);
    auto u = [=](auto like, int64_t e) { return (load<decltype(like)>(x + e) - mean) * scale; };
    auto v = [=](auto like, int64_t e) {
      return load<decltype(like)>(grad + e) * load<decltype(like)>(weight + e);
    };
    float mean_v = c.centred ? sum_of_channels(c.n, v) / c.n : 0;
    float along = sum_of_channels(c.n, [=](auto like, int64_t e) { return v(like, e) * u(like, e); }) / c.n;
#pragma omp simd
    for (int64_t e = 0; e < c.n; e++) grad_weight[e] += to_float(grad[e]) * u(0.f, e);
    if (c.grad_bias)
#pragma omp simd
      for (int64_t e = 0; e < c.n; e++) c.grad_bias[chunk * c.n + e] += to_float(grad[e]);
#pragma omp simd
    for (int64_t e = 0; e < c.n; e++) grad_x[e] = (v(0.f, e) - mean_v - u(0.f, e) * along) * scale;
  });
}

template <class F> void each_block(const Pointwise &c, F work) {
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t block = 0; block < (c.n + BLOCK - 1) / BLOCK; block++)
    work(block, block * BLOCK, std::min(c.n, (block + 1) * BLOCK));
}

// the factor of each element of a block: 0 if it is dropped
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
      for (int64_t e = start; e < end; e++) {
        float at = std::min(std::max(to_float(x[e]), -EDGE), EDGE);
        y[e - start] = to_float(grad[e]) * gelu_derivative(at);
      }
    else
#pragma omp simd
      for (int64_t e = start; e < end; e++) {
        float at = std::max(to_float(x[e]), -EDGE);
        y[e - start] = at * normal_distribution(std::min(at, EDGE));
      }
    store(out + start, y, end - start);
  });
}

// -----------------------------------------------------------------------------
// The operators

void check_parameter(const Tensor &x, int64_t n, const char *name) {
  check_fp32(x, name);
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == n && x.is_contiguous(), name, " must be (", n, ",) and contiguous");
}

int32_t output_dtype(ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "the result must be fp32 or bf16");
  return dtype == ScalarType::Float ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
}

// x is contiguous
BlockNorm block_norm_of(const Tensor &x, const Tensor &weight, double eps, bool centred) {
  check_fp32(x, "x");
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x must have channels");
  BlockNorm c{};
  c.n = x.size(x.dim() - 1), c.rows = x.numel() / c.n;
  check_parameter(weight, c.n, "weight");
  c.centred = centred, c.threads = torch::stable::get_num_threads(), c.eps = eps;
  c.x = pointer<float>(x), c.weight = pointer<float>(weight);
  return c;
}

Tensor layer_norm(const Tensor &given, const Tensor &weight, const MaybeTensor &bias, double eps, bool centred,
                  ScalarType dtype) {
  Tensor x = as_contiguous(given);
  BlockNorm c = block_norm_of(x, weight, eps, centred);
  if (bias) check_parameter(*bias, c.n, "bias");
  Tensor y = empty_as(x, output_dtype(dtype));
  c.bias = pointer<float>(bias), c.y = y.data_ptr();
  dtype == ScalarType::BFloat16 ? norm_forward<bf16>(c) : norm_forward<float>(c);
  return y;
}

// of x, weight and bias; without a bias the last is empty
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor &given_grad, const Tensor &given,
                                                       const Tensor &weight, bool has_bias, double eps, bool centred) {
  Tensor x = as_contiguous(given), grad = as_contiguous(given_grad), grad_x = empty_as(x);
  check_shape(grad, x, "grad");
  BlockNorm c = block_norm_of(x, weight, eps, centred);
  Tensor grad_weight = empty_as(weight), grad_bias = empty({has_bias ? c.n : 0}, aoti_torch_dtype_float32());
  Partial of_weight(c.n), of_bias(grad_bias.numel());
  c.grad = grad.data_ptr(), c.grad_x = pointer<float>(grad_x);
  c.grad_weight = of_weight.row(0), c.grad_bias = has_bias ? of_bias.row(0) : nullptr;
  itemsize(grad, "grad") == 2 ? norm_backward<bf16>(c) : norm_backward<float>(c);
  of_weight.sum(pointer<float>(grad_weight)), of_bias.sum(pointer<float>(grad_bias));
  return {grad_x, grad_weight, grad_bias};
}

Pointwise pointwise_of(const Tensor &out, const MaybeTensor &x, const MaybeTensor &y, const MaybeTensor &grad,
                       Dropout dropout) {
  return {out.numel(), dropout.dropped, dropout.seed, torch::stable::get_num_threads(),
          pointer<void>(x), pointer<void>(y), pointer<void>(grad), out.data_ptr()};
}

Tensor dropout_add(const Tensor &given_x, const Tensor &given_y, int64_t dropped, const MaybeTensor &seed) {
  Tensor x = as_contiguous(given_x), y = as_contiguous(given_y);
  check_fp32(x, "x"), check_shape(y, x, "y");
  Tensor out = empty_as(x);
  Pointwise c = pointwise_of(out, x, y, std::nullopt, dropout_of(dropped, seed));
  itemsize(y, "y") == 2 ? residual_forward<bf16>(c) : residual_forward<float>(c);
  return out;
}

Tensor dropout(const Tensor &given, int64_t dropped, const MaybeTensor &seed, ScalarType dtype) {
  Tensor x = as_contiguous(given);
  check_fp32(x, "x");
  Tensor out = empty_as(x, output_dtype(dtype));
  Pointwise c = pointwise_of(out, std::nullopt, std::nullopt, x, dropout_of(dropped, seed));
  dtype == ScalarType::BFloat16 ? residual_backward<bf16>(c) : residual_backward<float>(c);
  return out;
}

Tensor gelu_with(const Tensor &given, const MaybeTensor &grad) {
  Tensor x = as_contiguous(given);
  STD_TORCH_CHECK(is_bf16(x) && (!grad || is_bf16(*grad)), "GELU takes bf16 on a CPU");
  Tensor out = empty_as(x);
  gelu_of(pointwise_of(out, x, std::nullopt, grad, {0, 0}));
  return out;
}
Tensor gelu(const Tensor &x) { return gelu_with(x, std::nullopt); }
Tensor gelu_backward(const Tensor &grad, const Tensor &x) {
  check_shape(grad, x, "grad");
  return gelu_with(x, as_contiguous(grad));
}

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred, ScalarType dtype) -> Tensor");
  m.def("layer_norm_backward(Tensor grad, Tensor x, Tensor weight, bool has_bias, float eps, bool centred)"
        " -> (Tensor, Tensor, Tensor)");
  m.def("dropout_add(Tensor x, Tensor y, int dropped, Tensor? seed) -> Tensor");
  m.def("dropout(Tensor x, int dropped, Tensor? seed, ScalarType dtype) -> Tensor");
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("dropout_add", TORCH_BOX(&dropout_add));
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
}
