// Memory of one thread, kept from launch to launch.
#pragma once

#include <cstdlib>

#include "simd.h"

namespace sennit {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Room for `bytes`, aligned to cache lines, with what it held before lost.
  void reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (!data_) std::abort();  // as PyTorch's own kernels end where memory does
    }
    used_ = 0;
  }

  // The next `count` elements of what was reserved.
  template <class T>
  T* take(size_t count) {
    T* at = reinterpret_cast<T*>(data_ + used_);
    used_ += bytes_of<T>(count);
    return at;
  }

  template <class T>
  static size_t bytes_of(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace sennit
