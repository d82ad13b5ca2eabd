// Products by AMX tiles of bfloat16, summed in float32, for factors in bfloat16 and in float32.
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

constexpr index MOST_PARTS = 3;  // of a number of float32, whose mantissa is three times as long

// A number of float32 is the sum of its parts in bfloat16, the largest first. Of two factors the
// products of part i and part j count where i + j < parts: the others are less than float32 rounds.

// Right factor: pairs of rows in strips of TILE columns, [parts][N / TILE][K / 2][TILE].
struct Strips {
  const uint32_t* data = nullptr;
  index ld = 0, part = 0;  // of a strip, of a part
  Strips at(index row, index column) const { return {data + row / 2 * TILE + column / TILE * ld, ld, part}; }
};
// Left factor: [parts][rows][ld], zero up to a multiple of DEPTH columns.
struct HalfRows {
  const uint16_t* data = nullptr;
  index ld = 0, parts = 0, part = 0;
  HalfRows at(index row, index column = 0) const { return {data + row * ld + column, ld, parts, part}; }
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

// C (+)= A B for R x S tiles, numbers of P parts.
template <int P, int R, int S>
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
  const auto rows = [&](index part) {
    _tile_loadd(4, a + part * x.part, x.ld * 2);
    if (R > 1) _tile_loadd(5, a + part * x.part + TILE * x.ld, x.ld * 2);
  };
  const auto columns = [&](index part) {
    _tile_loadd(6, b + part * y.part, 64);
    if (S > 1) _tile_loadd(7, b + part * y.part + y.ld, 64);
  };
  const auto multiply = [] {
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) _tile_dpbf16ps(2, 5, 6);
    if (S > 1) _tile_dpbf16ps(1, 4, 7);
    if (R > 1 && S > 1) _tile_dpbf16ps(3, 5, 7);
  };
  for (index k = 0; k < K; k += DEPTH, a += DEPTH, b += DEPTH / 2 * TILE) {
    rows(0);
    if (P == MOST_PARTS) {  // in an order in which either factor stays, the largest product last
      columns(2), multiply();
      columns(1), multiply();
      rows(1), multiply();
      columns(0), multiply();
      rows(2), multiply();
      rows(0);
    } else {
      columns(0);
    }
    multiply();
  }
  _tile_stored(0, c, ldc * 4);
  if (S > 1) _tile_stored(1, c + TILE, ldc * 4);
  if (R > 1) _tile_stored(2, c + TILE * ldc, ldc * 4);
  if (R > 1 && S > 1) _tile_stored(3, c + TILE * ldc + TILE, ldc * 4);
}

template <int P>
void half_blocks(index M, index N, index K, HalfRows x, Strips y, float* c, index ldc, bool add) {
  // What is multiplied at once stays in the first cache: some rows, as each two strips go by.
  const index depth = P == 1 ? K : 2 * DEPTH, group = P == 1 ? M : N > 4 * TILE ? 4 * TILE : 2 * TILE;
  for (index k = 0; k < K; k += depth)
    for (index first = 0; first < M; first += group)
      for (index n = 0; n < N; n += 2 * TILE)
        for (index m = first; m < std::min(M, first + group); m += 2 * TILE) {
          const bool two = m + TILE < M, wide = n + TILE < N;
          const auto block = two ? wide ? half_block<P, 2, 2> : half_block<P, 2, 1>
                                 : wide ? half_block<P, 1, 2> : half_block<P, 1, 1>;
          block(std::min(depth, K - k), x.at(m, k), y.at(k, n), c + m * ldc + n, ldc, add || k);
        }
}
// C[M, N] (+)= A[M, K] B[K, N]: M and N multiples of TILE, K of DEPTH.
inline void half_gemm(index M, index N, index K, HalfRows x, Strips y, float* c, index ldc, bool add) {
  x.parts == 1 ? half_blocks<1>(M, N, K, x, y, c, ldc, add) : half_blocks<MOST_PARTS>(M, N, K, x, y, c, ldc, add);
}

inline __m512i widened(__m256i part) { return _mm512_cvtepu16_epi32(part); }
// x in bfloat16; x becomes what is left of it.
inline __m256i take_part(__m512& x) {
  const __m256i part = (__m256i)_mm512_cvtneps_pbh(x);
  x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(widened(part), 16)));
  return part;
}
inline void store_part(uint16_t* to, __m256i part) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), part); }
// The parts of VL numbers.
template <int P>
inline void split(vec numbers, uint16_t* to, index part) {
  __m512 x = (__m512)numbers;
#pragma GCC unroll 3
  for (int p = 0; p < P; ++p, to += part) store_part(to, take_part(x));
}
// The parts of VL numbers of two rows as pairs and, unless there is no room for them, as rows.
template <int P>
inline void split_two(vec first, vec second, uint32_t* to, index part, uint16_t* rows, index ld, index row_part) {
  __m512 x = (__m512)first, y = (__m512)second;
#pragma GCC unroll 3
  for (int p = 0; p < P; ++p, to += part) {
    const __m256i low = take_part(x), high = take_part(y);
    _mm512_storeu_si512(to, _mm512_or_si512(widened(low), _mm512_slli_epi32(widened(high), 16)));
    if (!rows) continue;
    store_part(rows, low);
    store_part(rows + ld, high);
    rows += row_part;
  }
}
#else
constexpr bool MAY_HALVE = false;
inline bool granted() { return false; }
struct TileRegisters {
  explicit TileRegisters(bool) {}
};
inline void half_gemm(index, index, index, HalfRows, Strips, real*, index, bool) {}
template <int P>
inline void split(vec, uint16_t*, index) {}
template <int P>
inline void split_two(vec, vec, uint32_t*, index, uint16_t*, index, index) {}
#endif

// Parts of these tokens' numbers; 0 where their products are not by tiles.
inline index parts_of(const Tokens& x) {
  if (!MAY_HALVE || x.type == FLOAT16 || !granted()) return 0;
  return x.type == REAL ? MOST_PARTS : 1;
}
inline void split_row(const real* from, index n, index parts, uint16_t* to, index part) {
  for (index t = 0; t < n; t += VL)
    parts == 1 ? split<1>(load(from + t), to + t, part) : split<MOST_PARTS>(load(from + t), to + t, part);
}

// Scratch for numbers of 16 or 32 bits.
template <class T>
T* scratch_of(Scratch& scratch, index n) {
  return reinterpret_cast<T*>(scratch.of((n * index(sizeof(T)) + index(sizeof(real)) - 1) / index(sizeof(real))));
}

// Some tokens of one head, as factors. Tokens in bfloat16 are times `by` that is a power of two.
class HeadTokens {
 public:
  HeadTokens(const Tokens& x, index b, index h, index first, index count, index features, index parts, real by = 1)
      : x_(x), from_(row_of(x, b, h, first)), count_(count), features_(features), parts_(parts), by_(by) {}
  // Left factor [tokens, features], with rows of zeros up to a multiple of TILE.
  HalfRows rows(Scratch& scratch) const {
    const index width = round_up(features_, DEPTH), part = round_up(count_, TILE) * width;
    uint16_t* to = scratch_of<uint16_t>(scratch, parts_ * part);
    alignas(64) real wide[DEPTH];
    for (index t = 0; t < round_up(count_, TILE); ++t)
      for (index d = 0; d < width; d += DEPTH) {
        read(t, d, wide);
        split_row(wide, DEPTH, parts_, to + t * width + d, part);
      }
    return {to, width, parts_, part};
  }
  // Right factor [features, tokens].
  Strips columns(Scratch& scratch) const {
    const index ld = round_up(features_, DEPTH) / 2 * TILE, part = round_up(count_, PANEL) / TILE * ld;
    uint32_t* to = scratch_of<uint32_t>(scratch, parts_ * part);
    alignas(64) real wide[DEPTH];
    alignas(64) uint16_t rows[MOST_PARTS][TILE][DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += TILE)
      for (index d = 0; d < features_; d += DEPTH) {
        for (index l = 0; l < TILE; ++l) {
          read(t + l, d, wide);
          split_row(wide, DEPTH, parts_, rows[0][l], TILE * DEPTH);
        }
        for (index p = 0; p < parts_; ++p) {
          vec block[VL];
          for (index l = 0; l < VL; ++l) block[l] = load(reinterpret_cast<const real*>(rows[p][l]));
          transpose(block);
          uint32_t* strip = to + p * part + t / TILE * ld + d / 2 * TILE;
          for (index l = 0; l < VL; ++l) store(reinterpret_cast<real*>(strip + l * TILE), block[l]);
        }
      }
    return {to, ld, part};
  }
  // Right factor [tokens, features], with rows of zeros up to a multiple of PANEL.
  Strips pairs(Scratch& scratch) const {
    const index ld = round_up(count_, PANEL) / 2 * TILE, part = round_up(features_, DEPTH) / TILE * ld;
    uint32_t* to = scratch_of<uint32_t>(scratch, parts_ * part);
    alignas(64) real wide[2][DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += 2)
      for (index d = 0; d < features_; d += DEPTH) {
        read(t, d, wide[0]);
        read(t + 1, d, wide[1]);
        for (index c = 0; c < DEPTH; c += VL) {
          const vec x = load(wide[0] + c), y = load(wide[1] + c);
          uint32_t* strip = to + (d + c) / TILE * ld + t / 2 * TILE;
          if (parts_ == 1)
            split_two<1>(x, y, strip, part, nullptr, 0, 0);
          else
            split_two<MOST_PARTS>(x, y, strip, part, nullptr, 0, 0);
        }
      }
    return {to, ld, part};
  }

 private:
  // Features from d on of a token, zero beyond the last of either.
  void read(index t, index d, real* wide) const {
    if (t >= count_) return fill(wide, 0, DEPTH);
    const index bytes = x_.type == REAL ? index(sizeof(real)) : 2;
    if (x_.type == REAL && d + DEPTH <= features_) {
      const real* from = reinterpret_cast<const real*>(from_) + t * x_.token + d;
      for (index c = 0; c < DEPTH; c += VL) store(wide + c, load(from + c) * by_);
      return;
    }
    read_row(x_, from_ + (t * x_.token + d) * bytes, by_, std::min(DEPTH, features_ - d), DEPTH, wide);
  }
  const Tokens& x_;
  const char* from_;
  index count_, features_, parts_;
  real by_;
};

// Left factor [features, tokens]: the transpose of rows, zero up to multiples of TILE and DEPTH.
inline HalfRows half_transpose(Rows x, index count, index features, index parts, Scratch& scratch) {
  const index width = round_up(count, DEPTH), part = round_up(features, TILE) * width;
  uint16_t* to = scratch_of<uint16_t>(scratch, parts * part);
  for (index t = 0; t < width; t += VL)
    for (index d = 0; d < features; d += VL) {
      vec block[VL];
      for (index l = 0; l < VL; ++l)
        block[l] = t + l < count ? load_n(x.at(t + l) + d, std::min<index>(VL, features - d)) : vec{};
      transpose(block);
      for (index l = 0; l < VL; ++l)
        split_row(reinterpret_cast<const real*>(block + l), VL, parts, to + (d + l) * width + t, part);
    }
  return {to, width, parts, part};
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
  void set(index count, index parts, bool both, F get) {
    parts == 1 ? set<1>(count, both, get) : set<MOST_PARTS>(count, both, get);
  }
  HalfRows rows;
  Strips pairs;

 private:
  template <int P, class F>
  void set(index count, bool both, F get) {
    const index depth = round_up(count, DEPTH), part = depth * PANEL, ld = depth / 2 * TILE;
    uint16_t* to_rows = both ? scratch_of<uint16_t>(rows_, P * part) : nullptr;
    uint32_t* to = scratch_of<uint32_t>(pairs_, P * part / 2);
    rows = {to_rows, PANEL, P, part}, pairs = {to, ld, part / 2};
    for (index i = 0; i < depth; i += 2)
      for (index c = 0; c < PANEL; c += VL)
        split_two<P>(i < count ? get(i, c) : vec{}, i + 1 < count ? get(i + 1, c) : vec{},
                     to + c / TILE * ld + i / 2 * TILE, part / 2, both ? to_rows + i * PANEL + c : nullptr,
                     PANEL, part);
  }
  Scratch rows_, pairs_;
};
}  // namespace posenc
