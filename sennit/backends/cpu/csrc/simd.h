// Vectors of W 32-bit lanes on the compiler's vector extensions; intrinsics where compilers miss the instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SENNIT_INLINE inline __attribute__((always_inline))
#define SENNIT_LAMBDA __attribute__((always_inline))

namespace sennit {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SENNIT_AVX512
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SENNIT_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

constexpr int kVectorBytes = 4 * W;

typedef float f32x __attribute__((vector_size(kVectorBytes)));
typedef int32_t i32x __attribute__((vector_size(kVectorBytes)));
typedef uint32_t u32x __attribute__((vector_size(kVectorBytes)));
typedef uint16_t u16x __attribute__((vector_size(kVectorBytes / 2)));

// Calls `body` with the constants 0 to N-1: arrays indexed by them stay in registers, which unrolling loops does not
// ensure.
template <int N, class Body>
static SENNIT_INLINE void unroll(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      SENNIT_LAMBDA { (body(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

template <class Vector>
static SENNIT_INLINE Vector load_as(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
static SENNIT_INLINE f32x load(const float* from) { return load_as<f32x>(from); }
static SENNIT_INLINE i32x load(const int32_t* from) { return load_as<i32x>(from); }
static SENNIT_INLINE u32x load(const uint32_t* from) { return load_as<u32x>(from); }
template <class Vector>
static SENNIT_INLINE void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

static SENNIT_INLINE f32x splat(float value) { return value - f32x{}; }
static SENNIT_INLINE i32x splat(int32_t value) { return value - i32x{}; }
static SENNIT_INLINE u32x splat(uint32_t value) { return value - u32x{}; }

// The larger; b where one is NaN.
static SENNIT_INLINE f32x max(f32x a, f32x b) {
#if defined(SENNIT_AVX512)
  return (f32x)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(SENNIT_AVX2)
  return (f32x)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// x * factor, which stays finite where x is.
static SENNIT_INLINE f32x multiply_finite(f32x x, float factor) {
  const f32x most = splat(std::numeric_limits<float>::max()), product = x * factor;
  const f32x above = (product > most) & (x <= most) ? most : product;
  return (product < -most) & (x >= -most) ? -most : above;
}

static SENNIT_INLINE bool any(i32x mask) {
#if defined(SENNIT_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(SENNIT_AVX2)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  int32_t bits = 0;
  for (int lane = 0; lane < W; ++lane) bits |= mask[lane];
  return bits != 0;
#endif
}

// Lanes of a and b by constant places: place p is a[p], or b[p - W] from W on.
template <class Vector, int... Places>
static SENNIT_INLINE Vector shuffle(Vector a, Vector b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Places...);
#else
  return __builtin_shuffle(a, b, i32x{Places...});
#endif
}

// The same, place i being Place::at(i).
template <class Place, class Vector>
static SENNIT_INLINE Vector shuffle_by(Vector a, Vector b) {
  return [&]<int... I>(std::integer_sequence<int, I...>)
             SENNIT_LAMBDA { return shuffle<Vector, Place::at(I)...>(a, b); }(std::make_integer_sequence<int, W>{});
}

namespace places {
// Keeps lanes of `a` whose bit S is clear, and puts the like lanes of `b` beside them.
template <int S>
struct Low {
  static constexpr int at(int i) { return i & S ? W + i - S : i; }
};
template <int S>
struct High {
  static constexpr int at(int i) { return i & S ? W + i : i + S; }
};
template <int S>
struct Swap {
  static constexpr int at(int i) { return i ^ S; }
};
}  // namespace places

// rows[i][j] becomes rows[j][i], for W vectors.
template <class Vector>
static SENNIT_INLINE void transpose(Vector* rows) {
  auto stage = [&](auto s) SENNIT_LAMBDA {
    constexpr int S = s;
    unroll<(S < W ? W : 0)>([&](auto i) SENNIT_LAMBDA {
      if constexpr ((i & S) == 0) {
        const Vector a = rows[i], b = rows[i + S];
        rows[i] = shuffle_by<places::Low<S>>(a, b);
        rows[i + S] = shuffle_by<places::High<S>>(a, b);
      }
    });
  };
  stage(std::integral_constant<int, 1>{});
  stage(std::integral_constant<int, 2>{});
  stage(std::integral_constant<int, 4>{});
  stage(std::integral_constant<int, 8>{});
}

// The vector whose lane i is the sum of the lanes of sums[i], for W vectors, which are overwritten.
static SENNIT_INLINE f32x sum_lanes(f32x* sums) {
  auto stage = [&](auto s) SENNIT_LAMBDA {
    constexpr int S = s;
    unroll<(S < W ? W : 0)>([&](auto i) SENNIT_LAMBDA {
      if constexpr (i % (2 * S) == 0)
        sums[i] = shuffle_by<places::Low<S>>(sums[i], sums[i + S]) + shuffle_by<places::High<S>>(sums[i], sums[i + S]);
    });
  };
  stage(std::integral_constant<int, 1>{});
  stage(std::integral_constant<int, 2>{});
  stage(std::integral_constant<int, 4>{});
  stage(std::integral_constant<int, 8>{});
  return sums[0];
}

// Every lane becomes the largest, or the sum, of those whose places agree modulo R.
template <int R>
static SENNIT_INLINE f32x max_strided(f32x v) {
  if constexpr (R < W) {
    v = max(v, shuffle_by<places::Swap<R>>(v, v));
    return max_strided<2 * R>(v);
  }
  return v;
}
template <int R>
static SENNIT_INLINE f32x sum_strided(f32x v) {
  if constexpr (R < W) {
    v += shuffle_by<places::Swap<R>>(v, v);
    return sum_strided<2 * R>(v);
  }
  return v;
}

// 2 ** y for y < 127, and 0 for -inf. The polynomials are minimax ones: relative errors are 8e-5, which rounding to
// bfloat16 hides, or, if `exact`, 8e-8.
template <bool kExact>
static SENNIT_INLINE f32x exp2_below(f32x y) {
#if defined(SENNIT_AVX512)
  const f32x x = (f32x)_mm512_reduce_ps((__m512)y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // y - floor(y)
  f32x p;
  if constexpr (kExact) {
    p = 2.170225548e-4f * x + 1.243968782e-3f;
    p = p * x + 9.678840997e-3f;
    p = p * x + 5.548334198e-2f;
    p = p * x + 2.402298363e-1f;
    p = p * x + 6.931469838e-1f;
    p = p * x + 1.f;
  } else {
    p = 7.802452263e-2f * x + 2.260671554e-1f;
    p = p * x + 6.958335405e-1f;
    p = p * x + 9.999252186e-1f;
  }
  return (f32x)_mm512_scalef_ps((__m512)p, (__m512)y);  // times 2 ** floor(y)
#else
  constexpr float kRound = 12582912.f;  // 1.5 * 2 ** 23: adding it rounds to an integer, in the low bits
  const f32x bounded = max(splat(-126.f), y), shifted = bounded + kRound, x = bounded - (shifted - kRound);
  f32x p;
  if constexpr (kExact) {
    p = 1.534581202e-4f * x + 1.339993122e-3f;
    p = p * x + 9.618488957e-3f;
    p = p * x + 5.550328777e-2f;
    p = p * x + 2.402264689e-1f;
    p = p * x + 6.931472057e-1f;
    p = p * x + 1.f;
  } else {
    p = 5.517166905e-2f * x + 2.426111222e-1f;
    p = p * x + 6.932609855e-1f;
    p = p * x + 9.999280735e-1f;
  }
  const f32x power = (f32x)((u32x)p + ((u32x)shifted << 23));
  return y < -126.f ? f32x{} : power;
#endif
}

static SENNIT_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
static SENNIT_INLINE void prefetch_to_l2(const void* address) { __builtin_prefetch(address, 0, 2); }

// What assembler statements read and write is not known to compilers, which may move loads and stores past them.
static SENNIT_INLINE void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace sennit
