// Arguments of calls through tvm-ffi, read by its plain C interface: the C++ one takes seconds to compile.
#pragma once

#include <tvm/ffi/c_api.h>

#include <stdexcept>

#include "launch.h"

namespace sennit {

using Tensor = DLTensor;

// Arguments in their order; whoever calls gives what is read.
class Arguments {
 public:
  Arguments(const TVMFFIAny* values, int count) : values_(values), count_(count) {}

  int64_t integer() { return next().v_int64; }
  double number() {
    const TVMFFIAny& value = next();
    return value.type_index == kTVMFFIFloat ? value.v_float64 : double(value.v_int64);
  }
  // Null for None.
  const Tensor* tensor() {
    const TVMFFIAny& value = next();
    if (value.type_index == kTVMFFINone) return nullptr;
    if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const Tensor*>(value.v_ptr);
    if (value.type_index != kTVMFFITensor) throw std::invalid_argument("an argument is no tensor");
    return reinterpret_cast<const Tensor*>(static_cast<const char*>(value.v_ptr) + sizeof(TVMFFIObject));
  }
  template <class T>
  T* data() {
    return sennit::Arguments::data_of<T>(tensor());
  }
  bool more() const { return at_ < count_; }

  template <class T>
  static T* data_of(const Tensor* tensor) {
    return tensor ? reinterpret_cast<T*>(static_cast<char*>(tensor->data) + tensor->byte_offset) : nullptr;
  }

 private:
  const TVMFFIAny* values_;
  int count_, at_ = 0;

  const TVMFFIAny& next() {
    if (at_ == count_) throw std::invalid_argument("too few arguments");
    return values_[at_++];
  }
};

// [rows, heads] or [rows, heads, dim].
template <class T>
static Rows<T> rows(const Tensor* tensor) {
  if (!tensor) return {};
  return {Arguments::data_of<T>(tensor), tensor->strides[0], tensor->strides[1]};
}

// [pages, slots, heads, dim], or packed [rows, heads, dim].
template <class T>
static Pool<T> pool(const Tensor* tensor) {
  const int64_t* strides = tensor->strides;
  const T* data = Arguments::data_of<T>(tensor);
  return tensor->ndim == 4 ? Pool<T>{data, strides[0], strides[1], strides[2]}
                           : Pool<T>{data, 0, strides[0], strides[1]};
}

// What tvm-ffi calls: runs a function, and reports what it throws.
template <void (*kFunction)(Arguments&)>
static int call(const TVMFFIAny* values, int32_t count) {
  try {
    Arguments arguments(values, count);
    kFunction(arguments);
    return 0;
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
    return -1;
  }
}

}  // namespace sennit

#define SENNIT_EXPORT(function)                                                                                       \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##function(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny*) { \
    return sennit::call<sennit::function>(values, count);                                                             \
  }
