// The twin of plan/line.py: tiles laid end to end in one line of time, and where to cut it.
#pragma once

#include <cmath>
#include <vector>

#include "cost.h"
#include "visible.h"

namespace sennit {

constexpr int64_t kCoarseUnits = 48;
constexpr int kMaxPasses = 6;

using Units = std::vector<int64_t>;

struct Block {
  int strand;
  int64_t segment, row_start, num_rows;
  Keys keys;
  int64_t units, chunk, chunks, steps;  // of a band; of fixed chunks: this one's index, their count, its key steps
  int64_t head, heads, bands;           // the first; of a band; of the block
  double base_time, unit_time, band_time, split_time;
};

// Quotient, rounded down, and rest, as NumPy divides doubles.
inline void floor_divide(double a, double b, double* quotient, double* rest) {
  double mod = std::fmod(a, b), whole = (a - mod) / b;
  if (mod != 0) {
    if ((b < 0) != (mod < 0)) mod += b, whole -= 1;
  } else {
    mod = std::copysign(0.0, b);
  }
  double floor = whole != 0 ? std::floor(whole) : std::copysign(0.0, a / b);
  if (whole != 0 && whole - floor > 0.5) floor += 1;
  *quotient = floor, *rest = mod;
}

class Line {
 public:
  const Config& config;
  const int64_t num_heads;
  const bool chunked;
  std::vector<Block> blocks;
  Units unit_start;  // of each block, and the end
  Times time_start;
  int strand_blocks[3];

  Line(const Segments& segments, const std::vector<int>& strand, const Config& config, const Options& options)
      : config(config), num_heads(options.num_heads), chunked(options.split_size > 0) {
    for (int s = 0; s < config.num_strands; ++s) {
      strand_blocks[s] = int(blocks.size());
      for (int64_t i = 0; i < segments.count; ++i)
        if (strand[i] == s) add_tiles(segments, options, i, s);
    }
    strand_blocks[config.num_strands] = int(blocks.size());
    measure();
  }

  // Single bands in place of the blocks of a strand.
  void replace(int strand, const std::vector<Block>& bands) {
    const auto first = blocks.begin() + strand_blocks[strand], last = blocks.begin() + strand_blocks[strand + 1];
    const int more = int(bands.size()) - int(last - first);
    blocks.insert(blocks.erase(first, last), bands.begin(), bands.end());
    for (int s = strand + 1; s <= config.num_strands; ++s) strand_blocks[s] += more;
    measure();
  }

  size_t size() const { return blocks.size(); }

  // The block that holds a unit; the end of the line belongs to the last.
  size_t block_at(int64_t unit) const {
    const auto first = unit_start.begin() + 1, last = unit_start.end() - 1;
    return size_t(std::upper_bound(first, last, unit) - first);
  }

  // The unit boundary nearest to a time.
  int64_t unit_at(double time) const {
    const auto first = time_start.begin() + 1, last = time_start.end() - 1;
    const size_t at = size_t(std::upper_bound(first, last, time) - first);
    const Block& block = blocks[at];
    double band, rest;
    floor_divide(time - time_start[at], block.band_time, &band, &rest);
    const double units = double(block.units);
    double within = std::nearbyint((rest - (chunked ? 0.0 : block.base_time)) / block.unit_time);
    within = std::min(std::max(within, 0.0), units);
    return unit_start[at] + int64_t(band * units + within);
  }

  // A boundary between units: its block, the band that it divides (-1: none), its time, and that of beginning there.
  struct Place {
    size_t block;
    int64_t band;
    double time, extra;
  };

  Place locate(int64_t unit) const { return locate(unit, block_at(unit)); }

  Place locate(int64_t unit, size_t at) const {
    const Block& block = blocks[at];
    const int64_t band = (unit - unit_start[at]) / block.units, within = (unit - unit_start[at]) % block.units;
    const double time = time_start[at] + double(band) * block.band_time;
    if (within == 0) return {at, -1, time, 0.0};
    return {at, band, time + (block.base_time + double(within) * block.unit_time), block.base_time + block.split_time};
  }

  double time_between(int64_t start, int64_t end) const {
    if (start >= end) return 0;
    const Place from = locate(start), to = locate(end);
    const bool same = to.band >= 0 && from.band == to.band && from.block == to.block;
    return to.time - from.time + from.extra + (to.band >= 0 && !same ? blocks[to.block].split_time : 0.0);
  }

  // Time of the fullest of the workers that cuts divide units among.
  double fullest(const Units& cuts) const {
    double most = 0;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) most = std::max(most, time_between(cuts[i], cuts[i + 1]));
    return most;
  }

  // Time of every strand's work on one worker, and the workers that it is cut for.
  void share(double (&totals)[2], int64_t (&workers)[2]) const {
    for (int s = 0; s < config.num_strands; ++s)
      totals[s] = time_start[size_t(strand_blocks[s + 1])] - time_start[size_t(strand_blocks[s])];
    share_workers(config, totals, workers);
  }

 private:
  void measure() {
    unit_start.assign(1, 0), time_start.assign(1, 0);
    for (const Block& block : blocks) {
      unit_start.push_back(unit_start.back() + block.units * block.bands);
      time_start.push_back(time_start.back() + block.band_time * double(block.bands));
    }
  }

  void add_tiles(const Segments& segments, const Options& options, int64_t segment, int strand) {
    const Strand& of = config.strands[strand];
    const int64_t rows = segments.q_len[segment] * options.group_size, most = of.tile_rows;
    for (int64_t row = 0; row < rows; row += most) {
      Block block{};
      block.strand = strand, block.segment = segment, block.row_start = row;
      block.num_rows = std::min(rows - row, most);
      block.heads = of.heads, block.bands = num_heads / of.heads, block.split_time = of.split_time * double(of.heads);
      const int64_t end = last_key(segments, options, segment, (row + block.num_rows - 1) / options.group_size);
      // Where lengths are upper bounds nobody knows where windows begin, and kernels look for themselves.
      const int64_t start = options.inexact ? 0 : window_start(segments, options, segment, row / options.group_size);
      if (chunked)
        add_chunks(options, block, start, end);
      else
        add_whole(options, block, start, end);
    }
  }

  void add_whole(const Options& options, Block block, int64_t start, int64_t end) {
    const Strand& strand = config.strands[block.strand];
    block.keys = options.windowed ? key_steps(0, end, start, options.num_sinks, strand.key_step, options.page_size)
                                  : Keys{0, end, end, end};
    // A tile that sees no key still takes a step: it writes zeros.
    block.units = std::max(block.keys.steps(strand.key_step), int64_t(1));
    block.base_time = strand.item_time * double(block.heads);
    block.unit_time = strand.step_time(double(block.num_rows)) * double(block.heads);
    add(block);
  }

  // A tile cut at multiples of the split size: the chunks with sink tokens, then those that the window reaches.
  void add_chunks(const Options& options, Block block, int64_t start, int64_t end) {
    const Strand& strand = config.strands[block.strand];
    const int64_t size = options.split_size, num_sinks = options.windowed ? options.num_sinks : 0;
    const int64_t reached = start / size, sunk = std::min(ceil_div(std::min(num_sinks, end), size), reached);
    block.units = 1, block.chunks = std::max(ceil_div(end, size) - reached + sunk, int64_t(1));
    for (block.chunk = 0; block.chunk < block.chunks; ++block.chunk) {
      const int64_t first = (block.chunk + (block.chunk < sunk ? 0 : reached - sunk)) * size;
      const int64_t last = std::min(end, first + size);
      block.keys = key_steps(std::min(first, last), last, start, num_sinks, strand.key_step, options.page_size);
      block.steps = std::max(block.keys.steps(strand.key_step), int64_t(1));
      block.base_time = strand.item_time * double(block.heads) + block.split_time * double(block.chunks > 1);
      block.unit_time = strand.step_time(double(block.num_rows)) * double(block.heads) * double(block.steps);
      add(block);
    }
  }

  void add(Block& block) {
    block.band_time = block.base_time + double(block.units) * block.unit_time;
    blocks.push_back(block);
  }
};

// A short stretch of a line written out unit by unit, so that trying a cut costs a few look-ups.
class UnitTable {
 public:
  UnitTable(const Line& line, int64_t first, int64_t last) : first_(first), units_(size_t(last - first + 1)) {
    size_t block = line.block_at(first);
    for (int64_t unit = first; unit <= last; ++unit) {
      while (block + 1 < line.size() && line.unit_start[block + 1] <= unit) ++block;
      const Line::Place place = line.locate(unit, block);
      const int64_t units = line.blocks[block].units, begin = unit - (unit - line.unit_start[block]) % units - first;
      units_[size_t(unit - first)] = {place.time, place.extra, place.band >= 0 ? line.blocks[block].split_time : 0.0,
                                      begin, place.band >= 0 ? begin + units : unit - first};
    }
  }

  // From the given cuts, and from those at whole bands, move cuts while that helps; the better result.
  Units polish(const Units& cuts) const {
    Units here(cuts.size()), nearer(cuts.size());
    for (size_t i = 0; i < cuts.size(); ++i) {
      here[i] = cuts[i] - first_;
      const int64_t low = at(here[i]).begin, high = at(here[i]).end;
      nearer[i] = here[i] - low <= high - here[i] ? low : high;
    }
    improve(here), improve(nearer);
    Units& best = fullest(nearer) < fullest(here) ? nearer : here;
    for (int64_t& cut : best) cut += first_;
    return best;
  }

 private:
  struct Unit {
    double time, extra, split;
    int64_t begin, end;  // of the band
  };
  const int64_t first_;
  std::vector<Unit> units_;

  const Unit& at(int64_t unit) const { return units_[size_t(unit)]; }

  double time(int64_t start, int64_t end) const {
    if (start >= end) return 0;
    const Unit &from = at(start), &to = at(end);
    const double split = to.begin == from.begin && start > to.begin ? 0.0 : to.split;
    return to.time - from.time + from.extra + split;
  }

  double fullest(const Units& cuts) const {
    double most = time(cuts[0], cuts[1]);
    for (size_t i = 1; i + 1 < cuts.size(); ++i) most = std::max(most, time(cuts[i], cuts[i + 1]));
    return most;
  }

  // Move every second cut, then the others, to whichever near place makes its fuller neighbour least full.
  void improve(Units& cuts) const {
    const int64_t last = cuts.back();
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      bool moved = false;
      for (size_t parity = 1; parity <= 2; ++parity) {
        for (size_t i = parity; i + 1 < cuts.size(); i += 2) {
          const int64_t here = cuts[i], left = cuts[i - 1], right = cuts[i + 1];
          const int64_t low = at(here).begin, high = at(here).end;
          const int64_t lower = at(std::max(low - 1, int64_t(0))).begin, higher = at(std::min(high + 1, last)).end;
          int64_t best = here;
          double least = INFINITY;
          for (int64_t move : {here, here - 1, here + 1, low, high, lower, higher}) {
            move = std::min(std::max(move, left), right);
            const double fuller = std::max(time(left, move), time(move, right));
            if (fuller < least) least = fuller, best = move;
          }
          moved |= best != here;
          cuts[i] = best;
        }
      }
      if (!moved) break;
    }
  }
};

// Units at which the line is cut: a row a strand, of num_workers + 1.
inline std::vector<Units> balance(const Line& line) {
  const Config& config = line.config;
  const int strands = config.num_strands;
  const size_t row_size = size_t(config.num_workers + 1);
  if (!line.size()) return std::vector<Units>(size_t(strands), Units(row_size, 0));
  const bool together = config.combine == kSum && strands == 2;
  const int num_rows = together ? 1 : strands;
  double totals[2] = {};
  int64_t workers[2];
  line.share(totals, workers);
  std::vector<Units> cuts;
  double shares[2] = {};
  for (int row = 0; row < num_rows; ++row) {
    const size_t first = size_t(line.strand_blocks[row]), last = size_t(line.strand_blocks[together ? 2 : row + 1]);
    Units& cut = cuts.emplace_back(row_size, line.unit_start[last]);
    cut[0] = line.unit_start[first];
    const double start = line.time_start[first], end = line.time_start[last], count = double(workers[row]);
    shares[row] = (end - start) / count;
    if (first == last) continue;
    // Where one row holds both strands, the second one's times stand for both.
    const Strand& strand = config.strands[together ? 1 : row];
    const double heads = double(strand.heads), split = strand.split_time * heads;
    const double repeated = strand.item_time * heads + 2 * split;
    // Every worker but the first begins, and every one but the last ends, with a part of a band.
    const double each = std::max(end - start - repeated, 0.0) / count, whole = (end - start) / count;
    for (int64_t worker = 1; worker < workers[row]; ++worker) {
      const double share = double(worker);
      const double time =
          line.chunked ? start + share * whole : std::min(share * each + (start + repeated - split), end);
      cut[size_t(worker)] = line.unit_at(time);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    Units& cut = cuts[size_t(row)];
    double enough = 1.01 * shares[row];
    if (config.combine == kMax)  // beside a fuller strand nothing is gained by it
      for (int other = 0; other < num_rows; ++other) enough = std::max(enough, shares[other]);
    const int64_t units = cut.back() - cut[0];
    if (units <= 0 || units >= kCoarseUnits * workers[row]) continue;
    if (!(line.fullest(cut) > enough)) continue;
    const auto end = cut.begin() + workers[row] + 1;
    const Units polished = UnitTable(line, cut[0], cut.back()).polish(Units(cut.begin(), end));
    std::copy(polished.begin(), polished.end(), cut.begin());
  }
  if (together) {
    const int64_t middle = line.unit_start[size_t(line.strand_blocks[1])];
    cuts.push_back(cuts[0]);
    for (int64_t& cut : cuts[0]) cut = std::min(cut, middle);
    for (int64_t& cut : cuts[1]) cut = std::max(cut, middle);
  }
  return cuts;
}

}  // namespace sennit
