// Pairs of features as complex numbers, times a factor of their token.
#pragma once
#include "problem.h"
namespace posenc::NUMBER {
// out = x with (a, b) -> (a c - b s, a s + b c), or with -s; features beyond the pairs are copied.
// c and s: [B|1, H|1, L, pairs] with contiguous pairs, strides 0 where shared.
struct Rotation {
  Tokens x, out;
  const real *cosine, *sine;
  index factor_batch, factor_head, factor_token;
  index batch, heads, tokens, features, pairs;
  index adjacent;   // pairs are (2t, 2t + 1), not (t, t + pairs)
  index conjugate;  // -s
  index threads;
};

struct Bfloat16 {
  uint16_t bits;
  operator real() const { return from_bfloat16(bits); }
  Bfloat16() = default;
  explicit Bfloat16(real x) : bits(to_bfloat16(float(x))) {}
};

template <class Number>
void rotate_tokens(const Rotation& r, index b, index h, index begin, index end) {
  const index n = r.pairs, step = r.adjacent ? 2 : 1, other = r.adjacent ? 1 : n;
  const real sign = r.conjugate ? -1 : 1;
  for (index t = begin; t < end; ++t) {
    const index at = b * r.factor_batch + h * r.factor_head + t * r.factor_token;
    const real *__restrict c = r.cosine + at, *__restrict s = r.sine + at;
    const Number* __restrict x = reinterpret_cast<const Number*>(row_of(r.x, b, h, t));
    Number* __restrict to = reinterpret_cast<Number*>(row_of(r.out, b, h, t));
    const auto turn = [&](index from, index pair) {
      const real first = real(x[from]), second = real(x[from + other]), sine = sign * s[pair];
      to[from] = Number(first * c[pair] - second * sine);
      to[from + other] = Number(first * sine + second * c[pair]);
    };
    if (step == 1)
      for (index i = 0; i < n; ++i) turn(i, i);
    else
      for (index i = 0; i < n; ++i) turn(2 * i, i);
    std::copy(x + 2 * n, x + r.features, to + 2 * n);
  }
}

inline void rotate(const Rotation& r) {
  constexpr index many = 256;  // tokens of a head that a thread takes at once
  const index blocks = (r.tokens + many - 1) / many, count = r.batch * r.heads * blocks;
  const bool few = r.batch * r.heads * r.tokens * r.features < (1 << 15);
  in_parallel(few ? 1 : r.threads, count, [&](index item) {
    const index begin = item % blocks * many, head = item / blocks;
    const index b = head / r.heads, h = head % r.heads, end = std::min(r.tokens, begin + many);
    if (r.x.type == REAL) rotate_tokens<real>(r, b, h, begin, end);
    if (r.x.type == BFLOAT16) rotate_tokens<Bfloat16>(r, b, h, begin, end);
    if (r.x.type == FLOAT16) rotate_tokens<_Float16>(r, b, h, begin, end);
  });
}
}  // namespace posenc
