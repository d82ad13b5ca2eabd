// Terms by bucket of the offset: the products of a tile of tokens with the rows of all buckets,
// [tokens, buckets], spread over offsets; and back, gradients by offset collected by bucket.
#pragma once
#include "products.h"
namespace posenc::NUMBER {
// The buckets of a range of offsets; all, where there is no map (CoPE: products by count) or they are
// of several image rows.
inline Range buckets_of(const Problem& x, Range offsets) {
  const Map& map = x.map;
  if (!map.bucket || x.period) return {0, map.buckets};
  return {map.bucket[offsets.begin - map.first], map.bucket[offsets.end - 1 - map.first] + 1};
}
// Calls part(t, n, offset of key j0 + t) for runs of the keys j0 + t, t in `visible`, along which the
// offset rises by one: all keys of a sequence, an image row each of an image.
template <class F>
void for_key_runs(const Problem& x, index j0, Range visible, index base, F part) {
  if (!x.period) return part(visible.begin, visible.size(), j0 + visible.begin + base);
  for (index t = visible.begin; t < visible.end;) {
    const index j = j0 + t, n = std::min(visible.end - t, (j / x.period + 1) * x.period - j);
    part(t, n, x.place_of(j) + base);
    t += n;
  }
}
// dst[t] (+)= src[bucket(offset + t)] for t < n. Buckets rise by at most one an offset, so those of VL
// offsets are among VL entries: one load and a permutation, no gather. Reads VL entries of src at once.
template <bool add>
inline void spread(const Map& map, const real* src, index offset, real* dst, index n) {
  const index low = std::clamp<index>(map.low - offset, 0, n);
  const index high = std::clamp<index>(map.high - offset, low, n);
  if (low) put_number<add>(dst, src[0], low);
  const int32_t* bucket = map.bucket + (offset - map.first);
  for (index t = low; t < high; t += VL) {
    const lane first = bucket[t];
    const ivec at = load_indices(bucket + t) - isplat(first);
    vec v = permute(load(src + first), at);
    if (add) v += load(dst + t);
    if (t + VL <= high)
      store(dst + t, v);
    else
      store_n(dst + t, v, high - t);
  }
  if (high < n) put_number<add>(dst + high, src[map.buckets - 1], n - high);
}
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
// dst[bucket[t]] += src[t] for the first n <= VL lanes, without conflicts between lanes: running sums
// in log2(16) steps, of which those at the ends of runs of equal buckets move to the first lanes;
// their differences are the sums of the runs. Runs have consecutive buckets.
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
  x = _mm512_maskz_compress_ps(last, x);
  x = _mm512_sub_ps(x, POSENC_SHIFTED(x, 1));
#undef POSENC_SHIFTED
  const index runs = __builtin_popcount(last);
  real* to = dst + bucket[0];
  store_n(to, load_n(to, runs) + (vec)x, runs);
}
#endif
// dst[bucket(offset + t)] += src[t] for t < n, span by span: a sum where the bucket is constant, an
// addition of vectors where it rises.
inline void collect(const Map& map, const real* src, index offset, real* dst, index n) {
  offset -= map.first;
  const Span* span = map.spans + map.span_of[offset];
  for (index t = 0; t < n;) {
    const index end = std::min<index>(n, span->last + 1 - offset);
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
    if (end - t < 2 * VL && end < n) {  // short spans (T5's, DeBERTa's logarithmic buckets) together
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

// The same between the numbers by bucket of row i of a tile, and those of its visible keys.
inline void spread(const Problem& x, const QueryTile& tile, index i, Range visible, const real* src, real* dst) {
  for_key_runs(x, tile.j0, visible, tile.base[i],
               [&](index t, index n, index offset) { spread<true>(x.map, src, offset, dst + t, n); });
}
inline void collect(const Problem& x, const QueryTile& tile, index i, Range visible, const real* src, real* dst) {
  for_key_runs(x, tile.j0, visible, tile.base[i],
               [&](index t, index n, index offset) { collect(x.map, src + t, offset, dst, n); });
}

// Rows of all buckets of a head, [buckets up to a multiple of PANEL, width], and their transpose as
// right factor. Rows are read where they lie as far as whole panels go; the rest is a padded copy.
class BucketRows {
 public:
  // use_amx: for products in bfloat16; gradient: whether there will be products with rows too.
  void set(const Operand& operand, index h, bool use_amx, bool gradient) {
    const real* rows = operand.of(0, h);
    const index buckets = operand.rows, features = operand.features;
    buckets_ = buckets, features_ = features, width_ = round_up(features, VL), use_amx_ = use_amx;
    const index count = round_up(buckets, PANEL);
    rows_ = rows, copied_ = width_ == features ? buckets / PANEL * PANEL : 0;
    copy_ = padded(rows + copied_ * features, buckets - copied_, features, count - copied_, width_, rows_scratch_).data;
    if (use_amx) {
      const Tokens x{reinterpret_cast<char*>(const_cast<real*>(rows)), REAL, 0, 0, features};
      const HeadTokens tokens(x, 0, 0, 0, buckets, features);
      strips_ = tokens.columns(strips_scratch_);
      remainders_ = {};
      if (!fits_bf16(rows, buckets * features)) remainders_ = tokens.columns(remainders_scratch_, true);
      if (gradient) pairs_ = tokens.pairs(pairs_scratch_);
      return;
    }
    real* panels = panels_scratch_.of(count * features);
    for (index n = 0; n < count; n += PANEL)
      pack_transposed(row(n), width_, PANEL, features, panels + n * features);
    panels_ = panels;
  }
  bool use_amx() const { return use_amx_; }
  // Right factors [features, buckets] from bucket n on, a multiple of VL, as far as its panel goes.
  VnniStrips strips(index n) const { return strips_.at(0, n); }
  // The same of what rounding leaves of rows that bfloat16 does not hold: the sum of both products is as exact
  // as one of rows with 16 bits, and logits may be large.
  bool has_remainders() const { return remainders_.data; }
  VnniStrips remainders(index n) const { return remainders_.at(0, n); }
  // Right factor [buckets, features] from bucket n on, a multiple of PANEL.
  VnniStrips pairs(index n) const { return pairs_.at(n, 0); }
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
  Scratch rows_scratch_, panels_scratch_, pairs_scratch_, strips_scratch_, remainders_scratch_;
  VnniStrips strips_, remainders_, pairs_;
  const real *rows_ = nullptr, *copy_ = nullptr, *panels_ = nullptr;
  index buckets_ = 0, features_ = 0, width_ = 0, copied_ = 0;  // rows from copied_ on are a copy
  bool use_amx_ = false;
};

// The gradient of a term's rows [N, width], width the features up to a multiple of VL.
class RowSums {
 public:
  // Directly in the gradient of some part and head, or by `write` where width differs. AMX sums its
  // transpose, in which buckets are columns, apart; `write` adds it.
  void begin(const Operand& rows, index part, index h, bool use_amx) {
    real* to = to_ = rows.gradient_of(part, 0, h);
    buckets_ = rows.rows, features_ = rows.features, width_ = round_up(features_, VL);
    data = width_ == features_ ? to : scratch_.of(buckets_ * width_);
    fill(data, 0, buckets_ * width_);
    columns = nullptr, ld = round_up(buckets_, PANEL) + VL;
    if (use_amx) fill(columns = columns_.of(width_ * ld), 0, width_ * ld);
  }
  void write() const {
    if (columns) add_transpose(columns, ld, buckets_, width_, data);
    if (data == to_) return;
    for (index n = 0; n < buckets_; ++n) std::copy_n(data + n * width_, features_, to_ + n * features_);
  }
  real* data = nullptr;     // [N, width]
  real* columns = nullptr;  // [width, ld], the transpose of AMX's share
  index ld = 0;

 private:
  Scratch scratch_, columns_;
  real* to_ = nullptr;
  index buckets_ = 0, features_ = 0, width_ = 0;
};

// Numbers [tile, buckets] of a tile of tokens: their products with buckets, or gradients of those.
// Filled where first needed, a block of tokens and VL buckets (a strip) at a time, as `filled_` says.
// With a window, a block holds only as many buckets as a tile of keys has offsets to it, and the
// window moves along: memory does not grow with the number of buckets.
class BucketTile {
 public:
  void begin(const BucketRows& rows, index tile, bool window = false) {
    width_ = rows.panels() * PANEL;
    if (window) width_ = std::min(width_, WINDOW);
    ld_ = width_ + VL;  // spread reads whole vectors, and rows are not a power of two apart
    data_ = scratch_.of(round_up(tile, AMX_TILE) * ld_);
    strips_ = width_ / VL, tile_ = tile, buckets_ = rows.buckets();
    const index blocks = (tile + BLOCK - 1) / BLOCK;
    filled_.assign(strips_ * blocks, 0);
    first_.assign(blocks, 0);
  }
  // Fill a block with the products of x [tile, features] and the rows of the buckets `range`.
  void multiply(const BucketRows& rows, const Factor& x, index block, Range range) {
    move(block, range);
    fill_missing(block, range, [&](Range tokens, index n, index count) {
      real* to = row(tokens.begin) + n;
      if (!rows.use_amx())
        return gemm(tokens.size(), count, rows.features(), {x.rows.at(tokens.begin), x.rows.ld, 1}, rows.columns(n),
                    PANEL, to, ld_, false);
      const index padded = round_up(tokens.size(), AMX_TILE);
      const Bf16Rows from = x.bf16.at(tokens.begin);
      amx_gemm(padded, count, from.ld, from, rows.strips(n), to, ld_, false);
      if (rows.has_remainders()) amx_gemm(padded, count, from.ld, from, rows.remainders(n), to, ld_, true);
    });
  }
  // Fill a block with zeros for the buckets `range`, where it is not filled yet.
  void clear(index block, Range range) {
    fill_missing(block, range, [&](Range tokens, index n, index count) {
      for (index i = tokens.begin; i < tokens.end; ++i) fill(row(i) + n, 0, count);
    });
  }
  // Whether the window of a block holds these buckets.
  bool holds(index block, Range range) const {
    return range.begin >= first_[block] && range.end <= first_[block] + width_;
  }
  // Move the window of a block so that it holds the buckets `range`; what is in both places is kept.
  void move(index block, Range range) {
    if (holds(block, range)) return;
    const index by = range.begin / PANEL * PANEL - first_[block], keep = width_ - by;
    if (by < 0 || keep <= 0) return restart(block, range);
    const Range t = tokens(block);
    for (index i = t.begin; i < t.end; ++i)
      std::memmove(data_ + i * ld_, data_ + i * ld_ + by, keep * sizeof(real));
    char* flags = filled_.data() + block * strips_;
    std::memmove(flags, flags + by / VL, keep / VL);
    std::fill(flags + keep / VL, flags + strips_, 0);
    first_[block] += by;
  }
  // Move the window of a block and forget its contents.
  void restart(index block, Range range) {
    first_[block] = range.begin / PANEL * PANEL;
    std::fill_n(filled_.data() + block * strips_, strips_, 0);
  }
  // out [tile up to a multiple of AMX_TILE, width] += data · rows, and sums += data^T · x, which are the
  // gradients of `multiply` if data is that of the products. Either may be null.
  void pull_back(const BucketRows& rows, const Factor& x, real* out, const RowSums* sums) {
    for (index block = 0; block * BLOCK < tile_; ++block) pull_back(rows, x, out, sums, block);
  }
  void pull_back(const BucketRows& rows, const Factor& x, real* out, const RowSums* sums, index block) {
    const index width = rows.width();
    if (rows.use_amx()) return pull_back_by_amx(rows, x, out, sums, block);
    for_runs(block, 0, strips_, 1, [&](index n, index count) {
      const Range t = tokens(block);
      const real* from = row(t.begin) + n;
      if (out)
        gemm(t.size(), width, count, {from, ld_, 1}, rows.row(n), width, out + t.begin * width, width, true);
      if (sums)
        gemm(std::min(count, buckets_ - n), width, t.size(), {from, 1, ld_}, x.rows.at(t.begin), x.rows.ld,
             sums->data + n * width, width, true);
    });
  }
  void scale_row(index i, real by) const {
    const index block = i / BLOCK;
    for_runs(block, 0, strips_, 1, [&](index n, index count) { scale_range(row(i) + n, by, count); });
  }
  index size() const { return tile_; }
  // Row i, indexed by bucket: the entry of bucket n is row(i)[n], if the window holds it.
  real* row(index i) const { return data_ + i * ld_ - first_[i / BLOCK]; }

 private:
  // The offsets of a tile of keys to a block of queries, and PANEL to begin at a multiple of it.
  static constexpr index WINDOW = KEY_TILE + 2 * PANEL;
  Range tokens(index block) const { return {block * BLOCK, std::min((block + 1) * BLOCK, tile_)}; }
  // Calls f(first bucket, count) for runs of strips from a to b whose flag is `filled`. Runs end with
  // their panel, as operands in panels do.
  template <class F>
  void for_runs(index block, index a, index b, char filled, F f) const {
    const char* flags = filled_.data() + block * strips_;
    for (index n = a, end; n < b; n = end) {
      const index stop = std::min(b, (n / (PANEL / VL) + 1) * (PANEL / VL));
      for (end = n + 1; end < stop && flags[end] == flags[n]; ++end) {}
      if (flags[n] == filled) f(first_[block] + n * VL, (end - n) * VL);
    }
  }
  // Calls f(tokens, first bucket, count) for the strips of `range` that are not filled, which it fills.
  template <class F>
  void fill_missing(index block, Range range, F f) {
    const index a = (range.begin - first_[block]) / VL, b = (range.end - first_[block] + VL - 1) / VL;
    for_runs(block, a, b, 0, [&](index n, index count) { f(tokens(block), n, count); });
    std::fill(filled_.data() + block * strips_ + a, filled_.data() + block * strips_ + b, 1);
  }
  // By one copy of data in bfloat16 for both sums.
  void pull_back_by_amx(const BucketRows& rows, const Factor& x, real* out, const RowSums* sums, index block) {
    const Range t = tokens(block);
    const index width = rows.width();
    for (index strip = 0; strip < strips_; strip += PANEL / VL) {
      const char* filled = filled_.data() + block * strips_ + strip;
      if (std::none_of(filled, filled + PANEL / VL, [](char flag) { return flag; })) continue;
      const index n = first_[block] + strip * VL;
      panel_.set(t.size(), out, [&](index i, index c) {
        return filled[c / VL] ? load(row(t.begin + i) + n + c) : vec{};
      });
      if (out)
        amx_gemm(round_up(t.size(), AMX_TILE), width, PANEL, panel_.rows, rows.pairs(n), out + t.begin * width, width,
                 true);
      if (sums)
        amx_gemm(width, PANEL, round_up(t.size(), AMX_DEPTH), x.transposed.at(0, t.begin), panel_.pairs,
                 sums->columns + n, sums->ld, true);
    }
  }
  Scratch scratch_;
  Bf16Panel panel_;
  std::vector<char> filled_;  // [blocks, strips_]
  std::vector<index> first_;  // [blocks], first bucket of each window
  real* data_ = nullptr;
  index ld_ = 0, width_ = 0, tile_ = 0, strips_ = 0, buckets_ = 0;
};
}  // namespace posenc
