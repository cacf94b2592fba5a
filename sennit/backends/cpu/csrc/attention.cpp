// The library "cpu-attention": what Python calls.

#include <chrono>

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

static void attend(TensorView plan, TensorView page_table, Optional<TensorView> kv_lens, TensorView q, TensorView k,
                   TensorView v, TensorView out, Optional<TensorView> lse, TensorView partial_out,
                   TensorView partial_lse, int64_t page_size, int64_t group_size, double sm_scale, double soft_cap,
                   int64_t window_left, int64_t window_right, int64_t num_sink_tokens, Optional<TensorView> alibi_slopes,
                   Optional<TensorView> sinks, Optional<TensorView> packed_mask, int64_t graph, Array<Tensor> captured,
                   int64_t parallel, int64_t threads) {
  std::vector<GraphCapture> captures;
  for (const Tensor& tensor : captured)
    captures.push_back({tensor.data_ptr(), tensor.shape().data(), tensor.strides().data()});
  const AttentionLaunch launch{
      .plan = Plan(data<int32_t>(plan)),
      .page_table = data<int32_t>(page_table),
      .kv_lens = data<int32_t>(kv_lens),
      .page_size = int(page_size),
      .q = rows<const Query>(q),
      .k = pool<Stored>(k, page_size > 0),
      .v = pool<Stored>(v, page_size > 0),
      .out = rows<Query>(out),
      .lse = lse ? rows<float>(*lse) : Rows<float>{},
      .partial_out = data<float>(partial_out),
      .partial_lse = data<float>(partial_lse),
      .group_size = int(group_size),
      .dim_qk = int(q.size(2)),
      .dim_vo = int(out.size(2)),
      .sm_scale = sm_scale,
      .soft_cap = float(soft_cap),
      .alibi_slopes = data<float>(alibi_slopes),
      .sinks = data<float>(sinks),
      .packed_mask = data<uint8_t>(packed_mask),
      .window_left = int(window_left),
      .window_right = int(window_right),
      .num_sink_tokens = int(num_sink_tokens),
      .graph = reinterpret_cast<GraphFunction>(graph),
      .captures = captures.data(),
  };
  const Plan& p = launch.plan;
  const auto on_threads = reinterpret_cast<ParallelFunction>(parallel);
  std::vector<std::atomic<int64_t>> nanoseconds(p.num_workers);
  ItemQueues queues(p);
  run_tasks(on_threads, int(threads), p.num_workers, [&](int worker) {
    queues.run(worker, [&](const Item& item, int planned_for) {
      const auto start = std::chrono::steady_clock::now();
      run_item(launch, item);
      const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - start;
      nanoseconds[planned_for].fetch_add(time.count(), std::memory_order_relaxed);
    });
  });
  worker_times.assign(nanoseconds.begin(), nanoseconds.end());
  constexpr int kAtOnce = 16;
  run_tasks(on_threads, int(threads), (p.num_merges + kAtOnce - 1) / kAtOnce, [&](int task) {
    scratch.reserve(Scratch::bytes_of<float>(launch.dim_vo));
    float* values = scratch.take<float>(launch.dim_vo);
    for (int i = task * kAtOnce; i < std::min((task + 1) * kAtOnce, p.num_merges); ++i)
      run_merge(launch, p.merges[i], values);
  });
}

static Array<int64_t> last_worker_times() { return Array<int64_t>(worker_times.begin(), worker_times.end()); }

}  // namespace sennit

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, sennit::attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_worker_times, sennit::last_worker_times);
