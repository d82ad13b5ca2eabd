// What a term of the logits consists of: hooks, which workers call for every term in the list of logits.h,
// and the context that they get. What each term computes is in the comment of its class.
#pragma once
#include <tuple>
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
        level_unit(use_amx && !gradient ? 0.693147180559945309 : 1), dropout(x.dropout, x.seed) {}
  // Queries of a tile: one block where each has products with many buckets. Larger tiles share packed keys
  // among more queries; of few queries they leave threads idle.
  index tile_size() const {
    if (x.map.buckets > MANY_BUCKETS && !bucket_windows) return BLOCK;
    return gradient || x.queries < 768 ? 128 : 256;
  }
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
  KeyFactor k, v;       // of the batch row: k as factors of the logits
  real* dq = nullptr;   // [rows, width]
  Carry carry;
  real* levels = nullptr;   // [rows]: about the greatest logits so far; in the backward pass the LSE
  const double level_unit;  // of levels: by AMX, the forward pass has logits in powers of two
  const Dropout dropout;
};

// The hooks, in the order of calls. s, p and ds are logits, weights and gradients of the logits of the
// selected tile of keys, [rows, ld] or a row of these, in which keys are counted from the tile's first. A term
// derives from this and has those hooks that it needs, and
//   static bool serves(const Problem&);  // whether a call has the term
struct Term {
  bool present = false;
  void begin_head(Context&) {}
  void begin_row(Context&) {}  // of the batch
  void begin_tile(Context&) {}
  // For each tile of keys: what its rows need, and what is added to the products of all of them at once.
  void begin_keys(Context&) {}
  void add_tile(Context&, real* s, index ld) {}
  // To the logits of row i at its visible keys, of which there are some. Terms may add to whole vectors
  // around those, which are masked after this.
  void add(Context&, index i, Range visible, real* s) {}
  // For terms with sums over the later keys of a row, by which tiles go from the last to the first: in place
  // of `add`, the sum goes on over the tile; and whether the sums of all rows are at their limit.
  void carry_over(Context&, index i, Range visible, const real* s) {}
  bool carried_out(Context&) const { return true; }
  // In the backward pass: the gradient of `add`, by the same row; that of `add_tile`; and what is to be done
  // once all of a tile of queries, a batch row or a head is summed. Gradients that a term writes to are
  // memory that it has to set first.
  void collect(Context&, index i, Range visible, const real* p, real* ds) {}
  void collect_tile(Context&, const real* ds, index ld) {}
  void end_tile(Context&) {}
  void end_row(Context&) {}
  void end_head(Context&) {}
};

// Terms of all the classes T, whose hooks are found at compile time.
template <class... T>
class TermList {
 public:
  explicit TermList(const Problem& x) { (..., (get<T>().present = T::serves(x))); }
  template <class Some>
  Some& get() {
    return std::get<Some>(terms_);
  }
  // Calls f(term) for those that the call has.
  template <class F>
  void for_present(F f) {
    (..., (get<T>().present ? f(get<T>()) : void()));
  }
  // Whether a call has others than some.
  template <class... Some>
  static bool has_others(const Problem& x) {
    return (... || (!is_one_of<T, Some...> && T::serves(x)));
  }
  // Whether a call has one with a hook `add_tile`.
  static bool adds_to_tiles(const Problem& x) {
    return (... || (!std::is_same_v<decltype(&T::add_tile), decltype(&Term::add_tile)> && T::serves(x)));
  }

 private:
  template <class U, class... Some>
  static constexpr bool is_one_of = (... || std::is_same_v<U, Some>);
  std::tuple<T...> terms_;
};
}  // namespace posenc
