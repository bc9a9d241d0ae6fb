#include "tuner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <vector>

namespace jax_swiglu {
namespace {

struct Entry {
  int candidate;
  double first_seconds;
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

  std::vector<Entry> entries;
  for (int i = 0; i < candidates; ++i) {
    // The first proposals are the likely ones, so a budget that ends here has seen them.
    if (!entries.empty() && spent() > budget_seconds / 2) break;
    try {
      timer(i, 1);  // the first run loads the kernel
      entries.push_back({i, timer(i, 1)});
    } catch (const std::exception&) {
    }
  }
  if (entries.empty()) return {};
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.first_seconds < b.first_seconds; });

  constexpr double kDropFactor = 1.5;
  constexpr size_t kFinalists = 6;
  const double limit = entries.front().first_seconds * kDropFactor;
  while (entries.size() > kFinalists || entries.back().first_seconds > limit) entries.pop_back();

  // One measurement is long enough to be exact and to keep the GPU under load.
  constexpr double kMeasurementSeconds = 0.01;
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
    if (round > 0 && (entries.size() == 1 || spent() > budget_seconds)) break;
    for (Entry& entry : entries) {
      const double runs = kMeasurementSeconds / std::max(entry.first_seconds, 1e-6);
      entry.seconds.push_back(timer(entry.candidate, std::clamp(static_cast<int>(runs), 2, 100)));
    }
  }
  Fastest fastest;
  for (const Entry& entry : entries) {
    const double seconds = Median(entry.seconds);
    if (fastest.candidate < 0 || seconds < fastest.seconds) fastest = {entry.candidate, seconds};
  }
  return fastest;
}

}  // namespace jax_swiglu
