// Biases of logits that need no product: by offset, and by key.
#pragma once
#include "buckets.h"
#include "term.h"
namespace posenc::NUMBER {
// s[i, j] += bias_by_offset[offset].
class BiasByOffset : public Term {
 public:
  static bool serves(const Problem& x) { return bool(x.terms.bias_by_offset); }
  void begin_head(const Context& at) {
    const Operand& bias = at.x.terms.bias_by_offset;
    real* to = scratch_.of(bias.rows + 2 * PAD) + PAD;
    std::fill(to - PAD, to + bias.rows + PAD, real(0));
    std::copy_n(bias.of(0, at.h), bias.rows, to);
    data_ = to - at.x.terms.first;
    gradient_ = at.gradient ? bias.gradient_of(at.part, 0, at.h) : nullptr;
    if (gradient_) fill(gradient_, 0, bias.rows);
  }
  // The biases of row i from the selected tile's first key on. Images have none in one row.
  const real* row(const Context& at, index i) const { return data_ + at.tile.j0 + at.tile.base[i]; }
  void add(Context& at, index i, Range visible, real* s) const {
    for_key_runs(at.x, at.tile.j0, visible, at.tile.base[i], [&](index t, index n, index offset) {
      const real* from = data_ + offset;
      if (!at.x.period)  // whole vectors: keys from b on are masked after this
        for (index u = 0; u < n; u += VL) store(s + t + u, load(s + t + u) + load(from + u));
      else
        add_range(s + t, from, n);
    });
  }
  void collect(Context& at, index i, Range visible, const real*, real* ds) const {
    if (!gradient_) return;
    for_key_runs(at.x, at.tile.j0, visible, at.tile.base[i], [&](index t, index n, index offset) {
      add_range(gradient_ + (offset - at.x.terms.first), ds + t, n);
    });
  }

 private:
  Scratch scratch_;
  const real* data_ = nullptr;  // by offset, with PAD readable entries at both ends
  real* gradient_ = nullptr;    // from the first offset on; null if it is not wanted
};

// s[i, j] += column[j], in double, which may be a sum over thousands of tokens (of gates), or hide keys.
// Logits are relative to about the greatest of a row's visible keys (`shift`), so that those of weight
// are exact in float32.
class Column : public Term {
 public:
  static bool serves(const Problem& x) { return bool(x.terms.column); }
  void begin_row(const Context& at) {
    const index keys = at.x.keys, size = round_up(keys, VL);
    double* exact = scratch_of<double>(exact_scratch_, size);
    real* rounded = rounded_scratch_.of(size);
    std::copy_n(at.x.terms.column.of<double>(at.b, at.h), keys, exact);
    std::fill(exact + keys, exact + size, 0.0);
    for (index j = 0; j < size; ++j) rounded[j] = real(exact[j]);
    exact_ = exact, rounded_ = rounded;
    gradient_ = at.gradient ? at.x.terms.column.gradient_of<double>(at.split, at.b, at.h) : nullptr;
    if (gradient_) std::fill_n(gradient_, keys, 0.0);
  }
  void begin_tile(const Context& at) {
    shifts_.resize(at.tile.rows);
    ds_sums_.assign(at.tile.rows, 0);
    Range before{0, 0};
    real greatest = -INFINITY;
    for (index i = 0; i < at.tile.rows; ++i) {
      const Range keys = at.tile.all_visible_keys(i);
      const bool goes_on = keys.begin == before.begin && keys.end >= before.end;
      if (!goes_on) greatest = -INFINITY;
      greatest = std::max(greatest, greatest_of({goes_on ? before.end : keys.begin, keys.end}));
      shifts_[i] = greatest == -INFINITY ? 0 : greatest, before = keys;
    }
  }
  // What is to be added to the logits of row i, and to their LSE.
  double shift(index i) const { return present ? shifts_[i] : 0; }
  void add(Context& at, index i, Range visible, real* s) const {
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      store(s + t, load(s + t) + narrow_difference(exact_ + at.tile.j0 + t, shifts_[i]));
  }
  void collect(Context& at, index i, Range visible, const real*, real* ds) {
    if (gradient_) ds_sums_[i] += add_wide(gradient_ + at.tile.j0 + visible.begin, ds + visible.begin, visible.size());
  }
  // With what a sink and the LSE take, the gradients of a row's logits sum to 0 but for rounding, which is
  // taken off one key: it would grow in running sums over many keys.
  void end_tile(Context& at) {
    const Problem& x = at.x;
    for (index i = 0; i < at.tile.rows && gradient_ && !x.global_lse && !x.softcap; ++i) {
      const index row = at.row(i);
      const Range keys = at.tile.all_visible_keys(i);
      const double others = (x.sinks ? x.sinks_gradient[row] : 0) - (x.lse_gradient ? x.lse_gradient[row] : 0);
      if (keys.size()) gradient_[keys.end - 1] -= ds_sums_[i] + others;
    }
  }

 private:
  real greatest_of(Range keys) const {
    vec m = splat(-INFINITY);
    for (index t = keys.begin / VL * VL; t < keys.end; t += VL) m = larger(masked(load(rounded_ + t), t, keys), m);
    return largest(m);
  }
  Scratch exact_scratch_, rounded_scratch_;
  const double* exact_ = nullptr;  // [keys up to a multiple of VL]
  const real* rounded_ = nullptr;
  std::vector<double> shifts_, ds_sums_;  // [rows]
  double* gradient_ = nullptr;            // [keys]; null if it is not wanted
};
}  // namespace posenc
