// Linears in whole numbers: rows of activations in eight bits (int8_rows.h) and weights of at most eight, both in groups of
// 32 along K with a scale each.
//
// The product of a group is a sum of integers, exact on every instruction set; groups are added as floats in ascending
// order. A row's result therefore depends on nothing but the row.
//
// A format of such weights is a struct P, which says how a group of a panel lies in memory:
//
//   kGroupBytes, kHeaderBytes     of a group, and of the scales that it begins with
//   kIsPacked, unpack(in, out)    weights of fewer bits are made into bytes first
//   start(meta)                   where the sums of a row's group begin
//   load(header, column)          the scales of sixteen columns
//   add(total, sums, scales, meta)   the total with the sums of another group
//
// Bytes are [8 steps][64 columns][4], unsigned: the instruction multiplies unsigned by signed bytes.
#pragma once
#include "dispatch.h"
#include "gemm.h"
#include "int8_rows.h"
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kGroupSteps = kInt8Group / 4;               // four bytes of k each
constexpr int kByteGroup = kGroupSteps * kPanel * 4;      // of a panel, as bytes

// ---- sixteen sums of products of bytes --------------------------------------------------------------------------
// `Weights` is a vector of four unsigned bytes for each of sixteen columns, `Row` four signed bytes of one row.

#if defined(__AVX512F__)

#if defined(__AVX512VNNI__)
constexpr bool kAlwaysVnni = true;
#else
constexpr bool kAlwaysVnni = false;  // asked at run time
#endif

struct I16 {
  __m512i v;
};
AIOCB_INLINE I16 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
AIOCB_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

struct VnniDot {
  typedef __m512i Weights;
  typedef __m512i Row;
  static AIOCB_INLINE Weights load_weights(const char* p) { return _mm512_loadu_si512(p); }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    // Not the intrinsic: GCC 12 copies its accumulators through memory. It also serves the set compiled without VNNI.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(w), "v"(r));
    return sums;
  }
};

// Without VNNI: even and odd bytes as two sets of 16-bit numbers; pairs of products fit 32 bits.
struct PairDot {
  struct Weights {
    __m512i even, odd;
  };
  typedef Weights Row;
  static AIOCB_INLINE Weights load_weights(const char* p) {
    const __m512i raw = _mm512_loadu_si512(p);
    return {_mm512_and_si512(raw, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(raw, 8)};
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const __m512i raw = _mm512_set1_epi32(bytes);
    return {_mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 8), _mm512_srai_epi16(raw, 8)};
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(_mm512_madd_epi16(w.even, r.even),
                                                      _mm512_madd_epi16(w.odd, r.odd)))};
  }
};

#else  // parts, as in vec.h

constexpr bool kAlwaysVnni = false;
typedef int16_t VS __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VUS __attribute__((vector_size(4 * kLanes)));

struct I16 {
  VI v[kParts];
};
AIOCB_INLINE I16 set1_int(int32_t x) {
  I16 out;
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) out.v[i] = VI{} + x;
  return out;
}
AIOCB_INLINE F16 to_float(I16 a) { AIOCB_PARTS(__builtin_convertvector(a.v[i], VF)); }

#if defined(__AVX2__) || defined(__SSE2__)
AIOCB_INLINE VI multiply_pairs(VS a, VS b) {
#if defined(__AVX2__)
  return (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (VI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
struct PairDot {
  struct Weights {
    VS even[kParts], odd[kParts];
  };
  struct Row {
    VS even, odd;
  };
  static AIOCB_INLINE Weights load_weights(const char* p) {
    Weights out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
      const VI raw = *reinterpret_cast<const VIU*>(p + i * 4 * kLanes);
      out.even[i] = (VS)raw & 0xff;
      out.odd[i] = (VS)((VUS)raw >> 8);
    }
    return out;
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const VS raw = (VS)(VI{} + bytes);
    return {(raw << 8) >> 8, raw >> 8};
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i)
      sums.v[i] += multiply_pairs(w.even[i], r.even) + multiply_pairs(w.odd[i], r.odd);
    return sums;
  }
};
#else
struct PairDot {
  struct Weights {
    VI raw[kParts];
  };
  struct Row {
    int32_t bytes[4];
  };
  static AIOCB_INLINE Weights load_weights(const char* p) {
    Weights out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) std::memcpy(&out.raw[i], p + i * 4 * kLanes, 4 * kLanes);
    return out;
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    const signed char* bytes = reinterpret_cast<const signed char*>(p);
    return {{bytes[0], bytes[1], bytes[2], bytes[3]}};
  }
  // Byte j of a lane is k + j on a little-endian machine, the only kind there is an instruction set for.
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i)
      AIOCB_UNROLL for (int j = 0; j < 4; ++j) sums.v[i] += ((w.raw[i] >> (8 * j)) & 0xff) * r.bytes[j];
    return sums;
  }
};
#endif
typedef PairDot VnniDot;
#endif

// ---- tiles ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kGroupTileRows = 6;  // 6 rows x 2 vectors, as integers and as floats, leave 8 of 32 registers
#else
constexpr int kGroupTileRows = 2;
#endif

constexpr int kGroupTurn = 4;  // groups, see compute_groups

// Where a tile finds the groups of a panel: apart from their headers where weights were unpacked.
struct GroupPanel {
  const char *headers, *weights;
  int64_t weight_stride;  // from one group's to the next one's
};

// Lines asked for per group, `lines` of the four quarters of a panel: most of them step by step, the rest after it.
template <class P>
AIOCB_INLINE constexpr int rest_lines(int lines) {
  return P::kHeaderBytes / 64 * lines < 4 ? (lines ? 1 : 0) : P::kHeaderBytes / 64 * lines / 4;
}
template <class P>
AIOCB_INLINE int group_lines(int lines) {
  return lines * (P::kIsPacked ? kGroupSteps / 2 : kGroupSteps) + rest_lines<P>(lines);
}

// Groups [first, last) of `R` rows and `V * 16` columns from vector `part` on, added to `out`; `panel` begins with the
// first of them. Cache lines of `ahead` are asked for meanwhile.
template <class P, class Dot, int R, int V>
AIOCB_INLINE void compute_group_part(const char* a, int64_t a_stride, const GroupPanel& panel, int groups, int first,
                                     int last, int part, const char* ahead, int lines, float* out) {
  F16 acc[R][V];
  const Int8GroupMeta* meta[R];
  out += part * 16;
  AIOCB_UNROLL for (int r = 0; r < R; ++r) {
    meta[r] = reinterpret_cast<const Int8GroupMeta*>(a + r * a_stride + groups * kInt8Group);
    AIOCB_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = first ? load(out + r * kPanel + v * 16) : zero();
  }
  a += first * kInt8Group;
  const char *header = panel.headers, *weights = panel.weights + part * 64;
  for (int g = first; g < last; ++g) {
    I16 sums[R][V];
    AIOCB_UNROLL for (int r = 0; r < R; ++r) {
      const I16 start = set1_int(P::start(meta[r][g]));
      AIOCB_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = start;
    }
    AIOCB_UNROLL for (int step = 0; step < kGroupSteps; ++step) {
      typename Dot::Weights w[V];
      AIOCB_UNROLL for (int v = 0; v < V; ++v) w[v] = Dot::load_weights(weights + step * kPanel * 4 + v * 64);
      AIOCB_UNROLL for (int r = 0; r < R; ++r) {
        const typename Dot::Row row = Dot::load_row(a + r * a_stride + step * 4);
        AIOCB_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Dot::dot(sums[r][v], w[v], row);
      }
      if (!P::kIsPacked || step % 2 == 0) {
        for (int line = 0; line < lines; ++line) prefetch_l2(ahead + line * 64);
        ahead += lines * 64;
      }
    }
    if (lines) {
      const int rest = rest_lines<P>(lines);
      for (int line = 0; line < rest; ++line) prefetch_l2(ahead + line * 64);
      ahead += rest * 64;
    }
    typename P::Scales scales[V];
    AIOCB_UNROLL for (int v = 0; v < V; ++v) scales[v] = P::load(header, (part + v) * 16);
    AIOCB_UNROLL for (int r = 0; r < R; ++r)
      P::template add<V>(acc[r], sums[r], scales, meta[r][g]);
    a += kInt8Group;
    header += P::kGroupBytes;
    weights += panel.weight_stride;
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kPanel + v * 16, acc[r][v]);
}

template <class P>
AIOCB_INLINE void unpack_groups(const char* data, int count, char* out, const char* ahead) {
  for (int g = 0; g < count; ++g) {
    P::unpack(data + g * P::kGroupBytes + P::kHeaderBytes, out + g * kByteGroup);
    if (ahead)
      for (int line = 0; line < P::kGroupBytes; line += 64) prefetch_l2(ahead + g * P::kGroupBytes + line);
  }
}

// Registers hold the integers and the floats of a whole panel for up to three rows. For more, parts of the panel take
// turns every few groups: the weights are still read as one stream. `bytes` are the weights of packed ones, unpacked;
// without, each turn unpacks its own and asks for what comes.
template <class P, class Dot, int R>
__attribute__((noinline)) void compute_group_tile(const char* a, int64_t a_stride, const char* b, const char* bytes,
                                                  int groups, const char* ahead, int lines, float* out) {
#if defined(__AVX512F__)
  constexpr int V = R <= 3 ? 4 : 2;
#else
  constexpr int V = 1;
#endif
  constexpr int kTurns = kPanel / 16 / V;
  alignas(64) char unpacked[P::kIsPacked ? kGroupTurn * kByteGroup : 1];
  const bool unpacks = P::kIsPacked && !bytes;
  const int turn = kTurns == 1 && !unpacks ? groups : kGroupTurn;
  const int share = lines >= kTurns ? lines / kTurns : 0;
  for (int first = 0; first < groups; first += turn) {
    const int last = first + turn < groups ? first + turn : groups;
    const char* headers = b + first * P::kGroupBytes;
    GroupPanel panel = {headers, headers + P::kHeaderBytes, P::kGroupBytes};
    if constexpr (P::kIsPacked) {
      panel.weight_stride = kByteGroup;
      panel.weights = bytes + int64_t(first) * kByteGroup;
      if (unpacks) {
        unpack_groups<P>(headers, last - first, unpacked, ahead + first * P::kGroupBytes);
        panel.weights = unpacked;
      }
    }
    for (int part = 0; part < kTurns; ++part) {
      const int own = unpacks ? 0 : share ? share : part ? 0 : lines;
      compute_group_part<P, Dot, R, V>(a, a_stride, panel, groups, first, last, part * V, ahead, own, out);
      if (!unpacks) ahead += int64_t(last - first) * group_lines<P>(own) * 64;
    }
  }
}

typedef void (*GroupTile)(int rows, const char* a, int64_t a_stride, const char* b, const char* bytes, int groups,
                          const char* ahead, int lines, float* out);

template <class P, class Dot>
void compute_group_rows(int rows, const char* a, int64_t a_stride, const char* b, const char* bytes, int groups,
                        const char* ahead, int lines, float* out) {
  with_rows<kGroupTileRows>(rows, [&](auto n) {
    compute_group_tile<P, Dot, decltype(n)::value>(a, a_stride, b, bytes, groups, ahead, lines, out);
  });
}

template <class P>
GroupTile best_group_tile() {
  return kAlwaysVnni || has_vnni() ? compute_group_rows<P, VnniDot> : compute_group_rows<P, PairDot>;
}

// Where one tile of rows passes over a panel, it is a plain stream. Where several do, the panel is unpacked for all of
// them, and the next one is asked for meanwhile. See run_floats.
template <class P, class Epilogue>
AIOCB_INLINE void run_groups(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                             Epilogue& epilogue) {
  alignas(64) float sums[kGroupTileRows * kPanel];
  const GroupTile compute = best_group_tile<P>();
  const char* a = input.rows;
  const int64_t a_stride = input.stride;
  const int rows = input.count, blocks = (rows + kGroupTileRows - 1) / kGroupTileRows, groups = int8_groups(linear.depth);
  const int64_t total = int64_t(linear.panels) * blocks;
  const int64_t begin = total * lane.thread / lane.num_threads, end = total * (lane.thread + 1) / lane.num_threads;
  const int lines = blocks == 1 ? 4 : blocks < 4 ? 2 : 1;  // of the next panel, as in compute_shared
  const char* bytes = nullptr;
  for (int64_t item = begin; item < end; ++item) {
    const int panel = int(item / blocks), block = int(item % blocks);
    int first, count;
    even_block(rows, blocks, block, &first, &count);
    const char* b = linear.data + panel * linear.panel_bytes;
    if (blocks == 1) {
      const int distance = P::kIsPacked ? 2 * kGroupTurn * P::kGroupBytes
                           : count > 3  ? kGroupTurn * P::kGroupBytes : kStreamAhead;
      compute(count, a, a_stride, b, nullptr, groups, b + distance, lines, sums);
    } else {
      if (P::kIsPacked && (item == begin || block == 0)) {
        unpack_groups<P>(b, groups, lane.scratch, nullptr);
        bytes = lane.scratch;
      }
      const char* ahead = (item - block + blocks < end) ? b + linear.panel_bytes : next;
      const bool fetches = ahead != nullptr && block * lines < 4;
      compute(count, a + first * a_stride, a_stride, b, bytes, groups,
              fetches ? ahead + int64_t(block) * group_lines<P>(lines) * groups * 64 : b, fetches ? lines : 0, sums);
    }
    epilogue(first, count, panel, sums);
  }
}

// What such formats have in common; see linear.h.
template <class P>
struct GroupWeights {
  static constexpr bool kQuantizes = true;
  template <class Activations>
  static constexpr bool takes() { return true; }

  static int64_t scratch(int depth, int rows) {
    return P::kIsPacked && rows > kGroupTileRows ? int64_t(int8_groups(depth)) * kByteGroup : 0;
  }
  static int64_t row_bytes(int depth) { return int8_row_bytes(depth); }

  template <class E>
  static AIOCB_INLINE void prepare_row(const E* x, int depth, char* out) {
    quantize_row(x, depth, int8_groups(depth), out);
  }

  template <class Epilogue>
  static AIOCB_INLINE void multiply(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                                    Epilogue& epilogue) {
    run_groups<P>(linear, input, next, lane, epilogue);
  }

  // Group by group, as floats, zeros where a source ends. `values` and `importance` [32]; the latter null where all count
  // the same.
  static void pack(const Linear& linear, const PackArgs& args, int first_panel, int last_panel) {
    const int groups = int8_groups(linear.depth);
    for (int panel = first_panel; panel < last_panel; ++panel) {
      char* out = linear.data + panel * linear.panel_bytes;
      // Columns within groups: what is written stays in the nearest cache until it is whole.
      for (int g = 0; g < groups; ++g, out += P::kGroupBytes) {
        const int first = g * kInt8Group;
        const int most = linear.depth - first < kInt8Group ? linear.depth - first : kInt8Group;
        for (int column = 0; column < kPanel; ++column) {
          const char* row = args.rows[panel * kPanel + column];
          const int source = args.sources[panel * kPanel + column], count = row ? most : 0;
          if (count == kInt8Group && !args.input_scales && P::take(source, row, g, out, column)) continue;
          alignas(64) float values[kInt8Group] = {}, importance[kInt8Group] = {};
          if (count) read_source(source, row, first, count, values);
          for (int i = 0; i < count; ++i) {
            if (args.input_scales) values[i] *= args.input_scales[first + i];
            if (args.importance) importance[i] = args.importance[first + i];
          }
          P::pack(values, count && args.importance ? importance : nullptr, out, column);
        }
      }
    }
  }

  static void unpack(const Linear& linear, int column, float* out) {
    const char* group = linear.data + column / kPanel * linear.panel_bytes;
    alignas(64) float values[kInt8Group];
    for (int k = 0; k < linear.depth; ++k) {
      if (k % kInt8Group == 0) P::read(group, column % kPanel, values), group += P::kGroupBytes;
      out[k] = values[k % kInt8Group];
    }
  }

  static int64_t multiply_add(int repeats) {
    constexpr int kGroups = 4, kStride = kGroups * (kInt8Group + int(sizeof(Int8GroupMeta))) + 64;
    alignas(64) char weights[kGroups * P::kGroupBytes] = {}, bytes[kGroups * kByteGroup] = {};
    alignas(64) char rows[kGroupTileRows * kStride] = {};
    alignas(64) float sums[kGroupTileRows * kPanel];
    const GroupTile compute = best_group_tile<P>();
    for (int i = 0; i < repeats; ++i)
      compute(kGroupTileRows, rows, kStride, weights, bytes, kGroups, weights, 0, sums);
    return int64_t(repeats) * kGroupTileRows * kPanel * kGroups * kInt8Group;
  }
};

}  // namespace AIOCB_ISA
}  // namespace aiocb
