// A tile of queries, and what it sees of a tile of keys.
#pragma once
#include "rotation.h"
#include "terms.h"
namespace posenc::NUMBER {
// The transpose of tokens in panels: of all of them, or of a tile at a time.
class Panels {
 public:
  void begin(Rows x, index count, index features, bool whole) {
    x_ = x, count_ = count, features_ = features, whole_ = whole;
    if (whole) pack(0, count);
  }
  // From the tile of keys at j on.
  const real* at(index j) {
    if (whole_) return data_ + j * features_;
    pack(j, std::min(KEY_TILE, count_ - j));
    return data_;
  }

 private:
  void pack(index j, index n) {
    real* to = scratch_.of(round_up(n, PANEL) * features_);
    pack_transposed(x_.at(j), x_.ld, n, features_, to);
    data_ = to;
  }
  Scratch scratch_;
  Rows x_;
  const real* data_ = nullptr;
  index count_ = 0, features_ = 0;
  bool whole_ = true;
};

constexpr index MANY = 1024;  // buckets whose products are long rows
// Whether of many buckets a block of queries needs those of few offsets at a time.
inline bool windowed(const Problem& x) {
  if (x.map.buckets <= MANY || !x.map.bucket || x.value_rows || x.pairs.kind != NONE) return false;
  for (index at = 0; at < (x.rows_batch ? x.batch : 1) * x.queries; ++at)
    if (x.base[at] != x.base[at - at % x.queries] - at % x.queries) return false;
  return true;
}
// Queries of a tile: few where rows are long.
inline index tile_of(const Problem& x, bool windowed, index usual) {
  return x.map.buckets > MANY && !windowed ? BLOCK : usual;
}

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
  // Calls f(panels, rows) for panels of the chosen tile that the same rows see, which are any.
  template <class F>
  void each_part(F f) const {
    for (index p = panels.begin, end; p < panels.end; p = end) {
      const Range rows = panel_rows[p];
      for (end = p + 1; end < panels.end; ++end)
        if (panel_rows[end].begin != rows.begin || panel_rows[end].end != rows.end) break;
      if (rows.size()) f(Range{p, end}, rows);
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
}  // namespace posenc
