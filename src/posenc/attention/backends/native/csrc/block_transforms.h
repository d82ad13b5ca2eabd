// PaTH: logits of queries that every block of keys transforms, as they go on to the blocks before it.
#pragma once
#include "term.h"
namespace posenc::NUMBER {
// A query whose key of offset 0 is in block n has s = diagonal[query, key - 64 n] in this
// block, and x_J · k[key] in block J before it, where x_{n-1} = q and x_{J-1} = x_J · M_J: the state
// of a query is a vector of D features. Blocks have PANEL = 64 keys.
// data: M [B, H, blocks, D, D], diagonal [B, H, Q, 64]; gradient: [splits, B, H, blocks, D, D] and
// [B, H, Q, 64]. sizes: blocks. D is a multiple of VL; keys of offset 0 rise with the query, so that the
// queries of a tile that a block transforms are its last ones.
class BlockTransforms : public Term {
 public:
  static bool serves(const Problem& x) { return x.pairs.kind == BLOCKS; }
  void begin_row(const Context& at) {
    const Pairs& pairs = at.x.pairs;
    width_ = at.x.dim, count_ = pairs.sizes[0];
    const index head = at.b * at.x.heads + at.h, size = count_ * width_ * width_;
    matrices_ = pairs.data[0] + head * size;
    if (at.gradient) d_matrices_ = pairs.gradient[0] + (at.split * at.x.batch * at.x.heads + head) * size;
  }
  void begin_tile(const Context& at) {
    rows_ = at.tile.rows, base_ = at.tile.base;
    slots_ = at.gradient ? count_ + 1 : 2;  // gradients read the states of all blocks
    states_ = states_scratch_.of(slots_ * rows_ * width_);
    fill(states_, 0, slots_ * rows_ * width_);  // no block sets those of padding, which products read
    diagonal_ = at.row(0) * PANEL, next_block_ = at.x.keys;
  }
  // Logits of the selected tile, from the last panel to the first: a block's state is final when its turn
  // comes, and the state of the block before is computed the first time.
  void add_tile(Context& at, real* s, index ld) {
    const Range panels = at.tile.panels;
    const real *k_panels = at.k.panels(at.tile.j0), *diagonal = at.x.pairs.data[1] + diagonal_;
    for (index p = panels.end - 1; p >= panels.begin; --p) {
      const index block = at.tile.j0 / PANEL + p, here = first_row(block), later = first_row(block + 1);
      const bool propagate = block && block < next_block_;
      next_block_ = std::min(next_block_, block);
      for (index i = here; i < later; ++i) {
        std::copy_n(diagonal + i * PANEL, PANEL, s + i * ld + p * PANEL);
        if (propagate) std::copy_n(at.q.rows.at(i), width_, state(block - 1) + i * width_);
      }
      const index n = rows_ - later;
      if (!n) continue;
      const real* x = state(block) + later * width_;
      gemm(n, PANEL, width_, {x, width_, 1}, k_panels + p * PANEL * width_, PANEL,
           s + later * ld + p * PANEL, ld, false);
      if (propagate)
        gemm(n, width_, width_, {x, width_, 1}, matrix(block), width_, state(block - 1) + later * width_,
             width_, false);
    }
  }
  // Gradients, tiles and panels from the first to the last. Before block J, dq is the gradient by the
  // state x_{J-1}; after it, that by x_J: dx_J = dx_{J-1} · M_J^T + ds · k.
  void collect_tile(Context& at, const real* ds, index ld) {
    const Range panels = at.tile.panels;
    const Rows k = at.k.rows;
    real* d_diagonal = at.x.pairs.gradient[1] + diagonal_;
    real* transposed = transposed_.of(width_ * round_up(width_, PANEL));
    for (index p = panels.begin; p < panels.end; ++p) {
      const index block = at.tile.j0 / PANEL + p, here = first_row(block), later = first_row(block + 1);
      const index n = rows_ - later;
      for (index i = here; i < later; ++i) std::copy_n(ds + i * ld + p * PANEL, PANEL, d_diagonal + i * PANEL);
      if (!n) continue;
      const real *x = state(block) + later * width_, *d = ds + later * ld + p * PANEL;
      real* to = at.dq + later * width_;
      gemm(width_, width_, n, {x, 1, width_}, to, width_, d_matrices_ + block * width_ * width_, width_, true);
      const real* m = matrix(block);
      for (index a = 0; a < width_; ++a)
        for (index c = 0; c < width_; ++c) transposed[c * width_ + a] = m[a * width_ + c];
      real* next = next_.of(n * width_);
      gemm(n, width_, width_, {to, width_, 1}, transposed, width_, next, width_, false);
      const index keys = std::min<index>(PANEL, at.x.keys - block * PANEL);
      gemm(n, width_, keys, {d, ld, 1}, k.at(block * PANEL), k.ld, next, width_, true);
      gemm(keys, width_, n, {d, 1, ld}, x, width_, at.k.gradient.data + block * PANEL * width_, width_, true);
      std::copy_n(next, n * width_, to);
    }
  }

 private:
  // The first row of the tile whose key of offset 0 is in this block or a later one.
  index first_row(index block) const {
    index i = 0;
    while (i < rows_ && -index(base_[i]) < block * PANEL) ++i;
    return i;
  }
  real* state(index block) const { return states_ + (block % slots_) * rows_ * width_; }
  const real* matrix(index block) const { return matrices_ + block * width_ * width_; }

  Scratch states_scratch_, transposed_, next_;
  const real* matrices_ = nullptr;
  real *d_matrices_ = nullptr, *states_ = nullptr;
  const int32_t* base_ = nullptr;
  index width_ = 0, count_ = 0, rows_ = 0, slots_ = 2;
  index diagonal_ = 0;    // of the tile's first query
  index next_block_ = 0;  // blocks from here on have computed the states before theirs
};
}  // namespace posenc
