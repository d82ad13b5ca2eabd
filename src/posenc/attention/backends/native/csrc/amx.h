// Products by AMX tiles of bfloat16, summed in float32.
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

// Right factor: pairs of rows in strips of TILE columns, [N / TILE][K / 2][TILE].
struct Strips {
  const uint32_t* data = nullptr;
  index ld = 0;  // of a strip
  Strips at(index row, index column) const { return {data + row / 2 * TILE + column / TILE * ld, ld}; }
};
// Left factor: [rows][ld], zero up to a multiple of DEPTH columns.
struct HalfRows {
  const uint16_t* data = nullptr;
  index ld = 0;
  HalfRows at(index row, index column = 0) const { return {data + row * ld + column, ld}; }
};

#ifdef POSENC_AMX
// The processor's permission to use tiles, asked for once a process.
inline bool has_tiles() {
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

// C (+)= A B for R x S tiles.
template <int R, int S>
__attribute__((noinline)) void half_block(index K, HalfRows x, Strips y, float* c, index ldc, bool add) {
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
  const uint16_t* a = x.data;
  const uint32_t* b = y.data;
  for (index k = 0; k < K; k += DEPTH, a += DEPTH, b += DEPTH / 2 * TILE) {
    _tile_loadd(4, a, x.ld * 2);
    if (R > 1) _tile_loadd(5, a + TILE * x.ld, x.ld * 2);
    _tile_loadd(6, b, 64);
    if (S > 1) _tile_loadd(7, b + y.ld, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) _tile_dpbf16ps(2, 5, 6);
    if (S > 1) _tile_dpbf16ps(1, 4, 7);
    if (R > 1 && S > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, ldc * 4);
  if (S > 1) _tile_stored(1, c + TILE, ldc * 4);
  if (R > 1) _tile_stored(2, c + TILE * ldc, ldc * 4);
  if (R > 1 && S > 1) _tile_stored(3, c + TILE * ldc + TILE, ldc * 4);
}

// C[M, N] (+)= A[M, K] B[K, N]: M and N multiples of TILE, K of DEPTH.
inline void half_gemm(index M, index N, index K, HalfRows x, Strips y, float* c, index ldc, bool add) {
  for (index n = 0; n < N; n += 2 * TILE)
    for (index m = 0; m < M; m += 2 * TILE) {
      const bool two = m + TILE < M, wide = n + TILE < N;
      const auto block = two ? wide ? half_block<2, 2> : half_block<2, 1>
                             : wide ? half_block<1, 2> : half_block<1, 1>;
      block(K, x.at(m), y.at(0, n), c + m * ldc + n, ldc, add);
    }
}

inline __m256i halved(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
inline void halve(vec x, uint16_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halved(x)); }
// VL numbers of two rows as pairs.
inline void halve_two(vec x, vec y, uint32_t* to) {
  const __m512i low = _mm512_cvtepu16_epi32(halved(x)), high = _mm512_cvtepu16_epi32(halved(y));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#else
inline bool has_tiles() { return false; }
struct TileRegisters {
  explicit TileRegisters(bool) {}
};
inline void half_gemm(index, index, index, HalfRows, Strips, real*, index, bool) {}
inline void halve(vec, uint16_t*) {}
inline void halve_two(vec, vec, uint32_t*) {}
#endif
inline void halve_row(const real* from, index n, uint16_t* to) {
  for (index t = 0; t < n; t += VL) halve(load(from + t), to + t);
}

// Scratch for numbers of 16 or 32 bits.
template <class T>
T* scratch_of(Scratch& scratch, index n) {
  return reinterpret_cast<T*>(scratch.of((n * index(sizeof(T)) + index(sizeof(real)) - 1) / index(sizeof(real))));
}

// Some tokens of one head, as factors. Tokens in bfloat16 are times `by` that is a power of two.
class HeadTokens {
 public:
  HeadTokens(const Tokens& x, index b, index h, index first, index count, index features, real by = 1)
      : x_(x), from_(row_of(x, b, h, first)), count_(count), features_(features), by_(by) {}
  // Left factor [tokens, features], with rows of zeros up to a multiple of TILE.
  HalfRows rows(Scratch& scratch) const {
    const index width = round_up(features_, DEPTH);
    uint16_t* to = scratch_of<uint16_t>(scratch, round_up(count_, TILE) * width);
    alignas(64) real wide[DEPTH];
    for (index t = 0; t < round_up(count_, TILE); ++t)
      for (index d = 0; d < width; d += DEPTH) {
        read(t, d, wide);
        halve_row(wide, DEPTH, to + t * width + d);
      }
    return {to, width};
  }
  // Right factor [features, tokens].
  Strips columns(Scratch& scratch) const {
    const index ld = round_up(features_, DEPTH) / 2 * TILE;
    uint32_t* to = scratch_of<uint32_t>(scratch, round_up(count_, PANEL) / TILE * ld);
    alignas(64) real wide[DEPTH];
    alignas(64) uint16_t rows[TILE][DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += TILE)
      for (index d = 0; d < features_; d += DEPTH) {
        for (index l = 0; l < TILE; ++l) {
          read(t + l, d, wide);
          halve_row(wide, DEPTH, rows[l]);
        }
        vec block[VL];
        for (index l = 0; l < VL; ++l) block[l] = load(reinterpret_cast<const real*>(rows[l]));
        transpose(block);
        uint32_t* strip = to + t / TILE * ld + d / 2 * TILE;
        for (index l = 0; l < VL; ++l) store(reinterpret_cast<real*>(strip + l * TILE), block[l]);
      }
    return {to, ld};
  }
  // Right factor [tokens, features], with rows of zeros up to a multiple of PANEL.
  Strips pairs(Scratch& scratch) const {
    const index ld = round_up(count_, PANEL) / 2 * TILE;
    uint32_t* to = scratch_of<uint32_t>(scratch, round_up(features_, DEPTH) / TILE * ld);
    alignas(64) real wide[2][DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += 2)
      for (index d = 0; d < features_; d += DEPTH) {
        read(t, d, wide[0]);
        read(t + 1, d, wide[1]);
        for (index c = 0; c < DEPTH; c += VL)
          halve_two(load(wide[0] + c), load(wide[1] + c), to + (d + c) / TILE * ld + t / 2 * TILE);
      }
    return {to, ld};
  }

 private:
  // Features from d on of a token, zero beyond the last of either.
  void read(index t, index d, real* wide) const {
    if (t >= count_) return fill(wide, 0, DEPTH);
    const index bytes = x_.type == REAL ? index(sizeof(real)) : 2;
    read_row(x_, from_ + (t * x_.token + d) * bytes, by_, std::min(DEPTH, features_ - d), DEPTH, wide);
  }
  const Tokens& x_;
  const char* from_;
  index count_, features_;
  real by_;
};

// Left factor [features, tokens]: the transpose of rows, zero up to multiples of TILE and DEPTH.
inline HalfRows half_transpose(Rows x, index count, index features, Scratch& scratch) {
  const index width = round_up(count, DEPTH);
  uint16_t* to = scratch_of<uint16_t>(scratch, round_up(features, TILE) * width);
  for (index t = 0; t < width; t += VL)
    for (index d = 0; d < features; d += VL) {
      vec block[VL];
      for (index l = 0; l < VL; ++l)
        block[l] = t + l < count ? load_n(x.at(t + l) + d, std::min<index>(VL, features - d)) : vec{};
      transpose(block);
      for (index l = 0; l < VL; ++l) halve(block[l], to + (d + l) * width + t);
    }
  return {to, width};
}
// to [tokens, width] += the transpose of x [width, tokens].
inline void add_transpose(const real* x, index ld, index count, index width, real* to) {
  for (index t = 0; t < count; t += VL)
    for (index d = 0; d < width; d += VL) {
      vec block[VL];
      for (index l = 0; l < VL; ++l) block[l] = load(x + (d + l) * ld + t);
      transpose(block);
      for (index l = 0; l < std::min<index>(VL, count - t); ++l) {
        real* row = to + (t + l) * width + d;
        store(row, load(row) + block[l]);
      }
    }
}

// Numbers [rows, PANEL] as factors: pairs of rows to be multiplied by a left one, and rows.
class HalfPanel {
 public:
  // Of `count` rows, get(row, column) the VL numbers there; without `both` as pairs alone.
  template <class F>
  void set(index count, bool both, F get) {
    const index depth = round_up(count, DEPTH), ld = depth / 2 * TILE;
    uint16_t* to_rows = both ? scratch_of<uint16_t>(rows_, depth * PANEL) : nullptr;
    uint32_t* to = scratch_of<uint32_t>(pairs_, depth * PANEL / 2);
    rows = {to_rows, PANEL}, pairs = {to, ld};
    for (index i = 0; i < depth; i += 2)
      for (index c = 0; c < PANEL; c += VL) {
        const vec x = i < count ? get(i, c) : vec{}, y = i + 1 < count ? get(i + 1, c) : vec{};
        halve_two(x, y, to + c / TILE * ld + i / 2 * TILE);
        if (both) halve(x, to_rows + i * PANEL + c), halve(y, to_rows + (i + 1) * PANEL + c);
      }
  }
  HalfRows rows;
  Strips pairs;

 private:
  Scratch rows_, pairs_;
};
}  // namespace posenc
