// Matmuls on a CPU's matrix units (AMX): eight tiles, each of 16 rows of 16 words. With -DEMULATE_TILES AVX-512 stands
// for the instructions: tests run that where there are none.
#pragma once

#include "kernels.h"

#ifdef HAS_AVX512_BF16
#ifdef EMULATE_TILES
inline thread_local uint32_t tiles[8][16][16];

inline void multiply_tiles(int to, int a, int b) {
  for (int m = 0; m < 16; m++) {
    __m512 sum = _mm512_loadu_ps(tiles[to][m]);
    for (int k = 0; k < 16; k++)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(tiles[a][m][k]), (__m512bh)_mm512_loadu_si512(tiles[b][k]));
    _mm512_storeu_ps(tiles[to][m], sum);
  }
}
#define TILE_ZERO(t) std::memset(tiles[t], 0, 1024)
#define TILE_LOAD(t, from, stride) \
  for (int row = 0; row < 16; row++) std::memcpy(tiles[t][row], (from) + row * (stride), 64)
#define TILE_STORE(t, to, stride) \
  for (int row = 0; row < 16; row++) std::memcpy((to) + row * (stride), tiles[t][row], 64)
#define TILE_MULTIPLY(to, a, b) multiply_tiles(to, a, b)
constexpr bool has_tiles = true;
struct Tiles {};

#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// By name: this needs no option of the compiler, and GCC's own functions do not keep the loads behind earlier stores.
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(4 * int64_t(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(4 * int64_t(stride)) : "memory")
#define TILE_MULTIPLY(to, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to ::)

// Whether the CPU multiplies bf16 in tiles and Linux, which is asked once, lets this process
inline const bool has_tiles = [] {
  unsigned a, b, c, d, needed = 1u << 22 | 1u << 24; // AMX-BF16, AMX-TILE
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}();

struct Tiles { // this thread's, while it lives
  Tiles() {
    alignas(64) uint8_t config[64] = {1}; // palette 1; then bytes of a row, 16 bits each from 16 on, rows from 48 on
    for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
    if (has_tiles) asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() {
    if (has_tiles) asm volatile("tilerelease" ::);
  }
};
#endif

// c (16 M, 16 N) = or += a b, of bf16 in pairs along the sum: a[m * lda + k] and b[k * ldb + n], `depth` in sixteens
template <int M, int N>
void on_tiles(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
              bool add) {
  if (add) {
    TILE_LOAD(0, c, ldc);
    if constexpr (N == 2) TILE_LOAD(1, c + 16, ldc);
    if constexpr (M == 2) TILE_LOAD(2, c + 16 * ldc, ldc);
    if constexpr (M == 2 && N == 2) TILE_LOAD(3, c + 16 * ldc + 16, ldc);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t k = 0; k < depth; k += 16) {
    TILE_LOAD(4, a + k, lda);
    TILE_LOAD(6, b + k * ldb, ldb);
    if constexpr (M == 2) TILE_LOAD(5, a + 16 * lda + k, lda);
    if constexpr (N == 2) TILE_LOAD(7, b + k * ldb + 16, ldb);
    TILE_MULTIPLY(0, 4, 6);
    if constexpr (N == 2) TILE_MULTIPLY(1, 4, 7);
    if constexpr (M == 2) TILE_MULTIPLY(2, 5, 6);
    if constexpr (M == 2 && N == 2) TILE_MULTIPLY(3, 5, 7);
  }
  TILE_STORE(0, c, ldc);
  if constexpr (N == 2) TILE_STORE(1, c + 16, ldc);
  if constexpr (M == 2) TILE_STORE(2, c + 16 * ldc, ldc);
  if constexpr (M == 2 && N == 2) TILE_STORE(3, c + 16 * ldc + 16, ldc);
}
#endif
