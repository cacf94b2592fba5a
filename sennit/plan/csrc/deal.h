// The twin of plan/deal.py: bands that are dealt to workers whole.
#pragma once

#include <queue>
#include <utility>
#include <vector>

#include "line.h"

namespace sennit {

constexpr int64_t kMostBands = 128;

inline void deal_strand(Line& line, Units& cut, int strand, int64_t count, double enough) {
  int64_t num_bands = 0;
  for (int i = line.strand_blocks[strand]; i < line.strand_blocks[strand + 1]; ++i)
    num_bands += line.blocks[size_t(i)].bands;
  if (num_bands > kMostBands * count) return;
  std::vector<Block> bands;
  for (int i = line.strand_blocks[strand]; i < line.strand_blocks[strand + 1]; ++i) {
    Block band = line.blocks[size_t(i)];
    const int64_t number = std::exchange(band.bands, 1);
    for (int64_t j = 0; j < number; ++j, band.head += band.heads) bands.push_back(band);
  }
  std::vector<size_t> order(bands.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bands[a].band_time > bands[b].band_time; });
  using Free = std::pair<double, int64_t>;  // when, and which worker
  std::priority_queue<Free, std::vector<Free>, std::greater<Free>> free;
  for (int64_t worker = 0; worker < count; ++worker) free.emplace(0.0, worker);
  std::vector<std::vector<size_t>> hands(static_cast<size_t>(count));
  double fullest = 0;
  for (size_t at : order) {
    auto [load, worker] = free.top();
    free.pop();
    load += bands[at].band_time;
    free.emplace(load, worker);
    fullest = std::max(fullest, load);
    hands[size_t(worker)].push_back(at);
  }
  if (fullest > enough) return;
  std::vector<Block> dealt;
  dealt.reserve(bands.size());
  int64_t unit = cut[0];
  for (int64_t worker = 0; worker + 1 < count; ++worker) {
    for (size_t at : hands[size_t(worker)]) dealt.push_back(bands[at]), unit += bands[at].units;
    cut[size_t(worker + 1)] = unit;
  }
  for (size_t at : hands.back()) dealt.push_back(bands[at]);
  line.replace(strand, dealt);
}

// Put the bands of strands that are dealt into the order of dealing, where that delays the step little or not.
inline void deal(Line& line, std::vector<Units>& cuts) {
  const Config& config = line.config;
  if (line.chunked || !line.size()) return;
  double totals[2] = {}, most = 0;
  int64_t workers[2];
  line.share(totals, workers);
  for (int s = 0; s < config.num_strands; ++s) most = std::max(most, totals[s] / double(workers[s]));
  for (int s = 0; s < config.num_strands; ++s) {
    if (config.strands[s].dealt == 0) continue;
    Units& cut = cuts[size_t(s)];
    const double enough = config.strands[s].dealt * line.fullest(cut);
    deal_strand(line, cut, s, workers[s], config.combine == kMax ? std::max(enough, most) : enough);
  }
}

}  // namespace sennit
