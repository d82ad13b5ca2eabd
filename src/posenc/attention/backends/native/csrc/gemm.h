// Products of small matrices, one register tile of the result at a time. Nothing is blocked for
// caches: operands are tiles of attention already.
#pragma once
#include "vec.h"
namespace posenc::NUMBER {
// A[m, k] is a[m * rs + k * cs]: rows as they are stored, or their transpose.
struct Strided {
  const real* a;
  index rs, cs;
};

// C[M, V * VL] (+)= A[M, K] B[K, V * VL], all of C in registers. Loops over m and v have to be
// unrolled: else acc would be an array in memory.
template <int M, int V>
inline void register_tile(index K, Strided x, const real* b, index ldb, real* c, index ldc, bool add) {
  vec acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = vec{};
  const real* a = x.a;
  for (index k = 0; k < K; ++k, a += x.cs, b += ldb) {
    vec row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(b + v * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vec s = splat(a[m * x.rs]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] += s * row[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      real* to = c + m * ldc + v * VL;
      store(to, add ? load(to) + acc[m][v] : acc[m][v]);
    }
}

// V * VL columns of C; the last M % MR rows by register tiles of their own size.
template <int V>
void columns(index M, index K, Strided x, const real* b, index ldb, real* c, index ldc, bool add) {
  index m = 0;
  for (; m + MR <= M; m += MR, x.a += MR * x.rs, c += MR * ldc)
    register_tile<MR, V>(K, x, b, ldb, c, ldc, add);
  switch (M - m) {
    case 5: return register_tile<5, V>(K, x, b, ldb, c, ldc, add);
    case 4: return register_tile<4, V>(K, x, b, ldb, c, ldc, add);
    case 3: return register_tile<3, V>(K, x, b, ldb, c, ldc, add);
    case 2: return register_tile<2, V>(K, x, b, ldb, c, ldc, add);
    case 1: return register_tile<1, V>(K, x, b, ldb, c, ldc, add);
  }
}

// C[M, N] (+)= A[M, K] B[K, N], N a multiple of VL.
inline void gemm(index M, index N, index K, Strided x, const real* b, index ldb, real* c, index ldc,
                 bool add) {
  index n = 0;
  for (; n + NV * VL <= N; n += NV * VL) columns<NV>(M, K, x, b + n, ldb, c + n, ldc, add);
  for (; n + 2 * VL <= N; n += 2 * VL) columns<2>(M, K, x, b + n, ldb, c + n, ldc, add);
  for (; n < N; n += VL) columns<1>(M, K, x, b + n, ldb, c + n, ldc, add);
}

// Panels [ceil(rows / PANEL)][depth][PANEL] of the transpose of x [rows, depth], zero beyond rows:
// B of products with x^T, read in order.
inline void pack_transposed(const real* x, index ld, index rows, index depth, real* panels) {
  for (index r0 = 0; r0 < rows; r0 += PANEL, panels += depth * PANEL) {
    const index n = std::min<index>(PANEL, rows - r0);
    for (index r = 0; r < PANEL; r += VL)
      for (index d = 0; d < depth; d += VL) {
        vec block[VL];
        for (int l = 0; l < VL; ++l)
          block[l] = r + l < n ? load_n(x + (r0 + r + l) * ld + d, std::min<index>(VL, depth - d)) : vec{};
        transpose(block);
        for (int l = 0; l < VL && d + l < depth; ++l) store(panels + (d + l) * PANEL + r, block[l]);
      }
  }
}
}  // namespace posenc
