// Gradients of everything, from the log-sum-exp of the forward pass.
#pragma once
#include "tile.h"
namespace posenc::NUMBER {
class Backward {
 public:
  explicit Backward(const Problem& x)
      : x_(x), dropout_(x.dropout, x.seed), logits_(x, true), registers_(logits_.halves) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;
    width_ = round_up(x.depth(), VL), value_width_ = round_up(x.value_dim, VL);
    columns_ld_ = round_up(x.keys, PANEL) + VL;
  }
  // Queries [first, last) of the batch rows [begin, end) of one head; part: of the sums of rows.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    const index size = tile_of(x_, logits_.windows, 128);
    for (index b = batch.begin; b < batch.end; ++b) {
      begin_row(b, h, split);
      for (index i = queries.begin; i < queries.end; i += size)
        run_tile(b, h, i, std::min(size, queries.end - i));
      end_row(b, h, split);
    }
    end_head(h, part);
  }
  void begin_head(index h, index part) {
    logits_.begin_head(x_, h);
    const index slot = part * x_.heads + h;
    line_ = x_.bias_by_offset_gradient ? x_.bias_by_offset_gradient + slot * x_.bias_by_offset_count : nullptr;
    begin(d_left_, left_width_, x_.left, slot);
    begin(d_right_, right_width_, x_.right, slot);
    if (x_.value_rows)
      d_value_.begin(x_.map.buckets, x_.value_dim, logits_.halves, x_.value_gradient + slot * x_.map.buckets * x_.value_dim);
    if (x_.pairs.kind == DISTANCE) logits_.distance.begin_gradient(x_.pairs, slot);
  }
  void end_head(index, index) {
    if (x_.left.rows) d_left_.write();
    if (x_.right.rows) d_right_.write();
    if (x_.value_rows) d_value_.write();
    if (x_.pairs.kind == DISTANCE) logits_.distance.end_gradient();
  }
  Logits& logits() { return logits_; }
  void begin_row(index b, index h, index split) {
    dk_ = sums_of(dk_to_, x_.dk, x_.dk_split, b, h, split, width_, dk_scratch_);
    dv_ = sums_of(dv_to_, x_.dv, x_.dv_split, b, h, split, value_width_, dv_scratch_);
    column_ = nullptr;
    if (x_.column_gradient) {
      column_ = x_.column_gradient + ((split * x_.batch + b) * x_.heads + h) * x_.keys;
      std::fill_n(column_, x_.keys, 0.0);
    }
    if (x_.right.tokens_gradient.data)
      right_ = sums_of(right_to_, x_.right.tokens_gradient, x_.right_split, b, h, split, right_width_,
                       right_scratch_);
    else
      right_ = dk_;
    logits_.begin_row(x_, b, h, right_, &d_right_);
    if (x_.pairs.kind == BLOCKS) logits_.blocks.begin_gradient(x_, b, h, split);
    if (logits_.halves) {
      k_pairs_ = HeadTokens(logits_.k_source, 0, 0, 0, x_.keys, x_.depth()).pairs(pairs_scratch_);
      v_strips_ = HeadTokens(x_.v, b, logits_.group, 0, x_.keys, x_.value_dim).columns(strips_scratch_);
      fill(dk_columns_ = dk_columns_scratch_.of(width_ * columns_ld_), 0, width_ * columns_ld_);
      fill(dv_columns_ = dv_columns_scratch_.of(value_width_ * columns_ld_), 0, value_width_ * columns_ld_);
    } else {
      v_panels_.begin(logits_.v, x_.keys, x_.value_dim, Logits::keeps_panels(x_));
    }
  }
  void end_row(index b, index h, index split) {
    if (x_.right.rows) {
      logits_.right.finish(x_);
      if (right_ != dk_) write_sums(right_to_, b, h, right_, right_width_, x_.right.features);
    }
    if (logits_.halves) {
      add_transpose(dk_columns_, columns_ld_, x_.keys, width_, dk_);
      add_transpose(dv_columns_, columns_ld_, x_.keys, value_width_, dv_);
    }
    for (index j = 0; j < x_.keys && x_.rotated; ++j)
      rotate_back(x_, x_.k_rotary, b, logits_.group, j, dk_ + j * width_);
    write_sums(dk_to_, b, h, dk_, width_, x_.dim);
    if (x_.rank) write_sums(split_of(x_.dk_factor, x_.dk_factor_split, split), b, h, dk_ + x_.dim, width_, x_.rank);
    write_sums(dv_to_, b, h, dv_, value_width_, x_.value_dim);
  }
  void run_tile(index b, index h, index first, index n) {
    logits_.begin_tile(x_, b, h, first, n);
    QueryTile& tile = logits_.tile;
    real* s = s_.of(round_up(n, TILE) * ld_);
    real* ds = ds_.of(round_up(n, TILE) * ld_);
    real* dq = dq_.of(round_up(n, DEPTH) * width_);
    fill(dq, 0, n * width_);
    const Rows g = read_rows(x_.gradient, b, h, first, n, x_.value_dim, 1, g_scratch_);
    HalfRows g_half;
    if (logits_.halves) {
      g_half = HeadTokens(x_.gradient, b, h, first, n, x_.value_dim).rows(half_scratch_);
      g_columns_ = half_transpose(g, n, x_.value_dim, g_columns_scratch_);
      q_columns_ = half_transpose(logits_.q, n, x_.depth(), q_columns_scratch_);
    }
    const Rows out = read_rows(x_.out, b, h, first, n, x_.value_dim, 1, out_scratch_);
    delta_ = delta_scratch_.of(n);
    lse_ = lse_scratch_.of(n);
    for (index i = 0; i < n; ++i) {
      lse_[i] = real(x_.lse[(b * x_.heads + h) * x_.queries + first + i] - logits_.level(x_, i));
      vec total{};
      for (index d = 0; d < value_width_; d += VL) total += load(g.at(i) + d) * load(out.at(i) + d);
      delta_[i] = sum(total);
    }
    if (x_.left.rows) {
      d_left_tile_.begin(logits_.left_rows, n, logits_.windows);
      fill(dx_.of(round_up(n, TILE) * left_width_), 0, n * left_width_);
      if (logits_.halves)
        left_columns_ = half_transpose(logits_.left_tokens, n, x_.left.features, left_columns_scratch_);
    }
    if (x_.value_rows) {
      weights_.begin(logits_.value_rows, n);
      g_rows_.begin(logits_.value_rows, n);
    }
    if (column_) row_sums_.assign(n, 0);
    index live = 0;
    if (x_.pairs.sums()) live = sweep(b, h, n, s, g);
    if (x_.pairs.kind == BLOCKS) {
      tile.each(x_, true, [&] { logits_.multiply(x_, s, ld_); });
      logits_.blocks.chain = false;
    }
    tile.each(x_, false, [&] {
      const index j = tile.j0;
      if (j < live) return;
      if (x_.pairs.sums()) logits_.carry.resume(j / KEY_TILE);
      logits_.multiply(x_, s, ld_);
      const real* values = logits_.halves ? nullptr : v_panels_.at(j);
      if (logits_.halves)
        tile.each_part([&](Range panels, Range m) { logits_.tile_columns(m, panels, g_half, v_strips_, ds, ld_); });
      else
        for_panels([&](index at, index, Range m) {
          gemm(m.size(), PANEL, x_.value_dim, {g.at(m.begin), g.ld, 1}, values + at * x_.value_dim, PANEL,
               ds + m.begin * ld_ + at, ld_, false);
        });
      prepare_buckets(g, g_half);
      for (index i = 0; i < n; ++i) row(b, h, i, s + i * ld_, ds + i * ld_);
      if (logits_.given.data) logits_.give_back(ds, ld_);
      if (x_.right.rows) logits_.right.collect(x_, tile, ds, ld_);
      if (x_.pairs.kind == BLOCKS)
        logits_.blocks.collect(j, tile.panels, logits_.k.data, logits_.k.ld, ds, ld_, dq, dk_);
      for_panels([&](index at, index keys, Range m) {
        if (x_.pairs.kind < MIXING) add_products(at, keys, m, ds + at, ld_, dq);
        if (logits_.halves) return add_values(at, m, s + at);
        const real* p = s + m.begin * ld_ + at;
        gemm(keys, value_width_, m.size(), {p, 1, ld_}, g.at(m.begin), g.ld,
             dv_ + (j + at) * value_width_, value_width_, true);
      });
    });
    // Gradients by key that add up to 0 in each row: rounding would grow in sums over many keys.
    for (index i = 0; i < n && column_ && !x_.part; ++i)
      if (tile.all_seen(i).size()) column_[tile.all_seen(i).end - 1] -= row_sums_[i];
    if (x_.left.rows) end_left(b, h, first, n);
    if (x_.pairs.kind != MIXING) write_queries(b, h, first, n);
    if (x_.value_rows && logits_.halves)
      weights_.pull_back(logits_.value_rows, g_columns_, nullptr, d_value_.columns, d_value_.ld);
    else if (x_.value_rows)
      weights_.transposed_times(g.data, g.ld, d_value_.data, value_width_);
  }
  // Gradients of queries and keys from those of the logits of the last tile of queries.
  void add_logit_gradients(index b, index h, index first, index n, const real* ds, index ld) {
    real* dq = dq_.of(0);
    logits_.tile.each(x_, false, [&] {
      const index j = logits_.tile.j0;
      for_panels([&](index at, index keys, Range m) {
        add_products(at, keys, m, ds + j + at, ld, dq);
      });
    });
    write_queries(b, h, first, n);
  }

 private:
  // Zeros [keys, width] for sums that end_row writes: where they go, if they can be summed there.
  real* sums_of(Tokens& to, const Tokens& gradient, index stride, index b, index h, index split,
                index width, Scratch& scratch) const {
    to = split_of(gradient, stride, split);
    const index rows = logits_.halves ? round_up(x_.keys, TILE) : x_.keys;  // tiles may write whole ones
    real* sums = to.type == REAL && to.token == width && rows == x_.keys ? reinterpret_cast<real*>(row_of(to, b, h, 0))
                                                      : scratch.of(rows * width);
    fill(sums, 0, x_.keys * width);
    return sums;
  }
  static Tokens split_of(Tokens x, index stride, index split) {
    x.data += split * stride * (x.type == REAL ? index(sizeof(real)) : 2);
    return x;
  }
  void write_sums(const Tokens& to, index b, index h, const real* sums, index width, index features) const {
    if (reinterpret_cast<const char*>(sums) == row_of(to, b, h, 0)) return;
    for (index j = 0; j < x_.keys; ++j) write_row(to, row_of(to, b, h, j), sums + j * width, 1, features);
  }
  // A panel of x [rows, ld] in bfloat16, of the rows m and those beside them; the first of them.
  index set_panel(const real* x, index ld, Range m, bool both) {
    const index first = m.begin / DEPTH * DEPTH;
    panel_.set(std::min(logits_.tile.rows, round_up(m.end, DEPTH)) - first, both,
               [=](index i, index c) { return load(x + (first + i) * ld + c); });
    return first;
  }
  // Gradients of a panel's values by the weights s of the rows m.
  void add_values(index at, Range m, const real* s) {
    const index first = set_panel(s, ld_, m, false);
    half_gemm(value_width_, PANEL, round_up(m.end - first, DEPTH), g_columns_.at(0, first), panel_.pairs,
              dv_columns_ + logits_.tile.j0 + at, columns_ld_, true);
  }
  // Gradients of the rows m and some keys of a panel, by their product.
  void add_products(index at, index keys, Range m, const real* d, index ld, real* dq) {
    const index j = logits_.tile.j0 + at;
    if (logits_.halves) {
      const index first = set_panel(d, ld, m, true), depth = round_up(m.end - first, DEPTH);
      half_gemm(depth, width_, PANEL, panel_.rows, k_pairs_.at(j, 0), dq + first * width_, width_, true);
      return half_gemm(width_, PANEL, depth, q_columns_.at(0, first), panel_.pairs, dk_columns_ + j, columns_ld_, true);
    }
    d += m.begin * ld;
    gemm(m.size(), width_, keys, {d, ld, 1}, logits_.k.at(j), logits_.k.ld, dq + m.begin * width_, width_,
         true);
    gemm(keys, width_, m.size(), {d, 1, ld}, logits_.q.at(m.begin), logits_.q.ld, dk_ + j * width_, width_,
         true);
  }
  void write_queries(index b, index h, index first, index n) {
    const bool scaled = x_.left.rows && !x_.left.tokens_gradient.data;
    for (index i = 0; i < n; ++i) {
      real* d = dq_.of(0) + i * width_;
      rotate_back(x_, x_.q_rotary, b, h, first + i, d);
      write_row(x_.dq, row_of(x_.dq, b, h, first + i), d, scaled ? 1 : real(x_.scale), x_.dim);
      if (x_.rank) write_row(x_.dq_factor, row_of(x_.dq_factor, b, h, first + i), d + x_.dim, 1, x_.rank);
    }
  }
  // Carry sums over all tiles, from the last to the first; the first key of those that matter.
  index sweep(index b, index h, index n, real* s, Rows g) {
    QueryTile& tile = logits_.tile;
    Carry& carry = logits_.carry;
    index live = 0;
    carry.begin(n, (x_.keys + KEY_TILE - 1) / KEY_TILE);
    tile.each(x_, true, [&] {
      carry.keep(tile.j0 / KEY_TILE);
      if (logits_.carried_out(x_)) {
        if (x_.pairs.kind == STICKS) live = std::max(live, tile.j0 + KEY_TILE);
        return;
      }
      logits_.multiply(x_, s, ld_);
      logits_.carry_over(x_, s, ld_);
    });
    for (index i = 0; i < n && x_.pairs.kind == STICKS; ++i) {
      real rest = logits_.rest(x_, i), total = 0;
      if (rest == 0) continue;
      const index own = logits_.own(i);
      const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
      if (x_.dropout > 0) rest *= dropout_.at(seed, own)[0];
      for (index d = 0; d < value_width_; ++d) {
        total += g.at(i)[d] * logits_.v.at(own)[d];
        dv_[own * value_width_ + d] += rest * g.at(i)[d];
      }
      carry.before[i] = rest * total;
    }
    return live;
  }
  void end_left(index b, index h, index first, index n) {
    for (index block = 0; block * BLOCK < n; ++block) add_left(block);
    const Tokens& to = x_.left.tokens_gradient;
    const real* dx = dx_.of(0);
    if (!to.data) {
      scale_range(dq_.of(0), real(x_.scale), n * width_);
      return add_range(dq_.of(0), dx, n * width_);
    }
    for (index i = 0; i < n; ++i)
      write_row(to, row_of(to, b, h, first + i), dx + i * left_width_, 1, x_.left.features);
  }
  void begin(RowSums& sums, index& width, const Term& term, index slot) const {
    if (!term.rows) return;
    width = round_up(term.features, VL);
    sums.begin(x_.map.buckets, term.features, logits_.halves,
               term.rows_gradient + slot * x_.map.buckets * term.features);
  }
  // Gradients of tokens and rows from those of a block's products.
  void add_left(index block) {
    if (left_columns_.data)
      return d_left_tile_.pull_back(logits_.left_rows, left_columns_, dx_.of(0), d_left_.columns, d_left_.ld, block);
    d_left_tile_.times_rows(logits_.left_rows, dx_.of(0), left_width_, block);
    d_left_tile_.transposed_times(logits_.left_tokens.data, logits_.left_tokens.ld, d_left_.data,
                                  left_width_, block);
  }
  void prepare_buckets(Rows g, HalfRows g_half) {
    if (!x_.map.buckets) return;
    logits_.for_blocks(x_, [&](index block, Range n) {
      if (x_.left.rows && !d_left_tile_.holds(block, n)) {
        add_left(block);
        d_left_tile_.restart(block, n);
      }
      if (x_.left.rows) d_left_tile_.clear(block, n);
      if (!x_.value_rows) return;
      weights_.clear(block, n);
      g_rows_.multiply(logits_.value_rows, {g.data, g.ld, 1}, g_half, block, n);
    });
  }
  // Weights and gradients of the logits of one row, from logits and gradients of weights.
  void row(index b, index h, index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    const Range see = tile.seen(i), all{tile.panels.begin * PANEL, tile.panels.end * PANEL};
    if (!see.size()) {
      fill(s + all.begin, 0, all.size());
      return fill(ds + all.begin, 0, all.size());
    }
    const index offset = tile.j0 + see.begin + tile.base[i], n = see.size();
    if (x_.pairs.kind == STICKS) return stick_row(b, h, i, s, ds);
    logits_.add_terms(x_, s, i, see);
    if (x_.value_rows) spread<true>(x_.map, g_rows_.row(i), offset, ds + see.begin, n);
    const index from = see.begin / VL * VL, to = round_up(see.end, VL);
    const vec lse = splat(lse_[i]), delta = splat(delta_[i]);
    // The weight of a single key is 1 whatever its logit is: rounding would leave a gradient.
    const ivec alone = !x_.part && tile.all_seen(i).size() == 1 ? ~ivec{} : ivec{};
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
    for (index t = from; t < to; t += VL) {
      const vec p = exponential(masked(load(s + t), t, see) - lse);
      vec dp = load(ds + t), dropped = p;
      if (x_.dropout > 0) {
        const vec factor = dropout_.at(seed, tile.j0 + t);
        dp *= factor, dropped *= factor;
      }
      const ivec hidden = alone | (p == 0);  // what lies there may be anything
      store(s + t, dropped);
      store(ds + t, hidden ? vec{} : p * (dp - delta));
    }
    for (real* x : {s, ds}) {
      fill(x + all.begin, 0, from - all.begin);
      fill(x + to, 0, all.end - to);
    }
    if (line_) Line::collect(x_, ds, tile.j0, see.begin, see.end, tile.base[i], line_);
    if (x_.pairs.kind == DISTANCE)
      logits_.distance.collect(ds + see.begin, i, offset, n);
    if (column_) row_sums_[i] += add_wide(column_ + tile.j0 + see.begin, ds + see.begin, n);
    if (x_.pairs.kind == COUNTS)
      logits_.counts.collect(logits_.left.row(i), ds, see, d_left_tile_.row(i), logits_.carry.before[i]);
    else if (x_.left.rows)
      logits_.collect_left(x_, ds, i, see, d_left_tile_.row(i));
    if (x_.right.rows) logits_.right.collect_far(x_, tile, ds, i, from, to);
    if (x_.value_rows) collect(x_.map, s + see.begin, offset, weights_.row(i), n);
  }
  void stick_row(index b, index h, index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    const Range all{tile.panels.begin * PANEL, tile.panels.end * PANEL}, keys = logits_.stick_row(s, i);
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
    fill(ds + all.begin, 0, keys.begin - all.begin);
    for (index t = keys.begin; t < keys.end; t += VL) {
      const vec weight = load(s + t);
      const vec factor = x_.dropout > 0 ? dropout_.at(seed, tile.j0 + t) : splat(1);
      store(ds + t, weight == 0 ? vec{} : weight * factor * load(ds + t));
      store(s + t, weight * factor);
    }
    fill(ds + keys.end, 0, all.end - keys.end);
    logits_.sticks.collect(ds, keys, logits_.carry.before[i]);
  }
  template <class F>
  void for_panels(F f) {
    const QueryTile& tile = logits_.tile;
    for (index p = tile.panels.begin; p < tile.panels.end; ++p)
      if (tile.panel_rows[p].size())
        f(p * PANEL, std::min<index>(PANEL, tile.width - p * PANEL), tile.panel_rows[p]);
  }

  const Problem& x_;
  Dropout dropout_;
  index ld_, width_, value_width_, left_width_ = 0, right_width_ = 0;
  Logits logits_;
  TileRegisters registers_;
  Strips v_strips_, k_pairs_;
  HalfRows q_columns_, g_columns_, left_columns_;  // of a tile, transposed
  HalfPanel panel_;
  BucketTile d_left_tile_, weights_, g_rows_;
  Scratch s_, ds_, dq_, dx_, g_scratch_, out_scratch_, delta_scratch_, lse_scratch_, strips_scratch_;
  Scratch half_scratch_, dk_scratch_, dv_scratch_, right_scratch_, pairs_scratch_, left_columns_scratch_;
  Scratch dk_columns_scratch_, dv_columns_scratch_, q_columns_scratch_, g_columns_scratch_;
  RowSums d_left_, d_right_, d_value_;
  Panels v_panels_;
  real *dk_ = nullptr, *dv_ = nullptr, *right_ = nullptr, *line_ = nullptr;
  real *dk_columns_ = nullptr, *dv_columns_ = nullptr;  // transposes of sums, of rows columns_ld_
  index columns_ld_;
  double* column_ = nullptr;
  std::vector<double> row_sums_;  // of the gradients of a tile's logits, which are 0 but for rounding
  real *delta_ = nullptr, *lse_ = nullptr;
  Tokens dk_to_, dv_to_, right_to_;
};
}  // namespace posenc
