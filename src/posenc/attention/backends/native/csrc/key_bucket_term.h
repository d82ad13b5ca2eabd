// The key-side bucket term, `right` in Terms: s[i, j] += key_j · row[bucket(offset)], as DeBERTa's
// position to content (p2c), forward and backward. `collect_tile` sums ds by key and bucket; `flush` and
// `end_row` turn these sums into the gradients of keys and rows.
#pragma once
#include "buckets.h"
#include "term.h"
namespace posenc::NUMBER {
// The term of one head. Every tile of queries meets the same keys, so products [keys, buckets] of
// tiles of keys are kept, in as many slots as MAX_KEPT allows. Near offsets: each key's products are
// spread over queries as a column of s, in strips of VL keys that are transposed on the way. Far
// offsets have one bucket: a vector over the keys is added to the rows.
class KeyBucketTerm : public Term {
 public:
  static bool serves(const Problem& x) { return bool(x.terms.right_rows); }
  void begin_head(const Context& at) {
    const Operand& rows = at.x.terms.right_rows;
    rows_.set(rows, at.h, at.use_amx, at.gradient);
    if (at.gradient) d_rows_.begin(rows, at.part, at.h, at.use_amx);
  }
  void begin_row(const Context& at) {
    const Problem& x = at.x;
    const Operand& right = x.terms.right;
    const index features = right.features, width = rows_.width();
    keys_.read(right.value, at.b, at.h, 0, x.keys, features, at.use_amx, false);
    if (at.gradient && right.gradient.data)
      d_keys_.begin(right.gradient, right.part_stride, at.split, at.b, at.h, x.keys, features, width, at.use_amx);
    d_tokens_ = right.gradient.data ? d_keys_.data : at.k.gradient.data;  // keys themselves have no other
    const index size = KEY_TILE * (round_up(x.map.buckets, PANEL) + VL);
    slots_.resize(std::clamp<index>((x.keys + KEY_TILE - 1) / KEY_TILE, 1, std::max<index>(1, MAX_KEPT / size)));
    for (Slot& slot : slots_) slot.tile = -1, slot.used = 0;
    clock_ = 0;
    for (int end = 0; end < 2; ++end) {
      far_[end] = far_scratch_[end].of(x.keys + PAD);
      for (index j = 0; j < x.keys; ++j) far_[end][j] = dot(keys_.rows.at(j), rows_.row(end_of(x, end)), width);
      if (at.gradient) fill(far_sums_[end] = far_sums_scratch_[end].of(x.keys + PAD), 0, x.keys + PAD);
    }
  }
  // Adds the gradients of all slots, and of far offsets, to those of the keys and the rows.
  void end_row(Context& at) {
    const index width = rows_.width();
    for (Slot& slot : slots_) flush(slot);
    for (int end = 0; end < 2; ++end)
      for (index j = 0; j < at.x.keys; ++j) {
        add_scaled(d_tokens_ + j * width, rows_.row(end_of(at.x, end)), far_sums_[end][j], width);
        add_scaled(d_rows_.data + end_of(at.x, end) * width, keys_.rows.at(j), far_sums_[end][j], width);
      }
    if (at.x.terms.right.gradient.data) d_keys_.write();
  }
  void end_head(const Context&) { d_rows_.write(); }
  // The near pairs of the selected tile.
  void add_tile(Context& at, real* s, index ld) {
    const Problem& x = at.x;
    const QueryTile& t = at.tile;
    Factor keys{{keys_.rows.at(t.j0), keys_.rows.ld}, {}, {}};
    if (at.use_amx) keys.bf16 = keys_.bf16.at(t.j0);
    current_ = nullptr;
    for_blocks(x, t, [&](index p, Range n) {
      if (!current_) select(at, t.j0 / KEY_TILE);
      current_->product.multiply(rows_, keys, p, n);
    });
    if (!current_) return;
    BucketTile& product = current_->product;
    if (has_scattered_pairs(x, t))
      return for_near_pairs(x, t, [&](index i, index j, index k) { s[i * ld + j] += product.row(j)[k]; });
    for_strips(x, t, [&](index j, Range visible, real* strip, index width) {
      for_key_rows(x, t, j, visible, [&](index key, index from, index n, index offset) {
        spread<false>(x.map, product.row(key), offset, strip + (key - j) * width + from, n);
      });
      for (index r = 0; r < visible.size(); r += VL) {
        vec block[VL];
        for (int l = 0; l < VL; ++l) block[l] = load(strip + l * width + r);
        transpose(block);
        real* to = s + (visible.end - 1 - r) * ld + j;
        const index n = std::min<index>(VL, visible.size() - r);
        for (int l = 0; l < VL && l < n; ++l, to -= ld) store(to, load(to) + block[l]);
      }
    });
  }
  // The far pairs of row i, in whole vectors.
  void add(Context& at, index i, Range visible, real* s) const {
    for_far(at, i, visible, [&](index u, int end) { store(s + u, load(s + u) + load(far_[end] + at.tile.j0 + u)); });
  }
  void collect(Context& at, index i, Range visible, const real*, real* ds) const {
    for_far(at, i, visible, [&](index u, int end) {
      real* to = far_sums_[end] + at.tile.j0 + u;
      store(to, load(to) + load(ds + u));
    });
  }
  // The gradient of `add_tile`: sums[j, bucket] += ds[i, j], the same strips the other way round.
  void collect_tile(Context& at, const real* ds, index ld) {
    const Problem& x = at.x;
    const QueryTile& t = at.tile;
    if (!current_) return;
    BucketTile& into = current_->sums;
    for_blocks(x, t, [&](index p, Range n) { into.clear(p, n); });
    if (has_scattered_pairs(x, t))
      return for_near_pairs(x, t, [&](index i, index j, index k) { into.row(j)[k] += ds[i * ld + j]; });
    for_strips(x, t, [&](index j, Range visible, real* strip, index width) {
      for (index r = 0; r < visible.size(); r += VL) {
        vec block[VL];
        const real* from = ds + (visible.end - 1 - r) * ld + j;
        const index n = std::min<index>(VL, visible.size() - r);
        for (int l = 0; l < VL; ++l, from -= ld) block[l] = l < n ? load(from) : vec{};
        transpose(block);
        for (int l = 0; l < VL; ++l) store(strip + l * width + r, block[l]);
      }
      for_key_rows(x, t, j, visible, [&](index key, index from, index n, index offset) {
        NUMBER::collect(x.map, strip + (key - j) * width + from, offset, into.row(key), n);
      });
    });
  }

 private:
  struct Slot {
    BucketTile product, sums;  // [keys of a tile, buckets]: key · row, and sums of ds
    index tile, used;          // tile of keys, -1 for none; time of the last use
  };
  // The slot of a tile of keys becomes the current one; if none has it, the least recently used.
  void select(const Context& at, index tile) {
    current_ = &slots_[0];
    for (Slot& slot : slots_) {
      if (slot.tile == tile) {
        current_ = &slot;
        break;
      }
      if (slot.used < current_->used) current_ = &slot;
    }
    current_->used = ++clock_;
    if (current_->tile == tile) return;
    flush(*current_);
    const index n = std::min(KEY_TILE, at.x.keys - tile * KEY_TILE);
    current_->tile = tile;
    current_->product.begin(rows_, n);
    if (at.gradient) current_->sums.begin(rows_, n);
  }
  // Add the gradients of a slot: d_tokens += sums · rows, d_rows += sums^T · keys.
  void flush(Slot& slot) {
    if (!d_tokens_ || slot.tile < 0) return;
    const index j = slot.tile * KEY_TILE;
    Factor keys{{keys_.rows.at(j), keys_.rows.ld}, {}, {}};
    if (rows_.use_amx())
      keys.transposed = bf16_transpose(keys.rows, slot.sums.size(), rows_.features(), columns_scratch_);
    slot.sums.pull_back(rows_, keys, d_tokens_ + j * rows_.width(), &d_rows_);
  }
  // Calls f(block of keys, its buckets) for the blocks with near pairs. Blocks are panels here.
  template <class F>
  void for_blocks(const Problem& x, const QueryTile& t, F f) {
    for (index p = t.panels.begin; p < t.panels.end; ++p) {
      Range n = t.offsets;
      if (t.regular) {
        const Range visible = t.panel_rows[p];
        if (!visible.size()) continue;
        const index first = t.j0 + p * PANEL + t.base[visible.end - 1];
        n.begin = std::max({n.begin, first, x.map.low - VL});
        n.end = std::min({n.end, first + visible.size() + PANEL - 1, x.map.high + VL});
      }
      if (n.begin < n.end) f(p, buckets_of(x, n));
    }
  }
  // Calls f(first of VL keys, rows with near offsets to them, strip [VL, width], width).
  template <class F>
  void for_strips(const Problem& x, const QueryTile& t, F f) {
    const index width = round_up(t.rows, VL);
    real* strip = strip_.of(VL * width);
    for (index j = t.panels.begin * PANEL; j < std::min(t.width, t.panels.end * PANEL); j += VL) {
      const Range visible = t.near_rows(x.map, j);
      if (visible.size()) f(j, visible, strip, width);
    }
  }
  // Calls f(key, from, n, offset) for the VL keys from j on: a key's offset rises by one from row to row,
  // in reverse, for n of them, which begin at place `from` of a strip. Of images, along an image row.
  template <class F>
  static void for_key_rows(const Problem& x, const QueryTile& t, index j, Range visible, F f) {
    const index columns = x.period ? x.jump + 1 : x.queries;
    for (index end = visible.end, begin; end > visible.begin; end = begin) {
      begin = std::max(visible.begin, (t.i0 + end - 1) / columns * columns - t.i0);
      for (index key = j; key < std::min(j + VL, t.width); ++key)
        f(key, visible.end - end, end - begin, x.place_of(t.j0 + key) + t.base[end - 1]);
    }
  }
  // Whether the offset of neighbouring pairs follows no rule.
  static bool has_scattered_pairs(const Problem& x, const QueryTile& t) { return !t.regular && !x.period; }
  // Calls f(t, end) for the vectors of row i's visible keys with far offsets, before those that are near
  // (end 0: first bucket) and after them (end 1: last bucket).
  template <class F>
  static void for_far(const Context& at, index i, Range visible, F f) {
    const Range near = at.tile.near_keys(at.x.map, i);
    const index first = visible.begin / VL * VL;
    for (index u = first; u < std::min(visible.end, near.begin); u += VL) f(u, 0);
    for (index u = std::max(first, near.end); u < visible.end; u += VL) f(u, 1);
  }
  // Calls f(i, j, bucket) for all visible pairs: of tiles that are not regular, all are near.
  template <class F>
  void for_near_pairs(const Problem& x, const QueryTile& t, F f) {
    for (index i = 0; i < t.rows; ++i) {
      const Range visible = t.visible_keys(i);
      for (index j = visible.begin; j < visible.end; ++j)
        f(i, j, index(x.map.bucket[t.j0 + j + t.base[i] - x.map.first]));
    }
  }
  static index end_of(const Problem& x, int end) { return end ? x.map.buckets - 1 : 0; }
  BucketRows rows_;
  RowSums d_rows_;
  TileFactor keys_;   // of the row
  TokenSums d_keys_;  // if they are not the keys themselves
  std::vector<Slot> slots_;
  Slot* current_ = nullptr;  // of the tile of the last `add`; null if it had no near pairs
  index clock_ = 0;
  real* d_tokens_ = nullptr;  // [K, width]
  real *far_[2], *far_sums_[2];  // [K]: products with the first and the last bucket, and sums of their ds
  Scratch columns_scratch_, strip_, far_scratch_[2], far_sums_scratch_[2];
};
}  // namespace posenc
