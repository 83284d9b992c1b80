// Shared by the kernels: checks of arguments, allocation of results, bf16, dropout's random bytes, and vectors of
// channels. The operators are registered on PyTorch's stable ABI (torch/csrc/stable).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512_BF16
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define TORCH_TARGET_VERSION 0x020a000000000000 // PyTorch 2.10
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK // PyTorch 2.10
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t MAX_CHANNELS = 2048; // of a vector; operators.py has the same number
constexpr int64_t CHUNKS = 64; // partial sums of a parameter's derivative, whatever the number of threads

inline bool has_dtype(const Tensor &x, int32_t dtype) {
  int32_t its;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &its));
  return x.is_cpu() && its == dtype;
}
inline bool is_fp32(const Tensor &x) { return has_dtype(x, aoti_torch_dtype_float32()); }
inline bool is_bf16(const Tensor &x) { return has_dtype(x, aoti_torch_dtype_bfloat16()); }

// 2 for bf16, 4 for fp32; raises for all else
inline int64_t itemsize(const Tensor &x, const char *name) {
  if (is_bf16(x)) return 2;
  STD_TORCH_CHECK(is_fp32(x), name, " must be fp32 or bf16 on a CPU");
  return 4;
}
inline void check_fp32(const Tensor &x, const char *name) {
  STD_TORCH_CHECK(is_fp32(x), name, " must be fp32 on a CPU");
}

inline bool same_shape(const Tensor &x, const Tensor &y) {
  auto a = x.sizes(), b = y.sizes();
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 8 * a.size()) == 0;
}
inline void check_shape(const Tensor &x, const Tensor &like, const char *name) {
  STD_TORCH_CHECK(same_shape(x, like), name, " has another shape");
}

inline Tensor as_contiguous(const Tensor &x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }
inline Tensor contiguous_last_dim(const Tensor &x) {
  return x.dim() > 0 && x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x);
}

// A factor as the kernels read it: contiguous, in fp32
inline MaybeTensor exact(const MaybeTensor &factor) {
  if (!factor) return factor;
  return as_contiguous(is_fp32(*factor) ? *factor : torch::stable::to(*factor, ScalarType::Float));
}

template <class T> T *pointer(const Tensor &x) { return static_cast<T *>(x.data_ptr()); }
template <class T> T *pointer(const MaybeTensor &x) { return x ? pointer<T>(*x) : nullptr; }

// An uninitialized tensor on the CPU. `dtype` is one of aoti_torch_dtype_...()
inline Tensor empty(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
template <int D> Tensor empty(const int64_t (&sizes)[D], int32_t dtype) {
  int64_t strides[D], step = 1;
  for (int d = D - 1; d >= 0; d--) strides[d] = step, step *= sizes[d];
  return empty(D, sizes, strides, dtype);
}
// x must be contiguous
inline Tensor empty_as(const Tensor &x, int32_t dtype) {
  return empty(x.dim(), x.sizes().data(), x.strides().data(), dtype);
}
inline Tensor empty_as(const Tensor &x) {
  return empty_as(x, is_bf16(x) ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32());
}

// Partial sums of a parameter's derivative, one row a chunk. Their sum rounds as PyTorch's sum over the rows does on a
// CPU with AVX2: sixteen rows at a time for whole blocks of columns, interleaved for the last columns and for a single
// one.
struct Partial {
  int64_t n;
  std::vector<float> rows;

  explicit Partial(int64_t n) : n(n), rows(CHUNKS * n) {}
  float *row(int64_t chunk) { return rows.data() + chunk * n; }

  void sum(float *to) {
    int64_t blocks = n < 8 ? n / 4 * 4 : n / 32 * 32;
    std::vector<float> part(n);
    std::fill(to, to + n, 0.f);
    for (int64_t first = 0; first < CHUNKS; first += 16) {
      std::fill(part.begin(), part.end(), 0.f);
      for (int64_t r = first; r < first + 16; r++)
        for (int64_t e = 0; e < blocks; e++) part[e] += row(r)[e];
      for (int64_t e = 0; e < blocks; e++) to[e] += part[e];
    }
    for (int64_t e = blocks; e < n; e++)
      for (int64_t lane = 0, lanes = n == 1 ? 8 : 1; lane < lanes; lane++) {
        float four[4] = {};
        for (int64_t r = 0; r < CHUNKS / lanes; r++) four[r % 4] += row(r * lanes + lane)[e];
        to[e] += four[0] + four[1] + four[2] + four[3];
      }
  }
};

// Dropout: an element is dropped if its random byte is less than `dropped`; the bytes follow from `seed`.
struct Dropout {
  int64_t dropped, seed;
};
inline Dropout dropout_of(int64_t dropped, const MaybeTensor &seed) {
  STD_TORCH_CHECK(0 <= dropped && dropped < 256, "dropped must be one of 0 .. 255");
  if (!dropped) return {0, 0};
  STD_TORCH_CHECK(seed && has_dtype(*seed, aoti_torch_dtype_int64()) && seed->numel() == 1,
                  "dropout needs a seed, one int64 on a CPU");
  return {dropped, *pointer<int64_t>(*seed)};
}

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void store(float *to, const float *x, int64_t n) { std::memcpy(to, x, 4 * n); }
inline void store(bf16 *to, const float *x, int64_t n) { // to the nearest, ties to even
#ifdef HAS_AVX512_BF16
  for (int64_t e = 0; e < n; e += 16) {
    __mmask16 there = n - e < 16 ? (1 << (n - e)) - 1 : 0xffff;
    _mm256_mask_storeu_epi16(to + e, there, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, x + e)));
  }
#else
#pragma omp simd
  for (int64_t e = 0; e < n; e++) {
    uint32_t bits;
    std::memcpy(&bits, x + e, 4);
    to[e].bits = uint16_t(x[e] != x[e] ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
#endif
}

// Bytes 64 block to 64 block + 63 of SplitMix64 (Steele et al. 2014) from `seed`: random_bytes() of ops.py.
inline void random_bytes(int64_t seed, int64_t block, uint8_t bytes[64]) {
  uint64_t words[8];
#pragma omp simd
  for (int64_t i = 0; i < 8; i++) {
    uint64_t z = uint64_t(seed) + uint64_t(8 * block + i + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    words[i] = z ^ z >> 31;
  }
  std::memcpy(bytes, words, 64);
}

#ifdef HAS_AVX512_BF16
inline __m512i row_pair(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void put(uint16_t *to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }
inline __m512 widened(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }

inline __m512 exponential(__m512 x) { // of x <= 88, to 2 ulp; of less than -104 it is 0
  x = _mm512_max_ps(_mm512_set1_ps(-104.f), x); // this order of the operands keeps nan
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x), y = _mm512_set1_ps(1.9875691500e-4f);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.f, 1.f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}
#endif

// Channels that take a step together, in a vector type of GCC's
#ifdef __AVX512F__
constexpr int64_t WIDTH = 16;
#else
constexpr int64_t WIDTH = 8;
#endif
using Lanes = float __attribute__((vector_size(4 * WIDTH)));
using Words = int32_t __attribute__((vector_size(4 * WIDTH)));

inline Lanes lanes(const float *x) {
  Lanes y;
  std::memcpy(&y, x, sizeof y);
  return y;
}
inline Lanes lanes(const bf16 *x) {
#ifdef HAS_AVX512_BF16
  return (Lanes)widened(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
#else
  uint16_t __attribute__((vector_size(2 * WIDTH))) half;
  std::memcpy(&half, x, sizeof half);
  return (Lanes)(__builtin_convertvector(half, Words) << 16);
#endif
}
inline void put(float *to, Lanes x) { std::memcpy(to, &x, sizeof x); }
inline void put(bf16 *to, Lanes x) {
#ifdef HAS_AVX512_BF16
  put(&to->bits, rounded((__m512)x));
#else
  float part[WIDTH];
  put(part, x), store(to, part, WIDTH);
#endif
}
// in halves: of sixteen x[i] and x[i + 8] first
inline float sum_of(Lanes x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}
inline float largest_of(Lanes x) { // none is nan
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  return std::max(std::max(std::max(x[0], x[4]), std::max(x[2], x[6])),
                  std::max(std::max(x[1], x[5]), std::max(x[3], x[7])));
#endif
}

// sum over e < n of term(like, e): of channels e to e + WIDTH - 1 at once if `like` is Lanes, of channel e if it is float
template <class F> float sum_of_channels(int64_t n, F term) {
  Lanes total = {};
  int64_t e = 0;
  for (; e + WIDTH <= n; e += WIDTH) total += term(Lanes{}, e);
  float sum = sum_of(total);
  for (; e < n; e++) sum += term(0.f, e);
  return sum;
}
template <class V, class T> V load(const T *x) {
  if constexpr (std::is_same_v<V, Lanes>) return lanes(x);
  else return to_float(*x);
}
// to[e] = value(like, e) for e < n
template <class T, class F> void store_channels(T *to, int64_t n, F value) {
  float part[WIDTH];
  int64_t e = 0;
  for (; e + WIDTH <= n; e += WIDTH) put(to + e, value(Lanes{}, e));
  for (int64_t i = e; i < n; i++) part[i - e] = value(0.f, i);
  store(to + e, part, n - e);
}
