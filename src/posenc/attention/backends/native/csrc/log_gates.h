// GRAPE: sums of the logarithms of gates over the later keys of a row; the gates are of other
// products than the logits.
#pragma once
#include "running_sums.h"
namespace posenc::NUMBER {
// s[i, j] += slope · Σ log σ(y_i · p_t) over the visible keys t after j. data: y [B, H, Q, E], p
// [B, H, K, E] and slope [H], at least 0; gradient: of y, and of p as [splits, B, H, K, E]. sizes: E.
// Products of so few features are computed where they are used: to store them would cost as much.
//
// The sums fall from key to key, so that all keys before some have no weight (finished): where
// slope · sum, and a bound of q · k, are too far below the greatest logit or the LSE.
class LogGates : public Term {
 public:
  static bool serves(const Problem& x) { return x.pairs.kind == LOG_GATES; }
  void begin_head(const Context& at) { features_ = at.x.pairs.sizes[0], slope_ = at.x.pairs.data[2][at.h]; }
  void begin_row(const Context& at) {
    const Problem& x = at.x;
    width_ = round_up(features_, TOGETHER_FEATURES);
    const index head = at.b * x.heads + at.h, keys = x.keys * features_, queries = x.queries * features_;
    panels_ = panels_scratch_.of(round_up(x.keys, PANEL) * width_);
    const Rows path = padded(x.pairs.data[1] + head * keys, x.keys, features_, x.keys, width_, path_scratch_);
    pack_transposed(path.data, path.ld, x.keys, width_, panels_);
    ends_ = x.pairs.data[0] + head * queries;
    key_norm_ = 0;
    const index depth = x.depth(), width = round_up(depth, VL);
    real* row = row_scratch_.of(width);
    for (index j = 0; j < x.keys; ++j) {
      read_row(at.k.tokens, row_of(at.k.tokens, 0, 0, j), 1, depth, width, row);
      const double norm = norm_of(row, depth);
      if (norm > key_norm_ || norm != norm) key_norm_ = norm;  // NaN stays: nothing is finished
    }
    if (!at.gradient) return;
    d_ends_ = x.pairs.gradient[0] + head * queries;
    d_path_ = x.pairs.gradient[1] + (at.split * x.batch * x.heads + head) * keys;
    rates_ = rates_scratch_.of(KEY_TILE);
    d_panels_ = d_panels_scratch_.of(KEY_TILE * width_);
    fill(d_panels_, 0, KEY_TILE * width_);
  }
  void begin_tile(const Context& at) {
    first_ = at.tile.i0;
    y_ = padded(ends_ + first_ * features_, at.tile.rows, features_, at.tile.rows, width_, y_scratch_).data;
    bounds_.resize(at.tile.rows);
    for (index i = 0; i < at.tile.rows; ++i)  // a cap bounds logits from below; AMX rounds q
      bounds_[i] = at.x.softcap ? INFINITY : 1.01 * norm_of(at.q.rows.at(i), at.x.depth()) * key_norm_;
  }
  bool carried_out(const Context& at) const {
    for (index i = 0; i < at.tile.rows; ++i)
      if (at.tile.all_visible_keys(i).size() && !finished(at, i, at.carry.sums[i])) return false;
    return true;
  }
  void carry_over(Context& at, index i, Range visible, const real*) const {
    double& sum = at.carry.sums[i];
    if (finished(at, i, sum)) return;
    vec lane_sums{}, logs[TOGETHER];
    for (index t = visible.begin / SOME * SOME; t < visible.end; t += SOME) {
      gates<false>(i, at.tile.j0 + t, logs, nullptr);
      for (int n = 0; n < TOGETHER; ++n) lane_sums += masked(logs[n], t + n * VL, visible, 0);
    }
    for (int l = 0; l < VL; ++l) sum += lane_sums[l];
  }
  void add(Context& at, index i, Range visible, real* s) {
    at.gradient ? add<true>(at, i, visible, s) : add<false>(at, i, visible, s);
  }
  // Keys that have no weight get -inf. GRADIENT: d log σ / d product, times the slope, is kept for `collect`.
  template <bool GRADIENT>
  void add(Context& at, index i, Range visible, real* s) {
    double& sum = at.carry.sums[i];
    const index begin = visible.begin / VL * VL;
    index t = (visible.end - 1) / SOME * SOME;
    for (; t + SOME > visible.begin && !finished(at, i, sum); t -= SOME) {
      vec logs[TOGETHER], later[TOGETHER];
      real totals[TOGETHER];
      gates<GRADIENT>(i, at.tile.j0 + t, logs, rates_ + t);
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; ++n) {
        const vec log = masked(logs[n], t + n * VL, visible, 0);
        later[n] = running_sums<false>(shifted<1, false>(log));
        totals[n] = later[n][0] + log[0];
      }
#pragma GCC unroll 4
      for (int n = TOGETHER - 1; n >= 0; --n) {
        real* to = s + t + n * VL;
        store(to, load(to) + (later[n] + real(sum)) * slope_);
        sum += totals[n];
      }
    }
    live_ = std::max(t + SOME, begin);
    fill(s + begin, -INFINITY, live_ - begin);
  }
  // Gradients by the products, of y_i and of p. A gate is in the sums of all keys before it, hence the prefix
  // sums; d_sum carries them.
  void collect(Context& at, index i, Range visible, const real*, real* ds) {
    double& d_sum = at.carry.d_sums[i];
    for (index t = live_; t < visible.end; t += VL) {
      const vec d = load(ds + t), before = running_sums<true>(shifted<1, true>(d));
      store(rates_ + t, masked(load(rates_ + t), t, visible, 0) * (before + real(d_sum)));
      d_sum += before[VL - 1] + d[VL - 1];
    }
    for (index e = 0; e < features_; e += TOGETHER_FEATURES) {
      const real* y = y_ + i * width_ + e;
      vec sums[TOGETHER_FEATURES] = {};
      for (index t = live_; t < visible.end; t += VL) {
        const vec d = load(rates_ + t);
        const real* p = panel(at.tile.j0 + t) + e * PANEL;
        real* dp = d_panels_ + (p - panel(at.tile.j0));
#pragma GCC unroll 8
        for (int f = 0; f < TOGETHER_FEATURES; ++f, p += PANEL, dp += PANEL) {
          sums[f] += d * load(p);
          store(dp, load(dp) + d * y[f]);
        }
      }
      real* to = d_ends_ + (first_ + i) * features_ + e;
      for (int f = 0; f < TOGETHER_FEATURES; f += VL) {
        vec some[VL];
        for (int l = 0; l < VL; ++l) some[l] = f + l < TOGETHER_FEATURES ? sums[f + l] : vec{};
        const index count = std::min<index>(std::min<int>(VL, TOGETHER_FEATURES), features_ - e - f);
        if (count > 0) store_n(to + f, load_n(to + f, count) + sums_of_lanes(some), count);
      }
    }
  }
  // Adds the gradients of p of the selected tile to those of others.
  void collect_tile(Context& at, const real*, index) {
    const QueryTile& tile = at.tile;
    for (index p = tile.panels.begin; p < tile.panels.end; ++p) {
      real *from = d_panels_ + p * PANEL * width_, *to = d_path_ + (tile.j0 + p * PANEL) * features_;
      for (index t = 0; t < std::min<index>(PANEL, tile.width - p * PANEL); ++t, to += features_)
        for (index e = 0; e < features_; ++e) to[e] += from[e * PANEL + t];
      fill(from, 0, PANEL * width_);
    }
  }

 private:
  static constexpr double LOG_ZERO = sizeof(real) == 4 ? -90 : -710;  // exponentials are 0 below
  static constexpr int TOGETHER = 4;  // vectors of keys whose products share the numbers of y
  static constexpr int TOGETHER_FEATURES = 8;
  static constexpr index SOME = TOGETHER * VL;
  static_assert(PANEL % SOME == 0);
  // Whether the keys before those that row i's sum is over have no weight.
  bool finished(const Context& at, index i, double sum) const {
    return slope_ * sum + bounds_[i] < at.levels[i] * at.level_unit + LOG_ZERO;
  }
  static double norm_of(const real* x, index n) { return std::sqrt(double(dot(x, x, round_up(n, VL)))); }
  // The features of key j and those after it.
  const real* panel(index j) const { return panels_ + j / PANEL * PANEL * width_ + j % PANEL; }
  // log σ(z) of the products z of row i and SOME keys from key j of the head on, and slope · σ(-z).
  template <bool GRADIENT>
  void gates(index i, index j, vec* logs, real* rates) const {
    const real *y = y_ + i * width_, *p = panel(j);
    vec z[TOGETHER] = {};
    for (index e = 0; e < width_; e += TOGETHER_FEATURES)
#pragma GCC unroll 8
      for (int f = 0; f < TOGETHER_FEATURES; ++f, ++y, p += PANEL)
#pragma GCC unroll 4
        for (int n = 0; n < TOGETHER; ++n) z[n] += load(p + n * VL) * *y;
    if (small(z)) {
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; ++n) {
        logs[n] = log_of_small(z[n]);
        if (GRADIENT) store(rates + n * VL, complement_of_small(z[n]) * slope_);
      }
      return;
    }
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; ++n) {
      const Logistic complement(-z[n]);
      logs[n] = complement.log_complement();
      if (GRADIENT) store(rates + n * VL, complement.value() * slope_);
    }
  }
  // Whether all products are small enough for polynomials of them.
  static bool small(const vec* z) {
    if (sizeof(real) > 4) return false;
    vec greatest{};
    for (int n = 0; n < TOGETHER; ++n) greatest = larger(greatest, z[n] < 0 ? -z[n] : z[n]);
    return largest(greatest) <= real(1.5);
  }
  // log σ(z) = z / 2 - log 2 - log cosh(z / 2), the last even in z: minimax for |z| <= 1.5, to 7e-9.
  static vec log_of_small(vec z) {
    const vec w = z * z;
    vec p = w * real(1.277497006e-6) - real(2.448562543e-5);
    p = (p * w + real(3.452749758e-4)) * w - real(5.207429915e-3);
    p = p * w + real(0.1249998638);
    return z * real(0.5) - real(0.693147180559945309) - w * p;
  }
  // σ(-z) = 1/2 - tanh(z / 2) / 2, to 5e-9.
  static vec complement_of_small(vec z) {
    const vec w = z * z;
    vec p = w * real(-1.098054603e-6) + real(1.879302451e-5);
    p = (p * w - real(2.07630417e-4)) * w + real(2.081358147e-3);
    p = (p * w - real(2.083280258e-2)) * w + real(0.2499999594);
    return real(0.5) - z * p;
  }

  Scratch panels_scratch_, path_scratch_, y_scratch_, row_scratch_, rates_scratch_, d_panels_scratch_;
  const real *ends_ = nullptr, *y_ = nullptr;      // of the head and of the tile
  real *panels_ = nullptr, *d_panels_ = nullptr;   // p in panels, and its gradients of a tile of keys
  real *d_ends_ = nullptr, *d_path_ = nullptr;
  real* rates_ = nullptr;  // [KEY_TILE]: of add's last row
  std::vector<double> bounds_;  // [rows]: q · k at most
  double key_norm_ = 0;
  real slope_ = 0;
  index features_ = 0, width_ = 0, first_ = 0;
  index live_ = 0;  // the first key with a weight, of add's last call
};
}  // namespace posenc
