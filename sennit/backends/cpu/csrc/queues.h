// A plan's work items as threads take them: each worker's in order, then from the ends of what others have left.
#pragma once

#include <atomic>
#include <memory>

#include "launch.h"

namespace sennit {

class ItemQueues {
 public:
  explicit ItemQueues(const Plan& plan) : plan_(plan), left_(new Left[plan.num_workers]) {
    for (int worker = 0; worker < plan.num_workers; ++worker) {
      uint64_t count = 0;
      for (int strand = 0; strand < plan.num_strands; ++strand) count += in_strand(strand, worker);
      left_[worker].range.store(count, std::memory_order_relaxed);
    }
  }

  // Calls body(item, worker) for items until none is left, beginning with those that are planned for `mine`.
  template <class Body>
  void run(int mine, Body&& body) {
    for (int i = 0; i < plan_.num_workers; ++i) {
      const int worker = (mine + i) % plan_.num_workers;
      for (int place; (place = take(worker, i == 0)) >= 0;) body(item(worker, place), worker);
    }
  }

 private:
  struct alignas(64) Left {
    std::atomic<uint64_t> range;  // first place in the upper half, end in the lower
  };

  const Plan& plan_;
  std::unique_ptr<Left[]> left_;

  const int32_t* bounds(int strand, int worker) const {
    return plan_.worker_indptr + strand * (plan_.num_workers + 1) + worker;
  }
  int in_strand(int strand, int worker) const { return bounds(strand, worker)[1] - bounds(strand, worker)[0]; }

  int take(int worker, bool front) {
    std::atomic<uint64_t>& range = left_[worker].range;
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t first = uint32_t(now >> 32), end = uint32_t(now);
      if (first >= end) return -1;
      const uint64_t rest = front ? uint64_t(first + 1) << 32 | end : uint64_t(first) << 32 | (end - 1);
      if (range.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return int(front ? first : end - 1);
    }
  }

  const Item& item(int worker, int place) const {
    int strand = 0;
    while (place >= in_strand(strand, worker)) place -= in_strand(strand++, worker);
    return plan_.items[bounds(strand, worker)[0] + place];
  }
};

}  // namespace sennit
