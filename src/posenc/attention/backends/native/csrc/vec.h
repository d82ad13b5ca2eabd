// SIMD vectors of `real` (float, or double with -DPOSENC_DOUBLE) by GCC's vector extensions.
// All other headers are compiled once per type, in a namespace of its name.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __AVX__
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#ifdef POSENC_DOUBLE
#define NUMBER float64
#else
#define NUMBER float32
#endif
namespace posenc::NUMBER {
#ifdef POSENC_DOUBLE
using real = double;
using lane = int64_t;
#else
using real = float;
using lane = int32_t;
#endif
using index = int64_t;
constexpr int VL = VECTOR_BYTES / sizeof(real);  // vector lanes
// Register tile of gemm: MR x NV accumulators, NV vectors of B and one broadcast number of A fit the
// 32 registers of AVX-512 (24 + 4 + 1), or the 16 of AVX (12 + 2 + 1).
constexpr int NV = VECTOR_BYTES == 64 ? 4 : 2;
constexpr int MR = 6;
constexpr int PANEL = 64;  // columns of a packed panel; a multiple of every VL
constexpr int PAD = 64;    // readable entries before and after a row: whole vectors may overrun it
typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef real vec_u __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
typedef lane ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ivec32 __attribute__((vector_size(VL * 4)));
typedef int32_t ivec32_u __attribute__((vector_size(VL * 4), aligned(4), may_alias));

inline index round_up(index n, index to) { return (n + to - 1) / to * to; }
// VL numbers less another, in double, rounded. Halves that were joined in memory would be read back late.
inline vec narrow_difference(const double* x, double by) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  const auto half = [&](index at) {
    return _mm256_castps_pd(_mm512_cvtpd_ps(_mm512_sub_pd(_mm512_loadu_pd(x + at), _mm512_set1_pd(by))));
  };
  return (vec)_mm512_insertf64x4(_mm512_castpd256_pd512(half(0)), half(8), 1);
#elif defined(__AVX2__) && VECTOR_BYTES == 32 && !defined(POSENC_DOUBLE)
  const auto half = [&](index at) {
    return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_loadu_pd(x + at), _mm256_set1_pd(by)));
  };
  return (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(half(0)), half(4), 1);
#else
  constexpr int lanes = VECTOR_BYTES / 8;
  typedef double wide __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef real narrow __attribute__((vector_size(lanes * sizeof(real)), may_alias));
  vec found;
  for (int l = 0; l < VL; l += lanes)
    reinterpret_cast<narrow*>(&found)[l / lanes] =
        __builtin_convertvector(*reinterpret_cast<const wide*>(x + l) - by, narrow);
  return found;
#endif
}
// x - 0, not x + 0, which would turn -0 into 0.
inline vec splat(real x) { return x - vec{}; }
inline ivec isplat(lane x) { return x - ivec{}; }
inline vec load(const real* p) { return *reinterpret_cast<const vec_u*>(p); }
inline void store(real* p, vec x) { *reinterpret_cast<vec_u*>(p) = x; }
inline ivec load_indices(const int32_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const ivec32_u*>(p), ivec);
}
inline ivec iota() {
  ivec x;
  for (int l = 0; l < VL; ++l) x[l] = l;
  return x;
}
// The first n <= VL lanes, the others zero; touches no memory beyond them.
inline vec load_n(const real* p, index n) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif VECTOR_BYTES == 64
  return (vec)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#else
  vec x{};
  for (index l = 0; l < n; ++l) x[l] = p[l];
  return x;
#endif
}
inline void store_n(real* p, vec x, index n) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#elif VECTOR_BYTES == 64
  _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)x);
#else
  for (index l = 0; l < n; ++l) p[l] = x[l];
#endif
}
inline real sum(vec x) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return _mm512_reduce_add_ps((__m512)x);
#else
  real s = 0;
  for (int l = 0; l < VL; ++l) s += x[l];
  return s;
#endif
}
// The larger of two numbers; y where one is NaN.
inline vec larger(vec x, vec y) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return x > y ? x : y;
#endif
}
inline real largest(vec x) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return _mm512_reduce_max_ps((__m512)x);
#else
  real s = x[0];
  for (int l = 1; l < VL; ++l) s = s > x[l] ? s : x[l];
  return s;
#endif
}
// dst[0, n) += src[0, n)
inline void add_range(real* dst, const real* src, index n) {
  index t = 0;
  for (; t + VL <= n; t += VL) store(dst + t, load(dst + t) + load(src + t));
  if (t < n) store_n(dst + t, load_n(dst + t, n - t) + load_n(src + t, n - t), n - t);
}
inline real sum_range(const real* src, index n) {
  if (n < 8) {  // short runs: a horizontal sum costs more than the additions
    real s = 0;
    for (index t = 0; t < n; ++t) s += src[t];
    return s;
  }
  vec lane_sums{};
  index t = 0;
  for (; t + VL <= n; t += VL) lane_sums += load(src + t);
  if (t < n) lane_sums += load_n(src + t, n - t);
  return sum(lane_sums);
}
// dst[0, n) += src[0, n) in double; the sum of src.
inline double add_wide(double* dst, const real* src, index n) {
  constexpr int lanes = VECTOR_BYTES / 8;
  typedef double wide __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef real narrow __attribute__((vector_size(lanes * sizeof(real)), aligned(sizeof(real)), may_alias));
  wide sums{};
  index t = 0;
  for (; t + lanes <= n; t += lanes) {
    const wide x = __builtin_convertvector(*reinterpret_cast<const narrow*>(src + t), wide);
    *reinterpret_cast<wide*>(dst + t) += x;
    sums += x;
  }
  double src_sum = 0;
  for (; t < n; ++t) dst[t] += src[t], src_sum += src[t];
  for (int l = 0; l < lanes; ++l) src_sum += sums[l];
  return src_sum;
}
// dst[0, n) (+)= x
template <bool add>
inline void put_number(real* dst, real x, index n) {
  const vec s = splat(x);
  index t = 0;
  for (; t + VL <= n; t += VL) store(dst + t, add ? load(dst + t) + s : s);
  if (t < n) store_n(dst + t, add ? load_n(dst + t, n - t) + s : s, n - t);
}
// Sum of a[0, n) * b[0, n), n a multiple of VL.
inline real dot(const real* a, const real* b, index n) {
  vec lane_sums{};
  for (index t = 0; t < n; t += VL) lane_sums += load(a + t) * load(b + t);
  return sum(lane_sums);
}
// dst[0, n) += by * src[0, n), n a multiple of VL.
inline void add_scaled(real* dst, const real* src, real by, index n) {
  for (index t = 0; t < n; t += VL) store(dst + t, load(dst + t) + load(src + t) * by);
}
inline void scale_range(real* x, real by, index n) {
  index t = 0;
  for (; t + VL <= n; t += VL) store(x + t, load(x + t) * by);
  if (t < n) store_n(x + t, load_n(x + t, n - t) * by, n - t);
}
inline void fill(real* p, real x, index n) { std::fill(p, p + n, x); }

// e^x = power (1 + rest) by Cody and Waite: x = n ln 2 + r with ln 2 in two parts, so that n ln2_high
// is exact; power = 2^n, n in its exponent; rest = e^r - 1 by a polynomial without a term of r^0 (float:
// Cephes' minimax; double: Taylor's up to r^13 / 13!), so that it is precise for small x.
struct Exponential {
  vec power, rest;
};
__attribute__((always_inline)) inline Exponential parts_of_exponential(vec x) {
#ifdef POSENC_DOUBLE
  constexpr real shift = 6755399441055744.0;  // 1.5 * 2^52
  constexpr real ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  constexpr int mantissa = 52, bias = 1023;
#else
  constexpr real shift = 12582912.f;  // 1.5 * 2^23
  constexpr real ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  constexpr int mantissa = 23, bias = 127;
#endif
  // Adding `shift` rounds x / ln 2 to the nearest integer n, which the low bits of t then hold.
  const vec t = x * real(1.44269504088896341) + shift, n = t - shift;
  const vec r = (x - n * ln2_high) - n * ln2_low;
#ifdef POSENC_DOUBLE
  vec p = splat(1.0 / 6227020800.0);
  constexpr double c[] = {479001600., 39916800., 3628800., 362880., 40320., 5040., 720., 120., 24., 6., 2., 1.};
  for (double factorial : c) p = p * r + 1.0 / factorial;
  p = p * r;
#else
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r;
#endif
  // 2^n: the bits of `shift` above n are shifted out. Unsigned, since those of NaN overflow.
  typedef std::make_unsigned_t<lane> unsigned_lanes __attribute__((vector_size(VECTOR_BYTES)));
  const unsigned_lanes bits = ((unsigned_lanes)t + bias) << mantissa;
  return {(vec)bits, p};
}
// e^x, NaN for NaN; 0 below `lowest`, where products with small values would be subnormal and slow.
__attribute__((always_inline)) inline vec exponential(vec x) {
  constexpr real lowest = sizeof(real) == 4 ? -70 : -708;
  const Exponential e = parts_of_exponential(x);
  return x < lowest ? vec{} : (e.rest + 1) * e.power;
}
// tanh x = -m / (2 + m) for x >= 0, m = e^-2x - 1, which is precise for small x, too.
inline vec hyperbolic_tangent(vec x) {
  constexpr real lowest = -40;  // of -2x, from where on the tangent rounds to 1
  const vec twice = x < 0 ? x + x : -x - x;
  const Exponential e = parts_of_exponential(twice < lowest ? splat(lowest) : twice);
  const vec m = e.rest * e.power + (e.power - 1), tangent = -m / (m + 2);
  return x < 0 ? -tangent : tangent;
}

// Lanes At::of(0), At::of(1) … of x and, from VL on, of y.
template <class At, int... L>
inline vec choose(vec x, vec y, std::integer_sequence<int, L...>) {
#ifdef __clang__
  return __builtin_shufflevector(x, y, At::of(L)...);
#else
  return __builtin_shuffle(x, y, ivec{At::of(L)...});
#endif
}
template <class At>
inline vec choose(vec x, vec y) {
  return choose<At>(x, y, std::make_integer_sequence<int, VL>{});
}
// Lanes at[0], at[1] … of x, modulo VL.
inline vec permute(vec x, ivec at) {
#ifndef __clang__
  return __builtin_shuffle(x, at);
#elif VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)
  return (vec)_mm512_permutexvar_ps((__m512i)at, (__m512)x);
#elif VECTOR_BYTES == 64
  return (vec)_mm512_permutexvar_pd((__m512i)at, (__m512d)x);
#elif defined(__AVX2__) && !defined(POSENC_DOUBLE)
  return (vec)_mm256_permutevar8x32_ps((__m256)x, (__m256i)at);
#else
  vec y;
  for (int l = 0; l < VL; ++l) y[l] = x[at[l] & (VL - 1)];
  return y;
#endif
}

// Stage H of a transpose of VL vectors: swaps the off-diagonal H x H blocks of all 2H x 2H blocks.
template <int H>
struct Upper {
  static constexpr int of(int l) { return l & H ? l - H + VL : l; }
};
template <int H>
struct Lower {
  static constexpr int of(int l) { return l & H ? l + VL : l + H; }
};
template <int H>
inline void transpose_stage(vec* x) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i)
    if (!(i & H)) {
      const vec a = x[i], b = x[i + H];
      x[i] = choose<Upper<H>>(a, b);
      x[i + H] = choose<Lower<H>>(a, b);
    }
}
// Transposes VL vectors of VL lanes in place, in log2(VL) stages.
inline void transpose(vec* x) {
  transpose_stage<1>(x);
  if constexpr (VL > 2) transpose_stage<2>(x);
  if constexpr (VL > 4) transpose_stage<4>(x);
  if constexpr (VL > 8) transpose_stage<8>(x);
}
// One vector of the sums of VL vectors over their lanes: lane l is the sum of x[l].
template <int H = 1>
inline vec sums_of_lanes(vec* x) {
  if constexpr (H == VL) {
    return x[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < VL / (2 * H); ++i)
      x[i] = choose<Upper<H>>(x[2 * i], x[2 * i + 1]) + choose<Lower<H>>(x[2 * i], x[2 * i + 1]);
    return sums_of_lanes<2 * H>(x);
  }
}
// to[l] = ln x[l] of positive numbers, to rounding; NaN for NaN. With x = 2^n m, m about 1: ln m = 2 artanh s,
// s = (m - 1) / (m + 1), by Taylor's series.
inline void logarithms(vec x, double* to) {
  constexpr int lanes = VECTOR_BYTES / 8;
  typedef double wide __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t bits __attribute__((vector_size(VECTOR_BYTES)));
  typedef real narrow __attribute__((vector_size(lanes * sizeof(real)), may_alias));
  constexpr int mantissa = 52;
  constexpr int64_t root_half = 0x3fe6a09e667f3bcd;  // bits of the square root of 1/2: m is at least that
  for (int l = 0; l < VL; l += lanes) {
    const wide y = __builtin_convertvector(reinterpret_cast<const narrow*>(&x)[l / lanes], wide);
    const bits n = ((bits)y - root_half) >> mantissa;
    const wide m = (wide)((bits)y - (n << mantissa)), s = (m - 1) / (m + 1), z = s * s;
    wide p = wide{} + 1. / 19;
    for (double odd : {17., 15., 13., 11., 9., 7., 5., 3.}) p = p * z + 1 / odd;
    const wide found = __builtin_convertvector(n, wide) * 0.693147180559945309 + 2 * (s + s * z * p);
    const wide numbers = y > 0 ? found : y;
    std::memcpy(to + l, &numbers, sizeof(numbers));
  }
}
}  // namespace posenc
