// Gradient clipping on a CPU, all gradients in one call.

#include <cmath>

#include "kernels.h"

constexpr int64_t PART = 4096; // elements at a time

// The norm of all gradients together, (). If it is larger than max_norm they are scaled to max_norm.
Tensor clip_grad_norm_(std::vector<Tensor> grads, double max_norm) {
  struct Part {
    float *x;
    int64_t n;
  };
  std::vector<Part> parts;
  for (const Tensor &grad : grads) {
    check_fp32(grad, "a gradient");
    STD_TORCH_CHECK(grad.is_contiguous(), "a gradient must be contiguous");
    for (int64_t i = 0; i < grad.numel(); i += PART)
      parts.push_back({pointer<float>(grad) + i, std::min(PART, grad.numel() - i)});
  }
  std::vector<float> squares(parts.size());
  int64_t threads = torch::stable::get_num_threads(), n_parts = parts.size();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < n_parts; i++)
    squares[i] = sum_of_channels(parts[i].n, [x = parts[i].x](auto like, int64_t e) {
      auto v = load<decltype(like)>(x + e);
      return v * v;
    });
  double sum = 0;
  for (float part : squares) sum += part;
  Tensor norm = empty(0, nullptr, nullptr, aoti_torch_dtype_float32());
  *pointer<float>(norm) = float(std::sqrt(sum));
  float factor = max_norm / (std::sqrt(sum) + 1e-6); // as in torch.nn.utils.clip_grad_norm_
  if (factor < 1)
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n_parts; i++)
#pragma omp simd
      for (int64_t e = 0; e < parts[i].n; e++) parts[i].x[e] *= factor;
  return norm;
}

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("clip_grad_norm_(Tensor(a!)[] grads, float max_norm) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) { m.impl("clip_grad_norm_", TORCH_BOX(&clip_grad_norm_)); }
