// Logits of a tile of queries against a tile of keys, with all their summands.
#pragma once
#include "blocks.h"
#include "distance.h"
#include "sums.h"
namespace posenc::NUMBER {
constexpr index CACHED = index(1) << 24;  // numbers: products of all keys with all buckets, if fewer

// Queries of a tile: few where a row of products with all buckets is long.
inline index tile_of(const Problem& x, index usual) { return x.map.buckets > 1024 ? BLOCK : usual; }

// Some queries of one batch row, and the keys that each sees.
class QueryTile {
 public:
  void set(const Problem& x, index b, index first, index count) {
    const index at = b * x.rows_batch + first;
    i0 = first, rows = count, low_ = x.low + at, high_ = x.high + at, base = x.base + at;
    keys = {x.keys, 0};
    even = true;
    for (index i = 0; i < rows; ++i) {
      if (low_[i] < high_[i]) {
        keys.begin = std::min<index>(keys.begin, low_[i]);
        keys.end = std::max<index>(keys.end, high_[i]);
      }
      even &= base[i] == base[0] - i;
    }
  }
  // Choose the keys from j to j + KEY_TILE.
  void choose(const Problem& x, index j) {
    j0 = j, width = std::min(KEY_TILE, x.keys - j);
    panels = {std::max<index>(0, (keys.begin - j) / PANEL),
              (std::min(keys.end - j, width) + PANEL - 1) / PANEL};
    for (index p = panels.begin; p < panels.end; ++p) panel_rows[p] = {rows, 0};
    offsets = {INT32_MAX, INT32_MIN};
    std::fill_n(block_offsets, QUERY_TILE / BLOCK, offsets);
    for (index i = 0; i < rows; ++i) {
      const Range see = seen(i);
      if (!see.size()) continue;
      for (index p = see.begin / PANEL; p <= (see.end - 1) / PANEL; ++p)
        panel_rows[p] = {std::min(panel_rows[p].begin, i), i + 1};
      block_offsets[i / BLOCK].extend({j0 + see.begin + base[i], j0 + see.end + base[i]});
    }
    for (const Range& part : block_offsets) offsets.extend(part);
  }
  // Rows that see any of the VL keys from j on by an offset in [low, high); `even` tiles only.
  Range near_rows(const Map& map, index j) const {
    const Range see = panel_rows[j / PANEL];
    const index first = j0 + j + base[0];
    return {std::max(see.begin, first - map.high + 1), std::min(see.end, first + VL - map.low)};
  }
  // For row i the keys, whole vectors of them, that near_rows has the row for.
  Range near_keys(const Map& map, index i) const {
    if (!even) return {0, KEY_TILE};
    const index at = j0 + base[i];
    return {round_up(std::max<index>(0, map.low - at - VL + 1), VL), round_up(std::max<index>(0, map.high - at), VL)};
  }
  // Calls run() for every tile of keys that any row sees, chosen, from the first or the last on.
  template <class F>
  void each(const Problem& x, bool from_last, F run) {
    const index first = keys.begin / KEY_TILE, end = (keys.end + KEY_TILE - 1) / KEY_TILE;
    for (index t = first; t < end; ++t) {
      choose(x, (from_last ? first + end - 1 - t : t) * KEY_TILE);
      if (offsets.begin < offsets.end) run();
    }
  }
  // The keys that row i sees, from the tile's first.
  Range seen(index i) const {
    return {std::max<index>(0, low_[i] - j0), std::min<index>(width, high_[i] - j0)};
  }
  Range all_seen(index i) const { return {low_[i], high_[i]}; }
  bool sees(index i, index key) const { return key >= low_[i] && key < high_[i]; }
  index i0, rows, j0, width;
  Range keys, panels, offsets;
  Range panel_rows[KEY_TILE / PANEL];        // that see any key of the panel
  Range block_offsets[QUERY_TILE / BLOCK];  // of the visible pairs of a block of rows
  const int32_t* base;
  bool even;  // base falls by one from row to row

 private:
  const int32_t *low_, *high_;
};

// The right term of one head: products of keys with buckets, kept for all keys or for one tile.
// Offsets at the map's ends, where the bucket is constant, add one vector over the keys to a row.
class RightTerm {
 public:
  void begin(const Problem& x, index b, index h, bool gradient, bool half) {
    keys_ = read_rows(x.right.tokens, b, h, 0, x.keys, x.right.features, 1, keys_scratch_);
    if (half && halves(x.right.tokens))
      half_ = half_rows(x.right.tokens, b, h, 0, x.keys, x.right.features, 1, half_scratch_);
    const index count = (x.keys + KEY_TILE - 1) / KEY_TILE;
    cached = count == 1 || x.keys * x.map.buckets <= CACHED;
    products.resize(cached ? count : 1);
    sums.resize(gradient ? products.size() : 0);
    for (index t = 0; cached && t < count; ++t) restart(x, t);
    for (int end = 0; end < 2; ++end) {
      far[end] = far_[end].of(x.keys + PAD);
      for (index j = 0; j < x.keys; ++j) far[end][j] = dot(keys_.at(j), end_row(x, end), rows.width());
      if (!gradient) continue;
      far_sums[end] = far_sums_[end].of(x.keys + PAD);
      fill(far_sums[end], 0, x.keys + PAD);
    }
  }
  const real* end_row(const Problem& x, int end) const { return rows.row(end ? x.map.buckets - 1 : 0); }
  void restart(const Problem& x, index tile) {
    const index n = std::min(KEY_TILE, x.keys - tile * KEY_TILE);
    products[cached ? tile : 0].begin(rows, n);
    if (!sums.empty()) sums[cached ? tile : 0].begin(rows, n);
  }
  // s[i, j] += right[j, bucket] for the near pairs of a chosen tile.
  void add(const Problem& x, const QueryTile& t, real* s, index ld) {
    BucketTile& product = products[slot(t)];
    if (!cached) restart(x, t.j0 / KEY_TILE);
    const HalfRows half{half_.data ? half_.at(t.j0) : nullptr, half_.ld};
    for_blocks(x, t, [&](index p, Range n) {
      product.multiply(rows, {keys_.at(t.j0), keys_.ld, 1}, half, p, n);
    });
    if (!t.even) return each_pair(x, t, [&](index i, index j, index k) { s[i * ld + j] += product.row(j)[k]; });
    for_strips(x, t, [&](index j, Range see, real* strip, index width) {
      for (index l = 0; l < std::min<index>(VL, t.width - j); ++l)
        spread<false>(x.map, product.row(j + l), t.j0 + j + l + t.base[see.end - 1], strip + l * width,
                      see.size());
      for (index r = 0; r < see.size(); r += VL) {
        vec block[VL];
        for (int l = 0; l < VL; ++l) block[l] = load(strip + l * width + r);
        transpose(block);
        real* to = s + (see.end - 1 - r) * ld + j;
        const index n = std::min<index>(VL, see.size() - r);
        for (int l = 0; l < VL && l < n; ++l, to -= ld) store(to, load(to) + block[l]);
      }
    });
  }
  // s[t] += right[j0 + t, bucket] for the far pairs of row i in whole vectors of [a, b).
  void add_far(const Problem& x, const QueryTile& t, real* s, index i, index a, index b) const {
    for_far(x, t, i, a, b, [&](index u, int end) { store(s + u, load(s + u) + load(far[end] + t.j0 + u)); });
  }
  void collect_far(const Problem& x, const QueryTile& t, const real* ds, index i, index a, index b) {
    for_far(x, t, i, a, b, [&](index u, int end) {
      real* to = far_sums[end] + t.j0 + u;
      store(to, load(to) + load(ds + u));
    });
  }
  // The gradient of add: sums of ds by key and bucket.
  void collect(const Problem& x, const QueryTile& t, const real* ds, index ld) {
    BucketTile& into = sums[slot(t)];
    for_blocks(x, t, [&](index p, Range n) { into.clear(p, n); });
    if (!t.even) return each_pair(x, t, [&](index i, index j, index k) { into.row(j)[k] += ds[i * ld + j]; });
    for_strips(x, t, [&](index j, Range see, real* strip, index width) {
      for (index r = 0; r < see.size(); r += VL) {
        vec block[VL];
        const real* from = ds + (see.end - 1 - r) * ld + j;
        const index n = std::min<index>(VL, see.size() - r);
        for (int l = 0; l < VL; ++l, from -= ld) block[l] = l < n ? load(from) : vec{};
        transpose(block);
        for (int l = 0; l < VL; ++l) store(strip + l * width + r, block[l]);
      }
      for (index l = 0; l < std::min<index>(VL, t.width - j); ++l)
        NUMBER::collect(x.map, strip + l * width, t.j0 + j + l + t.base[see.end - 1], into.row(j + l),
                        see.size());
    });
  }
  index slot(const QueryTile& t) const { return cached ? t.j0 / KEY_TILE : 0; }
  Rows keys() const { return keys_; }
  BucketRows rows;
  std::vector<BucketTile> products, sums;
  bool cached = false;
  real *far[2], *far_sums[2];  // of the first bucket and of the last, by key

 private:
  // Calls f(block of keys, its buckets) where a near pair is.
  template <class F>
  void for_blocks(const Problem& x, const QueryTile& t, F f) {
    for (index p = t.panels.begin; p < t.panels.end; ++p) {
      Range n = t.offsets;
      if (t.even) {
        const Range see = t.panel_rows[p];
        if (!see.size()) continue;
        const index first = t.j0 + p * PANEL + t.base[see.end - 1];
        n.begin = std::max({n.begin, first, x.map.low - VL});
        n.end = std::min({n.end, first + see.size() + PANEL - 1, x.map.high + VL});
      }
      if (n.begin < n.end) f(p, buckets_of(x.map, n));
    }
  }
  // Calls f(first of VL keys, rows near them, room for VL keys times `width` rows, width).
  template <class F>
  void for_strips(const Problem& x, const QueryTile& t, F f) {
    const index width = round_up(t.rows, VL);
    real* strip = strip_.of(VL * width);
    for (index j = t.panels.begin * PANEL; j < std::min(t.width, t.panels.end * PANEL); j += VL) {
      const Range see = t.near_rows(x.map, j);
      if (see.size()) f(j, see, strip, width);
    }
  }
  template <class F>
  static void for_far(const Problem& x, const QueryTile& t, index i, index a, index b, F f) {
    const Range near = t.near_keys(x.map, i);
    for (index u = a; u < std::min(b, near.begin); u += VL) f(u, 0);
    for (index u = std::max(a, near.end); u < b; u += VL) f(u, 1);
  }
  template <class F>
  void each_pair(const Problem& x, const QueryTile& t, F f) {
    for (index i = 0; i < t.rows; ++i) {
      const Range see = t.seen(i);
      for (index j = see.begin; j < see.end; ++j)
        f(i, j, index(x.map.bucket[t.j0 + j + t.base[i] - x.map.first]));
    }
  }
  Scratch keys_scratch_, half_scratch_, strip_, far_[2], far_sums_[2];
  Rows keys_;
  HalfRows half_;
};

// What forward and backward share: the operands of one head, and the logits of a tile.
class Logits {
 public:
  explicit Logits(const Problem& x)
      : half(x.pairs.kind == NONE && halves(x.q) && halves(x.k) && halves(x.v)) {
    int exponent;
    exact_ = std::frexp(x.scale, &exponent) == 0.5;
  }
  void begin_head(const Problem& x, index h) {
    set(left_rows, x.left, x, h);
    set(right.rows, x.right, x, h);
    if (x.value_rows)
      value_rows.set(x.value_rows + h * x.value_head, x.map.buckets, x.value_dim, false);
    if (x.line) line_.set(x, x.line_head ? h : 0);
    if (x.pairs.kind == DISTANCE) distance.begin_head(x.pairs, h);
    if (x.pairs.kind == COUNTS) counts.begin(x.map);
  }
  void begin_row(const Problem& x, index b, index h, bool gradient) {
    group = h / (x.heads / x.groups);
    widened_ = !half || gradient;
    if (widened_) k = read_rows(x.k, b, group, 0, x.keys, x.dim, 1, k_scratch_);
    if (half) {
      k_strips_ = half_columns(x.k, b, group, x.keys, x.dim, strips_);
    } else {
      v = read_rows(x.v, b, group, 0, x.keys, x.value_dim, 1, v_scratch_);
      real* panels = panels_.of(round_up(x.keys, PANEL) * x.dim);
      pack_transposed(k.data, k.ld, x.keys, x.dim, panels);
      k_panels = panels;
    }
    if (x.right.rows) right.begin(x, b, h, gradient, half);
    if (x.pairs.kind == BLOCKS) blocks.begin_row(x, b, h);
    keeps_ = gradient;
    if (x.column) {
      real* to = column_.of(x.keys + 2 * PAD) + PAD;
      std::copy_n(x.column + b * x.column_batch + h * x.column_head, x.keys, to);
      fill(to + x.keys, 0, PAD);
      fill(to - PAD, 0, PAD);
      column = to;
    }
  }
  void begin_tile(const Problem& x, index b, index h, index first, index rows) {
    tile.set(x, b, first, rows);
    row_ = (b * x.heads + h) * x.queries + first;
    if (widened_) q = read_rows(x.q, b, h, first, rows, x.dim, real(x.scale), q_scratch_);
    if (half) q_half_ = half_rows(x.q, b, h, first, rows, x.dim, exact_ ? real(x.scale) : 1, half_scratch_);
    if (x.pairs.kind == DISTANCE) distance.begin_tile(x, b, h, first, rows);
    if (x.pairs.kind == BLOCKS)
      blocks.begin_tile(x, b, h, first, rows, tile.base, q.data, q.ld, keeps_);
    if (x.left.rows) {
      left_tokens = read_rows(x.left.tokens, b, h, first, rows, x.left.features, 1, left_scratch_);
      left.begin(left_rows, rows);
      if (half && halves(x.left.tokens))
        left_half_ = half_rows(x.left.tokens, b, h, first, rows, x.left.features, 1, left_half_scratch_);
    }
  }
  // Calls f(block of queries, buckets of its visible pairs) for the chosen tile.
  template <class F>
  void for_blocks(const Problem& x, F f) const {
    for (index n = 0; n < (tile.rows + BLOCK - 1) / BLOCK; ++n)
      if (tile.block_offsets[n].size()) f(n, buckets_of(x.map, tile.block_offsets[n]));
  }
  // Products and right term of the chosen tile.
  void multiply(const Problem& x, real* s, index ld) {
    if (given.data) return take(s, ld);
    if (x.pairs.kind == BLOCKS) return blocks.products(tile.j0, tile.panels, k_panels, s, ld);
    for (index p = tile.panels.begin; p < tile.panels.end; ++p) {
      const Range m = tile.panel_rows[p];
      if (m.size() && half)
        tile_columns(m, p, q_half_, k_strips_, s, ld);
      else if (m.size())
        gemm(m.size(), PANEL, x.dim, {q.at(m.begin), q.ld, 1}, k_panels + (tile.j0 + p * PANEL) * x.dim,
             PANEL, s + m.begin * ld + p * PANEL, ld, false);
    }
    if (half && !exact_)
      for (index i = 0; i < tile.rows; ++i)
        scale_range(s + i * ld + tile.panels.begin * PANEL, real(x.scale),
                    (tile.panels.end - tile.panels.begin) * PANEL);
    if (x.right.rows && tile.offsets.begin < tile.offsets.end) right.add(x, tile, s, ld);
    if (x.left.rows)
      for_blocks(x, [&](index block, Range n) {
        left.multiply(left_rows, {left_tokens.data, left_tokens.ld, 1}, left_half_, block, n);
      });
  }
  // The products of the rows m with the keys of panel p, in bfloat16.
  void tile_columns(Range m, index p, HalfRows x, Strips keys, real* to, index ld) const {
    const index first = m.begin / TILE * TILE, rows = round_up(m.end, TILE) - first;
    half_gemm(rows, PANEL, x.ld, x.at(first), x.ld, {keys.data + (tile.j0 / TILE + p * (PANEL / TILE)) * keys.ld, keys.ld},
              to + first * ld + p * PANEL, ld, false);
  }
  // Carry the sums of the chosen tile's rows on over its keys.
  void carry_over(const Problem& x, const real* s, index ld) {
    for (index i = 0; i < tile.rows; ++i) {
      const Range see = tile.seen(i);
      real& sum = carry.sums[i];
      if (x.pairs.kind == COUNTS)
        sum = counts.total(s + i * ld, see, sum);
      else
        sum = Sticks::total(s + i * ld, Sticks::before(see, tile.j0, tile.base[i]), sum);
    }
  }
  // Weights of row i by stick breaking; the keys, in whole vectors, outside of which they are zero.
  Range stick_row(real* s, index i) {
    const Range see = Sticks::before(tile.seen(i), tile.j0, tile.base[i]);
    const Range all{tile.panels.begin * PANEL, tile.panels.end * PANEL};
    if (!see.size()) {
      fill(s + all.begin, 0, all.size());
      return {all.begin, all.begin};
    }
    carry.sums[i] = sticks.weigh(s, see, carry.sums[i]);
    const Range whole{see.begin / VL * VL, round_up(see.end, VL)};
    fill(s + all.begin, 0, whole.begin - all.begin);
    fill(s + whole.end, 0, all.end - whole.end);
    return whole;
  }
  index own(index i) const { return -index(tile.base[i]); }
  // What row i's own key has of the stick, when the sums are those of all keys before it.
  real rest(const Problem& x, index i) const {
    if (!x.pairs.sizes[0] || !tile.sees(i, own(i)) || Sticks::none(carry.sums[i])) return 0;
    return std::exp(carry.sums[i]);
  }
  // Whether the sums of all rows are so far that no key before makes a difference to them.
  bool carried_out(const Problem& x) const {
    for (index i = 0; i < tile.rows; ++i)
      if (x.pairs.kind == COUNTS ? !counts.full(carry.sums[i]) : !Sticks::none(carry.sums[i])) return false;
    return true;
  }
  // The other summands of row i, for the keys [a, b) of the tile. Whole vectors from a on.
  void add_terms(const Problem& x, real* s, index i, Range see) {
    const index j = tile.j0 + see.begin, n = see.size();
    if (x.across) Axes::add(x, s, row_ + i, tile.j0, see);
    if (x.line) line_.add(x, s, tile.j0, see.begin, see.end, tile.base[i]);
    if (x.pairs.kind == COUNTS)
      carry.sums[i] = counts.add(left.row(i), s, see, carry.sums[i]);
    else if (x.left.rows)
      spread<true>(x.map, left.row(i), j + tile.base[i], s + see.begin, n);
    if (x.right.rows) right.add_far(x, tile, s, i, see.begin / VL * VL, see.end);
    if (x.pairs.kind == DISTANCE) distance.add(s + see.begin, i, j + tile.base[i], n);
    if (column)
      for (index t = 0; t < n; t += VL)
        store(s + see.begin + t, load(s + see.begin + t) + load(column + j + t));
  }
  // Products of a tile of queries with all keys, s [rows, ld].
  void all_products(const Problem& x, index b, index h, index first, index rows, real* s, index ld) {
    given = {};
    begin_tile(x, b, h, first, rows);
    tile.each(x, false, [&] { multiply(x, s + tile.j0, ld); });
  }
  // Between the chosen tile and what is given for it.
  void take(real* s, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(given.data + i * given.ld + tile.j0 + from, n, s + i * ld + from);
  }
  void give_back(const real* ds, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(ds + i * ld + from, n, given.data + i * given.ld + tile.j0 + from);
  }
  struct Given {
    real* data = nullptr;
    index ld = 0;
  };
  Given given;  // logits of a tile of queries and all keys that are there already
  const bool half;  // products of bfloat16; q and k are widened for gradients alone
  QueryTile tile;
  index group = 0;
  Rows q, k, v, left_tokens;
  const real *k_panels = nullptr, *column = nullptr;
  BucketRows left_rows, value_rows;
  BucketTile left;
  RightTerm right;
  Distance distance;
  Blocks blocks;
  Carry carry;
  Counts counts;
  Sticks sticks;

 private:
  void set(BucketRows& rows, const Term& term, const Problem& x, index h) const {
    if (term.rows)
      rows.set(term.rows + h * term.rows_head, x.map.buckets, term.features, half && halves(term.tokens));
  }
  bool keeps_ = false;
  Line line_;
  index row_ = 0;  // of the tile's first query in [B, H, Q]
  bool exact_, widened_ = true;  // the scale is a power of two
  Strips k_strips_;
  HalfRows q_half_, left_half_;
  Scratch half_scratch_, left_half_scratch_, strips_;
  Scratch q_scratch_, k_scratch_, v_scratch_, left_scratch_, panels_, column_;
};

// s with -inf for lanes outside [a, b), at t.
inline vec masked(vec s, index t, Range see) {
  if (t >= see.begin && t + VL <= see.end) return s;
  const ivec at = iota() + isplat(lane(t));
  const vec nothing = splat(-INFINITY);
  return (at >= isplat(lane(see.begin))) & (at < isplat(lane(see.end))) ? s : nothing;
}
}  // namespace posenc
