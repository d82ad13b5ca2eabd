// AMX' tile registers in plain C++, so that the kernels' paths by AMX run on any processor with AVX-512:
// POSENC_KERNEL_FLAGS="-march=native -include …/emulated_tiles.h". Included before everything else, it
// takes the place of the intrinsics.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#ifndef __AVX512BW__
#error "needs AVX-512"
#endif
#define __AMX_BF16__ 1
#define __AVX512BF16__ 1

namespace emulated {
struct Tile {
  alignas(64) unsigned char rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void require_configured() {
  if (!configured) __builtin_trap();  // as the processor does
}
inline void configure(const void* shape) {
  const auto* bytes = static_cast<const unsigned char*>(shape);
  if (bytes[0] != 1) __builtin_trap();
  for (int tile = 0; tile < 8; ++tile)  // of 64 bytes a row, 16 rows: the only shape that is emulated
    if (bytes[16 + 2 * tile] != 64 || bytes[17 + 2 * tile] || bytes[48 + tile] != 16) __builtin_trap();
  std::memset(tiles, 0, sizeof(tiles));
  configured = true;
}
inline void release() { configured = false; }
inline void zero(int tile) {
  require_configured();
  std::memset(&tiles[tile], 0, sizeof(Tile));
}
inline void load(int tile, const void* from, int64_t stride) {
  require_configured();
  for (int row = 0; row < 16; ++row)
    std::memcpy(tiles[tile].rows[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void store(int tile, void* to, int64_t stride) {
  require_configured();
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].rows[row], 64);
}
// Subnormal numbers are zero, as in the instructions.
inline __m512 flushed(__m512 x) {
  const __m512 magnitude = _mm512_abs_ps(x);
  const __mmask16 tiny = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1.17549435e-38f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(x, tiny, _mm512_setzero_ps());
}
inline __m512 low_halves(__m512i x) { return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))); }
inline __m512 high_halves(__m512i x) {
  return flushed(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000)))));
}
// c += a b: pairs of bfloat16 along rows of a and down columns of b, those at odd places apart from
// those at even ones, as the processor sums them.
inline void multiply(int c, int a, int b) {
  require_configured();
  for (int m = 0; m < 16; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < 16; ++k) {
      uint32_t pair;
      std::memcpy(&pair, tiles[a].rows[m] + 4 * k, 4);
      const __m512i left = _mm512_set1_epi32(int32_t(pair)), right = _mm512_load_si512(tiles[b].rows[k]);
      even = _mm512_fmadd_ps(low_halves(left), low_halves(right), even);
      odd = _mm512_fmadd_ps(high_halves(left), high_halves(right), odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(tiles[c].rows[m]), _mm512_add_ps(even, odd));
    _mm512_store_ps(tiles[c].rows[m], sum);
  }
}
// Rounded to nearest even.
inline __m256i rounded(__m512 x) {
  const __m512i bits = _mm512_castps_si512(flushed(x));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
inline __m512i rounded_pair(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
}
}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) emulated::configure(shape)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _mm512_cvtneps_pbh(x) emulated::rounded(x)
#define _mm512_cvtne2ps_pbh(high, low) emulated::rounded_pair(high, low)
#define syscall(...) 0L  // the kernel gives its permission
