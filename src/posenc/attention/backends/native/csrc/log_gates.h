// GRAPE: sums of the logarithms of gates over the later keys of a row; the gates are of other
// products than the logits.
#pragma once
#include "query_tile.h"
#include "running_sums.h"
namespace posenc::NUMBER {
// s[i, j] += slope · Σ log σ(y_i · p_t) over the visible keys t after j. data: y [B, H, Q, E], p
// [B, H, K, E] and slope [H], at least 0; gradient: of y, and of p as [splits, B, H, K, E]. sizes: E.
// Products are computed where they are used: they are so short that storing them would cost as much.
class LogGates {
 public:
  void begin_head(const Pairs& pairs, index h) { features_ = pairs.sizes[0], slope_ = pairs.data[2][h]; }
  void begin_row(const Problem& x, index b, index h) {
    width_ = round_up(features_, VL), keys_ = x.keys;
    const index at = b * x.heads + h;
    const real* path = x.pairs.data[1] + at * x.keys * features_;
    panels_ = panels_scratch_.of(round_up(x.keys, PANEL) * features_);
    pack_transposed(path, features_, x.keys, features_, panels_);
    path_ = Tokens{reinterpret_cast<char*>(const_cast<real*>(path)), REAL, 0, 0, features_};
    ends_ = x.pairs.data[0] + at * x.queries * features_;
    d_ends_ = x.pairs.gradient[0] ? x.pairs.gradient[0] + at * x.queries * features_ : nullptr;
  }
  void begin_gradient(const Problem& x, index b, index h, index split) {
    d_path_ = x.pairs.gradient[1] + ((split * x.batch + b) * x.heads + h) * x.keys * features_;
    path_rows_ = read_rows(path_, 0, 0, 0, x.keys, features_, 1, path_scratch_);
  }
  void begin_tile(index first, index rows, bool gradient) {
    y_ = ends_ + first * features_, first_ = first;
    if (!gradient) return;
    ld_ = round_up(std::min(keys_, KEY_TILE), PANEL);
    rates_ = rates_scratch_.of(rows * ld_);
  }
  // The sum of the logarithms of row i's gates in a tile of keys from j0 on.
  double tile_sum(index i, index j0, Range visible) const {
    vec lane_sums{};
    for (index t = visible.begin / SOME * SOME; t < visible.end; t += SOME) {
      vec z[TOGETHER];
      products(i, j0 + t, z);
      for (int n = 0; n < TOGETHER; ++n) lane_sums += log_gate(Logistic(-z[n]), t + n * VL, visible);
    }
    double sum = 0;
    for (int l = 0; l < VL; ++l) sum += lane_sums[l];
    return sum;
  }
  // Adds the term to row i of the logits of a tile, from the last keys to the first. sum: of the
  // logarithms after the tile, then with those of the tile.
  void add(index i, index j0, real* s, Range visible, double& sum) const {
    walk(visible, [&](index t) {
      vec z[TOGETHER];
      products(i, j0 + t, z);
      add_some([&](int n) { return log_gate(Logistic(-z[n]), t + n * VL, visible); }, s + t, sum);
    });
  }
  // The same; the rates of the logarithms by the products, times the slope, are kept for collect_row.
  void add_keeping_rates(index i, const QueryTile& tile, real* s, Range visible, double& sum) const {
    real* rates = rates_ + i * ld_;
    clear_around(rates, tile.panel_keys(), visible);
    walk(visible, [&](index t) {
      vec z[TOGETHER];
      products(i, tile.j0 + t, z);
      add_some(
          [&](int n) {
            const Logistic complement(-z[n]);
            const vec rate = complement.value() * slope_;
            store(rates + t + n * VL, lanes_in(t + n * VL, visible) ? rate : vec{});
            return log_gate(complement, t + n * VL, visible);
          },
          s + t, sum);
    });
  }
  // The kept rates of row i become gradients of its products. A gate is in the sums of all keys before
  // it, hence the prefix sums of ds; d_sum carries them.
  void collect_row(index i, const real* ds, Range visible, double& d_sum) const {
    real* rates = rates_ + i * ld_;
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL) {
      const vec d = load(ds + t), before = running_sums<true>(shifted<1, true>(d));
      store(rates + t, load(rates + t) * (before + real(d_sum)));
      d_sum += before[VL - 1] + d[VL - 1];
    }
  }
  // dy and dp of the selected tile, from the gradients of all its products.
  void collect(const QueryTile& tile) {
    const Range all = tile.panel_keys();
    for (index i = 0; i < tile.rows; ++i)
      if (!tile.visible_keys(i).size()) fill(rates_ + i * ld_ + all.begin, 0, all.size());
    real *dy = dy_scratch_.of(tile.rows * width_), *dp = dp_scratch_.of(features_ * PANEL);
    fill(dy, 0, tile.rows * width_);
    for (index p = tile.panels.begin; p < tile.panels.end; ++p) {
      const Range m = tile.panel_rows[p];
      if (!m.size()) continue;
      const index from = p * PANEL, j = tile.j0 + from, keys = std::min<index>(PANEL, tile.width - from);
      const real* d = rates_ + m.begin * ld_ + from;
      gemm(m.size(), width_, keys, {d, ld_, 1}, path_rows_.at(j), path_rows_.ld, dy + m.begin * width_, width_, true);
      gemm(features_, PANEL, m.size(), {y_ + m.begin * features_, 1, features_}, d, ld_, dp, PANEL, false);
      for (index t = 0; t < keys; ++t)
        for (index e = 0; e < features_; ++e) d_path_[(j + t) * features_ + e] += dp[e * PANEL + t];
    }
    for (index i = 0; i < tile.rows; ++i)
      for (index e = 0; e < features_; ++e) d_ends_[(first_ + i) * features_ + e] += dy[i * width_ + e];
  }

 private:
  static constexpr int TOGETHER = 4;  // vectors of keys whose products share the numbers of y
  static constexpr index SOME = TOGETHER * VL;
  static_assert(PANEL % SOME == 0);
  // Calls f for the first of every SOME keys with visible ones, from the last to the first.
  template <class F>
  static void walk(Range visible, F f) {
    for (index t = (visible.end - 1) / SOME * SOME; t + SOME > visible.begin; t -= SOME) f(t);
  }
  // Products of row i with SOME keys from key j of the head on.
  void products(index i, index j, vec* to) const {
    const real *y = y_ + i * features_, *p = panels_ + j / PANEL * PANEL * features_ + j % PANEL;
    vec sums[TOGETHER] = {};
    for (index e = 0; e < features_; ++e, p += PANEL)
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; ++n) sums[n] += load(p + n * VL) * y[e];
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; ++n) to[n] = sums[n];
  }
  // log σ(z) where visible, of σ(-z).
  static vec log_gate(const Logistic& complement, index t, Range visible) {
    const vec log = complement.log_complement();
    return t >= visible.begin && t + VL <= visible.end ? log : lanes_in(t, visible) ? log : vec{};
  }
  // s += the sums after each of SOME keys, from log_gate(n) of their vectors.
  template <class F>
  void add_some(F log_gate, real* s, double& sum) const {
    vec later[TOGETHER];
    real totals[TOGETHER];
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; ++n) {
      const vec log = log_gate(n);
      later[n] = running_sums<false>(shifted<1, false>(log));
      totals[n] = later[n][0] + log[0];
    }
#pragma GCC unroll 4
    for (int n = TOGETHER - 1; n >= 0; --n) {
      store(s + n * VL, load(s + n * VL) + (later[n] + real(sum)) * slope_);
      sum += totals[n];
    }
  }
  static void clear_around(real* rates, Range all, Range visible) {
    const index from = visible.begin / SOME * SOME, to = round_up(visible.end, SOME);
    fill(rates + all.begin, 0, from - all.begin);
    fill(rates + to, 0, all.end - to);
  }

  Scratch panels_scratch_, path_scratch_, rates_scratch_, dy_scratch_, dp_scratch_;
  real *panels_ = nullptr, *rates_ = nullptr, *d_ends_ = nullptr, *d_path_ = nullptr;
  const real *ends_ = nullptr, *y_ = nullptr;  // of the head and of the tile
  Tokens path_;
  Rows path_rows_;  // p in whole vectors
  real slope_ = 0;
  index features_ = 0, width_ = 0, keys_ = 0, ld_ = 0, first_ = 0;
};
}  // namespace posenc
