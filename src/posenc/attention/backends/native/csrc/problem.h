// The arguments of a call, as library.py lays them out: every field is eight bytes wide.
//
// Pairs: each query has an interval of visible keys, `low` … `high` - 1, and the offset of key j is
// j + `base`. Causality, windows and padding are in the intervals alone; a window becomes the bounds
// of the loop over tiles of keys in QueryTile::for_key_tiles. A packed batch is one row of tokens in
// which the interval of a query ends with its document: there is no mask, no id of documents.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include "team.h"
#include "vec.h"
namespace posenc::NUMBER {
#if defined(__clang__) || __GNUC__ >= (defined(__aarch64__) ? 13 : 12)
using half = _Float16;
#elif defined(__aarch64__)
using half = __fp16;  // the same format; GCC 11 and 12 have no _Float16 in C++ here
#else
#define POSENC_HALF_CLASS
// The same by F16C, for GCC 11.
class half {
 public:
  half() = default;
  explicit half(float x) : bits_(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)) {}
  operator float() const { return _cvtsh_ss(bits_); }

 private:
  uint16_t bits_;
};
#endif
constexpr index BLOCK = 64;  // tokens whose products with buckets are computed together

struct Range {  // begin … end - 1; empty where end <= begin
  index begin, end;
  index size() const { return end > begin ? end - begin : 0; }
  bool operator==(Range other) const { return begin == other.begin && end == other.end; }
  void extend(Range other) { begin = std::min(begin, other.begin), end = std::max(end, other.end); }
};

// Mask of the lanes whose key, t and on, is visible.
inline ivec lanes_in(index t, Range visible) {
  const ivec at = iota() + isplat(lane(t));
  return (at >= isplat(lane(visible.begin))) & (at < isplat(lane(visible.end)));
}
// s of the keys from t on, and another number for those that are not visible.
inline vec masked(vec s, index t, Range visible, real hidden = -INFINITY) {
  if (t >= visible.begin && t + VL <= visible.end) return s;
  const vec other = splat(hidden);
  return lanes_in(t, visible) ? s : other;
}
// Zeros of p in `all`, but for those in `some`.
inline void fill_outside(real* p, Range all, Range some) {
  fill(p + all.begin, 0, some.begin - all.begin);
  fill(p + some.end, 0, all.end - some.end);
}

enum Type : index { REAL = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // TYPES in library.py

// [batch, heads, tokens, features], features contiguous; strides in elements, 0 where broadcast.
struct Tokens {
  char* data;
  index type, batch, head, token;  // Type, then strides
};
// Angles that pairs of a token's features are rotated by: [B|1, H|1, tokens, pairs], contiguous pairs.
struct RotaryFactors {
  const real *cosine, *sine;
  index batch, head, token;  // strides, 0 where broadcast
  index at(index b, index h, index t) const { return b * batch + h * head + t * token; }
};
// Offsets first … last, less those of the map, of one bucket (step 0) or of as many (step 1).
struct Span {
  int32_t first, last, bucket, step;  // bucket: of the first
};
// Buckets of the offsets first … first + count - 1, renumbered so that the bucket never falls, and
// rises by at most 1 from one offset to the next: neighbouring offsets read neighbouring rows. Of
// images, so it is among the offsets along an image row; other rows may have the same buckets.
struct Map {
  const int32_t* bucket;   // [count], and PAD readable entries before and after
  const int32_t* span_of;  // [count], index of each offset's span
  const Span* spans;
  index first, count, buckets;
  // Offsets below low have bucket 0, those from high on the last: the far offsets, whose products are
  // computed once a token. Those between are near.
  index low, high;
};
// A tensor of a term as [batch|1, heads|1, rows, features]: tokens, offsets (as rows of one feature) or
// buckets. Its gradient has a leading axis of parts, `part_stride` numbers apart; without data none is wanted.
struct Operand {
  Tokens value, gradient;
  index part_stride, rows, features;
  explicit operator bool() const { return value.data; }
  template <class T = real>
  T* of(index b, index h) const {
    return reinterpret_cast<T*>(value.data) + b * value.batch + h * value.head;
  }
  template <class T = real>
  T* gradient_of(index p, index b, index h) const {
    if (!gradient.data) return nullptr;
    return reinterpret_cast<T*>(gradient.data) + p * part_stride + b * gradient.batch + h * gradient.head;
  }
};
// The terms of logits and values, which problem/terms.py declares and describes; the build has their
// names from there. `left` and `right` without a gradient are the queries and keys themselves, whose
// gradient is added there. `column` is in double, as it sums over many tokens.
struct Terms {
  Operand POSENC_TERMS;
  index first;  // offset of the first entry of bias_by_offset
};
// A function of pairs other than the terms above, with its arrays; the header of its kind says which:
// distance.h (FIRE), running_sums.h (CoPE, stick breaking), log_gates.h (GRAPE), head_mixing.h (DAPE),
// block_transforms.h (PaTH).
enum Kind : index { NONE = 0, DISTANCE = 1, COUNTS = 2, STICKS = 3, LOG_GATES = 4, MIXING = 5, BLOCKS = 6 };
struct Pairs {
  index kind;
  index sizes[6];
  const real* data[6];
  real* gradient[6];
  // Whether logits or weights depend on sums over the later keys of a row.
  bool sums() const { return kind == COUNTS || kind == STICKS || kind == LOG_GATES; }
  // Whether keys before have no weight once these sums are at their limit.
  bool fades() const { return kind == STICKS || kind == LOG_GATES; }
  // Whether tiles of keys go from the last to the first.
  bool from_last() const { return sums() || kind == BLOCKS; }
};
// Sizes in comments: B batch, H heads, Q queries, K keys, D dim, E value_dim, N buckets, W offsets.
// A gradient that several workers add to has a leading axis of parts (a chunk of the batch and a
// split) or of splits (of the queries), of which each worker writes its own: their number does not
// depend on the number of threads, so that results do not either. library.py adds them up.
struct Problem {
  index batch, heads, groups, queries, keys, dim, value_dim;  // groups: heads of keys and values
  Team team;
  index chunks, splits;  // parts of the batch and of the queries
  double scale, dropout, softcap;  // softcap: c of c · tanh(s / c), 0 for none
  index seed, global_lse;  // global_lse: out and lse are over more keys than these
  Tokens q, k, v, out;
  RotaryFactors q_rotary, k_rotary;  // of queries and keys before their product
  index rotated, adjacent;  // pairs, 0 for none; they are (2t, 2t + 1), not (t, t + rotated)
  double* lse;          // [B, H, Q]; -inf for queries without visible keys, or the sink
  const double* sinks;  // [B, H, Q]: logits without a value, that only the sum of the softmax sees
  double* sinks_gradient;
  const double* lse_gradient;  // [B, H, Q]; null where the lse has none
  const int32_t* low;   // [B|1, Q]: keys low … high - 1 are visible
  const int32_t* high;  // [B|1, Q]
  const int32_t* base;  // [B|1, Q]: the offset of key j is j + base
  const int32_t* bands;  // [H, 2]: the least and the greatest visible offset, or null
  index rows_batch;     // batch stride of low, high and base
  // Images: keys a row (0 for sequences), and what the offset jumps by after each of them, which is
  // one less than a row has queries. Without a map, left's buckets are then of offsets along image
  // columns, and after those along image rows.
  index period, jump;
  Terms terms;
  Map map;
  Tokens gradient, dq, dk, dv;  // gradient: of out; dk and dv are [splits, B, H, K, .]
  index dk_split, dv_split;     // strides of their first axis
  Pairs pairs;
  // The offset of key j, less that of the query's base.
  index place_of(index j) const { return period ? j + j / period * jump : j; }
  index rank() const { return terms.query_factor.features; }
  index depth() const { return dim + rank(); }  // features of a product of a query and a key
};

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bfloat16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN, which rounding could make infinite
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // half to even
}

inline char* row_of(const Tokens& x, index b, index h, index t) {
  return x.data + (b * x.batch + h * x.head + t * x.token) * (x.type == REAL ? sizeof(real) : 2);
}
// VL numbers of a type in memory, as reals.
template <class Number>
struct Lanes {
  typedef Number numbers __attribute__((vector_size(VL * sizeof(Number)), aligned(alignof(Number)), may_alias));
  static vec load(const Number* p) {
    return __builtin_convertvector(*reinterpret_cast<const numbers*>(p), vec);
  }
  static void store(Number* p, vec x) { *reinterpret_cast<numbers*>(p) = __builtin_convertvector(x, numbers); }
  static real read(Number x) { return real(x); }
  static Number write(real x) { return Number(x); }
};
// Of bfloat16, which is the upper half of a float32; rounded half to even, NaN kept as NaN.
template <>
struct Lanes<uint16_t> {
  typedef uint16_t numbers __attribute__((vector_size(VL * 2), aligned(2), may_alias));
  typedef uint32_t bits __attribute__((vector_size(VL * 4)));
  typedef float floats __attribute__((vector_size(VL * 4)));
  static vec load(const uint16_t* p) {
#if VECTOR_BYTES == 64 && !defined(POSENC_DOUBLE)  // GCC converts both halves and joins them
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#else
    const bits x = __builtin_convertvector(*reinterpret_cast<const numbers*>(p), bits) << 16;
    return __builtin_convertvector((floats)x, vec);
#endif
  }
  static void store(uint16_t* p, vec v) {
    const floats f = __builtin_convertvector(v, floats);
    const bits x = (bits)f, rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
    *reinterpret_cast<numbers*>(p) = __builtin_convertvector(f == f ? rounded : bits{} + 0x7fc0, numbers);
  }
  static real read(uint16_t x) { return from_bfloat16(x); }
  static uint16_t write(real x) { return to_bfloat16(float(x)); }
};
#if defined(POSENC_HALF_CLASS) || (VECTOR_BYTES >= 32 && !defined(POSENC_DOUBLE))
template <>
struct Lanes<half> {
  static vec load(const half* p) {
#if defined(POSENC_DOUBLE)
    vec x;
    for (int l = 0; l < VL; ++l) x[l] = p[l];
    return x;
#elif VECTOR_BYTES == 64  // GCC converts vectors of _Float16 number by number
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
  }
  static void store(half* p, vec x) {
#if defined(POSENC_DOUBLE)
    for (int l = 0; l < VL; ++l) p[l] = half(x[l]);
#elif VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
  }
  static real read(half x) { return real(x); }
  static half write(real x) { return half(x); }
};
#endif

template <class Number>
void read_numbers(const Number* from, real by, index n, real* p) {
  index d = 0;
  for (; d + VL <= n; d += VL) store(p + d, Lanes<Number>::load(from + d) * by);
  for (; d < n; ++d) p[d] = Lanes<Number>::read(from[d]) * by;
}
template <class Number>
void write_numbers(Number* to, const real* p, real by, index n) {
  index d = 0;
  for (; d + VL <= n; d += VL) Lanes<Number>::store(to + d, load(p + d) * by);
  for (; d < n; ++d) to[d] = Lanes<Number>::write(p[d] * by);
}
// p[0, width) = n features times `by`, then zeros: products may run over whole vectors.
inline void read_row(const Tokens& x, const char* from, real by, index n, index width, real* p) {
  if (x.type == REAL) read_numbers(reinterpret_cast<const real*>(from), by, n, p);
  if (x.type == BFLOAT16) read_numbers(reinterpret_cast<const uint16_t*>(from), by, n, p);
  if (x.type == FLOAT16) read_numbers(reinterpret_cast<const half*>(from), by, n, p);
  for (index d = n; d < width; ++d) p[d] = 0;
}
inline void write_row(const Tokens& x, char* to, const real* p, real by, index n) {
  if (x.type == REAL) write_numbers(reinterpret_cast<real*>(to), p, by, n);
  if (x.type == BFLOAT16) write_numbers(reinterpret_cast<uint16_t*>(to), p, by, n);
  if (x.type == FLOAT16) write_numbers(reinterpret_cast<half*>(to), p, by, n);
}
// Joins a sink to the LSE of a row's keys; what the weights of keys are then multiplied by.
inline real add_sink(double sink, double& lse) {
  const double of_keys = lse, greater = std::max(of_keys, sink), less = std::min(of_keys, sink);
  lse = less == -INFINITY ? greater : greater + std::log1p(std::exp(less - greater));
  return of_keys == -INFINITY ? real(0) : real(std::exp(of_keys - lse));
}

// Memory of one thread, which grows and is never cleared: of(n) keeps no contents where it grows, and
// all contents where n is at most what was asked for before (of(0) is the pointer as it is). Under
// POSENC_GUARDED sizes are exact, and PAD entries at both ends may be read, but not written.
class Scratch {
 public:
  real* of(index n) {
    if (n > size_ || (GUARDED && n && n != size_)) {
      data_.reset(static_cast<real*>(::operator new((n + 2 * PAD) * sizeof(real), std::align_val_t(64))));
      size_ = n;
#ifdef POSENC_GUARDED
      std::memset(static_cast<void*>(data_.get()), 0xff, (n + 2 * PAD) * sizeof(real));  // NaN
      data_.get_deleter().size = n;
#endif
    }
    return data_.get() + PAD;
  }

 private:
#ifdef POSENC_GUARDED
  static constexpr bool GUARDED = true;
  struct Free {
    index size;
    void operator()(real* p) const {
      const auto changed = [](unsigned char byte) { return byte != 0xff; };
      for (const real* pad : {p, p + PAD + size}) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(pad);
        if (std::any_of(bytes, bytes + PAD * sizeof(real), changed)) {
          std::fputs("posenc: a kernel wrote beyond its scratch\n", stderr);
          std::abort();
        }
      }
      ::operator delete(p, std::align_val_t(64));
    }
  };
#else
  static constexpr bool GUARDED = false;
  struct Free {
    void operator()(real* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
#endif
  std::unique_ptr<real, Free> data_;
  index size_ = -1;
};

// Tokens of one head as rows of `real`, [tokens, ld]; a view where they are stored so.
struct Rows {
  const real* data = nullptr;
  index ld = 0;
  const real* at(index t) const { return data + t * ld; }
};
inline Rows read_rows(const Tokens& x, index b, index h, index first, index count, index features,
                      real by, Scratch& scratch) {
  const index width = round_up(features, VL);
  if (x.type == REAL && by == 1 && width == features)
    return {reinterpret_cast<const real*>(row_of(x, b, h, first)), x.token};
  real* to = scratch.of(count * width);
  for (index t = 0; t < count; ++t)
    read_row(x, row_of(x, b, h, first + t), by, features, width, to + t * width);
  return {to, width};
}

// Rows [n, features] as [count, width], with zeros for what they lack; where they lie if that is nothing.
inline Rows padded(const real* from, index n, index features, index count, index width, Scratch& scratch) {
  if (n == count && width == features) return {from, features};
  real* to = scratch.of(count * width);
  fill(to, 0, count * width);
  for (index i = 0; i < n; ++i) std::copy_n(from + i * features, features, to + i * width);
  return {to, width};
}
// The tokens of one head as those of a batch of one row and one head.
inline Tokens head_of(const Tokens& x, index b, index h) { return {row_of(x, b, h, 0), x.type, 0, 0, x.token}; }
inline Tokens head_of(Rows x) {
  return {reinterpret_cast<char*>(const_cast<real*>(x.data)), REAL, 0, 0, x.ld};
}

// Weights of a call's dropout: 0, or 1 / (1 - probability). They are a hash of the seed, the row
// (batch, head and query) and the key, so that the backward pass finds the same without storing them.
class Dropout {
 public:
  Dropout(double probability, index seed)
      : keep_(real(1 / (1 - probability))), seed_(seed), limit_(uint32_t(probability * 4294967295.0)) {}
  // splitmix64 of the row's number.
  uint32_t row_seed(index row) const {
    uint64_t x = seed_ + 0x9e3779b97f4a7c15ull * uint64_t(row + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return uint32_t(x ^ (x >> 31));
  }
  // Factors of the VL keys from j on, in the row of a row_seed: a 32-bit finalizer of key and row.
  vec at(uint32_t row, index j) const {
    vec factor;
    for (int l = 0; l < VL; ++l) {
      uint32_t x = uint32_t(j + l) * 0x9e3779b1u ^ row;
      x = (x ^ (x >> 16)) * 0x7feb352du;
      x = (x ^ (x >> 15)) * 0x846ca68bu;
      factor[l] = (x ^ (x >> 16)) >= limit_ ? keep_ : real(0);
    }
    return factor;
  }

 private:
  real keep_;
  uint64_t seed_;
  uint32_t limit_;
};
}  // namespace posenc
