// Finds the fastest of several candidates by timing them. Knows nothing of what they are.

#ifndef JAX_SWIGLU_TUNER_H_
#define JAX_SWIGLU_TUNER_H_

#include <functional>

namespace jax_swiglu {

// Runs candidate `i` `repeats` times in a row and returns the seconds one run took. Throws
// std::exception where the candidate does not work.
using Timer = std::function<double(int candidate, int repeats)>;

// The time in seconds since some moment.
using Clock = std::function<double()>;
double SteadySeconds();

struct Fastest {
  int candidate = -1;  // -1: none works
  double seconds = 0;
};

// Every candidate gets a short look, and those far from the best are dropped at once. The rest are
// timed in many short turns; those that are still close, and long enough to be limited by power,
// are compared under continuous load. Of equal candidates the first is taken.
// `budget_seconds` bounds the work roughly: half of it goes to the first look, and load is as long
// as the rest allows.
Fastest PickFastest(int candidates, const Timer& timer, double budget_seconds,
                    const Clock& clock = SteadySeconds);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_TUNER_H_
