// Few queries, as in decoding: reading keys and values takes most of the time, so each is read once, where
// it lies, for the queries of all heads that share it. Forward packs keys, which few products do not repay.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
// Keys or values of one head as they are stored, from one token on.
template <class Number>
struct Stored {
  const Number* data;
  index ld;
  const Number* at(index t) const { return data + t * ld; }
};
// Calls f(rows) with them as numbers of their type.
template <class F>
inline void as_stored(const char* rows, index type, index ld, F f) {
  if (type == REAL) f(Stored<real>{reinterpret_cast<const real*>(rows), ld});
  if (type == BFLOAT16) f(Stored<uint16_t>{reinterpret_cast<const uint16_t*>(rows), ld});
  if (type == FLOAT16) f(Stored<half>{reinterpret_cast<const half*>(rows), ld});
}
// Calls f(size, first) for rows by fours, then two, then one; size is a constant.
template <class F>
inline void for_rows(index rows, F f) {
  index r = 0;
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>{}, r);
  if (rows & 2) f(std::integral_constant<int, 2>{}, r), r += 2;
  if (rows & 1) f(std::integral_constant<int, 1>{}, r);
}
// How products read numbers: a vector at a time.
template <class Number>
struct InOrder {
  static constexpr int VECTORS = 1;
  static void load(const Number* p, vec* to) { to[0] = Lanes<Number>::load(p); }
};
// s [M, VL / M] = products of M rows with VL / M keys; depth is a multiple of the numbers read at a time,
// in which order q has them too.
template <int M, class Number, class Order>
inline void products_tile(Rows q, Stored<Number> k, index depth, real* s, index lds) {
  constexpr int N = VL / M, V = Order::VECTORS;
  vec sums[VL];
#pragma GCC unroll 16
  for (int a = 0; a < VL; ++a) sums[a] = vec{};
  for (index d = 0; d < depth; d += V * VL) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      vec key[V];
      Order::load(k.at(n) + d, key);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[m * N + n] += load(q.at(m) + d + v * VL) * key[v];
    }
  }
  real lanes[VL];
  store(lanes, sums_of_lanes(sums));
  for (int m = 0; m < M; ++m) std::copy_n(lanes + m * N, N, s + m * lds);
}
// s [rows, keys] = q k^T; keys is a multiple of VL.
template <class Number, class Order = InOrder<Number>>
inline void products(index rows, Rows q, Stored<Number> k, index keys, index depth, real* s, index lds) {
  for (index j = 0; j < keys; j += VL)
    for_rows(rows, [&](auto size, index r) {
      constexpr int M = std::min<int>(size, VL);
      for (index m = r; m < r + size; m += M)
        for (index n = j; n < j + VL; n += VL / M)
          products_tile<M, Number, Order>({q.at(m), q.ld}, {k.at(n), k.ld}, depth, s + m * lds + n, lds);
    });
}
// out [M, V * VL] += weights [M, keys] v.
template <int M, int V, class Number>
inline void values_tile(const real* s, index lds, Stored<Number> v, index keys, real* out, index ldo) {
  vec sums[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int e = 0; e < V; ++e) sums[m][e] = load(out + m * ldo + e * VL);
  for (index j = 0; j < keys; ++j) {
    vec row[V];
#pragma GCC unroll 8
    for (int e = 0; e < V; ++e) row[e] = Lanes<Number>::load(v.at(j) + e * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vec weight = splat(s[m * lds + j]);
#pragma GCC unroll 8
      for (int e = 0; e < V; ++e) sums[m][e] += weight * row[e];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int e = 0; e < V; ++e) store(out + m * ldo + e * VL, sums[m][e]);
}
template <int M, class Number>
inline void values_rows(const real* s, index lds, Stored<Number> v, index keys, real* out, index width) {
  index e = 0;
  for (; e + NV * VL <= width; e += NV * VL) values_tile<M, NV, Number>(s, lds, {v.data + e, v.ld}, keys, out + e, width);
  for (; e < width; e += VL) values_tile<M, 1, Number>(s, lds, {v.data + e, v.ld}, keys, out + e, width);
}
// out [rows, width] += weights [rows, keys] v.
template <class Number>
inline void add_values(index rows, const real* s, index lds, Stored<Number> v, index keys, real* out, index width) {
  for_rows(rows, [&](auto size, index r) { values_rows<size>(s + r * lds, lds, v, keys, out + r * width, width); });
}

constexpr index MOST_ROWS = 16;     // queries of a head
constexpr index MOST_SHARED = 64;   // of all heads that share keys
constexpr index UNPACKED_ROWS = 8;  // up to which keys are not packed
constexpr index KEY_CHUNK = 512;    // keys of an item of work: results do not depend on the threads
constexpr index KEY_GROUP = PANEL;  // keys that are converted together

class FewRows {
 public:
  static bool serves(const Problem& x) {
    const bool others = AllTerms::has_others<BiasByOffset, QueryBucketTerm, ValueBucketTerm>(x) || x.rank();
    return !others && x.pairs.kind == NONE && !x.period && !(x.dropout > 0) &&
           x.queries * (x.heads / x.groups) <= (x.heads == x.groups ? MOST_ROWS : MOST_SHARED);
  }
  explicit FewRows(const Problem& x)
      : x_(x), heads_(x.heads / x.groups), rows_(heads_ * x.queries), depth_(round_up(x.dim, VL)),
        width_(round_up(x.value_dim, VL)) {}
  // Numbers that a chunk's result has: outputs [rows, width], maxima and sums.
  static index numbers(const Problem& x) {
    return x.queries * (x.heads / x.groups) * (round_up(x.value_dim, VL) + 2);
  }
  // Attention of a group's queries to a chunk of keys, to those of them alone that any query sees.
  void attend(index b, index g, index chunk, real* result) {
    const index at = b * x_.rows_batch;
    const Range keys{std::max<index>(chunk * KEY_CHUNK, *std::min_element(x_.low + at, x_.low + at + x_.queries)),
                     std::min({(chunk + 1) * KEY_CHUNK, x_.keys,
                               index(*std::max_element(x_.high + at, x_.high + at + x_.queries))})};
    real *out = result, *greatest = out + rows_ * width_, *sum = greatest + rows_;
    fill(out, 0, numbers(x_));
    fill(greatest, -INFINITY, rows_);
    if (!keys.size()) return;
    const Rows q = queries(b, g);
    const index ld = round_up(keys.size(), KEY_GROUP);
    real* s = s_.of(rows_ * ld);
    for_groups(keys, [&](index j, index n) { multiply(q, b, g, j, n, s + j - keys.begin, ld); });
    if (x_.map.bucket) buckets_ = met_buckets(b, keys), bucket_ld_ = round_up(buckets_.size(), VL) + VL;
    if (x_.terms.left_rows) multiply_buckets(b, g);
    if (x_.terms.value_rows) fill(weight_scratch_.of(rows_ * bucket_ld_), 0, rows_ * bucket_ld_);
    for (index r = 0; r < rows_; ++r) weigh(b, g, r, keys, s + r * ld, greatest[r], sum[r]);
    for_groups(keys, [&](index j, index n) { add_weighted(s + j - keys.begin, ld, b, g, j, n, out); });
    if (x_.terms.value_rows) add_bucket_values(g, out);
  }
  // Output and LSE from the results of all chunks.
  void join(index b, index g, index chunks, real* results) {
    const index step = numbers(x_), maxima = rows_ * width_;
    for (index r = 0; r < rows_; ++r) {
      real greatest = -INFINITY;
      for (index c = 0; c < chunks; ++c) {
        const real most = results[c * step + maxima + r], weights = results[c * step + maxima + rows_ + r];
        if (weights != weights) greatest = weights;  // logits of NaN are no greatest ones
        if (most > greatest) greatest = most;
      }
      const index h = g * heads_ + r / x_.queries, i = r % x_.queries, row = (b * x_.heads + h) * x_.queries + i;
      real* out = results + r * width_;
      double sum = 0;
      for (index c = 0; c < chunks && greatest != -INFINITY; ++c) {
        const real* from = results + c * step;
        const real by = std::exp(from[maxima + r] - greatest);
        sum += double(by) * from[maxima + rows_ + r];
        if (c == 0) scale_range(out, by, width_);
        else add_scaled(out, from + r * width_, by, width_);
      }
      double lse = sum == 0 ? -INFINITY : greatest + std::log(sum);
      real weight = sum == 0 ? 0 : real(1 / sum);
      if (x_.sinks) weight *= add_sink(x_.sinks[row], lse);
      write_row(x_.out, row_of(x_.out, b, h, i), out, weight, x_.value_dim);
      x_.lse[row] = lse;
    }
  }

 private:
  // Calls f(first key, how many) for keys that are converted together.
  template <class F>
  static void for_groups(Range keys, F f) {
    for (index j = keys.begin; j < keys.end; j += KEY_GROUP) f(j, std::min(KEY_GROUP, keys.end - j));
  }
  Rows queries(index b, index g) {
    real* to = q_scratch_.of(rows_ * depth_);
    for (index r = 0; r < rows_; ++r) {
      const index h = g * heads_ + r / x_.queries, i = r % x_.queries;
      read_row(x_.q, row_of(x_.q, b, h, i), real(x_.scale), x_.dim, depth_, to + r * depth_);
      rotate_factor(x_, x_.q_rotary, b, h, i, to + r * depth_, 1);
    }
    return {to, depth_};
  }
  // s [rows, n] = q k^T for the n keys from j on, read where they lie if they are factors as stored.
  void multiply(Rows q, index b, index g, index j, index n, real* s, index lds) {
    const index whole = round_up(n, VL);
    if (rows_ > UNPACKED_ROWS) {
      const Rows k = keys(b, g, j, n);
      real* panel = panel_.of(depth_ * PANEL);
      pack_transposed(k.data, k.ld, n, depth_, panel);
      gemm(rows_, PANEL, depth_, {q.data, q.ld, 1}, panel, PANEL, s, lds, false);
    } else if (x_.rotated || n != whole || depth_ != x_.dim) {
      const Rows k = keys(b, g, j, n);
      products<real>(rows_, q, {k.data, k.ld}, whole, depth_, s, lds);
    } else {
      as_stored(row_of(x_.k, b, g, j), x_.k.type, x_.k.token, [&](auto k) { products(rows_, q, k, n, depth_, s, lds); });
    }
  }
  // Buckets of the offsets that pairs with some keys have, hidden pairs included.
  Range met_buckets(index b, Range keys) const {
    const int32_t* base = x_.base + b * x_.rows_batch;
    const auto [least, most] = std::minmax_element(base, base + x_.queries);
    const Range offsets{std::max(keys.begin + *least, x_.map.first),
                        std::min(keys.end + *most, x_.map.first + x_.map.count)};
    return offsets.size() ? buckets_of(x_, offsets) : Range{0, 0};
  }
  // Products of the rows with the rows of these buckets, [rows, ld]; whole vectors may be read from any.
  void multiply_buckets(index b, index g) {
    const Operand& left = x_.terms.left;
    const index depth = round_up(left.features, VL);
    real *tokens = left_scratch_.of(x_.queries * depth), *to = product_scratch_.of(rows_ * bucket_ld_);
    for (index n = 0; n < heads_; ++n, to += x_.queries * bucket_ld_) {
      const index h = g * heads_ + n;
      for (index i = 0; i < x_.queries; ++i)
        read_row(left.value, row_of(left.value, b, h, i), 1, left.features, depth, tokens + i * depth);
      const Rows rows = rows_of_buckets(x_.terms.left_rows, h);
      const index count = round_up(buckets_.size(), VL);
      products<real>(x_.queries, {tokens, depth}, {rows.data, rows.ld}, count, depth, to, bucket_ld_);
    }
  }
  // out [rows, width] += weights by bucket, times the values of the buckets.
  void add_bucket_values(index g, real* out) {
    const real* weights = weight_scratch_.of(0);
    for (index n = 0; n < heads_ && buckets_.size(); ++n) {
      const Rows rows = rows_of_buckets(x_.terms.value_rows, g * heads_ + n);
      gemm(x_.queries, width_, buckets_.size(), {weights + n * x_.queries * bucket_ld_, bucket_ld_, 1}, rows.data, rows.ld,
           out + n * x_.queries * width_, width_, true);
    }
  }
  Rows rows_of_buckets(const Operand& rows, index h) {
    const index n = buckets_.size(), width = round_up(rows.features, VL);
    const real* from = rows.of(0, h) + buckets_.begin * rows.features;
    return padded(from, n, rows.features, round_up(n, VL), width, rows_scratch_);
  }
  void add_weighted(const real* s, index lds, index b, index g, index j, index n, real* out) {
    if (rows_ > UNPACKED_ROWS || width_ != x_.value_dim) {
      const Rows v = read_rows(x_.v, b, g, j, n, x_.value_dim, 1, v_scratch_);
      gemm(rows_, width_, n, {s, lds, 1}, v.data, v.ld, out, width_, true);
    } else {
      as_stored(row_of(x_.v, b, g, j), x_.v.type, x_.v.token, [&](auto v) { add_values(rows_, s, lds, v, n, out, width_); });
    }
  }
  // n keys from j on as factors of logits, and zeros up to whole vectors of keys.
  Rows keys(index b, index g, index j, index n) {
    if (!x_.rotated && n % VL == 0) return read_rows(x_.k, b, g, j, n, x_.dim, 1, k_scratch_);
    const index all = round_up(n, VL);
    real* to = k_scratch_.of(all * depth_);
    for (index t = 0; t < n; ++t) {
      read_row(x_.k, row_of(x_.k, b, g, j + t), 1, x_.dim, depth_, to + t * depth_);
      rotate_factor(x_, x_.k_rotary, b, g, j + t, to + t * depth_, 1);
    }
    fill(to + n * depth_, 0, (all - n) * depth_);  // a cap of NaN, masked later, would overflow
    return {to, depth_};
  }
  // Logits of row r for some keys become weights, zero where hidden, relative to the greatest.
  void weigh(index b, index g, index r, Range all, real* s, real& greatest, real& sum_of_weights) {
    const index h = g * heads_ + r / x_.queries, row = b * x_.rows_batch + r % x_.queries;
    const Range visible{std::max<index>(x_.low[row], all.begin) - all.begin,
                        std::min<index>(x_.high[row], all.end) - all.begin};
    const index size = round_up(all.size(), KEY_GROUP);
    if (!visible.size()) return fill(s, 0, size);
    const index offset = all.begin + visible.begin + x_.base[row];  // of the first visible pair
    const Operand& bias = x_.terms.bias_by_offset;
    if (bias) add_range(s + visible.begin, bias.of(b, h) + (offset - x_.terms.first), visible.size());
    if (x_.terms.left_rows)
      spread<true>(x_.map, product_scratch_.of(0) + r * bucket_ld_ - buckets_.begin, offset, s + visible.begin, visible.size());
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    vec m = splat(-INFINITY);
    for (index t = from; t < to; t += VL) {
      vec x = load(s + t);
      if (x_.softcap) x = real(x_.softcap) * hyperbolic_tangent(x * real(1 / x_.softcap));
      store(s + t, x = masked(x, t, visible));
      m = larger(x, m);
    }
    greatest = largest(m);
    const vec finite = splat(greatest == -INFINITY ? real(0) : greatest);  // -inf - -inf would be NaN
    vec sums{};
    for (index t = from; t < to; t += VL) {
      const vec weight = exponential(load(s + t) - finite);
      sums += weight;
      store(s + t, weight);
    }
    sum_of_weights = sum(sums);
    fill_outside(s, {0, size}, {from, to});
    if (x_.terms.value_rows)
      collect(x_.map, s + visible.begin, offset, weight_scratch_.of(0) + r * bucket_ld_ - buckets_.begin, visible.size());
  }

  const Problem& x_;
  const index heads_, rows_, depth_, width_;  // heads that share keys, their queries, padded features
  Range buckets_{0, 0};                       // of a chunk's pairs
  index bucket_ld_ = 0;                       // of what rows have by bucket
  Scratch q_scratch_, k_scratch_, v_scratch_, panel_, s_;
  Scratch left_scratch_, product_scratch_, weight_scratch_, rows_scratch_;
};

inline int attend_few(const Problem& x) {
  const index chunks = (x.keys + KEY_CHUNK - 1) / KEY_CHUNK, groups = x.batch * x.groups;
  const index step = FewRows::numbers(x);
  // Few products are computed sooner than threads are woken.
  const bool few = groups * x.keys * step < (1 << 16);
  try {
    Scratch scratch;
    real* results = scratch.of(groups * chunks * step);
    std::vector<std::atomic<index>> left(groups);
    for (auto& count : left) count = chunks;
    in_parallel(
        few ? Team{1, nullptr} : x.team, groups * chunks, [&] { return FewRows(x); },
        [&](FewRows& worker, index item) {
          const index group = item / chunks, b = group / x.groups, g = group % x.groups;
          worker.attend(b, g, item % chunks, results + item * step);
          if (--left[group] == 0) worker.join(b, g, chunks, results + group * chunks * step);
        });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}  // namespace posenc
