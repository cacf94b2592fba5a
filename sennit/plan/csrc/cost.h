// The twin of plan/cost.py: the time that segments take on strands, and which strand each is put on.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "inputs.h"

namespace sennit {

constexpr double kWorthDividing = 0.9;

struct Placement {
  std::vector<int> strand;  // of each segment
  double makespan;
};

using Times = std::vector<double>;

inline double sum(const Times& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// Of the values of segments on one strand.
inline double sum_of(const Times& values, const std::vector<int>& strand, int wanted) {
  double total = 0;
  for (size_t i = 0; i < values.size(); ++i) total += strand[i] == wanted ? values[i] : 0.0;
  return total;
}

// Times of every segment on each strand: on a worker, and on the memory bus and the cores that strands share.
struct SegmentTimes {
  Times worker[2], bus[2], cores[2];
};

inline SegmentTimes segment_times(const Segments& segments, const Config& config, const Options& options) {
  SegmentTimes times;
  const int64_t count = segments.count;
  Times tiles[2];
  double most = 0;
  for (int s = 0; s < config.num_strands; ++s) {
    tiles[s].resize(count);
    for (int64_t i = 0; i < count; ++i) {
      tiles[s][i] = std::ceil(double(segments.q_len[i] * options.group_size) / double(config.strands[s].tile_rows));
      most = std::max(most, tiles[s][i]);
    }
  }
  double rate = INFINITY;  // of the strand that uses the cores best
  for (int s = 0; s < config.num_strands; ++s)
    rate = std::min(rate, config.strands[s].compute_time / double(config.strands[s].products()));
  for (int s = 0; s < config.num_strands; ++s) {
    const Strand& strand = config.strands[s];
    const double core_time = double(strand.products()) * rate;
    for (Times* of : {&times.worker[s], &times.bus[s], &times.cores[s]}) of->resize(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t q_len = segments.q_len[i], kv_len = segments.kv_len[i];
      const bool causal = segments.causal[i] > 0;
      const double of_segment = tiles[s][i], rows = double(q_len * options.group_size);
      double keys = double(kv_len);
      if (most > 1) keys -= double(segments.causal[i] * q_len) * (0.5 - 0.5 / std::max(of_segment, 1.0));
      if (options.windowed) {
        const bool all = options.window_left < 0 || options.inexact;
        const int64_t behind = all ? kv_len : options.window_left + options.num_sinks;
        const int64_t ahead = causal ? 0 : options.window_right < 0 ? kv_len : options.window_right;
        keys = std::min(keys, double(behind + ahead) + double(q_len) / std::max(of_segment, 1.0));
      }
      const double steps = std::ceil(keys / double(strand.key_step));
      // All tiles are full but for the last.
      const double tile_rows = double(strand.tile_rows), full = strand.step_time(tile_rows);
      const double last = strand.step_time(rows - (of_segment - 1) * tile_rows);
      const double of_steps = steps * ((of_segment - 1) * full + last), heads = double(options.num_heads);
      times.worker[s][i] = heads * (of_segment * strand.item_time + of_steps);
      const double reads = strand.dealt > 0 ? std::min(of_segment, 1.0) : of_segment;
      times.bus[s][i] = heads * (reads * (steps * strand.memory_time));
      times.cores[s][i] = heads * (of_segment * (strand.item_time + steps * core_time));
    }
  }
  return times;
}

// Each strand's part of the device, such that both end together: of the two ways to round, the better one.
inline void parts(const Config& config, const double (&alone)[2], double (&part)[2]) {
  if (config.num_strands == 1 || alone[0] == 0 || alone[1] == 0) {
    part[0] = part[1] = 1;
    return;
  }
  const int64_t places = std::min(config.strands[0].workers, config.strands[1].workers);
  const double hasty[2] = {alone[0] / config.strands[0].haste, alone[1] / config.strands[1].haste};
  part[0] = part[1] = 1;
  if (places == 1) return;
  const int64_t share = int64_t(double(places) * (hasty[0] / (hasty[0] + hasty[1])));
  const int64_t few = std::min(std::max(share, int64_t(1)), places - 1);
  double least = INFINITY;
  for (int64_t first : {few, std::min(few + 1, places - 1)}) {
    const double of_first = double(first) / double(places), of_second = double(places - first) / double(places);
    const double fullest = std::max(hasty[0] / of_first, hasty[1] / of_second);
    if (fullest < least) least = fullest, part[0] = of_first, part[1] = of_second;
  }
}

// Workers of each strand, given the time of its work on one of them.
inline void share_workers(const Config& config, const double (&totals)[2], int64_t (&workers)[2]) {
  double alone[2] = {}, part[2];
  for (int s = 0; s < config.num_strands; ++s) alone[s] = totals[s] / double(config.strands[s].workers);
  parts(config, alone, part);
  for (int s = 0; s < config.num_strands; ++s) {
    const int64_t own = config.strands[s].workers;
    workers[s] = config.combine == kApart ? int64_t(std::nearbyint(double(own) * part[s])) : own;
  }
}

// What segments take of something that strands share, each on the strand that it is put on.
inline double sum_placed(const Times (&times)[2], const std::vector<int>& strand) {
  double total = 0;
  for (size_t i = 0; i < strand.size(); ++i) total += times[strand[i]][i];
  return total;
}

inline Placement place_apart(const Config& config, SegmentTimes& times) {
  Times(&worker)[2] = times.worker;
  const size_t count = worker[0].size();
  for (int s = 0; s < 2; ++s) {
    for (double& time : worker[s]) time /= double(config.strands[s].workers);
    for (double& time : times.bus[s]) time /= double(config.strands[s].workers);
  }
  Placement placed{std::vector<int>(count), 0};
  for (size_t i = 0; i < count; ++i) placed.strand[i] = worker[1][i] < worker[0][i];
  const double alone[2] = {sum_of(worker[0], placed.strand, 0), sum_of(worker[1], placed.strand, 1)};
  if (config.combine == kTurns) {
    placed.makespan = alone[0] + alone[1];
    return placed;
  }
  double part[2];
  parts(config, alone, part);
  const bool both = alone[0] != 0 && alone[1] != 0;
  const double fullest = std::max(alone[0] / part[0] / (both ? config.strands[0].haste : 1.0),
                                  alone[1] / part[1] / (both ? config.strands[1].haste : 1.0));
  placed.makespan = std::max(fullest, sum_placed(times.bus, placed.strand));
  return placed;
}

// Segments in the order of how much they prefer the first strand, divided where the fullest side is least.
inline Placement divide(const SegmentTimes& times) {
  const Times(&worker)[2] = times.worker;
  const size_t count = worker[0].size();
  Times preference(count);
  for (size_t i = 0; i < count; ++i) preference[i] = worker[0][i] / std::max(worker[1][i], 1e-9);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return preference[a] < preference[b]; });
  const auto sums = [&](const Times& times) {
    Times sorted(count);
    for (size_t i = 0; i < count; ++i) sorted[i] = times[order[i]];
    return prefix_sums(sorted);
  };
  const Times before = sums(worker[0]), second = sums(worker[1]);
  const Times bus_before = sums(times.bus[0]), bus_second = sums(times.bus[1]);
  const Times cores_before = sums(times.cores[0]), cores_second = sums(times.cores[1]);
  size_t best = 0;
  double least = INFINITY;
  for (size_t i = 0; i <= count; ++i) {
    const double sides = std::max(before[i], second[count] - second[i]);
    const double on_bus = bus_before[i] + (bus_second[count] - bus_second[i]);
    const double on_cores = cores_before[i] + (cores_second[count] - cores_second[i]);
    const double fullest = std::max(sides, std::max(on_bus, on_cores));
    if (fullest < least) least = fullest, best = i;
  }
  Placement placed{std::vector<int>(count, 1), least};
  for (size_t i = 0; i < best; ++i) placed.strand[order[i]] = 0;
  return placed;
}

// The least that segments take of something that strands share.
inline double least_shared(const Times (&times)[2]) {
  double total = 0;
  for (size_t i = 0; i < times[0].size(); ++i) total += std::min(times[0][i], times[1][i]);
  return total;
}

inline Placement place(const Segments& segments, const Config& config, const Options& options) {
  SegmentTimes times = segment_times(segments, config, options);
  const Times(&worker)[2] = times.worker;
  const double num_workers = double(config.num_workers);
  const size_t count = size_t(segments.count);
  if (config.num_strands == 1) return {std::vector<int>(count, 0), sum(worker[0]) / num_workers};
  if (config.combine == kTurns || config.combine == kApart) return place_apart(config, times);
  std::vector<int> strand(count);
  for (size_t i = 0; i < count; ++i) strand[i] = worker[1][i] < worker[0][i];
  const size_t on_second = size_t(std::count(strand.begin(), strand.end(), 1));
  double load, least;  // load: of the second strand
  if (on_second == 0 || on_second == count) {
    load = on_second ? sum(worker[1]) : 0.0, least = sum(worker[on_second > 0]);
  } else {
    load = sum_of(worker[1], strand, 1);
    least = load + (sum(worker[0]) - sum_of(worker[0], strand, 1));
  }
  if (config.combine == kSum) return {strand, least / num_workers};
  const double on_shared = std::max(sum_placed(times.bus, strand), sum_placed(times.cores, strand));
  double makespan = std::max(std::max(load, least - load), on_shared);
  const double no_less = std::max(least / 2, std::max(least_shared(times.bus), least_shared(times.cores)));
  if (!options.alone && no_less < kWorthDividing * makespan) {
    Placement divided = divide(times);
    if (divided.makespan < kWorthDividing * makespan) strand = divided.strand, makespan = divided.makespan;
  }
  return {strand, makespan / num_workers};
}

}  // namespace sennit
