// Matmuls of bf16, summed in fp32, on a CPU with AVX-512 bf16.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "kernels.h"

#ifdef HAS_AVX512_BF16
constexpr int64_t PANEL = 64; // columns of a right operand that are stored together
constexpr int64_t DEPTH = 512; // of a matmul at a time, so that a panel stays in a cache

// c (4, 16 N) = or += a b, of bf16 in pairs along the sum: a[m * am + k * ak] and b[k * PANEL + n]
template <int N>
void matmul_panel(const uint32_t *a, int64_t am, int64_t ak, const uint32_t *b, float *c, int64_t ldc, int64_t depth,
                  bool add) {
  __m512 sum[4][N] = {};
  for (int64_t k = 0; k < depth; k++) {
    __m512bh right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = (__m512bh)_mm512_loadu_si512(b + k * PANEL + 16 * n);
#pragma GCC unroll 4
    for (int m = 0; m < 4; m++) {
      __m512bh left = (__m512bh)_mm512_set1_epi32(a[m * am + k * ak]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float *to = c + m * ldc + 16 * n;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[m][n]) : sum[m][n]);
    }
}

// c = or += a b, a as matmul_panel() takes it. b as transposed() or paired() lay it out, in panels of `height` rows of
// PANEL words, of which `depth` are taken. Rows and columns come in sixteens.
inline void matmul(const void *a, int64_t am, int64_t ak, const uint32_t *b, int64_t height, float *c, int64_t ldc,
                   int64_t rows, int64_t columns, int64_t depth, bool add = false) {
  constexpr decltype(&matmul_panel<1>) of_width[] = {matmul_panel<1>, matmul_panel<2>, matmul_panel<3>,
                                                     matmul_panel<4>};
  for (int64_t k = 0; k < depth; k += DEPTH)
    for (int64_t n = 0; n < columns; n += PANEL) {
      int64_t wide = std::min(PANEL, columns - n), deep = std::min(DEPTH, depth - k);
      const uint32_t *left = static_cast<const uint32_t *>(a) + k * ak, *right = b + n * height + k * PANEL;
      for (int64_t m = 0; m < rows; m += 4)
        of_width[wide / 16 - 1](left + m * am, am, ak, right, c + m * ldc + n, ldc, deep, add || k);
    }
}

inline void transpose(__m512i (&x)[16]) { // 16 x 16 words, quarters of squares of 2, 4, 8, 16
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int step = 1; step < 16; step *= 2) {
    __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(step));
    __m512i first = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - step));
    __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(step));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & step)) {
        __m512i a = x[i], b = x[i + step];
        x[i] = _mm512_permutex2var_epi32(a, first, b);
        x[i + step] = _mm512_permutex2var_epi32(a, second, b);
      }
  }
}

// Sixteen bf16 numbers, and words of two neighbours; fp32 numbers are rounded
inline __m256i halves(const uint16_t *x, bool there) { return _mm256_maskz_loadu_epi16(there ? 0xffff : 0, x); }
inline __m256i halves(const float *x, bool there) { return rounded(_mm512_maskz_loadu_ps(there ? 0xffff : 0, x)); }
inline __m512i words(const uint16_t *x, __mmask16 there) { return _mm512_maskz_loadu_epi32(there, x); }
inline __m512i words(const float *x, __mmask16 there) {
  __m512 first = _mm512_maskz_loadu_ps(there ? 0xffff : 0, x);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(there >> 15 ? 0xffff : 0, x + 16), first);
}

// x (rows, n) as the right operand x^T: words of two channels, a column for each row; zeros after the rows
template <class T> void transposed(const T *x, int64_t stride, int64_t rows, int64_t n, uint32_t *to) {
  for (int64_t r = 0; r < (rows + PANEL - 1) / PANEL * PANEL; r += 16)
    for (int64_t c = 0; c < n / 2; c += 16) {
      int64_t height = std::min<int64_t>(16, n / 2 - c);
      uint32_t *panel = to + r / PANEL * PANEL * (n / 2) + r % PANEL + c * PANEL;
      __m512i square[16];
      for (int i = 0; i < 16; i++)
        square[i] = words(x + (r + i) * stride + 2 * c, r + i < rows ? (1 << height) - 1 : 0);
      transpose(square);
      for (int i = 0; i < height; i++) _mm512_storeu_si512(panel + i * PANEL, square[i]);
    }
}

// x (rows, n) as the right operand x: words of two rows; zeros after them up to `height` words
template <class T> void paired(const T *x, int64_t stride, int64_t rows, int64_t n, uint32_t *to, int64_t height) {
  for (int64_t w = 0; w < height; w++)
    for (int64_t c = 0; c < n; c += 16) {
      __m256i row[2];
      for (int64_t i = 0; i < 2; i++) row[i] = halves(x + (2 * w + i) * stride + c, 2 * w + i < rows);
      _mm512_storeu_si512(to + c / PANEL * PANEL * height + w * PANEL + c % PANEL, row_pair(row[0], row[1]));
    }
}

inline int64_t up_to(int64_t multiple, int64_t n) { return (n + multiple - 1) / multiple * multiple; }

struct Room { // memory of one thread, kept for its next call
  char *data = nullptr;
  int64_t size = 0, used = 0;
  ~Room() { std::free(data); }

  // A first pass of `work` without memory adds up what its calls of take() ask for.
  template <class F> void lay_out(F work) {
    char *kept = data;
    data = nullptr, used = 0;
    work(*this);
    data = kept;
    if (used > size) {
      std::free(data);
      data = static_cast<char *>(std::aligned_alloc(64, size = used));
      if (!data) std::abort();
    }
    used = 0;
    work(*this);
  }
  template <class T> void take(T *&to, int64_t n) {
    to = reinterpret_cast<T *>(data + used);
    used += up_to(64, n * sizeof(T));
  }
};
inline thread_local Room room;

// x (rows, n), and zeros up to the next multiple of 16 rows
inline void copy_rows(const uint16_t *x, int64_t stride, int64_t rows, int64_t n, uint16_t *to) {
  for (int64_t r = 0; r < rows; r++) std::memcpy(to + r * n, x + r * stride, 2 * n);
  std::memset(to + rows * n, 0, 2 * n * (up_to(16, rows) - rows));
}
#endif
