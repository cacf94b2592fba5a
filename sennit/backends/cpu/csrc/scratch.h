// Memory of one thread, kept from launch to launch.
#pragma once

#include <cstdlib>

#include "simd.h"

namespace sennit {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Calls place(scratch), which takes what it needs and touches nothing of it: a second time if there was too little.
  // What was in memory before is lost.
  template <class Place>
  void arrange(Place&& place) {
    used_ = 0;
    place(*this);
    if (used_ <= size_) return;
    std::free(data_);
    size_ = (used_ + kPage - 1) / kPage * kPage;
    data_ = static_cast<char*>(std::aligned_alloc(kPage, size_));
    if (!data_) std::abort();  // as PyTorch's own kernels end where memory does
    used_ = 0;
    place(*this);
  }

  // The next `count` elements, from the beginning of a cache line on.
  template <class T>
  T* take(size_t count) {
    T* at = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(data_) + used_);
    used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    return at;
  }

 private:
  static constexpr size_t kLine = 64, kPage = 4096;

  char* data_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace sennit
