// The threads of a call: those of the OpenMP runtime that PyTorch has loaded, so that a process has one
// pool of them; plain threads where it has none.
#pragma once
#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <vector>
#include "vec.h"
namespace posenc::NUMBER {
using Function = void (*)(void*);

// Threads that are joined on every way out: one that is not ends the process.
struct Joined {
  std::vector<std::thread> threads;
  ~Joined() {
    for (std::thread& thread : threads) thread.join();
  }
};

// Calls f(argument), which must not throw, on this thread and on count - 1 others, or on fewer where
// the system gives fewer.
inline void on_plain_threads(Function f, void* argument, unsigned count) {
  static thread_local bool nested = false;
  if (nested) return f(argument);
  Joined others;
  try {
    others.threads.reserve(count);
    while (others.threads.size() + 1 < count)
      others.threads.emplace_back([=] { nested = true, f(argument); });
  } catch (const std::exception&) {
  }
  nested = true;
  f(argument);
  nested = false;
}

struct Team {
  index threads;
  void (*parallel)(Function, void*, unsigned, unsigned);  // GOMP_parallel, or null

  // Calls f on at most `count` threads; on this one alone within another call, as OpenMP does.
  template <class F>
  void run(index count, F& f) const {
    const unsigned n = unsigned(std::min(threads, count));
    const Function call = [](void* x) { (*static_cast<F*>(x))(); };
    if (n <= 1)
      f();
    else if (parallel)
      parallel(call, &f, n, 0);
    else
      on_plain_threads(call, &f, n);
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
