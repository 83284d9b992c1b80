// Absorbed decoding of MLA (MultiHeadLatentAttention.absorbed of gpt.py) on a CPU: the key projection of one token, and
// with AVX-512 bf16 attention over the latents.

#include <cmath>
#include <limits>

#include "kernels.h"

// -----------------------------------------------------------------------------
// Absorbing the key projection: queries and keys of one token in one pass over it

struct Absorb {
  int64_t heads, n, rank, itemsize, threads;
  const void *w, *q, *latent; // (heads, n, rank), (heads, n), (rank)
  const float *gain;          // (n) or (heads, n) numbers, or null
  int64_t gain_of_head;       // n or 0: from the gains of a head to those of the next
  void *q_latent;             // (heads, rank): (gain q) w
  float *k;                   // (heads, n): w latent; or null
};

template <class T> void absorb_heads(const Absorb &f) {
  const T *w = static_cast<const T *>(f.w), *q = static_cast<const T *>(f.q), *c = static_cast<const T *>(f.latent);
  T *q_latent = static_cast<T *>(f.q_latent);
#pragma omp parallel for schedule(static) num_threads(f.threads)
  for (int64_t h = 0; h < f.heads; h++) {
    float latent[MAX_CHANNELS], sum[MAX_CHANNELS];
    for (int64_t e = 0; e < f.rank; e++) latent[e] = to_float(c[e]), sum[e] = 0;
    for (int64_t d = 0; d < f.n; d++) {
      const T *row = w + (h * f.n + d) * f.rank;
      float along = 0, factor = to_float(q[h * f.n + d]);
      if (f.gain) factor *= f.gain[h * f.gain_of_head + d];
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

std::tuple<Tensor, Tensor> absorb(const Tensor &given_w, const Tensor &given_q, const MaybeTensor &given_gain,
                                  const Tensor &given_latent, bool with_keys) {
  STD_TORCH_CHECK(given_w.dim() == 3, "w must be (nh, n, rank)");
  Tensor w = as_contiguous(given_w), q = as_contiguous(given_q), latent = as_contiguous(given_latent);
  int64_t nh = w.size(0), n = w.size(1), rank = w.size(2), size = itemsize(w, "w");
  STD_TORCH_CHECK(rank <= MAX_CHANNELS && q.numel() == nh * n && latent.numel() == rank, "q or latent does not fit w");
  STD_TORCH_CHECK(itemsize(q, "q") == size && itemsize(latent, "latent") == size, "w, q and latent must have one type");
  MaybeTensor gain = exact(given_gain);
  STD_TORCH_CHECK(!gain || gain->numel() == n || gain->numel() == nh * n, "gain must be (n) or (nh, 1, n)");
  Tensor q_latent = empty({1, nh, 1, rank}, size == 2 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32());
  Tensor k = empty({with_keys ? 1 : 0, nh, 1, n}, aoti_torch_dtype_float32());
  Absorb f{nh, n, rank, size, torch::stable::get_num_threads(), w.data_ptr(), q.data_ptr(), latent.data_ptr(),
           pointer<float>(gain), gain && gain->numel() > n ? n : 0, q_latent.data_ptr(),
           with_keys ? pointer<float>(k) : nullptr};
  size == 2 ? absorb_heads<bf16>(f) : absorb_heads<float>(f);
  return {q_latent, k};
}

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("absorb(Tensor w, Tensor q, Tensor? gain, Tensor latent, bool with_keys) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) { m.impl("absorb", TORCH_BOX(&absorb)); }

// -----------------------------------------------------------------------------
// Attention over the latents. Each head has one query; all share the latents, which are keys and values at once and are
// read once from memory. Positions are split into parts, whose results are joined (Flash-Decoding, Dao et al. 2023): a
// result does not depend on the number of threads. A vector of logits has one lane a head, of 16 heads. Logits, softmax
// and sums are fp32; probabilities are rounded to bf16 as operands.

#ifdef HAS_AVX512_BF16
constexpr int64_t LANES = 16;  // heads of a group
constexpr int64_t WORDS = 16;  // of a vector: 32 channels in bf16
constexpr int64_t BLOCK = 128; // positions whose logits are held; their latents stay in a cache
constexpr int64_t PART = 1024; // positions of a part
constexpr int64_t TILE = 8;    // positions, or heads, whose sums are in registers
static_assert(PART % BLOCK == 0 && BLOCK % TILE == 0 && LANES % TILE == 0);

struct Rows { // (batch, position, channel) in words of two bf16
  const uint32_t *data;
  int64_t batch, position, words; // strides, and words of a row
  const uint32_t *at(int64_t b, int64_t t) const { return data + b * batch + t * position; }
};

struct Decode {
  int64_t groups, length, threads; // groups of 16 heads
  Rows latent, k_rope;
  const uint16_t *key_scale; // (batch, position, head), or null
  int64_t scale_batch, scale_row, heads;
  bool unified;
  float scale;

  int64_t parts() const { return (length + PART - 1) / PART; }
  int64_t floats() const { return LANES * (2 + 2 * latent.words); } // of a group's result: largest, sum, output
};

// The products of rows t to t + 7 with the queries of 16 heads, (words, 16). Rows after `last` are replaced by it.
inline void products(const Rows &x, int64_t b, int64_t t, int64_t last, const uint32_t *q, __m512 (&sum)[TILE]) {
  const uint32_t *row[TILE];
  for (int i = 0; i < TILE; i++) row[i] = x.at(b, std::min(t + i, last)), sum[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < x.words; k++) {
    if (k % 16 == 0)
      for (int i = 0; i < TILE; i++) _mm_prefetch(row[i] + TILE * x.position + k, _MM_HINT_T0); // the next tile's
    __m512bh right = (__m512bh)_mm512_loadu_si512(q + k * LANES);
    for (int i = 0; i < TILE; i++)
      sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(row[i][k]), right);
  }
}

// The logits of n positions from t on, as (position, 16 heads); returns each head's largest logit so far
__m512 logits_of(const Decode &d, int64_t b, int64_t group, int64_t t, int64_t n, const uint32_t *q, __m512 largest,
                 float (&logits)[BLOCK][LANES]) {
  int64_t heads = std::min(LANES, d.heads - group * LANES);
  for (int64_t i = 0; i < n; i += TILE) {
    __m512 content[TILE], rope[TILE];
    products(d.latent, b, t + i, d.length - 1, q, content);
    products(d.k_rope, b, t + i, d.length - 1, q + d.latent.words * LANES, rope);
    for (int64_t j = 0; j < std::min(TILE, n - i); j++) {
      __m512 x = content[j];
      if (d.key_scale) {
        const uint16_t *from = d.key_scale + b * d.scale_batch + (t + i + j) * d.scale_row + group * LANES;
        __m512 s = widened(_mm256_maskz_loadu_epi16((1 << heads) - 1, from));
        x = d.unified ? _mm512_mul_ps(_mm512_add_ps(x, rope[j]), s) : _mm512_fmadd_ps(x, s, rope[j]);
      } else
        x = _mm512_add_ps(x, rope[j]);
      x = _mm512_mul_ps(x, _mm512_set1_ps(d.scale));
      _mm512_store_ps(logits[i + j], x);
      largest = _mm512_max_ps(largest, x);
    }
  }
  return largest;
}

// output (words / 16, 16 heads, 32 channels) = factor output + p x for n positions from t on; p in words of two.
// Of each 8 channels the first of a head's two vectors holds the first four, as unpacking leaves them; join() restores
// the order.
void add_values(const Decode &d, int64_t b, int64_t t, int64_t n, const uint32_t (&p)[BLOCK / 2][LANES],
                const float *factor, int64_t heads, float *output) {
  int64_t step = d.latent.position;
  for (int64_t c = 0; c < d.latent.words; c += WORDS)
    for (int64_t h = 0; h < heads; h += TILE) {
      float *to = output + 2 * (c * LANES + h * WORDS); // (c / 16, h, 0)
      __m512 sum[TILE][2];
      for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 2; j++)
          sum[i][j] = _mm512_mul_ps(_mm512_set1_ps(factor[h + i]), _mm512_loadu_ps(to + 32 * i + 16 * j));
      const uint32_t *row = d.latent.at(b, t) + c;
      for (int64_t i = 0; i < n; i += 2, row += 2 * step) {
        __m512i first = _mm512_loadu_si512(row), second = _mm512_loadu_si512(i + 1 < n ? row + step : row);
        // the next block's, one row for each half of the heads
        if (h == 0) _mm_prefetch(row + BLOCK * step, _MM_HINT_T1);
        if (h + TILE >= heads) _mm_prefetch(row + (BLOCK + 1) * step, _MM_HINT_T1);
        __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second);
        __m512bh high = (__m512bh)_mm512_unpackhi_epi16(first, second);
        const uint32_t *weights = &p[i / 2][h];
        for (int k = 0; k < TILE; k++) {
          __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[k]);
          sum[k][0] = _mm512_dpbf16_ps(sum[k][0], weight, low);
          sum[k][1] = _mm512_dpbf16_ps(sum[k][1], weight, high);
        }
      }
      for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 2; j++) _mm512_storeu_ps(to + 32 * i + 16 * j, sum[i][j]);
    }
}

// Positions first to end - 1, of all heads. q (groups, words of latent and k_rope, 16); result (groups, floats())
void attend(const Decode &d, int64_t b, int64_t first, int64_t end, const uint32_t *q, float *result) {
  alignas(64) float logits[BLOCK][LANES];
  alignas(64) uint32_t p[BLOCK / 2][LANES];
  alignas(64) float factor[LANES];
  for (int64_t g = 0; g < d.groups; g++) {
    float *state = result + g * d.floats(); // largest, sum, output
    std::fill(state, state + LANES, std::numeric_limits<float>::lowest()); // so that -inf less it is -inf, not nan
    std::fill(state + LANES, state + d.floats(), 0.f);
  }
  for (int64_t t = first; t < end; t += BLOCK)
    for (int64_t g = 0; g < d.groups; g++) {
      float *state = result + g * d.floats(); // largest, sum, output
      int64_t n = std::min(BLOCK, end - t);
      __m512 before = _mm512_loadu_ps(state), sum = _mm512_loadu_ps(state + LANES);
      const uint32_t *queries = q + g * LANES * (d.latent.words + d.k_rope.words);
      __m512 largest = logits_of(d, b, g, t, n, queries, before, logits);
      _mm512_store_ps(factor, exponential(_mm512_sub_ps(before, largest)));
      sum = _mm512_mul_ps(sum, _mm512_load_ps(factor));
      for (int64_t i = 0; i < n; i += 2) {
        __m512 x[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t j = 0; j < std::min<int64_t>(2, n - i); j++) {
          x[j] = exponential(_mm512_sub_ps(_mm512_load_ps(logits[i + j]), largest));
          sum = _mm512_add_ps(sum, x[j]);
        }
        _mm512_store_si512(p[i / 2], row_pair(rounded(x[0]), rounded(x[1])));
      }
      _mm512_storeu_ps(state, largest), _mm512_storeu_ps(state + LANES, sum);
      add_values(d, b, t, n, p, factor, std::min(LANES, d.heads - g * LANES), state + 2 * LANES);
    }
}

// y (heads, channels) and lse (heads) of a sequence from the results of its parts
void join(const Decode &d, const float *results, uint16_t *y, float *lse) {
  // undoes the unpacking
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  int64_t parts = d.parts(), step = d.groups * d.floats();
  std::vector<float> factor(parts);
  for (int64_t h = 0; h < d.heads; h++) {
    const float *state = results + h / LANES * d.floats();
    const float *at = state + h % LANES;
    float largest = at[0], sum = 0;
    for (int64_t i = 0; i < parts; i++) largest = std::max(largest, at[i * step]);
    for (int64_t i = 0; i < parts; i++) {
      factor[i] = std::exp(at[i * step] - largest);
      sum += factor[i] * at[i * step + LANES];
    }
    lse[h] = largest + std::log(sum);
    for (int64_t c = 0; c < d.latent.words; c += WORDS) {
      const float *x = state + 2 * LANES + 2 * (c * LANES + h % LANES * WORDS);
      __m512 low = _mm512_setzero_ps(), high = low;
      for (int64_t i = 0; i < parts; i++) {
        __m512 weight = _mm512_set1_ps(factor[i] / sum);
        low = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + i * step), low);
        high = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + i * step + 16), high);
      }
      put(y + h * 2 * d.latent.words + 2 * c, rounded(_mm512_permutex2var_ps(low, first, high)));
      put(y + h * 2 * d.latent.words + 2 * c + 16, rounded(_mm512_permutex2var_ps(low, second, high)));
    }
  }
}

// Queries (heads, channels) of a sequence as (groups, words, 16), from word `first` on
void pack(const Tensor &q, int64_t b, int64_t words, int64_t first, uint32_t *to) {
  for (int64_t h = 0; h < q.size(1); h++) {
    const uint16_t *from = pointer<uint16_t>(q) + b * q.stride(0) + h * q.stride(1);
    for (int64_t k = 0; k < q.size(3) / 2; k++)
      std::memcpy(to + (h / LANES * words + first + k) * LANES + h % LANES, from + 2 * k, 4);
  }
}

Rows rows(const Tensor &x, const char *name) {
  bool even = x.stride(0) % 2 == 0 && x.stride(1) % 2 == 0 && x.size(2) % 2 == 0;
  STD_TORCH_CHECK(even && reinterpret_cast<uintptr_t>(x.data_ptr()) % 4 == 0, name,
                  " must have even channels, strides and offset");
  return {pointer<uint32_t>(x), x.stride(0) / 2, x.stride(1) / 2, x.size(2) / 2};
}

std::tuple<Tensor, Tensor> latent_attention(const Tensor &given_q, const Tensor &given_q_rope,
                                            const Tensor &given_latent, const Tensor &given_k_rope,
                                            const MaybeTensor &key_scale, double scale, bool unified) {
  Tensor q = contiguous_last_dim(given_q), q_rope = contiguous_last_dim(given_q_rope);
  Tensor latent = contiguous_last_dim(given_latent), k_rope = contiguous_last_dim(given_k_rope);
  for (const Tensor &x : {q, q_rope, latent, k_rope})
    STD_TORCH_CHECK(is_bf16(x), "q_latent, q_rope, latent and k_rope must be bf16 on a CPU");
  STD_TORCH_CHECK(q.dim() == 4 && q_rope.dim() == 4, "q_latent and q_rope must have four dimensions");
  STD_TORCH_CHECK(latent.dim() == 3 && k_rope.dim() == 3, "latent and k_rope must have three dimensions");
  int64_t B = q.size(0), nh = q.size(1), S = latent.size(1), kr = latent.size(2), dr = k_rope.size(2);
  bool fits = q.size(2) == 1 && q.size(3) == kr && latent.size(0) == B && k_rope.size(0) == B && k_rope.size(1) == S &&
              q_rope.size(0) == B && q_rope.size(1) == nh && q_rope.size(2) == 1 && q_rope.size(3) == dr;
  STD_TORCH_CHECK(fits && S > 0 && kr % 32 == 0,
                  "q_latent (B, nh, 1, kr), q_rope (B, nh, 1, dr), latent (B, S, kr) and k_rope (B, S, dr) do not fit, "
                  "or kr is no multiple of 32");
  Decode d{(nh + LANES - 1) / LANES, S, torch::stable::get_num_threads(), rows(latent, "latent"),
           rows(k_rope, "k_rope")};
  d.heads = nh, d.unified = unified, d.scale = scale;
  if (key_scale) {
    bool of_keys = is_bf16(*key_scale) && key_scale->dim() == 4 && key_scale->size(0) == B &&
                   key_scale->size(1) == nh && key_scale->size(2) == S && key_scale->size(3) == 1;
    STD_TORCH_CHECK(of_keys && (nh == 1 || key_scale->stride(1) == 1),
                    "key_scale must be (B, nh, S, 1) in bf16, the heads side by side");
    d.key_scale = pointer<uint16_t>(*key_scale);
    d.scale_batch = key_scale->stride(0), d.scale_row = key_scale->stride(2);
  }
  Tensor y = empty({B, nh, 1, kr}, aoti_torch_dtype_bfloat16()), lse = empty({B, nh, 1}, aoti_torch_dtype_float32());
  int64_t words = (kr + dr) / 2, parts = d.parts(), floats = d.groups * d.floats();
  Tensor packed = empty({B, d.groups, words, LANES}, aoti_torch_dtype_float32());
  Tensor results = empty({B, parts, floats}, aoti_torch_dtype_float32());
  std::memset(pointer<uint32_t>(packed), 0, packed.numel() * 4);
  for (int64_t b = 0; b < B; b++) {
    uint32_t *to = pointer<uint32_t>(packed) + b * d.groups * words * LANES;
    pack(q, b, words, 0, to), pack(q_rope, b, words, kr / 2, to);
  }
  // A thread takes neighbouring parts: it has then fetched the first block of most
  int64_t at_once = std::max<int64_t>(1, B * parts / (8 * d.threads));
#pragma omp parallel num_threads(d.threads)
  {
#pragma omp for schedule(dynamic, at_once)
    for (int64_t i = 0; i < B * parts; i++) {
      int64_t b = i / parts, first = i % parts * PART;
      attend(d, b, first, std::min(S, first + PART), pointer<uint32_t>(packed) + b * d.groups * words * LANES,
             pointer<float>(results) + i * floats);
    }
#pragma omp for schedule(static)
    for (int64_t b = 0; b < B; b++)
      join(d, pointer<float>(results) + b * parts * floats, pointer<uint16_t>(y) + b * nh * kr,
           pointer<float>(lse) + b * nh);
  }
  return {y, lse};
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) { m.impl("latent_attention", TORCH_BOX(&latent_attention)); }
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor? key_scale, float scale,"
        " bool unified) -> (Tensor, Tensor)");
}
