// Products of bfloat16 in AMX tile registers, summed in float32, and the layouts of their operands.
// Elsewhere than on processors with AMX, has_amx() is false and none of this runs.
#pragma once
#include "gemm.h"
#include "problem.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && !defined(POSENC_DOUBLE)
#define POSENC_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
namespace posenc::NUMBER {
constexpr index AMX_TILE = 16;   // rows, and float32 columns, of a tile register
constexpr index AMX_DEPTH = 32;  // products that one instruction sums: bfloat16 columns
constexpr real PER_LN_2 = real(1.44269504088896341);  // from exponents of e to those of two

// Right factor [K, N] as VNNI wants it: rows 2r and 2r + 1 interleaved in numbers of 32 bits, in
// strips of AMX_TILE columns, [N / AMX_TILE][K / 2][AMX_TILE].
struct VnniStrips {
  const uint32_t* data = nullptr;
  index ld = 0;  // from strip to strip
  VnniStrips at(index row, index column) const { return {data + row / 2 * AMX_TILE + column / AMX_TILE * ld, ld}; }
};
// Left factor [rows, ld], zero up to a multiple of AMX_DEPTH columns.
struct Bf16Rows {
  const uint16_t* data = nullptr;
  index ld = 0;
  Bf16Rows at(index row, index column = 0) const { return {data + row * ld + column, ld}; }
};

#ifdef POSENC_AMX
// Whether Linux lets this process use tile registers (arch_prctl ARCH_REQ_XCOMP_PERM), asked once.
inline bool has_amx() {
  constexpr int request = 0x1023, tile_data = 18;
  static const bool answer = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return answer;
}

// Configures a thread's eight tile registers, 16 rows of 64 bytes each, while it lives.
class AmxTiles {
 public:
  explicit AmxTiles(bool used) : used_(used) {
    if (!used) return;
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    std::fill_n(shape.bytes, 8, uint16_t(64));
    std::fill_n(shape.rows, 8, uint8_t(AMX_TILE));
    asm volatile("" : : "r"(&shape) : "memory");  // the intrinsic names its first bytes alone as read
    _tile_loadconfig(&shape);
  }
  ~AmxTiles() {
    if (used_) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;

 private:
  bool used_;
};

// C (+)= A B for R x S tiles of C: registers 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
template <int R, int S>
__attribute__((noinline)) void amx_block(index K, Bf16Rows x, VnniStrips y, float* c, index ldc, bool add) {
  asm volatile("" ::: "memory");  // the compiler does not know what tile loads read
  if (add) {
    _tile_loadd(0, c, ldc * 4);
    if (S > 1) _tile_loadd(1, c + AMX_TILE, ldc * 4);
    if (R > 1) _tile_loadd(2, c + AMX_TILE * ldc, ldc * 4);
    if (R > 1 && S > 1) _tile_loadd(3, c + AMX_TILE * ldc + AMX_TILE, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint16_t* a = x.data;
  const uint32_t* b = y.data;
  for (index k = 0; k < K; k += AMX_DEPTH, a += AMX_DEPTH, b += AMX_DEPTH / 2 * AMX_TILE) {
    _tile_loadd(4, a, x.ld * 2);
    if (R > 1) _tile_loadd(5, a + AMX_TILE * x.ld, x.ld * 2);
    _tile_loadd(6, b, 64);
    if (S > 1) _tile_loadd(7, b + y.ld, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) _tile_dpbf16ps(2, 5, 6);
    if (S > 1) _tile_dpbf16ps(1, 4, 7);
    if (R > 1 && S > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, ldc * 4);
  if (S > 1) _tile_stored(1, c + AMX_TILE, ldc * 4);
  if (R > 1) _tile_stored(2, c + AMX_TILE * ldc, ldc * 4);
  if (R > 1 && S > 1) _tile_stored(3, c + AMX_TILE * ldc + AMX_TILE, ldc * 4);
}

// C[M, N] (+)= A[M, K] B[K, N]: M and N multiples of AMX_TILE, K of AMX_DEPTH.
inline void amx_gemm(index M, index N, index K, Bf16Rows x, VnniStrips y, float* c, index ldc, bool add) {
  for (index n = 0; n < N; n += 2 * AMX_TILE)
    for (index m = 0; m < M; m += 2 * AMX_TILE) {
      const bool two = m + AMX_TILE < M, wide = n + AMX_TILE < N;
      const auto block = two ? wide ? amx_block<2, 2> : amx_block<2, 1>
                             : wide ? amx_block<1, 2> : amx_block<1, 1>;
      block(K, x.at(m), y.at(0, n), c + m * ldc + n, ldc, add);
    }
}

// Conversions, rounded to nearest even by the instruction.
inline __m256i bf16_lanes(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
inline void store_bf16(vec x, uint16_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bf16_lanes(x)); }
// 2 VL numbers, x before y; `to` may be where x was read.
inline void store_bf16_two(vec x, vec y, uint16_t* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
}
// VL numbers of two rows, interleaved: x in the lower halves.
inline void store_interleaved(__m256i x, __m256i y, uint32_t* to) {
  const __m512i low = _mm512_cvtepu16_epi32(x), high = _mm512_cvtepu16_epi32(y);
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
// The same of AMX_DEPTH numbers of two rows: columns below AMX_TILE, and those from there on.
inline void store_bf16_pairs(const uint16_t* x, const uint16_t* y, uint32_t* to, uint32_t* next) {
  const __m512i step = _mm512_set1_epi32(0x00200000), rise = (__m512i)(iota() * 0x00010001);
  const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(y), first = _mm512_or_si512(step, rise);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
  _mm512_storeu_si512(next, _mm512_permutex2var_epi16(a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), b));
}
inline void store_bf16_pairs(vec x, vec y, uint32_t* to) { store_interleaved(bf16_lanes(x), bf16_lanes(y), to); }
inline vec load_bf16(const uint16_t* from) {
  const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(lanes), 16);
}

// 2^x to 2e-7 by a minimax polynomial of degree 5 that is 1 at 0, NaN for NaN; 0 below the normal numbers,
// which are slow.
__attribute__((always_inline)) inline vec power_of_two(vec x) {
  const vec r = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  vec p = splat(1.86895634e-3f);
  p = p * r + 9.01488457e-3f;
  p = p * r + 5.57993007e-2f;
  p = p * r + 2.40165651e-1f;
  p = p * r + 6.93151068e-1f;
  p = p * r + 1.f;
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
}
// Whether bfloat16 holds all of n numbers.
inline bool fits_bf16(const real* x, index n) {
  uint32_t digits = 0;
  for (index t = 0; t < n; ++t) {
    uint32_t bits;
    std::memcpy(&bits, x + t, 4);
    digits |= bits & 0xffff;
  }
  return !digits;
}
// False where a lane is above, or NaN.
inline bool all_below(vec x, real most) {
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(most), _CMP_NLE_UQ) == 0;
}
#else
inline bool has_amx() { return false; }
struct AmxTiles {
  explicit AmxTiles(bool) {}
};
inline void amx_gemm(index, index, index, Bf16Rows, VnniStrips, real*, index, bool) {}
inline void store_bf16(vec, uint16_t*) {}
inline void store_bf16_two(vec, vec, uint16_t*) {}
inline void store_bf16_pairs(vec, vec, uint32_t*) {}
inline void store_bf16_pairs(const uint16_t*, const uint16_t*, uint32_t*, uint32_t*) {}
inline vec load_bf16(const uint16_t*) { return vec{}; }
inline vec power_of_two(vec x) { return x; }
inline bool all_below(vec, real) { return true; }
inline bool fits_bf16(const real*, index) { return true; }
#endif
inline void store_bf16_row(const real* from, index n, uint16_t* to) {
  for (index t = 0; t < n; t += VL) store_bf16(load(from + t), to + t);
}

// Scratch for n numbers of 16 or 32 bits.
template <class T>
T* scratch_of(Scratch& scratch, index n) {
  return reinterpret_cast<T*>(scratch.of((n * index(sizeof(T)) + index(sizeof(real)) - 1) / index(sizeof(real))));
}

// Tokens [first, first + count) of one head as factors of products. `by` is 1 or a power of two, so
// that bfloat16 stays exact.
class HeadTokens {
 public:
  HeadTokens(const Tokens& x, index b, index h, index first, index count, index features, real by = 1)
      : x_(x), from_(row_of(x, b, h, first)), count_(count), features_(features), by_(by) {}
  // Left factor [tokens, features]; rows of zeros up to a multiple of AMX_TILE.
  Bf16Rows rows(Scratch& scratch) const {
    const index width = round_up(features_, AMX_DEPTH);
    uint16_t* to = scratch_of<uint16_t>(scratch, round_up(count_, AMX_TILE) * width);
    for (index t = 0; t < round_up(count_, AMX_TILE); ++t)
      for (index d = 0; d < width; d += AMX_DEPTH) read(t, d, to + t * width + d);
    return {to, width};
  }
  // Right factor [features, tokens]: 16 tokens' pairs of features are numbers of 32 bits, transposed.
  // remainder: of what rounding to bfloat16 leaves of the tokens, itself rounded, in place of these.
  VnniStrips columns(Scratch& scratch, bool remainder = false) const {
    const index ld = round_up(features_, AMX_DEPTH) / 2 * AMX_TILE;
    uint32_t* to = scratch_of<uint32_t>(scratch, round_up(count_, PANEL) / AMX_TILE * ld);
    alignas(64) uint16_t copies[AMX_TILE][AMX_DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += AMX_TILE)
      for (index d = 0; d < features_; d += AMX_DEPTH) {
        for (index l = 0; l < AMX_TILE; ++l) read(t + l, d, copies[l], remainder);
        vec block[VL];
        for (index l = 0; l < VL; ++l) block[l] = load(reinterpret_cast<const real*>(copies[l]));
        transpose(block);
        uint32_t* strip = to + t / AMX_TILE * ld + d / 2 * AMX_TILE;
        for (index l = 0; l < VL; ++l) store(reinterpret_cast<real*>(strip + l * AMX_TILE), block[l]);
      }
    return {to, ld};
  }
  // Right factor [tokens, features]; rows of zeros up to a multiple of PANEL.
  VnniStrips pairs(Scratch& scratch) const {
    const index ld = round_up(count_, PANEL) / 2 * AMX_TILE;
    uint32_t* to = scratch_of<uint32_t>(scratch, round_up(features_, AMX_DEPTH) / AMX_TILE * ld);
    alignas(64) uint16_t copies[2][AMX_DEPTH];
    for (index t = 0; t < round_up(count_, PANEL); t += 2)
      for (index d = 0; d < features_; d += AMX_DEPTH) {
        uint32_t* strip = to + d / AMX_TILE * ld + t / 2 * AMX_TILE;
        store_bf16_pairs(seen(t, d, copies[0]), seen(t + 1, d, copies[1]), strip, strip + ld);
      }
    return {to, ld};
  }

 private:
  // AMX_DEPTH features of token t from d on, where they lie or in `copy`.
  const uint16_t* seen(index t, index d, uint16_t* copy) const {
    if (x_.type == BFLOAT16 && by_ == 1 && t < count_ && d + AMX_DEPTH <= features_)
      return reinterpret_cast<const uint16_t*>(from_) + t * x_.token + d;
    read(t, d, copy);
    return copy;
  }
  // to[AMX_DEPTH] = features of token t from d on, or their remainders; zero beyond the last of either.
  void read(index t, index d, uint16_t* to, bool remainder = false) const {
    if (t >= count_) return void(std::fill_n(to, AMX_DEPTH, uint16_t(0)));
    const char* from = from_ + (t * x_.token + d) * (x_.type == REAL ? index(sizeof(real)) : 2);
    if (x_.type == BFLOAT16 && d + AMX_DEPTH <= features_) {
      if (by_ == 1) return void(std::memcpy(to, from, AMX_DEPTH * sizeof(uint16_t)));
      for (index c = 0; c < AMX_DEPTH; c += VL)
        store_bf16(load_bf16(reinterpret_cast<const uint16_t*>(from) + c) * by_, to + c);
      return;
    }
    alignas(64) real wide[AMX_DEPTH];
    read_row(x_, from, by_, std::min(AMX_DEPTH, features_ - d), AMX_DEPTH, wide);
    store_bf16_row(wide, AMX_DEPTH, to);
    for (index c = 0; remainder && c < AMX_DEPTH; c += VL) {
      const vec rest = load(wide + c) - load_bf16(to + c);
      store_bf16(rest - rest == 0 ? rest : vec{}, to + c);  // none of infinities
    }
  }
  const Tokens& x_;
  const char* from_;
  index count_, features_;
  real by_;
};

// Left factor [features, tokens], zero up to multiples of AMX_TILE and AMX_DEPTH: x transposed.
inline Bf16Rows bf16_transpose(Rows x, index count, index features, Scratch& scratch) {
  const index width = round_up(count, AMX_DEPTH);
  uint16_t* to = scratch_of<uint16_t>(scratch, round_up(features, AMX_TILE) * width);
  for (index t = 0; t < width; t += VL)
    for (index d = 0; d < features; d += VL) {
      vec block[VL];
      for (index l = 0; l < VL; ++l)
        block[l] = t + l < count ? load_n(x.at(t + l) + d, std::min<index>(VL, features - d)) : vec{};
      transpose(block);
      for (index l = 0; l < VL; ++l) store_bf16(block[l], to + (d + l) * width + t);
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

// Numbers [rows, PANEL] (of ds or p) in bfloat16, as right factor and, if wanted, as left factor.
class Bf16Panel {
 public:
  // From get(row, column), VL numbers at a time; rows up to a multiple of AMX_DEPTH are zero.
  template <class F>
  void set(index count, bool both, F get) {
    const index depth = round_up(count, AMX_DEPTH), ld = depth / 2 * AMX_TILE;
    uint16_t* to_rows = both ? scratch_of<uint16_t>(rows_, depth * PANEL) : nullptr;
    uint32_t* to = scratch_of<uint32_t>(pairs_, depth * PANEL / 2);
    rows = {to_rows, PANEL}, pairs = {to, ld};
    for (index i = 0; i < depth; i += 2)
      for (index c = 0; c < PANEL; c += VL) {
        const vec x = i < count ? get(i, c) : vec{}, y = i + 1 < count ? get(i + 1, c) : vec{};
        store_bf16_pairs(x, y, to + c / AMX_TILE * ld + i / 2 * AMX_TILE);
        if (both) store_bf16(x, to_rows + i * PANEL + c), store_bf16(y, to_rows + (i + 1) * PANEL + c);
      }
  }
  Bf16Rows rows;
  VnniStrips pairs;

 private:
  Scratch rows_, pairs_;
};
}  // namespace posenc
