// Tensors of tvm-ffi as the kernels' plain pointers and strides.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "launch.h"

namespace sennit {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

template <class T>
static T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
static T* data(const Optional<TensorView>& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}

// [rows, heads] or [rows, heads, dim].
template <class T>
static Rows<T> rows(const TensorView& tensor) {
  return {data<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

// [pages, slots, heads, dim], or packed [rows, heads, dim].
template <class T>
static Pool<T> pool(const TensorView& tensor, bool paged) {
  if (paged) return {data<T>(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  return {data<T>(tensor), 0, tensor.stride(0), tensor.stride(1)};
}

}  // namespace sennit
