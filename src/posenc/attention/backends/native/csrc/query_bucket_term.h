// Query-side terms by bucket, `left_rows` and `value_rows` in Terms, of which a tile of queries has numbers
// [queries, buckets]: products of queries with rows, and sums of weights.
#pragma once
#include "running_sums.h"
namespace posenc::NUMBER {
// Decomposed relative positions of images: the products of a query with the row of the offset along
// image columns (down) and with that of the offset along image rows (across), added for each key.
// Buckets are first those of offsets down, ascending, then those across.
class Axes {
 public:
  static bool serves(const Problem& x) { return x.period && x.terms.left_rows && !x.map.bucket; }
  void set(const Problem& x) {
    columns_ = x.jump + 1, rows_ = x.queries / columns_, key_columns_ = x.period;
    across_ = x.map.buckets - x.period - x.jump;
  }
  // The buckets that some queries and keys meet, down and across.
  Range row_buckets(Range queries, Range keys) const {
    const index first = keys.begin / key_columns_, last = (keys.end - 1) / key_columns_;
    return {first + down_of(queries.end - 1), last + down_of(queries.begin) + 1};
  }
  Range column_buckets(Range queries) const {
    const index first = queries.begin % columns_, last = first + queries.size() - 1;
    if (last >= columns_)  // queries of several image rows may have any offset across
      return {across_, across_ + key_columns_ + columns_ - 1};
    return {across_of(last), across_of(first) + key_columns_};
  }
  // s[t] += the terms of key j0 + t, from the products of a query with all buckets.
  void add(real* s, const real* products, index query, index j0, Range visible) const {
    const real *down = products + down_of(query), *across = products + across_of(query % columns_);
    for_parts(j0, visible, [&](index t, index n, index y, index c) {
      const vec number = splat(down[y]);
      real* to = s + t;
      index u = 0;
      for (; u + VL <= n; u += VL) store(to + u, load(to + u) + load(across + c + u) + number);
      if (u < n) store_n(to + u, load_n(to + u, n - u) + load_n(across + c + u, n - u) + number, n - u);
    });
  }
  void collect(const real* ds, real* products, index query, index j0, Range visible) const {
    real *down = products + down_of(query), *across = products + across_of(query % columns_);
    for_parts(j0, visible, [&](index t, index n, index y, index c) {
      down[y] += sum_range(ds + t, n);
      add_range(across + c, ds + t, n);
    });
  }

 private:
  // The bucket of a query and the first image row of keys, or their first image column; those of
  // other rows and columns follow.
  index down_of(index query) const { return rows_ - 1 - query / columns_; }
  index across_of(index column) const { return across_ + columns_ - 1 - column; }
  // Calls part(t, n, image row, first column) for the keys j0 + t of each image row.
  template <class F>
  void for_parts(index j0, Range visible, F part) const {
    for (index t = visible.begin; t < visible.end;) {
      const index j = j0 + t, y = j / key_columns_, n = std::min(visible.end - t, (y + 1) * key_columns_ - j);
      part(t, n, y, j - y * key_columns_);
      t += n;
    }
  }
  index columns_ = 0, rows_ = 0, key_columns_ = 0;  // the image of queries; that of keys
  index across_ = 0;                                // first bucket of offsets across
};

// s[i, j] += left_i · row[bucket(offset)], as Shaw's keys and DeBERTa's content to position (c2p); between
// images, one row for each axis; of CoPE, rows are those of whole counts (Counts).
class QueryBucketTerm : public Term {
 public:
  static bool serves(const Problem& x) { return bool(x.terms.left_rows); }
  void begin_head(const Context& at) {
    const Operand& rows = at.x.terms.left_rows;
    rows_.set(rows, at.h, at.use_amx, at.gradient);
    by_axis_ = at.x.period && !at.x.map.bucket, by_count_ = at.x.pairs.kind == COUNTS;
    if (by_axis_) axes_.set(at.x);
    if (by_count_) counts_.begin(at.x.map);
    if (at.gradient) d_rows_.begin(rows, at.part, at.h, at.use_amx);
  }
  void begin_tile(const Context& at) {
    const Operand& left = at.x.terms.left;
    tokens_.read(left.value, at.b, at.h, at.tile.i0, at.tile.rows, left.features, at.use_amx, at.gradient);
    products_.begin(rows_, at.tile.rows, at.bucket_windows);
    if (!at.gradient) return;
    ds_by_bucket_.begin(rows_, at.tile.rows, at.bucket_windows);
    fill(d_tokens_.of(round_up(at.tile.rows, AMX_TILE) * rows_.width()), 0, at.tile.rows * rows_.width());
  }
  // Computes the products, and makes room for ds by bucket: a window that has to move on first gives its
  // sums to the gradients.
  void begin_keys(const Context& at) {
    for_blocks(at, [&](index block, Range n) {
      products_.multiply(rows_, tokens_, block, n);
      if (!at.gradient) return;
      if (!ds_by_bucket_.holds(block, n)) {
        ds_by_bucket_.pull_back(rows_, tokens_, d_tokens_.of(0), &d_rows_, block);
        ds_by_bucket_.restart(block, n);
      }
      ds_by_bucket_.clear(block, n);
    });
  }
  // Products of row i of the tile by bucket.
  const real* products(index i) const { return products_.row(i); }
  void add(Context& at, index i, Range visible, real* s) {
    if (by_count_)
      at.carry.sums[i] = counts_.add(products(i), s, visible, at.carry.sums[i]);
    else if (by_axis_)
      axes_.add(s, products(i), at.tile.i0 + i, at.tile.j0, visible);
    else
      spread(at.x, at.tile, i, visible, products(i), s);
  }
  void carry_over(Context& at, index i, Range visible, const real* s) const {
    if (by_count_) at.carry.sums[i] = counts_.tile_sum(s, visible, at.carry.sums[i]);
  }
  bool carried_out(const Context& at) const {
    const std::vector<double>& sums = at.carry.sums;
    return !by_count_ || std::all_of(sums.begin(), sums.end(), [&](double sum) { return counts_.full(sum); });
  }
  void collect(Context& at, index i, Range visible, const real*, real* ds) {
    real* to = ds_by_bucket_.row(i);
    if (by_count_)
      counts_.collect(products(i), ds, visible, to, at.carry.d_sums[i]);
    else if (by_axis_)
      axes_.collect(ds, to, at.tile.i0 + i, at.tile.j0, visible);
    else
      NUMBER::collect(at.x, at.tile, i, visible, ds, to);
  }
  void end_tile(Context& at) {
    const index width = rows_.width(), n = at.tile.rows;
    ds_by_bucket_.pull_back(rows_, tokens_, d_tokens_.of(0), &d_rows_);
    const Tokens& to = at.x.terms.left.gradient;
    const real* d_tokens = d_tokens_.of(0);
    if (!to.data) return add_range(at.dq, d_tokens, n * width);
    for (index i = 0; i < n; ++i)
      write_row(to, row_of(to, at.b, at.h, at.tile.i0 + i), d_tokens + i * width, 1, rows_.features());
  }
  void end_head(const Context&) { d_rows_.write(); }

 private:
  // Calls f(block of queries, buckets of its visible pairs) for the selected tile.
  template <class F>
  void for_blocks(const Context& at, F f) const {
    const QueryTile& tile = at.tile;
    tile.for_blocks([&](index block, Range offsets) {
      if (!by_axis_) return f(block, buckets_of(at.x, offsets));
      const Range queries{tile.i0 + block * BLOCK, tile.i0 + std::min((block + 1) * BLOCK, tile.rows)};
      f(block, axes_.row_buckets(queries, {tile.j0, tile.j0 + tile.width}));
      f(block, axes_.column_buckets(queries));
    });
  }
  BucketRows rows_;
  TileFactor tokens_;
  BucketTile products_, ds_by_bucket_;  // [queries, buckets] of the tile
  RowSums d_rows_;
  Scratch d_tokens_;
  Axes axes_;
  Counts counts_;
  bool by_axis_ = false, by_count_ = false;
};

// o_i += Σ_j p_ij row[bucket(offset)], a term of the values: weights are summed by bucket.
class ValueBucketTerm : public Term {
 public:
  static bool serves(const Problem& x) { return bool(x.terms.value_rows); }
  void begin_head(const Context& at) {
    rows_.set(at.x.terms.value_rows, at.h, at.use_amx, true);
    if (at.gradient) d_rows_.begin(at.x.terms.value_rows, at.part, at.h, at.use_amx);
  }
  void begin_tile(const Context& at) {
    weights_.begin(rows_, at.tile.rows);
    if (at.gradient) dp_.begin(rows_, at.tile.rows);
  }
  void begin_keys(const Context& at) {
    at.tile.for_blocks([&](index block, Range offsets) {
      const Range n = buckets_of(at.x, offsets);
      weights_.clear(block, n);
      if (at.gradient) dp_.multiply(rows_, at.d_out, block, n);
    });
  }
  // Weights of row i by bucket.
  real* weights(index i) const { return weights_.row(i); }
  void scale_row(index i, real by) const { weights_.scale_row(i, by); }
  void collect(Context& at, index i, Range visible, const real* p, real*) const {
    NUMBER::collect(at.x, at.tile, i, visible, p, weights(i));
  }
  // out [rows, width] += the weights by bucket, times the rows.
  void add_values(real* out) { weights_.pull_back(rows_, {}, out, nullptr); }
  // The gradients of row i's weights.
  void add_dp(const Context& at, index i, Range visible, real* dp) const {
    spread(at.x, at.tile, i, visible, dp_.row(i), dp);
  }
  void end_tile(Context& at) { weights_.pull_back(rows_, at.d_out, nullptr, &d_rows_); }
  void end_head(const Context&) { d_rows_.write(); }

 private:
  BucketRows rows_;
  BucketTile weights_, dp_;  // [queries, buckets] of the tile
  RowSums d_rows_;
};
}  // namespace posenc
