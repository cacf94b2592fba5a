// How the kernels call a library of user functions, which is built apart from them: a block of logits changed in place.
#pragma once

#include <stdint.h>

namespace sennit {

// A captured tensor: sizes and strides one a dimension, strides in elements.
struct GraphCapture {
  const void* data;
  const int64_t* sizes;
  const int64_t* strides;
};

// Logits of queries in lanes: a step has `vectors` vectors of W lanes (simd.h), and one key for all of them or a key a
// lane.
struct GraphBlock {
  float* logits;  // [steps][vectors][W], steps `step_stride` floats apart
  int32_t steps, vectors;
  int64_t step_stride;
  const int32_t* q_idx;   // [vectors * W] positions of the queries
  const int32_t* h;       // [vectors * W] query heads
  const int32_t* kv_idx;  // positions of the keys: [steps], or [steps][vectors * W] if kv_per_lane
  bool kv_per_lane;
  int32_t b;                     // the request
  const GraphCapture* captures;  // in the order of the spec's
};

using GraphFunction = void (*)(const GraphBlock&);

}  // namespace sennit
