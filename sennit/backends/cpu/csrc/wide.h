// The wide strand: tiles of many query rows, bound by arithmetic.
#pragma once

#include "amx.h"
#include "output.h"
#include "products.h"
#include "scratch.h"

namespace sennit {

template <class Q, class T, class Products>
class Wide {
  static constexpr int kUnit = Products::kUnit, kKeys = Products::kBlockKeys, kVectors = kPanelVectors;

  // A panel of rows and its running softmax.
  struct alignas(64) Panel {
    LaneRows<kPanelRows> rows;
    f32x most[kVectors], total[kVectors];  // largest logit times log2(e), and the weights' sum relative to it
    int count;
    uint32_t* queries;  // [units, kPanelRows]
    float* outputs;     // [columns, kPanelRows]
  };

 public:
  static void run(const Launch<Q, T>& launch, const Item& item, Scratch& scratch) {
    const Segment& segment = launch.plan.segments[item.segment];
    Wide wide(launch, segment, item);
    wide.place(scratch);
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
  Products products_;
  Panel* panels_;
  KeyBlock<T, kKeys>* block_;
  float* scores_;      // [kKeys, kPanelRows]
  uint32_t* weights_;  // [kKeys / kUnit, kPanelRows]
  int32_t* keys_;      // [kKeys]
  int32_t* positions_;
  const T** k_;
  const T** v_;
  T* zeros_;
  float* row_;

  Wide(const Launch<Q, T>& launch, const Segment& segment, const Item& item)
      : launch_(launch), segment_(segment), item_(item), exact_len_(launch.exact_len(segment)),
        tree_(key_tree(launch, segment, exact_len_)), transforms_(launch.transforms()),
        scale_(transforms_ ? 1.f : float(std::abs(launch.sm_scale) * kLog2E)),
        num_panels_((item.num_rows + kPanelRows - 1) / kPanelRows), products_(launch.dim_qk, launch.dim_vo) {}

  size_t zero_count() const { return std::max(launch_.dim_qk, launch_.dim_vo) + 64; }

  void place(Scratch& scratch) {
    const size_t queries = size_t(products_.units) * kPanelRows, outputs = size_t(products_.columns) * kPanelRows;
    scratch.reserve(products_.bytes() + Scratch::bytes_of<Panel>(num_panels_) +
                    num_panels_ * (Scratch::bytes_of<uint32_t>(queries) + Scratch::bytes_of<float>(outputs)) +
                    Scratch::bytes_of<KeyBlock<T, kKeys>>(1) + 2 * Scratch::bytes_of<float>(kKeys * kPanelRows) +
                    2 * Scratch::bytes_of<int32_t>(kKeys) + 2 * Scratch::bytes_of<T*>(kKeys) +
                    Scratch::bytes_of<T>(zero_count()) + Scratch::bytes_of<float>(size_t(products_.columns) * W));
    products_.place(scratch);
    panels_ = scratch.take<Panel>(num_panels_);
    for (int i = 0; i < num_panels_; ++i) {
      panels_[i].queries = scratch.take<uint32_t>(queries);
      panels_[i].outputs = scratch.take<float>(outputs);
    }
    block_ = scratch.take<KeyBlock<T, kKeys>>(1);
    scores_ = scratch.take<float>(kKeys * kPanelRows);
    weights_ = scratch.take<uint32_t>(kKeys * kPanelRows);
    keys_ = scratch.take<int32_t>(kKeys);
    positions_ = scratch.take<int32_t>(kKeys);
    k_ = scratch.take<const T*>(kKeys);
    v_ = scratch.take<const T*>(kKeys);
    zeros_ = scratch.take<T>(zero_count());
    row_ = scratch.take<float>(size_t(products_.columns) * W);
    std::memset(zeros_, 0, zero_count() * sizeof(T));
  }

  void run_head(int head) {
    for (int i = 0; i < num_panels_; ++i) begin_panel(panels_[i], i * kPanelRows, head);
    for_key_blocks(item_, exact_len_, kKeys, [&](int first, int count) {
      find_keys(*block_, launch_, segment_, first, count, exact_len_, zeros_);
      for (int i = 0; i < kKeys; ++i) {
        k_[i] = block_->k[i] + head * block_->k_head[i];
        v_[i] = block_->v[i] + head * block_->v_head[i];
      }
      products_.take(k_, v_, count);
      for (int i = 0; i < num_panels_; ++i) run_block(panels_[i], first, count);
    });
    for (int i = 0; i < num_panels_; ++i) end_panel(panels_[i], i * kPanelRows, head);
  }

  void begin_panel(Panel& panel, int first_row, int head) {
    panel.count = std::min(kPanelRows, item_.num_rows - first_row);
    describe_rows(panel.rows, launch_, segment_, tree_, exact_len_, item_.row_start + first_row, panel.count, kPanelRows,
                  head);
    const Q* rows[kPanelRows];
    for (int lane = 0; lane < panel.count; ++lane)
      rows[lane] = launch_.q.at(int64_t(segment_.q_start) + panel.rows.token[lane], panel.rows.head[lane]);
    pack_queries<kUnit>(panel.queries, rows, panel.count, launch_.dim_qk, products_.units,
                        !transforms_ && launch_.sm_scale < 0);
    std::memset(panel.outputs, 0, sizeof(float) * products_.columns * kPanelRows);
    for (int j = 0; j < kVectors; ++j) {
      panel.most[j] = splat(-kInfinity);
      panel.total[j] = f32x{};
    }
  }

  void run_block(Panel& panel, int first, int count) {
    count = reach(panel.rows, segment_, first, count);
    if (count <= 0) return;
    const int round = (count + Products::kKeyRound - 1) / Products::kKeyRound * Products::kKeyRound;
    products_.scores(panel.queries, round, scores_);
    for (int i = count * kPanelRows; i < round * kPanelRows; i += W) store(scores_ + i, splat(-kInfinity));
    bool masked = round > count;
    if (transforms_ || !block_->complete || !sees_all(panel.rows, launch_, segment_, tree_, first, count)) {
      change_logits(panel, first, count);
      masked = true;
    }
    f32x alpha[kVectors];
    const bool grew = masked ? soften<true>(panel, round, alpha) : soften<false>(panel, round, alpha);
    products_.accumulate(weights_, round, alpha, grew, panel.outputs);
  }

  void change_logits(const Panel& panel, int first, int count) {
    for (int i = 0; i < count; ++i) keys_[i] = block_->k[i] == zeros_ ? INT32_MAX : first + i;
    const LogitChange<kPanelRows, Q, T> change{launch_, segment_, tree_, panel.rows};
    const LogitBlock block{scores_, count, kVectors, false, keys_};
    if (transforms_) change.transform(block, positions_);
    change.mask(block, positions_);
  }

  // Scores to weights, relative to the largest score yet; `alpha` is what earlier sums are to be multiplied by.
  template <bool kMasked>
  bool soften(Panel& panel, int count, f32x* alpha) {
    f32x most[kVectors], total[kVectors];
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA { most[j] = load(scores_ + j * W); });
    for (int key = 1; key < count; ++key)
      unroll<kVectors>([&](auto j) SENNIT_LAMBDA { most[j] = max(most[j], load(scores_ + (key * kVectors + j) * W)); });
    i32x grew = {};
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
      const f32x before = panel.most[j], now = max(before, most[j] * scale_);
      grew |= now > before;
      most[j] = now == -kInfinity ? f32x{} : now;  // a row that sees nothing yet: -inf - -inf is NaN
      alpha[j] = exp2_negative<true>(before - most[j]);
      total[j] = panel.total[j] * alpha[j];
      panel.most[j] = now;
    });
    const auto weigh = [&](int at, int j) SENNIT_LAMBDA {
      const f32x score = load(scores_ + at), weight = exp2_negative<kUnit == 1>(score * scale_ - most[j]);
      if constexpr (kMasked) return score == -kInfinity ? f32x{} : weight;
      return weight;
    };
    for (int key = 0; key < count; key += kUnit) {
      unroll<kVectors>([&](auto j) SENNIT_LAMBDA {
        const f32x a = weigh((key * kVectors + j) * W, j);
        total[j] += a;
        uint32_t* to = weights_ + (key / kUnit * kVectors + j) * W;
        if constexpr (kUnit == 2) {
          const f32x b = weigh(((key + 1) * kVectors + j) * W, j);
          total[j] += b;
          store(to, bf16_pairs(a, b));
        } else {
          store(to, a);
        }
      });
    }
    unroll<kVectors>([&](auto j) SENNIT_LAMBDA { panel.total[j] = total[j]; });
    return any(grew);
  }

  void end_panel(Panel& panel, int first_row, int head) {
    const int columns = products_.columns;
    for (int vector = 0; vector * W < panel.count; ++vector) {
      for (int d = 0; d < columns; d += W) {
        f32x block[W];
        for (int i = 0; i < W; ++i) block[i] = load(panel.outputs + (int64_t(d + i) * kVectors + vector) * W);
        transpose(block);
        for (int i = 0; i < W; ++i) store(row_ + int64_t(i) * columns + d, block[i]);
      }
      for (int i = 0; i < std::min(W, panel.count - vector * W); ++i) {
        const float total = panel.total[vector][i], inverse = total > 0 ? 1 / total : 0;
        float* row = row_ + int64_t(i) * columns;
        for (int d = 0; d < launch_.dim_vo; ++d) row[d] *= inverse;
        write_item_row(launch_, segment_, item_, first_row + vector * W + i, head, row,
                       row_lse(panel.most[vector][i], total));
      }
    }
  }
};

}  // namespace sennit
