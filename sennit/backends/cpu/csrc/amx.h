// Products of a wide tile on the matrix registers of AMX, which hold 16 rows of 64 bytes.
//
// An instruction adds A [16, 32] times B to C [16, 16] floats, where A lies row by row and B as pairs of its rows: keys
// in place are A of the scores, transposed values A of the outputs, and panels of queries and weights are B as they
// are.
#pragma once

#include "products.h"
#include "scratch.h"

namespace sennit {

#if defined(SENNIT_AMX)
static_assert(W == 16);

template <class T, int V>
struct MatrixProducts {
  static constexpr int kVectors = V;
  static constexpr int kUnit = 2;
  static constexpr int kTiles = 4 / V;  // of keys, or columns of values, at once: four tiles of sums in all
  static constexpr int kKeyRound = V == 1 ? 64 : 32;
  static constexpr int kBlockKeys = 256;
  static constexpr int kScoreKeys = kKeyRound;  // so that they and a panel's queries stay in the first-level cache
  static constexpr int kTileRows = 16, kTileUnits = 16, kTileBytes = 64;
  static constexpr int kColumnRound = V == 1 ? 64 : 32;

  int dim_qk, dim_vo;
  int units, columns;
  uint32_t* staged_keys;    // [kBlockKeys, units]
  uint32_t* packed_values;  // [columns / 16][kBlockKeys / 32][16 columns, 16 pairs of keys]
  const void* keys[kBlockKeys / kTileRows];
  int64_t key_stride[kBlockKeys / kTileRows];  // bytes

  MatrixProducts(int dim_qk, int dim_vo)
      : dim_qk(dim_qk), dim_vo(dim_vo), units((dim_qk + 31) / 32 * kTileUnits),
        columns((dim_vo + kColumnRound - 1) / kColumnRound * kColumnRound) {}

  void place(Scratch& scratch) {
    staged_keys = scratch.take<uint32_t>(size_t(kBlockKeys) * units);
    packed_values = scratch.take<uint32_t>(size_t(columns) * kBlockKeys / kUnit);
  }

  // The registers are configured while an item runs, and given back after it: others in this thread use them too.
  void begin() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = kTileBytes, config.rows[i] = kTileRows;
    _tile_loadconfig(&config);
  }
  void end() { _tile_release(); }

  void take(const T* const* k, const T* const* v, int count) {
    const int round = (count + kKeyRound - 1) / kKeyRound * kKeyRound;
    take_keys(k, round);
    for (int key = 0; key < round; key += 32)
      for (int d = 0; d < columns; d += 32) pack_values(v + key, key / 32, d);
  }

  void take_keys(const T* const* k, int round) {
    for (int key = 0; key < round; key += kTileRows) find_keys(k + key, key / kTileRows);
  }

  // Scores of `count` keys from number `begin` of the block on.
  void scores(const uint32_t* queries, int begin, int count, float* scores) const {
    compiler_fence();
    for (int key = 0; key < count; key += kTiles * kTileRows) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      const int group = (begin + key) / kTileRows;
      for (int unit = 0; unit < units; unit += kTileUnits) {
        const auto from = [&](int tile)
                              SENNIT_LAMBDA { return static_cast<const char*>(keys[group + tile]) + unit * 4; };
        const auto stride = [&](int tile) SENNIT_LAMBDA { return key_stride[group + tile]; };
        multiply_add(from, stride, queries + unit * kPanelRows);
      }
      store_sums(scores + key * kPanelRows);
    }
    compiler_fence();
  }

  // Adds the block's values from number `begin` on times their weights to a panel's outputs.
  void accumulate(const uint32_t* weights, int begin, int count, float* outputs) const {
    compiler_fence();
    for (int d = 0; d < columns; d += kTiles * kTileRows) {
      float* to = outputs + int64_t(d) * kPanelRows;
      _tile_loadd(0, to, kPanelBytes);
      _tile_loadd(1, to + kStep, kPanelBytes);
      _tile_loadd(2, to + 2 * kStep, kPanelBytes);
      _tile_loadd(3, to + 3 * kStep, kPanelBytes);
      for (int key = begin; key < begin + count; key += 32) {
        const uint32_t* values = packed_values + d / kTileRows * kPerColumns + key / 32 * kTile;
        const auto from = [&](int tile) SENNIT_LAMBDA { return values + tile * kPerColumns; };
        multiply_add(from, [](int) SENNIT_LAMBDA { return kTileBytes; }, weights + key / 2 * kPanelRows);
      }
      store_sums(to);
    }
    compiler_fence();
  }

 private:
  static constexpr int kPanelRows = V * W, kPanelBytes = kPanelRows * 4, kTile = kTileRows * kTileUnits;
  static constexpr int kPerColumns = kBlockKeys / 32 * kTile;        // units of 16 packed columns
  static constexpr int kStep = V == 1 ? kTileRows * kPanelRows : W;  // floats from one tile of sums to the next
  static_assert(V == 1 || V == 4);

  // Adds to the four sums: one tile times four of a panel, or four tiles times one.
  template <class From, class Stride>
  static SENNIT_INLINE void multiply_add(From&& from, Stride&& stride, const uint32_t* b) {
    if constexpr (V == 1) {
      _tile_loadd(7, b, kPanelBytes);
      _tile_loadd(4, from(0), stride(0));
      _tile_loadd(5, from(1), stride(1));
      _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(6, from(2), stride(2));
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(4, from(3), stride(3));
      _tile_dpbf16ps(2, 6, 7);
      _tile_dpbf16ps(3, 4, 7);
    } else {
      _tile_loadd(4, from(0), stride(0));
      _tile_loadd(5, b, kPanelBytes);
      _tile_loadd(6, b + W, kPanelBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(7, b + 2 * W, kPanelBytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, b + 3 * W, kPanelBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 4, 5);
    }
  }

  static SENNIT_INLINE void store_sums(float* to) {
    _tile_stored(0, to, kPanelBytes);
    _tile_stored(1, to + kStep, kPanelBytes);
    _tile_stored(2, to + 2 * kStep, kPanelBytes);
    _tile_stored(3, to + 3 * kStep, kPanelBytes);
  }

  // 16 keys: in place where they lie evenly, otherwise copied.
  void find_keys(const T* const* k, int group) {
    const intptr_t stride = reinterpret_cast<intptr_t>(k[1]) - reinterpret_cast<intptr_t>(k[0]);
    bool even = dim_qk % 32 == 0;
    for (int i = 2; i < kTileRows; ++i)
      even &= reinterpret_cast<intptr_t>(k[i]) - reinterpret_cast<intptr_t>(k[i - 1]) == stride;
    keys[group] = k[0];
    key_stride[group] = stride;
    if (even) return;
    uint32_t* to = staged_keys + int64_t(group) * kTileRows * units;
    keys[group] = to;
    key_stride[group] = int64_t(units) * 4;
    for (int i = 0; i < kTileRows; ++i)
      for (int unit = 0; unit < units; unit += W)
        store(to + int64_t(i) * units + unit,
              load_units(k[i] + unit * 2, dim_qk - unit * 2, std::integral_constant<int, 2>{}));
  }

  // 32 keys of 32 columns, turned so that a column's pairs of keys are a row.
  void pack_values(const T* const* v, int group, int d) {
    u32x even[W], odd[W];
    const auto pair = [&](auto j, u32x a, u32x b) SENNIT_LAMBDA {
      even[j] = (a & 0xffffu) | b << 16;
      odd[j] = a >> 16 | (b & 0xffff0000u);
    };
    constexpr std::integral_constant<int, 2> kPairs;
    if (dim_vo - d >= 32) {
      unroll<W>([&](auto j)
                    SENNIT_LAMBDA { pair(j, load_units(v[2 * j] + d, kPairs), load_units(v[2 * j + 1] + d, kPairs)); });
    } else {
      for (int j = 0; j < W; ++j)
        pair(j, load_units(v[2 * j] + d, dim_vo - d, kPairs), load_units(v[2 * j + 1] + d, dim_vo - d, kPairs));
    }
    transpose(even);
    transpose(odd);
    uint32_t* to = packed_values + d / 16 * kPerColumns + group * kTile;
    unroll<W>([&](auto i) SENNIT_LAMBDA {
      uint32_t* row = to + (i >= W / 2) * kPerColumns + 2 * i % W * kTileUnits;
      store(row, even[i]);
      store(row + kTileUnits, odd[i]);
    });
  }
};
#endif

// How the wide strand multiplies elements of Q and T.
template <class Q, class T, int V>
struct ChooseProducts {
  using type = VectorProducts<T, FloatUnits, V>;
};
#if defined(SENNIT_AMX)
template <int V>
struct ChooseProducts<bf16, bf16, V> {
  using type = MatrixProducts<bf16, V>;
};
#elif defined(SENNIT_BF16_DOTS)
template <int V>
struct ChooseProducts<bf16, bf16, V> {
  using type = VectorProducts<bf16, PairUnits, V>;
};
#endif

}  // namespace sennit
