#include "cudnn_graph.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "plan_cache.h"

namespace jax_swiglu {
namespace {

namespace fe = cudnn_frontend;
using FeGraph = fe::graph::Graph;
using FeTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// The engine that runs plain GEMMs as cuBLAS does.
constexpr int64_t kGemmEngine = 0;

const std::vector<fe::HeurMode_t> kHeuristics = {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK};

void Check(fe::error_t error, const char* what) {
  if (error.is_good()) return;
  throw std::runtime_error(std::string("cuDNN: ") + what + ": " + error.get_message());
}

fe::DataType_t ToFrontend(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return fe::DataType_t::BFLOAT16;
    case DType::kF16:
      return fe::DataType_t::HALF;
    case DType::kF32:
      return fe::DataType_t::FLOAT;
  }
  return fe::DataType_t::NOT_SET;
}

fe::PointwiseMode_t ToFrontend(NodeKind kind) {
  switch (kind) {
    case NodeKind::kSigmoid:
      return fe::PointwiseMode_t::SIGMOID_FWD;
    case NodeKind::kMul:
      return fe::PointwiseMode_t::MUL;
    case NodeKind::kAdd:
      return fe::PointwiseMode_t::ADD;
    case NodeKind::kSub:
      return fe::PointwiseMode_t::SUB;
    case NodeKind::kMatmul:
      break;
  }
  return fe::PointwiseMode_t::NOT_SET;
}

// Uids are the position of the tensor in the description, counted from 1.
void Describe(const Tensor& t, int index, int64_t alignment, fe::graph::Tensor_attributes& to) {
  to.set_name(t.name)
      .set_uid(index + 1)
      .set_dim({t.dims.begin(), t.dims.end()})
      .set_stride({t.strides.begin(), t.strides.end()})
      .set_data_type(ToFrontend(t.dtype))
      .set_is_virtual(t.is_virtual());
  if (!t.is_virtual()) to.set_alignment(t.alignment(alignment));
}

// The operation graph, validated, without plans.
std::unique_ptr<FeGraph> BuildFrontendGraph(const GraphSpec& spec, int64_t alignment,
                                            cudnnHandle_t handle) {
  auto graph = std::make_unique<FeGraph>();
  graph->set_compute_data_type(fe::DataType_t::FLOAT)
      .set_intermediate_data_type(fe::DataType_t::FLOAT);
  std::vector<FeTensor> tensors(spec.tensors.size());
  const auto input = [&](int i) {
    if (tensors[i] == nullptr) {
      fe::graph::Tensor_attributes attributes;
      Describe(spec.tensors[i], i, alignment, attributes);
      tensors[i] = graph->tensor(attributes);
    }
    return tensors[i];
  };
  for (const Node& node : spec.nodes) {
    FeTensor out;
    if (node.kind == NodeKind::kMatmul) {
      out = graph->matmul(input(node.a), input(node.b), fe::graph::Matmul_attributes());
    } else {
      auto attributes = fe::graph::Pointwise_attributes().set_mode(ToFrontend(node.kind));
      out = node.kind == NodeKind::kSigmoid
                ? graph->pointwise(input(node.a), attributes)
                : graph->pointwise(input(node.a), input(node.b), attributes);
    }
    Describe(spec.tensors[node.output], node.output, alignment, *out);
    tensors[node.output] = out;
  }
  Check(graph->validate(), "invalid graph");
  Check(graph->build_operation_graph(handle), "unsupported graph");
  return graph;
}

class CudnnPlan final : public Plan {
 public:
  CudnnPlan(std::string name, std::unique_ptr<FeGraph> graph, int64_t index)
      : Plan(std::move(name)), index_(index), graph_(std::move(graph)) {}

  void Execute(cudnnContext* handle, const std::vector<void*>& pointers, void* workspace) override {
    // An execution plan is not safe to use from several threads at once.
    const std::lock_guard<std::mutex> lock(mutex_);
    // The frontend takes pointers in the order of uids, and only reads them.
    Check(graph_->execute_plan_at_index(handle, const_cast<void**>(pointers.data()),
                                        static_cast<int>(pointers.size()), workspace, index_),
          "execution failed");
  }

 private:
  const int64_t index_;
  std::mutex mutex_;
  std::unique_ptr<FeGraph> graph_;
};

}  // namespace

std::vector<PlanConfig> ProposePlans(const GraphSpec& spec, int64_t alignment,
                                     cudnnContext* handle) {
  const auto graph = BuildFrontendGraph(spec, alignment, handle);
  Check(graph->create_execution_plans(kHeuristics), "no engine for this graph");
  std::vector<PlanConfig> configs;
  for (int64_t i = 0; i < graph->get_execution_plan_count(); ++i) {
    PlanConfig config;
    config.proposal = i;
    Check(graph->get_plan_name_at_index(i, config.name), "plan without a name");
    configs.push_back(std::move(config));
  }
  if (configs.empty()) throw std::runtime_error("cuDNN: no engine for this graph");
  // The heuristics name one or two kernels of the GEMM engine, by clocks that it does not keep
  // under load: others need less power.
  std::vector<fe::Knob> knobs;
  if (spec.nodes.size() == 1 && spec.has_matmul() &&
      graph->get_knobs_for_engine(kGemmEngine, knobs).is_good()) {
    for (const fe::Knob& knob : knobs) {
      if (knob.type != fe::KnobType_t::KERNEL_CFG) continue;
      for (int64_t k = std::max<int64_t>(knob.minValue, 1);
           k <= std::min<int64_t>(knob.maxValue, 7); ++k) {
        configs.push_back({-1, "eng0_k24=" + std::to_string(k)});
      }
    }
  }
  return configs;
}

std::shared_ptr<Plan> BuildPlan(const GraphSpec& spec, const PlanConfig& config, int64_t alignment,
                                cudnnContext* handle) {
  auto graph = BuildFrontendGraph(spec, alignment, handle);
  if (config.proposal >= 0) {
    Check(graph->create_execution_plans(kHeuristics), "no engine for this graph");
  } else {
    const Engine engine = ParseEngine(config.name);
    std::unordered_map<fe::KnobType_t, int64_t> knobs;
    for (const auto& [type, value] : engine.knobs) {
      knobs[fe::convert_from_backend_knob_type(static_cast<cudnnBackendKnobType_t>(type))] = value;
    }
    Check(graph->create_execution_plan(engine.id, knobs), "plan not supported");
  }
  const int64_t index = std::max<int64_t>(config.proposal, 0);
  graph->deselect_workspace_greater_than(kPlanWorkspaceBytes);
  Check(graph->build_plan_at_index(index), "plan could not be built");
  int64_t workspace = 0;
  Check(graph->get_workspace_size_plan_at_index(index, workspace), "plan without workspace size");
  if (workspace > kPlanWorkspaceBytes) {
    throw std::runtime_error("cuDNN: plan needs " + std::to_string(workspace) +
                             " bytes of workspace");
  }
  return std::make_shared<CudnnPlan>(config.name, std::move(graph), index);
}

}  // namespace jax_swiglu
