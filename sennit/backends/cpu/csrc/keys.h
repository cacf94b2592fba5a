// Which keys a work item reads, block by block, and where their rows are.
#pragma once

#include "launch.h"

namespace sennit {

// At most N keys in a row. Keys that are not there (past the exact length, without a page, or padding) read zeros,
// since slots that nobody owns may hold NaN, and a weight of zero does not cancel it.
template <class T, int N>
struct KeyBlock {
  int first, count;  // keys first : first + count; the rest up to N is padding
  bool complete;     // all `count` keys are there
  const T* k[N];     // rows of KV head 0, or zeros
  const T* v[N];
  int64_t k_head[N], v_head[N];  // from one head to the next
};

template <int N, class Q, class T>
static void find_keys(KeyBlock<T, N>& block, const Launch<Q, T>& launch, const Segment& segment, int first, int count,
                      int exact_len, const T* zeros) {
  block.first = first;
  block.count = count;
  block.complete = true;
  const int there = std::clamp(exact_len - first, 0, count);
  int i = 0;
  while (i < there) {
    const int key = first + i;
    int64_t k_at, v_at;
    int run = there - i;
    if (launch.page_size) {
      const int64_t page = launch.page_table[int64_t(segment.kv_start) + key / launch.page_size];
      const int slot = key % launch.page_size;
      run = std::min(run, launch.page_size - slot);
      if (page < 0) {  // given back behind a window
        block.complete = false;
        for (int end = i + run; i < end; ++i) {
          block.k[i] = block.v[i] = zeros;
          block.k_head[i] = block.v_head[i] = 0;
        }
        continue;
      }
      k_at = page * launch.k.page_stride + slot * launch.k.slot_stride;
      v_at = page * launch.v.page_stride + slot * launch.v.slot_stride;
    } else {
      k_at = (int64_t(segment.kv_start) + key) * launch.k.slot_stride;
      v_at = (int64_t(segment.kv_start) + key) * launch.v.slot_stride;
    }
    for (int end = i + run; i < end; ++i, k_at += launch.k.slot_stride, v_at += launch.v.slot_stride) {
      block.k[i] = launch.k.data + k_at;
      block.v[i] = launch.v.data + v_at;
      block.k_head[i] = launch.k.head_stride;
      block.v_head[i] = launch.v.head_stride;
    }
  }
  if (there < count) block.complete = false;
  for (; i < N; ++i) {
    block.k[i] = block.v[i] = zeros;
    block.k_head[i] = block.v_head[i] = 0;
  }
}

// The tree of a segment's last keys; `depths` is null where there is none.
struct KeyTree {
  const int32_t* depths;
  const uint32_t* bits;  // [q_len, words]
  int committed, nodes, words;
};

template <class Q, class T>
static KeyTree key_tree(const Launch<Q, T>& launch, const Segment& segment, int exact_len) {
  if (!segment.tree_len) return {nullptr, nullptr, exact_len, 0, 0};
  const int32_t* at = launch.plan.trees + segment.tree_at;
  return {at, reinterpret_cast<const uint32_t*>(at + segment.tree_len), exact_len - segment.tree_len, segment.tree_len,
          (segment.tree_len + 31) / 32};
}

// An item's keys in blocks of at most `size`, those of its hole left out.
struct BlockList {
  int first[2], end[2], before, count, size;  // `before` of the `count` blocks come before the hole

  template <class Q, class T>
  BlockList(const Launch<Q, T>& launch, const Segment& segment, const KeyTree& tree, const Item& item, int exact_len,
            int size)
      : first{item.key_start, item.hole_end},
        end{std::min(item.hole_start, exact_len), std::min(item.key_end, exact_len)}, size(size) {
    if (launch.kv_lens && launch.window_left != kNoLimit) leave_out(launch, segment, tree, item, exact_len);
    before = blocks(0);
    count = before + blocks(1);
  }

  struct Block {
    int first, count;
  };
  Block at(int number) const {
    const int range = number >= before, start = first[range] + (number - range * before) * size;
    return {start, std::min(size, end[range] - start)};
  }

 private:
  // What lies behind the window of all rows, which a plan knows only where it knows lengths.
  template <class Q, class T>
  void leave_out(const Launch<Q, T>& launch, const Segment& segment, const KeyTree& tree, const Item& item,
                 int exact_len) {
    const int64_t position =
        tree.depths ? tree.committed : int64_t(exact_len) - segment.q_len + item.row_start / launch.group_size;
    const int64_t sinks = int64_t(launch.num_sink_tokens) - segment.key_offset;
    const int64_t visible = position - launch.window_left - segment.key_offset;
    end[0] = int(std::clamp<int64_t>(sinks, item.key_start, end[1]));
    first[1] = int(std::clamp<int64_t>(visible, end[0], end[1]));
  }
  int blocks(int range) const { return std::max(end[range] - first[range] + size - 1, 0) / size; }
};

}  // namespace sennit
