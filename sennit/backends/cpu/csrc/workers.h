// Threads: those that PyTorch's own operations run on, so that two pools never wait for each other's cores.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

namespace sennit {

// GOMP_parallel of the OpenMP library that PyTorch has loaded: runs a function once on each of so many threads.
using ParallelFunction = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Calls body(task) for tasks 0 to count - 1 on at most `threads` threads, each task once and in no order.
template <class Body>
static void run_tasks(ParallelFunction parallel, int threads, int count, Body&& body) {
  struct Job {
    std::atomic<int> next{0};
    int count;
    Body& body;
  } job{{}, count, body};
  const auto work = [](void* argument) {
    Job& job = *static_cast<Job*>(argument);
    for (int task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.body(task);
  };
  threads = threads < count ? threads : count;
  if (threads <= 1) return work(&job);
  if (parallel) return parallel(work, &job, unsigned(threads), 0);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, &job);
  work(&job);
  for (std::thread& other : others) other.join();
}

}  // namespace sennit
