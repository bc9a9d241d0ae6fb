#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "cudnn_runtime.h"
#include "graph_spec.h"
#include "handlers.h"
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

int64_t Workspace(const std::string& op, int64_t batch, int64_t m, int64_t n, int64_t itemsize,
                  bool extra) {
  Problem problem;
  problem.op = OpFromName(op);
  problem.dtype = itemsize == ByteWidth(DType::kF32) ? DType::kF32 : DType::kBF16;
  problem.batch = batch;
  problem.m = m;
  problem.n = n;
  problem.extra = extra;
  return WorkspaceBytes(problem);
}

nb::list RouteNames(const std::string& op, bool extra) {
  Problem problem;
  problem.op = OpFromName(op);
  problem.extra = extra;
  nb::list names;
  for (const RouteSpec& route : Routes(problem)) names.append(route.name);
  return names;
}

nb::tuple Pick(int candidates, const Timer& timer, double budget_seconds) {
  const Fastest fastest = PickFastest(candidates, timer, budget_seconds);
  return nb::make_tuple(fastest.candidate, fastest.seconds);
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
    entry["tuned"] = route->tuned;
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
        nb::arg("itemsize"), nb::arg("extra"),
        "Size of the workspace result of a call on operands of `itemsize` bytes.");
  m.def("routes", &RouteNames, nb::arg("op"), nb::arg("extra"), "Names of the routes of an op.");
  m.def("pick_fastest", &Pick, nb::arg("candidates"), nb::arg("timer"), nb::arg("budget_seconds"),
        "The tuner: (candidate, seconds) of the fastest; timer(candidate, repeats) gives seconds.");
  m.def("prepared", &Prepared, "Routes and plans chosen so far in this process.");
}
