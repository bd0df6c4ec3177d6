// Choice of a token from logits without sorting the vocabulary: temperature, top-k, top-p and min-p, one uniform per row.
//
// The vocabulary is cut to candidates above a threshold that is lowered until they hold what the filters need; only they
// are sorted. Equal logits are ordered by id, and a row's result depends on nothing but the row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#define AIOCB_API extern "C" __attribute__((visibility("default")))

namespace {

struct Candidate {
  float logit;
  int32_t id;
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

double sum_of_weights(const float* logits, int64_t vocab, float scale, float top) {
  // Eight fixed partial sums: vectorisable, and the same for every row.
  double total = 0.0;
  for (int64_t base = 0; base < vocab; base += 4096) {
    float partial[8] = {};
    const int64_t end = std::min(vocab, base + 4096);
    int64_t i = base;
    for (; i + 8 <= end; i += 8)
      for (int lane = 0; lane < 8; ++lane) partial[lane] += std::exp((logits[i + lane] - top) * scale);
    for (; i < end; ++i) partial[0] += std::exp((logits[i] - top) * scale);
    for (float p : partial) total += p;
  }
  return total;
}

int32_t choose(const float* logits, int64_t vocab, float temperature, int top_k, float top_p, float min_p,
               double uniform, std::vector<Candidate>& kept) {
  float top = logits[0];
  int32_t best = 0;
  for (int64_t i = 1; i < vocab; ++i)
    if (logits[i] > top) top = logits[i], best = int32_t(i);
  if (!(temperature > 0.0f)) return best;
  const float scale = 1.0f / temperature;
  const bool has_k = top_k > 0 && top_k < vocab, has_p = top_p < 1.0f;
  const float floor = min_p > 0.0f ? top + std::log(min_p) * temperature : -INFINITY;
  // top-p is a share of what top-k left, so the whole vocabulary's mass is needed only without top-k.
  const double total = has_k ? 0.0 : sum_of_weights(logits, vocab, scale, top);
  auto weight = [&](float logit) { return double(std::exp((logit - top) * scale)); };
  size_t count = 0;
  double mass = 0.0;
  for (float width = 8.0f;; width *= 4.0f) {
    const bool is_everything = width > 1e6f;
    const float threshold = is_everything ? -INFINITY : std::max(floor, top - width * temperature);
    kept.clear();
    for (int64_t i = 0; i < vocab; ++i)
      if (logits[i] >= threshold && logits[i] >= floor) kept.push_back({logits[i], int32_t(i)});
    const bool holds_all = is_everything || threshold <= floor;
    if (has_k && kept.size() < size_t(top_k) && !holds_all) continue;
    if (has_k && kept.size() > size_t(top_k)) {
      std::nth_element(kept.begin(), kept.begin() + top_k - 1, kept.end());
      kept.resize(size_t(top_k));
    }
    double inside = 0.0;
    for (const Candidate& c : kept) inside += weight(c.logit);
    const double whole = has_k ? inside : total;
    // Without top-k and top-p the draw itself says how much of the tail is needed.
    const double needed = has_p ? top_p * whole : (min_p > 0.0f || has_k ? inside : uniform * whole);
    if (inside < needed && !holds_all) continue;
    std::sort(kept.begin(), kept.end());
    count = kept.size(), mass = inside;
    if (has_p) {
      double running = 0.0;
      for (size_t i = 0; i < kept.size(); ++i) {
        running += weight(kept[i].logit);
        if (running >= top_p * whole) {
          count = i + 1, mass = running;
          break;
        }
      }
    } else if (!has_k && min_p <= 0.0f) {
      mass = total;
    }
    break;
  }
  const double target = uniform * mass;
  double running = 0.0;
  for (size_t i = 0; i < count; ++i) {
    running += weight(kept[i].logit);
    if (running > target) return kept[i].id;
  }
  return kept[count ? count - 1 : 0].id;
}

}  // namespace

// logits [N][V]; one parameter of each kind per row; ids [N]. temperature 0: the largest.
AIOCB_API void aiocb_sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                            const int32_t* top_k, const float* top_p, const float* min_p, const double* uniform,
                            int32_t* ids) {
  std::vector<Candidate> kept;
  for (int64_t r = 0; r < rows; ++r)
    ids[r] = choose(logits + r * vocab, vocab, temperature[r], top_k[r], top_p[r], min_p[r], uniform[r], kept);
}

// out[i] = log_softmax(logits[rows[i]])[ids[i]]
AIOCB_API void aiocb_log_probabilities(const float* logits, int64_t vocab, const int32_t* rows, const int32_t* ids,
                                       int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = logits + rows[i] * vocab;
    const float top = *std::max_element(row, row + vocab);
    out[i] = row[ids[i]] - top - float(std::log(sum_of_weights(row, vocab, 1.0f, top)));
  }
}
