// The arguments of a call, as library.py lays them out: every field is eight bytes wide.
#pragma once
#include <memory>
#include <new>
#include "vec.h"
namespace posenc::NUMBER {
#if defined(__aarch64__) && __GNUC__ < 13
using half = __fp16;  // the same numbers; GCC 12 has no _Float16 in C++ on this processor
#else
using half = _Float16;
#endif
constexpr index BLOCK = 64;  // tokens whose products with buckets are computed at once

struct Range {
  index begin, end;
  index size() const { return end > begin ? end - begin : 0; }
  void extend(Range other) { begin = std::min(begin, other.begin), end = std::max(end, other.end); }
};

enum Type : index { REAL = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// [batch, heads, tokens, features], features contiguous; strides in elements, 0 where shared.
struct Tokens {
  char* data;
  index type, batch, head, token;
};
// What pairs of a token's features are multiplied by as complex numbers: [B|1, H|1, tokens, pairs].
struct RotaryFactors {
  const real *cosine, *sine;
  index batch, head, token;  // strides, 0 where shared
  index at(index b, index h, index t) const { return b * batch + h * head + t * token; }
};
struct Span {
  int32_t first, last, bucket, step;  // offsets less the map's first, both inclusive; step 0 or 1
};
// Buckets of the offsets first … first + count - 1; each differs from the last by 0 or 1.
struct Map {
  const int32_t* bucket;   // PAD more entries before and after
  const int32_t* span_of;  // index of each offset's span
  const Span* spans;
  index first, count, buckets;
  // Offsets below low have bucket 0, those from high on the last: constant spans at the ends.
  index low, high;
};
// tokens[b, h, t] . rows[h, bucket]; the same for gradients, whose rows are [parts, H, N, F].
// Without tokens_gradient, the tokens are the queries (left) or the keys (right), and it is in theirs.
struct Term {
  Tokens tokens, tokens_gradient;
  const real* rows;
  real* rows_gradient;
  index rows_head, features;
};
// A term of pairs outside the formula; the header of its kind says what the arrays are.
enum Kind : index { NONE = 0, DISTANCE = 1, COUNTS = 2, STICKS = 3, MIXING = 4, BLOCKS = 5 };
struct Pairs {
  index kind;
  index sizes[6];
  const real* data[6];
  real* gradient[6];
  // Whether terms depend on sums over the later keys of a row.
  bool sums() const { return kind == COUNTS || kind == STICKS; }
  // Whether tiles of keys go from the last to the first.
  bool from_last() const { return sums() || kind == BLOCKS; }
};
struct Problem {
  index batch, heads, groups, queries, keys, dim, value_dim;
  index threads, chunks, splits;
  double scale, dropout;
  index seed, part;  // part: output and lse are over more keys than these
  Tokens q, k, v, out;
  Tokens q_factor, k_factor;  // [B|1, H, ., rank]: s_ij += q_factor_i . k_factor_j
  index rank;
  RotaryFactors q_rotary, k_rotary;  // of queries and keys before their product
  index rotated, adjacent;  // pairs, 0 for none; they are (2t, 2t + 1), not (t, t + rotated)
  double* lse;          // [B, H, Q]
  const int32_t* low;   // [B|1, Q]: the keys low … high - 1 are visible,
  const int32_t* high;  // and the offset of key j is j + base
  const int32_t* base;
  index rows_batch;     // stride of the three
  const real* bias_by_offset;           // [H|1, W] bias by offset
  real* bias_by_offset_gradient;  // [parts, H, W]
  index bias_by_offset_head, bias_by_offset_first, bias_by_offset_count;
  // Image rows of keys: that many keys, after each the offset jumps by one less than a row has
  // queries. Left's buckets are then offsets along the columns, ascending, and along the rows.
  index period, jump;
  const double* column;  // [B|1, H, K]
  double* column_gradient;  // [splits, B, H, K]
  index column_batch, column_head;
  Map map;
  Term left, right;
  const real* value_rows;  // [H|1, N, E]
  real* value_gradient;    // [parts, H, N, E]
  index value_head;
  Tokens gradient, dq, dk, dv;  // dk, dv and right's tokens' are [splits, B, H, K, .]
  Tokens dq_factor, dk_factor;  // [B, H, Q, rank] and [splits, B, H, K, rank]
  index dk_split, dv_split, right_split, dk_factor_split;
  Pairs pairs;
  index depth() const { return dim + rank; }  // features of a product of a query and a key
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
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline char* row_of(const Tokens& x, index b, index h, index t) {
  return x.data + (b * x.batch + h * x.head + t * x.token) * (x.type == REAL ? sizeof(real) : 2);
}
// n features times `by` to p, zeros up to `width`.
inline void read_row(const Tokens& x, const char* from, real by, index n, index width, real* p) {
  if (x.type == REAL) {
    const real* r = reinterpret_cast<const real*>(from);
    for (index d = 0; d < n; ++d) p[d] = r[d] * by;
  } else if (x.type == BFLOAT16) {
    const uint16_t* r = reinterpret_cast<const uint16_t*>(from);
    for (index d = 0; d < n; ++d) p[d] = from_bfloat16(r[d]) * by;
  } else {
    const half* r = reinterpret_cast<const half*>(from);
    for (index d = 0; d < n; ++d) p[d] = real(r[d]) * by;
  }
  for (index d = n; d < width; ++d) p[d] = 0;
}
inline void write_row(const Tokens& x, char* to, const real* p, real by, index n) {
  if (x.type == REAL) {
    real* r = reinterpret_cast<real*>(to);
    for (index d = 0; d < n; ++d) r[d] = p[d] * by;
  } else if (x.type == BFLOAT16) {
    uint16_t* r = reinterpret_cast<uint16_t*>(to);
    for (index d = 0; d < n; ++d) r[d] = to_bfloat16(float(p[d] * by));
  } else {
    half* r = reinterpret_cast<half*>(to);
    for (index d = 0; d < n; ++d) r[d] = half(p[d] * by);
  }
}

// Scratch of one thread, which grows and is never cleared.
class Scratch {
 public:
  real* of(index n) {
    if (n > size_) {
      data_.reset(static_cast<real*>(::operator new((n + 2 * PAD) * sizeof(real), std::align_val_t(64))));
      size_ = n;
    }
    return data_.get() + PAD;
  }

 private:
  struct Free {
    void operator()(real* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<real, Free> data_;
  index size_ = -1;
};

// Tokens of one head as rows of `real`; a view where they are stored so.
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

// The tokens of one head, which is then the first.
inline Tokens head_of(const Tokens& x, index b, index h) { return {row_of(x, b, h, 0), x.type, 0, 0, x.token}; }
inline Tokens head_of(Rows x) {
  return {reinterpret_cast<char*>(const_cast<real*>(x.data)), REAL, 0, 0, x.ld};
}

// Calls f(0) … f(count - 1) on several threads, unless it is called on one of several.
template <class F>
void in_parallel(index threads, index count, F f) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(std::min(threads, count)))
  for (index item = 0; item < count; ++item) {
    try {
      f(item);
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      failed = 1;
    }
  }
  if (failed) throw std::bad_alloc();
}

// Weights of a call's dropout: 0, or 1 / (1 - probability).
class Dropout {
 public:
  Dropout(double probability, index seed)
      : keep_(real(1 / (1 - probability))), seed_(seed), limit_(uint32_t(probability * 4294967295.0)) {}
  // What vectors of keys from j on are multiplied by, in the row that row_seed is for.
  uint32_t row_seed(index row) const {
    uint64_t x = seed_ + 0x9e3779b97f4a7c15ull * uint64_t(row + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return uint32_t(x ^ (x >> 31));
  }
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
