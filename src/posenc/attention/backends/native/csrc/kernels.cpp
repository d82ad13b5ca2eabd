// The functions that library.py calls, for one type of number; this file is compiled once for each.
#include "few_rows.h"
#include "head_mixing.h"
#include "linear.h"
#include "rotation.h"
#define JOIN(a, b) posenc_##a##_##b
#define EXPAND(a, b) JOIN(a, b)
#define NAME(x) EXPAND(x, NUMBER)

namespace posenc::NUMBER {
namespace {
// Runs a worker a thread over items of work: a head, a chunk of batch rows, a split of the queries. The
// items, and so the order of all sums, follow from the problem alone; no two items write to the same
// part of a gradient: those by bucket or offset have one for each chunk and split, those by key for each split.
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
          worker.begin_head(h, chunk * splits + split);
          const index size = worker.tile_size();
          for (index b = batch.begin; b < batch.end; ++b) {
            worker.begin_row(b, split);
            for (index i = queries.begin; i < queries.end; i += size)
              worker.run_tile(i, std::min(size, queries.end - i));
            worker.end_row();
          }
          worker.end_head();
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
int NAME(linear)(const Linear* x) { return linear(*x); }
#ifndef POSENC_DOUBLE
const char* posenc_sources() { return POSENC_SOURCES; }
#endif
}
#pragma GCC visibility pop
}  // namespace posenc
