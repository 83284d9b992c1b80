// Linear layers on a CPU with AVX-512 bf16: y = x W^T, and the derivatives dx = dy W and dW = dy^T x. Matmuls are of
// bf16, sums in fp32 and the same for any number of threads. In training W and dW are fp32: a call rounds its operands
// and lays them out as well. PyTorch's own matmuls of large matrices are as fast.

#include "matmul.h"

#ifdef HAS_AVX512_BF16
struct Linear {
  int64_t rows, n_in, n_out, threads; // n_in, n_out: multiples of 16
  const uint16_t *x, *grad;           // (rows, n_in), (rows, n_out)
  const float *weight;                // (n_out, n_in)
};

constexpr int64_t BLOCK = 64; // rows at a time

// -----------------------------------------------------------------------------
// Matmuls

// A block's y (rows, columns) = a b, a (rows, depth), b as transposed() or paired() lay it out
void multiply_block(const uint16_t *a, int64_t rows, int64_t depth, const uint32_t *b, int64_t columns, uint16_t *y) {
  uint16_t *padded;
  float *c;
  room.lay_out([&](Room &r) { r.take(c, BLOCK * PANEL), r.take(padded, rows % 16 ? BLOCK * depth : 0); });
  if (rows % 16) copy_rows(a, depth, rows, depth, padded), a = padded;
  for (int64_t n = 0; n < columns; n += PANEL) {
    int64_t wide = std::min(PANEL, columns - n);
    matmul(a, depth / 2, 1, b + n * (depth / 2), depth / 2, c, PANEL, up_to(16, rows), wide, depth / 2);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t e = 0; e < wide; e += 16) put(y + r * columns + n + e, rounded(_mm512_load_ps(c + r * PANEL + e)));
  }
}

void forward(const Linear &a, uint32_t *weight, uint16_t *y) {
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for
    for (int64_t n = 0; n < a.n_out; n += PANEL)
      transposed(a.weight + n * a.n_in, a.n_in, std::min(PANEL, a.n_out - n), a.n_in, weight + n * (a.n_in / 2));
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < a.rows; r += BLOCK)
      multiply_block(a.x + r * a.n_in, std::min(BLOCK, a.rows - r), a.n_in, weight, a.n_out, y + r * a.n_out);
  }
}

// weight, x and grad: room for the operands, in panels
void backward(const Linear &a, uint32_t *weight, uint32_t *x, uint32_t *grad, uint16_t *grad_x, float *grad_weight) {
  int64_t height = up_to(2, a.rows) / 2; // words of two rows
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for nowait
    for (int64_t k = 0; k < a.n_in; k += PANEL) {
      int64_t wide = std::min(PANEL, a.n_in - k);
      paired(a.weight + k, a.n_in, a.n_out, wide, weight + k * (a.n_out / 2), a.n_out / 2);
      paired(a.x + k, a.n_in, a.rows, wide, x + k * height, height);
    }
#pragma omp for
    for (int64_t n = 0; n < a.n_out; n += PANEL)
      paired(a.grad + n, a.n_out, a.rows, std::min(PANEL, a.n_out - n), grad + n * height, height);
#pragma omp for schedule(dynamic) nowait
    for (int64_t r = 0; r < a.rows; r += BLOCK)
      multiply_block(a.grad + r * a.n_out, std::min(BLOCK, a.rows - r), a.n_out, weight, a.n_in, grad_x + r * a.n_in);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < a.n_out; n += PANEL)
      matmul(grad + n * height, 1, PANEL, x, height, grad_weight + n * a.n_in, a.n_in, std::min(PANEL, a.n_out - n),
             a.n_in, height);
  }
}

// y (M, N) = x w^T, x (M, n_in), w (N, n_in), n_in in 32s; a row of y lies n_out after the one before
template <int M, int N>
void dot_products(const uint16_t *x, const uint16_t *w, int64_t n_in, int64_t n_out, uint16_t *y) {
  __m512 sum[M][N] = {};
  for (int64_t k = 0; k < n_in; k += 32) {
    __m512bh right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = (__m512bh)_mm512_loadu_si512(w + n * n_in + k);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      __m512bh left = (__m512bh)_mm512_loadu_si512(x + m * n_in + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
    }
  }
  for (int m = 0; m < M; m++) {
    float row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) row[n] = _mm512_reduce_add_ps(sum[m][n]);
    store(reinterpret_cast<bf16 *>(y + m * n_out), row, N);
  }
}

// y (rows, n_out) = x w^T of a few rows: w is read once
void few_rows(const uint16_t *x, int64_t rows, const uint16_t *w, int64_t n_in, int64_t n_out, int64_t threads,
              uint16_t *y) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < n_out; n += 4)
    for (int64_t m = 0, step; m < rows; m += step) {
      step = m + 4 <= rows ? 4 : 1;
      bool whole = n + 4 <= n_out;
      auto work = step == 4 ? &dot_products<4, 4> : &dot_products<1, 4>;
      if (!whole) work = step == 4 ? &dot_products<4, 1> : &dot_products<1, 1>;
      for (int64_t e = n; e < (whole ? n + 1 : n_out); e++)
        work(x + m * n_in, w + e * n_in, n_in, n_out, y + m * n_out + e);
    }
}

// -----------------------------------------------------------------------------
// The operators

Linear linear_of(const Tensor &x, const Tensor &weight) {
  STD_TORCH_CHECK(is_bf16(x) && x.dim() > 0 && x.numel() > 0, "x must be (..., n_in) in bf16 on a CPU, and not empty");
  check_fp32(weight, "weight");
  int64_t n_in = x.size(x.dim() - 1), n_out = weight.size(0);
  bool fits = weight.dim() == 2 && weight.size(1) == n_in && weight.is_contiguous();
  STD_TORCH_CHECK(fits, "weight must be (n_out, n_in) and contiguous");
  STD_TORCH_CHECK(n_in > 0 && n_out > 0 && n_in % 16 == 0 && n_out % 16 == 0, "n_in and n_out must be multiples of 16");
  return {x.numel() / n_in, n_in, n_out, torch::stable::get_num_threads(), pointer<uint16_t>(x), nullptr,
          pointer<float>(weight)};
}

// Room for (rows, columns) words
Tensor empty_words(int64_t rows, int64_t columns) { return empty({rows, columns}, aoti_torch_dtype_float32()); }

// Room for (..., n_out) in bf16, where x is (..., n_in)
Tensor empty_output(const Tensor &x, int64_t n_out) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(x.dim(), 1);
  sizes.back() = n_out;
  for (int64_t d = x.dim() - 2; d >= 0; d--) strides[d] = strides[d + 1] * std::max<int64_t>(1, sizes[d + 1]);
  return empty(x.dim(), sizes.data(), strides.data(), aoti_torch_dtype_bfloat16());
}

Tensor linear(const Tensor &given, const Tensor &weight) {
  Tensor x = as_contiguous(given);
  Linear a = linear_of(x, weight);
  Tensor y = empty_output(x, a.n_out), by_weight = empty_words(a.n_in / 2, up_to(PANEL, a.n_out));
  forward(a, pointer<uint32_t>(by_weight), pointer<uint16_t>(y));
  return y;
}

// of x and of weight
std::tuple<Tensor, Tensor> linear_backward(const Tensor &given_grad, const Tensor &given, const Tensor &weight) {
  Tensor x = as_contiguous(given), grad = as_contiguous(given_grad);
  Linear a = linear_of(x, weight);
  bool fits = is_bf16(grad) && grad.dim() > 0 && grad.size(grad.dim() - 1) == a.n_out;
  STD_TORCH_CHECK(fits && grad.numel() == a.rows * a.n_out, "grad must be (..., n_out) in bf16 on a CPU");
  a.grad = pointer<uint16_t>(grad);
  int64_t wide = up_to(PANEL, a.n_in), height = up_to(2, a.rows) / 2;
  Tensor grad_x = empty_as(x), grad_weight = empty_as(weight);
  Tensor by_weight = empty_words(a.n_out / 2, wide), by_x = empty_words(height, wide);
  Tensor by_grad = empty_words(height, up_to(PANEL, a.n_out));
  backward(a, pointer<uint32_t>(by_weight), pointer<uint32_t>(by_x), pointer<uint32_t>(by_grad),
           pointer<uint16_t>(grad_x), pointer<float>(grad_weight));
  return {grad_x, grad_weight};
}

Tensor decoding_linear(const Tensor &given, const Tensor &weight) {
  Tensor x = as_contiguous(given);
  bool fits = is_bf16(x) && is_bf16(weight) && x.dim() > 0 && weight.dim() == 2 && weight.is_contiguous();
  STD_TORCH_CHECK(fits && weight.size(1) == x.size(x.dim() - 1), "x (..., n_in) and weight (n_out, n_in) must be in bf16");
  int64_t n_in = weight.size(1), n_out = weight.size(0);
  STD_TORCH_CHECK(n_in > 0 && n_in % 32 == 0, "n_in must be a multiple of 32");
  Tensor y = empty_output(x, n_out);
  few_rows(pointer<uint16_t>(x), x.numel() / n_in, pointer<uint16_t>(weight), n_in, n_out,
           torch::stable::get_num_threads(), pointer<uint16_t>(y));
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) {
  m.impl("decoding_linear", TORCH_BOX(&decoding_linear));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("decoding_linear(Tensor x, Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)");
}
