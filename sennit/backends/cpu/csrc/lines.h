// Lines of keys and values, 64 bytes or so, as the narrow strand multiplies them: as floats, or as pairs of bf16 where
// the processor has dot products of them.
#pragma once

#include <algorithm>

#include "element.h"

namespace sennit {

// Elements of type T become floats, in the order that needs no shuffles.
template <class T>
struct FloatLines {
  using Lanes = f32x;
  static constexpr int kVectors = 4 / sizeof(T), kSize = W * kVectors;  // of a line
  static constexpr int kKeyVectors = kVectors;
  static constexpr int kAtOnce = 1;  // keys whose values meet a weight
  static constexpr bool kExact = true;

  // Place in a line of values of lane `lane` of vector `vector`.
  static constexpr int place(int vector, int lane) {
    return std::is_same_v<T, bf16> ? 2 * lane + vector : vector * W + lane;
  }

  // Queries as lines of keys meet them: the first `count` elements, then zeros.
  template <class Q>
  static void pack_query(const Q* from, int count, float* to) {
    for (int i = 0; i < kSize; ++i) {
      const int at = place(i / W, i % W);
      to[i] = at < count ? to_float(from[at]) : 0.f;
    }
  }
  static SENNIT_INLINE void read_key(const T* from, f32x* to) {
    if constexpr (std::is_same_v<T, bf16>) {
      const u32x raw = load_as<u32x>(from);
      to[0] = (f32x)(raw << 16);
      to[1] = (f32x)(raw & 0xffff0000u);
    } else {
      unroll<kVectors>([&](auto i) SENNIT_LAMBDA { to[i] = to_floats(from + i * W); });
    }
  }
  static SENNIT_INLINE void read_values(const T* const* rows, int at, f32x* to) { read_key(rows[0] + at, to); }

  static SENNIT_INLINE f32x multiply_add(f32x sum, f32x a, f32x b) { return sum + a * b; }

  // Weights of W keys and rows, as `multiplier` reads them: of `weights[i]`, the lanes key * R + row.
  template <int R, int N>
  static SENNIT_INLINE void store_weights(const f32x* weights, float* to) {
    unroll<N>([&](auto i) SENNIT_LAMBDA { store(to + i * W, weights[i]); });
  }
  static SENNIT_INLINE f32x multiplier(const float* weight) { return splat(*weight); }
};

#if defined(SENNIT_BF16_DOTS)
// Pairs of bf16: neighbours of a key, and the values of two keys at one place.
struct PairLines {
  using Lanes = u32x;
  static constexpr int kVectors = 2, kSize = 2 * W;
  static constexpr int kKeyVectors = 1;
  static constexpr int kAtOnce = 2;
  static constexpr bool kExact = false;

  // Unpacking interleaves halves of each quarter of a register.
  static constexpr int place(int vector, int lane) { return lane / 4 * 8 + vector * 4 + lane % 4; }

  static void pack_query(const bf16* from, int count, float* to) {
    std::memset(to, 0, kVectorBytes);
    std::memcpy(to, from, std::min(count, kSize) * sizeof(bf16));
  }
  static SENNIT_INLINE void read_key(const bf16* from, u32x* to) { to[0] = load_as<u32x>(from); }
  static SENNIT_INLINE void read_values(const bf16* const* rows, int at, u32x* to) {
    const __m512i a = load_as<__m512i>(rows[0] + at), b = load_as<__m512i>(rows[1] + at);
    to[0] = (u32x)_mm512_unpacklo_epi16(a, b);
    to[1] = (u32x)_mm512_unpackhi_epi16(a, b);
  }

  static SENNIT_INLINE f32x multiply_add(f32x sum, u32x a, u32x b) {
    return (f32x)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  // A key's weight beside that of the next one.
  template <int R, int N>
  static SENNIT_INLINE void store_weights(const f32x* weights, float* to) {
    unroll<N>([&](auto i) SENNIT_LAMBDA {
      if constexpr (R < W) {
        store(to + i * W, bf16_pairs(weights[i], shuffle_by<places::Swap<R>>(weights[i], weights[i])));
      } else if constexpr (i % 2 == 0) {
        store(to + i * W, bf16_pairs(weights[i], weights[i + 1]));
      }
    });
  }
  static SENNIT_INLINE u32x multiplier(const float* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, 4);
    return (u32x)_mm512_set1_epi32(bits);
  }
};
#endif

template <class Q, class T>
struct LinesOf {
  using Type = FloatLines<T>;
};
#if defined(SENNIT_BF16_DOTS)
template <>
struct LinesOf<bf16, bf16> {
  using Type = PairLines;
};
#endif

}  // namespace sennit
