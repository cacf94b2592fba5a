// The library "cpu-attention": what Python calls.

#include <chrono>
#include <vector>

#include "output.h"
#include "queues.h"
#include "strands.h"
#include "tensors.h"
#include "workers.h"

namespace sennit {

static thread_local Scratch scratch;
static thread_local std::vector<int64_t> worker_times;  // nanoseconds of each worker's items in the last launch

static void run_item(const AttentionLaunch& launch, const Item& item) {
  (item.num_rows <= kNarrowRows ? run_narrow : run_wide)(launch, item, scratch);
}

static void run_items(const AttentionLaunch& launch, ParallelFunction parallel, int threads) {
  const Plan& plan = launch.plan;
  std::vector<std::atomic<int64_t>> times(plan.num_workers);
  // Heads of a wide item share nothing, so threads take them one by one; those of a narrow one stay together, because a
  // page holds them side by side.
  ItemQueues queues(plan, [](const Item& item) { return item.num_rows > kNarrowRows; });
  run_tasks(parallel, threads, plan.num_workers, [&](int worker) {
    queues.run(worker, [&](const Item& item, int planned_for) {
      const auto start = std::chrono::steady_clock::now();
      run_item(launch, item);
      const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - start;
      times[planned_for].fetch_add(time.count(), std::memory_order_relaxed);
    });
  });
  worker_times.assign(times.begin(), times.end());
}

static void run_merges(const AttentionLaunch& launch, ParallelFunction parallel, int threads) {
  constexpr int kAtOnce = 16;
  const Plan& plan = launch.plan;
  run_tasks(parallel, threads, (plan.num_merges + kAtOnce - 1) / kAtOnce, [&](int task) {
    float* values = nullptr;
    scratch.arrange([&](Scratch& memory) { values = memory.take<float>(launch.dim_vo); });
    for (int i = task * kAtOnce; i < std::min((task + 1) * kAtOnce, plan.num_merges); ++i)
      run_merge(launch, plan.merges[i], values);
  });
}

// See backend.py for the order of arguments.
static void attend(Arguments& arguments) {
  const auto parallel = reinterpret_cast<ParallelFunction>(arguments.integer());
  const int threads = int(arguments.integer());
  AttentionLaunch launch{Plan(arguments.data<int32_t>())};
  launch.page_table = arguments.data<int32_t>();
  launch.kv_lens = arguments.data<int32_t>();
  launch.page_size = int(arguments.integer());
  launch.group_size = int(arguments.integer());
  const Tensor* q = arguments.tensor();
  launch.q = rows<const Query>(q);
  launch.k = pool<Stored>(arguments.tensor());
  launch.v = pool<Stored>(arguments.tensor());
  const Tensor* out = arguments.tensor();
  launch.out = rows<Query>(out);
  launch.lse = rows<float>(arguments.tensor());
  launch.dim_qk = int(q->shape[2]);
  launch.dim_vo = int(out->shape[2]);
  launch.partial_out = arguments.data<float>();
  launch.partial_lse = arguments.data<float>();
  launch.sm_scale = arguments.number();
  launch.soft_cap = float(arguments.number());
  launch.window_left = int(arguments.integer());
  launch.window_right = int(arguments.integer());
  launch.num_sink_tokens = int(arguments.integer());
  launch.alibi_slopes = arguments.data<float>();
  launch.sinks = arguments.data<float>();
  launch.packed_mask = arguments.data<uint8_t>();
  launch.graph = reinterpret_cast<GraphFunction>(arguments.integer());
  std::vector<GraphCapture> captures;
  while (arguments.more()) {
    const Tensor* tensor = arguments.tensor();
    captures.push_back({Arguments::data_of<void>(tensor), tensor->shape, tensor->strides});
  }
  launch.captures = captures.data();
  run_items(launch, parallel, threads);
  run_merges(launch, parallel, threads);
}

// Fills an int64 tensor with the times of the last launch's workers, or zeros.
static void last_worker_times(Arguments& arguments) {
  const Tensor* times = arguments.tensor();
  int64_t* to = Arguments::data_of<int64_t>(times);
  for (int64_t i = 0; i < times->shape[0]; ++i) to[i] = i < int64_t(worker_times.size()) ? worker_times[i] : 0;
}

}  // namespace sennit

SENNIT_EXPORT(attend)
SENNIT_EXPORT(last_worker_times)
