// The planner compiled: the same plans as plan/cost.py, line.py, deal.py and schedule.py make, word for word, in less
// time.
#include <tvm/ffi/c_api.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "schedule.h"

namespace sennit {
namespace {

constexpr int kStrandWords = 11, kConfigWords = 3 + 2 * kStrandWords;

Config read_config(const double* words) {
  Config config{int64_t(words[0]), Combine(int(words[1])), int(words[2]), {}};
  for (int s = 0; s < config.num_strands; ++s) {
    const double* of = words + 3 + kStrandWords * s;
    config.strands[s] = {int64_t(of[0]), int64_t(of[1]), int64_t(of[2]), int64_t(of[3]), int64_t(of[4]), of[5],
                         of[6],          of[7],          of[8],          of[9],          of[10]};
  }
  return config;
}

Segments read_segments(const int64_t* columns, int64_t count) {
  const int64_t* at[kSegmentFields];
  for (int i = 0; i < kSegmentFields; ++i) at[i] = columns + i * count;
  return {count, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9]};
}

Options read_options(const int64_t* words) {
  return {words[0], words[1], words[2],      words[3],      words[4] != 0, words[5],
          words[6], words[7], words[8] != 0, words[9] != 0, words[10] != 0};
}

// results: the configuration's number, items, merges, partial rows, and the schedule, to be given to write() and
// release().
void plan(const int64_t* columns, int64_t count, const double* configs, int64_t num_configs, const int64_t* options_at,
          int64_t* results) {
  const Segments segments = read_segments(columns, count);
  const Options options = read_options(options_at);
  Placement best{{}, INFINITY};
  int64_t chosen = -1;
  for (int64_t i = 0; i < num_configs; ++i) {
    Placement placed = place(segments, read_config(configs + i * kConfigWords), options);
    if (chosen < 0 || placed.makespan < best.makespan) best = std::move(placed), chosen = i;
  }
  const Config config = read_config(configs + chosen * kConfigWords);
  auto made = std::make_unique<Schedule>(make_schedule(segments, best.strand, config, options));
  results[0] = chosen, results[1] = int64_t(made->items.size());
  results[2] = int64_t(made->merges.size()), results[3] = made->num_partial_rows;
  results[4] = int64_t(reinterpret_cast<intptr_t>(made.release()));
}

// offsets: where segments, items, workers and merges begin, in words.
void write(const Schedule& made, int32_t* array, const int64_t* columns, int64_t count, const int64_t* offsets) {
  int32_t* row = array + offsets[0];
  for (int64_t i = 0; i < count; ++i, row += kRowWidth) {
    for (int64_t column = 0; column < int64_t(kRowWidth); ++column)
      row[column] = column < kSegmentFields ? int32_t(columns[column * count + i]) : 0;
  }
  const auto copy = [&](int64_t at, const auto& values) {
    if (!values.empty()) std::memcpy(array + at, values.data(), values.size() * sizeof values[0]);
  };
  copy(offsets[1], made.items), copy(offsets[2], made.worker_indptr), copy(offsets[3], made.merges);
}

template <class T>
T* pointer(const TVMFFIAny& any) {
  return reinterpret_cast<T*>(any.v_int64);
}

// 0, or 1 where memory is lacking.
template <class Body>
int answer(TVMFFIAny* result, Body&& body) {
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = 0;
  try {
    body();
  } catch (const std::bad_alloc&) {
    result->v_int64 = 1;
  } catch (const std::length_error&) {
    result->v_int64 = 1;
  }
  return 0;
}

}  // namespace
}  // namespace sennit

#define SENNIT_EXPORT extern "C" __attribute__((visibility("default")))

SENNIT_EXPORT
int __tvm_ffi_plan(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {
  using namespace sennit;
  return answer(result, [&] {
    plan(pointer<int64_t>(args[0]), args[1].v_int64, pointer<double>(args[2]), args[3].v_int64,
         pointer<int64_t>(args[4]), pointer<int64_t>(args[5]));
  });
}

SENNIT_EXPORT
int __tvm_ffi_write(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {
  using namespace sennit;
  return answer(result, [&] {
    write(*pointer<Schedule>(args[0]), pointer<int32_t>(args[1]), pointer<int64_t>(args[2]), args[3].v_int64,
          pointer<int64_t>(args[4]));
  });
}

SENNIT_EXPORT
int __tvm_ffi_release(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {
  using namespace sennit;
  return answer(result, [&] { delete pointer<Schedule>(args[0]); });
}
