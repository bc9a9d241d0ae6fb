#include "tuner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <vector>

namespace jax_swiglu {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Entry {
  int candidate;
  double best;  // seconds of one run, the least seen
  // Under continuous load, in turns with the others: times over the least of the turn.
  std::vector<double> loads;
  double loaded = 1;  // their median
};

}  // namespace

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Fastest PickFastest(int candidates, const Timer& timer, double budget_seconds, const Clock& clock) {
  const double start = clock();
  const auto spent = [&] { return clock() - start; };

  // A short look at each. The first proposals are the likely ones, so a budget that ends here has
  // seen them. A single run may well seem twice as slow as it is, when the GPU was idle before.
  constexpr double kHopeless = 3, kLookSeconds = 1e-3;
  std::vector<Entry> entries;
  double best = kNever;
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
      entries.push_back({i, seconds, {}});
    } catch (const std::exception&) {
    }
  }
  if (entries.empty()) return {};
  const auto keep_best = [&entries](size_t most, double factor) {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.best < b.best; });
    const double limit = entries.front().best * factor;
    while (entries.size() > most || entries.back().best > limit) entries.pop_back();
  };
  // Runs each entry for about `seconds`, in turn, and passes on what one run took.
  const auto measure = [&](double seconds, auto use) {
    for (Entry& e : entries) {
      const int runs = std::clamp(static_cast<int>(seconds / std::max(e.best, 1e-6)), 2, 1000);
      use(e, runs, timer(e.candidate, runs));
    }
  };

  // Short turns. Whatever disturbs a measurement makes it longer, so the least one counts.
  keep_best(6, 1.5);
  constexpr double kTurnSeconds = 2e-3;
  constexpr int kTurns = 5;
  for (int turn = 0; turn < kTurns && (turn == 0 || spent() < budget_seconds); ++turn) {
    measure(kTurnSeconds,
            [](Entry& e, int, double seconds) { e.best = std::min(e.best, seconds); });
  }

  // Long kernels are limited by power, and some need more of it than others: under continuous load
  // their clocks go lower, and the fastest of a short run need not be the fastest of a long one.
  // The clocks wander, so each turn only compares what ran in it, and the median of many counts.
  constexpr double kLongKernelSeconds = 1e-4;
  constexpr double kLoadSeconds = 0.04, kLeastLoadSeconds = 0.02;
  constexpr int kLeastLoads = 3, kMostLoads = 16;
  // Each entry runs twice in a turn, once to settle.
  const double loadable = (budget_seconds - spent()) / (2 * kLeastLoads * kLeastLoadSeconds);
  keep_best(std::clamp(static_cast<int>(loadable), 2, 4), 1.05);
  const double load_seconds =
      std::min(kLoadSeconds, (budget_seconds - spent()) / (2.0 * kLeastLoads * entries.size()));
  if (entries.size() > 1 && entries.front().best > kLongKernelSeconds &&
      load_seconds >= kLeastLoadSeconds) {
    int turns = 0;
    for (; turns < kMostLoads && (turns == 0 || spent() < budget_seconds); ++turns) {
      std::rotate(entries.begin(), entries.begin() + 1, entries.end());
      double least = kNever;
      measure(load_seconds, [&](Entry& e, int runs, double) {
        e.loads.push_back(timer(e.candidate, runs));
        least = std::min(least, e.loads.back());
      });
      for (Entry& e : entries) e.loads.back() /= least;
    }
    double least = kNever;
    for (Entry& e : entries) {
      std::nth_element(e.loads.begin(), e.loads.begin() + turns / 2, e.loads.end());
      e.loaded = e.loads[turns / 2];
      least = std::min(least, e.loaded);
    }
    // How far medians may be apart by chance.
    const double chance = std::max(0.005, 0.06 / turns);
    entries.erase(std::remove_if(entries.begin(), entries.end(),
                                 [&](const Entry& e) { return e.loaded > (1 + chance) * least; }),
                  entries.end());
  }
  // Among equals the first one, so that the choice is not left to chance: routes of fewer kernels,
  // which leave fewer gaps between them, come before the others.
  constexpr double kTie = 1.005;
  keep_best(entries.size(), kTie);
  const Entry& first =
      *std::min_element(entries.begin(), entries.end(),
                        [](const Entry& a, const Entry& b) { return a.candidate < b.candidate; });
  return {first.candidate, first.best};
}

}  // namespace jax_swiglu
