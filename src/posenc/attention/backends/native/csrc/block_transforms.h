// PaTH: logits of queries that every block of keys transforms, as they go on to the blocks before it.
#pragma once
#include "gemm.h"
#include "problem.h"
namespace posenc::NUMBER {
// A query whose key of offset 0 is in block n has s = diagonal[query, key - 64 n] in this
// block, and x_J · k[key] in block J before it, where x_{n-1} = q and x_{J-1} = x_J · M_J: the state
// of a query is a vector of D features. Blocks have PANEL = 64 keys.
// data: M [B, H, blocks, D, D], diagonal [B, H, Q, 64]; gradient: [splits, B, H, blocks, D, D] and
// [B, H, Q, 64]. sizes: blocks. D is a multiple of VL; keys of offset 0 rise with the query, so that the
// queries of a tile that a block transforms are its last ones.
class BlockTransforms {
 public:
  void begin_row(const Problem& x, index b, index h) {
    width_ = x.dim, count_ = x.pairs.sizes[0], keys_ = x.keys;
    matrices_ = x.pairs.data[0] + (b * x.heads + h) * count_ * width_ * width_;
  }
  void begin_gradient(const Problem& x, index b, index h, index split) {
    d_matrices_ =
        x.pairs.gradient[0] + ((split * x.batch + b) * x.heads + h) * count_ * width_ * width_;
  }
  // q [rows, ld]; keep: states of all blocks, for gradients, else of a block and the one before.
  void begin_tile(const Problem& x, index b, index h, index first, index rows, const int32_t* base,
                  const real* q, index ld, bool keep) {
    rows_ = rows, q_ = q, q_ld_ = ld, slots_ = keep ? count_ + 1 : 2, base_ = base;
    states_ = states_scratch_.of(slots_ * rows * width_);
    fill(states_, 0, slots_ * rows * width_);  // no block sets those of padding, which products read
    const index at = ((b * x.heads + h) * x.queries + first) * PANEL;
    diagonal_ = x.pairs.data[1] + at;
    d_diagonal_ = x.pairs.gradient[1] ? x.pairs.gradient[1] + at : nullptr;
    propagate = true;
  }
  // Logits of the selected tile of keys, panels [begin, end) of k_panels, from the last to the first:
  // a block's state is final when its turn comes.
  void products(index j0, Range panels, const real* k_panels, real* s, index ld) {
    for (index p = panels.end - 1; p >= panels.begin; --p) {
      const index block = j0 / PANEL + p, here = first_row(block), later = first_row(block + 1);
      for (index i = here; i < later; ++i) {
        std::copy_n(diagonal_ + i * PANEL, PANEL, s + i * ld + p * PANEL);
        if (propagate && block) std::copy_n(q_ + i * q_ld_, width_, state(block - 1) + i * width_);
      }
      const index n = rows_ - later;
      if (!n) continue;
      const real* x = state(block) + later * width_;
      gemm(n, PANEL, width_, {x, width_, 1}, k_panels + p * PANEL * width_, PANEL,
           s + later * ld + p * PANEL, ld, false);
      if (propagate && block)
        gemm(n, width_, width_, {x, width_, 1}, matrix(block), width_, state(block - 1) + later * width_,
             width_, false);
    }
  }
  // Gradients, tiles and panels from the first to the last. Before block J, dq is the gradient by the
  // state x_{J-1}; after it, that by x_J: dx_J = dx_{J-1} · M_J^T + ds · k.
  void collect(index j0, Range panels, const real* k, index k_ld, const real* ds, index ld, real* dq,
               real* dk) {
    real* transposed = transposed_.of(width_ * round_up(width_, PANEL));
    for (index p = panels.begin; p < panels.end; ++p) {
      const index block = j0 / PANEL + p, here = first_row(block), later = first_row(block + 1), n = rows_ - later;
      for (index i = here; i < later; ++i) std::copy_n(ds + i * ld + p * PANEL, PANEL, d_diagonal_ + i * PANEL);
      if (!n) continue;
      const real *x = state(block) + later * width_, *d = ds + later * ld + p * PANEL;
      real* to = dq + later * width_;
      gemm(width_, width_, n, {x, 1, width_}, to, width_, d_matrices_ + block * width_ * width_, width_, true);
      const real* m = matrix(block);
      for (index a = 0; a < width_; ++a)
        for (index c = 0; c < width_; ++c) transposed[c * width_ + a] = m[a * width_ + c];
      real* next = next_.of(n * width_);
      gemm(n, width_, width_, {to, width_, 1}, transposed, width_, next, width_, false);
      const index keys = std::min<index>(PANEL, keys_ - block * PANEL);
      gemm(n, width_, keys, {d, ld, 1}, k + block * PANEL * k_ld, k_ld, next, width_, true);
      gemm(keys, width_, n, {d, 1, ld}, x, width_, dk + block * PANEL * width_, width_, true);
      std::copy_n(next, n * width_, to);
    }
  }
  bool propagate = true;  // whether products compute the states of the blocks before; once is enough

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
  const real *matrices_ = nullptr, *diagonal_ = nullptr, *q_ = nullptr;
  real *d_matrices_ = nullptr, *d_diagonal_ = nullptr, *states_ = nullptr;
  const int32_t* base_ = nullptr;
  index width_ = 0, count_ = 0, rows_ = 0, q_ld_ = 0, slots_ = 2, keys_ = 0;
};
}  // namespace posenc
