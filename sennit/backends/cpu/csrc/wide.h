// The wide strand: tiles of many query rows, bound by arithmetic.
#pragma once

#include "amx.h"
#include "output.h"
#include "products.h"
#include "scratch.h"

namespace sennit {

template <class Q, class T, class Products>
class Wide {
  static constexpr float kGrowth = 8;         // weights up to 2 ** kGrowth lose nothing in floating point
  static constexpr float kLargest = 1 << 26;  // of logits whose rounding moves all weights by less than 2 ** 4
  static constexpr int kLine = 64 / sizeof(T);
  static constexpr int kScoreKeys = Products::kScoreKeys;
  static constexpr int kUnit = Products::kUnit, kKeys = Products::kBlockKeys, kVectors = Products::kVectors;
  static constexpr int kPanelRows = kVectors * W;

  // A panel of rows and its running softmax.
  struct alignas(64) Panel {
    LaneRows<kPanelRows> rows;
    f32x base[kVectors], total[kVectors];  // weights are 2 ** (logit * log2(e) - base), and add up to total
    int count;
    uint32_t* queries;  // [units, kPanelRows]
    float* outputs;     // [columns, kPanelRows]
  };

 public:
  static void run(const Launch<Q, T>& launch, const Item& item, Scratch& scratch) {
    const Segment& segment = launch.plan.segments[item.segment];
    Wide wide(launch, segment, item);
    scratch.arrange([&](Scratch& memory) { wide.place(memory); });
    std::memset(wide.zeros_, 0, wide.zero_count() * sizeof(T));
    wide.products_.begin();
    for (int head = item.head_start; head < item.head_start + item.num_heads; ++head) wide.run_head(head);
    wide.products_.end();
  }

 private:
  const Launch<Q, T>& launch_;
  const Segment& segment_;
  const Item& item_;
  const int exact_len_;
  const KeyTree tree_;
  const bool transforms_;
  const float scale_;  // of products, to logits times log2(e)
  const int num_panels_;
  const int fetches_;  // rows of the next block that are fetched beside each step of weights
  const BlockList blocks_;
  Products products_;
  Panel* panels_;
  uint32_t* queries_;  // [panels, units, kPanelRows]
  float* outputs_;     // [panels, columns, kPanelRows]
  KeyBlock<T, kKeys>* block_;
  KeyBlock<T, kKeys>* next_block_;
  float* scores_;      // [kScoreKeys, kPanelRows]
  uint32_t* weights_;  // [kKeys / kUnit, kPanelRows]
  int32_t* keys_;      // [kKeys]
  int32_t* positions_;
  const T** k_;  // rows of the head, of this block and of the next
  const T** v_;
  const T** next_k_;
  const T** next_v_;
  int next_count_, fetched_;  // keys of the next block, and how many are on their way
  T* zeros_;
  float* row_;

  Wide(const Launch<Q, T>& launch, const Segment& segment, const Item& item)
      : launch_(launch), segment_(segment), item_(item), exact_len_(launch.exact_len(segment)),
        tree_(key_tree(launch, segment, exact_len_)), transforms_(launch.transforms()),
        scale_(transforms_ ? 1.f : float(std::abs(launch.sm_scale) * kLog2E)),
        num_panels_((item.num_rows + kPanelRows - 1) / kPanelRows), fetches_((kUnit + num_panels_ - 1) / num_panels_),
        blocks_(launch, segment, tree_, item, exact_len_, kKeys), products_(launch.dim_qk, launch.dim_vo) {}

  size_t zero_count() const { return std::max(launch_.dim_qk, launch_.dim_vo) + 64; }

  size_t queries_count() const { return size_t(products_.units) * kPanelRows; }
  size_t outputs_count() const { return size_t(products_.columns) * kPanelRows; }

  void place(Scratch& scratch) {
    products_.place(scratch);
    panels_ = scratch.take<Panel>(num_panels_);
    queries_ = scratch.take<uint32_t>(num_panels_ * queries_count());
    outputs_ = scratch.take<float>(num_panels_ * outputs_count());
    block_ = scratch.take<KeyBlock<T, kKeys>>(1);
    next_block_ = scratch.take<KeyBlock<T, kKeys>>(1);
    for (const T*** rows : {&k_, &v_, &next_k_, &next_v_}) *rows = scratch.take<const T*>(kKeys);
    scores_ = scratch.take<float>(kScoreKeys * kPanelRows);
    weights_ = scratch.take<uint32_t>(kKeys / kUnit * kPanelRows);
    keys_ = scratch.take<int32_t>(kKeys);
    positions_ = scratch.take<int32_t>(kKeys);
    zeros_ = scratch.take<T>(zero_count());
    row_ = scratch.take<float>(size_t(products_.columns) * W);
  }

  void run_head(int head) {
    for (int i = 0; i < num_panels_; ++i) begin_panel(i, head);
    take_block(head, 0);
    for (int number = 0; number < blocks_.count; ++number) {
      std::swap(k_, next_k_);
      std::swap(v_, next_v_);
      std::swap(block_, next_block_);
      take_block(head, number + 1);
      products_.take(k_, v_, block_->count);
      for (int i = 0; i < num_panels_; ++i) run_block(panels_[i], block_->first, block_->count);
    }
    for (int i = 0; i < num_panels_; ++i) end_panel(panels_[i], i * kPanelRows, head);
  }

  // Looks up where a block's keys are, as the next to come.
  void take_block(int head, int number) {
    fetched_ = next_count_ = 0;
    if (number >= blocks_.count) return;
    const auto [first, count] = blocks_.at(number);
    find_keys(*next_block_, launch_, segment_, first, count, exact_len_, zeros_);
    for (int i = 0; i < kKeys; ++i) {
      next_k_[i] = next_block_->k[i] + head * next_block_->k_head[i];
      next_v_[i] = next_block_->v[i] + head * next_block_->v_head[i];
    }
    next_count_ = count;
  }

  void begin_panel(int index, int head) {
    Panel& panel = panels_[index];
    const int first_row = index * kPanelRows;
    panel.queries = queries_ + index * queries_count();
    panel.outputs = outputs_ + index * outputs_count();
    panel.count = std::min(kPanelRows, item_.num_rows - first_row);
    describe_rows(panel.rows, launch_, segment_, tree_, exact_len_, item_.row_start + first_row, panel.count,
                  kPanelRows, head);
    const Q* rows[kPanelRows];
    for (int lane = 0; lane < panel.count; ++lane)
      rows[lane] = launch_.q.at(int64_t(segment_.q_start) + panel.rows.token[lane], panel.rows.head[lane]);
    pack_queries<kUnit, kVectors>(panel.queries, rows, panel.count, launch_.dim_qk, products_.units,
                                  !transforms_ && launch_.sm_scale < 0);
    std::memset(panel.outputs, 0, sizeof(float) * products_.columns * kPanelRows);
    for (int j = 0; j < kVectors; ++j) {
      panel.base[j] = splat(-kInfinity);
      panel.total[j] = f32x{};
    }
  }

  static int rounded(int count) {
    return (count + Products::kKeyRound - 1) / Products::kKeyRound * Products::kKeyRound;
  }

  // A block's keys for one panel. Scores and weights are computed for some keys at a time, so that scores stay in the
  // first-level cache, and outputs for as many as possible, since they do not.
  void run_block(Panel& panel, int first, int count) {
    count = reach(panel.rows, segment_, first, count);
    int weighed = 0, added = 0;  // keys that have weights, and of these that are in the outputs
    while (weighed < count) {
      const int keys = std::min(kScoreKeys, count - weighed), round = rounded(keys);
      products_.scores(panel.queries, weighed, round, scores_);
      for (int at = keys * kPanelRows; at < round * kPanelRows; at += W) store(scores_ + at, splat(-kInfinity));
      if (transforms_ || !block_->complete || !sees_all(panel.rows, launch_, segment_, tree_, first + weighed, keys))
        change_logits(panel, weighed, keys);
      f32x most[kVectors];
      if (exceeds_base(panel, round, most)) {
        if (weighed > added) products_.accumulate(weights_, added, weighed - added, panel.outputs);
        added = weighed;
        raise(panel, most);
      }
      if (is_large(panel)) {
        multiply_scores(round);
        soften(panel, weighed, round, 1);
      } else {
        soften(panel, weighed, round, scale_);
      }
      weighed += round;
    }
    if (weighed > added) products_.accumulate(weights_, added, weighed - added, panel.outputs);
  }

  // Of keys from number `begin` of the block on.
  void change_logits(const Panel& panel, int begin, int count) {
    for (int i = 0; i < count; ++i) keys_[i] = block_->k[begin + i] == zeros_ ? INT32_MAX : block_->first + begin + i;
    const LogitChange<kPanelRows, Q, T> change{launch_, segment_, tree_, panel.rows};
    const LogitBlock block{scores_, count, kVectors, false, keys_};
    if (transforms_) change.transform(block, positions_);
    change.mask(block, positions_);
  }

  // The largest scores of some keys, times the scale, and whether one would give a large weight.
  bool exceeds_base(const Panel& panel, int count, f32x* most) const {
    const float* const scores = scores_;
    f32x found[kVectors];
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA { found[j] = load(scores + j * W); });
    for (int key = 1; key < count; ++key)
      unroll<kVectors>([&](auto j)
                           SENNIT_LAMBDA { found[j] = max(found[j], load(scores + (key * kVectors + j) * W)); });
    i32x exceeds = {};
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
      most[j] = multiply_finite(found[j], scale_);
      exceeds |= most[j] > panel.base[j] + kGrowth;
    });
    return any(exceeds);
  }

  // Whether a base is so large that its rounding, which products in one operation with the subtraction do not have,
  // would reach the weights.
  static bool is_large(const Panel& panel) {
    i32x found = {};
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
      const f32x size = max(panel.base[j], -panel.base[j]);
      found |= (size > splat(kLargest)) & (size < splat(kInfinity));
    });
    return any(found);
  }

  void multiply_scores(int count) {
    for (int at = 0; at < count * kPanelRows; at += W) store(scores_ + at, multiply_finite(load(scores_ + at), scale_));
  }

  // Moves the base to the largest score: not for every new maximum, since what has been added up is then multiplied.
  void raise(Panel& panel, const f32x* most) {
    f32x alpha[kVectors];
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
      const f32x now = max(panel.base[j], most[j]);
      alpha[j] = exp2_below<true>(panel.base[j] - (now == -kInfinity ? f32x{} : now));
      panel.base[j] = now;
      panel.total[j] *= alpha[j];
    });
    for (int d = 0; d < products_.columns; ++d)
      unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
        float* at = panel.outputs + (int64_t(d) * kVectors + j) * W;
        store(at, load(at) * alpha[j]);
      });
  }

  // Scores to the weights of keys from number `begin` of the block on; meanwhile what comes next is fetched.
  void soften(Panel& panel, int begin, int count, float scale) {
    const float* const scores = scores_;
    uint32_t* const weights = weights_ + begin / kUnit * kPanelRows;
    f32x base[kVectors], total[kVectors] = {};
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
      base[j] = panel.base[j] == -kInfinity ? f32x{} : panel.base[j];  // -inf - -inf is NaN
    });
    const auto weigh = [&](int key, auto j) SENNIT_LAMBDA {
      return exp2_below<kUnit == 1>(load(scores + (key * kVectors + j) * W) * scale - base[j]);
    };
    for (int key = 0; key < count; key += kUnit) {
      for (int i = 0; i < fetches_; ++i) fetch_ahead();
      unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
        const f32x a = weigh(key, j);
        total[j] += a;
        uint32_t* to = weights + (key / kUnit * kVectors + j) * W;
        if constexpr (kUnit == 2) {
          const f32x b = weigh(key + 1, j);
          total[j] += b;
          store(to, bf16_pairs(a, b));
        } else {
          store(to, a);
        }
      });
    }
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA { panel.total[j] += total[j]; });
  }

  // One row of the keys and values that come next.
  SENNIT_INLINE void fetch_ahead() {
    if (fetched_ >= next_count_) return;
    const T* k = next_k_[fetched_];
    const T* v = next_v_[fetched_++];
    for (int d = 0; d < launch_.dim_qk; d += kLine) prefetch_to_l2(k + d);
    if (launch_.v.data == launch_.k.data) return;  // values are the beginning of keys
    for (int d = 0; d < launch_.dim_vo; d += kLine) prefetch_to_l2(v + d);
  }

  void end_panel(Panel& panel, int first_row, int head) {
    const int columns = products_.columns;
    for (int vector = 0; vector * W < panel.count; ++vector) {
      for (int d = 0; d < columns; d += W) {
        f32x block[W];
        unroll<W>([&](auto i)
                      SENNIT_LAMBDA { block[i] = load(panel.outputs + (int64_t(d + i) * kVectors + vector) * W); });
        transpose(block);
        unroll<W>([&](auto i) SENNIT_LAMBDA { store(row_ + int64_t(i) * columns + d, block[i]); });
      }
      const Normalized rows(panel.base[vector], panel.total[vector]);
      for (int i = 0; i < std::min(W, panel.count - vector * W); ++i) {
        write_item_row(launch_, segment_, item_, first_row + vector * W + i, head, row_ + int64_t(i) * columns,
                       rows.factor[i], rows.lse[i]);
      }
    }
  }
};

}  // namespace sennit
