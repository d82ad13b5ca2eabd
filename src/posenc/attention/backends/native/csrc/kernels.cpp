// The functions that library.py calls, for one type of number; this file is compiled once for each.
#include "few_rows.h"
#include "head_mixing.h"
#include "rotation.h"
#define JOIN(a, b) posenc_##a##_##b
#define EXPAND(a, b) JOIN(a, b)
#define NAME(x) EXPAND(x, NUMBER)

namespace posenc::NUMBER {
namespace {
// Runs a worker a thread over items of work: a head, a chunk of batch rows, a split of the queries. The
// items, and so the order of all sums, follow from the problem alone; no two items write to the same
// part of a gradient.
template <class Worker>
int run_workers(const Problem& x) {
  const index splits = x.splits;
  const index heads = x.pairs.kind == MIXING ? 1 : x.heads, items = heads * x.chunks * splits;
  const index rows = round_up((x.queries + splits - 1) / splits, 256);  // whole tiles of queries
  try {
    in_parallel(
        x.team, items, [&] { return Worker(x); },
        [&](Worker& worker, index item) {
          const index split = item % splits, chunk = item / splits % x.chunks, h = item / splits / x.chunks;
          const Range batch{x.batch * chunk / x.chunks, x.batch * (chunk + 1) / x.chunks};
          const Range queries{std::min(x.queries, split * rows), std::min(x.queries, (split + 1) * rows)};
          worker.run(h, batch, queries, chunk * splits + split, split);
        });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
int NAME(forward)(const Problem* x) {
  if (FewRows::serves(*x)) return attend_few(*x);
  return x->pairs.kind == MIXING ? run_workers<AllHeads<Forward>>(*x) : run_workers<Forward>(*x);
}
int NAME(backward)(const Problem* x) {
  return x->pairs.kind == MIXING ? run_workers<AllHeads<Backward>>(*x) : run_workers<Backward>(*x);
}
int NAME(rotate)(const Rotation* x) {
  rotate(*x);
  return 0;
}
#ifndef POSENC_DOUBLE
const char* posenc_sources() { return POSENC_SOURCES; }
#endif
}
#pragma GCC visibility pop
}  // namespace posenc
