// A plan's work items as threads take them, in parts: each worker's in order, then from the ends of what others have
// left.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "launch.h"

namespace sennit {

class ItemQueues {
 public:
  // by_heads(item): whether the heads of an item are taken one by one, so that few large items are shared evenly.
  template <class ByHeads>
  ItemQueues(const Plan& plan, ByHeads&& by_heads)
      : num_workers_(plan.num_workers), left_(new Left[plan.num_workers]), begin_(plan.num_workers) {
    for (int worker = 0; worker < num_workers_; ++worker) {
      begin_[worker] = parts_.size();
      for (int strand = 0; strand < plan.num_strands; ++strand) {
        const int32_t* bounds = plan.worker_indptr + strand * (num_workers_ + 1) + worker;
        for (int i = bounds[0]; i < bounds[1]; ++i) {
          const Item& item = plan.items[i];
          const int heads = by_heads(item) ? 1 : item.num_heads;
          for (int head = 0; head < item.num_heads; head += heads) parts_.push_back({&item, head, heads});
        }
      }
      left_[worker].range.store(parts_.size() - begin_[worker], std::memory_order_relaxed);
    }
  }

  // Calls body(item, worker) for parts of items until none is left, beginning with those that are planned for `mine`.
  template <class Body>
  void run(int mine, Body&& body) {
    for (int i = 0; i < num_workers_; ++i) {
      const int worker = (mine + i) % num_workers_;
      for (int place; (place = take(worker, i == 0)) >= 0;) body(parts_[begin_[worker] + place].as_item(), worker);
    }
  }

 private:
  struct Part {
    const Item* whole;
    int first_head, num_heads;

    Item as_item() const {
      Item item = *whole;
      item.head_start += first_head;
      item.num_heads = num_heads;
      if (item.partial_row >= 0) item.partial_row += first_head * item.num_rows;
      return item;
    }
  };
  struct alignas(64) Left {
    std::atomic<uint64_t> range;  // first place in the upper half, end in the lower
  };

  const int num_workers_;
  std::unique_ptr<Left[]> left_;
  std::vector<size_t> begin_;  // of each worker's parts
  std::vector<Part> parts_;

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
};

}  // namespace sennit
