// A tile of queries, the keys visible to it, and the loop over tiles of keys that follows from them.
#pragma once
#include "amx.h"
namespace posenc::NUMBER {
constexpr index KEY_TILE = 512, QUERY_TILE = 256;  // multiples of PANEL and of BLOCK
constexpr index MANY_BUCKETS = 1024;  // more would make [queries, buckets] larger than the caches
// Whether products of queries with many buckets are kept for a window of them that moves along with
// the tiles of keys. So it can where buckets follow the offset alone, in every batch row.
inline bool needs_bucket_windows(const Problem& x) {
  if (x.map.buckets <= MANY_BUCKETS || !x.map.bucket || x.period) return false;
  if (x.terms.value_rows || x.pairs.kind != NONE) return false;
  for (index at = 0; at < (x.rows_batch ? x.batch : 1) * x.queries; ++at)
    if (x.base[at] != x.base[at - at % x.queries] - at % x.queries) return false;
  return true;
}

// Queries [i0, i0 + rows) of one batch row, and the tile of keys [j0, j0 + width) that is selected.
// Keys of a tile are counted from j0.
class QueryTile {
 public:
  void set(const Problem& x, index b, index h, index first, index count) {
    const index at = b * x.rows_batch + first;
    i0 = first, rows = count, low_ = x.low + at, high_ = x.high + at, base = x.base + at;
    if (x.bands) narrow(x.bands + 2 * h);
    keys = {x.keys, 0};
    regular = !x.period;
    for (index i = 0; i < rows; ++i) {
      if (low_[i] < high_[i]) {
        keys.begin = std::min<index>(keys.begin, low_[i]);
        keys.end = std::max<index>(keys.end, high_[i]);
      }
      regular &= base[i] == base[0] - i;
    }
  }
  // Select the keys from j to j + KEY_TILE.
  void select(const Problem& x, index j) {
    j0 = j, width = std::min(KEY_TILE, x.keys - j);
    panels = {std::max<index>(0, (keys.begin - j) / PANEL),
              (std::min(keys.end - j, width) + PANEL - 1) / PANEL};
    for (index p = panels.begin; p < panels.end; ++p) panel_rows[p] = {rows, 0};
    offsets = {INT32_MAX, INT32_MIN};
    std::fill_n(block_offsets, QUERY_TILE / BLOCK, offsets);
    for (index i = 0; i < rows; ++i) {
      const Range visible = visible_keys(i);
      if (!visible.size()) continue;
      for (index p = visible.begin / PANEL; p <= (visible.end - 1) / PANEL; ++p)
        panel_rows[p] = {std::min(panel_rows[p].begin, i), i + 1};
      block_offsets[i / BLOCK].extend({j0 + visible.begin + base[i], j0 + visible.end + base[i]});
    }
    for (const Range& part : block_offsets) offsets.extend(part);
  }
  // Rows with a near offset to any of the VL keys from j on: all, but of regular tiles, whose offset
  // j - i + c falls with the row.
  Range near_rows(const Map& map, index j) const {
    const Range visible = panel_rows[j / PANEL];
    if (!regular) return visible;
    const index first = j0 + j + base[0];
    return {std::max(visible.begin, first - map.high + 1), std::min(visible.end, first + VL - map.low)};
  }
  // The keys, in whole vectors, that near_rows has row i for: the others have far offsets.
  Range near_keys(const Map& map, index i) const {
    if (!regular) return {0, KEY_TILE};
    const index at = j0 + base[i];
    return {round_up(std::max<index>(0, map.low - at - VL + 1), VL), round_up(std::max<index>(0, map.high - at), VL)};
  }
  // Calls run() for every tile of keys with visible pairs, selected, from the first or the last on.
  // Causality and windows bound the loop here: `keys` is the union of the rows' intervals.
  template <class F>
  void for_key_tiles(const Problem& x, bool from_last, F run) {
    const index first = keys.begin / KEY_TILE, end = (keys.end + KEY_TILE - 1) / KEY_TILE;
    for (index t = first; t < end; ++t) {
      select(x, (from_last ? first + end - 1 - t : t) * KEY_TILE);
      if (offsets.begin < offsets.end) run();
    }
  }
  // Calls f(first key of the tile, keys, rows) for the panels of the selected tile with visible pairs.
  template <class F>
  void for_panels(F f) const {
    for (index p = panels.begin; p < panels.end; ++p)
      if (panel_rows[p].size()) f(p * PANEL, std::min<index>(PANEL, width - p * PANEL), panel_rows[p]);
  }
  // Calls f(block of queries, offsets of its pairs) for those with visible pairs in the selected tile.
  template <class F>
  void for_blocks(F f) const {
    for (index n = 0; n * BLOCK < rows; ++n)
      if (block_offsets[n].size()) f(n, block_offsets[n]);
  }
  // Calls f(panels, rows) for runs of panels of some keys that are visible to the same of some rows, one
  // large product each: whole tiles of AMX around the rows that see any key of them.
  template <class F>
  void for_equal_panels(Range some, Range some_keys, F f) const {
    const auto rows_of = [&](index p) {
      const Range m = panel_rows[p];
      return Range{std::max(m.begin, some.begin) / AMX_TILE * AMX_TILE, round_up(std::min(m.end, some.end), AMX_TILE)};
    };
    const index stop = some_keys.end / PANEL;
    for (index p = some_keys.begin / PANEL, end; p < stop; p = end) {
      const Range m = rows_of(p);
      for (end = p + 1; end < stop && rows_of(end) == m;) ++end;
      if (m.size()) f(Range{p, end}, m);
    }
  }
  Range panel_keys() const { return {panels.begin * PANEL, panels.end * PANEL}; }
  // The keys of the tile that are visible to row i.
  Range visible_keys(index i) const {
    return {std::max<index>(0, low_[i] - j0), std::min<index>(width, high_[i] - j0)};
  }
  Range all_visible_keys(index i) const { return {low_[i], high_[i]}; }
  bool is_visible(index i, index key) const { return key >= low_[i] && key < high_[i]; }
  index i0, rows, j0, width;
  Range keys;     // visible to any row
  Range panels;   // of the selected tile, with any visible key
  Range offsets;  // of the selected tile's visible pairs
  Range panel_rows[KEY_TILE / PANEL];       // first to last row with a visible key in the panel
  Range block_offsets[QUERY_TILE / BLOCK];  // offsets of the visible pairs of a block of rows
  const int32_t* base;
  bool regular;  // base falls by one from row to row: offsets are key - query + a constant

 private:
  // To the keys at the offsets of a band.
  void narrow(const int32_t* band) {
    for (index i = 0; i < rows; ++i) {
      ends_[0][i] = std::max(low_[i], band[0] - base[i]);
      ends_[1][i] = std::min(high_[i], band[1] - base[i] + 1);
    }
    low_ = ends_[0], high_ = ends_[1];
  }
  const int32_t *low_, *high_;
  int32_t ends_[2][QUERY_TILE];  // where a band narrows them
};
}  // namespace posenc
