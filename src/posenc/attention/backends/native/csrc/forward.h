// Output and log-sum-exp, by online softmax over tiles of keys.
#pragma once
#include "tile.h"
namespace posenc::NUMBER {
class Forward {
 public:
  explicit Forward(const Problem& x)
      : x_(x), dropout_(x.dropout, x.seed), logits_(x, false), registers_(logits_.halves) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;
    width_ = round_up(x.value_dim, VL);
  }
  // Queries [first, last) of the batch rows [begin, end) of one head.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    const index size = tile_of(x_, logits_.windows, x_.queries >= 768 ? 256 : 128);
    for (index b = batch.begin; b < batch.end; ++b) {
      begin_row(b, h, split);
      for (index i = queries.begin; i < queries.end; i += size)
        run_tile(b, h, i, std::min(size, queries.end - i));
    }
  }
  void begin_head(index h, index) { logits_.begin_head(x_, h); }
  void begin_row(index b, index h, index) {
    logits_.begin_row(x_, b, h);
    if (logits_.halves)
      v_pairs_ = HeadTokens(x_.v, b, logits_.group, 0, x_.keys, x_.value_dim).pairs(pairs_scratch_);
  }
  void end_row(index, index, index) {}
  void end_head(index, index) {}
  Logits& logits() { return logits_; }
  void run_tile(index b, index h, index first, index n) {
    logits_.begin_tile(x_, b, h, first, n);
    QueryTile& tile = logits_.tile;
    real* s = s_.of(round_up(n, TILE) * ld_);
    real* out = out_.of(round_up(n, TILE) * width_);
    if (logits_.halves) p_ = scratch_of<uint16_t>(p_scratch_, round_up(n, TILE) * ld_);
    real* row_max = row_max_.of(n);
    real* row_sum = row_sum_.of(n);
    fill(out, 0, n * width_);
    fill(row_max, -INFINITY, n);
    fill(row_sum, 0, n);
    if (x_.value_rows) weights_.begin(logits_.value_rows, n);
    if (x_.pairs.sums()) logits_.carry.begin(n, 0);
    tile.each(x_, x_.pairs.from_last(), [&] {
      if (x_.pairs.kind == STICKS && logits_.carried_out(x_)) return;
      logits_.multiply(x_, s, ld_);
      if (x_.value_rows) logits_.for_blocks(x_, [&](index block, Range k) { weights_.clear(block, k); });
      for (index i = 0; i < n; ++i) softmax_row(b, h, i, s + i * ld_, row_max[i], row_sum[i], out + i * width_);
      if (logits_.halves) return add_values(s, out);
      for (index p = tile.panels.begin; p < tile.panels.end; ++p) {
        const Range m = tile.panel_rows[p];
        const index from = p * PANEL, keys = std::min<index>(PANEL, tile.width - from);
        if (m.size())
          gemm(m.size(), width_, keys, {s + m.begin * ld_ + from, ld_, 1},
               logits_.v.at(tile.j0 + from), logits_.v.ld, out + m.begin * width_, width_, true);
      }
    });
    if (x_.pairs.kind == STICKS) add_rest(b, h, n, out);
    if (x_.value_rows && logits_.halves)
      weights_.pull_back(logits_.value_rows, {}, out, nullptr, 0);
    else if (x_.value_rows)
      weights_.times_rows(logits_.value_rows, out, width_);
    for (index i = 0; i < n; ++i) {
      const bool empty = row_sum[i] == 0;
      write_row(x_.out, row_of(x_.out, b, h, first + i), out + i * width_, empty ? 0 : 1 / row_sum[i],
                x_.value_dim);
      x_.lse[(b * x_.heads + h) * x_.queries + first + i] =
          empty ? -INFINITY : logits_.level(x_, i) + row_max[i] + std::log(double(row_sum[i]));
    }
  }

 private:
  // out += s · v by tiles: panels that the same rows see at once.
  void add_values(const real* s, real* out) {
    const QueryTile& tile = logits_.tile;
    const index from = tile.panels.begin * PANEL, size = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      halve_row(s + i * ld_ + from, size, p_ + i * ld_ + from);
    tile.each_part([&](Range panels, Range m) {
      const index first = m.begin / TILE * TILE, rows = round_up(m.end, TILE) - first, p = panels.begin * PANEL;
      half_gemm(rows, width_, panels.size() * PANEL, HalfRows{p_, ld_}.at(first, p), v_pairs_.at(tile.j0 + p, 0),
                out + first * width_, width_, true);
    });
  }
  void softmax_row(index b, index h, index i, real* s, real& row_max, real& row_sum, real* out) {
    const QueryTile& tile = logits_.tile;
    const Range see = tile.seen(i), all{tile.panels.begin * PANEL, tile.panels.end * PANEL};
    if (!see.size()) return fill(s + all.begin, 0, all.size());
    if (x_.pairs.kind == STICKS) {
      row_max = 0, row_sum = 1;
      return stick_row(b, h, i, s);
    }
    logits_.add_terms(x_, s, i, see);
    const index from = see.begin / VL * VL, to = round_up(see.end, VL);
    vec m = splat(-INFINITY);
    for (index t = from; t < to; t += VL) {
      const vec v = masked(load(s + t), t, see);
      store(s + t, v);
      m = v > m ? v : m;
    }
    const real next = std::max(row_max, largest(m));
    const vec level = splat(next == -INFINITY ? real(0) : next);
    vec total{};
    for (index t = from; t < to; t += VL) {
      const vec p = exponential(load(s + t) - level);
      total += p;
      store(s + t, p);
    }
    const real shrink = row_max == next ? real(1) : std::exp(row_max - next);
    row_sum = row_sum * shrink + sum(total);
    if (shrink != 1) {
      scale_range(out, shrink, width_);
      if (x_.value_rows) weights_.scale_row(i, shrink);
    }
    row_max = next;
    drop(b, h, i, s, {from, to});
    fill(s + all.begin, 0, from - all.begin);
    fill(s + to, 0, all.end - to);
    if (x_.value_rows)
      collect(x_.map, s + see.begin, tile.j0 + see.begin + tile.base[i], weights_.row(i), see.size());
  }
  void drop(index b, index h, index i, real* s, Range keys) const {
    if (!(x_.dropout > 0)) return;
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + logits_.tile.i0 + i);
    for (index t = keys.begin; t < keys.end; t += VL)
      store(s + t, load(s + t) * dropout_.at(seed, logits_.tile.j0 + t));
  }
  void stick_row(index b, index h, index i, real* s) {
    const Range keys = logits_.stick_row(s, i);
    drop(b, h, i, s, keys);
  }
  // What is left of each row's stick, to its own key.
  void add_rest(index b, index h, index n, real* out) {
    for (index i = 0; i < n; ++i) {
      real rest = logits_.rest(x_, i);
      if (rest == 0) continue;
      const index own = logits_.own(i);
      const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + logits_.tile.i0 + i);
      if (x_.dropout > 0) rest *= dropout_.at(seed, own)[0];
      for (index d = 0; d < width_; ++d) out[i * width_ + d] += rest * logits_.v.at(own)[d];
    }
  }

  const Problem& x_;
  Dropout dropout_;
  index ld_, width_;
  Logits logits_;
  TileRegisters registers_;
  BucketTile weights_;
  Strips v_pairs_;
  uint16_t* p_ = nullptr;  // the weights of a tile
  Scratch s_, out_, row_max_, row_sum_, p_scratch_, pairs_scratch_;
};
}  // namespace posenc
