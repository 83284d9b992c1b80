// RMS and Lp norms on a CPU, in one pass over the vectors, where PyTorch's operations take ten. The formulas are those
// of ops.py, in fp32. The derivative normalises a vector again, so that x alone is kept.

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels.h"

// The vectors are cut into CHUNKS, whatever the number of threads: each has its own sum for the derivative of a factor.
constexpr int64_t GROUP = 16;       // at most so many vectors take each step together: sums and roots overlap
constexpr int64_t ROOM = 4096;      // channels of a group at most: they stay in the first cache
constexpr int64_t SERIAL = 1 << 14; // for fewer channels in all one thread is faster than two
constexpr float TINY = 1e-30f;      // as in ops.py

// Vectors of n contiguous channels; (i, j, k) is i * stride[0] + j * stride[1] + k * stride[2] from data.
struct Vectors {
  void *data;
  int64_t stride[3];
};

struct Call {
  int64_t size[3], n;
  int64_t itemsize; // 2: bf16, 4: fp32
  int64_t twice_p;  // 0: RMS
  Vectors x, y, grad, grad_x;
  const float *factor; // RMS: gain (n). Lp: alpha, of all vectors (of_factor 1) or of each j; or null
  float *grad_factor;  // (CHUNKS, of_factor)
  int64_t of_factor;
  float *scale; // (size) or null
  int64_t threads;
  double eps;
};

inline Lanes magnitude(Lanes x) { return (Lanes)((Words)x & 0x7fffffff); }
inline Lanes square_root(Lanes x) {
  Lanes y;
#pragma omp simd
  for (int e = 0; e < WIDTH; e++) y[e] = std::sqrt(x[e]);
  return y;
}
inline Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; } // y if x is nan

// sgn(u) |u|^(p-1)
template <int TWICE_P> inline Lanes direction(Lanes u) {
  if constexpr (TWICE_P == 2) return __builtin_convertvector((u < 0) - (u > 0), Lanes);
  if constexpr (TWICE_P == 3) {
    Words sign = (Words)u & int32_t(0x80000000);
    return (Lanes)((Words)square_root(magnitude(u)) | sign);
  }
  if constexpr (TWICE_P == 4) return u;
  if constexpr (TWICE_P == 5) return u * square_root(magnitude(u));
  if constexpr (TWICE_P == 6) return u * magnitude(u);
  if constexpr (TWICE_P == 7) return u * magnitude(u) * square_root(magnitude(u));
  return u * u * u;
}

// total^(-1/p), to 1.2e-7 for 1e-20 < total < 1e20
template <int TWICE_P> inline float root(float total) {
  if constexpr (TWICE_P == 2) return 1 / total;
  if constexpr (TWICE_P == 4) return 1 / std::sqrt(total);
  if constexpr (TWICE_P == 8) return 1 / std::sqrt(std::sqrt(total));
  // else the y with y^2p total^2 = 1, by three steps of Newton's method. The bits of a float are about 2^23 (127 + its
  // log2), so that they give a first y; 0x3f7a0000 in place of the bits of 1 makes it good to 4 %.
  constexpr float r = 2.f / TWICE_P;
  float y = std::bit_cast<float>(int32_t((1 + r) * 0x3f7a0000 - r * float(std::bit_cast<int32_t>(total))));
  for (int i = 0; i < 3; i++) {
    float half = total * y * (TWICE_P > 3 ? y : 1) * (TWICE_P > 5 ? y : 1); // y^floor(p) total
    y += y * (1 - half * half * (TWICE_P % 2 ? y : 1)) / TWICE_P;
  }
  return y;
}

// A group of vectors: their addresses, and room for their values, which read() follows with zeros up to `padded`.
template <class T> struct Group {
  const int64_t n, padded, chunk; // padded: n up to a multiple of WIDTH
  int64_t count;
  T *x[GROUP], *y[GROUP], *grad[GROUP], *grad_x[GROUP];
  float *scale[GROUP];
  int64_t j[GROUP];
  float total[GROUP], inverse[GROUP], along[GROUP], s[GROUP];
  float room[2][ROOM + WIDTH * GROUP];

  Group(int64_t n, int64_t chunk) : n(n), padded((n + WIDTH - 1) / WIDTH * WIDTH), chunk(chunk) {}
  float *u(int64_t g) { return room[0] + g * padded; }
  float *v(int64_t g) { return room[1] + g * padded; }
  // work(at, x) with the channels at to at + WIDTH - 1 of x, zeros after the last
  template <class F> void read(const T *x, F work) const {
    int64_t at = 0, end = n - n % WIDTH;
    for (; at < end; at += WIDTH) work(at, lanes(x + at));
    if (at < n) work(at, last(x + at, n - at));
  }
  template <class F> void write(T *to, F value) const {
    int64_t at = 0, end = n - n % WIDTH;
    for (; at < end; at += WIDTH) put(to + at, value(at));
    if (at == n) return;
    float part[WIDTH];
    put(part, value(at)), store(to + at, part, n - at);
  }
  static __attribute__((noinline)) Lanes last(const T *x, int64_t count) {
    float rest[WIDTH] = {};
    for (int64_t e = 0; e < count; e++) rest[e] = to_float(x[e]);
    return lanes(rest);
  }
  // one number for each channel, with zeros after the last
  void pad(const float *x, float *to) {
    std::memcpy(to, x, 4 * n);
    std::memset(to + n, 0, 4 * (padded - n));
  }
};

template <class T> T *vector(const Vectors &v, const int64_t at[3]) {
  return static_cast<T *>(v.data) + at[0] * v.stride[0] + at[1] * v.stride[1] + at[2] * v.stride[2];
}

template <class T, class F> void each_group(const Call &c, F work) {
  int64_t all = c.size[0] * c.size[1] * c.size[2];
  int in = c.x.stride[1] < c.x.stride[2] ? 1 : 2, out = 3 - in; // the inner loop has the smaller stride
  if (all == 0) return;
#pragma omp parallel for schedule(static) if (all * c.n > SERIAL) num_threads(c.threads)
  for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
    int64_t r = chunk * all / CHUNKS, end = (chunk + 1) * all / CHUNKS;
    int64_t inner = c.size[in], outer = c.size[out], at[3] = {r / inner / outer, 0, 0}; // i, j, k
    at[out] = r / inner % outer, at[in] = r % inner;
    Group<T> group(c.n, chunk);
    const Vectors of[4] = {c.x, c.y, c.grad, c.grad_x};
    T *next[4];
    int64_t step[4], turn[4]; // to the next vector of the inner loop, and from its last one to the first of the outer's next
    for (int i = 0; i < 4; i++) {
      next[i] = vector<T>(of[i], at), step[i] = of[i].stride[in];
      turn[i] = of[i].stride[out] - (inner - 1) * step[i];
    }
    while (r < end) {
      group.count = std::min({end - r, GROUP, std::max<int64_t>(1, ROOM / c.n)});
      for (int64_t g = 0; g < group.count; g++, r++) {
        group.x[g] = next[0], group.y[g] = next[1], group.grad[g] = next[2], group.grad_x[g] = next[3];
        group.scale[g] = c.scale ? c.scale + (at[0] * c.size[1] + at[1]) * c.size[2] + at[2] : nullptr;
        group.j[g] = at[1];
        // in a model they come from the third cache or memory: asked for, a group's vectors come together
        __builtin_prefetch(next[0]);
        if (c.grad.data) __builtin_prefetch(next[2]), __builtin_prefetch(next[3], 1);
        else __builtin_prefetch(next[1], 1);
        if (++at[in] < inner) {
          for (int i = 0; i < 4; i++) next[i] += step[i];
        } else if (at[in] = 0; ++at[out] < outer) {
          for (int i = 0; i < 4; i++) next[i] += turn[i];
        } else if (at[out] = 0; r + 1 < end) {
          at[0]++;
          for (int i = 0; i < 4; i++) next[i] = vector<T>(of[i], at);
        }
      }
      work(group);
    }
  }
}

// u = x, s = 1 / sqrt(mean(x^2) + eps)
template <class T> void rms_of(Group<T> &group, double eps) {
  for (int64_t g = 0; g < group.count; g++) {
    Lanes total = {};
    float *u = group.u(g);
    group.read(group.x[g], [&](int64_t at, Lanes x) {
      put(u + at, x);
      total += x * x;
    });
    group.total[g] = sum_of(total);
  }
  for (int64_t g = 0; g < group.count; g++) group.s[g] = 1 / std::sqrt(group.total[g] / group.n + float(eps));
}

// u = x / max|x|, inverse = 1 / max|x|, total = sum |u|^p; of a zero vector all are 0. Seldom called: not inlined
template <int TWICE_P, class T> __attribute__((noinline)) void scale_by_absmax(Group<T> &group, int64_t g) {
  Lanes largest = {}, total = {};
  float *u = group.u(g);
  for (int64_t at = 0; at < group.padded; at += WIDTH) largest = larger(magnitude(lanes(u + at)), largest);
  float most = largest_of(largest), inverse = most > TINY ? 1 / most : 0;
  for (int64_t at = 0; at < group.padded; at += WIDTH) {
    Lanes scaled = lanes(u + at) * inverse;
    put(u + at, scaled);
    total += scaled * direction<TWICE_P>(scaled);
  }
  group.total[g] = sum_of(total), group.inverse[g] = inverse;
}

// u = x, inverse = 1, total = sum |u|^p, s = 1 / ||u||_p. Where ||x||_p is not within 1e-4 and 1e4 powers of x, or their
// products with gradients, might over- or underflow: there scale_by_absmax() comes in.
template <int TWICE_P, class T> void norm_of(Group<T> &group) {
  float most = 1; // 1e4^p
  for (int i = 0; i < TWICE_P; i++) most *= 100;
  for (int64_t g = 0; g < group.count; g++) {
    Lanes total = {};
    float *u = group.u(g);
    group.read(group.x[g], [&](int64_t at, Lanes x) {
      put(u + at, x);
      total += x * direction<TWICE_P>(x);
    });
    group.total[g] = sum_of(total), group.inverse[g] = 1;
  }
  for (int64_t g = 0; g < group.count; g++)
    if (!(group.total[g] > 1 / most && group.total[g] < most)) scale_by_absmax<TWICE_P>(group, g); // nan too
  for (int64_t g = 0; g < group.count; g++) group.s[g] = group.total[g] == 0 ? 0 : root<TWICE_P>(group.total[g]);
}

template <class T> void rms_forward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    float gain[MAX_CHANNELS];
    rms_of(group, c.eps);
    if (c.factor) group.pad(c.factor, gain);
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), s = group.s[g];
      if (group.scale[g]) *group.scale[g] = s;
      if (group.y[g]) group.write(group.y[g], [&](int64_t at) { return lanes(u + at) * s * lanes(gain + at); });
    }
  });
}

// dx = (dy g - y mean(dy g y)) s, with y = x s; dg = sum dy y
template <class T> void rms_backward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    float gain[MAX_CHANNELS], grad_gain[MAX_CHANNELS];
    rms_of(group, c.eps);
    group.pad(c.factor, gain);
    std::memset(grad_gain, 0, 4 * group.padded);
    for (int64_t g = 0; g < group.count; g++) {
      Lanes along = {};
      float *u = group.u(g), *v = group.v(g), s = group.s[g];
      group.read(group.grad[g], [&](int64_t at, Lanes grad) {
        Lanes y = lanes(u + at) * s, term = grad * lanes(gain + at);
        put(grad_gain + at, lanes(grad_gain + at) + grad * y);
        put(u + at, y), put(v + at, term);
        along += term * y;
      });
      group.along[g] = sum_of(along) / group.n;
    }
    for (int64_t e = 0; e < c.n; e++) c.grad_factor[group.chunk * c.n + e] += grad_gain[e];
    for (int64_t g = 0; g < group.count; g++) {
      float *y = group.u(g), *v = group.v(g), s = group.s[g], along = group.along[g];
      group.write(group.grad_x[g], [=](int64_t at) { return (lanes(v + at) - lanes(y + at) * along) * s; });
    }
  });
}

template <int TWICE_P, class T> void lp_forward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    norm_of<TWICE_P>(group);
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), s = group.s[g];
      if (group.scale[g]) *group.scale[g] = s * group.inverse[g];
      if (c.factor) s *= c.factor[group.j[g] % c.of_factor];
      if (group.y[g]) group.write(group.y[g], [=](int64_t at) { return lanes(u + at) * s; });
    }
  });
}

// dx = (dy - sgn(y) |y|^(p-1) sum(dy y)) / ||x||, and alpha times that; with y = u s and s^p = 1 / total it is
// (dy - direction(u) sum(dy u) / total) s inverse. dalpha = sum dy y
template <int TWICE_P, class T> void lp_backward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    norm_of<TWICE_P>(group);
    for (int64_t g = 0; g < group.count; g++) {
      Lanes along = {};
      float *u = group.u(g), *v = group.v(g);
      group.read(group.grad[g], [&](int64_t at, Lanes grad) {
        along += grad * lanes(u + at);
        put(v + at, grad);
      });
      group.along[g] = sum_of(along);
    }
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), *v = group.v(g), s = group.s[g] * group.inverse[g], along = group.along[g];
      if (c.factor) {
        int64_t of = group.j[g] % c.of_factor;
        c.grad_factor[group.chunk * c.of_factor + of] += along * group.s[g];
        s *= c.factor[of];
      }
      along = group.total[g] == 0 ? 0 : along / group.total[g];
      group.write(group.grad_x[g], [=](int64_t at) {
        return (lanes(v + at) - direction<TWICE_P>(lanes(u + at)) * along) * s;
      });
    }
  });
}

template <class T> void run(const Call &c) {
  bool back = c.grad.data;
  switch (c.twice_p) {
  case 0: return back ? rms_backward<T>(c) : rms_forward<T>(c);
  case 2: return back ? lp_backward<2, T>(c) : lp_forward<2, T>(c);
  case 3: return back ? lp_backward<3, T>(c) : lp_forward<3, T>(c);
  case 4: return back ? lp_backward<4, T>(c) : lp_forward<4, T>(c);
  case 5: return back ? lp_backward<5, T>(c) : lp_forward<5, T>(c);
  case 6: return back ? lp_backward<6, T>(c) : lp_forward<6, T>(c);
  case 7: return back ? lp_backward<7, T>(c) : lp_forward<7, T>(c);
  case 8: return back ? lp_backward<8, T>(c) : lp_forward<8, T>(c);
  }
}

// -----------------------------------------------------------------------------
// The operators

Vectors vectors(const Tensor &x) {
  Vectors v{x.data_ptr(), {0, 0, 0}};
  for (int64_t d = 0; d + 1 < x.dim(); d++) v.stride[4 - x.dim() + d] = x.stride(d);
  return v;
}

// Room for as many vectors, dense, in the order of their strides in x (..., n), of equal ones in that of the dimensions.
// torch::stable::empty_like costs more
Tensor empty_vectors(const Tensor &x) {
  if (x.is_contiguous()) return empty_as(x);
  int64_t dim = x.dim(), order[4] = {0, 1, 2, 3}, strides[4], step = 1;
  auto before = [&](int64_t a, int64_t b) { return x.stride(a) == x.stride(b) ? a < b : x.stride(a) > x.stride(b); };
  std::sort(order, order + dim - 1, before);
  for (int64_t i = dim - 1; i >= 0; i--) strides[order[i]] = step, step *= x.size(order[i]);
  return empty(dim, x.sizes().data(), strides, is_bf16(x) ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32());
}

// x (..., n) has contiguous_last_dim, factor is fp32 and contiguous
Call call_of(const Tensor &x, const MaybeTensor &factor, int64_t twice_p, double eps) {
  int64_t dim = x.dim();
  STD_TORCH_CHECK(0 < dim && dim <= 4, "x must have 1 to 4 dimensions");
  Call c{};
  c.size[0] = c.size[1] = c.size[2] = 1;
  for (int64_t d = 0; d + 1 < dim; d++) c.size[4 - dim + d] = x.size(d);
  c.n = x.size(dim - 1);
  STD_TORCH_CHECK(0 < c.n && c.n <= MAX_CHANNELS, "x must have 1 to ", MAX_CHANNELS, " channels");
  c.itemsize = itemsize(x, "x"), c.twice_p = twice_p, c.eps = eps, c.threads = torch::stable::get_num_threads();
  c.x = vectors(x);
  if (factor) {
    auto of = factor->sizes();
    bool a_head = dim > 2 && of.size() == 3 && of[0] == c.size[1] && of[1] * of[2] == 1;
    bool fits = twice_p == 0 ? of.size() == 1 && of[0] == c.n : factor->numel() == 1 || a_head;
    STD_TORCH_CHECK(fits, "the factor's shape does not fit x");
    c.factor = pointer<float>(*factor), c.of_factor = factor->numel();
  }
  return c;
}
void run(const Call &c) { c.itemsize == 2 ? run<bf16>(c) : run<float>(c); }

Tensor normalized(const Tensor &given, const MaybeTensor &given_factor, int64_t twice_p, double eps) {
  Tensor x = contiguous_last_dim(given);
  MaybeTensor factor = exact(given_factor);
  Call c = call_of(x, factor, twice_p, eps);
  Tensor y = empty_vectors(x);
  c.y = vectors(y);
  run(c);
  return y;
}

std::tuple<Tensor, Tensor> normalized_backward(const Tensor &given_grad, const Tensor &given,
                                               const MaybeTensor &given_factor, int64_t twice_p, double eps) {
  Tensor x = contiguous_last_dim(given), grad = given_grad;
  check_shape(grad, x, "grad");
  MaybeTensor factor = exact(given_factor);
  Call c = call_of(x, factor, twice_p, eps);
  if (itemsize(grad, "grad") != c.itemsize) grad = torch::stable::to(grad, x.scalar_type());
  grad = contiguous_last_dim(grad);
  Tensor grad_x = empty_vectors(x);
  c.grad = vectors(grad), c.grad_x = vectors(grad_x);
  Tensor grad_factor = factor ? empty_as(*factor) : empty({0}, aoti_torch_dtype_float32());
  Partial parts(grad_factor.numel());
  c.grad_factor = parts.row(0);
  run(c);
  parts.sum(pointer<float>(grad_factor));
  return {grad_x, grad_factor};
}

Tensor inverse(const Tensor &given, int64_t twice_p, double eps) {
  Tensor x = contiguous_last_dim(given);
  Call c = call_of(x, std::nullopt, twice_p, eps);
  int64_t sizes[4], strides[4], step = 1;
  for (int64_t d = x.dim() - 1; d >= 0; d--)
    sizes[d] = d == x.dim() - 1 ? 1 : x.size(d), strides[d] = step, step *= sizes[d];
  Tensor scale = empty(x.dim(), sizes, strides, aoti_torch_dtype_float32());
  c.scale = pointer<float>(scale);
  run(c);
  return scale;
}

int64_t twice(double p) {
  STD_TORCH_CHECK(p >= 1 && p <= 4 && int64_t(2 * p) == 2 * p, "p must be one of 1, 1.5, 2, 2.5, 3, 3.5, 4");
  return int64_t(2 * p);
}

Tensor rms_norm(const Tensor &x, const Tensor &gain, double eps) { return normalized(x, gain, 0, eps); }
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad, const Tensor &x, const Tensor &gain, double eps) {
  return normalized_backward(grad, x, gain, 0, eps);
}
Tensor inverse_rms(const Tensor &x, double eps) { return inverse(x, 0, eps); }
Tensor lp_norm(const Tensor &x, const MaybeTensor &alpha, double p) { return normalized(x, alpha, twice(p), 0); }
std::tuple<Tensor, Tensor> lp_norm_backward(const Tensor &grad, const Tensor &x, const MaybeTensor &alpha, double p) {
  return normalized_backward(grad, x, alpha, twice(p), 0);
}
Tensor inverse_lp_norm(const Tensor &x, double p) { return inverse(x, twice(p), 0); }

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("rms_norm(Tensor x, Tensor gain, float eps) -> Tensor");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor gain, float eps) -> (Tensor, Tensor)");
  m.def("inverse_rms(Tensor x, float eps) -> Tensor");
  m.def("lp_norm(Tensor x, Tensor? alpha, float p) -> Tensor");
  m.def("lp_norm_backward(Tensor grad, Tensor x, Tensor? alpha, float p) -> (Tensor, Tensor)");
  m.def("inverse_lp_norm(Tensor x, float p) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("inverse_rms", TORCH_BOX(&inverse_rms));
  m.impl("lp_norm", TORCH_BOX(&lp_norm));
  m.impl("lp_norm_backward", TORCH_BOX(&lp_norm_backward));
  m.impl("inverse_lp_norm", TORCH_BOX(&inverse_lp_norm));
}
