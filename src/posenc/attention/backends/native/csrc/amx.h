// Products of bfloat16 matrices by AMX tiles, summed in float32; float32 products elsewhere.
#pragma once
#include "gemm.h"
#include "problem.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && !defined(POSENC_DOUBLE)
#define POSENC_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
namespace posenc::NUMBER {
constexpr index TILE = 16;   // rows, and columns in float32, of a register tile
constexpr index DEPTH = 32;  // products that one instruction sums

// Pairs of bfloat16 in strips of TILE columns: [N / TILE][K / 2][TILE].
struct Strips {
  const uint32_t* data = nullptr;
  index ld = 0;  // of a strip
};

#ifdef POSENC_AMX
constexpr bool MAY_HALVE = true;

// The processor's permission to use tiles, asked for once a process.
inline bool granted() {
  constexpr int request = 0x1023, tile_data = 18;
  static const bool answer = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return answer;
}

// Tiles of one thread: eight, of 16 rows of 64 bytes.
class TileRegisters {
 public:
  explicit TileRegisters(bool used) : used_(used) {
    if (!used) return;
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    std::fill_n(shape.bytes, 8, uint16_t(64));
    std::fill_n(shape.rows, 8, uint8_t(TILE));
    asm volatile("" : : "r"(&shape) : "memory");  // the next line tells of its first bytes alone
    _tile_loadconfig(&shape);
  }
  ~TileRegisters() {
    if (used_) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;

 private:
  bool used_;
};

template <int R, int S>
__attribute__((noinline)) void half_block(index K, const uint16_t* a, index lda, const uint32_t* b,
                                          index ldb, float* c, index ldc, bool add) {
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
  if (add) {
    _tile_loadd(0, c, ldc * 4);
    if (S > 1) _tile_loadd(1, c + TILE, ldc * 4);
    if (R > 1) _tile_loadd(2, c + TILE * ldc, ldc * 4);
    if (R > 1 && S > 1) _tile_loadd(3, c + TILE * ldc + TILE, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (index k = 0; k < K; k += DEPTH, a += DEPTH, b += DEPTH / 2 * TILE) {
    _tile_loadd(4, a, lda * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) {
      _tile_loadd(5, a + TILE * lda, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (S > 1) {
      _tile_loadd(7, b + ldb, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (R > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, ldc * 4);
  if (S > 1) _tile_stored(1, c + TILE, ldc * 4);
  if (R > 1) _tile_stored(2, c + TILE * ldc, ldc * 4);
  if (R > 1 && S > 1) _tile_stored(3, c + TILE * ldc + TILE, ldc * 4);
}

// C[M, N] (+)= A[M, K] B[K, N]: M and N multiples of TILE, K of DEPTH.
inline void half_gemm(index M, index N, index K, const uint16_t* a, index lda, Strips b, float* c,
                      index ldc, bool add) {
  for (index n = 0; n < N; n += 2 * TILE) {
    const uint32_t* strip = b.data + n / TILE * b.ld;
    for (index m = 0; m < M; m += 2 * TILE) {
      const bool two = m + TILE < M, wide = n + TILE < N;
      const auto block = two ? wide ? half_block<2, 2> : half_block<2, 1>
                             : wide ? half_block<1, 2> : half_block<1, 1>;
      block(K, a + m * lda, lda, strip, b.ld, c + m * ldc + n, ldc, add);
    }
  }
}

// dst[0, n) = src[0, n) in bfloat16; n a multiple of VL.
inline void halve(const float* src, uint16_t* dst, index n) {
  for (index t = 0; t < n; t += VL) {
    const __m256bh x = _mm512_cvtneps_pbh(_mm512_loadu_ps(src + t));
    std::memcpy(dst + t, &x, sizeof x);
  }
}
#else
constexpr bool MAY_HALVE = false;
inline bool granted() { return false; }
struct TileRegisters {
  explicit TileRegisters(bool) {}
};
inline void half_gemm(index, index, index, const uint16_t*, index, Strips, real*, index, bool) {}
inline void halve(const real*, uint16_t*, index) {}
#endif

// Whether products of these tokens are of bfloat16.
inline bool halves(const Tokens& x) { return MAY_HALVE && x.type == BFLOAT16 && granted(); }

// Scratch for numbers of 16 or 32 bits.
template <class T>
T* scratch_of(Scratch& scratch, index n) {
  return reinterpret_cast<T*>(scratch.of((n * index(sizeof(T)) + index(sizeof(real)) - 1) / index(sizeof(real))));
}

// Left factor: rows of tokens, features up to a multiple of DEPTH and rows to one of TILE zero.
struct HalfRows {
  const uint16_t* data = nullptr;
  index ld = 0;
  const uint16_t* at(index t) const { return data + t * ld; }
};
// Tokens times `by`, which is a power of two.
inline HalfRows half_rows(const Tokens& x, index b, index h, index first, index rows, index features,
                          real by, Scratch& scratch) {
  const index width = round_up(features, DEPTH), count = round_up(rows, TILE);
  uint16_t* to = scratch_of<uint16_t>(scratch, count * width);
  std::memset(to, 0, count * width * 2);
  for (index t = 0; t < rows; ++t) {
    uint16_t* row = to + t * width;
    std::memcpy(row, row_of(x, b, h, first + t), features * 2);
    if (by != 1)
      for (index d = 0; d < features; ++d) row[d] = to_bfloat16(from_bfloat16(row[d]) * float(by));
  }
  return {to, width};
}

// Strips of the transpose of tokens [count, features]: columns are tokens, pairs features.
inline Strips half_columns(const Tokens& x, index b, index h, index count, index features,
                           Scratch& scratch) {
  const index pairs = round_up(features, DEPTH) / 2, columns = round_up(count, PANEL);
  uint32_t* to = scratch_of<uint32_t>(scratch, columns * pairs);
  std::memset(to, 0, columns * pairs * 4);
  for (index t = 0; t < count; ++t) {
    const char* from = row_of(x, b, h, t);
    uint32_t* strip = to + t / TILE * pairs * TILE + t % TILE;
    uint32_t pair;
    for (index p = 0; p < features / 2; ++p) std::memcpy(&pair, from + 4 * p, 4), strip[p * TILE] = pair;
    if (features % 2) {
      uint16_t odd;
      std::memcpy(&odd, from + 2 * (features - 1), 2);
      strip[features / 2 * TILE] = odd;
    }
  }
  return {to, pairs * TILE};
}

// Strips of tokens [count, features]: columns are features, pairs tokens.
inline Strips half_pairs(const Tokens& x, index b, index h, index count, index features,
                         Scratch& scratch) {
  const index pairs = round_up(count, PANEL) / 2, columns = round_up(features, TILE);
  uint32_t* to = scratch_of<uint32_t>(scratch, columns * pairs);
  std::memset(to, 0, columns * pairs * 4);
  for (index t = 0; t < count; ++t) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row_of(x, b, h, t));
    uint32_t* row = to + t / 2 * TILE;
    for (index d0 = 0; d0 < features; d0 += TILE, row += pairs * TILE)
      for (index d = d0; d < std::min(features, d0 + TILE); ++d)
        row[d - d0] |= uint32_t(from[d]) << (t % 2 * 16);
  }
  return {to, pairs * TILE};
}
}  // namespace posenc
