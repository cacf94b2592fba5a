// Elementary functions of W floats, to 1.5 units in the last place (tanh to 2.5), at special values as in the C
// library.
#pragma once

#include "simd.h"

namespace sennit {

constexpr float kLn2High = 0x1.63p-1f,
                kLn2Low = -2.12194440e-4f;  // their sum is ln 2; few bits, so that products are exact

// Lane by lane: compilers make vector instructions of what has one, and calls of the C library of the rest.
template <class Result, class Function, class... Vectors>
static SENNIT_INLINE Result lanes(Function function, Vectors... vectors) {
  Result result;
  for (int lane = 0; lane < W; ++lane) result[lane] = function(vectors[lane]...);
  return result;
}

// a * b + c, rounded once where there is an instruction for that, also where the compiler is told not to contract.
static SENNIT_INLINE f32x multiply_add(f32x a, f32x b, f32x c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return lanes<f32x>([](float x, float y, float z) { return __builtin_fmaf(x, y, z); }, a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial at x; coefficients from the highest power down.
template <class... Rest>
static SENNIT_INLINE f32x polynomial(f32x x, float first, Rest... rest) {
  f32x value = splat(first);
  ((value = multiply_add(value, x, splat(rest))), ...);
  return value;
}

// At most `high` and at least `low`; NaN stays.
static SENNIT_INLINE f32x limited(f32x x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

struct Rounded {
  f32x value;
  i32x integer;
};

// The nearest integer, for |x| < 2 ** 22.
static SENNIT_INLINE Rounded rounded(f32x x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the integer in the low bits
  const f32x shifted = x + kRound;
  return {shifted - kRound, (i32x)((u32x)shifted - (u32x)splat(kRound))};
}

// 2 ** n for -126 <= n <= 127.
static SENNIT_INLINE f32x power_of_two(i32x n) { return (f32x)((u32x)(n + 127) << 23); }

// exp(r) - 1 for |r| <= ln(2) / 2; the polynomial is the minimax one of its degree.
static SENNIT_INLINE f32x expm1_near_0(f32x r) {
  return multiply_add(r * r, polynomial(r, 1.3898391e-3f, 8.3666863e-3f, 4.1666862e-2f, 1.6666543e-1f, 0.5f), r);
}

// The rest of x beyond n * ln(2).
static SENNIT_INLINE f32x beyond_ln2(f32x x, f32x n) {
  return multiply_add(n, splat(-kLn2Low), multiply_add(n, splat(-kLn2High), x));
}

// exp(r) * 2 ** n in two steps, since 2 ** n itself may be too large or small.
static SENNIT_INLINE f32x scaled_exp(f32x r, i32x n) {
  const i32x half = n >> 1;
  return (expm1_near_0(r) + 1.f) * power_of_two(half) * power_of_two(n - half);
}

static SENNIT_INLINE f32x exp(f32x x) {
  x = limited(x, -104.f, 89.f);  // beyond them it is 0 or infinity
  const Rounded n = rounded(x * 0x1.715476p0f);
  return scaled_exp(beyond_ln2(x, n.value), n.integer);
}

static SENNIT_INLINE f32x exp2(f32x x) {
  x = limited(x, -151.f, 129.f);
  const Rounded n = rounded(x);
  return scaled_exp((x - n.value) * 0x1.62e43p-1f, n.integer);
}

static SENNIT_INLINE f32x tanh(f32x x) {
  const u32x sign = (u32x)x & 0x80000000;
  // Of |x|: u / (u + 2) with u = exp(2 |x|) - 1, which loses no digits near 0, and is 1 from 9.02 on.
  const f32x magnitude = (f32x)((u32x)x ^ sign);
  const f32x twice = 2.f * (magnitude > 10.f ? splat(10.f) : magnitude);
  const Rounded n = rounded(twice * 0x1.715476p0f);
  const f32x scale = power_of_two(n.integer);
  const f32x u = multiply_add(expm1_near_0(beyond_ln2(twice, n.value)), scale, scale - 1.f);
  return (f32x)((u32x)(u / (u + 2.f)) ^ sign);
}

// x is (1 + fraction) * 2 ** exponent with 1 + fraction between sqrt(1/2) and sqrt(2).
struct Split {
  f32x fraction, exponent;
};

static SENNIT_INLINE Split split(f32x x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3;
  const i32x subnormal = x < 0x1p-126f;
  const u32x bits = (u32x)(subnormal ? x * 0x1p23f : x) - kRootHalf;
  const i32x exponent = ((i32x)bits >> 23) - (subnormal & 23);
  return {(f32x)((bits & 0x7fffff) + kRootHalf) - 1.f, __builtin_convertvector(exponent, f32x)};
}

// log(1 + f) - f, by the polynomial of Cephes' logf.
static SENNIT_INLINE f32x log1p_beyond(f32x f) {
  const f32x square = f * f;
  const f32x cubic =
      polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                 -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  return multiply_add(square, splat(-0.5f), square * f * cubic);
}

// A logarithm's value where x is 0, infinite, negative or NaN.
static SENNIT_INLINE f32x at_limits(f32x logarithm, f32x x) {
  constexpr float kInf = __builtin_inff();
  logarithm = x == kInf ? splat(kInf) : logarithm;
  return x > 0.f ? logarithm : x == 0.f ? splat(-kInf) : splat(__builtin_nanf(""));
}

static SENNIT_INLINE f32x log(f32x x) {
  const Split s = split(x);
  const f32x low = multiply_add(s.exponent, splat(kLn2Low), log1p_beyond(s.fraction));
  return at_limits(multiply_add(s.exponent, splat(kLn2High), low + s.fraction), x);
}

static SENNIT_INLINE f32x log2(f32x x) {
  constexpr float kLog2EBeyond1 = 0x1.c551dap-2f;  // log2(e) - 1
  const Split s = split(x);
  const f32x beyond = log1p_beyond(s.fraction);
  const f32x low = multiply_add(s.fraction, splat(kLog2EBeyond1), beyond * kLog2EBeyond1) + beyond;
  return at_limits(low + s.fraction + s.exponent, x);
}

}  // namespace sennit
