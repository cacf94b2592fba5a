// What the planner is given, as plan/work.py lays it out: segments, configurations and options.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace sennit {

constexpr int kSegmentFields = 10;

// See Segments in plan/segments.py: one entry a segment; the fields are those of SEGMENT_FIELDS in plan/tensors.py.
struct Segments {
  int64_t count;
  const int64_t *request, *q_start, *q_len, *kv_start, *kv_len, *key_offset, *causal, *tree_len, *tree_at, *mask_at;
};

enum Combine { kSum, kMax, kTurns, kApart };

// See Strand in plan/cost.py.
struct Strand {
  int64_t tile_rows, key_step, row_step, heads, workers;
  double item_time, compute_time, memory_time, split_time, haste, dealt;

  int64_t products() const { return tile_rows * key_step; }  // of a tile's rows and a step's keys

  // Time of a key step in a tile of so many rows: arithmetic and loads overlap.
  double step_time(double rows) const {
    const double taken = std::ceil(rows / double(row_step)) * (double(row_step) / double(tile_rows));
    return std::max(compute_time * taken, memory_time);
  }
};

// See KernelConfig in plan/cost.py.
struct Config {
  int64_t num_workers;
  Combine combine;
  int num_strands;
  Strand strands[2];
};

struct Options {
  int64_t group_size, num_heads, page_size, split_size;  // split_size 0: tiles are cut where that balances
  bool windowed;
  int64_t window_left, window_right, num_sinks;  // -1: any distance
  bool inexact, trees, alone;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
std::vector<T> prefix_sums(const std::vector<T>& values) {
  std::vector<T> sums(values.size() + 1);
  for (size_t i = 0; i < values.size(); ++i) sums[i + 1] = sums[i] + values[i];
  return sums;
}

}  // namespace sennit
