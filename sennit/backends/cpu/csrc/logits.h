// What the rows of a tile see of a block of keys, and what becomes of their logits before the softmax.
#pragma once

#include <limits>

#include "functions.h"
#include "keys.h"

namespace sennit {

constexpr double kLog2E = 1.4426950408889634;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Query rows in lanes: lane l is packed row `row_start + l % period`. Lanes past the last row repeat it.
template <int L>
struct LaneRows {
  alignas(64) int32_t token[L], position[L], head[L];
  alignas(64) int32_t causal_end[L], window_end[L], window_start[L];  // last and first visible positions
  alignas(64) float slope[L];
  const uint32_t* tree[L];
  int least_causal_end, most_causal_end, least_window_end, most_window_start;
};

// Positions near the ends of int32 stay inside it.
static inline int clamped(int64_t position) { return int(std::clamp<int64_t>(position, INT32_MIN, INT32_MAX)); }

template <int L, class Q, class T>
static void describe_rows(LaneRows<L>& rows, const Launch<Q, T>& launch, const Segment& segment, const KeyTree& tree,
                          int exact_len, int row_start, int num_rows, int period, int kv_head) {
  int token = row_start / launch.group_size, of_group = row_start % launch.group_size;
  const int first_token = token, first_of_group = of_group;
  for (int lane = 0; lane < L; ++lane) {
    if (lane % period == 0) token = first_token, of_group = first_of_group;
    rows.token[lane] = token;
    rows.head[lane] = kv_head * launch.group_size + of_group;
    if (lane % period >= num_rows - 1) continue;
    if (++of_group == launch.group_size) ++token, of_group = 0;
  }
  const int first_position = exact_len - segment.q_len;
  for (int lane = 0; lane < L; ++lane) rows.position[lane] = first_position + rows.token[lane];
  if (tree.depths) {
    for (int lane = 0; lane < L; ++lane) {
      rows.position[lane] = tree.committed + tree.depths[tree.nodes - segment.q_len + rows.token[lane]];
      rows.tree[lane] = tree.bits + int64_t(rows.token[lane]) * tree.words;
    }
  }
  const bool causal = segment.causal && !tree.depths;
  for (int lane = 0; lane < L; ++lane) {
    const int64_t position = rows.position[lane];
    rows.causal_end[lane] = causal ? int(position) : INT32_MAX;
    rows.window_end[lane] = launch.window_right == kNoLimit ? INT32_MAX : clamped(position + launch.window_right);
    rows.window_start[lane] = launch.window_left == kNoLimit ? INT32_MIN : clamped(position - launch.window_left);
    rows.slope[lane] = launch.alibi_slopes ? launch.alibi_slopes[rows.head[lane]] : 0.f;
  }
  const auto least = [](const int32_t* of) { return *std::min_element(of, of + L); };
  const auto most = [](const int32_t* of) { return *std::max_element(of, of + L); };
  rows.least_causal_end = least(rows.causal_end);
  rows.most_causal_end = most(rows.causal_end);
  rows.least_window_end = least(rows.window_end);
  rows.most_window_start = most(rows.window_start);
}

// Whether every row sees all keys first : first + count, without looking at each.
template <int L, class Q, class T>
static bool sees_all(const LaneRows<L>& rows, const Launch<Q, T>& launch, const Segment& segment, const KeyTree& tree,
                     int first, int count) {
  const int last = first + count - 1;
  if (launch.packed_mask || (tree.depths && last >= tree.committed)) return false;
  const int64_t begin = int64_t(segment.key_offset) + first, end = int64_t(segment.key_offset) + last;
  return end <= rows.least_causal_end && end <= rows.least_window_end && begin >= rows.most_window_start;
}

// How many of keys first : first + count the last row sees; those behind them no row does.
template <int L>
static int reach(const LaneRows<L>& rows, const Segment& segment, int first, int count) {
  if (rows.most_causal_end == INT32_MAX) return count;
  return int(std::clamp<int64_t>(int64_t(rows.most_causal_end) - segment.key_offset - first + 1, 0, count));
}

// A block of logits in place: a step for every key (or W / rows keys, one a lane), `vectors` of W rows each.
struct LogitBlock {
  float* logits;
  int steps, vectors;
  bool key_per_lane;    // keys[step * W + lane]; otherwise keys[step]
  const int32_t* keys;  // INT32_MAX where there is none
};

template <int L, class Q, class T>
struct LogitChange {
  const Launch<Q, T>& launch;
  const Segment& segment;
  const KeyTree& tree;
  const LaneRows<L>& rows;

  int32_t key_position(int32_t key) const {
    if (key == INT32_MAX) return key;
    if (tree.depths && key >= tree.committed) return tree.committed + tree.depths[key - tree.committed];
    return segment.key_offset + key;
  }

  // Logits from products, times log2(e), hidden ones -inf. `positions` has room for an entry a key.
  void transform(const LogitBlock& block, int32_t* positions) const {
    const int keys = block.steps * (block.key_per_lane ? W : 1);
    for (int i = 0; i < keys; ++i) positions[i] = key_position(block.keys[i]);
    const float cap = launch.soft_cap, scale = float(launch.sm_scale),
                inverse_cap = cap ? float(launch.sm_scale / cap) : 0.f;
    const bool divide = !std::isnormal(inverse_cap);
    each(block, positions, [&](f32x s, i32x, i32x position, int lane) {
      s = cap ? cap * tanh(divide ? s * scale / cap : s * inverse_cap) : s * scale;
      if (launch.alibi_slopes) {
        const i32x ahead = (i32x)((u32x)position - (u32x)load(rows.position + lane));
        s += load(rows.slope + lane) * __builtin_convertvector(ahead, f32x);
      }
      return s;
    });
    if (launch.graph) {
      launch.graph({block.logits, block.steps, block.vectors, int64_t(block.vectors) * W, rows.position, rows.head,
                    positions, block.key_per_lane, segment.request, launch.captures});
    }
    each(block, positions, [&](f32x s, i32x, i32x, int) { return multiply_finite(s, float(kLog2E)); });
  }

  // -inf where a row does not see a key.
  void mask(const LogitBlock& block, int32_t* positions) const {
    const int keys = block.steps * (block.key_per_lane ? W : 1);
    for (int i = 0; i < keys; ++i) positions[i] = key_position(block.keys[i]);
    each(block, positions, [&](f32x s, i32x key, i32x position, int lane) {
      i32x seen = (position >= load(rows.window_start + lane)) & (position <= load(rows.window_end + lane));
      seen |= position < splat(launch.num_sink_tokens);
      seen &= position <= load(rows.causal_end + lane);
      if (tree.depths || launch.packed_mask) seen &= listed(key, lane);
      seen &= key != splat(INT32_MAX);
      return seen ? s : splat(-kInfinity);
    });
  }

 private:
  template <class Change>
  SENNIT_INLINE void each(const LogitBlock& block, const int32_t* positions, Change&& change) const {
    for (int step = 0; step < block.steps; ++step) {
      for (int vector = 0; vector < block.vectors; ++vector) {
        float* at = block.logits + (int64_t(step) * block.vectors + vector) * W;
        const i32x key = block.key_per_lane ? load(block.keys + step * W) : splat(block.keys[step]);
        const i32x position = block.key_per_lane ? load(positions + step * W) : splat(positions[step]);
        store(at, change(load(at), key, position, vector * W));
      }
    }
  }

  // What trees and packed masks let rows see: bits, looked up lane by lane.
  i32x listed(i32x keys, int first_lane) const {
    i32x seen;
    for (int i = 0; i < W; ++i) {
      const int32_t key = keys[i], lane = first_lane + i;
      bool ok = key != INT32_MAX;
      if (ok && tree.depths && key >= tree.committed) {
        const int node = key - tree.committed;
        ok = rows.tree[lane][node / 32] >> (node % 32) & 1;
      }
      if (ok && launch.packed_mask) {
        const int64_t bit = int64_t(rows.token[lane]) * segment.kv_len + key;
        ok = launch.packed_mask[segment.mask_at + bit / 8] >> (bit % 8) & 1;
      }
      seen[i] = -int(ok);
    }
    return seen;
  }
};

}  // namespace sennit
