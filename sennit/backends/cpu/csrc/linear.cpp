// The library "cpu-linear": few rows of bf16 times weights, which are read once.
//
// Rows of weights are to rows of inputs what keys are to queries: the products are those of the wide strand's scores.

#include "amx.h"
#include "tensors.h"
#include "workers.h"

namespace sennit {

using Products = ChooseProducts<bf16, bf16, 1>::type;
constexpr int kOutputs = 64;  // of a task
constexpr int kAhead = 8;     // rows of weights that are fetched into the second-level cache before their turn
static_assert(kOutputs % Products::kKeyRound == 0 && kOutputs <= Products::kBlockKeys);

static thread_local Scratch inputs_memory, task_memory;

struct LinearLaunch {
  const bf16 *x, *weight, *bias;  // [rows, dim], [outputs, dim], [outputs] or null
  bf16* y;                        // [rows, outputs]
  int64_t x_stride, weight_stride, y_stride;
  int rows, dim, outputs;
  int panels, units;
  uint32_t* packed;  // inputs [panels, units, W], in the calling thread's memory

  void pack() {
    panels = (rows + W - 1) / W;
    units = Products(dim, 0).units;
    inputs_memory.arrange([&](Scratch& memory) { packed = memory.take<uint32_t>(size_t(panels) * units * W); });
    for (int panel = 0; panel < panels; ++panel) {
      const bf16* lanes[W];
      const int count = std::min(W, rows - panel * W);
      for (int i = 0; i < count; ++i) lanes[i] = x + (panel * W + i) * x_stride;
      pack_queries<2, 1>(packed + int64_t(panel) * units * W, lanes, count, dim, units, false);
    }
  }

  // kOutputs outputs, or those that are left, from number `first` on.
  void run(int first) const {
    constexpr int kStep = Products::kKeyRound;
    const int count = std::min(kOutputs, outputs - first);
    Products products(dim, 0);
    float* sums = nullptr;  // [panels, kOutputs, W]
    task_memory.arrange([&](Scratch& memory) {
      products.place(memory);
      sums = memory.take<float>(size_t(panels) * kOutputs * W);
    });
    const bf16* weights[kOutputs];
    for (int i = 0; i < kOutputs; ++i) weights[i] = weight + (first + std::min(i, count - 1)) * weight_stride;
    products.begin();
    products.take_keys(weights, kOutputs);
    constexpr bool kFetches = kStep < kOutputs;  // matrix registers take all at once
    if (kFetches) fetch(weights, 0, std::min(kAhead, count));
    for (int begin = 0; begin < kOutputs; begin += kStep) {
      if (kFetches) fetch(weights, begin + kAhead, std::min(begin + kAhead + kStep, count));
      for (int panel = 0; panel < panels; ++panel)
        products.scores(packed + int64_t(panel) * units * W, begin, kStep, sums + (panel * kOutputs + begin) * W);
    }
    products.end();
    for (int panel = 0; panel < panels; ++panel) write(sums + panel * kOutputs * W, panel * W, first, count);
  }

 private:
  void fetch(const bf16* const* weights, int begin, int end) const {
    for (int i = begin; i < end; ++i)
      for (int d = 0; d < dim; d += kVectorBytes / int(sizeof(bf16))) prefetch_to_l2(weights[i] + d);
  }

  // Sums [kOutputs, W] of a panel's rows.
  void write(const float* sums, int first_row, int first, int count) const {
    for (int begin = 0; begin < count; begin += W) {
      f32x block[W];
      unroll<W>([&](auto i) SENNIT_LAMBDA { block[i] = load(sums + (begin + i) * W); });
      transpose(block);
      const int wanted = std::min(W, count - begin);
      const f32x added = bias ? to_floats(bias + first + begin, wanted) : f32x{};
      for (int i = 0; i < std::min(W, rows - first_row); ++i) {
        bf16 values[W];
        from_floats(block[i] + added, values);
        std::memcpy(y + (first_row + i) * y_stride + first + begin, values, wanted * sizeof(bf16));
      }
    }
  }
};

// See linear.py for the order of arguments.
static void linear(Arguments& arguments) {
  const auto parallel = reinterpret_cast<ParallelFunction>(arguments.integer());
  const int threads = int(arguments.integer());
  const Tensor *x = arguments.tensor(), *weight = arguments.tensor(), *bias = arguments.tensor();
  const Tensor* y = arguments.tensor();
  LinearLaunch launch{};
  launch.x = Arguments::data_of<const bf16>(x);
  launch.weight = Arguments::data_of<const bf16>(weight);
  launch.bias = Arguments::data_of<const bf16>(bias);
  launch.y = Arguments::data_of<bf16>(y);
  launch.x_stride = x->strides[0];
  launch.weight_stride = weight->strides[0];
  launch.y_stride = y->strides[0];
  launch.rows = int(x->shape[0]);
  launch.dim = int(x->shape[1]);
  launch.outputs = int(weight->shape[0]);
  launch.pack();
  const int tasks = (launch.outputs + kOutputs - 1) / kOutputs;
  run_tasks(parallel, threads, tasks, [&](int task) { launch.run(task * kOutputs); });
}

}  // namespace sennit

SENNIT_EXPORT(linear)
