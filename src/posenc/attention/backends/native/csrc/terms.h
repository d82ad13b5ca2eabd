// Summands by bucket: products of a tile of tokens with the rows of buckets, spread over offsets.
#pragma once
#include <vector>
#include "gemm.h"
#include "problem.h"
namespace posenc::NUMBER {
constexpr index KEY_TILE = 512;
struct Range {
  index begin, end;
  index size() const { return end > begin ? end - begin : 0; }
};

// dst[t] += src[bucket(offset + t)]; the last vector is whole.
inline void spread(const Map& map, const real* src, index offset, real* dst, index n) {
  const int32_t* bucket = map.bucket + (offset - map.first);
  for (index t = 0; t < n; t += VL) {
    const lane first = bucket[t];
    const ivec at = load_indices(bucket + t) - isplat(first);
    store(dst + t, load(dst + t) + __builtin_shuffle(load(src + first), at));
  }
}
// dst[bucket(offset + t)] += src[t] for t < n.
inline void collect(const Map& map, const real* src, index offset, real* dst, index n) {
  offset -= map.first;
  const Span* span = map.spans + map.span_of[offset];
  for (index t = 0; t < n; ++span) {
    const index end = std::min<index>(n, span->last + 1 - offset);
    if (span->step)
      add_range(dst + span->bucket + (offset + t - span->first), src + t, end - t);
    else
      dst[span->bucket] += sum_range(src + t, end - t);
    t = end;
  }
}

// Rows of all buckets of a head, and their transpose in panels.
class BucketRows {
 public:
  void set(const real* rows, index buckets, index features) {
    buckets_ = buckets, features_ = features, width_ = round_up(features, VL);
    const index count = round_up(buckets, PANEL);
    real* to = rows_scratch_.of(count * width_);
    for (index n = 0; n < count; ++n)
      for (index d = 0; d < width_; ++d)
        to[n * width_ + d] = n < buckets && d < features ? rows[n * features + d] : 0;
    rows_ = to;
    real* panels = panels_scratch_.of(count * features);
    pack_transposed(to, width_, count, features, panels);
    panels_ = panels;
  }
  const real* panel(index p) const { return panels_ + p * features_ * PANEL; }
  const real* row(index n) const { return rows_ + n * width_; }
  index features() const { return features_; }
  index width() const { return width_; }
  index panels() const { return (buckets_ + PANEL - 1) / PANEL; }
  index buckets() const { return buckets_; }

 private:
  Scratch rows_scratch_, panels_scratch_;
  const real *rows_ = nullptr, *panels_ = nullptr;
  index buckets_ = 0, features_ = 0, width_ = 0;
};

// [tile, buckets] for a tile of tokens: filled a panel of buckets at a time, where first needed.
class BucketTile {
 public:
  void begin(const BucketRows& rows, index tile) {
    ld_ = rows.panels() * PANEL + VL;
    data_ = scratch_.of(tile * ld_);
    done_.assign(rows.panels(), 0);
    tile_ = tile;
  }
  // The product of x [tile, features] with the rows of buckets first … last.
  void multiply(const BucketRows& rows, Left x, index first, index last) {
    for (index p = first / PANEL; p <= last / PANEL; ++p)
      if (!done_[p]) {
        done_[p] = 1;
        gemm(tile_, PANEL, rows.features(), x, rows.panel(p), PANEL, data_ + p * PANEL, ld_, false);
      }
  }
  void clear(index first, index last) {
    for (index p = first / PANEL; p <= last / PANEL; ++p)
      if (!done_[p]) {
        done_[p] = 1;
        for (index i = 0; i < tile_; ++i) fill(row(i) + p * PANEL, 0, PANEL);
      }
  }
  // out [tile, width] += data · rows.
  void times_rows(const BucketRows& rows, real* out, index ld) const {
    for (index p = 0; p < index(done_.size()); ++p)
      if (done_[p])
        gemm(tile_, rows.width(), PANEL, {data_ + p * PANEL, ld_, 1}, rows.row(p * PANEL),
             rows.width(), out, ld, true);
  }
  // out [buckets, width] += data^T · x [tile, width].
  void transposed_times(const real* x, index ldx, real* out, index width) const {
    for (index p = 0; p < index(done_.size()); ++p)
      if (done_[p])
        gemm(PANEL, width, tile_, {data_ + p * PANEL, 1, ld_}, x, ldx, out + p * PANEL * width,
             width, true);
  }
  void scale_row(index i, real by) {
    for (index p = 0; p < index(done_.size()); ++p)
      if (done_[p]) scale_range(row(i) + p * PANEL, by, PANEL);
  }
  real* row(index i) { return data_ + i * ld_; }

 private:
  Scratch scratch_;
  std::vector<char> done_;
  real* data_ = nullptr;
  index ld_ = 0, tile_ = 0;
};

// The bias by offset of one head, with room to read whole vectors at its ends.
class Line {
 public:
  void set(const Problem& x, index head) {
    real* to = scratch_.of(x.line_count + 2 * PAD) + PAD;
    std::fill(to - PAD, to + x.line_count + PAD, real(0));
    std::copy_n(x.line + head * x.line_head, x.line_count, to);
    data_ = to;
  }
  // s[t] += bias of key j0 + t for t in [a, b).
  void add(const Problem& x, real* s, index j0, index a, index b, index base) const {
    each_part(x, j0, a, b, base, [&](index t, index n, index at) {
      if (!x.period)  // whole vectors: what is beyond b is masked later
        for (index u = 0; u < n; u += VL) store(s + t + u, load(s + t + u) + load(data_ + at + u));
      else
        add_range(s + t, data_ + at, n);
    });
  }
  static void collect(const Problem& x, const real* ds, index j0, index a, index b, index base,
                      real* into) {
    each_part(x, j0, a, b, base,
              [&](index t, index n, index at) { add_range(into + at, ds + t, n); });
  }

 private:
  // Calls part(t, n, index of the bias of key j0 + t) for stretches where both rise together.
  template <class F>
  static void each_part(const Problem& x, index j0, index a, index b, index base, F part) {
    if (!x.period) return part(a, b - a, j0 + a + base - x.line_first);
    for (index t = a; t < b;) {
      const index j = j0 + t, row = j / x.period, n = std::min(b - t, (row + 1) * x.period - j);
      part(t, n, j + base + row * x.jump - x.line_first);
      t += n;
    }
  }
  Scratch scratch_;
  const real* data_ = nullptr;
};
}  // namespace posenc
