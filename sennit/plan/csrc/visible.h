// The twin of plan/visible.py: which keys a stretch of query rows can see.
#pragma once

#include <algorithm>

#include "inputs.h"

namespace sennit {

// Keys of a segment up to the last one that its rows up to `last_token` see.
inline int64_t last_key(const Segments& segments, const Options& options, int64_t segment, int64_t last_token) {
  const int64_t kv_len = segments.kv_len[segment];
  int64_t ahead = kv_len - segments.q_len[segment] + last_token + 1;
  const bool causal = segments.causal[segment] > 0;
  if (!causal && !(options.windowed && options.window_right >= 0)) return kv_len;
  if (!causal) ahead = std::max(ahead + options.window_right, options.num_sinks);
  return std::max(std::min(ahead, kv_len), int64_t(0));
}

// The first key that the window lets rows from `first_token` see, sink tokens aside.
inline int64_t window_start(const Segments& segments, const Options& options, int64_t segment, int64_t first_token) {
  if (!options.windowed || options.window_left < 0) return 0;
  const int64_t kv_len = segments.kv_len[segment], tree_len = options.trees ? segments.tree_len[segment] : 0;
  const int64_t position = tree_len > 0 ? kv_len - tree_len : kv_len - segments.q_len[segment] + first_token;
  return std::max(position - options.window_left, int64_t(0));
}

// Keys start : end without hole_start : hole_end, in steps from `start` and again from `hole_end`.
struct Keys {
  int64_t start, hole_start, hole_end, end;

  int64_t steps(int64_t step) const { return ceil_div(hole_start - start, step) + ceil_div(end - hole_end, step); }
};

// Of keys first : end, the steps that hold sink tokens or reach past `window_start`.
inline Keys key_steps(int64_t first, int64_t end, int64_t window_start, int64_t num_sinks, int64_t step,
                      int64_t page_size) {
  const int64_t sinks_end = std::min(std::max(num_sinks, first), end);
  if (window_start >= end) end = sinks_end;
  const int64_t reach = std::min(std::max(window_start, first), end);
  const int64_t hole_end = std::max(first + (reach - first) / step * step, reach / page_size * page_size);
  const int64_t hole_start =
      std::min(first + ceil_div(sinks_end - first, step) * step, ceil_div(sinks_end, page_size) * page_size);
  const bool sinkless = sinks_end == first, whole = sinkless || hole_end <= hole_start;
  return {sinkless ? hole_end : first, whole ? end : hole_start, whole ? end : hole_end, end};
}

}  // namespace sennit
