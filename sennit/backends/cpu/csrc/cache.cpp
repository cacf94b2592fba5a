// The library "cpu-cache": new keys and values into their slots, and copies of pages, for elements of any size.

#include <vector>

#include "tensors.h"
#include "workers.h"

namespace sennit {

constexpr int64_t kBytesPerTask = 1 << 17;

// Bytes [rows, heads, dim] or [pages, slots, heads, dim] with contiguous dim; strides in bytes.
struct ByteRows {
  char* data;
  int64_t heads, row_bytes, strides[3];

  explicit ByteRows(const Tensor* tensor) {
    const int64_t size = tensor->dtype.bits / 8;
    const int last = tensor->ndim - 1;
    data = Arguments::data_of<char>(tensor);
    heads = tensor->shape[last - 1];
    row_bytes = tensor->shape[last] * size;
    for (int i = 0; i < last; ++i) strides[i] = tensor->strides[i] * size;
  }
};

static void copy_heads(const ByteRows& from, const char* source, const ByteRows& to, char* target) {
  const int64_t from_stride = from.strides[1], to_stride = to.strides[2];
  if (from_stride == to.row_bytes && to_stride == to.row_bytes) {
    std::memcpy(target, source, to.heads * to.row_bytes);
    return;
  }
  for (int64_t head = 0; head < to.heads; ++head)
    std::memcpy(target + head * to_stride, source + head * from_stride, to.row_bytes);
}

// See backend.py for the order of arguments.
static void append(Arguments& arguments) {
  const auto parallel = reinterpret_cast<ParallelFunction>(arguments.integer());
  const int threads = int(arguments.integer());
  const Plan p(arguments.data<int32_t>());
  const int64_t num_segments = arguments.integer();
  const int32_t* table = arguments.data<int32_t>();
  const int32_t* exact = arguments.data<int32_t>();
  const int64_t* explicit_slots = arguments.data<int64_t>();
  const Tensor *k = arguments.tensor(), *v = arguments.tensor();
  const Tensor *k_pages = arguments.tensor(), *v_pages = arguments.tensor();
  const int64_t page_size = k_pages->shape[1];
  const ByteRows k_from(k), k_to(k_pages), v_from(v ? v : k), v_to(v ? v_pages : k_pages);
  int64_t tokens = 0;
  for (int64_t i = 0; i < num_segments; ++i) tokens += p.segments[i].q_len;
  const int64_t bytes = tokens * k_to.heads * (k_to.row_bytes + (v ? v_to.row_bytes : 0));
  const int tasks = int(std::clamp<int64_t>(bytes / kBytesPerTask, 1, int64_t(threads) * 4));
  run_tasks(parallel, threads, tasks, [&](int task) {
    const int64_t first = tokens * task / tasks, last = tokens * (task + 1) / tasks;
    int64_t begin = 0;  // tokens before the segment
    for (int64_t i = 0; i < num_segments && begin < last; begin += p.segments[i++].q_len) {
      const Segment& s = p.segments[i];
      const int64_t length = exact ? std::clamp(exact[s.request], 0, s.kv_len) : s.kv_len;
      for (int64_t token = std::max<int64_t>(first - begin, 0); token < std::min<int64_t>(last - begin, s.q_len);
           ++token) {
        const int64_t position = length - s.q_len + token, row = s.q_start + token;
        if (position < 0) continue;
        int64_t page, slot;
        if (explicit_slots) {
          if (explicit_slots[row] < 0) continue;
          page = explicit_slots[row] / page_size;
          slot = explicit_slots[row] % page_size;
        } else {
          page = table[s.kv_start + position / page_size];
          slot = position % page_size;
        }
        copy_heads(k_from, k_from.data + row * k_from.strides[0], k_to,
                   k_to.data + page * k_to.strides[0] + slot * k_to.strides[1]);
        if (v)
          copy_heads(v_from, v_from.data + row * v_from.strides[0], v_to,
                     v_to.data + page * v_to.strides[0] + slot * v_to.strides[1]);
      }
    }
  });
}

// Copies [sizes] runs of `run` bytes, `strides` bytes apart.
static void copy_runs(const char* from, char* to, const int64_t* sizes, const int64_t* strides, int ndim, int64_t run) {
  if (ndim == 0) {
    std::memcpy(to, from, run);
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i)
    copy_runs(from + i * strides[0], to + i * strides[0], sizes + 1, strides + 1, ndim - 1, run);
}

static void copy_pages(Arguments& arguments) {
  const auto parallel = reinterpret_cast<ParallelFunction>(arguments.integer());
  const int threads = int(arguments.integer());
  const Tensor* pages = arguments.tensor();
  const Tensor* source = arguments.tensor();
  const int64_t* from = Arguments::data_of<int64_t>(source);
  const int64_t* to = arguments.data<int64_t>();
  const int64_t size = pages->dtype.bits / 8, stride = pages->strides[0] * size;
  std::vector<int64_t> sizes, strides;
  for (int i = 1; i < pages->ndim; ++i) sizes.push_back(pages->shape[i]), strides.push_back(pages->strides[i] * size);
  int64_t run = size;  // bytes that lie together
  for (; !sizes.empty() && (strides.back() == run || sizes.back() == 1); sizes.pop_back(), strides.pop_back())
    run *= sizes.back();
  char* base = Arguments::data_of<char>(pages);
  run_tasks(parallel, threads, int(source->shape[0]), [&](int i) {
    copy_runs(base + from[i] * stride, base + to[i] * stride, sizes.data(), strides.data(), int(sizes.size()), run);
  });
}

}  // namespace sennit

SENNIT_EXPORT(append)
SENNIT_EXPORT(copy_pages)
