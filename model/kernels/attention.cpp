// Causal attention on a CPU with AVX-512 bf16, forward and backward; its matmuls run on matrix units where there are
// some. The T x T matrix is never stored: a block of 64 queries meets the keys that it sees, and the backward pass
// computes the probabilities again from each query's largest logit and sum of exponentials (as in FlashAttention, Dao
// et al. 2022). Logits may be capped: cap tanh(logit / cap), and the derivative of the log-sum-exp may come in. Logits,
// softmax and all sums are fp32. The probabilities, and the derivatives of the logits, are rounded to bf16 as operands
// of a matmul. A thread works on one query head of one sequence.

#include "matmul.h"
#include "tiles.h"

#ifdef HAS_AVX512_BF16
#include <algorithm>
#include <cmath>

constexpr int64_t ROWS = 64;  // queries at a time

// (batch, head, position, channel) from data, in elements; channels are contiguous
struct Heads {
  uint16_t *data;
  int64_t batch, head, position;
  uint16_t *at(int64_t b, int64_t h, int64_t t = 0) const { return data + b * batch + h * head + t * position; }
};

struct Attention {
  int64_t batch, heads, group, length, dk, dv; // group: query heads of a key head. dk, dv: multiples of 16
  int64_t dropped, seed, threads;
  Heads q, k, v, y;                   // y: of the forward pass
  Heads grad, grad_q, grad_k, grad_v; // of the backward pass: of y, q, and of k and v for each query head
  float *largest, *log_sum; // (batch, heads, length): of q k^T, and of sum exp(logit - the logit of largest)
  const float *grad_lse;    // (batch, heads, length), or null: of the logit of largest + log_sum
  double scale, cap;        // scale > 0. A logit is scale q k^T, or where cap > 0: cap tanh(scale q k^T / cap)
};

void write_rows(const float *x, int64_t rows, int64_t n, const float *factor, float all, uint16_t *to, int64_t stride) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < n; c += 16) {
      __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + r * n + c), _mm512_set1_ps(factor ? factor[r] : all));
      put(to + r * stride + c, rounded(y));
    }
}

// matmul(), on matrix units where there are some and the words of `a` along the sum lie side by side (ak = 1)
void product(const void *words, int64_t am, int64_t ak, const uint32_t *b, int64_t height, float *c, int64_t ldc,
             int64_t rows, int64_t columns, int64_t depth, bool add = false) {
  constexpr decltype(&on_tiles<1, 1>) of_tiles[2][2] = {{on_tiles<1, 1>, on_tiles<1, 2>},
                                                        {on_tiles<2, 1>, on_tiles<2, 2>}};
  const uint32_t *a = static_cast<const uint32_t *>(words);
  int64_t in_tiles = has_tiles && ak == 1 ? depth / 16 * 16 : 0;
  for (int64_t k = 0; k < in_tiles; k += DEPTH)
    for (int64_t n = 0; n < columns; n += 32)
      for (int64_t m = 0; m < rows; m += 32)
        of_tiles[rows - m >= 32][columns - n >= 32](
            a + m * am + k, am, b + n / PANEL * PANEL * height + n % PANEL + k * PANEL, PANEL, c + m * ldc + n, ldc,
            std::min(DEPTH, in_tiles - k), add || k);
  if (in_tiles < depth)
    matmul(a + in_tiles * ak, am, ak, b + in_tiles * PANEL, height, c, ldc, rows, columns, depth - in_tiles,
           add || in_tiles);
}

// The matmuls of attention, of `queries` rows, a multiple of 16, from position i on. Of the keys from i on sixteen
// queries meet those up to the last of the sixteen: later ones are neither computed nor read.

// c (queries, P) = a b, a (queries, n) and b of keys, transposed
void with_keys(const uint16_t *a, int64_t n, const uint32_t *b, float *c, int64_t P, int64_t queries, int64_t i) {
  product(a, n / 2, 1, b, n / 2, c, P, queries, i, n / 2);
  for (int64_t r = 0; r < queries; r += 16)
    product(a + r * n, n / 2, 1, b + i * (n / 2), n / 2, c + r * P + i, P, 16, r + 16, n / 2);
}

// c (queries, n) = a b, a (queries, P) and b of keys, paired
void over_keys(const uint16_t *a, int64_t P, const uint32_t *b, float *c, int64_t n, int64_t queries, int64_t i) {
  product(a, P / 2, 1, b, P / 2, c, n, queries, n, i / 2);
  for (int64_t r = 0; r < queries; r += 16)
    product(a + r * P + i, P / 2, 1, b + i / 2 * PANEL, P / 2, c + r * n, n, 16, n, (r + 16) / 2, i > 0);
}

// c (keys, n) += a^T b, a in words of two queries, (queries / 2, P), and b of queries, paired. Tiles take the words of a
// key side by side: `turned` (P, ROWS / 2) is for those.
void over_queries(const uint32_t *a, int64_t P, const uint32_t *b, float *c, int64_t n, int64_t queries, int64_t i,
                  uint32_t *turned) {
  int64_t am = 1, ak = P;
  if (has_tiles) {
    for (int64_t w = 0; w < queries / 2; w += 16)
      for (int64_t j = 0; j < i + queries; j += 16) {
        __m512i square[16];
        for (int64_t e = 0; e < 16; e++) square[e] = _mm512_loadu_si512(a + (w + e) * P + j);
        transpose(square);
        for (int64_t e = 0; e < 16; e++) _mm512_storeu_si512(turned + (j + e) * (ROWS / 2) + w, square[e]);
      }
    a = turned, am = ROWS / 2, ak = 1;
  }
  product(a, am, ak, b, ROWS / 2, c, n, i, n, queries / 2, true);
  for (int64_t r = 0; r < queries; r += 16)
    product(a + (i + r) * am + r / 2 * ak, am, ak, b + r / 2 * PANEL, ROWS / 2, c + (i + r) * n, n, 16, n,
            (queries - r) / 2, true);
}

// The logits of products of queries and keys, less that of `largest`
struct Logits {
  __m512 scale, largest, inverse, cap, top;
  bool capped;

  Logits(const Attention &a, float most) : capped(a.cap > 0) {
    scale = _mm512_set1_ps(a.scale), largest = _mm512_set1_ps(most);
    cap = _mm512_set1_ps(a.cap), inverse = _mm512_set1_ps(capped ? 2 * a.scale / a.cap : 0);
    top = capped ? _mm512_mul_ps(cap, tangent(largest)) : _mm512_setzero_ps();
  }
  __m512 tangent(__m512 x) const { // tanh(scale x / cap) = 1 - 2 / (exp(2 scale x / cap) + 1)
    const __m512 one = _mm512_set1_ps(1.f);
    __m512 e = exponential(_mm512_min_ps(_mm512_set1_ps(40.f), _mm512_mul_ps(x, inverse)));
    return _mm512_fnmadd_ps(_mm512_set1_ps(2.f), _mm512_div_ps(one, _mm512_add_ps(e, one)), one);
  }
  __m512 operator()(__m512 x) const {
    if (capped) return _mm512_fmsub_ps(cap, tangent(x), top);
    return _mm512_mul_ps(_mm512_sub_ps(x, largest), scale);
  }
  __m512 slope(__m512 x) const { // of a capped logit, over scale
    __m512 t = tangent(x);
    return _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1.f));
  }
};

// Masks of elements j to j + 15 of a row: those up to `seen`, and those that dropout keeps; the row's bytes start at
// `first`.
struct Row {
  const Attention &a;
  int64_t seen, first;
  __mmask64 kept = ~__mmask64(0);

  __mmask16 visible(int64_t j) const { return j + 16 <= seen ? 0xffff : j < seen ? (1 << (seen - j)) - 1 : 0; }
  __mmask16 keep(int64_t j) {
    if (a.dropped && j % 64 == 0) {
      uint8_t bytes[64];
      random_bytes(a.seed, (first + j) / 64, bytes);
      kept = _mm512_cmpge_epu8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(char(a.dropped)));
    }
    return __mmask16(kept >> j % 64);
  }
};

void forward(const Attention &a, int64_t b, int64_t h) {
  int64_t T = a.length, P = up_to(PANEL, T), dk = a.dk, dv = a.dv, first = (b * a.heads + h) * T;
  uint32_t *keys, *values;
  uint16_t *queries, *p;
  float *s, *y, *factor;
  room.lay_out([&](Room &r) {
    r.take(keys, P * dk / 2), r.take(values, P / 2 * up_to(PANEL, dv)), r.take(queries, ROWS * dk);
    r.take(s, ROWS * P), r.take(p, ROWS * P), r.take(y, ROWS * dv), r.take(factor, ROWS);
  });
  transposed(a.k.at(b, h / a.group), a.k.position, T, dk, keys);
  paired(a.v.at(b, h / a.group), a.v.position, T, dv, values, P / 2);
  for (int64_t i = 0; i < T; i += ROWS) {
    int64_t rows = std::min(ROWS, T - i), padded = up_to(16, rows);
    copy_rows(a.q.at(b, h, i), a.q.position, rows, dk, queries);
    with_keys(queries, dk, keys, s, P, padded, i);
    for (int64_t r = 0; r < padded; r++) {
      Row row{a, std::min(i + r + 1, T), (first + i + r) * P};
      __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
      for (int64_t j = 0; j < row.seen; j += 16)
        most = _mm512_mask_max_ps(most, row.visible(j), most, _mm512_loadu_ps(s + r * P + j));
      float largest = _mm512_reduce_max_ps(most);
      const Logits logit(a, largest);
      for (int64_t j = 0; j < up_to(16, i + r + 1); j += 16) {
        __m512 x = _mm512_maskz_mov_ps(row.visible(j), exponential(logit(_mm512_loadu_ps(s + r * P + j))));
        sum = _mm512_add_ps(sum, x);
        put(p + r * P + j, rounded(_mm512_maskz_mov_ps(row.keep(j), x)));
      }
      float total = _mm512_reduce_add_ps(sum);
      factor[r] = 256.f / (256 - a.dropped) / total;
      if (r < rows) a.largest[first + i + r] = largest, a.log_sum[first + i + r] = std::log(total);
    }
    over_keys(p, P, values, y, dv, padded, i);
    write_rows(y, rows, dv, factor, 1, a.y.at(b, h, i), a.y.position);
  }
}

// With p the probabilities and m the mask and scale of dropout: dv = (p m)^T dy, dp = (dy v^T) m,
// ds = p (dp - sum p dp + grad_lse), times the slope of capped logits, dq = scale ds k, dk = scale ds^T q
void backward(const Attention &a, int64_t b, int64_t h) {
  int64_t T = a.length, P = up_to(PANEL, T), dk = a.dk, dv = a.dv, wide_k = up_to(PANEL, dk), wide_v = up_to(PANEL, dv);
  int64_t kv = h / a.group, first = (b * a.heads + h) * T;
  const __m512 kept = _mm512_set1_ps(256.f / (256 - a.dropped));
  uint32_t *k_transposed, *k_paired, *v_transposed, *q_paired, *grad_paired, *pm_words, *ds_words, *turned;
  uint16_t *queries, *grads, *ds;
  float *p, *dp, *slopes, *grad_q, *grad_k, *grad_v;
  room.lay_out([&](Room &r) {
    r.take(k_transposed, P * dk / 2), r.take(k_paired, P / 2 * wide_k), r.take(v_transposed, P * dv / 2);
    r.take(queries, ROWS * dk), r.take(q_paired, ROWS / 2 * wide_k), r.take(grads, ROWS * dv);
    r.take(grad_paired, ROWS / 2 * wide_v), r.take(p, ROWS * P), r.take(dp, ROWS * P), r.take(ds, ROWS * P);
    r.take(pm_words, ROWS / 2 * P), r.take(ds_words, ROWS / 2 * P);
    r.take(turned, has_tiles ? ROWS / 2 * P : 0);
    r.take(grad_q, ROWS * dk), r.take(grad_k, P * dk), r.take(grad_v, P * dv), r.take(slopes, a.cap > 0 ? 2 * P : 0);
  });
  transposed(a.k.at(b, kv), a.k.position, T, dk, k_transposed);
  paired(a.k.at(b, kv), a.k.position, T, dk, k_paired, P / 2);
  transposed(a.v.at(b, kv), a.v.position, T, dv, v_transposed);
  std::memset(grad_k, 0, 4 * P * dk), std::memset(grad_v, 0, 4 * P * dv);
  for (int64_t i = 0; i < T; i += ROWS) {
    int64_t rows = std::min(ROWS, T - i), padded = up_to(16, rows);
    copy_rows(a.q.at(b, h, i), a.q.position, rows, dk, queries);
    copy_rows(a.grad.at(b, h, i), a.grad.position, rows, dv, grads);
    paired(a.q.at(b, h, i), a.q.position, rows, dk, q_paired, ROWS / 2);
    paired(a.grad.at(b, h, i), a.grad.position, rows, dv, grad_paired, ROWS / 2);
    with_keys(queries, dk, k_transposed, p, P, padded, i);
    with_keys(grads, dv, v_transposed, dp, P, padded, i);
    for (int64_t r = 0; r < padded; r += 2) {
      int64_t made = up_to(16, i + r + 2);
      float along[2];
      for (int64_t one : {0, 1}) {
        int64_t t = i + r + one, at = first + t;
        float *p_row = p + (r + one) * P, *dp_row = dp + (r + one) * P;
        Row row{a, t < T ? t + 1 : 0, at * P};
        const Logits logit(a, t < T ? a.largest[at] : 0);
        __m512 log_sum = _mm512_set1_ps(t < T ? a.log_sum[at] : 0), sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < made; j += 16) {
          __m512 x = _mm512_loadu_ps(p_row + j);
          if (logit.capped) _mm512_storeu_ps(slopes + one * P + j, logit.slope(x));
          x = logit.capped ? _mm512_sub_ps(logit(x), log_sum)
                           : _mm512_fmsub_ps(_mm512_sub_ps(x, logit.largest), logit.scale, log_sum);
          __mmask16 keep = row.keep(j);
          __m512 dx = _mm512_maskz_mul_ps(keep, _mm512_loadu_ps(dp_row + j), kept);
          x = _mm512_maskz_mov_ps(row.visible(j), exponential(x));
          sum = _mm512_fmadd_ps(x, dx, sum);
          _mm512_storeu_ps(p_row + j, x), _mm512_storeu_ps(dp_row + j, dx);
          __m256i half = rounded(_mm512_maskz_mul_ps(keep, x, kept));
          __m512i *words = reinterpret_cast<__m512i *>(pm_words + r / 2 * P + j);
          _mm512_storeu_si512(words, row_pair(one ? _mm512_cvtepi32_epi16(_mm512_loadu_si512(words)) : half, half));
        }
        along[one] = _mm512_reduce_add_ps(sum) - (a.grad_lse && t < T ? a.grad_lse[at] : 0);
      }
      for (int64_t j = 0; j < made; j += 16) {
        __m256i half[2];
        for (int64_t one : {0, 1}) {
          __m512 dx = _mm512_sub_ps(_mm512_loadu_ps(dp + (r + one) * P + j), _mm512_set1_ps(along[one]));
          dx = _mm512_mul_ps(_mm512_loadu_ps(p + (r + one) * P + j), dx);
          half[one] = rounded(a.cap > 0 ? _mm512_mul_ps(dx, _mm512_loadu_ps(slopes + one * P + j)) : dx);
          put(ds + (r + one) * P + j, half[one]);
        }
        _mm512_storeu_si512(ds_words + r / 2 * P + j, row_pair(half[0], half[1]));
      }
    }
    over_keys(ds, P, k_paired, grad_q, dk, padded, i);
    write_rows(grad_q, rows, dk, nullptr, a.scale, a.grad_q.at(b, h, i), a.grad_q.position);
    over_queries(ds_words, P, q_paired, grad_k, dk, padded, i, turned);
    over_queries(pm_words, P, grad_paired, grad_v, dv, padded, i, turned);
  }
  write_rows(grad_k, T, dk, nullptr, a.scale, a.grad_k.at(b, h), a.grad_k.position);
  write_rows(grad_v, T, dv, nullptr, 1, a.grad_v.at(b, h), a.grad_v.position);
}

// -----------------------------------------------------------------------------
// The operators

Heads heads_of(const Tensor &x) { return {pointer<uint16_t>(x), x.stride(0), x.stride(1), x.stride(2)}; }

// Room for (B, nh, T, n), shaped as x but for n, in the order (B, T, nh, n)
Tensor empty_heads(const Tensor &x, int64_t n) {
  int64_t sizes[] = {x.size(0), x.size(1), x.size(2), n};
  int64_t strides[] = {sizes[2] * sizes[1] * n, n, sizes[1] * n, 1};
  return empty(4, sizes, strides, aoti_torch_dtype_bfloat16());
}

void check_heads(const Tensor &x, int64_t B, int64_t T, const char *name) {
  STD_TORCH_CHECK(x.dim() == 4 && is_bf16(x), name, " must be (B, heads, T, channels) in bf16 on a CPU");
  STD_TORCH_CHECK(x.size(0) == B && x.size(2) == T, name, " has other sequences or positions than q");
  STD_TORCH_CHECK(x.size(3) > 0 && x.size(3) % 16 == 0, name, " must have a multiple of 16 channels");
}

Attention attention_of(const Tensor &q, const Tensor &k, const Tensor &v, double scale, double cap, int64_t dropped,
                       const MaybeTensor &seed) {
  STD_TORCH_CHECK(q.dim() == 4, "q must be (B, heads, T, channels)");
  int64_t B = q.size(0), nh = q.size(1), T = q.size(2), nkv = k.size(1);
  check_heads(q, B, T, "q"), check_heads(k, B, T, "k"), check_heads(v, B, T, "v");
  STD_TORCH_CHECK(v.size(1) == nkv && nkv > 0 && nh % nkv == 0, "k and v must have as many heads, a divisor of q's");
  STD_TORCH_CHECK(k.size(3) == q.size(3), "q and k must have as many channels");
  STD_TORCH_CHECK(scale > 0, "the scale must be positive");
  STD_TORCH_CHECK(cap >= 0, "the cap must be positive, or 0 for none");
  Dropout dropout = dropout_of(dropped, seed);
  Attention a{};
  a.batch = B, a.heads = nh, a.group = nh / nkv, a.length = T, a.dk = q.size(3), a.dv = v.size(3);
  a.dropped = dropout.dropped, a.seed = dropout.seed, a.threads = torch::stable::get_num_threads(), a.scale = scale;
  a.cap = cap;
  a.q = heads_of(q), a.k = heads_of(k), a.v = heads_of(v);
  return a;
}

void run(Attention &a, const Tensor &softmax) {
  a.largest = pointer<float>(softmax), a.log_sum = a.largest + a.batch * a.heads * a.length;
  bool back = a.grad.data;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
  for (int64_t task = 0; task < a.batch * a.heads; task++) {
    Tiles loaded;
    (back ? backward : forward)(a, task / a.heads, task % a.heads);
  }
}

// y (B, nh, T, dv), and each query's `largest` and `log_sum`, (2, B, nh, T)
std::tuple<Tensor, Tensor> attention(const Tensor &given_q, const Tensor &given_k, const Tensor &given_v, double scale,
                                     double cap, int64_t dropped, const MaybeTensor &seed) {
  Tensor q = contiguous_last_dim(given_q), k = contiguous_last_dim(given_k), v = contiguous_last_dim(given_v);
  Attention a = attention_of(q, k, v, scale, cap, dropped, seed);
  Tensor y = empty_heads(q, a.dv), softmax = empty({2, a.batch, a.heads, a.length}, aoti_torch_dtype_float32());
  a.y = heads_of(y);
  run(a, softmax);
  return {y, softmax};
}

// of q, and of k and v for each query head
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor &given_grad, const Tensor &given_q,
                                                      const Tensor &given_k, const Tensor &given_v,
                                                      const Tensor &softmax, const MaybeTensor &grad_lse, double scale,
                                                      double cap, int64_t dropped, const MaybeTensor &seed) {
  Tensor q = contiguous_last_dim(given_q), k = contiguous_last_dim(given_k), v = contiguous_last_dim(given_v);
  Tensor grad = contiguous_last_dim(given_grad);
  Attention a = attention_of(q, k, v, scale, cap, dropped, seed);
  check_heads(grad, a.batch, a.length, "grad");
  STD_TORCH_CHECK(grad.size(1) == a.heads && grad.size(3) == a.dv, "grad has another shape than the output");
  check_fp32(softmax, "softmax");
  bool fits = softmax.is_contiguous() && softmax.numel() == 2 * a.batch * a.heads * a.length;
  STD_TORCH_CHECK(fits, "softmax does not fit q");
  if (grad_lse) {
    check_fp32(*grad_lse, "grad_lse");
    STD_TORCH_CHECK(grad_lse->is_contiguous() && 2 * grad_lse->numel() == softmax.numel(), "grad_lse does not fit q");
    a.grad_lse = pointer<float>(*grad_lse);
  }
  Tensor grad_q = empty_heads(q, a.dk), grad_k = empty_heads(q, a.dk), grad_v = empty_heads(q, a.dv);
  a.grad = heads_of(grad), a.grad_q = heads_of(grad_q), a.grad_k = heads_of(grad_k), a.grad_v = heads_of(grad_v);
  run(a, softmax);
  return {grad_q, grad_k, grad_v};
}

STABLE_TORCH_LIBRARY_IMPL(nanoqk, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
#endif

// Without AVX-512 bf16 there are schemas and no implementation: operators.py asks whether there is one.
STABLE_TORCH_LIBRARY_FRAGMENT(nanoqk, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, float scale, float cap, int dropped, Tensor? seed) -> (Tensor,"
        " Tensor)");
  m.def("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor softmax, Tensor? grad_lse, float"
        " scale, float cap, int dropped, Tensor? seed) -> (Tensor, Tensor, Tensor)");
}
