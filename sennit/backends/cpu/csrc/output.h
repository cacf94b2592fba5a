// Where results go: rows of the output, or partial results and their merge.
#pragma once

#include <cmath>

#include "logits.h"

namespace sennit {

// One final row of a query head: `values` [dim_vo] times `factor`.
template <class Q, class T>
static void write_row(const Launch<Q, T>& launch, const Segment& segment, int packed_row, int kv_head,
                      const float* values, float factor, float lse) {
  const int token = packed_row / launch.group_size, head = kv_head * launch.group_size + packed_row % launch.group_size;
  if (launch.sinks) {
    const float sink = launch.sinks[head], most = std::max(lse, sink);
    const float with_sink = std::isinf(most) ? most : most + std::log(std::exp(lse - most) + std::exp(sink - most));
    factor *= lse == -kInfinity ? 0.f : std::exp(lse - with_sink);
    lse = with_sink;
  }
  const int64_t row = int64_t(segment.q_start) + token;
  scale_row(values, factor, launch.out.at(row, head), launch.dim_vo);
  if (launch.lse.data) *launch.lse.at(row, head) = lse;
}

// W rows whose weights, relative to 2 ** base, add up to `total`: what their sums are multiplied by, and their LSE.
struct Normalized {
  alignas(kVectorBytes) float factor[W], lse[W];

  Normalized(f32x base, f32x total) {
    const i32x empty = total == 0.f;  // and not where it is NaN
    store(factor, empty ? f32x{} : 1.f / total);
    store(lse, empty ? splat(-kInfinity) : base * 0.6931471805599453f + log(total));
  }
};

// One row of an item: final, or partial.
template <class Q, class T>
static void write_item_row(const Launch<Q, T>& launch, const Segment& segment, const Item& item, int row, int kv_head,
                           const float* values, float factor, float lse) {
  if (item.partial_row < 0) return write_row(launch, segment, item.row_start + row, kv_head, values, factor, lse);
  const int64_t at = int64_t(item.partial_row) + int64_t(kv_head - item.head_start) * item.num_rows + row;
  scale_row(values, factor, launch.partial_out + at * launch.dim_vo, launch.dim_vo);
  launch.partial_lse[at] = lse;
}

// out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))): all rows of one split tile, parts in their order.
template <class Q, class T>
static void run_merge(const Launch<Q, T>& launch, const Merge& merge, float* values) {
  const Segment& segment = launch.plan.segments[merge.segment];
  for (int row = 0; row < merge.num_rows; ++row) {
    const auto part = [&](int i) { return int64_t(merge.first_row) + int64_t(i) * merge.stride + row; };
    float most = -kInfinity, total = 0;
    for (int i = 0; i < merge.num_parts; ++i) most = std::max(most, launch.partial_lse[part(i)]);
    std::fill_n(values, launch.dim_vo, 0.f);
    for (int i = 0; i < merge.num_parts; ++i) {
      const float lse = launch.partial_lse[part(i)];
      if (lse == -kInfinity) continue;  // its values may be anything
      const float weight = std::exp(lse - most);
      total += weight;
      const float* from = launch.partial_out + part(i) * launch.dim_vo;
      for (int d = 0; d < launch.dim_vo; ++d) values[d] += weight * from[d];
    }
    const float factor = total == 0 ? 0 : 1 / total, lse = total == 0 ? -kInfinity : most + std::log(total);
    write_row(launch, segment, merge.row_start + row, merge.head, values, factor, lse);
  }
}

}  // namespace sennit
