// What the forward pass keeps of a tile of queries: weights relative to a level for each row, their sums,
// and outputs that are not yet divided by these.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
class RowWeights {
 public:
  explicit RowWeights(const Problem& x)
      : logits(x, false), width(round_up(x.value_dim, VL)), x_(x), dropout_(x.dropout, x.seed) {}
  void begin_tile(index b, index h, index first, index n) {
    logits.begin_tile(x_, b, h, first, n);
    first_row_ = (b * x_.heads + h) * x_.queries + first;
    outputs_ = outputs_scratch_.of(round_up(n, AMX_TILE) * width);
    levels = levels_scratch_.of(n), sums_ = sums_scratch_.of(round_up(n, VL) * VL);
    fill(outputs_, 0, n * width);
    fill(levels, -INFINITY, n);
    fill(sums_, 0, round_up(n, VL) * VL);
    if (x_.terms.value_rows) by_bucket.begin(logits.value_rows, n);
    if (x_.pairs.sums()) logits.carry.begin(n, 0);
    logits.log_gates.set_levels(levels, logits.use_amx ? LN_2 : 1);
  }
  // To the output and the LSE, once the weights of all keys are in.
  void end_tile(index b, index h, index first, index n) {
    if (x_.pairs.kind == STICKS) add_remainder(n);
    if (x_.terms.value_rows && logits.use_amx)
      by_bucket.pull_back(logits.value_rows, {}, outputs_, nullptr, 0);
    else if (x_.terms.value_rows)
      by_bucket.times_rows(logits.value_rows, outputs_, width);
    for (index i = 0; i < n; i += VL) {
      vec sums[VL];
      for (int l = 0; l < VL; ++l) sums[l] = load(sums_ + (i + l) * VL);
      const vec totals = sums_of_lanes(sums);
      double logs[VL];
      logarithms(totals, logs);
      for (index r = i; r < std::min(i + VL, n); ++r) write(b, h, first, r, totals[r - i], logs[r - i]);
    }
  }
  real* output(index i) const { return outputs_ + i * width; }
  // What weights of row i are relative to; never lowered. Where all logits so far are -inf it is -inf, and
  // their weights are relative to 0.
  void raise_level(index i, real to) {
    if (!(to > levels[i])) return;
    if (levels[i] == -INFINITY) return void(levels[i] = to);  // there are no weights yet
    const real by = logits.use_amx ? std::exp2(levels[i] - to) : std::exp(levels[i] - to);
    levels[i] = to;
    store(sums_ + i * VL, load(sums_ + i * VL) * by);
    scale_range(output(i), by, width);
    if (x_.terms.value_rows) by_bucket.scale_row(i, by);
  }
  real finite_level(index i) const { return levels[i] == -INFINITY ? real(0) : levels[i]; }
  // Weights of row i, lane by lane, to its sum.
  void add(index i, vec weights) { store(sums_ + i * VL, load(sums_ + i * VL) + weights); }
  void collect(index i, const real* weights, Range visible) {
    const QueryTile& tile = logits.tile;
    if (x_.terms.value_rows) posenc::NUMBER::collect(x_, weights, tile.j0, visible, tile.base[i], by_bucket.row(i));
  }
  void drop(index i, real* weights, Range keys) const {
    if (!(x_.dropout > 0)) return;
    const uint32_t seed = dropout_.row_seed(first_row_ + i);
    for (index t = keys.begin; t < keys.end; t += VL)
      store(weights + t, load(weights + t) * dropout_.at(seed, logits.tile.j0 + t));
  }
  // By stick breaking, whose weights are probabilities.
  void stick_row(index i, real* s) {
    levels[i] = 0, sums_[i * VL] = 1;
    drop(i, s, logits.stick_row(s, i));
  }
  Logits logits;
  const index width;       // of a row of outputs
  real* levels = nullptr;  // [n]: about the greatest logit so far; by AMX, of logits in powers of two
  BucketTile by_bucket;    // weights, where values have rows of buckets
  static constexpr double LN_2 = 0.693147180559945309;

 private:
  // Row i of the tile, from the sum of its weights and the sum's logarithm.
  void write(index b, index h, index first, index i, real total, double log) {
    const bool empty = total == 0;
    const index row = first_row_ + i;
    const double level = logits.use_amx ? levels[i] * LN_2 : levels[i];
    double lse = empty ? -INFINITY : logits.row_shift(x_, i) + level + log;
    real weight = empty ? 0 : 1 / total;
    if (x_.sinks) weight *= add_sink(x_.sinks[row], lse);
    write_row(x_.out, row_of(x_.out, b, h, first + i), output(i), weight, x_.value_dim);
    x_.lse[row] = lse;
  }
  // out += remainder · v of each row's own key: what stick breaking leaves (Logits::remainder).
  void add_remainder(index n) {
    for (index i = 0; i < n; ++i) {
      real remainder = logits.remainder(x_, i);
      if (remainder == 0) continue;
      const index self_key = logits.self_key(i);
      if (x_.dropout > 0) remainder *= dropout_.at(dropout_.row_seed(first_row_ + i), self_key)[0];
      for (index d = 0; d < width; ++d) output(i)[d] += remainder * logits.v.at(self_key)[d];
    }
  }
  const Problem& x_;
  Dropout dropout_;
  index first_row_ = 0;  // of the tile among all batch rows and heads
  real *outputs_ = nullptr, *sums_ = nullptr;  // [n, width], not yet divided; [n, VL]: sums of weights by lane
  Scratch outputs_scratch_, levels_scratch_, sums_scratch_;
};
}  // namespace posenc
