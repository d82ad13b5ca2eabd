// The functions that library.py calls, for one type of number.
#include "backward.h"
#include "forward.h"
#define JOIN(a, b) posenc_##a##_##b
#define EXPAND(a, b) JOIN(a, b)
#define NAME(x) EXPAND(x, NUMBER)

namespace posenc::NUMBER {
namespace {
// Calls run(worker, head, batch rows, queries, part, split) for disjoint parts of the problem.
template <class Worker, class F>
int in_parallel(const Problem& x, index splits, F run) {
  const index items = x.heads * x.chunks * splits;
  const index rows = round_up((x.queries + splits - 1) / splits, 256);
  int failed = 0;
#pragma omp parallel num_threads(int(std::min(items, x.threads)))
  {
    try {
      Worker worker(x);
#pragma omp for schedule(dynamic, 1)
      for (index item = 0; item < items; ++item) {
        const index split = item % splits, chunk = item / splits % x.chunks, h = item / splits / x.chunks;
        const Range batch{x.batch * chunk / x.chunks, x.batch * (chunk + 1) / x.chunks};
        const Range queries{std::min(x.queries, split * rows), std::min(x.queries, (split + 1) * rows)};
        try {
          run(worker, h, batch, queries, chunk * splits + split, split);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
          failed = 1;
        }
      }
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      failed = 1;
    }
  }
  return failed;
}
}  // namespace

extern "C" {
int NAME(forward)(const Problem* x) {
  return in_parallel<Forward>(*x, x->splits, [](Forward& w, index h, Range b, Range q, index, index) {
    w.run(h, b, q);
  });
}
int NAME(backward)(const Problem* x) {
  return in_parallel<Backward>(*x, x->splits,
                               [](Backward& w, index h, Range b, Range q, index part, index split) {
                                 w.run(h, b, q, part, split);
                               });
}
#ifndef POSENC_DOUBLE
int64_t posenc_size() { return sizeof(Problem); }
#endif
}
}  // namespace posenc
