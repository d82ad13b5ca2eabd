// Summands by bucket: products of a tile of tokens with the rows of buckets, spread over offsets.
#pragma once
#include <vector>
#include "amx.h"
namespace posenc::NUMBER {
constexpr index KEY_TILE = 512, QUERY_TILE = 256;

// The buckets of a range of offsets; all, where they do not go by offset.
inline Range buckets_of(const Map& map, Range offsets) {
  if (!map.bucket) return {0, map.buckets};
  return {map.bucket[offsets.begin - map.first], map.bucket[offsets.end - 1 - map.first] + 1};
}
// dst[t] (+)= src[bucket(offset + t)] for t < n.
template <bool add>
inline void spread(const Map& map, const real* src, index offset, real* dst, index n) {
  const index low = std::clamp<index>(map.low - offset, 0, n);
  const index high = std::clamp<index>(map.high - offset, low, n);
  if (low) put_number<add>(dst, src[0], low);
  const int32_t* bucket = map.bucket + (offset - map.first);
  for (index t = low; t < high; t += VL) {
    const lane first = bucket[t];
    const ivec at = load_indices(bucket + t) - isplat(first);
    vec v = __builtin_shuffle(load(src + first), at);
    if (add) v += load(dst + t);
    if (t + VL <= high)
      store(dst + t, v);
    else
      store_n(dst + t, v, high - t);
  }
  if (high < n) put_number<add>(dst + high, src[map.buckets - 1], n - high);
}
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
// dst[bucket[t]] += src[t] for the first n <= VL lanes: sums of runs of equal buckets.
inline void collect_vector(const int32_t* bucket, const real* src, real* dst, index n) {
  const __mmask16 lanes = __mmask16((1u << n) - 1);
  const __m512i at = _mm512_loadu_si512(bucket), next = _mm512_loadu_si512(bucket + 1);
  const __mmask16 last = (_mm512_cmpneq_epi32_mask(at, next) | __mmask16(1u << (n - 1))) & lanes;
  const __m512i zero = _mm512_setzero_si512();
  __m512 x = _mm512_maskz_loadu_ps(lanes, src);
#define POSENC_SHIFTED(x, by) \
  _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(x), zero, 16 - (by)))
  x = _mm512_add_ps(x, POSENC_SHIFTED(x, 1));
  x = _mm512_add_ps(x, POSENC_SHIFTED(x, 2));
  x = _mm512_add_ps(x, POSENC_SHIFTED(x, 4));
  x = _mm512_add_ps(x, POSENC_SHIFTED(x, 8));
  x = _mm512_maskz_compress_ps(last, x);  // sums up to the end of each run
  x = _mm512_sub_ps(x, POSENC_SHIFTED(x, 1));
#undef POSENC_SHIFTED
  const index runs = __builtin_popcount(last);
  real* to = dst + bucket[0];
  store_n(to, load_n(to, runs) + (vec)x, runs);
}
#endif
// dst[bucket(offset + t)] += src[t] for t < n.
inline void collect(const Map& map, const real* src, index offset, real* dst, index n) {
  offset -= map.first;
  const Span* span = map.spans + map.span_of[offset];
  for (index t = 0; t < n;) {
    const index end = std::min<index>(n, span->last + 1 - offset);
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
    if (end - t < 2 * VL && end < n) {
      const index m = std::min<index>(VL, n - t);
      collect_vector(map.bucket + offset + t, src + t, dst, m);
      t += m;
      if (t < n) span = map.spans + map.span_of[offset + t];
      continue;
    }
#endif
    if (span->step)
      add_range(dst + span->bucket + (offset + t - span->first), src + t, end - t);
    else
      dst[span->bucket] += sum_range(src + t, end - t);
    t = end, ++span;
  }
}

// Rows of all buckets of a head, and their transpose in panels.
class BucketRows {
 public:
  // halves: for products by tiles; gradient: whether data are multiplied by the rows too.
  void set(const real* rows, index buckets, index features, bool halves, bool gradient) {
    buckets_ = buckets, features_ = features, width_ = round_up(features, VL);
    const index count = round_up(buckets, PANEL);
    rows_ = rows, copied_ = width_ == features ? buckets / PANEL * PANEL : 0;
    real* to = rows_scratch_.of((count - copied_) * width_);
    for (index n = copied_; n < count; ++n)
      for (index d = 0; d < width_; ++d)
        to[(n - copied_) * width_ + d] = n < buckets && d < features ? rows[n * features + d] : 0;
    copy_ = to;
    if (halves) {
      const Tokens x{reinterpret_cast<char*>(const_cast<real*>(rows)), REAL, 0, 0, features};
      const HeadTokens tokens(x, 0, 0, 0, buckets, features);
      strips_ = tokens.columns(strips_scratch_);
      if (gradient) pairs_ = tokens.pairs(pairs_scratch_);
      return;
    }
    real* panels = panels_scratch_.of(count * features);
    for (index n = 0; n < count; n += PANEL)
      pack_transposed(row(n), width_, PANEL, features, panels + n * features);
    panels_ = panels;
  }
  // The transpose from bucket n on, a multiple of VL, as far as its panel goes.
  Strips strips(index n) const { return strips_.at(0, n); }
  // The rows from bucket n on, a multiple of PANEL.
  Strips pairs(index n) const { return pairs_.at(n, 0); }
  const real* columns(index n) const { return panels_ + n / PANEL * features_ * PANEL + n % PANEL; }
  // Rows from n on as far as its panel goes, zero beyond the last.
  const real* row(index n) const {
    return n < copied_ ? rows_ + n * width_ : copy_ + (n - copied_) * width_;
  }
  index features() const { return features_; }
  index width() const { return width_; }
  index panels() const { return (buckets_ + PANEL - 1) / PANEL; }
  index buckets() const { return buckets_; }

 private:
  Scratch rows_scratch_, panels_scratch_, pairs_scratch_, strips_scratch_;
  Strips strips_, pairs_;
  const real *rows_ = nullptr, *copy_ = nullptr, *panels_ = nullptr;
  index buckets_ = 0, features_ = 0, width_ = 0, copied_ = 0;  // copied from there on
};

// Sums of the gradients of a term's rows [N, features up to a multiple of VL].
class RowSums {
 public:
  // To `to` [N, features], or to what `write` copies there. By tiles the transpose is summed too.
  void begin(index buckets, index features, bool tiles, real* to) {
    buckets_ = buckets, features_ = features, width_ = round_up(features, VL), to_ = to;
    data = width_ == features ? to : scratch_.of(buckets * width_);
    fill(data, 0, buckets * width_);
    columns = nullptr, ld = round_up(buckets, PANEL) + VL;
    if (tiles) fill(columns = columns_.of(width_ * ld), 0, width_ * ld);
  }
  void write() const {
    if (columns) add_transpose(columns, ld, buckets_, width_, data);
    if (data == to_) return;
    for (index n = 0; n < buckets_; ++n) std::copy_n(data + n * width_, features_, to_ + n * features_);
  }
  real *data = nullptr, *columns = nullptr;  // columns: [width, ld], the transpose of more of them
  index ld = 0;

 private:
  Scratch scratch_, columns_;
  real* to_ = nullptr;
  index buckets_ = 0, features_ = 0, width_ = 0;
};

// [tile, buckets] for a tile of tokens: filled where first needed, for a block of tokens and VL
// buckets at least. A block may have a window of the buckets alone, which moves over them.
class BucketTile {
 public:
  void begin(const BucketRows& rows, index tile, bool window = false) {
    width_ = rows.panels() * PANEL;
    if (window) width_ = std::min(width_, WINDOW);
    ld_ = width_ + VL;
    data_ = scratch_.of(round_up(tile, TILE) * ld_);
    strips_ = width_ / VL, tile_ = tile, buckets_ = rows.buckets();
    const index blocks = (tile + BLOCK - 1) / BLOCK;
    done_.assign(strips_ * blocks, 0);
    first_.assign(blocks, 0);
  }
  // The product of a block of x [tile, features] with the rows of the buckets `range`; of `half`
  // where x is there in bfloat16 too.
  void multiply(const BucketRows& rows, Left x, HalfRows half, index block, Range range) {
    move(block, range);
    x.a += block * BLOCK * x.rs;
    open(block, range, [&](Range tokens, index n, index count) {
      real* to = row(tokens.begin) + n;
      if (half.data)
        half_gemm(round_up(tokens.size(), TILE), count, half.ld, half.at(tokens.begin), rows.strips(n), to,
                  ld_, false);
      else
        gemm(tokens.size(), count, rows.features(), x, rows.columns(n), PANEL, to, ld_, false);
    });
  }
  void clear(index block, Range range) {
    open(block, range, [&](Range tokens, index n, index count) {
      for (index i = tokens.begin; i < tokens.end; ++i) fill(row(i) + n, 0, count);
    });
  }
  // Whether the window of a block has these buckets.
  bool holds(index block, Range range) const {
    return range.begin >= first_[block] && range.end <= first_[block] + width_;
  }
  // Move the window of a block on to where it has the buckets `range`, with what it has of them.
  void move(index block, Range range) {
    if (holds(block, range)) return;
    const index by = range.begin / PANEL * PANEL - first_[block], keep = width_ - by;
    if (by < 0 || keep <= 0) return restart(block, range);
    const Range t = tokens(block);
    for (index i = t.begin; i < t.end; ++i)
      std::memmove(data_ + i * ld_, data_ + i * ld_ + by, keep * sizeof(real));
    char* flags = done_.data() + block * strips_;
    std::memmove(flags, flags + by / VL, keep / VL);
    std::fill(flags + keep / VL, flags + strips_, 0);
    first_[block] += by;
  }
  // The same with nothing in it.
  void restart(index block, Range range) {
    first_[block] = range.begin / PANEL * PANEL;
    std::fill_n(done_.data() + block * strips_, strips_, 0);
  }
  // out [tile, width] += data · rows.
  void times_rows(const BucketRows& rows, real* out, index ld) const {
    for (index block = 0; block * BLOCK < tile_; ++block) times_rows(rows, out, ld, block);
  }
  void times_rows(const BucketRows& rows, real* out, index ld, index block) const {
    each(block, [&](Range tokens, index n, index count) {
      gemm(tokens.size(), rows.width(), count, {row(tokens.begin) + n, ld_, 1}, rows.row(n), rows.width(),
           out + tokens.begin * ld, ld, true);
    });
  }
  // out [buckets, width] += data^T · x [tile, width].
  void transposed_times(const real* x, index ldx, real* out, index width) const {
    for (index block = 0; block * BLOCK < tile_; ++block) transposed_times(x, ldx, out, width, block);
  }
  void transposed_times(const real* x, index ldx, real* out, index width, index block) const {
    each(block, [&](Range tokens, index n, index count) {
      gemm(std::min(count, buckets_ - n), width, tokens.size(), {row(tokens.begin) + n, 1, ld_}, x + tokens.begin * ldx, ldx,
           out + n * width, width, true);
    });
  }
  // Both by tiles, where there is one to add to: out [tile up to a multiple of TILE, width] += data ·
  // rows, and columns [features, buckets] += x · data, x the transpose of tokens [tile, features].
  void pull_back(const BucketRows& rows, HalfRows x, real* out, real* columns, index ld) {
    for (index block = 0; block * BLOCK < tile_; ++block) pull_back(rows, x, out, columns, ld, block);
  }
  void pull_back(const BucketRows& rows, HalfRows x, real* out, real* columns, index ld, index block) {
    const Range t = tokens(block);
    for (index strip = 0; strip < strips_; strip += PANEL / VL) {
      const char* done = done_.data() + block * strips_ + strip;
      if (std::none_of(done, done + PANEL / VL, [](char flag) { return flag; })) continue;
      const index n = first_[block] + strip * VL;
      panel_.set(t.size(), out, [&](index i, index c) {
        return done[c / VL] ? load(row(t.begin + i) + n + c) : vec{};
      });
      if (out)
        half_gemm(round_up(t.size(), TILE), rows.width(), PANEL, panel_.rows, rows.pairs(n),
                  out + t.begin * rows.width(), rows.width(), true);
      if (columns)
        half_gemm(rows.width(), PANEL, round_up(t.size(), DEPTH), x.at(0, t.begin), panel_.pairs, columns + n, ld,
                  true);
    }
  }
  void scale_row(index i, real by) const {
    const index block = i / BLOCK;
    for_runs(block, 0, strips_, 1, [&](index n, index count) { scale_range(row(i) + n, by, count); });
  }
  index size() const { return tile_; }
  // Entry n is that of bucket n, if the window has it.
  real* row(index i) const { return data_ + i * ld_ - first_[i / BLOCK]; }

 private:
  static constexpr index WINDOW = KEY_TILE + 2 * PANEL;  // all offsets of a tile of keys to a block
  Range tokens(index block) const { return {block * BLOCK, std::min((block + 1) * BLOCK, tile_)}; }
  // Calls f(first bucket, count) for runs of strips from a to b that are `done`, panel by panel.
  template <class F>
  void for_runs(index block, index a, index b, char done, F f) const {
    const char* flags = done_.data() + block * strips_;
    for (index n = a, end; n < b; n = end) {
      const index stop = std::min(b, (n / (PANEL / VL) + 1) * (PANEL / VL));
      for (end = n + 1; end < stop && flags[end] == flags[n]; ++end) {}
      if (flags[n] == done) f(first_[block] + n * VL, (end - n) * VL);
    }
  }
  template <class F>
  void open(index block, Range range, F f) {
    const index a = (range.begin - first_[block]) / VL, b = (range.end - first_[block] + VL - 1) / VL;
    for_runs(block, a, b, 0, [&](index n, index count) { f(tokens(block), n, count); });
    std::fill(done_.data() + block * strips_ + a, done_.data() + block * strips_ + b, 1);
  }
  template <class F>
  void each(index block, F f) const {
    for_runs(block, 0, strips_, 1, [&](index n, index count) { f(tokens(block), n, count); });
  }
  Scratch scratch_;
  HalfPanel panel_;
  std::vector<char> done_;
  std::vector<index> first_;  // bucket of each block's window
  real* data_ = nullptr;
  index ld_ = 0, width_ = 0, tile_ = 0, strips_ = 0, buckets_ = 0;
};

// The bias by offset of one head, with room to read whole vectors at its ends.
class Line {
 public:
  void set(const Problem& x, index head) {
    real* to = scratch_.of(x.bias_by_offset_count + 2 * PAD) + PAD;
    std::fill(to - PAD, to + x.bias_by_offset_count + PAD, real(0));
    std::copy_n(x.bias_by_offset + head * x.bias_by_offset_head, x.bias_by_offset_count, to);
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
    if (!x.period) return part(a, b - a, j0 + a + base - x.bias_by_offset_first);
    for (index t = a; t < b;) {
      const index j = j0 + t, row = j / x.period, n = std::min(b - t, (row + 1) * x.period - j);
      part(t, n, j + base + row * x.jump - x.bias_by_offset_first);
      t += n;
    }
  }
  Scratch scratch_;
  const real* data_ = nullptr;
};

// Summands by key, in a row relative to that of the last key it sees: those nearby differ little.
class Column {
 public:
  void begin(const double* from, index keys) {
    from_ = from;
    real* to = scratch_.of(round_up(keys, VL));
    for (index j = 0; j < keys; ++j) to[j] = real(from[j] - from[j / VL * VL]);
    fill(to + keys, 0, round_up(keys, VL) - keys);
    data_ = to;
  }
  double at_end(Range see) const { return see.size() ? from_[see.end - 1] : 0; }
  void add(real* s, index j0, Range see, double level) const {
    for (index t = see.begin / VL * VL; t < see.end; t += VL)
      store(s + t, load(s + t) + (load(data_ + j0 + t) + real(from_[j0 + t] - level)));
  }

 private:
  Scratch scratch_;
  const double* from_ = nullptr;
  const real* data_ = nullptr;
};

// Summands of a query by the row and the column of the key in its image: its products with the
// buckets of offsets along the columns, ascending, and with those of offsets along the rows.
class Axes {
 public:
  static bool serves(const Problem& x) { return x.period && x.left.rows; }
  void set(const Problem& x) {
    columns_ = x.jump + 1, rows_ = x.queries / columns_, key_columns_ = x.period;
    across_ = x.map.buckets - x.period - x.jump;
  }
  // The buckets of the pairs of some queries and keys, by row and by column.
  Range row_buckets(Range queries, Range keys) const {
    const index first = keys.begin / key_columns_, last = (keys.end - 1) / key_columns_;
    return {first + down_of(queries.end - 1), last + down_of(queries.begin) + 1};
  }
  Range column_buckets(Range queries) const {
    const index first = queries.begin % columns_, last = first + queries.size() - 1;
    if (last >= columns_) return {across_, across_ + key_columns_ + columns_ - 1};
    return {across_of(last), across_of(first) + key_columns_};
  }
  // s[t] += the summands of key j0 + t, from the products of a query.
  void add(real* s, const real* products, index query, index j0, Range see) const {
    const real *down = products + down_of(query), *across = products + across_of(query % columns_);
    each_part(j0, see, [&](index t, index n, index y, index c) {
      const vec number = splat(down[y]);
      real* to = s + t;
      index u = 0;
      for (; u + VL <= n; u += VL) store(to + u, load(to + u) + load(across + c + u) + number);
      if (u < n) store_n(to + u, load_n(to + u, n - u) + load_n(across + c + u, n - u) + number, n - u);
    });
  }
  void collect(const real* ds, real* products, index query, index j0, Range see) const {
    real *down = products + down_of(query), *across = products + across_of(query % columns_);
    each_part(j0, see, [&](index t, index n, index y, index c) {
      down[y] += sum_range(ds + t, n);
      add_range(across + c, ds + t, n);
    });
  }

 private:
  // Buckets of the first row of keys, and of their first column.
  index down_of(index query) const { return rows_ - 1 - query / columns_; }
  index across_of(index column) const { return across_ + columns_ - 1 - column; }
  // Calls part(t, n, image row, first column) for the keys j0 + t of each image row.
  template <class F>
  void each_part(index j0, Range see, F part) const {
    for (index t = see.begin; t < see.end;) {
      const index j = j0 + t, y = j / key_columns_, n = std::min(see.end - t, (y + 1) * key_columns_ - j);
      part(t, n, y, j - y * key_columns_);
      t += n;
    }
  }
  index columns_ = 0, rows_ = 0, key_columns_ = 0;  // of queries, of queries, of keys
  index across_ = 0;                                // the first bucket of offsets along rows
};
}  // namespace posenc
