// The key-side bucket term, `right` in Terms: s[i, j] += key_j · row[bucket(offset)], as DeBERTa's
// position to content (p2c), forward and backward. KeyBucketTerm::collect sums ds by key and bucket;
// flush and finish turn these sums into the gradients of keys and rows.
#pragma once
#include "query_tile.h"
namespace posenc::NUMBER {
constexpr index MAX_KEPT = index(1) << 21;  // numbers of products kept by a thread (8 MiB in float32)

// The term of one head. Every tile of queries meets the same keys, so products [keys, buckets] of
// tiles of keys are kept, in as many slots as MAX_KEPT allows. Near offsets: each key's products are
// spread over queries as a column of s, in strips of VL keys that are transposed on the way. Far
// offsets have one bucket: a vector over the keys is added to the rows.
class KeyBucketTerm {
 public:
  // d_tokens [K, width], d_rows: where gradients are added, if they are wanted.
  void begin(const Problem& x, index b, index h, bool use_amx, real* d_tokens, const RowSums* d_rows) {
    const Operand& tokens = x.terms.right;
    keys_ = read_rows(tokens.value, b, h, 0, x.keys, tokens.features, 1, keys_scratch_);
    if (use_amx) bf16_ = HeadTokens(tokens.value, b, h, 0, x.keys, tokens.features).rows(bf16_scratch_);
    const index size = KEY_TILE * (round_up(x.map.buckets, PANEL) + VL);
    slots_.resize(std::clamp<index>((x.keys + KEY_TILE - 1) / KEY_TILE, 1, std::max<index>(1, MAX_KEPT / size)));
    for (Slot& slot : slots_) slot.tile = -1, slot.used = 0;
    clock_ = 0, d_tokens_ = d_tokens, d_rows_ = d_rows;
    for (int end = 0; end < 2; ++end) {
      far[end] = far_[end].of(x.keys + PAD);
      for (index j = 0; j < x.keys; ++j) far[end][j] = dot(keys_.at(j), end_row(x, end), rows.width());
      if (!d_rows) continue;
      far_sums[end] = far_sums_[end].of(x.keys + PAD);
      fill(far_sums[end], 0, x.keys + PAD);
    }
  }
  const real* end_row(const Problem& x, int end) const { return rows.row(end ? x.map.buckets - 1 : 0); }
  // Add the gradients of all slots, and of far offsets, to d_tokens and d_rows.
  void finish(const Problem& x) {
    for (Slot& slot : slots_) flush(slot);
    for (int end = 0; end < 2; ++end)
      for (index j = 0; j < x.keys; ++j) {
        real* to = d_rows_->data + (end ? x.map.buckets - 1 : 0) * rows.width();
        add_scaled(d_tokens_ + j * rows.width(), end_row(x, end), far_sums[end][j], rows.width());
        add_scaled(to, keys_.at(j), far_sums[end][j], rows.width());
      }
  }
  // s[i, j] += product[j, bucket] for the near pairs of the selected tile, s [rows, ld].
  void add(const Problem& x, const QueryTile& t, real* s, index ld) {
    const Bf16Rows keys_bf16 = bf16_.data ? bf16_.at(t.j0) : Bf16Rows{};
    current_ = nullptr;
    for_blocks(x, t, [&](index p, Range n) {
      if (!current_) select(x, t.j0 / KEY_TILE);
      current_->product.multiply(rows, {keys_.at(t.j0), keys_.ld, 1}, keys_bf16, p, n);
    });
    if (!current_) return;
    BucketTile& product = current_->product;
    if (has_scattered_pairs(x, t))
      return for_near_pairs(x, t, [&](index i, index j, index k) { s[i * ld + j] += product.row(j)[k]; });
    for_strips(x, t, [&](index j, Range visible, real* strip, index width) {
      for_key_rows(x, t, j, visible, [&](index key, index at, index n, index offset) {
        spread<false>(x.map, product.row(key), offset, strip + (key - j) * width + at, n);
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
  // s[t] += product[j0 + t, bucket] for the far pairs of row i in whole vectors of [a, b).
  void add_far(const Problem& x, const QueryTile& t, real* s, index i, index a, index b) const {
    for_far(x, t, i, a, b, [&](index u, int end) { store(s + u, load(s + u) + load(far[end] + t.j0 + u)); });
  }
  void collect_far(const Problem& x, const QueryTile& t, const real* ds, index i, index a, index b) {
    for_far(x, t, i, a, b, [&](index u, int end) {
      real* to = far_sums[end] + t.j0 + u;
      store(to, load(to) + load(ds + u));
    });
  }
  // The gradient of `add`: sums[j, bucket] += ds[i, j], the same strips the other way round.
  void collect(const Problem& x, const QueryTile& t, const real* ds, index ld) {
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
      for_key_rows(x, t, j, visible, [&](index key, index at, index n, index offset) {
        NUMBER::collect(x.map, strip + (key - j) * width + at, offset, into.row(key), n);
      });
    });
  }
  BucketRows rows;
  real *far[2], *far_sums[2];  // [K]: products with the first and the last bucket, and sums of their ds

 private:
  struct Slot {
    BucketTile product, sums;  // [keys of a tile, buckets]: key · row, and sums of ds
    index tile, used;          // tile of keys, -1 for none; time of the last use
  };
  // The slot of a tile of keys becomes the current one; if none has it, the least recently used.
  void select(const Problem& x, index tile) {
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
    const index n = std::min(KEY_TILE, x.keys - tile * KEY_TILE);
    current_->tile = tile;
    current_->product.begin(rows, n);
    if (d_rows_) current_->sums.begin(rows, n);
  }
  // Add the gradients of a slot: d_tokens += sums · rows, d_rows += sums^T · keys.
  void flush(Slot& slot) {
    if (!d_rows_ || slot.tile < 0) return;
    const index j = slot.tile * KEY_TILE;
    real* d_tokens = d_tokens_ + j * rows.width();
    if (bf16_.data) {
      const Rows keys{keys_.at(j), keys_.ld};
      const Bf16Rows columns = bf16_transpose(keys, slot.sums.size(), rows.features(), columns_scratch_);
      return slot.sums.pull_back(rows, columns, d_tokens, d_rows_->columns, d_rows_->ld);
    }
    slot.sums.times_rows(rows, d_tokens, rows.width());
    slot.sums.transposed_times(keys_.at(j), keys_.ld, d_rows_->data, rows.width());
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
  // Calls f(key, at, n, offset) for the VL keys from j on: a key's offset rises by one from row to row,
  // in reverse, for n of them, which begin at place `at` of a strip. Of images, along an image row.
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
  // Calls f(t, end) for the vectors of keys in [a, b) with far offsets to row i, before those that are
  // near (end 0: first bucket) and after them (end 1: last bucket).
  template <class F>
  static void for_far(const Problem& x, const QueryTile& t, index i, index a, index b, F f) {
    const Range near = t.near_keys(x.map, i);
    for (index u = a; u < std::min(b, near.begin); u += VL) f(u, 0);
    for (index u = std::max(a, near.end); u < b; u += VL) f(u, 1);
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
  std::vector<Slot> slots_;
  Slot* current_ = nullptr;  // of the tile of the last `add`; null if it had no near pairs
  index clock_ = 0;
  real* d_tokens_ = nullptr;
  const RowSums* d_rows_ = nullptr;
  Scratch keys_scratch_, bf16_scratch_, columns_scratch_, strip_, far_[2], far_sums_[2];
  Rows keys_;
  Bf16Rows bf16_;
};
}  // namespace posenc
