// Logits of a tile of queries against a tile of keys, with all their terms.
#pragma once
#include <tuple>
#include "bias.h"
#include "block_transforms.h"
#include "distance.h"
#include "key_bucket_term.h"
#include "log_gates.h"
#include "query_bucket_term.h"
namespace posenc::NUMBER {
// The terms in the order in which they are added to logits. A new one needs no more than a place here.
using AllTerms = std::tuple<BiasByOffset, QueryBucketTerm, KeyBucketTerm, LogGates, Distance, Column, BlockTransforms,
                            Sticks, ValueBucketTerm>;

// Common to forward and backward: the operands of one head, and the logits s [queries, ld] of a tile.
// Products and what terms add to the whole tile are computed at once (multiply), the rest row by row
// while the row is in the first-level cache (add_terms).
class Logits : public Context {
 public:
  Logits(const Problem& problem, bool backward) : Context(problem, backward) {
    std::apply([&](auto&... term) { (..., (term.present = term.serves(x))); }, terms_);
    int exponent;
    exact_ = transforms_qk(x) || std::frexp(x.scale, &exponent) == 0.5;
  }
  template <class T>
  T& term() {
    return std::get<T>(terms_);
  }
  // Calls f(term) for the terms that the call has.
  template <class F>
  void for_terms(F f) {
    std::apply([&](auto&... term) { (..., (term.present ? f(term) : void())); }, terms_);
  }
  void begin_head(index head, index part_of_head) {
    h = head, part = part_of_head, group = h / (x.heads / x.groups);
    for_terms([&](auto& term) { term.begin_head(*this); });
  }
  void begin_row(index row, index split_of_row) {
    b = row, split = split_of_row;
    const bool transforms = transforms_qk(x), wide = !use_amx || transforms;
    const Rows keys = wide ? read_factors(x, x.k, x.k_rotary, x.terms.key_factor, b, group, h, 0, x.keys, 1, k_scratch_) : Rows{};
    k.begin(transforms ? head_of(keys) : head_of(x.k, b, group), keys, x.keys, x.depth(), use_amx);
    k.pack(keeps_panels(x));
    const bool reads_values = !use_amx || term<Sticks>().present;
    const Rows values = reads_values ? read_rows(x.v, b, group, 0, x.keys, x.value_dim, 1, v_scratch_) : Rows{};
    v.begin(head_of(x.v, b, group), values, x.keys, x.value_dim, use_amx);
    if (gradient) {
      if (use_amx) k.pair();
      v.pack(keeps_panels(x));
      k.begin_gradient(x.dk, x.dk_split, split, b, h, x.dim);
      v.begin_gradient(x.dv, x.dv_split, split, b, h, x.value_dim);
    }
    for_terms([&](auto& term) { term.begin_row(*this); });
  }
  void begin_tile(index first, index rows) {
    tile.set(x, b, h, first, rows);
    const bool transforms = transforms_qk(x);
    if (!use_amx || gradient || transforms || term<LogGates>().present)
      q.rows = read_factors(x, x.q, x.q_rotary, x.terms.query_factor, b, h, h, first, rows, real(x.scale), q.scratch);
    if (use_amx)
      q.narrow(transforms ? HeadTokens(head_of(q.rows), 0, 0, 0, rows, x.depth())
                          : HeadTokens(x.q, b, h, first, rows, x.dim, exact_ ? real(x.scale) : 1));
    if (use_amx && gradient) q.transpose(rows, x.depth());
    if (gradient) d_out.read(x.gradient, b, h, first, rows, x.value_dim, use_amx, true);
    for_terms([&](auto& term) { term.begin_tile(*this); });
  }
  // Products of the selected tile, with what terms add to the whole of it.
  void multiply(real* s, index ld) {
    if (precomputed.data) return load_precomputed(s, ld);
    if (!term<BlockTransforms>().present) k.multiply(tile, q, s, ld);
    const Range keys = tile.panel_keys();
    const real by = remaining_scale();
    for (index i = 0; i < tile.rows && by != 1; ++i) scale_range(s + i * ld + keys.begin, by, keys.size());
    for_terms([&](auto& term) { term.add_tile(*this, s, ld); });
    begin_keys();
  }
  void begin_keys() {
    for_terms([&](auto& term) { term.begin_keys(*this); });
  }
  // What products are still to be multiplied by: by AMX, q times the scale would have been rounded.
  real remaining_scale() const { return use_amx && !exact_ ? real(x.scale) : real(1); }
  // The other terms of row i for its visible keys.
  void add_terms(real* s, index i, Range visible) {
    for_terms([&](auto& term) { term.add(*this, i, visible, s); });
    if (x.softcap) cap(s, real(x.softcap), splat(real(term<Column>().shift(i))), visible);
  }
  // Carry the sums of the rows on over the keys of the selected tile, whose logits may be computed in s.
  void carry_over(real* s, index ld) {
    if (!term<LogGates>().present) multiply(s, ld);
    for (index i = 0; i < tile.rows; ++i) {
      const Range visible = tile.visible_keys(i);
      for_terms([&](auto& term) { term.carry_over(*this, i, visible, s + i * ld); });
    }
  }
  // Whether the sums of all rows are at their limit, so that earlier keys do not change them.
  bool carried_out() {
    bool all = true;
    for_terms([&](auto& term) { all = all && term.carried_out(*this); });
    return all;
  }
  // What has to be added to the logits of row i, and to their LSE: see Column. Under a cap they are whole.
  double row_shift(index i) { return x.softcap ? 0 : term<Column>().shift(i); }
  // Derivative of the capped logits by those without a cap.
  vec cap_slope(vec capped) const {
    const vec tangent = capped * real(1 / x.softcap);
    return 1 - tangent * tangent;
  }
  // Products of a tile of queries with all keys, s [rows, ld]; terms of rows come later.
  void all_products(index first, index rows, real* s, index ld) {
    precomputed = {};
    begin_tile(first, rows);
    tile.for_key_tiles(x, false, [&] { multiply(s + tile.j0, ld); });
  }
  // Copy the selected tile from the precomputed logits, or its gradients in their place.
  void load_precomputed(real* s, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(precomputed.data + i * precomputed.ld + tile.j0 + from, n, s + i * ld + from);
  }
  void store_precomputed(const real* ds, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(ds + i * ld + from, n, precomputed.data + i * precomputed.ld + tile.j0 + from);
  }
  struct Precomputed {
    real* data = nullptr;
    index ld = 0;
  };
  Precomputed precomputed;  // products of a tile of queries and all keys, if computed (and mixed) before

 private:
  // s = c tanh((s + shift) / c)
  static void cap(real* s, real c, vec shift, Range visible) {
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      store(s + t, c * hyperbolic_tangent((load(s + t) + shift) * (1 / c)));
  }
  AllTerms terms_;
  bool exact_;  // the scale is a power of two, so that bfloat16 queries times it are exact
  Scratch k_scratch_, v_scratch_;
};
}  // namespace posenc
