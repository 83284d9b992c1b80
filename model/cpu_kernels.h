// What the kernels of cpu_*.cpp share: bf16, and the random bytes of dropout.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
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

// Bytes 64 block to 64 block + 63 of SplitMix64 (Steele et al. 2014) from `seed`: gpt.py's random_bytes. An element is
// dropped if its byte is less than `dropped`.
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
