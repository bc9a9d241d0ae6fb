// Chooses, for each problem on each device, the route and the plans that run it, and keeps them for
// the life of the process. Known choices (plan_cache.h) are taken before any are made.

#ifndef JAX_SWIGLU_PLAN_STORE_H_
#define JAX_SWIGLU_PLAN_STORE_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cudnn_graph.h"
#include "graph_spec.h"
#include "plan_cache.h"

namespace jax_swiglu {

// Where a tensor begins.
struct Location {
  int buffer;
  int64_t byte_offset;
};

// A plan, and where in the buffers of the call its tensors are.
struct Step {
  std::shared_ptr<Plan> plan;
  std::vector<Location> tensors;
};

struct PreparedRoute {
  std::string problem, route;
  int device = 0;
  int64_t alignment = kFullAlignment;
  std::string source = "heuristics";  // their first plan; "tuned" here, or else Choice::source
  double seconds = 0;                 // of one run, as timed; 0 from the heuristics
  std::vector<Step> steps;
  mutable std::atomic<int64_t> executions{0};  // by the handler, replays of CUDA graphs not counted

  // Enqueues the steps on `stream` of this device.
  void Execute(const Buffers& buffers, void* plan_workspace, CUstream stream) const;
};

// The route for `problem` on `device`, prepared if it is not yet: as a known choice says, or else
// candidates are compiled, and timed on private memory on a stream of their own; the buffers of the
// run are not touched. `route`
// is empty for the fastest, or the name of a route, or "name:i" for the i-th plan that cuDNN's
// heuristics propose for the last graph of a route. `stream` is the run's. Throws
// std::runtime_error, std::invalid_argument where there is no such route or plan.
std::shared_ptr<const PreparedRoute> Prepare(const Problem& problem, const std::string& route,
                                             int64_t alignment, int device, CUstream stream);

// Where choices are kept (see PlanCache). Until it is called they are kept in memory alone.
void SetPlanFolders(const std::string& folder, const std::string& shipped);

// The choices that Prepare uses.
std::shared_ptr<PlanCache> ThePlanCache();

// Everything prepared so far, oldest first.
std::vector<std::shared_ptr<const PreparedRoute>> PreparedRoutes();

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_PLAN_STORE_H_
