// Products of tiles of queries with the keys or values of a head, and their gradients: in `real` by
// gemm, or in bfloat16 by AMX, which callers need not tell apart.
#pragma once
#include "query_tile.h"
#include "rotation.h"
namespace posenc::NUMBER {
constexpr index MAX_KEPT = index(1) << 21;  // numbers of products kept by a thread (8 MiB in float32)

// Whether the packed keys of a row are kept: where heads are computed together, that is all heads'.
inline bool keeps_panels(const Problem& x) {
  return (x.pairs.kind == MIXING ? x.heads : 2) * x.keys * x.depth() <= MAX_KEPT;
}
inline bool can_use_amx(const Problem& x) {
  for (const Tokens* tokens : {&x.q, &x.k, &x.v})
    if (tokens->type != BFLOAT16) return false;
  // Tokens given in float32 ask for products in float32; of rows alone, BucketRows keeps what rounding leaves.
  for (const Operand* tokens : {&x.terms.left, &x.terms.right})
    if (*tokens && tokens->value.type != BFLOAT16) return false;
  return x.pairs.kind != BLOCKS && keeps_panels(x) && has_amx();
}

// Tokens as left factor, [rows, features]; for AMX in bfloat16 too, and transposed for gradients.
struct Factor {
  Rows rows;
  Bf16Rows bf16, transposed;
};
// The tokens of a tile of queries, with their memory.
class TileFactor : public Factor {
 public:
  void read(const Tokens& x, index b, index h, index first, index count, index features, bool use_amx,
            bool gradient) {
    rows = read_rows(x, b, h, first, count, features, 1, scratch);
    if (use_amx) narrow(HeadTokens(x, b, h, first, count, features));
    if (use_amx && gradient) transpose(count, features);
  }
  void narrow(const HeadTokens& x) { bf16 = x.rows(bf16_scratch_); }
  void transpose(index n, index features) { transposed = bf16_transpose(rows, n, features, transposed_scratch_); }
  Scratch scratch;  // of rows

 private:
  Scratch bf16_scratch_, transposed_scratch_;
};

inline Tokens split_of(Tokens x, index stride, index split) {
  x.data += split * stride * (x.type == REAL ? index(sizeof(real)) : 2);
  return x;
}
// The gradient of a head's tokens, data [keys, width]: in its own memory if that has the same layout, else
// in scratch that `write` copies from.
class TokenSums {
 public:
  // gradient: of the first split, `stride` numbers before the next. width: at least the features.
  void begin(const Tokens& gradient, index stride, index split, index b, index h, index keys, index features,
             index width, bool use_amx) {
    to_ = head_of(split_of(gradient, stride, split), b, h), keys_ = keys, features_ = features, width_ = width;
    const index rows = use_amx ? round_up(keys, AMX_TILE) : keys;  // tiles may write whole ones
    direct_ = to_.type == REAL && to_.token == width && features == width && rows == keys;
    data = direct_ ? reinterpret_cast<real*>(to_.data) : scratch_.of(rows * width);
    fill(data, 0, keys * width);
  }
  void write() const {
    if (!direct_) write(to_, 0, features_);
  }
  // Features from `first` on, to any tensor of the head.
  void write(const Tokens& to, index first, index features) const {
    for (index j = 0; j < keys_; ++j) write_row(to, row_of(to, 0, 0, j), data + j * width_ + first, 1, features);
  }
  real* data = nullptr;

 private:
  Tokens to_;
  Scratch scratch_;
  index keys_ = 0, features_ = 0, width_ = 0;
  bool direct_ = false;
};

// The keys or values of a head, [keys, features], as right factor.
class KeyFactor {
 public:
  // x: with a batch of one row and one head; in_real: the same read, which AMX needs not.
  void begin(const Tokens& x, Rows in_real, index keys, index features, bool use_amx) {
    tokens = x, rows = in_real, keys_ = keys, features_ = features, use_amx_ = use_amx, width_ = round_up(features, VL);
  }
  // For `multiply`: the transpose, in panels; `whole`: of all keys, else repacked for each tile of them.
  void pack(bool whole) {
    whole_ = whole;
    if (use_amx_) strips_ = HeadTokens(tokens, 0, 0, 0, keys_, features_).columns(strips_scratch_);
    else if (whole) pack(0, keys_);
  }
  // For sums by AMX, of tokens by weights.
  void pair() { pairs_ = HeadTokens(tokens, 0, 0, 0, keys_, features_).pairs(pairs_scratch_); }
  VnniStrips pairs(index j) const { return pairs_.at(j, 0); }  // from key j on
  // For `pull_back`; the gradient is what TokenSums::begin takes.
  void begin_gradient(const Tokens& to, index stride, index split, index b, index h, index features) {
    gradient.begin(to, stride, split, b, h, keys_, features, width_, use_amx_);
    if (!use_amx_) return;
    transposed_ld_ = round_up(keys_, PANEL) + VL;
    fill(transposed_ = transposed_scratch_.of(width_ * transposed_ld_), 0, width_ * transposed_ld_);
  }
  // Panels from key j on, a multiple of KEY_TILE.
  const real* panels(index j) {
    if (whole_) return panels_ + j * features_;
    pack(j, std::min(KEY_TILE, keys_ - j));
    return panels_;
  }
  // to [rows, ld] = x · tokens^T of the selected tile.
  void multiply(const QueryTile& tile, const Factor& x, real* to, index ld) {
    if (use_amx_) return multiply_rows(tile, {0, tile.rows}, tile.panel_keys(), x, to, ld);
    const real* from = panels(tile.j0);
    tile.for_panels([&](index at, index, Range m) {
      gemm(m.size(), PANEL, features_, {x.rows.at(m.begin), x.rows.ld, 1}, from + at * features_, PANEL,
           to + m.begin * ld + at, ld, false);
    });
  }
  // The same by AMX for some rows, and some keys that are visible to any of them; `to` from the first row on.
  void multiply_rows(const QueryTile& tile, Range some, Range keys, const Factor& x, real* to, index ld) const {
    tile.for_equal_panels(some, keys, [&](Range panels, Range m) {
      const index from = panels.begin * PANEL;
      amx_gemm(m.size(), panels.size() * PANEL, x.bf16.ld, x.bf16.at(m.begin), strips_.at(0, tile.j0 + from),
               to + (m.begin - some.begin) * ld + from, ld, false);
    });
  }
  // Without AMX, to [rows, width] += w · tokens: of `keys` keys of the selected tile from key `at` on, and
  // the rows m that for_panels has for them; w [rows, ld], from key `at` on, are their weights.
  void add_weighted(const QueryTile& tile, index at, index keys, Range m, const real* w, index ld, real* to) const {
    const real* from = rows.at(tile.j0 + at);
    gemm(m.size(), width_, keys, {w + m.begin * ld, ld, 1}, from, rows.ld, to + m.begin * width_, width_, true);
  }
  // Gradients through `multiply`, of the same keys and rows, from those of the products, w: gradient +=
  // w^T · x, and dx [rows, width] += w · tokens if it is wanted.
  void pull_back(const QueryTile& tile, index at, index keys, Range m, const Factor& x, const real* w, index ld,
                 real* dx) {
    const index j = tile.j0 + at;
    if (!use_amx_) {
      if (dx) add_weighted(tile, at, keys, m, w, ld, dx);
      return gemm(keys, width_, m.size(), {w + m.begin * ld, 1, ld}, x.rows.at(m.begin), x.rows.ld,
                  gradient.data + j * width_, width_, true);
    }
    // In whole AMX_DEPTHs, with the rows beside m.
    const index first = m.begin / AMX_DEPTH * AMX_DEPTH, depth = round_up(m.end - first, AMX_DEPTH);
    w += first * ld;
    panel_.set(std::min(tile.rows - first, depth), dx, [=](index i, index c) { return load(w + i * ld + c); });
    if (dx) amx_gemm(depth, width_, PANEL, panel_.rows, pairs(j), dx + first * width_, width_, true);
    amx_gemm(width_, PANEL, depth, x.transposed.at(0, first), panel_.pairs, transposed_ + j, transposed_ld_, true);
  }
  // After all tiles: `gradient` is complete.
  void end_gradient() {
    if (use_amx_) add_transpose(transposed_, transposed_ld_, keys_, width_, gradient.data);
  }
  Tokens tokens;
  Rows rows;
  TokenSums gradient;

 private:
  void pack(index j, index n) {
    real* to = panels_scratch_.of(round_up(n, PANEL) * features_);
    pack_transposed(rows.at(j), rows.ld, n, features_, to);
    panels_ = to;
  }
  Scratch panels_scratch_, strips_scratch_, pairs_scratch_, transposed_scratch_;
  const real* panels_ = nullptr;
  VnniStrips strips_, pairs_;
  Bf16Panel panel_;
  real* transposed_ = nullptr;  // [width, transposed_ld_]: sums by AMX, which are the gradient's transpose
  index keys_ = 0, features_ = 0, width_ = 0, transposed_ld_ = 0;
  bool use_amx_ = false, whole_ = true;
};
}  // namespace posenc
