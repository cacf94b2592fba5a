// The narrow strand: tiles of few query rows, bound by reading keys and values, each byte of which is read once.
//
// Lanes run along the dimension: a line of a key meets all query rows while it is in registers. A pipeline keeps loads
// and arithmetic apart: scores of the next step, then softmax and outputs of this one, each fetching, line by line,
// values or keys of a step to come.
#pragma once

#include "lines.h"
#include "output.h"
#include "scratch.h"

namespace sennit {

// Fetches what a later phase reads: into the second-level cache, since the first of a Zen 4 has room for too few lines
// on their way; into the first on processors with AMX (Sapphire Rapids), where that was measured to be as fast or
// faster.
static SENNIT_INLINE void fetch(const void* address) {
#if defined(SENNIT_AMX)
  prefetch(address);
#else
  prefetch_to_l2(address);
#endif
}

template <class Q, class T, int R>
class Narrow {
  static_assert(R <= W && W % R == 0);
  using L = typename LinesOf<Q, T>::Type;
  using Lanes = typename L::Lanes;
  static constexpr float kGrowth = 8;             // weights up to 2 ** kGrowth lose nothing in floating point
  static constexpr int kKeys = 16;                // of a step
  static constexpr int kGroup = W / R;            // keys whose scores share a vector
  static constexpr int kGroups = kKeys / kGroup;  // vectors of scores of a step
  static constexpr int kRing = 4;                 // steps, and blocks of keys, that are known at a time
  static constexpr int kSums = W >= 16 ? 16 : 8;  // accumulators that fit beside operands
  static constexpr int kRowsAtOnce = R * L::kVectors <= kSums ? R : kSums / L::kVectors;
  static constexpr int kLinesAtOnce = kSums / (kRowsAtOnce * L::kVectors);
  static constexpr int kQueryLanes = L::kKeyVectors * W;  // of a line and row
  static_assert(kGroups >= 1 && kKeys % L::kAtOnce == 0);

  struct Head {
    f32x base, total;  // of lane key * R + row: weights are 2 ** (logit * log2(e) - base), and add up to total
    float* queries;    // [lines_qk][R][kKeyVectors][W], as lines of keys meet them
    float* outputs;    // [lines_vo][R][kVectors][W]
    LaneRows<W> rows;
  };
  // The keys of a step, for one head.
  struct Step {
    const T* k[kKeys];
    const T* v[kKeys];
  };

 public:
  static void run(const Launch<Q, T>& launch, const Item& item, Scratch& scratch) {
    Narrow narrow(launch, launch.plan.segments[item.segment], item);
    scratch.arrange([&](Scratch& memory) { narrow.place(memory); });
    narrow.run();
  }

 private:
  const Launch<Q, T>& launch_;
  const Segment& segment_;
  const Item& item_;
  const int exact_len_;
  const KeyTree tree_;
  const bool transforms_;
  const float scale_;
  const int lines_qk_, lines_vo_, tail_qk_, tail_vo_;  // lines, and elements of a last one that is not whole
  Head* heads_;
  float* queries_;  // of all heads
  float* outputs_;
  KeyBlock<T, kKeys>* ring_;
  float* scores_;  // [2][kGroups][W]
  T* zeros_;
  float* row_;

  Narrow(const Launch<Q, T>& launch, const Segment& segment, const Item& item)
      : launch_(launch), segment_(segment), item_(item), exact_len_(launch.exact_len(segment)),
        tree_(key_tree(launch, segment, exact_len_)), transforms_(launch.transforms()),
        scale_(transforms_ ? 1.f : float(launch.sm_scale * kLog2E)),
        lines_qk_((launch.dim_qk + L::kSize - 1) / L::kSize), lines_vo_((launch.dim_vo + L::kSize - 1) / L::kSize),
        tail_qk_(launch.dim_qk % L::kSize), tail_vo_(launch.dim_vo % L::kSize) {}

  size_t zero_count() const { return std::max(launch_.dim_qk, launch_.dim_vo); }

  size_t queries_count() const { return size_t(lines_qk_) * R * kQueryLanes; }
  size_t outputs_count() const { return size_t(lines_vo_) * R * L::kSize; }

  void place(Scratch& scratch) {
    heads_ = scratch.take<Head>(item_.num_heads);
    queries_ = scratch.take<float>(item_.num_heads * queries_count());
    outputs_ = scratch.take<float>(item_.num_heads * outputs_count());
    ring_ = scratch.take<KeyBlock<T, kKeys>>(kRing);
    scores_ = scratch.take<float>(2 * kGroups * W);
    zeros_ = scratch.take<T>(zero_count());
    row_ = scratch.take<float>(size_t(lines_vo_) * L::kSize);
  }

  void run() {
    std::memset(zeros_, 0, zero_count() * sizeof(T));
    std::memset(outputs_, 0, item_.num_heads * outputs_count() * sizeof(float));
    for (int i = 0; i < item_.num_heads; ++i) begin_head(i);
    const BlockList blocks(launch_, segment_, tree_, item_, exact_len_, kKeys);
    const int heads = item_.num_heads, total = blocks.count * heads;
    int known = 0;
    const auto step_at = [&](int index) {
      index = std::min(index, total - 1);
      const int number = index / heads;
      for (; known <= number; ++known) {
        const auto [first, count] = blocks.at(known);
        find_keys(ring_[known % kRing], launch_, segment_, first, count, exact_len_, zeros_);
      }
      const KeyBlock<T, kKeys>& block = ring_[number % kRing];
      const int head = item_.head_start + index % heads;
      Step step;
      for (int i = 0; i < kKeys; ++i) {
        step.k[i] = block.k[i] + head * block.k_head[i];
        step.v[i] = block.v[i] + head * block.v_head[i];
      }
      return step;
    };
    if (total > 0) {
      Step steps[kRing];
      for (int index = 0; index < kRing - 1; ++index) steps[index] = step_at(index);
      multiply_keys(heads_[0], ring_[0], steps[0], steps[1], scores_);
      for (int index = 0; index < total; ++index) {
        const Step& later = steps[(index + 3) % kRing] = step_at(index + 3);
        float* scores = scores_ + index % 2 * kGroups * W;
        if (index + 1 < total)
          multiply_keys(heads_[(index + 1) % heads], ring_[(index + 1) / heads % kRing], steps[(index + 1) % kRing],
                        steps[(index + 2) % kRing], scores_ + (index + 1) % 2 * kGroups * W);
        soften(heads_[index % heads], scores);
        multiply_values(heads_[index % heads], steps[index % kRing], later, scores);
      }
    }
    for (int i = 0; i < item_.num_heads; ++i) end_head(heads_[i], item_.head_start + i);
  }

  void begin_head(int index) {
    Head& head = heads_[index];
    const int kv_head = item_.head_start + index;
    head.queries = queries_ + index * queries_count();
    head.outputs = outputs_ + index * outputs_count();
    describe_rows(head.rows, launch_, segment_, tree_, exact_len_, item_.row_start, item_.num_rows, R, kv_head);
    head.base = splat(-kInfinity);
    head.total = f32x{};
    for (int line = 0; line < lines_qk_; ++line) {
      for (int row = 0; row < R; ++row) {
        const Q* q = row < item_.num_rows
                         ? launch_.q.at(int64_t(segment_.q_start) + head.rows.token[row], head.rows.head[row])
                         : nullptr;
        float* to = head.queries + (line * R + row) * kQueryLanes;
        if (q) {
          L::pack_query(q + line * L::kSize, launch_.dim_qk - line * L::kSize, to);
        } else {
          std::memset(to, 0, kQueryLanes * sizeof(float));
        }
      }
    }
  }

  // Scores of a step, changed and masked; fetches the values of the step `ahead`.
  void multiply_keys(const Head& head, const KeyBlock<T, kKeys>& block, const Step& step, const Step& ahead,
                     float* scores) {
    const int whole = lines_qk_ - (tail_qk_ > 0);
    const float scale = scale_;
    for (int group = 0; group < kGroups; ++group) {
      f32x sums[W] = {};
      const T* const* k = step.k + group * kGroup;
      const T* const* v = ahead.v + group * kGroup;
      const float* q = head.queries;
      // A line of all keys of the group meets all rows: lines stay in registers, or queries where those are fewer.
      const auto add_line = [&](auto&& read) SENNIT_LAMBDA {
        const auto add = [&](auto i, auto row, Lanes line, Lanes query)
                             SENNIT_LAMBDA { sums[i * R + row] = L::multiply_add(sums[i * R + row], line, query); };
        constexpr int kVectors = L::kKeyVectors;
        if constexpr (R < kGroup) {
          Lanes queries[R * kVectors];
          unroll<R * kVectors>([&](auto i) SENNIT_LAMBDA { queries[i] = load_as<Lanes>(q + i * W); });
          unroll<kGroup>([&](auto i) SENNIT_LAMBDA {
            Lanes line[kVectors];
            read(i, line);
            unroll<kVectors>([&](auto vector) SENNIT_LAMBDA {
              unroll<R>([&](auto row) SENNIT_LAMBDA { add(i, row, line[vector], queries[row * kVectors + vector]); });
            });
          });
        } else {
          Lanes lines[kGroup][kVectors];
          unroll<kGroup>([&](auto i) SENNIT_LAMBDA { read(i, lines[i]); });
          unroll<kVectors>([&](auto vector) SENNIT_LAMBDA {
            unroll<R>([&](auto row) SENNIT_LAMBDA {
              const Lanes query = load_as<Lanes>(q + (row * kVectors + vector) * W);
              unroll<kGroup>([&](auto i) SENNIT_LAMBDA { add(i, row, lines[i][vector], query); });
            });
          });
        }
        q += R * kQueryLanes;
      };
      for (int line = 0; line < whole; ++line) {
        add_line([&](auto i, Lanes* to) SENNIT_LAMBDA {
          L::read_key(k[i] + line * L::kSize, to);
          fetch(v[i] + line * L::kSize);
        });
      }
      if (tail_qk_)
        add_line([&](auto i, Lanes* to) SENNIT_LAMBDA {
          alignas(kVectorBytes) T tail[L::kSize] = {};
          std::memcpy(tail, k[i] + whole * L::kSize, tail_qk_ * sizeof(T));
          L::read_key(tail, to);
        });
      store(scores + group * W, multiply_finite(sum_lanes(sums), scale));
    }
    if (transforms_ || !block.complete || block.count < kKeys ||
        !sees_all(head.rows, launch_, segment_, tree_, block.first, block.count))
      change_logits(head, block, scores);
  }

  void change_logits(const Head& head, const KeyBlock<T, kKeys>& block, float* scores) {
    int32_t keys[kGroups * W], positions[kGroups * W];
    for (int i = 0; i < kGroups * W; ++i) {
      const int key = i / R;
      keys[i] = key >= block.count || block.k[key] == zeros_ ? INT32_MAX : block.first + key;
    }
    const LogitChange<W, Q, T> change{launch_, segment_, tree_, head.rows};
    const LogitBlock logits{scores, kGroups, 1, true, keys};
    if (transforms_) change.transform(logits, positions);
    change.mask(logits, positions);
  }

  // Scores to weights.
  void soften(Head& head, float* scores) {
    f32x s[kGroups];
    unroll<kGroups>([&](auto i) SENNIT_LAMBDA { s[i] = load(scores + i * W); });
    f32x most = s[0];
    unroll<kGroups - 1>([&](auto i) SENNIT_LAMBDA { most = max(most, s[i + 1]); });
    most = max(head.base, max_strided<R>(most));
    if (any(most > head.base + kGrowth)) raise(head, most);
    const f32x base = head.base == -kInfinity ? f32x{} : head.base;  // -inf - -inf is NaN
    f32x total = {};
    unroll<kGroups>([&](auto i) SENNIT_LAMBDA {
      s[i] = exp2_below<L::kExact>(s[i] - base);
      total += s[i];
    });
    head.total += total;
    L::template store_weights<R, kGroups>(s, scores);
  }

  // Moves the base to the largest score, where one would otherwise give a large weight: not for every new maximum,
  // since what has been added up must then be multiplied.
  void raise(Head& head, f32x most) {
    const f32x alpha = exp2_below<true>(head.base - (most == -kInfinity ? f32x{} : most));
    head.base = most;
    head.total *= alpha;
    for (int line = 0; line < lines_vo_; ++line)
      unroll<R>([&](auto row) SENNIT_LAMBDA {
        unroll<L::kVectors>([&](auto vector) SENNIT_LAMBDA {
          float* at = head.outputs + ((line * R + row) * L::kVectors + vector) * W;
          store(at, load(at) * alpha[int(row)]);
        });
      });
  }

  void read_tails(const T* const* rows, int at, Lanes* to) const {
    alignas(kVectorBytes) T copies[L::kAtOnce][L::kSize] = {};
    const T* tails[L::kAtOnce];
    for (int i = 0; i < L::kAtOnce; ++i) {
      std::memcpy(copies[i], rows[i] + at, tail_vo_ * sizeof(T));
      tails[i] = copies[i];
    }
    L::read_values(tails, 0, to);
  }

  // Adds weights times values to the outputs; fetches the keys of the step `ahead`.
  void multiply_values(Head& head, const Step& step, const Step& ahead, const float* weights) {
    const int whole = launch_.dim_vo / L::kSize;
    int line = 0;
    for (; line + kLinesAtOnce <= whole; line += kLinesAtOnce)
      add_lines<kLinesAtOnce, true>(head, step, ahead, weights, line);
    for (; line < whole; ++line) add_lines<1, true>(head, step, ahead, weights, line);
    if (line < lines_vo_) add_lines<1, false>(head, step, ahead, weights, line);
  }

  template <int kLines, bool kWhole>
  SENNIT_INLINE void add_lines(Head& head, const Step& step, const Step& ahead, const float* weights, int line) {
    for (int row = 0; row < R; row += kRowsAtOnce) {
      float* at = head.outputs + (line * R + row) * L::kSize;
      f32x sums[kSums] = {};  // of this step alone, since rounding grows with what a sum has reached
      const auto each = [&](auto&& body) SENNIT_LAMBDA {
        unroll<kLines>([&](auto l) SENNIT_LAMBDA {
          unroll<kRowsAtOnce>([&](auto r) SENNIT_LAMBDA {
            unroll<L::kVectors>([&](auto vector) SENNIT_LAMBDA {
              constexpr int sum = (l * kRowsAtOnce + r) * L::kVectors + vector;
              body(std::integral_constant<int, sum>{}, (l * R + r) * L::kSize + vector * W, l, r, vector);
            });
          });
        });
      };
      for (int key = 0; key < kKeys; key += L::kAtOnce) {
        Lanes lines[kLines][L::kVectors];
        if constexpr (kWhole) {
          unroll<kLines>([&](auto l) SENNIT_LAMBDA { L::read_values(step.v + key, (line + l) * L::kSize, lines[l]); });
        } else {
          read_tails(step.v + key, line * L::kSize, lines[0]);
        }
        if (row == 0)
          unroll<kLines * L::kAtOnce>(
              [&](auto i) SENNIT_LAMBDA { fetch(ahead.k[key + i % L::kAtOnce] + (line + i / L::kAtOnce) * L::kSize); });
        const float* w = weights + key * R + row;
        each([&](auto sum, int, auto l, auto r, auto vector)
                 SENNIT_LAMBDA { sums[sum] = L::multiply_add(sums[sum], lines[l][vector], L::multiplier(w + r)); });
      }
      each([&](auto sum, int offset, auto, auto, auto)
               SENNIT_LAMBDA { store(at + offset, load(at + offset) + sums[sum]); });
    }
  }

  void end_head(Head& head, int kv_head) {
    const Normalized rows(head.base, sum_strided<R>(head.total));
    for (int row = 0; row < item_.num_rows; ++row) {
      for (int line = 0; line < lines_vo_; ++line)
        for (int i = 0; i < L::kSize; ++i)
          row_[line * L::kSize + L::place(i / W, i % W)] = head.outputs[(line * R + row) * L::kSize + i];
      write_item_row(launch_, segment_, item_, row, kv_head, row_, rows.factor[row], rows.lse[row]);
    }
  }
};

}  // namespace sennit
