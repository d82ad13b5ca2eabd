// Rotary embedding: pairs of features as complex numbers, times cos + i sin of their token's angles.
#pragma once
#include "problem.h"
namespace posenc::NUMBER {
template <int FIRST>
struct EverySecond {
  static constexpr int of(int l) { return FIRST + 2 * l; }
};
// The lanes of two vectors in turn, from lane FIRST of each.
template <int FIRST>
struct InTurn {
  static constexpr int of(int l) { return FIRST + l / 2 + l % 2 * VL; }
};

// Numbers rounded to nearest even; bfloat16 by an instruction, if there is one, for which numbers below 2^-126 are 0.
template <class Number>
void put(Number* to, vec x) {
#if defined(__AVX512BF16__) && !defined(POSENC_DOUBLE)
  if constexpr (std::is_same_v<Number, uint16_t>) {
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
#endif
  Lanes<Number>::store(to, x);
}
// The same past the caches, into which `to` is not read; it is aligned to whole vectors.
template <class Number>
void stream(Number* to, vec x) {
#ifdef __AVX__
  constexpr int bytes = VL * sizeof(Number);
  alignas(bytes) Number numbers[VL];
  put(numbers, x);
  if constexpr (bytes == 16) _mm_stream_si128((__m128i*)to, *(const __m128i*)numbers);
  if constexpr (bytes == 32) _mm256_stream_si256((__m256i*)to, *(const __m256i*)numbers);
#if VECTOR_BYTES == 64
  if constexpr (bytes == 64) _mm512_stream_si512((__m512i*)to, *(const __m512i*)numbers);
#endif
#else
  put(to, x);
#endif
}

// to = x with n pairs of features (a, b) -> (a c - b s, a s + b c), s times `sign`; x may be `to`.
template <class Number, bool STREAM = false>
void rotate_row(const Number* x, Number* to, const real* c, const real* s, index n, bool adjacent, real sign) {
  using L = Lanes<Number>;
  const index whole = n / VL * VL;
  const auto write = [](Number* at, vec v) { STREAM ? stream(at, v) : put(at, v); };
  for (index i = 0; i < whole; i += VL) {
    const vec cosine = load(c + i), sine = load(s + i) * splat(sign);
    if (adjacent) {
      const vec low = L::load(x + 2 * i), high = L::load(x + 2 * i + VL);
      const vec first = choose<EverySecond<0>>(low, high), second = choose<EverySecond<1>>(low, high);
      const vec one = first * cosine - second * sine, two = first * sine + second * cosine;
      write(to + 2 * i, choose<InTurn<0>>(one, two));
      write(to + 2 * i + VL, choose<InTurn<VL / 2>>(one, two));
    } else {
      const vec first = L::load(x + i), second = L::load(x + n + i);
      write(to + i, first * cosine - second * sine);
      write(to + n + i, first * sine + second * cosine);
    }
  }
  for (index i = whole; i < n; ++i) {
    const index from = adjacent ? 2 * i : i, other = adjacent ? from + 1 : i + n;
    const real first = L::read(x[from]), second = L::read(x[other]), sine = sign * s[i];
    to[from] = L::write(first * c[i] - second * sine);
    to[other] = L::write(first * sine + second * c[i]);
  }
}

// Whether queries and keys are other factors of the logits than they are in memory.
inline bool transforms_qk(const Problem& x) { return x.rank() || x.rotated; }
// A query or key as factor of the logits: rotated if the call has a rotation; its gradient by the conjugate,
// sign -1.
inline void rotate_factor(const Problem& x, const RotaryFactors& rotary, index b, index h, index t, real* d,
                          real sign) {
  const index at = rotary.at(b, h, t);
  if (x.rotated) rotate_row(d, d, rotary.cosine + at, rotary.sine + at, x.rotated, x.adjacent, sign);
}
// Queries or keys of one head as factors of the logits, as rows: rotated, and the low-rank factor of
// the same tokens behind them. by: what the tokens are multiplied by.
inline Rows read_factors(const Problem& x, const Tokens& tokens, const RotaryFactors& rotary, const Operand& factor,
                         index b, index h, index factor_h, index first, index count, real by, Scratch& scratch) {
  if (!transforms_qk(x)) return read_rows(tokens, b, h, first, count, x.dim, by, scratch);
  const index width = round_up(x.depth(), VL);
  real* to = scratch.of(count * width);
  for (index t = first; t < first + count; ++t, to += width) {
    read_row(tokens, row_of(tokens, b, h, t), by, x.dim, factor ? x.dim : width, to);
    rotate_factor(x, rotary, b, h, t, to, 1);
    if (factor) read_row(factor.value, row_of(factor.value, b, factor_h, t), 1, factor.features, width - x.dim, to + x.dim);
  }
  return {to - count * width, width};
}

// out = x with (a, b) -> (a c - b s, a s + b c), or with -s; features beyond the pairs are copied.
struct Rotation {
  Tokens x, out;
  RotaryFactors factors;
  index batch, heads, tokens, features, pairs;
  index adjacent;   // pairs are (2t, 2t + 1), not (t, t + pairs)
  index conjugate;  // -s
  index stream;     // out is not read soon
  Team team;
};

template <class Number, bool STREAM>
void rotate_tokens(const Rotation& r, index b, index h, index begin, index end) {
  for (index t = begin; t < end; ++t) {
    const index at = r.factors.at(b, h, t);
    const Number* x = reinterpret_cast<const Number*>(row_of(r.x, b, h, t));
    Number* to = reinterpret_cast<Number*>(row_of(r.out, b, h, t));
    rotate_row<Number, STREAM>(x, to, r.factors.cosine + at, r.factors.sine + at, r.pairs, r.adjacent, r.conjugate ? -1 : 1);
    std::copy(x + 2 * r.pairs, x + r.features, to + 2 * r.pairs);
  }
}

// True if rows of `out` begin with whole vectors, also its second halves.
template <class Number>
bool is_aligned(const Rotation& r) {
  constexpr index bytes = VL * sizeof(Number);
  const auto whole = [](index n) { return n % VL == 0; };
  const bool rows = whole(r.out.batch) && whole(r.out.head) && whole(r.out.token) && whole(r.pairs);
  return rows && reinterpret_cast<uintptr_t>(r.out.data) % bytes == 0;
}
template <class Number>
void rotate_block(const Rotation& r, index b, index h, index begin, index end) {
  if (!r.stream || !is_aligned<Number>(r)) return rotate_tokens<Number, false>(r, b, h, begin, end);
  rotate_tokens<Number, true>(r, b, h, begin, end);
#ifdef __AVX__
  _mm_sfence();
#endif
}

inline void rotate(const Rotation& r) {
  constexpr index many = 256;  // tokens of a head that a thread takes at once
  const index blocks = (r.tokens + many - 1) / many, count = r.batch * r.heads * blocks;
  // Few numbers are rotated sooner than threads are woken.
  const bool few = r.batch * r.heads * r.tokens * r.features < (1 << 15);
  in_parallel(few ? Team{1, nullptr} : r.team, count, [&](index item) {
    const index begin = item % blocks * many, head = item / blocks;
    const index b = head / r.heads, h = head % r.heads, end = std::min(r.tokens, begin + many);
    if (r.x.type == REAL) rotate_block<real>(r, b, h, begin, end);
    if (r.x.type == BFLOAT16) rotate_block<uint16_t>(r, b, h, begin, end);
    if (r.x.type == FLOAT16) rotate_block<half>(r, b, h, begin, end);
  });
}
}  // namespace posenc
