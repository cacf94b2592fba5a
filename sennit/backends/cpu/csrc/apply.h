// Applies a printed graph to a block of logits: what depends on the request, on keys or on queries alone is computed
// once.
#pragma once

#include "operations.h"

namespace sennit {

constexpr int kKeySteps = 64;  // keys whose values are kept while all queries go by

// The first `count` of W numbers, then zeros; nothing past them is read.
static SENNIT_INLINE i32x load_some(const int32_t* from, int count) {
  if (count >= W) return load(from);
  i32x values = {};
  std::memcpy(&values, from, count * sizeof(int32_t));
  return values;
}

template <class Graph>
static SENNIT_INLINE auto query_of(const Graph& graph, const GraphBlock& block, int vector) {
  return graph.query(load(block.q_idx + vector * W), load(block.h + vector * W));
}

template <class Graph>
static SENNIT_INLINE void apply_once(const Graph& graph, const typename Graph::Query& query,
                                     const typename Graph::Key& key, float* logits) {
  store(logits, graph.pair(load(logits), query, key));
}

// A key a step: values of keys are computed with keys in lanes.
template <class Graph>
static void apply_by_step(const Graph& graph, const GraphBlock& block) {
  const int64_t stride = block.step_stride;
  for (int first = 0; first < block.steps; first += kKeySteps) {
    const int count = block.steps - first < kKeySteps ? block.steps - first : kKeySteps;
    typename Graph::Key keys[kKeySteps / W];
    for (int step = 0; step < count; step += W)
      keys[step / W] = graph.key(load_some(block.kv_idx + first + step, count - step));
    for (int vector = 0; vector < block.vectors; ++vector) {
      const auto query = query_of(graph, block, vector);
      float* logits = block.logits + first * stride + vector * W;
      for (int step = 0; step < count; ++step)
        apply_once(graph, query, graph.lane(keys[step / W], step % W), logits + step * stride);
    }
  }
}

template <class Graph>
static void apply_by_lane(const Graph& graph, const GraphBlock& block) {
  for (int vector = 0; vector < block.vectors; ++vector) {
    const auto query = query_of(graph, block, vector);
    for (int step = 0; step < block.steps; ++step) {
      const int32_t* kv_idx = block.kv_idx + (int64_t(step) * block.vectors + vector) * W;
      apply_once(graph, query, graph.key(load(kv_idx)), block.logits + step * block.step_stride + vector * W);
    }
  }
}

template <class Graph>
static void apply(const GraphBlock& block) {
  const Graph graph(block);
  block.kv_per_lane ? apply_by_lane(graph, block) : apply_by_step(graph, block);
}

}  // namespace sennit
