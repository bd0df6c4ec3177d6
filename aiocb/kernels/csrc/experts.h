// Mixture of experts: every row passes k of E experts, chosen by a router.
//
// The T * k pairs (row, choice) are put in the order of their experts, rows ascending, so that the rows of an expert
// lie together: they are gathered, multiplied and left where they are, and each row adds up its k results in the order of
// its choices. Who else chose an expert changes no result, because that of a linear's row depends on the row alone.
//
//   choices of T = 3 rows, k = 2:   row 0: C A   row 1: A B   row 2: C A
//   places of the T * k pairs:      A of rows 0 1 2 | B of row 1 | C of rows 0 2
//
// Each thread sorts all pairs for itself: that costs less than the barrier it would take to do it once.
#pragma once
#include <cmath>

#include "linear.h"
#include "model.h"
#include "rows.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

// The k best of a row's scores, the lower id among equals, and their shares of the softmax: over all experts, or over
// the chosen ones. NaN spoils every weight of the row; the ids are valid whatever the scores are.
inline void choose_experts(const Config& c, const float* scores, int32_t* chosen, float* weights) {
  const int k = c.num_chosen;
  int size = 0;
  bool has_nan = false;
  for (int e = 0; e < c.num_experts; ++e) {
    const float score = scores[e];
    has_nan |= score != score;
    if (size == k && !(score > weights[k - 1])) continue;
    int at = size < k ? size++ : k - 1;
    for (; at > 0 && score > weights[at - 1]; --at) weights[at] = weights[at - 1], chosen[at] = chosen[at - 1];
    weights[at] = score, chosen[at] = e;
  }
  const F16 peak = set1(weights[0]);
  const float* counted = c.is_renormalised ? weights : scores;
  const int count = c.is_renormalised ? k : c.num_experts;
  F16 sum = zero();
  for (int i = 0; i < count; i += 16)
    sum = sum + keep_lanes(exp(load_part(counted + i, count - i) - peak), 0, count - i, 0.0f);
  const F16 scale = set1(has_nan ? __builtin_nanf("") : 1.0f / reduce_add(sum));
  for (int i = 0; i < k; i += 16)
    store_part(weights + i, exp(load_part(weights + i, k - i) - peak) * scale, k - i);
}

// Route a share of the rows, which this thread has normed. Router scores beyond the experts are gates: their sigmoid is
// left in place.
template <class F>
AIOCB_INLINE void route_rows(const Model& model, const Experts& experts, const Share& share, const Lane& lane) {
  const int first = share.begin, last = share.end;
  if (first >= last) return;
  const Config& c = model.config;
  const Buffers& b = model.buffers;
  float* scores = b.router_scores + first * b.router_stride;
  StoreEpilogue keep = {scores, b.router_stride, experts.router.columns, nullptr};
  run_linear<F>(experts.router, {b.normed + first * b.hidden_stride, b.hidden_stride, last - first}, nullptr,
                {0, 1, lane.scratch}, keep);
  for (int row = first; row < last; ++row, scores += b.router_stride) {
    choose_experts(c, scores, b.chosen_experts + int64_t(row) * c.num_chosen,
                   b.expert_weights + int64_t(row) * c.num_chosen);
    for (int i = c.num_experts; i < experts.router.columns; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  }
}

// One layer's experts as one thread works on them; between two calls all threads have to meet.
template <class F>
class Mixture {
 public:
  typedef typename F::Element E;
  Mixture(const Model& model, const Experts& experts, int num_tokens, const Lane& lane)
      : c_(model.config), b_(model.buffers), experts_(experts), num_pairs_(num_tokens * model.config.num_chosen),
        lane_(lane), share_(share_of(num_pairs_, lane)) {
    begins_ = b_.expert_places + lane.thread * b_.expert_places_stride;
    places_ = begins_ + c_.num_experts + 1;
    pairs_ = places_ + num_pairs_;
  }

  bool is_quantized() const { return experts_.down[0].quantized != nullptr; }

  // Sort all pairs, and bring this thread's part of them where their expert reads them.
  void gather() const {
    sort();
    record();
    for (int place = share_.begin; place < share_.end; ++place)
      prepare_row<F>(experts_.gate_up[0], b_.normed + pairs_[place] / c_.num_chosen * b_.hidden_stride,
                     b_.expert_rows + place * b_.expert_row_stride);
  }

  void gate_up() const {
    for_experts([&](int expert, int first, int count, const Lane& lane) {
      ActivationEpilogue<E> activation = {b_.expert_activated + first * b_.expert_activated_stride,
                                          b_.expert_activated_stride, experts_.down[expert].depth, nullptr,
                                          c_.activation, true};
      run_linear<F>(experts_.gate_up[expert],
                    {b_.expert_rows + first * b_.expert_row_stride, b_.expert_row_stride, count, true}, nullptr, lane,
                    activation);
    });
  }

  // This thread's part of what gate_up left.
  void quantize() const {
    for (int place = share_.begin; place < share_.end; ++place)
      prepare_row<F>(experts_.down[0], b_.expert_activated + place * b_.expert_activated_stride,
                     b_.expert_rows + place * b_.expert_row_stride);
  }

  void down(const char* next) const {
    const char* a = is_quantized() ? b_.expert_rows : b_.expert_activated;
    const int64_t stride = is_quantized() ? b_.expert_row_stride : b_.expert_activated_stride;
    for_experts([&](int expert, int first, int count, const Lane& lane) {
      StoreEpilogue keep = {b_.expert_results + int64_t(first) * c_.hidden_size, c_.hidden_size, c_.hidden_size,
                            nullptr};
      run_linear<F>(experts_.down[expert], {a + first * stride, stride, count, true}, next, lane, keep);
    });
  }

  // out += scale * (the sum of a row's results, and of the gated `shared`)
  void join(int row, const float* shared, float scale, float* out) const {
    const int64_t first = int64_t(row) * c_.num_chosen;
    const float gate = shared ? b_.router_scores[row * b_.router_stride + c_.num_experts] : 0.0f;
    for (int i = 0; i < c_.hidden_size; i += 16) {
      const int count = c_.hidden_size - i;
      F16 sum = zero();
      for (int j = 0; j < c_.num_chosen; ++j) {
        const float* result = b_.expert_results + int64_t(places_[first + j]) * c_.hidden_size;
        sum = fma(set1(b_.expert_weights[first + j]), load_part(result + i, count), sum);
      }
      if (shared) sum = fma(set1(gate), load_part(shared + i, count), sum);
      store_part(out + i, fma(set1(scale), sum, load_part(out + i, count)), count);
    }
  }

 private:
  // Pairs by expert: those of e are at [begins[e], begins[e + 1]); pairs[places[p]] is p.
  void sort() const {
    for (int e = 0; e <= c_.num_experts; ++e) begins_[e] = 0;
    for (int p = 0; p < num_pairs_; ++p) ++begins_[b_.chosen_experts[p]];
    for (int e = 0, first = 0; e <= c_.num_experts; ++e) {
      const int count = begins_[e];
      begins_[e] = first;
      first += count;
    }
    for (int p = 0; p < num_pairs_; ++p) {
      const int place = begins_[b_.chosen_experts[p]]++;
      places_[p] = place, pairs_[place] = p;
    }
    for (int e = c_.num_experts; e > 0; --e) begins_[e] = begins_[e - 1];
    begins_[0] = 0;
  }

  // Call work(expert, first place, count, lane) for the experts that were chosen. Threads change their parts from one
  // to the next: few panels do not divide evenly, and the same thread would always have the larger part.
  template <class Work>
  AIOCB_INLINE void for_experts(const Work& work) const {
    Lane turn = lane_;
    for (int e = 0; e < c_.num_experts; ++e) {
      const int first = begins_[e], count = begins_[e + 1] - first;
      if (count == 0) continue;
      work(e, first, count, turn);
      if (++turn.thread == turn.num_threads) turn.thread = 0;
    }
  }

  // See Linear::squares: rows are counted once for each expert that they pass.
  void record() const {
    if (lane_.thread != 0) return;
    for (int e = 0; e < c_.num_experts; ++e) {
      const Linear& linear = experts_.gate_up[e];
      for (int place = begins_[e]; linear.squares && place < begins_[e + 1]; ++place)
        add_squares(reinterpret_cast<const E*>(b_.normed + pairs_[place] / c_.num_chosen * b_.hidden_stride),
                    linear.depth, linear.squares);
    }
  }

  const Config& c_;
  const Buffers& b_;
  const Experts& experts_;
  const int num_pairs_;
  const Lane lane_;
  const Share share_;
  int32_t *begins_, *places_, *pairs_;
};

}  // namespace AIOCB_ISA
}  // namespace aiocb
