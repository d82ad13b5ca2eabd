// The threads of a call: those of the OpenMP runtime that PyTorch has loaded, so that a process has one
// pool of them; one thread where it has none.
#pragma once
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>
#include "vec.h"
namespace posenc::NUMBER {
using Function = void (*)(void*);

struct Team {
  index threads;
  void (*parallel)(Function, void*, unsigned, unsigned);  // GOMP_parallel, or null

  // Calls f on at most `count` threads; on this one alone within another call, as OpenMP does.
  template <class F>
  void run(index count, F& f) const {
    const unsigned n = unsigned(std::min(threads, count));
    const Function call = [](void* x) { (*static_cast<F*>(x))(); };
    if (n <= 1 || !parallel)
      f();
    else
      parallel(call, &f, n, 0);
  }
};

// Calls f(state, item) for the items 0 … count - 1, each thread with a state of its own from make().
// Exceptions must not leave a thread: failure is passed on by flag.
template <class Make, class F>
void in_parallel(const Team& team, index count, Make make, F f) {
  std::atomic<index> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    try {
      auto state = make();
      for (index item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(state, item);
    } catch (...) {
      failed = true;
    }
  };
  team.run(count, work);
  if (failed) throw std::bad_alloc();
}
template <class F>
void in_parallel(const Team& team, index count, F f) {
  in_parallel(team, count, [] { return nullptr; }, [&](std::nullptr_t, index item) { f(item); });
}
}  // namespace posenc
