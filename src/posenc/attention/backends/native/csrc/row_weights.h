// What the forward pass keeps of a tile of queries: weights relative to a level for each row, their sums,
// and outputs that are not yet divided by these.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
class RowWeights : public Logits {
 public:
  explicit RowWeights(const Problem& problem) : Logits(problem, false), width(round_up(x.value_dim, VL)) {}
  void begin_outputs(index first, index n) {
    begin_tile(first, n);
    outputs_ = outputs_scratch_.of(round_up(n, AMX_TILE) * width);
    levels = levels_scratch_.of(n), sums_ = sums_scratch_.of(round_up(n, VL) * VL);
    fill(outputs_, 0, n * width);
    fill(levels, -INFINITY, n);
    fill(sums_, 0, round_up(n, VL) * VL);
    carry.begin(n, 0);
  }
  // To the output and the LSE, once the weights of all keys are in.
  void end_outputs() {
    const index n = tile.rows;
    if (term<Sticks>().present) add_remainder(n);
    if (values().present) values().add_values(outputs_);
    for (index i = 0; i < n; i += VL) {
      vec sums[VL];
      for (int l = 0; l < VL; ++l) sums[l] = load(sums_ + (i + l) * VL);
      const vec totals = sums_of_lanes(sums);
      double logs[VL];
      logarithms(totals, logs);
      for (index r = i; r < std::min(i + VL, n); ++r) write(r, totals[r - i], logs[r - i]);
    }
  }
  real* output(index i) const { return outputs_ + i * width; }
  // What weights of row i are relative to; never lowered. Where all logits so far are -inf it is -inf, and
  // their weights are relative to 0.
  void raise_level(index i, real to) {
    if (!(to > levels[i])) return;
    if (levels[i] == -INFINITY) return void(levels[i] = to);  // there are no weights yet
    const real by = std::exp((levels[i] - to) * real(level_unit));
    levels[i] = to;
    store(sums_ + i * VL, load(sums_ + i * VL) * by);
    scale_range(output(i), by, width);
    if (values().present) values().scale_row(i, by);
  }
  real finite_level(index i) const { return levels[i] == -INFINITY ? real(0) : levels[i]; }
  // Weights of row i, lane by lane, to its sum.
  void add(index i, vec weights) { store(sums_ + i * VL, load(sums_ + i * VL) + weights); }
  void collect(index i, const real* weights, Range visible) {
    if (values().present) values().collect(*this, i, visible, weights, nullptr);
  }
  void drop(index i, real* weights, Range keys) const {
    if (!(x.dropout > 0)) return;
    const uint32_t seed = dropout.row_seed(row(i));
    for (index t = keys.begin; t < keys.end; t += VL)
      store(weights + t, load(weights + t) * dropout.at(seed, tile.j0 + t));
  }
  // By stick breaking, whose weights are probabilities.
  void stick_row(index i, real* s) {
    levels[i] = 0, sums_[i * VL] = 1;
    drop(i, s, term<Sticks>().weigh(*this, i, s));
  }
  ValueBucketTerm& values() { return term<ValueBucketTerm>(); }
  const index width;  // of a row of outputs

 private:
  // Row i of the tile, from the sum of its weights and the sum's logarithm.
  void write(index i, real total, double log) {
    const bool empty = total == 0;
    const index at = row(i);
    double lse = empty ? -INFINITY : row_shift(i) + levels[i] * level_unit + log;
    real weight = empty ? 0 : 1 / total;
    if (x.sinks) weight *= add_sink(x.sinks[at], lse);
    write_row(x.out, row_of(x.out, b, h, tile.i0 + i), output(i), weight, x.value_dim);
    x.lse[at] = lse;
  }
  // out += remainder · v of each row's own key: what stick breaking leaves.
  void add_remainder(index n) {
    for (index i = 0; i < n; ++i) {
      const real remainder = Sticks::remainder(*this, i);
      if (remainder != 0) add_scaled(output(i), v.rows.at(Sticks::own_key(*this, i)), remainder, width);
    }
  }
  real *outputs_ = nullptr, *sums_ = nullptr;  // [n, width], not yet divided; [n, VL]: sums of weights by lane
  Scratch outputs_scratch_, levels_scratch_, sums_scratch_;
};
}  // namespace posenc
