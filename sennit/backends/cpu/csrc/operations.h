// The operations of expression graphs (sennit/variants/nodes.py) on W lanes.
//
// A lane's value is kept as one of four types, whatever its dtype: bools (0 or -1) and integers of up to 32 bits as
// int32, int64, float32 (float16 and bfloat16 too, rounded after every operation), and float64.
#pragma once

#include "element.h"
#include "functions.h"
#include "graph.h"

namespace sennit {

typedef int64_t i64x __attribute__((vector_size(8 * W)));
typedef uint64_t u64x __attribute__((vector_size(8 * W)));
typedef double f64x __attribute__((vector_size(8 * W)));

template <class Vector>
using LaneOf = std::remove_cvref_t<decltype(Vector{}[0])>;
template <class Vector>
constexpr bool kIsFloat = std::is_floating_point_v<LaneOf<Vector>>;
template <class Vector>
constexpr bool kIsWide =
    sizeof(Vector) > kVectorBytes;  // two registers: compilers do worse with whole-vector operators
template <class Vector>
using UnsignedOf = std::conditional_t<kIsWide<Vector>, u64x, u32x>;

template <class Vector>
static SENNIT_INLINE Vector splat(LaneOf<Vector> value) {
  return value - Vector{};
}

// Comparisons and choices.

template <class Test, class Vector>
static SENNIT_INLINE i32x compare(Test test, Vector a, Vector b) {
  if constexpr (kIsWide<Vector>)
    return lanes<i32x>([=](auto x, auto y) { return -int32_t(test(x, y)); }, a, b);
  else
    return test(a, b);
}
template <class Vector>
static SENNIT_INLINE i32x equal(Vector a, Vector b) {
  return compare([](auto x, auto y) { return x == y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE i32x unequal(Vector a, Vector b) {
  return compare([](auto x, auto y) { return x != y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE i32x less(Vector a, Vector b) {
  return compare([](auto x, auto y) { return x < y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE i32x at_most(Vector a, Vector b) {
  return compare([](auto x, auto y) { return x <= y; }, a, b);
}

template <class Vector>
static SENNIT_INLINE Vector select(i32x condition, Vector a, Vector b) {
  if constexpr (kIsWide<Vector>)
    return lanes<Vector>([](int32_t c, auto x, auto y) { return c ? x : y; }, condition, a, b);
  else
    return condition ? a : b;
}

// NaN if either is.
template <class Vector>
static SENNIT_INLINE Vector minimum(Vector a, Vector b) {
  return lanes<Vector>([](auto x, auto y) { return x < y || x != x ? x : y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE Vector maximum(Vector a, Vector b) {
  return lanes<Vector>([](auto x, auto y) { return x > y || x != x ? x : y; }, a, b);
}

// Arithmetic. Integers wrap around.

template <class Operation, class Vector>
static SENNIT_INLINE Vector wrapping(Operation operation, Vector a, Vector b) {
  if constexpr (kIsFloat<Vector>)
    return operation(a, b);
  else
    return (Vector)operation((UnsignedOf<Vector>)a, (UnsignedOf<Vector>)b);
}
template <class Vector>
static SENNIT_INLINE Vector add(Vector a, Vector b) {
  return wrapping([](auto x, auto y) { return x + y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE Vector subtract(Vector a, Vector b) {
  return wrapping([](auto x, auto y) { return x - y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE Vector multiply(Vector a, Vector b) {
  return wrapping([](auto x, auto y) { return x * y; }, a, b);
}
template <class Vector>
static SENNIT_INLINE Vector negative(Vector a) {
  if constexpr (kIsFloat<Vector>)
    return -a;
  else
    return subtract(Vector{}, a);
}
template <class Vector>
static SENNIT_INLINE Vector absolute(Vector a) {
  if constexpr (kIsFloat<Vector>)
    return (Vector)((UnsignedOf<Vector>)a & (~UnsignedOf<Vector>{}[0] >> 1));
  else
    return maximum(a, negative(a));
}

// Integer division toward minus infinity, of any integers: 0 divides like 1.
template <class Integer>
static SENNIT_INLINE Integer floor_quotient(Integer a, Integer b) {
  if (b == 0) return a;
  if (b == -1) return Integer(-std::make_unsigned_t<Integer>(a));
  const Integer quotient = a / b;
  return quotient - ((a % b != 0) & ((a < 0) != (b < 0)));
}
// By float64, which has instructions for vectors; its quotients of int32 round to no other integer.
static SENNIT_INLINE int32_t floor_quotient(int32_t a, int32_t b) {
  const double quotient = __builtin_floor(double(a) / (b == 0 || b == -1 ? 1 : b));
  return b == -1 ? int32_t(-uint32_t(a)) : int32_t(quotient);
}
template <class Vector>
static SENNIT_INLINE Vector floor_divide(Vector a, Vector b) {
  return lanes<Vector>([](auto x, auto y) { return floor_quotient(x, y); }, a, b);
}
template <int64_t Divisor, class Vector>
static SENNIT_INLINE Vector floor_divide_by(Vector a) {
  using Integer = LaneOf<Vector>;
  if constexpr (Divisor > 0 && (Divisor & (Divisor - 1)) == 0)
    return lanes<Vector>([](Integer x) { return x >> __builtin_ctzll(Divisor); }, a);
  else
    return lanes<Vector>([](Integer x) { return floor_quotient<Integer>(x, Divisor); }, a);
}

// a - b * floor(a / b).
template <class Vector>
static SENNIT_INLINE Vector modulo(Vector a, Vector b) {
  if constexpr (kIsFloat<Vector>) {
    return lanes<Vector>(
        [](auto x, auto y) {
          const auto rest = LaneOf<Vector>(__builtin_fmod(x, y));
          return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
        },
        a, b);
  } else {
    return subtract(a, multiply(b, floor_divide(a, b)));
  }
}
template <int64_t Divisor, class Vector>
static SENNIT_INLINE Vector modulo_by(Vector a) {
  return subtract(a, multiply(splat<Vector>(Divisor), floor_divide_by<Divisor>(a)));
}

// Functions of the C library; those of float32 that functions.h lacks are computed in float64 and rounded.

template <class Vector>
static SENNIT_INLINE Vector sqrt(Vector a) {
  return lanes<Vector>([](double x) { return LaneOf<Vector>(__builtin_sqrt(x)); }, a);
}
template <class Vector>
static SENNIT_INLINE Vector floor(Vector a) {
  return lanes<Vector>([](double x) { return LaneOf<Vector>(__builtin_floor(x)); }, a);
}
template <class Vector>
static SENNIT_INLINE Vector sin(Vector a) {
  return lanes<Vector>([](double x) { return LaneOf<Vector>(__builtin_sin(x)); }, a);
}
template <class Vector>
static SENNIT_INLINE Vector cos(Vector a) {
  return lanes<Vector>([](double x) { return LaneOf<Vector>(__builtin_cos(x)); }, a);
}
template <class Vector>
static SENNIT_INLINE Vector pow(Vector a, Vector b) {
  return lanes<Vector>([](double x, double y) { return LaneOf<Vector>(__builtin_pow(x, y)); }, a, b);
}
static SENNIT_INLINE f64x exp(f64x a) {
  return lanes<f64x>([](double x) { return __builtin_exp(x); }, a);
}
static SENNIT_INLINE f64x exp2(f64x a) {
  return lanes<f64x>([](double x) { return __builtin_exp2(x); }, a);
}
static SENNIT_INLINE f64x log(f64x a) {
  return lanes<f64x>([](double x) { return __builtin_log(x); }, a);
}
static SENNIT_INLINE f64x log2(f64x a) {
  return lanes<f64x>([](double x) { return __builtin_log2(x); }, a);
}
static SENNIT_INLINE f64x tanh(f64x a) {
  return lanes<f64x>([](double x) { return __builtin_tanh(x); }, a);
}

// Conversions.

static SENNIT_INLINE i32x number_of(i32x truth) { return truth & 1; }
template <class Vector>
static SENNIT_INLINE i32x truth_of(Vector a) {
  return unequal(a, Vector{});
}

// Between the four types. Floats that the integer cannot hold give its largest or smallest value.
template <class To, class Vector>
static SENNIT_INLINE To convert(Vector a) {
  if constexpr (kIsFloat<Vector> && !kIsFloat<To>) {
    using Integer = LaneOf<To>;
    using Float = LaneOf<Vector>;
    constexpr double kEnd = sizeof(Integer) == 4 ? 0x1p31 : 0x1p63;
    constexpr double kStep = kEnd * (sizeof(Float) == 4 ? 0x1p-24 : 0x1p-53);  // of floats below kEnd
    constexpr Float kFirst = -kEnd, kLast = kEnd - (kStep < 1 ? 1 : kStep);
    return lanes<To>(
        [](Float x) {
          x = x < kLast ? x : kLast;
          return Integer(x > kFirst ? x : kFirst);
        },
        a);
  } else {
    return __builtin_convertvector(a, To);
  }
}

// What int8, int16 or uint8 keep of an int32.
template <class Narrow>
static SENNIT_INLINE i32x wrapped(i32x a) {
  constexpr int kDropped = 32 - 8 * sizeof(Narrow);
  const u32x high = (u32x)a << kDropped;
  if constexpr (std::is_signed_v<Narrow>)
    return (i32x)high >> kDropped;
  else
    return (i32x)(high >> kDropped);
}

// The nearest bfloat16 or float16, ties to even.
template <class Half>
static SENNIT_INLINE f32x rounded_to(f32x x) {
  const u32x bits = (u32x)x, magnitude = bits & 0x7fffffff;
  constexpr int kDropped = std::is_same_v<Half, bf16> ? 16 : 13;
  constexpr uint32_t kRest = (1u << kDropped) - 1;
  u32x rounded = (magnitude + kRest / 2 + (magnitude >> kDropped & 1)) & ~kRest;
  if constexpr (std::is_same_v<Half, f16>) {
    // Steps of subnormals are those of the floats beside 0.5.
    const f32x subnormal = ((f32x)magnitude + 0.5f) - 0.5f;
    rounded = magnitude < 0x38800000 ? (u32x)subnormal : rounded;
    rounded = magnitude < 0x477ff000 ? rounded : 0x7f800000 - u32x{};  // 65520 and more
  }
  return x == x ? (f32x)(rounded | (bits ^ magnitude)) : x;
}

// Elements of captured tensors.

// How far from its first element an index along a dimension leads: negative ones count from the end, and all are
// clamped.
template <class Vector>
static SENNIT_INLINE i64x offset(Vector index, const GraphCapture& capture, int dimension) {
  const int64_t size = capture.sizes[dimension], stride = capture.strides[dimension];
  return lanes<i64x>(
      [=](int64_t i) {
        i = i < 0 ? i + size : i;
        i = i < size - 1 ? i : size - 1;
        return (i > 0 ? i : 0) * stride;
      },
      index);
}

template <class Element>
using VectorOf = std::conditional_t<std::is_same_v<Element, double>, f64x,
                                    std::conditional_t<std::is_same_v<Element, int64_t>, i64x,
                                                       std::conditional_t<std::is_integral_v<Element>, i32x, f32x>>>;

template <class Element>
static SENNIT_INLINE VectorOf<Element> gather(const GraphCapture& capture, i64x offsets) {
  constexpr bool kIsBool = std::is_same_v<Element, bool>;
  const auto* data = static_cast<const std::conditional_t<kIsBool, uint8_t, Element>*>(capture.data);
  return lanes<VectorOf<Element>>(
      [=](int64_t at) {
        if constexpr (kIsBool)
          return -int32_t(data[at] != 0);
        else if constexpr (std::is_same_v<Element, f16> || std::is_same_v<Element, bf16>)
          return to_float(data[at]);
        else
          return data[at];
      },
      offsets);
}

}  // namespace sennit
