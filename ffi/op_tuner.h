// Chooses the plans and the route of an op within a bounded time. Knows nothing of cuDNN or CUDA:
// whoever calls it says how to build and to time.

#ifndef JAX_SWIGLU_OP_TUNER_H_
#define JAX_SWIGLU_OP_TUNER_H_

#include <functional>
#include <utility>
#include <vector>

#include "tuner.h"

namespace jax_swiglu {

// A graph, and the position of a plan among those proposed for it.
using PlanId = std::pair<int, int>;

struct OpTask {
  std::vector<int> proposals;            // how many plans each graph has, the likely ones first
  std::vector<std::vector<int>> routes;  // the graphs of each route, the reliable route last
  // Builds plans in the order given, and begins none when the seconds are over. Says for each
  // whether there is a plan now.
  std::function<std::vector<bool>(const std::vector<PlanId>&, double seconds)> build;
  // Seconds of one run. May throw std::exception.
  std::function<double(PlanId plan, int repeats)> time_plan;
  std::function<double(int route, const std::vector<int>& plans, int repeats)> time_route;
};

struct OpChoice {
  int route = -1;          // -1: none works
  std::vector<int> plans;  // for each graph of the op the fastest plan, -1 where there is none
  double seconds = 0;      // of one run of the route
};

// Half of the budget is for building, with the first proposals of every graph before the second
// ones, so that what is left out is the least likely. The rest is shared out among what has to be
// timed. The first proposals for the reliable route are built in any case.
OpChoice TuneOp(const OpTask& task, double budget_seconds, const Clock& clock = SteadySeconds);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_OP_TUNER_H_
