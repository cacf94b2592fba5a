// Element types of queries, keys and values, and their conversion to and from float.
#pragma once

#include <type_traits>

#include "simd.h"

namespace sennit {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static SENNIT_INLINE float to_float(float x) { return x; }
static SENNIT_INLINE float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static SENNIT_INLINE float to_float(f16 x) {
  // Subnormals, infinity and NaN included: the exponent is moved by a product, which is exact.
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= uint32_t(x.bits & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// W elements in their order as floats.
static SENNIT_INLINE f32x to_floats(const float* from) { return load(from); }
static SENNIT_INLINE f32x to_floats(const bf16* from) {
  return (f32x)(__builtin_convertvector(load_as<u16x>(from), u32x) << 16);
}
static SENNIT_INLINE f32x to_floats(const f16* from) {
#if defined(SENNIT_AVX512)
  return (f32x)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(SENNIT_AVX2)
  return (f32x)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  f32x values;
  for (int lane = 0; lane < W; ++lane) values[lane] = to_float(from[lane]);
  return values;
#endif
}

// The first `count` of W elements, then zeros; nothing past them is read.
template <class T>
static SENNIT_INLINE f32x to_floats(const T* from, int count) {
  alignas(kVectorBytes) T copy[W] = {};
  std::memcpy(copy, from, count * sizeof(T));
  return to_floats(copy);
}

// Rounded to nearest, ties to even.
static SENNIT_INLINE void from_float(float x, float& to) { to = x; }
static SENNIT_INLINE void from_float(float x, bf16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to.bits = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static SENNIT_INLINE void from_float(float x, f16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  uint32_t half;
  if (bits > 0x7f800000) {
    half = 0x7e00;
  } else if (bits >= 0x477ff000) {  // 65520 and more rounds to infinity
    half = 0x7c00;
  } else if (bits < 0x38800000) {  // below 2 ** -14: adding 0.5 leaves the subnormal's bits at the end
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&half, &shifted, 4);
    half -= 0x3f000000;
  } else {
    half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  to.bits = uint16_t(sign | half);
}

// W floats as elements, rounded to nearest.
static SENNIT_INLINE void from_floats(f32x from, float* to) { store(to, from); }
static SENNIT_INLINE void from_floats(f32x from, bf16* to) {
  const u32x bits = (u32x)from, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const u32x nan = bits >> 16 | 0x40u;
  store(to, __builtin_convertvector(from == from ? rounded : nan, u16x));
}
static SENNIT_INLINE void from_floats(f32x from, f16* to) {
#if defined(SENNIT_AVX512)
  store(to, _mm512_cvtps_ph((__m512)from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(SENNIT_AVX2)
  store(to, _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < W; ++lane) from_float(from[lane], to[lane]);
#endif
}

// Pairs of bf16 of two vectors of floats, rounded to nearest (ties away from zero); a is below b.
static SENNIT_INLINE u32x bf16_pairs(f32x a, f32x b) {
  return ((u32x)a + 0x8000u) >> 16 | (((u32x)b + 0x8000u) & 0xffff0000u);
}

// `count` floats, times a factor, as elements.
template <class T>
static SENNIT_INLINE void scale_row(const float* from, float factor, T* to, int count) {
  int i = 0;
  for (; i + W <= count; i += W) from_floats(load(from + i) * factor, to + i);
  for (; i < count; ++i) from_float(from[i] * factor, to[i]);
}

}  // namespace sennit
