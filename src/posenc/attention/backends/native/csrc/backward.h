// Gradients of all inputs: weights are recomputed from the lse of the forward pass, p = exp(s - lse),
// and ds = p (dp - delta), with dp = dO · v and delta = dO · O - dlse.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
// One thread's worker. dq is summed per tile of queries; dk and dv per batch row, over the tiles of
// queries in order; gradients of rows of buckets per head.
class Backward {
 public:
  explicit Backward(const Problem& x)
      : x_(x), dropout_(x.dropout, x.seed), logits_(x, true), registers_(logits_.use_amx) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;
    width_ = round_up(x.depth(), VL), value_width_ = round_up(x.value_dim, VL);
    transposed_ld_ = round_up(x.keys, PANEL) + VL;
  }
  // Some queries of some batch rows of one head. part, split: where its share of gradients goes, of
  // those by bucket or offset and of those by key.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    const index size = tile_of(x_, logits_.bucket_windows, 128);
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
    const Terms& terms = x_.terms;
    d_bias_by_offset_ = terms.bias_by_offset.gradient_of(part, 0, h);
    if (d_bias_by_offset_) fill(d_bias_by_offset_, 0, terms.bias_by_offset.rows);
    left_width_ = begin(d_left_, terms.left_rows, part, h);
    right_width_ = begin(d_right_, terms.right_rows, part, h);
    begin(d_value_, terms.value_rows, part, h);
    if (x_.pairs.kind == DISTANCE) logits_.distance.begin_gradient(x_.pairs, part * x_.heads + h);
  }
  void end_head(index, index) {
    if (x_.terms.left_rows) d_left_.write();
    if (x_.terms.right_rows) d_right_.write();
    if (x_.terms.value_rows) d_value_.write();
    if (x_.pairs.kind == DISTANCE) logits_.distance.end_gradient();
  }
  Logits& logits() { return logits_; }
  void begin_row(index b, index h, index split) {
    dk_ = gradient_sums(dk_to_, x_.dk, x_.dk_split, b, h, split, width_, x_.dim, dk_scratch_);
    dv_ = gradient_sums(dv_to_, x_.dv, x_.dv_split, b, h, split, value_width_, x_.value_dim, dv_scratch_);
    d_column_ = x_.terms.column.gradient_of<double>(split, b, h);
    if (d_column_) std::fill_n(d_column_, x_.keys, 0.0);
    if (x_.terms.right.gradient.data)
      d_right_tokens_ = gradient_sums(d_right_tokens_to_, x_.terms.right.gradient, x_.terms.right.part_stride, b, h,
                                      split, right_width_, x_.terms.right.features, d_right_tokens_scratch_);
    else
      d_right_tokens_ = dk_;
    logits_.begin_row(x_, b, h, d_right_tokens_, &d_right_);
    logits_.begin_gradient(x_, b, h, split);
    if (logits_.use_amx) {
      k_pairs_ = HeadTokens(logits_.k_source, 0, 0, 0, x_.keys, x_.depth()).pairs(pairs_scratch_);
      v_strips_ = HeadTokens(x_.v, b, logits_.group, 0, x_.keys, x_.value_dim).columns(strips_scratch_);
      fill(dk_transposed_ = dk_transposed_scratch_.of(width_ * transposed_ld_), 0, width_ * transposed_ld_);
      fill(dv_transposed_ = dv_transposed_scratch_.of(value_width_ * transposed_ld_), 0, value_width_ * transposed_ld_);
    } else {
      v_panels_.begin(logits_.v, x_.keys, x_.value_dim, Logits::keeps_panels(x_));
    }
  }
  void end_row(index b, index h, index split) {
    if (x_.terms.right_rows) {
      logits_.key_term.finish(x_);
      if (d_right_tokens_ != dk_)
        write_sums(d_right_tokens_to_, b, h, d_right_tokens_, right_width_, x_.terms.right.features);
    }
    if (logits_.use_amx) {
      add_transpose(dk_transposed_, transposed_ld_, x_.keys, width_, dk_);
      add_transpose(dv_transposed_, transposed_ld_, x_.keys, value_width_, dv_);
    }
    for (index j = 0; j < x_.keys && x_.rotated; ++j)
      rotate_back(x_, x_.k_rotary, b, logits_.group, j, dk_ + j * width_);
    write_sums(dk_to_, b, h, dk_, width_, x_.dim);
    const Operand& factor = x_.terms.key_factor;
    if (factor) write_sums(split_of(factor.gradient, factor.part_stride, split), b, h, dk_ + x_.dim, width_, factor.features);
    write_sums(dv_to_, b, h, dv_, value_width_, x_.value_dim);
  }
  void run_tile(index b, index h, index first, index n) {
    logits_.begin_tile(x_, b, h, first, n);
    QueryTile& tile = logits_.tile;
    real* s = s_.of(round_up(n, AMX_TILE) * ld_);        // [n, ld]: logits, then weights
    real* ds = ds_.of(round_up(n, AMX_TILE) * ld_);      // [n, ld]: dp, then ds
    real* dq = dq_.of(round_up(n, AMX_DEPTH) * width_);  // [n, width]
    fill(dq, 0, n * width_);
    const Rows d_out = read_rows(x_.gradient, b, h, first, n, x_.value_dim, 1, d_out_scratch_);
    Bf16Rows d_out_bf16;
    if (logits_.use_amx) {
      d_out_bf16 = HeadTokens(x_.gradient, b, h, first, n, x_.value_dim).rows(bf16_scratch_);
      d_out_transposed_ = bf16_transpose(d_out, n, x_.value_dim, d_out_transposed_scratch_);
      q_transposed_ = bf16_transpose(logits_.q, n, x_.depth(), q_transposed_scratch_);
    }
    const Rows out = read_rows(x_.out, b, h, first, n, x_.value_dim, 1, out_scratch_);
    delta_ = delta_scratch_.of(n), lse_ = lse_scratch_.of(n), ds_row_sums_.assign(n, 0);
    for (index i = 0; i < n; ++i) {
      const index row = (b * x_.heads + h) * x_.queries + first + i;
      lse_[i] = x_.lse[row] == -INFINITY ? INFINITY : real(x_.lse[row] - logits_.row_shift(x_, i));  // no weight
      delta_[i] = dot(d_out.at(i), out.at(i), value_width_) - (x_.lse_gradient ? real(x_.lse_gradient[row]) : 0);
      if (x_.sinks)  // -inf, as an empty row's lse may then be, has no weight
        ds_row_sums_[i] = x_.sinks_gradient[row] =
            x_.sinks[row] > -INFINITY ? -std::exp(x_.sinks[row] - x_.lse[row]) * delta_[i] : 0;
      if (x_.lse_gradient) ds_row_sums_[i] -= x_.lse_gradient[row];
    }
    if (x_.terms.left_rows) {
      ds_by_bucket_.begin(logits_.left_rows, n, logits_.bucket_windows);
      fill(d_left_tokens_.of(round_up(n, AMX_TILE) * left_width_), 0, n * left_width_);
      if (logits_.use_amx)
        left_transposed_ = bf16_transpose(logits_.left_tokens, n, x_.terms.left.features, left_transposed_scratch_);
    }
    if (x_.terms.value_rows) {
      weights_by_bucket_.begin(logits_.value_rows, n);
      dp_by_bucket_.begin(logits_.value_rows, n);
    }
    index first_live_key = 0;
    logits_.log_gates.set_levels(lse_, 1);
    if (x_.pairs.sums()) first_live_key = carry_over_tiles(b, h, n, s, d_out);
    if (x_.pairs.kind == BLOCKS) {  // states of all blocks, from the last to the first
      tile.for_key_tiles(x_, true, [&] { logits_.multiply(x_, s, ld_); });
      logits_.blocks.propagate = false;
    }
    tile.for_key_tiles(x_, false, [&] {
      const index j = tile.j0;
      if (j < first_live_key) return;
      if (x_.pairs.sums()) logits_.carry.resume(j / KEY_TILE);
      logits_.multiply(x_, s, ld_);
      const real* values = logits_.use_amx ? nullptr : v_panels_.at(j);
      if (logits_.use_amx)
        logits_.amx_products({0, n}, tile.panel_keys(), d_out_bf16, v_strips_, ds, ld_);
      else
        for_panels([&](index at, index, Range m) {
          gemm(m.size(), PANEL, x_.value_dim, {d_out.at(m.begin), d_out.ld, 1}, values + at * x_.value_dim, PANEL,
               ds + m.begin * ld_ + at, ld_, false);
        });
      prepare_buckets(d_out, d_out_bf16);
      for (index i = 0; i < n; ++i) row_gradients(b, h, i, s + i * ld_, ds + i * ld_);
      if (logits_.precomputed.data) logits_.store_precomputed(ds, ld_);
      if (x_.terms.right_rows) logits_.key_term.collect(x_, tile, ds, ld_);
      if (x_.pairs.kind == LOG_GATES) logits_.log_gates.collect(tile);
      if (x_.pairs.kind == BLOCKS)
        logits_.blocks.collect(j, tile.panels, logits_.k.data, logits_.k.ld, ds, ld_, dq, dk_);
      for_panels([&](index at, index keys, Range m) {
        if (x_.pairs.kind < MIXING) add_products(at, keys, m, ds + at, ld_, dq);
        if (logits_.use_amx) return add_values(at, m, s + at);
        const real* p = s + m.begin * ld_ + at;
        gemm(keys, value_width_, m.size(), {p, 1, ld_}, d_out.at(m.begin), d_out.ld,
             dv_ + (j + at) * value_width_, value_width_, true);
      });
    });
    // The rounding of such a sum is taken off one key: it would grow in running sums over many keys.
    for (index i = 0; i < n && d_column_ && !x_.global_lse && !x_.softcap; ++i)
      if (tile.all_visible_keys(i).size()) d_column_[tile.all_visible_keys(i).end - 1] -= ds_row_sums_[i];
    if (x_.terms.left_rows) end_left(b, h, first, n);
    if (x_.pairs.kind != MIXING) write_queries(b, h, first, n);
    if (x_.terms.value_rows && logits_.use_amx)
      weights_by_bucket_.pull_back(logits_.value_rows, d_out_transposed_, nullptr, d_value_.columns, d_value_.ld);
    else if (x_.terms.value_rows)
      weights_by_bucket_.transposed_times(d_out.data, d_out.ld, d_value_.data, value_width_);
  }
  // dq and dk from ds [n, keys of all tiles] of the last tile of queries: for AllHeads.
  void add_logit_gradients(index b, index h, index first, index n, const real* ds, index ld) {
    real* dq = dq_.of(0);
    logits_.tile.for_key_tiles(x_, false, [&] {
      const index j = logits_.tile.j0;
      for_panels([&](index at, index keys, Range m) {
        add_products(at, keys, m, ds + j + at, ld, dq);
      });
    });
    write_queries(b, h, first, n);
  }

 private:
  // Zeros [keys, width] to sum a gradient in: the gradient itself, if its layout is the same, else
  // scratch that write_sums copies from.
  real* gradient_sums(Tokens& to, const Tokens& gradient, index stride, index b, index h, index split,
                index width, index features, Scratch& scratch) const {
    to = split_of(gradient, stride, split);
    const index rows = logits_.use_amx ? round_up(x_.keys, AMX_TILE) : x_.keys;  // tiles may write whole ones
    const bool same = to.token == width && features == width;
    const bool direct = to.type == REAL && same && rows == x_.keys;
    real* sums = direct ? reinterpret_cast<real*>(row_of(to, b, h, 0)) : scratch.of(rows * width);
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
  // A panel of x [rows, ld] in bfloat16, of the rows m and those beside them, whole AMX_DEPTHs.
  // Returns the first row.
  index set_panel(const real* x, index ld, Range m, bool both) {
    const index first = m.begin / AMX_DEPTH * AMX_DEPTH;
    panel_.set(std::min(logits_.tile.rows, round_up(m.end, AMX_DEPTH)) - first, both,
               [=](index i, index c) { return load(x + (first + i) * ld + c); });
    return first;
  }
  // dv of a panel += p^T · dO, rows m, by AMX (as the transpose).
  void add_values(index at, Range m, const real* s) {
    const index first = set_panel(s, ld_, m, false);
    amx_gemm(value_width_, PANEL, round_up(m.end - first, AMX_DEPTH), d_out_transposed_.at(0, first), panel_.pairs,
              dv_transposed_ + logits_.tile.j0 + at, transposed_ld_, true);
  }
  // dq of the rows m += ds · k and dk of a panel += ds^T · q; d: ds from the panel's first key on.
  void add_products(index at, index keys, Range m, const real* d, index ld, real* dq) {
    const index j = logits_.tile.j0 + at;
    if (logits_.use_amx) {
      const index first = set_panel(d, ld, m, true), depth = round_up(m.end - first, AMX_DEPTH);
      amx_gemm(depth, width_, PANEL, panel_.rows, k_pairs_.at(j, 0), dq + first * width_, width_, true);
      return amx_gemm(width_, PANEL, depth, q_transposed_.at(0, first), panel_.pairs, dk_transposed_ + j,
                      transposed_ld_, true);
    }
    d += m.begin * ld;
    gemm(m.size(), width_, keys, {d, ld, 1}, logits_.k.at(j), logits_.k.ld, dq + m.begin * width_, width_,
         true);
    gemm(keys, width_, m.size(), {d, 1, ld}, logits_.q.at(m.begin), logits_.q.ld, dk_ + j * width_, width_,
         true);
  }
  void write_queries(index b, index h, index first, index n) {
    const bool scaled = x_.terms.left_rows && !x_.terms.left.gradient.data;
    for (index i = 0; i < n; ++i) {
      real* d = dq_.of(0) + i * width_;
      rotate_back(x_, x_.q_rotary, b, h, first + i, d);
      write_row(x_.dq, row_of(x_.dq, b, h, first + i), d, scaled ? 1 : real(x_.scale), x_.dim);
      const Operand& factor = x_.terms.query_factor;
      if (factor) write_row(factor.gradient, row_of(factor.gradient, b, h, first + i), d + x_.dim, 1, factor.features);
    }
  }
  // Compute the sums over later keys at every tile, from the last to the first. Returns the first key
  // whose tile has weights other than 0.
  index carry_over_tiles(index b, index h, index n, real* s, Rows d_out) {
    QueryTile& tile = logits_.tile;
    Carry& carry = logits_.carry;
    index first_live_key = 0;
    carry.begin(n, (x_.keys + KEY_TILE - 1) / KEY_TILE);
    tile.for_key_tiles(x_, true, [&] {
      carry.keep(tile.j0 / KEY_TILE);
      if (logits_.carried_out(x_)) {
        if (x_.pairs.kind != COUNTS) first_live_key = std::max(first_live_key, tile.j0 + KEY_TILE);
        return;
      }
      logits_.carry_over(x_, s, ld_);
    });
    for (index i = 0; i < n && x_.pairs.kind == STICKS; ++i) {
      real remainder = logits_.remainder(x_, i), dp = 0;
      if (remainder == 0) continue;
      const index self_key = logits_.self_key(i);
      const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
      if (x_.dropout > 0) remainder *= dropout_.at(seed, self_key)[0];
      for (index d = 0; d < value_width_; ++d) {
        dp += d_out.at(i)[d] * logits_.v.at(self_key)[d];
        dv_[self_key * value_width_ + d] += remainder * d_out.at(i)[d];
      }
      carry.d_sums[i] = remainder * dp;
    }
    return first_live_key;
  }
  void end_left(index b, index h, index first, index n) {
    for (index block = 0; block * BLOCK < n; ++block) add_left(block);
    const Tokens& to = x_.terms.left.gradient;
    const real* dx = d_left_tokens_.of(0);
    if (!to.data) {
      scale_range(dq_.of(0), real(x_.scale), n * width_);
      return add_range(dq_.of(0), dx, n * width_);
    }
    for (index i = 0; i < n; ++i)
      write_row(to, row_of(to, b, h, first + i), dx + i * left_width_, 1, x_.terms.left.features);
  }
  // Returns the width of the sums.
  index begin(RowSums& sums, const Operand& rows, index part, index h) const {
    if (rows) sums.begin(rows.rows, rows.features, logits_.use_amx, rows.gradient_of(part, 0, h));
    return round_up(rows.features, VL);
  }
  // Gradients of the query-side term's tokens and rows from those of a block's products.
  void add_left(index block) {
    if (left_transposed_.data)
      return ds_by_bucket_.pull_back(logits_.left_rows, left_transposed_, d_left_tokens_.of(0), d_left_.columns,
                                     d_left_.ld, block);
    ds_by_bucket_.times_rows(logits_.left_rows, d_left_tokens_.of(0), left_width_, block);
    ds_by_bucket_.transposed_times(logits_.left_tokens.data, logits_.left_tokens.ld, d_left_.data,
                                  left_width_, block);
  }
  // Make room for ds and weights by bucket, and compute dO · value rows, for the selected tile. A
  // window of buckets that has to move on first gives its sums to the gradients.
  void prepare_buckets(Rows d_out, Bf16Rows d_out_bf16) {
    if (!x_.map.buckets) return;
    logits_.for_blocks(x_, [&](index block, Range n) {
      if (x_.terms.left_rows && !ds_by_bucket_.holds(block, n)) {
        add_left(block);
        ds_by_bucket_.restart(block, n);
      }
      if (x_.terms.left_rows) ds_by_bucket_.clear(block, n);
      if (!x_.terms.value_rows) return;
      weights_by_bucket_.clear(block, n);
      dp_by_bucket_.multiply(logits_.value_rows, {d_out.data, d_out.ld, 1}, d_out_bf16, block, n);
    });
  }
  // s and dp of row i become p (after dropout) and ds; gradients of its biases and buckets are summed.
  void row_gradients(index b, index h, index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) {
      fill(s + all.begin, 0, all.size());
      return fill(ds + all.begin, 0, all.size());
    }
    const index offset = tile.j0 + visible.begin + tile.base[i], n = visible.size();
    if (x_.pairs.kind == STICKS) return stick_row(b, h, i, s, ds);
    logits_.add_terms(x_, s, i, visible);
    if (x_.terms.value_rows) spread<true>(x_, dp_by_bucket_.row(i), tile.j0, visible, tile.base[i], ds);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    const vec lse = splat(lse_[i]), delta = splat(delta_[i]), powers_lse = splat(lse_[i] * PER_LN_2);
    const auto weight = [&](vec x) {
      return logits_.use_amx ? power_of_two(x * PER_LN_2 - powers_lse) : exponential(x - lse);
    };
    // A single key's weight is 1 whatever its logit, but for a sink: dp - delta would leave a rounding error.
    const bool alone = !x_.global_lse && !x_.sinks && !x_.lse_gradient && tile.all_visible_keys(i).size() == 1;
    const ivec single_key = alone ? ~ivec{} : ivec{};
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
    for (index t = from; t < to; t += VL) {
      const vec logits = load(s + t), p = weight(masked(logits, t, visible));
      vec dp = load(ds + t), dropped = p;
      if (x_.dropout > 0) {
        const vec factor = dropout_.at(seed, tile.j0 + t);
        dp *= factor, dropped *= factor;
      }
      const ivec no_gradient = single_key | (p == 0);  // dp of hidden keys may be anything, also NaN
      store(s + t, dropped);
      const vec d = p * (dp - delta);
      store(ds + t, no_gradient ? vec{} : x_.softcap ? d * Logits::cap_slope(x_, logits) : d);
    }
    for (real* x : {s, ds}) {
      fill(x + all.begin, 0, from - all.begin);
      fill(x + to, 0, all.end - to);
    }
    if (d_bias_by_offset_)
      BiasByOffset::collect(x_, ds, tile.j0, visible.begin, visible.end, tile.base[i], d_bias_by_offset_);
    if (x_.pairs.kind == DISTANCE)
      logits_.distance.collect(ds + visible.begin, i, offset, n);
    if (d_column_) ds_row_sums_[i] += add_wide(d_column_ + tile.j0 + visible.begin, ds + visible.begin, n);
    if (x_.pairs.kind == LOG_GATES) logits_.log_gates.collect_row(i, tile, ds, visible, logits_.carry.d_sums[i]);
    if (x_.pairs.kind == COUNTS)
      logits_.counts.collect(logits_.query_products.row(i), ds, visible, ds_by_bucket_.row(i), logits_.carry.d_sums[i]);
    else if (x_.terms.left_rows)
      logits_.collect_left(x_, ds, i, visible, ds_by_bucket_.row(i));
    if (x_.terms.right_rows) logits_.key_term.collect_far(x_, tile, ds, i, from, to);
    if (x_.terms.value_rows) collect(x_, s, tile.j0, visible, tile.base[i], weights_by_bucket_.row(i));
  }
  // The same by stick breaking, which has no lse: ds of log p first, then of the logits.
  void stick_row(index b, index h, index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    const Range all = tile.panel_keys(), keys = logits_.stick_row(s, i);
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + tile.i0 + i);
    fill(ds + all.begin, 0, keys.begin - all.begin);
    for (index t = keys.begin; t < keys.end; t += VL) {
      const vec weight = load(s + t);
      const vec factor = x_.dropout > 0 ? dropout_.at(seed, tile.j0 + t) : splat(1);
      store(ds + t, weight == 0 ? vec{} : weight * factor * load(ds + t));
      store(s + t, weight * factor);
    }
    fill(ds + keys.end, 0, all.end - keys.end);
    logits_.sticks.collect(ds, keys, logits_.carry.d_sums[i]);
  }
  // Calls f(first key of the tile, keys, rows) for the panels of the selected tile with visible pairs.
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
  AmxTiles registers_;
  VnniStrips v_strips_, k_pairs_;
  Bf16Rows q_transposed_, d_out_transposed_, left_transposed_;  // of a tile, transposed
  Bf16Panel panel_;
  BucketTile ds_by_bucket_, weights_by_bucket_, dp_by_bucket_;
  Scratch s_, ds_, dq_, d_left_tokens_, d_out_scratch_, out_scratch_, delta_scratch_, lse_scratch_, strips_scratch_;
  Scratch bf16_scratch_, dk_scratch_, dv_scratch_, d_right_tokens_scratch_, pairs_scratch_, left_transposed_scratch_;
  Scratch dk_transposed_scratch_, dv_transposed_scratch_, q_transposed_scratch_, d_out_transposed_scratch_;
  RowSums d_left_, d_right_, d_value_;
  Panels v_panels_;
  real *dk_ = nullptr, *dv_ = nullptr, *d_right_tokens_ = nullptr, *d_bias_by_offset_ = nullptr;
  real *dk_transposed_ = nullptr, *dv_transposed_ = nullptr;  // transposes of sums, of rows columns_ld_
  index transposed_ld_;
  double* d_column_ = nullptr;
  std::vector<double> ds_row_sums_;  // [n]: with what a sink and the lse take, 0 but for rounding
  real *delta_ = nullptr, *lse_ = nullptr;
  Tokens dk_to_, dv_to_, d_right_tokens_to_;
};
}  // namespace posenc
