// Products of a wide tile on vector registers: queries in lanes, keys and values as operands that are broadcast.
//
// Lanes hold 32-bit units along the dimension that is summed: one float, or a pair of bf16 for machines with dot
// products of pairs. Scores are K Q^T and outputs V^T P^T, so that maxima, sums and rescaling are vertical, and keys of
// the unit's type are read in place, in the order in which they lie.
#pragma once

#include "keys.h"
#include "scratch.h"

namespace sennit {

struct FloatUnits {
  static constexpr int kSize = 1;  // elements of a unit
  static SENNIT_INLINE f32x multiply_add(f32x sum, uint32_t a, u32x b) {
    float value;
    std::memcpy(&value, &a, 4);
    return value * (f32x)b + sum;
  }
};

struct PairUnits {
  static constexpr int kSize = 2;
  static SENNIT_INLINE f32x multiply_add(f32x sum, uint32_t a, u32x b) {
#if defined(SENNIT_BF16_DOTS)
    return (f32x)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
#else
    (void)a, (void)b;
    return sum;
#endif
  }
};

// Vectors of rows of a panel, V in what follows: by the number of registers, or one where there are few rows.
constexpr int kMostVectors = W == 8 ? 2 : 4;
// Keys, or columns of values, of a register tile: so many that its sums, kTileKeys * V, are enough independent chains
// to hide the latency of a multiply-add. AVX2 has half as many registers as the others.
template <int V>
constexpr int kTileKeys = std::min(8, (W == 8 ? 8 : 16) / V);
constexpr int kColumns = 16;  // columns of values that are packed together

// W units of a row in their order: floats, or pairs of bf16.
template <class T>
static SENNIT_INLINE u32x load_units(const T* from, std::integral_constant<int, 1>) {
  return (u32x)to_floats(from);
}
static SENNIT_INLINE u32x load_units(const bf16* from, std::integral_constant<int, 2>) { return load_as<u32x>(from); }

// The same where `count` elements are left of the row; zeros come after them.
template <class T, int kUnit>
static SENNIT_INLINE u32x load_units(const T* from, int count, std::integral_constant<int, kUnit> unit) {
  if (count >= W * kUnit) return load_units(from, unit);
  alignas(kVectorBytes) T copy[W * kUnit] = {};
  if (count > 0) std::memcpy(copy, from, count * sizeof(T));
  return load_units(copy, unit);
}

// Queries [rows, dim] as [units, V * W]; rows past `count` are zero. `flip` changes their sign.
template <int kUnit, int V, class Q>
static void pack_queries(uint32_t* packed, const Q* const* rows, int count, int dim, int units, bool flip) {
  const uint32_t sign = !flip ? 0 : kUnit == 2 ? 0x80008000u : 0x80000000u;
  for (int vector = 0; vector < V; ++vector) {
    const Q* const* const q = rows + vector * W;
    const bool whole = count >= (vector + 1) * W;
    for (int unit = 0; unit < units; unit += W) {
      const int left = dim - unit * kUnit;
      u32x block[W];
      if (whole && left >= W * kUnit) {
        unroll<W>([&](auto i) SENNIT_LAMBDA {
          block[i] = load_units(q[i] + unit * kUnit, std::integral_constant<int, kUnit>{});
        });
      } else {
        for (int i = 0; i < W; ++i)
          block[i] = vector * W + i < count
                         ? load_units(q[i] + unit * kUnit, left, std::integral_constant<int, kUnit>{})
                         : u32x{};
      }
      transpose(block);
      uint32_t* to = packed + (int64_t(unit) * V + vector) * W;
      const int wanted = units - unit;
      unroll<W>([&](auto i) SENNIT_LAMBDA {
        if (i < wanted) store(to + i * V * W, block[i] ^ sign);
      });
    }
  }
}

// Scores of `count` keys (a multiple of kTileKeys<V>) and a panel's rows.
template <class Units, int V>
static void multiply_keys(const uint32_t* queries, const uint32_t* const* keys, int count, int units, float* scores) {
  constexpr int kSummed = 256;  // units that are added up one after the other, since rounding grows with their number
  constexpr int kTile = kTileKeys<V>;
  for (int key = 0; key < count; key += kTile) {
    const uint32_t* a[kTile];
    unroll<kTile>([&](auto m) SENNIT_LAMBDA { a[m] = keys[key + m]; });
    float* const at = scores + key * V * W;
    for (int begin = 0; begin < units; begin += kSummed) {
      f32x sums[kTile * V] = {};
      for (int unit = begin; unit < std::min(begin + kSummed, units); ++unit) {
        u32x b[V];
        unroll<V>([&](auto j) SENNIT_LAMBDA { b[j] = load(queries + (unit * V + j) * W); });
        unroll<kTile>([&](auto m) SENNIT_LAMBDA {
          uint32_t value;
          std::memcpy(&value, a[m] + unit, 4);
          unroll<V>([&](auto j) SENNIT_LAMBDA { sums[m * V + j] = Units::multiply_add(sums[m * V + j], value, b[j]); });
        });
      }
      unroll<kTile * V>([&](auto i) SENNIT_LAMBDA { store(at + i * W, begin ? load(at + i * W) + sums[i] : sums[i]); });
    }
  }
}

// Adds values times weights to a panel's outputs [dim, V * W].
// Values are packed [dim / kColumns][stride][kColumns], weights [units, V * W].
template <class Units, int V>
static void multiply_values(const uint32_t* values, int64_t stride, const uint32_t* weights, int units, int dim,
                            float* outputs) {
  constexpr int kTile = kTileKeys<V>;
  for (int d = 0; d < dim; d += kTile) {
    f32x sums[kTile * V] = {};  // of this block alone, since rounding grows with what a sum has reached
    float* at = outputs + int64_t(d) * V * W;
    const uint32_t* a = values + (d / kColumns * stride) * kColumns + d % kColumns;
    for (int unit = 0; unit < units; ++unit, a += kColumns) {
      u32x b[V];
      unroll<V>([&](auto j) SENNIT_LAMBDA { b[j] = load(weights + (unit * V + j) * W); });
      unroll<kTile>([&](auto m) SENNIT_LAMBDA {
        unroll<V>([&](auto j) SENNIT_LAMBDA { sums[m * V + j] = Units::multiply_add(sums[m * V + j], a[m], b[j]); });
      });
    }
    unroll<kTile * V>([&](auto i) SENNIT_LAMBDA { store(at + i * W, load(at + i * W) + sums[i]); });
  }
}

// What the wide strand needs of a way to multiply.
template <class T, class Units, int V>
struct VectorProducts {
  static constexpr int kVectors = V;
  static constexpr int kUnit = Units::kSize;
  static constexpr int kKeyRound = kTileKeys<V>;  // scores are computed for multiples of so many keys
  static constexpr int kBlockKeys = 128;
  static constexpr int kScoreKeys = 64;  // so that they and a panel's queries stay in the first-level cache
  static constexpr bool kInPlace = std::is_same_v<T, float> || kUnit == 2;

  int dim_qk, dim_vo;
  int units, columns;       // of queries and keys, and of values, padding included
  uint32_t* staged_keys;    // [kBlockKeys, units]
  uint32_t* packed_values;  // [columns / kColumns][kBlockKeys / kUnit][kColumns]
  const uint32_t* rows[kBlockKeys];

  VectorProducts(int dim_qk, int dim_vo)
      : dim_qk(dim_qk), dim_vo(dim_vo), units((dim_qk + kUnit - 1) / kUnit),
        columns((dim_vo + kColumns - 1) / kColumns * kColumns) {}

  void place(Scratch& scratch) {
    staged_keys = scratch.take<uint32_t>(size_t(kBlockKeys) * (units + W));
    packed_values = scratch.take<uint32_t>(size_t(columns) * kBlockKeys / kUnit);
  }
  void begin() {}
  void end() {}

  // Keys and values of a KV head; what is past `count`, up to a multiple of kKeyRound, is zeros.
  void take(const T* const* k, const T* const* v, int count) {
    const int round = (count + kKeyRound - 1) / kKeyRound * kKeyRound;
    take_keys(k, round);
    take_values(v, round);
  }

  void take_keys(const T* const* k, int round) {
    for (int key = 0; key < round; ++key) {
      if (kInPlace && dim_qk % kUnit == 0) {
        rows[key] = reinterpret_cast<const uint32_t*>(k[key]);
        continue;
      }
      uint32_t* to = staged_keys + int64_t(key) * units;
      rows[key] = to;
      for (int unit = 0; unit < units; unit += W)  // the last store may pass the row's end; the next row comes later
        store(to + unit,
              load_units(k[key] + unit * kUnit, dim_qk - unit * kUnit, std::integral_constant<int, kUnit>{}));
    }
  }

  void take_values(const T* const* v, int round) {
    constexpr int64_t kStride = kBlockKeys / kUnit;
    for (int key = 0; key < round; key += kUnit) {
      uint32_t* to = packed_values + key / kUnit * kColumns;
      for (int d = 0; d < columns; d += W) {
        u32x packed = load_values(v[key] + d, dim_vo - d);
        if constexpr (kUnit == 2) packed = packed >> 16 | load_values(v[key + 1] + d, dim_vo - d);
        store(to + d / kColumns * kStride * kColumns + d % kColumns, packed);
      }
    }
  }

  // Scores of `count` keys from number `begin` of the block on.
  void scores(const uint32_t* queries, int begin, int count, float* scores) const {
    multiply_keys<Units, V>(queries, rows + begin, count, units, scores);
  }

  // Adds the block's values from number `begin` on times their weights to a panel's outputs.
  void accumulate(const uint32_t* weights, int begin, int count, float* outputs) const {
    multiply_values<Units, V>(packed_values + begin / kUnit * kColumns, kBlockKeys / kUnit,
                              weights + begin / kUnit * (V * W), count / kUnit, columns, outputs);
  }

 private:
  static SENNIT_INLINE u32x load_values(const T* from, int count) {
    return load_units(from, count, std::integral_constant<int, 1>{});  // as floats: a bf16 is its upper half
  }
};

}  // namespace sennit
