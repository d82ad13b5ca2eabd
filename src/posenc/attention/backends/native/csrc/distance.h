// FIRE's bias: a piecewise-linear function (an MLP of one hidden layer) of a function of the distance
// times a factor of the query.
#pragma once
#include "term.h"
namespace posenc::NUMBER {
// s[i, j] += slope[h, m] * u + intercept[h, m], u = x[|offset|] * factor[i], m the knots <= u.
// data: x [count], never falling; knots [pieces - 1]; slope, intercept [H, pieces]; factor [b, Q].
// gradient: [parts, H, count], none, [parts, H, pieces] twice, [H, B, Q]. sizes: count, pieces,
// stride of the factor's rows.
class Distance : public Term {
 public:
  static bool serves(const Problem& x) { return x.pairs.kind == DISTANCE; }
  void begin_head(const Context& at) {
    const Pairs& p = at.x.pairs;
    count_ = p.sizes[0], pieces_ = p.sizes[1];
    x_ = p.data[0], knots_ = p.data[1];
    slope_ = p.data[2] + at.h * pieces_, intercept_ = p.data[3] + at.h * pieces_;
    // x[|offset|] by offset, center_[offset], so that the loops below run over contiguous numbers.
    real* mirrored = mirrored_.of(2 * count_ - 1);
    for (index d = 0; d < count_; ++d) mirrored[count_ - 1 + d] = mirrored[count_ - 1 - d] = x_[d];
    center_ = mirrored + count_ - 1;
    if (!at.gradient) return;
    const index slot = at.part * at.x.heads + at.h;
    d_center_ = d_mirrored_.of(2 * count_ - 1) + count_ - 1;
    fill(d_center_ - (count_ - 1), 0, 2 * count_ - 1);
    d_x_ = p.gradient[0] + slot * count_;
    d_slope_ = p.gradient[2] + slot * pieces_, d_intercept_ = p.gradient[3] + slot * pieces_;
  }
  void end_head(const Context&) {
    d_x_[0] += d_center_[0];
    for (index d = 1; d < count_; ++d) d_x_[d] += d_center_[d] + d_center_[-d];
  }
  void begin_tile(const Context& at) {
    const Problem& x = at.x;
    const index first = at.tile.i0, rows = at.tile.rows;
    factor_ = x.pairs.data[4] + at.b * x.pairs.sizes[2] + first;
    if (at.gradient) d_factor_ = x.pairs.gradient[4] + (at.h * x.batch + at.b) * x.queries + first;
    bounds_.resize(rows * (pieces_ + 1));  // [row, m]: the first distance of piece m
    for (index i = 0; i < rows; ++i) {
      int32_t* bound = bounds_.data() + i * (pieces_ + 1);
      bound[0] = 0, bound[pieces_] = INT32_MAX;
      for (index m = 1; m < pieces_; ++m)  // most queries have the factor of the one before
        bound[m] = i && factor_[i] == factor_[i - 1] ? bound[m - pieces_ - 1]
                                                     : first_at(knots_[m - 1], factor_[i], bound[m - 1]);
    }
  }
  void add(Context& at, index i, Range visible, real* s) const {
    const index base = at.tile.j0 + at.tile.base[i];
    for_pieces(i, base, visible, [&](index t, index size, index m) {
      const vec slope = splat(slope_[m] * factor_[i]), intercept = splat(intercept_[m]);
      const real* x = center_ + base + t;
      real* to = s + t;
      index u = 0;
      for (; u + VL <= size; u += VL) store(to + u, load(to + u) + (load(x + u) * slope + intercept));
      if (u < size)
        store_n(to + u, load_n(to + u, size - u) + (load_n(x + u, size - u) * slope + intercept), size - u);
    });
  }
  void collect(Context& at, index i, Range visible, const real*, real* ds) {
    const index base = at.tile.j0 + at.tile.base[i];
    real d_factor = 0;
    for_pieces(i, base, visible, [&](index t, index size, index m) {
      const vec slope = splat(slope_[m] * factor_[i]);
      const real *x = center_ + base + t, *from = ds + t;
      real* to = d_center_ + base + t;
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
  // Calls piece(t, size, m) for the runs of the visible keys t, of offsets base + t, that lie within a piece:
  // along negative offsets the distance falls and so does m, along the others both rise.
  template <class F>
  void for_pieces(index i, index base, Range visible, F piece) const {
    const int32_t* bound = bounds_.data() + i * (pieces_ + 1);
    index t = visible.begin, m = pieces_ - 1;
    while (t < visible.end && base + t < 0) {
      while (bound[m] > -(base + t)) --m;
      const index end = std::min<index>(visible.end, 1 - base - std::max<index>(1, bound[m]));
      piece(t, end - t, m);
      t = end;
    }
    m = 0;
    while (t < visible.end) {
      while (bound[m + 1] <= base + t) ++m;
      const index end = std::min<index>(visible.end, bound[m + 1] - base);
      piece(t, end - t, m);
      t = end;
    }
  }

  Scratch mirrored_, d_mirrored_;
  std::vector<int32_t> bounds_;
  index count_ = 0, pieces_ = 0;
  const real *x_ = nullptr, *knots_ = nullptr, *slope_ = nullptr, *intercept_ = nullptr;
  const real *factor_ = nullptr, *center_ = nullptr;
  real *d_center_ = nullptr, *d_x_ = nullptr, *d_slope_ = nullptr, *d_intercept_ = nullptr;
  real* d_factor_ = nullptr;
};
}  // namespace posenc
