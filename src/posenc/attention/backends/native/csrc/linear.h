// Linear layers of few rows, as in decoding: reading weights takes the time, so each is read once, where it
// lies, for all rows.
#pragma once
#include "few_rows.h"
#include "rotation.h"
namespace posenc::NUMBER {
// out [rows, outputs] = x [rows, inputs] weight^T + bias, all of one type, each row after the other.
struct Linear {
  const char *x, *weight, *bias;  // no bias: null
  char* out;
  index type, rows;
  index inputs, outputs;  // multiples of 2 VL, of VL
  Team team;
};

constexpr index ITEM_BYTES = 1 << 16;  // of weights that a thread takes at once

// How weights are read, and rows of x in that order.
template <class Number>
struct OrderOf : InOrder<Number> {
  static Rows ordered(Rows x, index, Scratch&) { return x; }
};
#ifndef POSENC_DOUBLE
// The even numbers of two vectors, then the odd ones: each is the upper half of a float32, so that a shift
// and a mask convert both.
template <>
struct OrderOf<uint16_t> {
  static constexpr int VECTORS = 2;
  static void load(const uint16_t* p, vec* to) {
    typedef uint32_t bits __attribute__((vector_size(VL * 4), aligned(2), may_alias));
    const auto both = *reinterpret_cast<const bits*>(p);
    to[0] = (vec)(both << 16), to[1] = (vec)(both & 0xffff0000);
  }
  static Rows ordered(Rows x, index count, Scratch& scratch) {
    real* to = scratch.of(count);
    for (index i = 0; i < count; i += 2 * VL) {
      const vec low = NUMBER::load(x.data + i), high = NUMBER::load(x.data + i + VL);
      store(to + i, choose<EverySecond<0>>(low, high));
      store(to + i + VL, choose<EverySecond<1>>(low, high));
    }
    return {to, x.ld};
  }
};
#endif

template <class Number>
void linear_of(const Linear& l, Stored<Number> weight) {
  const index many = round_up(std::max<index>(1, ITEM_BYTES / index(l.inputs * sizeof(Number))), VL);
  const index items = (l.outputs + many - 1) / many;
  const Number *bias = reinterpret_cast<const Number*>(l.bias), *x = reinterpret_cast<const Number*>(l.x);
  Number* out = reinterpret_cast<Number*>(l.out);
  Scratch numbers, in_order;
  real* read = numbers.of(l.rows * l.inputs);
  read_numbers(x, 1, l.rows * l.inputs, read);
  const Rows rows = OrderOf<Number>::ordered({read, l.inputs}, l.rows * l.inputs, in_order);
  in_parallel(items > 1 ? l.team : Team{1, nullptr}, items, [] { return Scratch(); }, [&](Scratch& scratch, index item) {
    real* sums = scratch.of(l.rows * VL);
    for (index o = item * many; o < std::min(l.outputs, (item + 1) * many); o += VL) {
      products<Number, OrderOf<Number>>(l.rows, rows, {weight.at(o), l.inputs}, VL, l.inputs, sums, VL);
      const vec added = bias ? Lanes<Number>::load(bias + o) : vec{};
      for (index r = 0; r < l.rows; ++r) Lanes<Number>::store(out + r * l.outputs + o, load(sums + r * VL) + added);
    }
  });
}

inline int linear(const Linear& l) {
  try {
    as_stored(l.weight, l.type, l.inputs, [&](auto weight) { linear_of(l, weight); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}  // namespace posenc
