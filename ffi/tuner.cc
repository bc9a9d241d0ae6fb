#include "tuner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <numeric>
#include <vector>

namespace jax_swiglu {
namespace {

struct Entry {
  int candidate;
  double best_guess;  // seconds of one run, by the measurements so far
  std::vector<double> seconds = {};
};

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Fastest PickFastest(int candidates, const Timer& timer, double budget_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };

  // A short look at each. The first proposals are the likely ones, so a budget that ends here has
  // seen them. A single run may well seem twice as slow as it is, when the GPU was idle before.
  constexpr double kHopeless = 3, kLookSeconds = 1e-3;
  std::vector<Entry> entries;
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < candidates; ++i) {
    if (!entries.empty() && spent() > budget_seconds / 2) break;
    try {
      timer(i, 1);  // the first run loads the kernel
      double seconds = timer(i, 1);
      for (int look = 0; look < 2 && seconds < kHopeless * best; ++look) {
        const int runs = std::clamp(static_cast<int>(kLookSeconds / seconds), 1, 10);
        seconds = std::min(seconds, timer(i, runs));
      }
      best = std::min(best, seconds);
      entries.push_back({i, seconds});
    } catch (const std::exception&) {
    }
  }
  if (entries.empty()) return {};
  const auto keep_best = [&entries](size_t most, double factor) {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.best_guess < b.best_guess; });
    const double limit = entries.front().best_guess * factor;
    while (entries.size() > most || entries.back().best_guess > limit) entries.pop_back();
  };
  // Adds one measurement of about `seconds` to each entry, in turn.
  const auto measure = [&](double seconds, bool settle) {
    for (Entry& e : entries) {
      const int runs =
          std::clamp(static_cast<int>(seconds / std::max(e.best_guess, 1e-6)), 2, 1000);
      if (settle) timer(e.candidate, runs);
      e.seconds.push_back(timer(e.candidate, runs));
    }
  };

  // Many short turns: whatever the clocks do meanwhile, they do to all.
  keep_best(6, 1.5);
  constexpr double kTurnSeconds = 2e-3;
  constexpr int kTurns = 11;
  for (int turn = 0; turn < kTurns && (turn == 0 || spent() < budget_seconds); ++turn) {
    measure(kTurnSeconds, /*settle=*/false);
  }
  for (Entry& e : entries) e.best_guess = Median(e.seconds);

  // Long kernels are limited by power, and some need more of it than others: under continuous load
  // their clocks go lower. These times scatter by a few percent, so they only rule candidates out.
  keep_best(3, 1.1);
  constexpr double kLongKernelSeconds = 1e-4, kLoadSeconds = 0.05, kThirsty = 1.03;
  if (entries.size() > 1 && entries.front().best_guess > kLongKernelSeconds) {
    for (Entry& e : entries) e.seconds.clear();
    for (int turn = 0; turn < 2 && (turn == 0 || spent() < budget_seconds); ++turn) {
      measure(kLoadSeconds, /*settle=*/true);
    }
    const auto loaded = [](const Entry& e) {
      return std::accumulate(e.seconds.begin(), e.seconds.end(), 0.0) / e.seconds.size();
    };
    double least = std::numeric_limits<double>::infinity();
    for (const Entry& e : entries) least = std::min(least, loaded(e));
    entries.erase(std::remove_if(entries.begin(), entries.end(),
                                 [&](const Entry& e) { return loaded(e) > kThirsty * least; }),
                  entries.end());
  }
  // Among equals the first one, so that the choice is not left to chance: routes of fewer kernels,
  // which leave fewer gaps between them, come before the others.
  constexpr double kTie = 1.01;
  keep_best(entries.size(), kTie);
  const Entry& first =
      *std::min_element(entries.begin(), entries.end(),
                        [](const Entry& a, const Entry& b) { return a.candidate < b.candidate; });
  return {first.candidate, first.best_guess};
}

}  // namespace jax_swiglu
