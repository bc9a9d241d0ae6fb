#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "cudnn_runtime.h"
#include "graph_spec.h"
#include "handlers.h"
#include "op_tuner.h"
#include "plan_cache.h"
#include "plan_store.h"
#include "tuner.h"

namespace nb = nanobind;
using namespace jax_swiglu;

namespace {

nb::capsule Capsule(void* pointer) { return nb::capsule(pointer); }

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {custom call name: {"cpu": handler, "CUDA": {stage: handler}}}
nb::dict Registrations() {
  nb::dict all;
  for (const OpHandlers& handlers : AllHandlers()) {
    nb::dict cuda, platforms;
    cuda["instantiate"] = Capsule(handlers.instantiate);
    cuda["initialize"] = Capsule(handlers.initialize);
    cuda["execute"] = Capsule(handlers.execute);
    platforms["CUDA"] = cuda;
    platforms["cpu"] = Capsule(handlers.host_execute);
    all[handlers.target.c_str()] = platforms;
  }
  return all;
}

nb::dict CallSiteType() {
  nb::dict type;
  type["type_id"] = Capsule(CallSiteTypeId());
  type["type_info"] = Capsule(CallSiteTypeInfo());
  return type;
}

DType OfWidth(int64_t bytes) {
  return bytes == ByteWidth(DType::kF32) ? DType::kF32 : DType::kBF16;
}

int64_t Workspace(const std::string& op, int64_t batch, int64_t m, int64_t n, int64_t itemsize,
                  int64_t out_itemsize, bool lhs_transposed, bool extra,
                  const std::string& packing) {
  Problem problem;
  problem.op = OpFromName(op);
  problem.dtype = OfWidth(itemsize);
  problem.out_dtype = OfWidth(out_itemsize);
  problem.lhs_transposed = lhs_transposed;
  problem.packing = PackingFromName(packing);
  problem.batch = batch;
  problem.m = m;
  problem.n = n;
  problem.extra = extra;
  return WorkspaceBytes(problem);
}

nb::list RouteNames(const std::string& op, bool extra, const std::string& packing) {
  Problem problem;
  problem.op = OpFromName(op);
  problem.extra = extra;
  problem.packing = PackingFromName(packing);
  nb::list names;
  for (const RouteSpec& route : Routes(problem)) names.append(route.name);
  return names;
}

nb::list Misaligned(const std::string& op, int64_t m, int64_t k, int64_t n,
                    const std::string& packing) {
  Problem problem;
  problem.op = OpFromName(op);
  problem.m = m;
  problem.k = k;
  problem.n = n;
  problem.extra = problem.op != Op::kMatmul;
  problem.packing = PackingFromName(packing);
  nb::list names;
  for (const RouteSpec& route : Routes(problem)) {
    for (const GraphSpec& graph : route.graphs) {
      for (const Tensor& t : graph.tensors) {
        if (t.alignment(kFullAlignment) != kFullAlignment) names.append(t.name);
      }
    }
  }
  return names;
}

nb::tuple Pick(int candidates, const Timer& timer, double budget_seconds, const Clock& clock) {
  const Fastest fastest = PickFastest(candidates, timer, budget_seconds, clock);
  return nb::make_tuple(fastest.candidate, fastest.seconds);
}

nb::tuple PickForOp(std::vector<int> proposals, std::vector<std::vector<int>> routes,
                    decltype(OpTask::build) build, decltype(OpTask::time_plan) time_plan,
                    decltype(OpTask::time_route) time_route, double budget_seconds,
                    const Clock& clock) {
  const OpChoice choice = TuneOp({std::move(proposals), std::move(routes), std::move(build),
                                  std::move(time_plan), std::move(time_route)},
                                 budget_seconds, clock);
  return nb::make_tuple(choice.route, choice.plans, choice.seconds);
}

nb::list FindPlans(const std::string& gpu, const std::string& compute_capability, int64_t cudnn,
                   const std::string& key) {
  nb::list all;
  for (const Choice& choice : ThePlanCache()->Find({gpu, compute_capability, cudnn}, key)) {
    nb::dict entry;
    entry["source"] = choice.source;
    entry["route"] = choice.route;
    entry["engines"] = choice.engines;
    entry["seconds"] = choice.seconds;
    all.append(entry);
  }
  return all;
}

void PutPlan(const std::string& gpu, const std::string& compute_capability, int64_t cudnn,
             const std::string& key, const std::string& route,
             const std::vector<std::string>& engines, double seconds) {
  ThePlanCache()->Put({gpu, compute_capability, cudnn}, key, {route, engines, seconds, ""});
}

nb::tuple ParseEngineName(const std::string& name) {
  const Engine engine = ParseEngine(name);
  return nb::make_tuple(engine.id, engine.knobs);
}

nb::list Prepared() {
  nb::list all;
  for (const auto& route : PreparedRoutes()) {
    nb::list engines;
    for (const Step& step : route->steps) engines.append(step.plan->name());
    nb::dict entry;
    entry["problem"] = route->problem;
    entry["route"] = route->route;
    entry["device"] = route->device;
    entry["alignment"] = route->alignment;
    entry["source"] = route->source;
    entry["seconds"] = route->seconds;
    entry["engines"] = engines;
    entry["executions"] = route->executions.load();
    all.append(entry);
  }
  return all;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "XLA FFI handlers of jax_swiglu, and what they report about themselves.";
  m.def("registrations", &Registrations, "Handlers by custom call name and platform.");
  m.def("call_site_type", &CallSiteType, "The state type, for jax.ffi.register_ffi_type.");
  m.def("set_cudnn_candidates", &SetCudnnCandidates, nb::arg("candidates"),
        "Paths or sonames under which to look for libcudnn.");
  m.def("load_cudnn", &LoadCudnn, "Loads libcudnn; returns its version, e.g. 91900.");
  m.def("workspace_bytes", &Workspace, nb::arg("op"), nb::arg("batch"), nb::arg("m"), nb::arg("n"),
        nb::arg("itemsize"), nb::arg("out_itemsize"), nb::arg("lhs_transposed"), nb::arg("extra"),
        nb::arg("packing"),
        "Size of the workspace result of a call on operands of `itemsize` bytes.");
  m.def("routes", &RouteNames, nb::arg("op"), nb::arg("extra"), nb::arg("packing") = "",
        "Names of the routes of an op.");
  m.def("misaligned", &Misaligned, nb::arg("op"), nb::arg("m"), nb::arg("k"), nb::arg("n"),
        nb::arg("packing"),
        "Names of the bfloat16 tensors, by route and graph, that plans may not take for aligned "
        "even in aligned buffers.");
  m.def("pick_fastest", &Pick, nb::arg("candidates"), nb::arg("timer"), nb::arg("budget_seconds"),
        nb::arg("clock"),
        "The tuner: (candidate, seconds) of the fastest; timer(candidate, repeats) gives seconds.");
  m.def("tune_op", &PickForOp, nb::arg("proposals"), nb::arg("routes"), nb::arg("build"),
        nb::arg("time_plan"), nb::arg("time_route"), nb::arg("budget_seconds"), nb::arg("clock"),
        "(route, plan of each graph, seconds): the choice for an op within a budget.");
  m.attr("PLAN_SCHEMA") = kPlanSchema;
  m.def("set_plan_folders", &SetPlanFolders, nb::arg("folder"), nb::arg("shipped"),
        "Where chosen plans are kept, and where tables of them are; \"\" for none.");
  m.def("find_plans", &FindPlans, nb::arg("gpu"), nb::arg("compute_capability"), nb::arg("cudnn"),
        nb::arg("key"), "The choices known for a problem, the preferred one first.");
  m.def("put_plan", &PutPlan, nb::arg("gpu"), nb::arg("compute_capability"), nb::arg("cudnn"),
        nb::arg("key"), nb::arg("route"), nb::arg("engines"), nb::arg("seconds"),
        "Keeps a choice.");
  m.def("parse_engine", &ParseEngineName, nb::arg("name"),
        "(engine, [(knob type, value)]) of cuDNN's name of a plan.");
  m.def("prepared", &Prepared, "Routes and plans chosen so far in this process.");
}
