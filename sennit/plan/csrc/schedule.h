// The twin of plan/schedule.py: work items and merges, read off a line and its cuts.
#pragma once

#include <array>
#include <vector>

#include "deal.h"

namespace sennit {

constexpr size_t kRowWidth = 12;
using Row = std::array<int32_t, kRowWidth>;

struct Item {
  enum {
    kSegment,
    kRowStart,
    kNumRows,
    kHeadStart,
    kNumHeads,
    kKeyStart,
    kKeyEnd,
    kPartialRow,
    kHoleStart,
    kHoleEnd,
    kMerge
  };
};

struct Merge {
  enum { kSegment, kRowStart, kNumRows, kHead, kFirstRow, kNumParts, kStride, kStrand };
};

struct Schedule {
  std::vector<Row> items, merges;
  std::vector<int32_t> worker_indptr;  // a row a strand
  int64_t num_partial_rows = 0;
};

// The keys of `count` units from `unit` of a band.
inline void set_keys(Row& item, const Keys& keys, int64_t step, int64_t unit, int64_t count) {
  const int64_t before = ceil_div(keys.hole_start - keys.start, step), last = unit + count - 1;
  const int64_t start = unit < before ? keys.start + unit * step : keys.hole_end + (unit - before) * step;
  const int64_t end = last < before ? std::min(keys.start + (last + 1) * step, keys.hole_start)
                                    : std::min(keys.hole_end + (last - before + 1) * step, keys.end);
  const bool crossed = unit < before && last >= before;
  item[Item::kKeyStart] = int32_t(start), item[Item::kKeyEnd] = int32_t(end);
  item[Item::kHoleStart] = int32_t(crossed ? keys.hole_start : end);
  item[Item::kHoleEnd] = int32_t(crossed ? keys.hole_end : end);
}

// Bounds of items: blocks, cuts, and the ends of the bands that cuts divide.
inline Units item_bounds(const Line& line, const std::vector<Units>& cuts) {
  Units inner;
  for (const Units& row : cuts) {
    if (row.front() >= row.back()) continue;
    for (size_t i = 1; i + 1 < row.size(); ++i) {
      const size_t at = line.block_at(row[i]);
      const int64_t units = line.blocks[at].units, within = (row[i] - line.unit_start[at]) % units;
      inner.push_back(row[i]);
      if (within) inner.push_back(row[i] - within), inner.push_back(row[i] - within + units);
    }
  }
  std::sort(inner.begin(), inner.end());
  Units bounds(inner.size() + line.unit_start.size());
  std::merge(inner.begin(), inner.end(), line.unit_start.begin(), line.unit_start.end(), bounds.begin());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  return bounds;
}

// The parts of a band follow each other in the line: the merges of its heads begin where it does.
inline void add_part(Schedule& schedule, Row& item, const Block& block, int64_t unit) {
  const int64_t rows = block.num_rows * block.heads;
  for (int64_t head = 0; unit == 0 && head < block.heads; ++head) {
    schedule.merges.push_back(
        {item[Item::kSegment], item[Item::kRowStart], item[Item::kNumRows], item[Item::kHeadStart] + int32_t(head),
         int32_t(schedule.num_partial_rows + head * block.num_rows), 0, int32_t(rows), block.strand});
  }
  const size_t first = schedule.merges.size() - size_t(block.heads);
  item[Item::kMerge] = int32_t(first);
  item[Item::kPartialRow] = int32_t(schedule.num_partial_rows);
  schedule.num_partial_rows += rows;
  for (size_t i = first; i < schedule.merges.size(); ++i) ++schedule.merges[i][Merge::kNumParts];
}

// Chunk c, head h of a tile begin at its partial row (c * heads + h) * num_rows.
inline void add_chunk_merges(Schedule& schedule, const Line& line, Units& first_rows, Units& first_merges) {
  first_rows.reserve(line.size()), first_merges.reserve(line.size());
  for (const Block& block : line.blocks) {
    const int64_t rows = block.chunks > 1 ? block.num_rows * line.num_heads : 0;
    first_rows.push_back(schedule.num_partial_rows);
    if (rows && block.chunk == 0) {
      for (int64_t head = 0; head < line.num_heads; ++head)
        schedule.merges.push_back({int32_t(block.segment), int32_t(block.row_start), int32_t(block.num_rows),
                                   int32_t(head), int32_t(schedule.num_partial_rows + head * block.num_rows),
                                   int32_t(block.chunks), int32_t(rows), block.strand});
    }
    first_merges.push_back(int64_t(schedule.merges.size()) - line.num_heads);
    schedule.num_partial_rows += rows;
  }
}

inline Schedule make_schedule(const Segments& segments, const std::vector<int>& strand, const Config& config,
                              const Options& options) {
  Line line(segments, strand, config, options);
  std::vector<Units> cuts = balance(line);
  deal(line, cuts);
  Schedule schedule;
  Units bounds(1, 0), first_rows, first_merges;
  if (line.size()) bounds = item_bounds(line, cuts);
  if (line.chunked) add_chunk_merges(schedule, line, first_rows, first_merges);
  schedule.items.reserve(bounds.size());
  size_t at = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const int64_t start = bounds[i], length = bounds[i + 1] - start;
    while (line.unit_start[at + 1] <= start) ++at;
    const Block& block = line.blocks[at];
    const int64_t head = block.head + (start - line.unit_start[at]) / block.units * block.heads,
                  unit = (start - line.unit_start[at]) % block.units;
    Row item{};
    item[Item::kSegment] = int32_t(block.segment), item[Item::kRowStart] = int32_t(block.row_start);
    item[Item::kNumRows] = int32_t(block.num_rows), item[Item::kHeadStart] = int32_t(head);
    item[Item::kNumHeads] = int32_t(std::max(length / block.units, int64_t(1)) * block.heads);
    item[Item::kPartialRow] = -1;
    if (line.chunked) {
      item[Item::kKeyStart] = int32_t(block.keys.start), item[Item::kKeyEnd] = int32_t(block.keys.end);
      item[Item::kHoleStart] = int32_t(block.keys.hole_start), item[Item::kHoleEnd] = int32_t(block.keys.hole_end);
      if (block.chunks > 1) {
        item[Item::kPartialRow] = int32_t(first_rows[at] + head * block.num_rows);
        item[Item::kMerge] = int32_t(first_merges[at] + head);
      }
    } else {
      set_keys(item, block.keys, config.strands[block.strand].key_step, unit, std::min(length, block.units));
      if (length < block.units) add_part(schedule, item, block, unit);
    }
    schedule.items.push_back(item);
  }
  for (const Units& row : cuts)
    for (int64_t cut : row)
      schedule.worker_indptr.push_back(
          int32_t(std::lower_bound(bounds.begin(), bounds.end() - 1, cut) - bounds.begin()));
  return schedule;
}

}  // namespace sennit
