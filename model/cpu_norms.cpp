// QK norms on a CPU in one pass over the vectors, where PyTorch's operations take ten. The formulas are those of gpt.py's
// RMSNorm and LpNorm, in fp32. For the derivative a vector is normalised anew, so that x alone need be kept.

#include <algorithm>
#include <cmath>

#include "cpu_kernels.h"

// MAX_CHANNELS and CHUNKS are cpu_kernels.py's. The vectors are cut into CHUNKS for any number of threads: each has its
// own sum for the derivative of a factor.
constexpr int64_t GROUP = 16;       // vectors, or fewer,
constexpr int64_t ROOM = 4096;      // so that with all their channels they stay in the first cache: they go through each
                                    // step together, so that none waits for its own sums and roots
constexpr int64_t SERIAL = 1 << 14; // channels in all that one thread is done with sooner than two
constexpr float TINY = 1e-30f;      // LpNorm.TINY

// Vectors of n channels, side by side in memory; (i, j, k) is i * stride[0] + j * stride[1] + k * stride[2] from data.
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

struct Fold {
  int64_t heads, n, rank, itemsize, threads;
  const void *w, *q, *latent; // (heads, n, rank), (heads, n), (rank)
  void *q_latent;             // (heads, rank): q w
  float *k;                   // (heads, n): w latent; or null
};

// sgn(u) |u|^(p-1)
template <int TWICE_P> inline float direction(float u) {
  float a = std::fabs(u);
  if constexpr (TWICE_P == 2) return float(u > 0) - float(u < 0);
  if constexpr (TWICE_P == 3) return std::copysign(std::sqrt(a), u);
  if constexpr (TWICE_P == 4) return u;
  if constexpr (TWICE_P == 5) return u * std::sqrt(a);
  if constexpr (TWICE_P == 6) return u * a;
  if constexpr (TWICE_P == 7) return u * a * std::sqrt(a);
  return u * a * a;
}

// total^(-1/p)
template <int TWICE_P> inline float root(float total) {
  if constexpr (TWICE_P == 2) return 1 / total;
  if constexpr (TWICE_P == 4) return 1 / std::sqrt(total);
  if constexpr (TWICE_P == 8) return 1 / std::sqrt(std::sqrt(total));
  return std::pow(total, -2.f / TWICE_P);
}

// A group of vectors: their addresses, and room for their values, with zeros behind them up to a multiple of 16.
template <class T> struct Group {
  int64_t count, n, blocks, chunk;
  T *x[GROUP], *y[GROUP], *grad[GROUP], *grad_x[GROUP];
  float *scale[GROUP];
  int64_t j[GROUP];
  float total[GROUP], inverse[GROUP], along[GROUP], s[GROUP];
  float room[2][ROOM + 16 * GROUP];

  float *u(int64_t g) { return room[0] + g * 16 * blocks; }
  float *v(int64_t g) { return room[1] + g * 16 * blocks; }
  void read(const T *from, float *to) {
    int64_t whole = n / 16;
#pragma omp simd
    for (int64_t e = 0; e < 16 * whole; e++) to[e] = to_float(from[e]);
    for (int64_t e = 16 * whole; e < 16 * blocks; e++) to[e] = e < n ? to_float(from[e]) : 0;
  }
  template <class F> void write(T *to, F value) {
    float part[64];
    for (int64_t start = 0; start < n; start += 64) {
      int64_t count = std::min<int64_t>(64, n - start);
#pragma omp simd
      for (int64_t e = 0; e < count; e++) part[e] = value(start + e);
      store(to + start, part, count);
    }
  }
};

template <class T> T *at(const Vectors &v, int64_t i, int64_t j, int64_t k) {
  return static_cast<T *>(v.data) + i * v.stride[0] + j * v.stride[1] + k * v.stride[2];
}

template <class T, class F> void each_group(const Call &c, F work) {
  int64_t all = c.size[0] * c.size[1] * c.size[2];
  if (all == 0) return;
#pragma omp parallel for schedule(static) if (all * c.n > SERIAL) num_threads(c.threads)
  for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
    int64_t r = chunk * all / CHUNKS, end = (chunk + 1) * all / CHUNKS;
    int64_t i = r / c.size[2] / c.size[1], j = r / c.size[2] % c.size[1], k = r % c.size[2];
    Group<T> group;
    group.n = c.n, group.blocks = (c.n + 15) / 16, group.chunk = chunk;
    while (r < end) {
      group.count = std::min({end - r, GROUP, std::max<int64_t>(1, ROOM / c.n)});
      for (int64_t g = 0; g < group.count; g++, r++) {
        group.x[g] = at<T>(c.x, i, j, k), group.y[g] = at<T>(c.y, i, j, k);
        group.grad[g] = at<T>(c.grad, i, j, k), group.grad_x[g] = at<T>(c.grad_x, i, j, k);
        group.scale[g] = c.scale ? c.scale + r : nullptr, group.j[g] = j;
        if (++k == c.size[2]) k = 0, j++;
        if (j == c.size[1]) j = 0, i++;
      }
      work(group);
    }
  }
}

// u = x, s = 1 / sqrt(mean(x^2) + eps)
template <class T> void rms_of(Group<T> &group, double eps) {
  for (int64_t g = 0; g < group.count; g++) {
    float *u = group.u(g), total = 0;
    group.read(group.x[g], u);
#pragma omp simd reduction(+ : total)
    for (int64_t e = 0; e < 16 * group.blocks; e++) total += u[e] * u[e];
    group.total[g] = total;
  }
  for (int64_t g = 0; g < group.count; g++) group.s[g] = 1 / std::sqrt(group.total[g] / group.n + float(eps));
}

// u = x / max|x|, inverse = 1 / max|x|, total = sum |u|^p, s = 1 / ||u||_p; of a zero vector all are 0
template <int TWICE_P, class T> void norm_of(Group<T> &group) {
  for (int64_t g = 0; g < group.count; g++) {
    float *u = group.u(g), largest = 0;
    group.read(group.x[g], u);
#pragma omp simd reduction(max : largest)
    for (int64_t e = 0; e < 16 * group.blocks; e++) largest = std::max(largest, std::fabs(u[e]));
    group.inverse[g] = largest;
  }
  for (int64_t g = 0; g < group.count; g++) group.inverse[g] = group.inverse[g] > TINY ? 1 / group.inverse[g] : 0;
  for (int64_t g = 0; g < group.count; g++) {
    float *u = group.u(g), inverse = group.inverse[g], total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t e = 0; e < 16 * group.blocks; e++) {
      u[e] *= inverse;
      total += u[e] * direction<TWICE_P>(u[e]);
    }
    group.total[g] = total;
  }
  for (int64_t g = 0; g < group.count; g++) group.s[g] = group.total[g] == 0 ? 0 : root<TWICE_P>(group.total[g]);
}

template <class T> void rms_forward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    rms_of(group, c.eps);
    const float *gain = c.factor;
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), s = group.s[g];
      if (group.scale[g]) *group.scale[g] = s;
      if (group.y[g]) group.write(group.y[g], [=](int64_t e) { return u[e] * s * gain[e]; });
    }
  });
}

// dx = (dy g - y mean(dy g y)) s, with y = x s; dg = sum dy y
template <class T> void rms_backward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    rms_of(group, c.eps);
    const float *gain = c.factor;
    float *grad_gain = c.grad_factor + group.chunk * c.n;
    for (int64_t g = 0; g < group.count; g++) {
      float *y = group.u(g), *v = group.v(g), s = group.s[g], along = 0;
      group.read(group.grad[g], v);
#pragma omp simd reduction(+ : along)
      for (int64_t e = 0; e < c.n; e++) {
        y[e] *= s;
        grad_gain[e] += v[e] * y[e];
        v[e] *= gain[e];
        along += v[e] * y[e];
      }
      group.along[g] = along / c.n;
    }
    for (int64_t g = 0; g < group.count; g++) {
      float *y = group.u(g), *v = group.v(g), s = group.s[g], along = group.along[g];
      group.write(group.grad_x[g], [=](int64_t e) { return (v[e] - y[e] * along) * s; });
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
      if (group.y[g]) group.write(group.y[g], [=](int64_t e) { return u[e] * s; });
    }
  });
}

// dx = (dy - sgn(y) |y|^(p-1) sum(dy y)) / ||x||, and alpha times that; with y = u s and s^p = 1 / total it is
// (dy - direction(u) sum(dy u) / total) s / max|x|. dalpha = sum dy y
template <int TWICE_P, class T> void lp_backward(const Call &c) {
  each_group<T>(c, [&](Group<T> &group) {
    norm_of<TWICE_P>(group);
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), *v = group.v(g), along = 0;
      group.read(group.grad[g], v);
#pragma omp simd reduction(+ : along)
      for (int64_t e = 0; e < 16 * group.blocks; e++) along += v[e] * u[e];
      group.along[g] = along;
    }
    for (int64_t g = 0; g < group.count; g++) {
      float *u = group.u(g), *v = group.v(g), s = group.s[g] * group.inverse[g], along = group.along[g];
      if (c.factor) {
        int64_t of = group.j[g] % c.of_factor;
        c.grad_factor[group.chunk * c.of_factor + of] += along * group.s[g];
        s *= c.factor[of];
      }
      along = group.total[g] == 0 ? 0 : along / group.total[g];
      group.write(group.grad_x[g], [=](int64_t e) { return (v[e] - direction<TWICE_P>(u[e]) * along) * s; });
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

template <class T> void fold_heads(const Fold &f) {
  const T *w = static_cast<const T *>(f.w), *q = static_cast<const T *>(f.q), *c = static_cast<const T *>(f.latent);
  T *q_latent = static_cast<T *>(f.q_latent);
#pragma omp parallel for schedule(static) num_threads(f.threads)
  for (int64_t h = 0; h < f.heads; h++) {
    float latent[MAX_CHANNELS], sum[MAX_CHANNELS];
    for (int64_t e = 0; e < f.rank; e++) latent[e] = to_float(c[e]), sum[e] = 0;
    for (int64_t d = 0; d < f.n; d++) {
      const T *row = w + (h * f.n + d) * f.rank;
      float along = 0, factor = to_float(q[h * f.n + d]);
#pragma omp simd reduction(+ : along)
      for (int64_t e = 0; e < f.rank; e++) {
        float x = to_float(row[e]);
        along += x * latent[e];
        sum[e] += x * factor;
      }
      if (f.k) f.k[h * f.n + d] = along;
    }
    store(q_latent + h * f.rank, sum, f.rank);
  }
}

extern "C" void qk_norm(const Call *c) { c->itemsize == 2 ? run<bf16>(*c) : run<float>(*c); }
extern "C" void fold(const Fold *f) { f->itemsize == 2 ? fold_heads<bf16>(*f) : fold_heads<float>(*f); }
