// DAPE: logits corrected by an MLP of the logits of all heads, so that heads are computed together.
#pragma once
#include <memory>
#include "backward.h"
#include "forward.h"
namespace posenc::NUMBER {
constexpr index MIXED_PARTS = 4;  // of the rows of a tile: as many threads have work
constexpr index MAX_MIXED_LOGITS = index(1) << 21;  // of a tile and all heads (8 MiB in float32)

// s[h] += b2[h] + Σ_u w2[h, u] · leaky(z[u]), z[u] = x[u, offset] + Σ_h w1[u, h] · s[h].
// data: w1 [U, H], x [U, W] from the offset terms.first on, w2 [H, U], b2 [H]; gradient: each
// [parts, ...]. sizes: U, W.
class Mixing {
 public:
  explicit Mixing(const Problem& x)
      : x_(x), heads_(x.heads), units_(x.pairs.sizes[0]), count_(x.pairs.sizes[1]) {
    for (Scratch* block : {&s_, &ds_, &out_}) block->of(heads_ * CHUNK);
    for (Scratch* block : {&z_, &dz_}) block->of(units_ * CHUNK);
    for (Scratch* sums : {&dw1_, &dw2_}) fill(sums->of(units_ * heads_ * VL), 0, units_ * heads_ * VL);
    fill(db2_.of(heads_ * VL), 0, heads_ * VL);
    stride_ = count_ + 2 * PAD;
    // [units, padded heads], zero for the heads that pad: `correct` takes multiples of four.
    padded_ = round_up(heads_, 4);
    real *w1 = w1_.of(units_ * padded_), *w2 = w2_.of(units_ * padded_);
    for (index u = 0; u < units_; ++u)
      for (index h = 0; h < padded_; ++h) {
        w1[u * padded_ + h] = h < heads_ ? x.pairs.data[0][u * heads_ + h] : 0;
        w2[u * padded_ + h] = h < heads_ ? x.pairs.data[2][h * units_ + u] : 0;
      }
  }
  // The rows x [U, W], with PAD readable entries before and after each.
  static const real* pad_rows(const Problem& x, Scratch& scratch) {
    const index units = x.pairs.sizes[0], count = x.pairs.sizes[1], stride = count + 2 * PAD;
    real* rows = scratch.of(units * stride);
    fill(rows, 0, units * stride);
    for (index u = 0; u < units; ++u) std::copy_n(x.pairs.data[1] + u * count, count, rows + u * stride + PAD);
    return rows;
  }
  void begin(const real* rows) { rows_ = rows; }
  void begin_gradient() { fill(dx_.of(units_ * stride_), 0, units_ * stride_); }
  // Corrects some rows of s [heads, rows, ld], logits of a tile of queries and all keys; `size` numbers
  // a head.
  void apply(const QueryTile& tile, Range rows, real* s, index size, index ld) {
    for_chunks(tile, rows, [&](index i, index t, index n, index at, Range visible) {
      switch (padded_) {
        case 4: return correct<4>(s + i * ld + t, size, n, at);
        case 8: return correct<8>(s + i * ld + t, size, n, at);
        case 12: return correct<12>(s + i * ld + t, size, n, at);
      }
      read(s_, s + i * ld, size, t, n, visible);
      hidden_layer(at, n);
      gemm(heads_, n, units_, {x_.pairs.data[2], units_, 1}, z_.of(0), CHUNK, out_.of(0), CHUNK, false);
      for (index h = 0; h < heads_; ++h) {
        real* to = s + h * size + i * ld + t;
        for (index l = 0; l < n; l += VL)
          store(to + l, load(to + l) + load(out_.of(0) + h * CHUNK + l) + x_.pairs.data[3][h]);
      }
    });
  }
  // ds, the gradients of the corrected logits, become those of the logits s.
  void differentiate(const QueryTile& tile, Range rows, const real* s, real* ds, index size, index ld) {
    for_chunks(tile, rows, [&](index i, index t, index n, index at, Range visible) {
      read(s_, s + i * ld, size, t, n, visible);
      read(ds_, ds + i * ld, size, t, n, visible);
      real *z = z_.of(0), *dz = dz_.of(0), *d = ds_.of(0);
      gemm(units_, n, heads_, {x_.pairs.data[2], 1, units_}, d, CHUNK, dz, CHUNK, false);
      hidden_layer(at, n, dz);
      outer(d, heads_, z, units_, n, dw2_.of(0));
      outer(dz, units_, s_.of(0), heads_, n, dw1_.of(0));
      for (index h = 0; h < heads_; ++h) add(db2_.of(0) + h * VL, d + h * CHUNK, n);
      for (index u = 0; u < units_; ++u) add_range(dx_.of(0) + u * stride_ + PAD + at, dz + u * CHUNK, n);
      gemm(heads_, n, units_, {x_.pairs.data[0], 1, heads_}, dz, CHUNK, out_.of(0), CHUNK, false);
      for (index h = 0; h < heads_; ++h)
        add_range(ds + h * size + i * ld + t, out_.of(0) + h * CHUNK, n);
    });
  }
  void end_gradient(index part) {
    const Pairs& p = x_.pairs;
    reduce(dw1_, p.gradient[0] + part * units_ * heads_, units_ * heads_);
    reduce(dw2_, p.gradient[2] + part * units_ * heads_, units_ * heads_);
    reduce(db2_, p.gradient[3] + part * heads_, heads_);
    for (index u = 0; u < units_; ++u)
      add_range(p.gradient[1] + (part * units_ + u) * count_, dx_.of(0) + u * stride_ + PAD, count_);
  }

 private:
  static constexpr index CHUNK = 128;  // keys that the MLP is computed for at once
  // Calls run(row, first key, keys, index of the first key's offset, visible keys) for chunks of keys.
  template <class F>
  void for_chunks(const QueryTile& tile, Range rows, F run) const {
    for (index i = rows.begin; i < rows.end; ++i) {
      const Range visible = tile.all_visible_keys(i);
      if (visible.begin >= visible.end) continue;  // else rounding down could start a chunk
      for (index t = visible.begin / VL * VL; t < visible.end; t += CHUNK)
        run(i, t, std::min(CHUNK, round_up(visible.end, VL) - t), t + tile.base[i] - x_.terms.first,
            visible);
    }
  }
  // block [heads, CHUNK] = n numbers of a row of every head, zero for hidden keys.
  void read(Scratch& block, const real* from, index stride, index t, index n, Range visible) const {
    for (index h = 0; h < heads_; ++h) {
      real* to = block.of(0) + h * CHUNK;
      for (index l = 0; l < n; l += VL)
        store(to + l, masked(load(from + h * stride + t + l), t + l, visible, 0));
    }
  }
  // z [units, CHUNK] = leaky(x + w1 s); dz, if given, becomes the gradient before the activation.
  void hidden_layer(index at, index n, real* dz = nullptr) {
    real* z = z_.of(0);
    gemm(units_, n, heads_, {x_.pairs.data[0], heads_, 1}, s_.of(0), CHUNK, z, CHUNK, false);
    for (const real* x = rows_ + PAD + at; x < rows_ + units_ * stride_; x += stride_, z += CHUNK) {
      for (index l = 0; l < n; l += VL) {
        const vec v = load(z + l) + load(x + l);
        store(z + l, v > 0 ? v : v * SLOPE);
        if (dz) store(dz + l, v > 0 ? load(dz + l) : load(dz + l) * SLOPE);
      }
      if (dz) dz += CHUNK;
    }
  }
  // `apply` for up to H heads, kept in registers: s [heads, size], n keys of one row. Inlined into its
  // caller, they would not all be.
  template <int H>
  __attribute__((noinline)) void correct(real* s, index size, index n, index at) {
    for (index l = 0; l < n; l += VL) {
      vec in[H], out[H];
      for (int h = 0; h < H; ++h) {
        in[h] = h < heads_ ? load(s + h * size + l) : vec{};
        out[h] = h < heads_ ? in[h] + x_.pairs.data[3][h] : vec{};
      }
      const real *x = rows_ + PAD + at + l, *w1 = w1_.of(0), *w2 = w2_.of(0);
      for (index u = 0; u < units_; ++u, x += stride_, w1 += H, w2 += H) {
        vec z = load(x);
#pragma GCC unroll 12
        for (int h = 0; h < H; ++h) z += in[h] * w1[h];
        z = z > 0 ? z : z * SLOPE;
#pragma GCC unroll 12
        for (int h = 0; h < H; ++h) out[h] += z * w2[h];
      }
      for (int h = 0; h < H && h < heads_; ++h) store(s + h * size + l, out[h]);
    }
  }
  static void add(real* sums, const real* x, index n) {
    vec lane_sums = load(sums);
    for (index l = 0; l < n; l += VL) lane_sums += load(x + l);
    store(sums, lane_sums);
  }
  // sums[a, b] += x[a] · y[b] over n, a vector of partial sums for each pair, in 4 x 4 register blocks.
  static void outer(const real* x, index rows, const real* y, index columns, index n, real* sums) {
    for (index a = 0; a < rows; a += 4)
      for (index b = 0; b < columns; b += 4)
        if (a + 4 <= rows && b + 4 <= columns)
          outer_block<4>(x + a * CHUNK, y + b * CHUNK, n, sums + (a * columns + b) * VL, columns);
        else
          for (index p = a; p < std::min(rows, a + 4); ++p)
            for (index q = b; q < std::min(columns, b + 4); ++q)
              outer_block<1>(x + p * CHUNK, y + q * CHUNK, n, sums + (p * columns + q) * VL, columns);
  }
  template <int S>
  static void outer_block(const real* x, const real* y, index n, real* sums, index columns) {
    vec acc[S][S];
    for (int a = 0; a < S; ++a)
      for (int b = 0; b < S; ++b) acc[a][b] = load(sums + (a * columns + b) * VL);
    for (index l = 0; l < n; l += VL)
#pragma GCC unroll 4
      for (int a = 0; a < S; ++a)
#pragma GCC unroll 4
        for (int b = 0; b < S; ++b) acc[a][b] += load(x + a * CHUNK + l) * load(y + b * CHUNK + l);
    for (int a = 0; a < S; ++a)
      for (int b = 0; b < S; ++b) store(sums + (a * columns + b) * VL, acc[a][b]);
  }
  // to[n] += the vectors of sums, which begin anew.
  static void reduce(Scratch& sums, real* to, index n) {
    for (index m = 0; m < n; ++m) to[m] += sum(load(sums.of(0) + m * VL));
    fill(sums.of(0), 0, n * VL);
  }

  static constexpr real SLOPE = real(0.01);  // of leaky ReLU below 0, PyTorch's default
  const Problem& x_;
  index heads_, units_, count_, stride_, padded_;
  const real* rows_ = nullptr;
  Scratch w1_, w2_, s_, ds_, out_, z_, dz_, dw1_, dw2_, db2_, dx_;
};

// Forward or Backward of all heads, a tile of queries at a time: products of all heads, the MLP over
// them, then each head with its mixed logits; for gradients the same in reverse. Each step is parallel.
template <class Worker>
class AllHeads {
 public:
  explicit AllHeads(const Problem& x) : x_(x), ld_(round_up(x.keys, PANEL)) {
    for (index h = 0; h < x.heads; ++h) heads_.push_back(std::make_unique<Worker>(x));
    for (index n = 0; n < MIXED_PARTS; ++n) parts_.push_back(std::make_unique<Mixing>(x));
    const real* rows = Mixing::pad_rows(x, rows_);
    for (const auto& part : parts_) part->begin(rows);
  }
  index tile_size() const { return std::clamp<index>(MAX_MIXED_LOGITS / (x_.heads * ld_), MIXED_PARTS, BLOCK); }
  void begin_head(index, index part) {
    part_ = part;
    for (index n = 0; n < MIXED_PARTS && BACKWARD; ++n) parts_[n]->begin_gradient();
    for_heads([&](Worker& head, index h) { head.begin_head(h, part); });
  }
  void begin_row(index b, index split) {
    for_heads([&](Worker& head, index) { head.begin_row(b, split); });
  }
  void run_tile(index first, index n) {
    const index size = round_up(n, AMX_TILE) * ld_;
    real* s = s_.of(x_.heads * size);
    for_heads([&](Worker& head, index h) { head.all_products(first, n, s + h * size, ld_); });
    real* mixed = s;
    if (BACKWARD) mixed = std::copy_n(s, x_.heads * size, mixed_.of(x_.heads * size)) - x_.heads * size;
    for_parts(
        n, [&](Mixing& mixing, const QueryTile& tile, Range rows) { mixing.apply(tile, rows, mixed, size, ld_); });
    for_heads([&](Worker& head, index h) {
      head.precomputed = mixed + h * size, head.precomputed_ld = ld_;
      head.run_tile(first, n);
    });
    if constexpr (BACKWARD) {
      for_parts(n, [&](Mixing& mixing, const QueryTile& tile, Range rows) {
        mixing.differentiate(tile, rows, s, mixed, size, ld_);
      });
      for_heads([&](Worker& head, index h) { head.add_logit_gradients(mixed + h * size, ld_); });
    }
  }
  void end_row() {
    for_heads([&](Worker& head, index) { head.end_row(); });
  }
  void end_head() {
    for_heads([&](Worker& head, index) { head.end_head(); });
    for (index n = 0; n < MIXED_PARTS && BACKWARD; ++n) parts_[n]->end_gradient(part_);
  }

 private:
  static constexpr bool BACKWARD = std::is_same_v<Worker, Backward>;
  template <class F>
  void for_heads(F f) {
    in_parallel(x_.team, x_.heads, [&](index h) {
      AmxTiles registers(heads_[h]->use_amx);  // of this thread
      f(*heads_[h], h);
    });
  }
  template <class F>
  void for_parts(index rows, F f) {
    const QueryTile& tile = heads_[0]->tile;
    in_parallel(x_.team, MIXED_PARTS, [&](index n) {
      f(*parts_[n], tile, Range{rows * n / MIXED_PARTS, rows * (n + 1) / MIXED_PARTS});
    });
  }
  const Problem& x_;
  index ld_, part_ = 0;
  std::vector<std::unique_ptr<Worker>> heads_;
  std::vector<std::unique_ptr<Mixing>> parts_;
  Scratch s_, mixed_, rows_;
};
}  // namespace posenc
