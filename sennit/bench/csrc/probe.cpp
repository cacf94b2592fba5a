// Reads memory as fast as threads can: a tensor from end to end, or the pages of a batch as decoding reads them.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Clock = std::chrono::steady_clock;

constexpr int kLine = 64;  // bytes
constexpr int kDots = 4;   // a line: one for each query head of a group of four
#if defined(__AVX512F__)
constexpr int kChains = 2;  // lines in turn add to different sums, since one sum's latency would be felt
#else
constexpr int kChains = 1;  // narrower registers take several instructions a line, and there are fewer of them
#endif

typedef float Floats __attribute__((vector_size(kLine)));
typedef int32_t Integers __attribute__((vector_size(kLine)));

template <class Vector>
inline Vector load(const char* from) {
  Vector line;
  std::memcpy(&line, from, sizeof line);
  return line;
}

// What was computed goes here, so that it has to be.
std::atomic<uint32_t> sink;

template <class Vector>
void keep(const Vector& vector) {
  uint32_t words[kLine / 4], all = 0;
  std::memcpy(words, &vector, sizeof words);
  for (uint32_t word : words) all ^= word;
  sink.fetch_xor(all, std::memory_order_relaxed);
}

// Seconds from when all threads are ready until the last has ended `work(thread)`.
template <class Work>
double run(int threads, const Work& work) {
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> starts(threads), ends(threads);
  const auto body = [&](int thread) {
    ready.fetch_add(1);
    while (ready.load() < threads) std::this_thread::yield();
    starts[thread] = Clock::now();
    work(thread);
    ends[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
  body(0);
  for (std::thread& other : others) other.join();
  const auto first = *std::min_element(starts.begin(), starts.end());
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - first).count();
}

int64_t share(int64_t count, int thread, int threads) { return count * thread / threads; }

// A contiguous tensor, each thread its part of it.
double read_tensor(TensorView tensor, int64_t threads) {
  const char* data = static_cast<const char*>(tensor.data_ptr());
  const int64_t blocks = tensor.numel() * tensor.dtype().bits / 8 / (4 * kLine);
  return run(int(threads), [=](int thread) {
    Integers sums[4] = {};
    const char* end = data + share(blocks, thread + 1, int(threads)) * 4 * kLine;
    for (const char* at = data + share(blocks, thread, int(threads)) * 4 * kLine; at < end; at += 4 * kLine)
      for (int i = 0; i < 4; ++i) sums[i] += load<Integers>(at + i * kLine);
    keep(sums[0] + sums[1] + sums[2] + sums[3]);
  });
}

// One head's rows of one page: what a thread reads at a time.
struct Chunk {
  const char* data;
  int64_t stride;  // bytes from row to row
  int lines;       // of a row
};

struct Sums {
  Floats dots[kChains][kDots] = {};
  Floats queries[kDots];

  Sums() {
    for (int i = 0; i < kDots; ++i)
      for (int lane = 0; lane < kLine / 4; ++lane) queries[i][lane] = 0.5f + float(i);
  }

  void add(const char* line, Floats (&chain)[kDots]) {
    for (int i = 0; i < kDots; ++i) {
#if defined(__AVX512BF16__)
      chain[i] = (Floats)_mm512_dpbf16_ps((__m512)chain[i], (__m512bh)load<__m512i>(line), (__m512bh)queries[i]);
#else
      chain[i] += load<Floats>(line) * queries[i];
#endif
    }
  }

  // Read a chunk, and prefetch another one line by line, into the first or second level of caches. Where its rows are
  // shorter, so much is prefetched in vain.
  template <int level>
  void read(const Chunk& chunk, int rows, const Chunk& other) {
    for (int row = 0; row < rows; ++row) {
      const char* at = chunk.data + row * chunk.stride;
      const char* ahead = other.data + row * other.stride;
      int line = 0;
      for (; line + kChains <= chunk.lines; line += kChains)
        for (int chain = 0; chain < kChains; ++chain) {
          __builtin_prefetch(ahead + (line + chain) * kLine, 0, 4 - level);
          add(at + (line + chain) * kLine, dots[chain]);
        }
      for (; line < chunk.lines; ++line) {
        __builtin_prefetch(ahead + line * kLine, 0, 4 - level);
        add(at + line * kLine, dots[0]);
      }
    }
  }

  void keep() {
    for (auto& chain : dots)
      for (Floats& sum : chain) ::keep(sum);
  }
};

// Where page by page, head by head, keys and then values lie; both are [pages, page_size, heads, dim] with any strides.
struct Pool {
  const char* data;
  int64_t page, row, head;  // strides in bytes
  int lines;

  explicit Pool(TensorView pool) {
    const int64_t size = pool.dtype().bits / 8;
    data = static_cast<const char*>(pool.data_ptr());
    page = pool.strides()[0] * size;
    row = pool.strides()[1] * size;
    head = pool.strides()[2] * size;
    lines = int(pool.size(3) * size / kLine);
  }
  Chunk at(int32_t id, int64_t which) const { return {data + id * page + which * head, row, lines}; }
};

// The pages of a batch in their order, each thread its part of them; `v` is absent where values lie in the keys. The
// next chunk is fetched into the first level of caches, or the one after it into the second.
template <int level>
double read_pages(TensorView k, Optional<TensorView> v, TensorView pages, int64_t threads) {
  std::vector<Pool> pools{Pool(k)};
  if (v.has_value()) pools.emplace_back(v.value());
  const int32_t* ids = static_cast<const int32_t*>(pages.data_ptr());
  const int rows = int(k.size(1));
  const int64_t parts = k.size(2) * int64_t(pools.size()), count = pages.numel();
  return run(int(threads), [&](int thread) {
    const int64_t begin = share(count, thread, int(threads)), end = share(count, thread + 1, int(threads));
    struct Place {
      int64_t page, part;
      void advance(int64_t parts) {
        if (++part == parts) ++page, part = 0;
      }
    };
    const auto chunk = [&](Place place) {
      const bool values = pools.size() == 2 && place.part % 2;
      return pools[values].at(ids[place.page], pools.size() == 2 ? place.part / 2 : place.part);
    };
    Place ahead{begin, 0};
    for (int i = 0; i < level; ++i) ahead.advance(parts);
    Sums sums;
    for (Place place{begin, 0}; place.page < end; place.advance(parts), ahead.advance(parts))
      sums.read<level>(chunk(place), rows, chunk(ahead.page < end ? ahead : place));
    sums.keep();
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_tensor, read_tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_pages_into_first_level, read_pages<1>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_pages_into_second_level, read_pages<2>);
