// Logits of a tile of queries against a tile of keys, with all their terms.
#pragma once
#include "bias.h"
#include "block_transforms.h"
#include "distance.h"
#include "key_bucket_term.h"
#include "log_gates.h"
#include "query_bucket_term.h"
namespace posenc::NUMBER {
// The terms in the order in which they are added to logits: this is the place of a new one.
using AllTerms = TermList<BiasByOffset, QueryBucketTerm, KeyBucketTerm, LogGates, Distance, Column, BlockTransforms,
                          Sticks, ValueBucketTerm>;

// Common to forward and backward: the operands of one head, and the logits s [queries, ld] of a tile; in the
// backward pass also the gradients by key. Products and what terms add to the whole tile are computed at once
// (multiply), the rest row by row while the row is in the first-level cache (add_terms).
class Logits : public Context {
 public:
  Logits(const Problem& problem, bool backward) : Context(problem, backward), terms_(problem) {
    int exponent;
    exact_ = transforms_qk(x) || std::frexp(x.scale, &exponent) == 0.5;
  }
  template <class T>
  T& term() {
    return terms_.template get<T>();
  }
  template <class F>
  void for_terms(F f) {
    terms_.for_present(f);
  }
  void begin_head(index head, index part_of_head) {
    h = head, part = part_of_head, group = h / (x.heads / x.groups);
    for_terms([&](auto& term) { term.begin_head(*this); });
  }
  void begin_row(index row, index split_of_row) {
    b = row, split = split_of_row;
    const bool transforms = transforms_qk(x), wide = !use_amx || transforms;
    Rows keys, values;
    if (wide) keys = read_factors(x, x.k, x.k_rotary, x.terms.key_factor, b, group, h, 0, x.keys, 1, k_scratch_);
    k.begin(transforms ? head_of(keys) : head_of(x.k, b, group), keys, x.keys, x.depth(), use_amx);
    k.pack(keeps_panels(x));
    if (!use_amx || term<Sticks>().present)
      values = read_rows(x.v, b, group, 0, x.keys, x.value_dim, 1, v_scratch_);
    v.begin(head_of(x.v, b, group), values, x.keys, x.value_dim, use_amx);
    if (use_amx) (gradient ? k : v).pair();
    if (gradient) {
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
  // After all tiles of a row, and after all rows of a head.
  void end_row() {
    if (!gradient) return;
    for_terms([&](auto& term) { term.end_row(*this); });
    k.end_gradient();
    v.end_gradient();
    const index width = round_up(x.depth(), VL);
    for (index j = 0; j < x.keys && x.rotated; ++j)
      rotate_factor(x, x.k_rotary, b, group, j, k.gradient.data + j * width, -1);
    k.gradient.write();
    v.gradient.write();
    const Operand& factor = x.terms.key_factor;
    if (factor)
      k.gradient.write(head_of(split_of(factor.gradient, factor.part_stride, split), b, h), x.dim, factor.features);
  }
  void end_head() {
    if (gradient) for_terms([&](auto& term) { term.end_head(*this); });
  }
  // Products of the selected tile, with what terms add to the whole of it.
  void multiply(real* s, index ld) {
    if (precomputed) return copy_tile(precomputed + tile.j0, precomputed_ld, s, ld);
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
    precomputed = nullptr;
    begin_tile(first, rows);
    tile.for_key_tiles(x, false, [&] { multiply(s + tile.j0, ld); });
  }
  // Copy the selected tile, of rows that are from_ld and to_ld apart.
  void copy_tile(const real* from, index from_ld, real* to, index to_ld) const {
    const Range keys = tile.panel_keys();
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(from + i * from_ld + keys.begin, keys.size(), to + i * to_ld + keys.begin);
  }
  // Logits of a tile of queries and all keys, if computed (and mixed) before; then their gradients.
  real* precomputed = nullptr;
  index precomputed_ld = 0;

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
