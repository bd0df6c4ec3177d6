// Choice of tokens and log-probabilities without a full sort; one row is one piece of work and depends on nothing else.
//
// The semantics are those of aiocb/sampling (truncation.py, selection.py): the order is value down, then id up; weights
// of candidates are doubles, added in that order; a draw from the whole vocabulary first finds a block of 256 ids.
//
//   row ─ maximum, NaN ─┬─ argmax
//                       ├─ whole: weights by block ─ block ─ token
//                       └─ truncated: threshold ─ candidates >= threshold ─ radix sort ─ prefix that is kept ─ token
//
// A threshold is exact or low enough: the k-th largest of group maxima for top-k, the log-weight for min-p, and for
// top-p the highest of a few steps that holds enough mass. No templates of the standard library here: see vec.h.
#pragma once
#include <math.h>

#include "model.h"
#include "pool.h"
#include "selection.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {
namespace {

constexpr int kBlock = 256;
constexpr int kSmallVocabulary = 1024;  // one block
constexpr int kSortAll = 768;           // below this everything is a candidate
constexpr int kSteps = 8;               // thresholds of top-p
constexpr float kStepWidth = 1.5f;      // in units of the temperature
constexpr float kHighest = 3.40282347e38f;
constexpr float kMinusInfinity = -__builtin_inff();

// ---- lanes ------------------------------------------------------------------------------------------------------

AIOCB_INLINE uint32_t lanes_at_least(F16 a, F16 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a.v[0], (__m256)b.v[0], _CMP_GE_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a.v[1], (__m256)b.v[1], _CMP_GE_OQ))) << 8;
#else
  float x[16], y[16];
  store(x, a), store(y, b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint32_t(x[i] >= y[i]) << i;
  return mask;
#endif
}

AIOCB_INLINE F16 load_filled(const float* x, int64_t left) {
  if (left >= 16) return load(x);
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < left ? x[i] : kMinusInfinity;
  return load(lanes);
}

// The largest value; `has_nan` is exact, the value is meaningless with it.
struct Extremes {
  float largest;
  bool has_nan;
};
AIOCB_INLINE Extremes scan(const float* x, int64_t n) {
  F16 best[4], odd[4];
  for (int k = 0; k < 4; ++k) best[k] = set1(kMinusInfinity), odd[k] = zero();
  const F16 infinity = set1(__builtin_inff()), one = set1(1.0f);
  auto take = [&](int k, F16 value) {
    odd[k] = select_less(value, infinity, odd[k], one);  // NaN or +inf
    best[k] = max(best[k], value);
  };
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    AIOCB_UNROLL for (int k = 0; k < 4; ++k) take(k, load(x + i + k * 16));
  for (; i < n; i += 16) take(0, load_filled(x + i, n - i));
  Extremes out = {reduce_max(max(max(best[0], best[1]), max(best[2], best[3]))), false};
  if (reduce_add(odd[0] + odd[1] + odd[2] + odd[3]) > 0.0f) {
    out.largest = kMinusInfinity;
    for (i = 0; i < n; ++i) {
      out.has_nan |= x[i] != x[i];
      out.largest = x[i] > out.largest ? x[i] : out.largest;
    }
  }
  return out;
}

AIOCB_INLINE int64_t first_at_least(const float* x, int64_t n, float value) {
  const F16 wanted = set1(value);
  for (int64_t i = 0; i < n; i += 16)
    if (const uint32_t mask = lanes_at_least(load_filled(x + i, n - i), wanted)) return i + __builtin_ctz(mask);
  return n - 1;
}

// ---- weights in float: exp((x - largest) / divisor) ---------------------------------------------------------------

template <bool kDivides>
AIOCB_INLINE F16 shifted(F16 x, F16 largest, F16 divisor) {
  const F16 difference = x - largest;
  return kDivides ? difference / divisor : difference;  // a division by one changes nothing
}

// Sums of blocks in float, their total in double; `masses[s]` is the mass of all values not below step s.
template <bool kDivides, bool kHasMasses>
double weigh_as(const float* x, int64_t n, float largest, float divisor, float* sums, float* masses) {
  const F16 top = set1(largest), by = set1(divisor);
  F16 mass[kSteps];
  for (int s = 0; s < kSteps; ++s) mass[s] = zero();
  double total = 0.0;
  for (int64_t base = 0, block = 0; base < n; base += kBlock, ++block) {
    const int64_t end = base + kBlock < n ? base + kBlock : n;
    F16 sum[2] = {zero(), zero()};
    for (int64_t i = base; i < end; i += 16) {
      const F16 z = shifted<kDivides>(load_filled(x + i, n - i), top, by);
      const F16 weight = exp(z);
      sum[(i >> 4) & 1] = sum[(i >> 4) & 1] + weight;
      if (kHasMasses)
        for (int s = 0; s < kSteps; ++s)
          mass[s] = mass[s] + select_less(z, set1(-kStepWidth * float(s + 1)), zero(), weight);
    }
    const float value = reduce_add(sum[0] + sum[1]);
    if (sums) sums[block] = value;
    total += double(value);
  }
  if (kHasMasses)
    for (int s = 0; s < kSteps; ++s) masses[s] = reduce_add(mass[s]);
  return total;
}

AIOCB_INLINE double weigh(const float* x, int64_t n, float largest, float divisor, float* sums, float* masses) {
  if (divisor == 1.0f)
    return masses ? weigh_as<false, true>(x, n, largest, divisor, sums, masses)
                  : weigh_as<false, false>(x, n, largest, divisor, sums, masses);
  return masses ? weigh_as<true, true>(x, n, largest, divisor, sums, masses)
                : weigh_as<true, false>(x, n, largest, divisor, sums, masses);
}

AIOCB_INLINE float divisor_of(double temperature) {
  return float(temperature < 1e-30 ? 1e-30 : temperature > 1e30 ? 1e30 : temperature);
}

// u * total, but below total: a draw never runs off the end.
AIOCB_INLINE double target_of(double uniform, double total) {
  const double target = uniform * total, below = ::nextafter(total, 0.0);
  return target < below ? target : below;
}

int64_t draw_whole(const float* x, int64_t n, float largest, double temperature, double uniform, char* scratch) {
  const float divisor = divisor_of(temperature);
  float* sums = reinterpret_cast<float*>(scratch);
  int64_t first = 0, count = n;
  double share = uniform;
  if (n >= kSmallVocabulary) {
    const double total = weigh(x, n, largest, divisor, sums, nullptr), target = target_of(uniform, total);
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    double cumulative = 0.0, before = 0.0;
    int64_t block = 0;
    for (;; ++block) {
      before = cumulative;
      cumulative += double(sums[block]);
      if (cumulative > target || block == blocks - 1) break;
    }
    share = (uniform * total - before) / double(sums[block]);
    share = share < 0.0 ? 0.0 : share > 1.0 ? 1.0 : share;
    first = block * kBlock;
    count = n - first < kBlock ? n - first : kBlock;
  }
  float weights[kSmallVocabulary];
  const F16 top = set1(largest), by = set1(divisor);
  for (int64_t i = 0; i < count; i += 16)
    store(weights + i, exp(shifted<true>(load_filled(x + first + i, n - first - i), top, by)));
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += double(weights[i]);
  const double target = target_of(share, total);
  double cumulative = 0.0;
  for (int64_t i = 0; i < count; ++i)
    if ((cumulative += double(weights[i])) > target) return first + i;
  return first + count - 1;
}

// ---- candidates ---------------------------------------------------------------------------------------------------

// Integers that sort by value (down), then by id (up).
AIOCB_INLINE uint64_t key_of(float value, int64_t id) {
  int32_t bits;
  value += 0.0f;  // one zero of two
  std::memcpy(&bits, &value, 4);
  return uint64_t(uint32_t(~(bits ^ ((bits >> 31) & 0x7fffffff))) ^ 0x80000000u) << 32 | uint64_t(uint32_t(id));
}
AIOCB_INLINE float value_of(uint64_t key) {
  int32_t bits = int32_t(~(uint32_t(key >> 32) ^ 0x80000000u));
  bits ^= (bits >> 31) & 0x7fffffff;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
AIOCB_INLINE int64_t id_of(uint64_t key) { return int64_t(key & 0xffffffffu); }

struct Plain {
  AIOCB_INLINE F16 operator()(F16 x) const { return x; }
};
struct Logarithm {  // of the softmax
  F16 largest, divisor, log_total;
  AIOCB_INLINE F16 operator()(F16 x) const { return (x - largest) / divisor - log_total; }
};

// All values >= threshold that are not -inf, in the order of their ids; returns how many.
template <class Transform>
int64_t collect(const float* x, int64_t n, float threshold, Transform transform, uint64_t* keys) {
  const F16 wanted = set1(threshold > -kHighest ? threshold : -kHighest);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const F16 values = transform(load_filled(x + i, n - i));
    uint32_t mask = lanes_at_least(values, wanted);
    if (!mask) continue;
    float lanes[16];
    store(lanes, values);
    for (; mask; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      keys[count++] = key_of(lanes[lane], i + lane);
    }
  }
  return count;
}

// Ascending, given that equal values come in the order of their ids (a stable sort of the upper halves).
uint64_t* sort_keys(uint64_t* keys, uint64_t* other, int64_t n) {
  if (n <= 40) {
    for (int64_t i = 1; i < n; ++i) {
      const uint64_t key = keys[i];
      int64_t j = i;
      for (; j > 0 && keys[j - 1] > key; --j) keys[j] = keys[j - 1];
      keys[j] = key;
    }
    return keys;
  }
  uint32_t counts[4][256] = {};
  for (int64_t i = 0; i < n; ++i)
    for (int d = 0; d < 4; ++d) ++counts[d][(keys[i] >> (32 + 8 * d)) & 255];
  for (int d = 0; d < 4; ++d) {
    const int shift = 32 + 8 * d;
    uint32_t* count = counts[d];
    if (int64_t(count[(keys[0] >> shift) & 255]) == n) continue;
    uint32_t start = 0;
    for (int i = 0; i < 256; ++i) {
      const uint32_t size = count[i];
      count[i] = start;
      start += size;
    }
    for (int64_t i = 0; i < n; ++i) other[count[(keys[i] >> shift) & 255]++] = keys[i];
    uint64_t* swap = keys;
    keys = other, other = swap;
  }
  return keys;
}

// The k-th largest (k from 1) of `values`, which are reordered (Hoare's selection).
float kth_largest(float* values, int64_t n, int64_t k) {
  int64_t low = 0, high = n - 1;
  const int64_t wanted = k - 1;
  while (low < high) {
    const float a = values[low], b = values[low + (high - low) / 2], c = values[high];
    const float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
    int64_t i = low, j = high;
    while (i <= j) {
      while (values[i] > pivot) ++i;
      while (values[j] < pivot) --j;
      if (i <= j) {
        const float swap = values[i];
        values[i++] = values[j];
        values[j--] = swap;
      }
    }
    if (wanted <= j) high = j;
    else if (wanted >= i) low = i;
    else break;
  }
  return values[wanted];
}

// A value that at least k values of the row reach: the k-th largest of the maxima of groups (lanes of a run of vectors).
float reached_by(const float* x, int64_t n, int64_t k, float* maxima) {
  const int64_t vectors = (n + 15) / 16;
  if (4 * k > n || n <= kSortAll) return kMinusInfinity;
  int64_t run = vectors * 2 / k;
  run = run < 1 ? 1 : run > 64 ? 64 : run;
  int64_t groups = 0;
  for (int64_t base = 0; base < vectors; base += run, groups += 16) {
    const int64_t end = base + run < vectors ? base + run : vectors;
    F16 best[2] = {set1(kMinusInfinity), set1(kMinusInfinity)};
    for (int64_t i = base; i < end; ++i) best[i & 1] = max(best[i & 1], load_filled(x + i * 16, n - i * 16));
    store(maxima + groups, max(best[0], best[1]));
  }
  return groups < k ? kMinusInfinity : kth_largest(maxima, groups, k);
}

// ---- truncation -----------------------------------------------------------------------------------------------------

struct Scratch {
  uint64_t *keys, *other;
  double* weights;
  float *row, *maxima;
  char* start;
  Scratch(char* memory, int64_t n) : start(memory) {
    keys = reinterpret_cast<uint64_t*>(memory);
    other = keys + n;
    weights = reinterpret_cast<double*>(other + n);
    maxima = reinterpret_cast<float*>(weights + n);
    row = maxima + n + 1024;
  }
};

// What truncation leaves, most likely first: `keys` and `weights` [count], and the sum of the weights.
struct Kept {
  const uint64_t* keys;
  const double* weights;
  int64_t count;
  double total;
};

Kept truncate(const float* x, int64_t n, float largest, const SelectArgs& a, int64_t row, const Scratch& scratch) {
  const double temperature = a.temperature[row], top_p = a.top_p[row], log_min_p = a.log_min_p[row];
  const int64_t top_k = a.top_k[row];
  const bool has_p = top_p < 1.0, has_min = log_min_p > -__builtin_inf();
  auto log_weight = [&](uint64_t key) { return (double(value_of(key)) - double(largest)) / temperature; };
  float threshold = kMinusInfinity;
  double whole = 0.0;
  if (top_k > 0) threshold = reached_by(x, n, top_k, scratch.maxima);
  if (has_min) {
    const double reach = temperature * log_min_p, slack = 1e-6 * (::fabs(double(largest)) + ::fabs(reach));
    const double floor = double(largest) + reach - slack;
    if (floor > double(threshold)) threshold = float(floor);
  }
  if (has_p && !top_k && !has_min && n > kSortAll) {
    float masses[kSteps];
    whole = weigh(x, n, largest, divisor_of(temperature), nullptr, masses);
    for (int s = 0; s < kSteps; ++s)
      if (double(masses[s]) >= top_p * whole * (1.0 + 1e-4)) {
        threshold = float(double(largest) - temperature * double(kStepWidth) * double(s + 1));
        break;
      }
  }
  for (;; threshold = kMinusInfinity) {
    const bool has_all = !(threshold >= -kHighest);
    int64_t count = collect(x, n, threshold, Plain{}, scratch.keys);
    const uint64_t* keys = sort_keys(scratch.keys, scratch.other, count);
    const bool is_open = !has_all && whole > 0.0;  // what is no candidate counts, too
    if (top_k > 0 && count >= top_k) {             // whatever equals the k-th value stays
      const float kth = value_of(keys[top_k - 1]);
      int64_t end = top_k;
      while (end < count && value_of(keys[end]) == kth) ++end;
      count = end;
    }
    double total = 0.0;
    int64_t kept = 0;
    for (; kept < count; ++kept) {
      const double logarithm = log_weight(keys[kept]);
      if (!(logarithm >= log_min_p)) break;
      const double weight = ::exp(logarithm), cumulative = total + weight;
      if (is_open && kept > 0 && !(cumulative - weight < top_p * whole)) break;
      scratch.weights[kept] = weight;
      total = cumulative;
    }
    if (is_open && kept == count) continue;  // the nucleus is wider than the candidates
    if (has_p && !is_open) {
      double cumulative = 0.0;
      for (int64_t i = 0; i < kept; ++i) {
        const double weight = scratch.weights[i], next = cumulative + weight;
        if (i > 0 && !(next - weight < top_p * total)) kept = i;
        else cumulative = next;
      }
      total = cumulative;
    }
    return {keys, scratch.weights, kept, total};
  }
}

int64_t draw(const Kept& kept, double uniform) {
  const double target = target_of(uniform, kept.total);
  double cumulative = 0.0;
  for (int64_t i = 0; i < kept.count; ++i)
    if ((cumulative += kept.weights[i]) > target) return id_of(kept.keys[i]);
  return kept.count ? id_of(kept.keys[kept.count - 1]) : 0;
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// A processor may force a token with +inf, and inf - inf would be NaN: such a row is worked on as a copy.
AIOCB_INLINE const float* bounded(const float* x, int64_t n, float* largest, float* copy) {
  if (*largest <= kHighest) return x;
  for (int64_t i = 0; i < n; ++i) copy[i] = x[i] > kHighest ? kHighest : x[i];
  *largest = kHighest;
  return copy;
}

int64_t choose(const SelectArgs& a, int64_t row, const float* x, const Scratch& scratch) {
  const int64_t n = a.vocab;
  const Extremes extremes = scan(x, n);
  if (extremes.has_nan) return kInvalidRow;
  float largest = extremes.largest;
  if (!(largest > kMinusInfinity)) return kEmptyRow;
  if (a.kinds[row] == kArgmax) return first_at_least(x, n, largest);
  x = bounded(x, n, &largest, scratch.row);
  if (a.kinds[row] == kWhole) return draw_whole(x, n, largest, a.temperature[row], a.uniforms[row], scratch.start);
  return draw(truncate(x, n, largest, a, row, scratch), a.uniforms[row]);
}

void put_top(const SelectArgs& a, int64_t row, int64_t at, int64_t id, double value) {
  a.top_ids[row * a.width + at] = id;
  a.top_values[row * a.width + at] = value;
}

void log_probabilities(const SelectArgs& a, int64_t row, const float* x, const Scratch& scratch) {
  const int64_t n = a.vocab, token = a.tokens[row], wanted = a.num_top[row] < n ? a.num_top[row] : n;
  const double minus_infinity = -__builtin_inf();
  for (int64_t i = 0; i < a.width; ++i) put_top(a, row, i, 0, minus_infinity);
  const Extremes extremes = scan(x, n);
  a.chosen[row] = minus_infinity;
  a.ranks[row] = 0;
  if (extremes.has_nan || !(extremes.largest > kMinusInfinity)) return;
  float largest = extremes.largest;
  x = bounded(x, n, &largest, scratch.row);
  int64_t above = 0, found = 0;
  if (a.kinds[row] == kTruncated) {
    const Kept kept = truncate(x, n, largest, a, row, scratch);
    const double log_total = ::log(kept.total);
    auto value_at = [&](int64_t i) {
      return (double(value_of(kept.keys[i])) - double(largest)) / a.temperature[row] - log_total;
    };
    for (int64_t i = 0; i < kept.count; ++i)
      if (id_of(kept.keys[i]) == token && kept.weights[i] > 0.0) a.chosen[row] = value_at(i);
    for (int64_t i = 0; i < kept.count && kept.weights[i] > 0.0; ++i) {
      above += value_at(i) > a.chosen[row];
      if (found < wanted) put_top(a, row, found++, id_of(kept.keys[i]), value_at(i));
    }
    a.ranks[row] = above + 1;
    return;
  }
  const double temperature = a.temperature ? a.temperature[row] : 1.0;
  const float divisor = divisor_of(temperature > 0.0 ? temperature : 1.0);
  const float log_total = float(::log(weigh(x, n, largest, divisor, nullptr, nullptr)));
  const Logarithm logarithm = {set1(largest), set1(divisor), set1(log_total)};
  auto one = [&](float value) { return (value - largest) / divisor - log_total; };
  if (token >= 0 && token < n) {
    const float value = one(x[token]);
    a.chosen[row] = double(value);
    // Ranks and order are those of the rounded results. Greater: not (value >= it); the filling of the last vector is not.
    const F16 mine = set1(value);
    for (int64_t i = 0; i < n; i += 16)
      above += 16 - __builtin_popcount(lanes_at_least(mine, logarithm(load_filled(x + i, n - i))));
  } else {
    above = n;
  }
  a.ranks[row] = above + 1;
  if (!wanted) return;
  const float reached = reached_by(x, n, wanted, scratch.maxima);
  const float threshold = reached > kMinusInfinity ? one(reached) : kMinusInfinity;
  const int64_t count = collect(x, n, threshold, logarithm, scratch.keys);
  const uint64_t* keys = sort_keys(scratch.keys, scratch.other, count);
  for (; found < wanted && found < count; ++found)
    put_top(a, row, found, id_of(keys[found]), double(value_of(keys[found])));
}

void select(const SelectArgs* args, Pool* pool, Lane lane) {
  const SelectArgs& a = *args;
  const Scratch scratch(lane.scratch, (a.vocab + 15) / 16 * 16);
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved & ~0x8040u);  // steps flush denormals; here a denormal logit is not equal to zero
#endif
  for (int n; (n = pool_next(pool, 0)) < a.num_rows;) {
    if (a.kinds[n] == kSkip) continue;
    const float* x = a.logits + (a.rows ? a.rows[n] : int64_t(n)) * a.stride;
    if (a.mode == kChoose) a.ids[n] = choose(a, n, x, scratch);
    else log_probabilities(a, n, x, scratch);
  }
#if defined(__x86_64__)
  _mm_setcsr(saved);
#endif
}

}  // namespace
}  // namespace AIOCB_ISA
}  // namespace aiocb
