// Sums over the keys of a row before or after a key, and the functions of logits that they are of.
#pragma once
#include "terms.h"
namespace posenc::NUMBER {
// x moved by H lanes towards the first (FORWARD false) or the last lane, zeros moving in.
template <int H, bool FORWARD>
inline vec shifted(vec x) {
  ivec at;
  for (int l = 0; l < VL; ++l) {
    const int from = FORWARD ? l - H : l + H;
    at[l] = from >= 0 && from < VL ? from : VL;
  }
  return __builtin_shuffle(x, vec{}, at);
}
// Sums of the lanes up to (FORWARD) or from each lane, itself included.
template <bool FORWARD>
inline vec running_sums(vec x) {
  x += shifted<1, FORWARD>(x);
  if constexpr (VL > 2) x += shifted<2, FORWARD>(x);
  if constexpr (VL > 4) x += shifted<4, FORWARD>(x);
  if constexpr (VL > 8) x += shifted<8, FORWARD>(x);
  return x;
}
inline ivec lanes_in(index t, Range see) {
  const ivec at = iota() + isplat(lane(t));
  return (at >= isplat(lane(see.begin))) & (at < isplat(lane(see.end)));
}
inline vec gather(const real* p, ivec at) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return (vec)_mm512_i32gather_ps((__m512i)at, p, 4);
#elif VECTOR_BYTES == 64
  return (vec)_mm512_i64gather_pd((__m512i)at, p, 8);
#else
  vec x;
  for (int l = 0; l < VL; ++l) x[l] = p[at[l]];
  return x;
#endif
}
// The logistic function of z, and the logarithm of that of -z.
struct Logistic {
  explicit Logistic(vec z) : z_(z), e_(exponential(z < 0 ? z : -z)), inverse_(1 / (1 + e_)) {}
  vec value() const { return z_ < 0 ? e_ * inverse_ : inverse_; }
  vec log_rest() const {  // -log(1 + e^z), by the series of atanh
    const vec y = e_ / (2 + e_), y2 = y * y;
    constexpr int terms = sizeof(real) == 4 ? 8 : 17;
    vec p = splat(real(1) / (2 * terms + 1));
#pragma GCC unroll 17
    for (int n = terms - 1; n >= 0; --n) p = p * y2 + real(1) / (2 * n + 1);
    return (z_ > 0 ? -z_ : vec{}) - 2 * y * p;
  }

 private:
  vec z_, e_, inverse_;
};

// Sums of each row, carried from the last tile of keys to the first; for gradients they are kept
// at the end of every tile, and other sums are carried from the first tile to the last.
class Carry {
 public:
  void begin(index rows, index tiles) {
    rows_ = rows;
    sums = sums_.of(rows);
    fill(sums, 0, rows);
    kept_ = tiles ? kept_scratch_.of(rows * tiles) : nullptr;
    before = before_.of(rows);
    fill(before, 0, rows);
  }
  void keep(index tile) { std::copy_n(sums, rows_, kept_ + tile * rows_); }
  void resume(index tile) { std::copy_n(kept_ + tile * rows_, rows_, sums); }
  real *sums = nullptr, *before = nullptr;

 private:
  Scratch sums_, kept_scratch_, before_;
  real* kept_ = nullptr;
  index rows_ = 0;
};

// Contextual positions: s[i, j] += product[i, count] between two entries of the row's products,
// count the sum of the logistic functions of the logits from the key on, at most `most`.
class Counts {
 public:
  void begin(const Map& map) { most_ = real(map.buckets - 1), last_ = lane(map.buckets - 2); }
  bool full(real sum) const { return sum >= most_; }
  real total(const real* s, Range see, real sum) const {
    vec total{};
    for (index t = see.begin / VL * VL; t < see.end; t += VL)
      total += lanes_in(t, see) ? Logistic(load(s + t)).value() : vec{};
    return sum + NUMBER::sum(total);
  }
  real add(const real* product, real* s, Range see, real sum) {
    const index from = see.begin / VL * VL;
    index t = round_up(see.end, VL) - VL;
    counts_ = counts_scratch_.of(KEY_TILE), gates_ = gates_scratch_.of(KEY_TILE);
    for (; t >= from && !full(sum); t -= VL) {
      const vec z = load(s + t), gate = lanes_in(t, see) ? Logistic(z).value() : vec{};
      const vec count = running_sums<false>(gate) + sum;
      const At at = place(count);
      const vec low = gather(product, at.low), high = gather(product + 1, at.low);
      store(s + t, z + low + at.share * (high - low));
      store(counts_ + t, count), store(gates_ + t, gate);
      sum = count[0];
    }
    full_ = t + VL;  // the first key that is not
    const vec last = splat(product[last_ + 1]);
    for (; t >= from; t -= VL) store(s + t, load(s + t) + last);
    return sum;
  }
  // Gradients of the row of `add`'s last call: of the products, and of the logits by the gates.
  void collect(const real* product, real* ds, Range see, real* d_product, real& before) const {
    const index begin = std::max(see.begin / VL * VL, full_);
    d_product[last_ + 1] += sum_range(ds + see.begin, std::max<index>(0, std::min(begin, see.end) - see.begin));
    for (index t = begin; t < see.end; t += VL) {
      const vec gate = load(gates_ + t), count = load(counts_ + t), d = load(ds + t);
      const At at = place(count);
      const vec high = d * at.share, low = d - high;
      for (int l = 0; l < VL; ++l) {
        d_product[at.low[l]] += low[l];
        d_product[at.low[l] + 1] += high[l];
      }
      const vec rise = gather(product + 1, at.low) - gather(product, at.low);
      const vec sums = running_sums<true>(count < most_ ? d * rise : vec{}) + before;
      store(ds + t, d + sums * gate * (1 - gate));
      before = sums[VL - 1];
    }
  }

 private:
  struct At {
    ivec low;
    vec share;
  };
  At place(vec count) const {
    count = count < most_ ? count : splat(most_);
    ivec low = __builtin_convertvector(count, ivec);
    low = low < 0 ? ivec{} : low > last_ ? isplat(last_) : low;
    return {low, count - __builtin_convertvector(low, vec)};
  }
  Scratch counts_scratch_, gates_scratch_;
  real *counts_ = nullptr, *gates_ = nullptr;
  index full_ = 0;
  lane last_ = 0;
  real most_ = 0;
};

// Stick breaking: weights σ(s[i, j]) times the product of 1 - σ(s[i, t]) over the later keys t
// before the query, in place of the softmax; sums are of the logarithms.
class Sticks {
 public:
  // The part of what a row sees that is before the query's own key.
  static Range before(Range see, index j0, index base) {
    return {see.begin, std::min(see.end, -base - j0)};
  }
  static bool none(real sum) { return sum < LOWEST; }  // nothing is left of the stick
  static real total(const real* s, Range see, real sum) {
    vec total{};
    for (index t = see.begin / VL * VL; t < see.end; t += VL)
      total += lanes_in(t, see) ? Logistic(load(s + t)).log_rest() : vec{};
    return sum + NUMBER::sum(total);
  }
  // Logits of a row become weights.
  real weigh(real* s, Range see, real sum) {
    const index from = see.begin / VL * VL;
    index t = round_up(see.end, VL) - VL;
    betas_ = scratch_.of(KEY_TILE);
    for (; t >= from && !none(sum); t -= VL) {
      const ivec here = lanes_in(t, see);
      const vec z = load(s + t);
      const Logistic logistic(z);
      const vec rest = here ? logistic.log_rest() : vec{};
      const vec sums = running_sums<false>(rest) + sum;  // log σ(z) = z + log σ(-z)
      store(s + t, here ? exponential(z + sums) : vec{});
      store(betas_ + t, here ? logistic.value() : vec{});
      sum = sums[0];
    }
    for (; t >= from; t -= VL) store(s + t, vec{}), store(betas_ + t, vec{});
    return sum;
  }
  // Gradients of the logits of the last row, from those of the logarithms of its weights.
  void collect(real* ds, Range see, real& before) const {
    for (index t = see.begin / VL * VL; t < see.end; t += VL) {
      const vec d = load(ds + t), sums = running_sums<true>(d) + before;
      store(ds + t, d - load(betas_ + t) * sums);
      before = sums[VL - 1];
    }
  }

 private:
  static constexpr real LOWEST = sizeof(real) == 4 ? -70.0 : -708.0;
  Scratch scratch_;
  real* betas_ = nullptr;
};
}  // namespace posenc
