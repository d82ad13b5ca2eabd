// Biases of logits that need no product: by offset, by key, and by image row and column.
#pragma once
#include "buckets.h"
namespace posenc::NUMBER {
// The bias by offset of one head, [W] with PAD readable entries at both ends.
class BiasByOffset {
 public:
  void set(const Problem& x, index head) {
    const Operand& bias = x.terms.bias_by_offset;
    real* to = scratch_.of(bias.rows + 2 * PAD) + PAD;
    std::fill(to - PAD, to + bias.rows + PAD, real(0));
    std::copy_n(bias.of(0, head), bias.rows, to);
    data_ = to;
  }
  // s[t] += bias of key j0 + t for t in [a, b).
  void add(const Problem& x, real* s, index j0, index a, index b, index base) const {
    for_key_runs(x, j0, a, b, base, [&](index t, index n, index offset) {
      const real* from = data_ + offset - x.terms.first;
      if (!x.period)  // whole vectors: keys from b on are masked after this
        for (index u = 0; u < n; u += VL) store(s + t + u, load(s + t + u) + load(from + u));
      else
        add_range(s + t, from, n);
    });
  }
  const real* at(index n) const { return data_ + n; }
  static void collect(const Problem& x, const real* ds, index j0, index a, index b, index base,
                      real* into) {
    for_key_runs(x, j0, a, b, base, [&](index t, index n, index offset) {
      add_range(into + offset - x.terms.first, ds + t, n);
    });
  }

 private:
  Scratch scratch_;
  const real* data_ = nullptr;
};

// A bias by key in double, which may be a sum over thousands of tokens (of gates), or hide keys. Logits
// are relative to about the greatest of a row's visible keys (Logits::row_shift), so that those of
// weight are exact in float32.
class Column {
 public:
  void begin(const double* from, index keys) {
    const index size = round_up(keys, VL);
    double* exact = scratch_of<double>(exact_scratch_, size);
    real* rounded = rounded_scratch_.of(size);
    std::copy_n(from, keys, exact);
    std::fill(exact + keys, exact + size, 0.0);
    for (index j = 0; j < size; ++j) rounded[j] = real(exact[j]);
    exact_ = exact, rounded_ = rounded;
  }
  // visible(i): the keys that row i of the tile sees.
  template <class F>
  void begin_tile(index rows, F visible) {
    shifts_.resize(rows);
    Range before{0, 0};
    real greatest = -INFINITY;
    for (index i = 0; i < rows; ++i) {
      const Range keys = visible(i);
      const bool goes_on = keys.begin == before.begin && keys.end >= before.end;
      if (!goes_on) greatest = -INFINITY;
      greatest = std::max(greatest, greatest_of({goes_on ? before.end : keys.begin, keys.end}));
      shifts_[i] = greatest == -INFINITY ? 0 : greatest, before = keys;
    }
  }
  double shift(index i) const { return shifts_[i]; }
  void add(real* s, index j0, Range visible, double shift) const {
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      store(s + t, load(s + t) + narrow_difference(exact_ + j0 + t, shift));
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
  std::vector<double> shifts_;  // [rows]
};

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
}  // namespace posenc
