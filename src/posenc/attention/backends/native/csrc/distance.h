// A piecewise-linear function of a distance times a factor of the query.
#pragma once
#include "terms.h"
namespace posenc::NUMBER {
// s[i, j] += slope[h, m] * u + intercept[h, m], u = x[|offset|] * factor[i], m the knots <= u.
// data: x [count], never falling; knots [pieces - 1]; slope, intercept [H, pieces]; factor [b, Q].
// gradient: [parts, H, count], none, [parts, H, pieces] twice, [H, B, Q]. sizes: count, pieces,
// stride of the factor's rows.
class Distance {
 public:
  void begin_head(const Pairs& p, index h) {
    count_ = p.sizes[0], pieces_ = p.sizes[1], factor_batch_ = p.sizes[2];
    x_ = p.data[0], knots_ = p.data[1], factors_ = p.data[4];
    slope_ = p.data[2] + h * pieces_, intercept_ = p.data[3] + h * pieces_;
    real* both = both_.of(2 * count_ - 1);
    for (index d = 0; d < count_; ++d) both[count_ - 1 + d] = both[count_ - 1 - d] = x_[d];
    middle_ = both + count_ - 1;
  }
  void begin_gradient(const Pairs& p, index slot) {
    real* both = d_both_.of(2 * count_ - 1);
    fill(both, 0, 2 * count_ - 1);
    d_middle_ = both + count_ - 1;
    d_x_ = p.gradient[0] + slot * count_;
    d_slope_ = p.gradient[2] + slot * pieces_, d_intercept_ = p.gradient[3] + slot * pieces_;
  }
  void end_gradient() {
    d_x_[0] += d_middle_[0];
    for (index d = 1; d < count_; ++d) d_x_[d] += d_middle_[d] + d_middle_[-d];
  }
  void begin_tile(const Problem& x, index b, index h, index first, index rows) {
    real* to = x.pairs.gradient[4];
    d_factor_ = to ? to + (h * x.batch + b) * x.queries + first : nullptr;
    factor_ = factors_ + b * factor_batch_ + first;
    bounds_.resize(rows * (pieces_ + 1));
    for (index i = 0; i < rows; ++i) {
      int32_t* bound = bounds_.data() + i * (pieces_ + 1);
      bound[0] = 0, bound[pieces_] = INT32_MAX;
      for (index m = 1; m < pieces_; ++m)
        bound[m] = i && factor_[i] == factor_[i - 1] ? bound[m - pieces_ - 1]
                                                     : first_at(knots_[m - 1], factor_[i], bound[m - 1]);
    }
  }
  void add(real* s, index i, index offset, index n) const {
    each_piece(i, offset, n, [&](index t, index size, index m) {
      const vec by = splat(slope_[m] * factor_[i]), more = splat(intercept_[m]);
      const real* x = middle_ + offset + t;
      real* to = s + t;
      index u = 0;
      for (; u + VL <= size; u += VL) store(to + u, load(to + u) + (load(x + u) * by + more));
      if (u < size)
        store_n(to + u, load_n(to + u, size - u) + (load_n(x + u, size - u) * by + more), size - u);
    });
  }
  void collect(const real* ds, index i, index offset, index n) {
    real d_factor = 0;
    each_piece(i, offset, n, [&](index t, index size, index m) {
      const vec by = splat(slope_[m] * factor_[i]);
      const real *x = middle_ + offset + t, *from = ds + t;
      real* to = d_middle_ + offset + t;
      vec total{}, product{};
      index u = 0;
      for (; u + VL <= size; u += VL) {
        const vec d = load(from + u);
        total += d, product += d * load(x + u);
        store(to + u, load(to + u) + d * by);
      }
      if (u < size) {
        const vec d = load_n(from + u, size - u);
        total += d, product += d * load_n(x + u, size - u);
        store_n(to + u, load_n(to + u, size - u) + d * by, size - u);
      }
      const real moment = sum(product);
      d_slope_[m] += moment * factor_[i];
      d_intercept_[m] += sum(total);
      d_factor += moment * slope_[m];
    });
    d_factor_[i] += d_factor;
  }

 private:
  // The first distance, from `least` on, at which u reaches a knot; beyond all if none does.
  int32_t first_at(real knot, real factor, index least) const {
    if (least >= count_) return INT32_MAX;
    const real* end = x_ + count_;
    const real* at = std::partition_point(x_ + least, end, [&](real x) { return x * factor < knot; });
    return at == end ? INT32_MAX : int32_t(at - x_);
  }
  // Calls piece(t, size, m) for stretches of the n offsets from `offset` on that are of one piece.
  template <class F>
  void each_piece(index i, index offset, index n, F piece) const {
    const int32_t* bound = bounds_.data() + i * (pieces_ + 1);
    index t = 0, m = offset < 0 ? pieces_ - 1 : 0;
    while (t < n && offset + t < 0) {
      while (bound[m] > -(offset + t)) --m;
      const index end = std::min<index>(n, 1 - offset - std::max<index>(1, bound[m]));
      piece(t, end - t, m);
      t = end;
    }
    if (t) m = 0;
    while (t < n) {
      while (bound[m + 1] <= offset + t) ++m;
      const index end = std::min<index>(n, bound[m + 1] - offset);
      piece(t, end - t, m);
      t = end;
    }
  }

  Scratch both_, d_both_;
  std::vector<int32_t> bounds_;
  index count_ = 0, pieces_ = 0, factor_batch_ = 0;
  const real *x_ = nullptr, *knots_ = nullptr, *slope_ = nullptr, *intercept_ = nullptr;
  const real *factors_ = nullptr, *factor_ = nullptr, *middle_ = nullptr;
  real *d_middle_ = nullptr, *d_x_ = nullptr, *d_slope_ = nullptr, *d_intercept_ = nullptr;
  real* d_factor_ = nullptr;
};
}  // namespace posenc
