// What a term of the logits consists of: hooks, which workers call for every term in the list of logits.h,
// and the context that they get. What each term computes is in the comment of its class.
#pragma once
#include "products.h"
namespace posenc::NUMBER {
// Sums of the rows of a tile of queries, [rows]: `sums` over the keys after a tile of keys, carried
// from the last tile to the first; `d_sums`, of gradients over the keys before it, carried from the
// first to the last. The latter need the former in reverse: sums at every tile are kept. In double,
// as they may be over many tokens.
class Carry {
 public:
  void begin(index rows, index tiles) {
    sums.assign(rows, 0);
    d_sums.assign(rows, 0);
    kept_.resize(rows * tiles);
  }
  void keep(index tile) { std::copy_n(sums.data(), sums.size(), kept_.data() + tile * sums.size()); }
  void resume(index tile) { std::copy_n(kept_.data() + tile * sums.size(), sums.size(), sums.data()); }
  std::vector<double> sums, d_sums;

 private:
  std::vector<double> kept_;  // [tiles, rows]
};

// A worker's head, batch row, tile of queries and selected tile of keys, and its operands.
struct Context {
  Context(const Problem& problem, bool backward)
      : x(problem), gradient(backward), use_amx(can_use_amx(x)), bucket_windows(needs_bucket_windows(x)),
        level_unit(use_amx ? 0.693147180559945309 : 1), dropout(x.dropout, x.seed) {}
  // Row i of the tile among those of all batch rows and heads.
  index row(index i) const { return (b * x.heads + h) * x.queries + tile.i0 + i; }
  const Problem& x;
  const bool gradient;        // of the backward pass
  const bool use_amx;         // products are of bfloat16, by AMX
  const bool bucket_windows;  // products of queries with buckets are kept for a window of these
  index b = 0, h = 0, group = 0;
  index part = 0, split = 0;  // where gradients by offset or bucket go, and those by key
  QueryTile tile;
  TileFactor q, d_out;  // of the tile: q as factors of the logits, times the scale, and dO
  KeyFactor k, v;       // k as factors of the logits
  real* dq = nullptr;   // [rows, width], of q without its scale
  Carry carry;
  const real* levels = nullptr;  // [rows]: about the greatest logits so far, or the LSE in the backward pass
  const double level_unit;       // of levels: by AMX, the forward pass has logits in powers of two
  const Dropout dropout;
};

// The hooks, in the order of calls; s and ds are of the selected tile of keys, [rows, ld] or a row of
// these, p the weights. A term derives from this and has those that it needs, and
//   static bool serves(const Problem&): whether a call has the term.
struct Term {
  bool present = false;
  void begin_head(const Context&) {}
  void begin_row(const Context&) {}  // of the batch
  void begin_tile(const Context&) {}
  // A tile of keys is selected: to its products of queries and keys, s, those that are computed for the
  // whole tile at once are added.
  void begin_keys(const Context&) {}
  void add_tile(Context&, real* s, index ld) {}
  // To the logits of row i for its visible keys, of which there are some. Terms may add to whole vectors
  // around those, which are masked after this.
  void add(Context&, index i, Range visible, real* s) {}
  // In place of `add`, for terms with sums over the later keys of a row: the sum goes on over those of
  // the tile. Tiles go from the last to the first.
  void carry_over(Context&, index i, Range visible, const real* s) {}
  // Whether the sums of all rows are at their limit.
  bool carried_out(const Context&) const { return true; }
  // In the backward pass alone, gradients of `add`, then of `add_tile`, and to where they go in the end.
  void collect(Context&, index i, Range visible, const real* p, real* ds) {}
  void collect_tile(Context&, const real* ds, index ld) {}
  void end_tile(Context&) {}
  void end_row(Context&) {}
  void end_head(const Context&) {}
};
}  // namespace posenc
