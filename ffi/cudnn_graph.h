// cuDNN execution plans for graph descriptions.

#ifndef JAX_SWIGLU_CUDNN_GRAPH_H_
#define JAX_SWIGLU_CUDNN_GRAPH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "graph_spec.h"

struct cudnnContext;

namespace jax_swiglu {

// One candidate plan for a graph: a proposal of cuDNN's heuristics, or else what the name says.
struct PlanConfig {
  int64_t proposal = -1;  // position in the list of the heuristics, -1 where it is not of them
  std::string name;       // engine and knobs, as cuDNN writes them: "eng4_k2=9_k24=46"
};

// What cuDNN's heuristics propose for `graph`, best guess first, and for a plain GEMM more kernels
// of the GEMM engine. Throws std::runtime_error where cuDNN has no engine for it.
std::vector<PlanConfig> ProposePlans(const GraphSpec& graph, int64_t alignment,
                                     cudnnContext* handle);

// A compiled plan. Kept for the life of the process: captured CUDA graphs go on launching its
// kernels.
class Plan {
 public:
  virtual ~Plan() = default;

  // Enqueues the graph on the handle's stream. `pointers` are those of the graph's tensors in
  // memory, in the order of GraphSpec::tensors. Allocates no device memory and does not
  // synchronise, so it may be captured. Throws std::runtime_error with cuDNN's message.
  virtual void Execute(cudnnContext* handle, const std::vector<void*>& pointers,
                       void* workspace) = 0;

  const std::string& name() const { return name_; }

 protected:
  explicit Plan(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

// Compiles a plan; may take seconds. Throws std::runtime_error where cuDNN cannot, or where the
// plan wants more than kPlanWorkspaceBytes.
std::shared_ptr<Plan> BuildPlan(const GraphSpec& graph, const PlanConfig& config, int64_t alignment,
                                cudnnContext* handle);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_CUDNN_GRAPH_H_
