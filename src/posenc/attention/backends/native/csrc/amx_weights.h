// Weights and outputs by AMX, a few rows at a time: their logits are in a near cache when they become
// weights, in bfloat16.
#pragma once
#include "row_weights.h"
namespace posenc::NUMBER {
class AmxWeights {
 public:
  explicit AmxWeights(RowWeights& rows) : x_(rows.x), rows_(rows), registers_(rows.use_amx) {
    const Problem& x = x_;
    some_rows_ = rows.use_amx && !AllTerms::adds_to_tiles(x) && x.pairs.kind != MIXING;
    const bool few_near = x.map.high - x.map.low <= 2 * NEAR_KEYS;
    some_plain_ = some_rows_ && !AllTerms::has_others<BiasByOffset, QueryBucketTerm, ValueBucketTerm>(x) &&
                  x.pairs.kind == NONE && !x.period && !x.softcap && !(x.dropout > 0) && few_near;
    product_scale_ = some_rows_ ? rows_.remaining_scale() : 1, rate_ = product_scale_ * PER_LN_2;
    ld_ = (some_plain_ ? NEAR_KEYS : round_up(std::min(x.keys, KEY_TILE), PANEL)) + 16;
  }
  // Whether logits are computed here; else they are complete products, of the whole tile.
  bool multiplies() const { return some_rows_; }
  // The selected tile of keys, s [rows, ld] being its logits if they are computed.
  void add_tile(real* s, index ld) {
    const QueryTile& tile = rows_.tile;
    const Range all = tile.panel_keys();
    const index step = some_plain_ ? NEAR_KEYS : KEY_TILE;
    if (some_rows_) s = s_.of(NEAR_ROWS * ld_), ld = ld_;
    if (some_plain_) weights_ = scratch_of<uint16_t>(weights_scratch_, NEAR_ROWS * WEIGHTS_LD);
    for (index i = 0; i < tile.rows; i += NEAR_ROWS)
      for (index j = all.begin; j < all.end; j += step) {
        const Range rows{i, std::min(i + NEAR_ROWS, tile.rows)}, keys{j, std::min(j + step, all.end)};
        real* at = some_plain_ ? s - j : some_rows_ ? s : s + i * ld;
        add_part(rows, keys, at, ld);
      }
  }

 private:
  // Some keys of some rows; row i's logits are s [keys] and those of the rows after it ld apart.
  void add_part(Range rows, Range keys, real* s, index ld) {
    const QueryTile& tile = rows_.tile;
    if (some_rows_) rows_.k.multiply_rows(tile, rows, keys, rows_.q, s, ld);
    // In the place of the logits, or apart so that a row can be weighed again.
    const index to_ld = some_plain_ ? WEIGHTS_LD : 2 * ld;
    uint16_t* to = some_plain_ ? weights_ - keys.begin : reinterpret_cast<uint16_t*>(s);
    if (some_plain_ && x_.terms.bias_by_offset)
      weigh_rows<true>(rows, keys, s, ld, to, to_ld);
    else
      weigh_rows<false>(rows, keys, s, ld, to, to_ld);
    tile.for_equal_panels(rows, keys, [&](Range panels, Range m) {
      const index p = panels.begin * PANEL;
      amx_gemm(m.size(), rows_.width, panels.size() * PANEL, {to + (m.begin - rows.begin) * to_ld + p, to_ld},
               rows_.v.pairs(tile.j0 + p), rows_.output(m.begin), rows_.width, true);
    });
  }
  // Logits of rows become weights, in bfloat16. TABLE: biases by offset are added where rows are plain.
  template <bool TABLE>
  void weigh_rows(Range rows, Range keys, real* s, index ld, uint16_t* to, index to_ld) {
    bool rising = false;
    for (index i = rows.begin; i < rows.end; i += ROWS_TOGETHER, s += ROWS_TOGETHER * ld, to += ROWS_TOGETHER * to_ld) {
      const index n = std::min(ROWS_TOGETHER, rows.end - i);
      index bucket[ROWS_TOGETHER];
      for (index r = 0; r < n; ++r) {
        bucket[r] = some_plain_ ? plain_bucket(i + r, keys) : -1;
        if (bucket[r] < 0) complete_row(i + r, s + r * ld, keys);
      }
      for (index r = 0; r < n; ++r)
        if (bucket[r] < 0)
          weigh_row(i + r, s + r * ld, to + r * to_ld, keys);
        else
          weigh_plain<TABLE>(i + r, bucket[r], s + r * ld, to + r * to_ld, keys, rising);
    }
  }
  // The bucket of all the keys to row i, 0 where there are no buckets; -1 where they have several, or some
  // keys are hidden.
  index plain_bucket(index i, Range keys) const {
    const QueryTile& tile = rows_.tile;
    const Range visible = tile.visible_keys(i);
    if (visible.begin > keys.begin || visible.end < keys.end) return -1;
    if (!x_.map.buckets) return 0;
    const index offset = tile.j0 + tile.base[i];
    const Range buckets = buckets_of(x_, {offset + keys.begin, offset + keys.end});
    return buckets.size() == 1 ? buckets.begin : -1;
  }
  // In one pass, relative to the greatest logit of the keys before, or of the first few keys; but where weights
  // are too large for that, or, as with ALiBi, those of the row before have been, to the greatest of all.
  template <bool TABLE>
  __attribute__((always_inline)) void weigh_plain(index i, index bucket, const real* s, uint16_t* to, Range keys,
                                                  bool& rising) {
    const real* table = TABLE ? rows_.term<BiasByOffset>().row(rows_, i) : nullptr;
    const real bias = x_.terms.left_rows ? rows_.term<QueryBucketTerm>().products(i)[bucket] * PER_LN_2 : 0;
    vec total = splat(NAN);
    const Range some{keys.begin, keys.begin + AMX_DEPTH};
    if (rows_.levels[i] == -INFINITY && !rising)
      rows_.raise_level(i, greatest<TABLE>(rate_, s, some, table) + bias);
    if (rows_.levels[i] > -INFINITY && !rising)
      total = weigh<TABLE>(rate_, rows_.levels[i] - bias, s, to, keys, table);
    if (!all_below(total, 1 << MAX_RISE)) {
      const real before = rows_.levels[i];
      rows_.raise_level(i, greatest<TABLE>(rate_, s, keys, table) + bias);
      rising = rows_.levels[i] > before + MAX_RISE;
      total = weigh<TABLE>(rate_, rows_.finite_level(i) - bias, s, to, keys, table);
    }
    rows_.add(i, total);
    if (x_.terms.value_rows) rows_.values().weights(i)[bucket] += sum(total);
  }
  // Any other row: its terms are added, logits of hidden keys are -inf.
  void complete_row(index i, real* s, Range part) {
    const Range visible = visible_of(i, part), keys = whole_tiles(visible);
    if (!visible.size()) return;
    if (product_scale_ != 1) scale_range(s + keys.begin, product_scale_, keys.size());
    if (rows_.term<Sticks>().present) return;
    rows_.add_terms(s, i, visible);
    for (index edge : {keys.begin, keys.end - AMX_DEPTH})
      for (index t = edge; t < edge + AMX_DEPTH; t += VL) store(s + t, masked(load(s + t), t, visible));
    rows_.raise_level(i, greatest<false>(PER_LN_2, s, keys, nullptr));
  }
  void weigh_row(index i, real* s, uint16_t* to, Range part) {
    const Range visible = visible_of(i, part), keys = whole_tiles(visible);
    if (!visible.size()) return clear(to, part);
    if (rows_.term<Sticks>().present) {
      rows_.stick_row(i, s);
      return store_bf16_row(s + part.begin, part.size(), to + part.begin);
    }
    const real level = rows_.finite_level(i);
    if (!x_.terms.value_rows && !(x_.dropout > 0)) {
      rows_.add(i, weigh<false>(PER_LN_2, level, s, to, keys, nullptr));
    } else {
      vec total{};
      for (index t = keys.begin; t < keys.end; t += VL) {
        const vec p = power_of_two(load(s + t) * PER_LN_2 - level);
        total += p, store(s + t, p);
      }
      rows_.add(i, total);
      rows_.drop(i, s, keys);  // after the sum: weights are normalized before dropout
      rows_.collect(i, s, visible);
      store_bf16_row(s + keys.begin, keys.size(), to + keys.begin);
    }
    clear(to, {part.begin, keys.begin});
    clear(to, {keys.end, part.end});
  }
  Range visible_of(index i, Range part) const {
    const Range visible = rows_.tile.visible_keys(i);
    return {std::max(visible.begin, part.begin), std::min(visible.end, part.end)};
  }
  static Range whole_tiles(Range keys) { return {keys.begin / AMX_DEPTH * AMX_DEPTH, round_up(keys.end, AMX_DEPTH)}; }
  // Weights of logits, products times `rate` and biases, relative to a level, in powers of two: in bfloat16,
  // and their sums by lane.
  template <bool TABLE>
  __attribute__((always_inline)) static vec weigh(real rate, real level, const real* s, uint16_t* to, Range keys,
                                                  const real* table) {
    const vec from = splat(level), by = splat(rate);
    vec sums[2] = {};
    for (index t = keys.begin; t < keys.end; t += AMX_DEPTH) {
      const vec p = power_of_two(exponents<TABLE>(by, from, s, table, t));
      const vec q = power_of_two(exponents<TABLE>(by, from, s, table, t + VL));
      sums[0] += p, sums[1] += q;
      store_bf16_two(p, q, to + t);
    }
    return sums[0] + sums[1];
  }
  template <bool TABLE>
  __attribute__((always_inline)) static real greatest(real rate, const real* s, Range keys, const real* table) {
    const vec by = splat(rate);
    vec m = splat(-INFINITY), n = m;
    for (index t = keys.begin; t < keys.end; t += AMX_DEPTH) {
      m = larger(exponents<TABLE>(by, vec{}, s, table, t), m);
      n = larger(exponents<TABLE>(by, vec{}, s, table, t + VL), n);
    }
    return largest(larger(m, n));
  }
  template <bool TABLE>
  __attribute__((always_inline)) static vec exponents(vec rate, vec level, const real* s, const real* table,
                                                      index t) {
    return load(s + t) * rate - (TABLE ? level - load(table + t) * PER_LN_2 : level);
  }
  static void clear(uint16_t* to, Range keys) { std::memset(to + keys.begin, 0, keys.size() * sizeof(uint16_t)); }

  static constexpr index NEAR_ROWS = 64, NEAR_KEYS = 256;     // that fit a near cache, with their weights
  static constexpr index ROWS_TOGETHER = 4;                   // whose greatest logits are found at once
  static constexpr index WEIGHTS_LD = NEAR_KEYS + AMX_DEPTH;  // not a power of two
  static constexpr int MAX_RISE = 12;  // of exponents of two, until the level is raised
  const Problem& x_;
  RowWeights& rows_;
  AmxTiles registers_;
  bool some_rows_ = false;   // products are computed for NEAR_ROWS at a time
  bool some_plain_ = false;  // rows may be plain (see weigh_plain), so that they go by parts of NEAR_KEYS
  real product_scale_, rate_;  // of products to be logits; to be exponents of two
  index ld_;
  uint16_t* weights_ = nullptr;
  Scratch s_, weights_scratch_;
};
}  // namespace posenc
