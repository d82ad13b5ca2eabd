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

// A bias by key in double, which may be a sum over thousands of tokens (of gates). Logits are
// relative to the bias of the last visible key (Logits::row_shift), as float32 differences: of biases
// within a vector of keys, and of the vector's first key.
class Column {
 public:
  void begin(const double* from, index keys) {
    from_ = from;
    real* to = scratch_.of(round_up(keys, VL));
    for (index j = 0; j < keys; ++j) to[j] = real(from[j] - from[j / VL * VL]);
    fill(to + keys, 0, round_up(keys, VL) - keys);
    data_ = to;
  }
  double at_end(Range visible) const { return visible.size() ? from_[visible.end - 1] : 0; }
  void add(real* s, index j0, Range visible, double row_shift) const {
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      store(s + t, load(s + t) + (load(data_ + j0 + t) + real(from_[j0 + t] - row_shift)));
  }

 private:
  Scratch scratch_;
  const double* from_ = nullptr;
  const real* data_ = nullptr;
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
