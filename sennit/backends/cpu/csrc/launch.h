// The arguments of a launch as kernels see them, and rows of a plan's array (plan/tensors.py, plan/schedule.py).
#pragma once

#include <algorithm>
#include <cmath>

#include "element.h"
#include "graph.h"

namespace sennit {

constexpr int kRowWidth = 12;  // int32 words of an item, a merge and a segment
constexpr int kNoLimit = INT32_MAX;
constexpr double kLeastScale = 1e-30, kMostScale = 1e30;

struct Segment {
  int32_t request, q_start, q_len, kv_start, kv_len, key_offset, causal, tree_len, tree_at, mask_at, unused[2];
};
struct Item {
  int32_t segment, row_start, num_rows, head_start, num_heads, key_start, key_end, partial_row, hole_start, hole_end,
      unused[2];
};
struct Merge {
  int32_t segment, row_start, num_rows, head, first_row, num_parts, stride, unused[5];
};
static_assert(sizeof(Segment) == 4 * kRowWidth && sizeof(Item) == 4 * kRowWidth && sizeof(Merge) == 4 * kRowWidth);

// A plan's sections.
struct Plan {
  const Segment* segments;
  const Item* items;
  const Merge* merges;
  const int32_t* worker_indptr;  // [strands, workers + 1]
  const int32_t* trees;
  int num_merges, num_strands, num_workers;

  explicit Plan(const int32_t* words) {
    enum { kNumMerges = 8, kNumStrands = 10, kNumWorkers, kSegmentsAt, kItemsAt, kWorkersAt, kMergesAt, kTreesAt };
    segments = reinterpret_cast<const Segment*>(words + words[kSegmentsAt]);
    items = reinterpret_cast<const Item*>(words + words[kItemsAt]);
    merges = reinterpret_cast<const Merge*>(words + words[kMergesAt]);
    worker_indptr = words + words[kWorkersAt];
    trees = words + words[kTreesAt];
    num_merges = words[kNumMerges];
    num_strands = words[kNumStrands];
    num_workers = words[kNumWorkers];
  }
};

// Rows [rows, heads, dim] with contiguous dim; strides in elements.
template <class T>
struct Rows {
  T* data;
  int64_t row_stride, head_stride;

  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// Keys or values: pages [pages, slots, heads, dim], or packed rows [rows, heads, dim], with contiguous dim.
template <class T>
struct Pool {
  const T* data;
  int64_t page_stride, slot_stride, head_stride;
};

template <class Q, class T>
struct Launch {
  Plan plan;
  const int32_t* page_table = nullptr;
  const int32_t* kv_lens = nullptr;  // exact lengths, or null
  int page_size = 0;                 // 0: keys are packed rows
  int group_size = 0, dim_qk = 0, dim_vo = 0;
  Rows<const Q> q{};
  Pool<T> k{}, v{};
  Rows<Q> out{};
  Rows<float> lse{};             // data may be null; dim is 1
  float* partial_out = nullptr;  // [partial rows, dim_vo]
  float* partial_lse = nullptr;  // [partial rows]
  double sm_scale = 0;
  float soft_cap = 0;                   // 0: none
  const float* alibi_slopes = nullptr;  // [heads], or null
  const float* sinks = nullptr;         // [heads], or null
  const uint8_t* packed_mask = nullptr;
  int window_left = kNoLimit, window_right = kNoLimit, num_sink_tokens = 0;
  GraphFunction graph = nullptr;
  const GraphCapture* captures = nullptr;

  int exact_len(const Segment& s) const { return kv_lens ? std::clamp(kv_lens[s.request], 0, s.kv_len) : s.kv_len; }

  // Whether logits are more than products times a factor: one next to zero is not (-inf times zero is NaN), nor one
  // that log2(e) could make infinite.
  bool transforms() const {
    const double factor = std::abs(sm_scale);
    return soft_cap != 0 || alibi_slopes || graph || factor < kLeastScale || factor > kMostScale;
  }
};

}  // namespace sennit
