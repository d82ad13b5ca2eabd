// Terms that depend on sums over the later keys of a row: CoPE (Counts) and stick breaking (Sticks).
// Tiles of keys go from the last to the first and carry the sums; within a vector they are prefix sums.
#pragma once
#include "buckets.h"
#include "term.h"
namespace posenc::NUMBER {
// x moved by H lanes towards the last (FORWARD) or the first lane, zeros moving in.
template <int H, bool FORWARD>
struct Moved {
  static constexpr int of(int l) {
    const int from = FORWARD ? l - H : l + H;
    return from >= 0 && from < VL ? from : VL;
  }
};
template <int H, bool FORWARD>
inline vec shifted(vec x) {
  return choose<Moved<H, FORWARD>>(x, vec{});
}
// Inclusive prefix (FORWARD) or suffix sums of the lanes, in log2(VL) steps.
template <bool FORWARD>
inline vec running_sums(vec x) {
  x += shifted<1, FORWARD>(x);
  if constexpr (VL > 2) x += shifted<2, FORWARD>(x);
  if constexpr (VL > 4) x += shifted<4, FORWARD>(x);
  if constexpr (VL > 8) x += shifted<8, FORWARD>(x);
  return x;
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
// log(1 + x) for 0 <= x <= 1, to the precision of x: by a minimax polynomial, to 3e-8, in float; in
// double as 2 atanh(y), y = x / (2 + x) <= 1/3.
inline vec log_of_one_plus(vec x) {
#ifdef POSENC_DOUBLE
  const vec y = x / (2 + x), y2 = y * y;
  vec p = splat(1.0 / 35);
#pragma GCC unroll 17
  for (int n = 16; n >= 0; --n) p = p * y2 + 1.0 / (2 * n + 1);
  return 2 * y * p;
#else
  constexpr float c[] = {-0.0295052373f, 0.0782259478f, -0.136632453f, 0.191060064f,
                         -0.248429821f,  0.333190968f,  -0.499994931f, 0.99999997f};
  vec p = splat(0.00523269411f);
  for (float coefficient : c) p = p * x + coefficient;
  return p * x;
#endif
}
// σ(z) and log σ(-z) by one exponential, that of -|z|, which cannot overflow.
struct Logistic {
  explicit Logistic(vec z) : z_(z), e_(exponential(z < 0 ? z : -z)), inverse_(1 / (1 + e_)) {}
  vec value() const { return z_ < 0 ? e_ * inverse_ : inverse_; }
  // log(1 - σ(z)) = -log(1 + e^z) = -max(z, 0) - log(1 + e), e = e^-|z|: accurate where e is small,
  // unlike log of a rounded 1 + e.
  vec log_complement() const { return (z_ > 0 ? -z_ : vec{}) - log_of_one_plus(e_); }

 private:
  vec z_, e_, inverse_;
};

// CoPE: s[i, j] += product[i, count], interpolated between the products of query i with the rows of
// two whole counts; count is the sum of the gates σ(s[i, t]) over the keys t >= j, at most max_count_.
class Counts {
 public:
  void begin(const Map& map) { max_count_ = real(map.buckets - 1), last_low_ = lane(map.buckets - 2); }
  // Whether all keys before have the greatest count: gates need not be summed up any more.
  bool full(real sum) const { return sum >= max_count_; }
  // `sum` and the gates of a tile.
  real tile_sum(const real* s, Range visible, real sum) const {
    vec lane_sums{};
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      lane_sums += lanes_in(t, visible) ? Logistic(load(s + t)).value() : vec{};
    return sum + NUMBER::sum(lane_sums);
  }
  // Adds the term to a row of logits; counts and gates are kept for `collect`. Returns the
  // sum with the tile's gates. Vectors go from the last to the first, each with the sum of those after it.
  real add(const real* product, real* s, Range visible, real sum) {
    const index from = visible.begin / VL * VL;
    index t = round_up(visible.end, VL) - VL;
    counts_ = counts_scratch_.of(KEY_TILE), gates_ = gates_scratch_.of(KEY_TILE);
    for (; t >= from && !full(sum); t -= VL) {
      const vec z = load(s + t), gate = lanes_in(t, visible) ? Logistic(z).value() : vec{};
      const vec count = running_sums<false>(gate) + sum;
      const Interpolation at = interpolation(count);
      const vec low = gather(product, at.low), high = gather(product + 1, at.low);
      store(s + t, z + low + at.fraction * (high - low));
      store(counts_ + t, count), store(gates_ + t, gate);
      sum = count[0];
    }
    full_ = t + VL;  // the first key whose count was computed: all before it are full
    const vec last = splat(product[last_low_ + 1]);
    for (; t >= from; t -= VL) store(s + t, load(s + t) + last);
    return sum;
  }
  // Gradients of the row of `add`'s last call: of the products, and of the logits by the gates. A gate
  // is in the counts of its key and all keys before it, hence the prefix sums; d_sums carries them.
  void collect(const real* product, real* ds, Range visible, real* d_product, double& d_sums) const {
    const index begin = std::max(visible.begin / VL * VL, full_);
    const index full = std::max<index>(0, std::min(begin, visible.end) - visible.begin);
    d_product[last_low_ + 1] += sum_range(ds + visible.begin, full);
    for (index t = begin; t < visible.end; t += VL) {
      const vec gate = load(gates_ + t), count = load(counts_ + t), d = load(ds + t);
      const Interpolation at = interpolation(count);
      const vec high = d * at.fraction, low = d - high;
      for (int l = 0; l < VL; ++l) {  // lanes may have the same count
        d_product[at.low[l]] += low[l];
        d_product[at.low[l] + 1] += high[l];
      }
      const vec rise = gather(product + 1, at.low) - gather(product, at.low);
      const vec sums = running_sums<true>(count < max_count_ ? d * rise : vec{}) + real(d_sums);
      store(ds + t, d + sums * gate * (1 - gate));
      d_sums = sums[VL - 1];
    }
  }

 private:
  struct Interpolation {
    ivec low;
    vec fraction;
  };
  // low + 1 is at most the last entry; low is below 0 where the count was NaN.
  Interpolation interpolation(vec count) const {
    count = count < max_count_ ? count : splat(max_count_);
    ivec low = __builtin_convertvector(count, ivec);
    low = low < 0 ? ivec{} : low > last_low_ ? isplat(last_low_) : low;
    return {low, count - __builtin_convertvector(low, vec)};
  }
  Scratch counts_scratch_, gates_scratch_;
  real *counts_ = nullptr, *gates_ = nullptr;
  index full_ = 0;
  lane last_low_ = 0;
  real max_count_ = 0;
};

// Stick breaking: weights p[i, j] = σ(s[i, j]) Π_t (1 - σ(s[i, t])) over the keys t after j and before
// the query's own, in place of the softmax. Sums are of log(1 - σ). sizes: whether the weight that is left
// is that of the query's own key.
class Sticks : public Term {
 public:
  static bool serves(const Problem& x) { return x.pairs.kind == STICKS; }
  void carry_over(Context& at, index i, Range visible, const real* s) const {
    const Range keys = before_own(at, i, visible);
    vec lane_sums{};
    for (index t = keys.begin / VL * VL; t < keys.end; t += VL)
      lane_sums += lanes_in(t, keys) ? Logistic(load(s + t)).log_complement() : vec{};
    at.carry.sums[i] = real(at.carry.sums[i]) + sum(lane_sums);
  }
  bool carried_out(const Context& at) const {
    return std::all_of(at.carry.sums.begin(), at.carry.sums.end(), exhausted);
  }
  // Logits of row i become weights, zero where hidden, from the last vector to the first; returns the
  // keys, in whole vectors, outside of which they all are.
  Range weigh(Context& at, index i, real* s) {
    const Range keys = before_own(at, i, at.tile.visible_keys(i)), all = at.tile.panel_keys();
    const Range whole{keys.size() ? keys.begin / VL * VL : all.begin, keys.size() ? round_up(keys.end, VL) : all.begin};
    real sum = at.carry.sums[i];
    index t = whole.end - VL;
    betas_ = scratch_.of(KEY_TILE);
    for (; t >= whole.begin && !exhausted(sum); t -= VL) {
      const ivec here = lanes_in(t, keys);
      const vec z = load(s + t);
      const Logistic logistic(z);
      const vec log_complements = here ? logistic.log_complement() : vec{};
      const vec sums = running_sums<false>(log_complements) + sum;  // log σ(z) = z + log σ(-z)
      store(s + t, here ? exponential(z + sums) : vec{});  // sums has log σ(-z) of the key itself
      store(betas_ + t, here ? logistic.value() : vec{});
      sum = sums[0];
    }
    for (; t >= whole.begin; t -= VL) store(s + t, vec{}), store(betas_ + t, vec{});
    at.carry.sums[i] = sum;
    fill_outside(s, all, whole);
    return whole;
  }
  // Gradients of the logits of the row of `weigh`'s last call, from those of the logarithms of its
  // weights: d log p_j / d z_t is 1 at t = j, and -σ(z_t) for all t >= j.
  void pull_back(real* ds, Range keys, double& d_sum) const {
    for (index t = keys.begin; t < keys.end; t += VL) {
      const vec d = load(ds + t), sums = running_sums<true>(d) + real(d_sum);
      store(ds + t, d - load(betas_ + t) * sums);
      d_sum = sums[VL - 1];
    }
  }
  static index own_key(const Context& at, index i) { return -index(at.tile.base[i]); }
  // The weight, after dropout, that the keys before leave to row i's own key, once the sums are over all
  // of them.
  static real remainder(const Context& at, index i) {
    const index key = own_key(at, i);
    if (!at.x.pairs.sizes[0] || !at.tile.is_visible(i, key) || exhausted(at.carry.sums[i])) return 0;
    const real weight = std::exp(at.carry.sums[i]);
    return at.x.dropout > 0 ? weight * at.dropout.at(at.dropout.row_seed(at.row(i)), key)[0] : weight;
  }

 private:
  // The visible keys of row i that are before the query's own.
  static Range before_own(const Context& at, index i, Range visible) {
    return {visible.begin, std::min(visible.end, own_key(at, i) - at.tile.j0)};
  }
  static bool exhausted(real sum) { return sum < LOG_ZERO; }  // all weights before are 0
  static constexpr real LOG_ZERO = sizeof(real) == 4 ? -70.0 : -708.0;  // `exponential` is 0 below
  Scratch scratch_;
  real* betas_ = nullptr;  // σ of the row's logits
};
}  // namespace posenc
