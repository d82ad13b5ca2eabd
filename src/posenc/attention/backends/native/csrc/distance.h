// FIRE's bias: a piecewise-linear function (an MLP of one hidden layer) of a function of the distance
// times a factor of the query.
#pragma once
#include <vector>
#include "problem.h"
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
    // x[|offset|] by offset, center_[offset], so that the loops below run over contiguous numbers.
    real* mirrored = mirrored_.of(2 * count_ - 1);
    for (index d = 0; d < count_; ++d) mirrored[count_ - 1 + d] = mirrored[count_ - 1 - d] = x_[d];
    center_ = mirrored + count_ - 1;
  }
  void begin_gradient(const Pairs& p, index slot) {
    real* mirrored = d_mirrored_.of(2 * count_ - 1);
    fill(mirrored, 0, 2 * count_ - 1);
    d_center_ = mirrored + count_ - 1;
    d_x_ = p.gradient[0] + slot * count_;
    d_slope_ = p.gradient[2] + slot * pieces_, d_intercept_ = p.gradient[3] + slot * pieces_;
  }
  void end_gradient() {
    d_x_[0] += d_center_[0];
    for (index d = 1; d < count_; ++d) d_x_[d] += d_center_[d] + d_center_[-d];
  }
  void begin_tile(const Problem& x, index b, index h, index first, index rows) {
    real* to = x.pairs.gradient[4];
    d_factor_ = to ? to + (h * x.batch + b) * x.queries + first : nullptr;
    factor_ = factors_ + b * factor_batch_ + first;
    bounds_.resize(rows * (pieces_ + 1));  // [row, m]: the first distance of piece m
    for (index i = 0; i < rows; ++i) {
      int32_t* bound = bounds_.data() + i * (pieces_ + 1);
      bound[0] = 0, bound[pieces_] = INT32_MAX;
      for (index m = 1; m < pieces_; ++m)  // most queries have the factor of the one before
        bound[m] = i && factor_[i] == factor_[i - 1] ? bound[m - pieces_ - 1]
                                                     : first_at(knots_[m - 1], factor_[i], bound[m - 1]);
    }
  }
  void add(real* s, index i, index offset, index n) const {
    for_pieces(i, offset, n, [&](index t, index size, index m) {
      const vec slope = splat(slope_[m] * factor_[i]), intercept = splat(intercept_[m]);
      const real* x = center_ + offset + t;
      real* to = s + t;
      index u = 0;
      for (; u + VL <= size; u += VL) store(to + u, load(to + u) + (load(x + u) * slope + intercept));
      if (u < size)
        store_n(to + u, load_n(to + u, size - u) + (load_n(x + u, size - u) * slope + intercept), size - u);
    });
  }
  void collect(const real* ds, index i, index offset, index n) {
    real d_factor = 0;
    for_pieces(i, offset, n, [&](index t, index size, index m) {
      const vec slope = splat(slope_[m] * factor_[i]);
      const real *x = center_ + offset + t, *from = ds + t;
      real* to = d_center_ + offset + t;
      vec ds_sum{}, moments{};
      index u = 0;
      for (; u + VL <= size; u += VL) {
        const vec d = load(from + u);
        ds_sum += d, moments += d * load(x + u);
        store(to + u, load(to + u) + d * slope);
      }
      if (u < size) {
        const vec d = load_n(from + u, size - u);
        ds_sum += d, moments += d * load_n(x + u, size - u);
        store_n(to + u, load_n(to + u, size - u) + d * slope, size - u);
      }
      const real moment = sum(moments);
      d_slope_[m] += moment * factor_[i];
      d_intercept_[m] += sum(ds_sum);
      d_factor += moment * slope_[m];
    });
    d_factor_[i] += d_factor;
  }

 private:
  // The first distance, from `least` on, at which u reaches a knot; beyond all if none does. By
  // bisection: x never falls, and factors are positive.
  int32_t first_at(real knot, real factor, index least) const {
    if (least >= count_) return INT32_MAX;
    const real* end = x_ + count_;
    const real* at = std::partition_point(x_ + least, end, [&](real x) { return x * factor < knot; });
    return at == end ? INT32_MAX : int32_t(at - x_);
  }
  // Calls piece(t, size, m) for the runs of the n offsets from `offset` on that lie within a piece:
  // along negative offsets the distance falls and so does m, along the others both rise.
  template <class F>
  void for_pieces(index i, index offset, index n, F piece) const {
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

  Scratch mirrored_, d_mirrored_;
  std::vector<int32_t> bounds_;
  index count_ = 0, pieces_ = 0, factor_batch_ = 0;
  const real *x_ = nullptr, *knots_ = nullptr, *slope_ = nullptr, *intercept_ = nullptr;
  const real *factors_ = nullptr, *factor_ = nullptr, *center_ = nullptr;
  real *d_center_ = nullptr, *d_x_ = nullptr, *d_slope_ = nullptr, *d_intercept_ = nullptr;
  real* d_factor_ = nullptr;
};
}  // namespace posenc
