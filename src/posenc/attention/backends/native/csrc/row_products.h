// Products of few rows with keys and values where these lie: as they are stored, each read once.
#pragma once
#include "rotation.h"
namespace posenc::NUMBER {
// Keys or values of one head as they are stored, from one token on.
template <class Number>
struct Stored {
  const Number* data;
  index ld;
  const Number* at(index t) const { return data + t * ld; }
};
// Calls f(size, first) for rows by fours, then two, then one; size is a constant.
template <class F>
inline void for_rows(index rows, F f) {
  index r = 0;
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>{}, r);
  if (rows & 2) f(std::integral_constant<int, 2>{}, r), r += 2;
  if (rows & 1) f(std::integral_constant<int, 1>{}, r);
}
// s [M, VL / M] = products of M rows with VL / M keys; depth is a multiple of VL.
template <int M, class Number>
inline void products_tile(Rows q, Stored<Number> k, index depth, real* s, index lds) {
  constexpr int N = VL / M;
  vec sums[VL];
#pragma GCC unroll 16
  for (int a = 0; a < VL; ++a) sums[a] = vec{};
  for (index d = 0; d < depth; d += VL) {
    vec keys[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) keys[n] = Lanes<Number>::load(k.at(n) + d);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const vec query = load(q.at(m) + d);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m * N + n] += query * keys[n];
    }
  }
  real lanes[VL];
  store(lanes, sums_of_lanes(sums));
  for (int m = 0; m < M; ++m) std::copy_n(lanes + m * N, N, s + m * lds);
}
// s [rows, keys] = q k^T; keys is a multiple of VL.
template <class Number>
inline void products(index rows, Rows q, Stored<Number> k, index keys, index depth, real* s, index lds) {
  for (index j = 0; j < keys; j += VL)
    for_rows(rows, [&](auto size, index r) {
      constexpr int M = std::min<int>(size, VL);
      for (index m = r; m < r + size; m += M)
        for (index n = j; n < j + VL; n += VL / M)
          products_tile<M, Number>({q.at(m), q.ld}, {k.at(n), k.ld}, depth, s + m * lds + n, lds);
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
}  // namespace posenc
