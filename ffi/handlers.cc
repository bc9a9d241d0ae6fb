#include "handlers.h"

#include <cuda.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda_driver.h"
#include "cudnn_runtime.h"
#include "host_eval.h"
#include "plan_store.h"

namespace jax_swiglu {

namespace ffi = xla::ffi;

struct Config {
  Op op;
  bool lhs_transposed, rhs_transposed, extra;
  std::string route;
  Packing packing;
  bool up_first;
};

struct CallSite {
  static ffi::TypeId id;

  Config config;
  std::mutex mutex;
  // By device and alignment of the pointers.
  std::map<std::pair<int, int64_t>, std::shared_ptr<const PreparedRoute>> prepared;
};

ffi::TypeId CallSite::id = {};

namespace {

// The operands and results of one call.
struct Call {
  Problem problem;
  Buffers buffers{};
  void* workspace = nullptr;  // scratch, then the workspace of the plans
  int64_t alignment = kFullAlignment;

  void* plan_workspace() const { return static_cast<char*>(workspace) + ScratchBytes(problem); }
};

template <typename T>
T Attribute(const ffi::Dictionary& attributes, std::string_view name) {
  ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return value.value();
}

Config ParseConfig(Op op, const ffi::Dictionary& attributes) {
  return {op,
          Attribute<bool>(attributes, "lhs_transposed"),
          Attribute<bool>(attributes, "rhs_transposed"),
          Attribute<bool>(attributes, "extra"),
          std::string(Attribute<std::string_view>(attributes, "route")),
          PackingFromName(std::string(Attribute<std::string_view>(attributes, "packing"))),
          Attribute<bool>(attributes, "up_first")};
}

DType ToDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::F32:
      return DType::kF32;
    default:
      throw std::invalid_argument("operands must be bfloat16, float16 or float32");
  }
}

// Which buffer (see graph_spec.h) each operand and each result but the workspace is.
std::pair<std::vector<int>, std::vector<int>> Signature(const Config& config) {
  const bool packed = config.packing != Packing::kNone;
  switch (config.op) {
    case Op::kGluFwd: {
      using namespace glu_fwd_buffer;
      std::vector<int> operands = {kX, kWGate}, results = {kH};
      if (!packed) operands.push_back(kWUp);
      if (config.extra) results.push_back(kGate);
      if (config.extra && !packed) results.push_back(kUp);
      return {operands, results};
    }
    case Op::kGluBwd: {
      using namespace glu_bwd_buffer;
      std::vector<int> operands = {kDOut, kWDown, kGate}, results = {kDGate};
      if (!packed) operands.push_back(kUp), results.push_back(kDUp);
      if (config.extra) results.push_back(kH);
      return {operands, results};
    }
    case Op::kMatmul: {
      using namespace matmul_buffer;
      std::vector<int> operands = {kA, kB};
      if (config.extra) operands.push_back(kAddend);
      return {operands, {kOut}};
    }
  }
  return {};
}

int64_t Product(const int64_t* first, const int64_t* last) {
  return std::accumulate(first, last, int64_t{1}, std::multiplies<>());
}

Call ParseCall(const Config& config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto [operands, results] = Signature(config);
  if (args.size() != operands.size() || rets.size() != results.size() + 1) {
    throw std::invalid_argument("wrong number of operands or results");
  }
  Call call;
  const auto bind = [&call](int buffer, const ffi::AnyBuffer& value) {
    call.buffers[buffer] = value.untyped_data();
    const auto address = reinterpret_cast<uintptr_t>(value.untyped_data());
    if (address % kFullAlignment != 0) call.alignment = ByteWidth(ToDType(value.element_type()));
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    bind(operands[i], args.get<ffi::AnyBuffer>(i).value());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    bind(results[i], *rets.get<ffi::AnyBuffer>(i).value());
  }
  const ffi::AnyBuffer workspace = *rets.get<ffi::AnyBuffer>(results.size()).value();
  call.workspace = workspace.untyped_data();
  call.buffers[kScratch] = call.workspace;

  // Rows may have any number of dimensions, one behind the other in memory, and weights have two,
  // three if packed; batch dimensions may be in front of either. So the rank of the weight tells
  // their number: it is the right operand, but for a weight gradient, where both operands have
  // rows, the result.
  const auto lhs = args.get<ffi::AnyBuffer>(0).value().dimensions();
  const auto rhs = args.get<ffi::AnyBuffer>(1).value().dimensions();
  const ffi::AnyBuffer out = *rets.get<ffi::AnyBuffer>(0).value();
  const auto weight = config.lhs_transposed ? out.dimensions() : rhs;
  const bool packed = config.packing != Packing::kNone;
  const size_t weight_rank = packed && config.op != Op::kGluBwd ? 3 : 2;
  // d_gate_up, [rows, 2, I]
  const bool lhs_packed = packed && config.op == Op::kMatmul &&
                          (!config.lhs_transposed || config.packing == Packing::k2IH);
  const size_t columns_rank = lhs_packed ? 2 : 1;
  if (weight.size() < weight_rank || out.dimensions().size() == 0 ||
      lhs.size() + weight_rank < weight.size() + columns_rank) {
    throw std::invalid_argument("operands have too few dimensions");
  }
  const auto batch_end = lhs.begin() + (weight.size() - weight_rank);
  const int64_t rows = Product(batch_end, lhs.end() - columns_rank);
  Problem& p = call.problem;
  p.op = config.op;
  p.batch = Product(lhs.begin(), batch_end);
  p.m = config.lhs_transposed ? lhs.back() : rows;
  p.k = config.lhs_transposed ? rows : lhs.back();
  p.n = out.dimensions().back();
  p.dtype = ToDType(args.get<ffi::AnyBuffer>(0).value().element_type());
  p.out_dtype = ToDType(out.element_type());
  p.lhs_transposed = config.lhs_transposed;
  p.rhs_transposed = config.rhs_transposed;
  p.extra = config.extra;
  p.packing = config.packing;
  p.up_first = config.up_first;
  if (p.op == Op::kMatmul) {
    p.up_first = false;  // both sides have the same order
    if (p.packing == Packing::kH2I || p.packing == Packing::k2IH) {
      // One stride leads through both halves.
      p.packing = Packing::kNone;
      (!p.lhs_transposed ? p.k : lhs_packed ? p.m : p.n) *= 2;
    }
  }
  if (static_cast<int64_t>(workspace.size_bytes()) < WorkspaceBytes(p)) {
    throw std::invalid_argument("the workspace is too small");
  }
  return call;
}

// Runs `f`; an exception becomes an ffi::Error that names the op, its shapes and the cuDNN version.
template <typename F>
ffi::Error Guard(Op op, const Call* call, F f) {
  const auto context = [&] {
    std::string text = std::string("jax_swiglu ") + (call ? call->problem.ToString() : Name(op));
    if (CudnnVersion() > 0) text += " (cuDNN " + std::to_string(CudnnVersion()) + ")";
    return text + ": ";
  };
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(context() + e.what());
  } catch (const std::exception& e) {
    return ffi::Error::Internal(context() + e.what());
  }
}

// The route for this call, from the call site or else from the process.
const PreparedRoute& Lookup(CallSite& site, const Call& call, int64_t alignment, int device,
                            CUstream stream) {
  {
    const std::lock_guard<std::mutex> lock(site.mutex);
    const auto it = site.prepared.find({device, alignment});
    if (it != site.prepared.end()) return *it->second;
  }
  if (IsCapturing(stream)) {
    throw std::runtime_error("no plan for pointers of this alignment before a CUDA graph capture");
  }
  auto route = Prepare(call.problem, site.config.route, alignment, device, stream);
  const std::lock_guard<std::mutex> lock(site.mutex);
  return *(site.prepared[{device, alignment}] = std::move(route));
}

template <Op op>
ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  auto site = std::make_unique<CallSite>();
  ffi::Error error = Guard(op, nullptr, [&] { site->config = ParseConfig(op, attributes); });
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return ffi::ErrorOr<std::unique_ptr<CallSite>>(std::move(site));
}

template <Op op>
ffi::Error Initialize(CUstream stream, int32_t device, CallSite* site, ffi::Dictionary,
                      ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Call call;
  return Guard(op, &call, [&] {
    call = ParseCall(site->config, args, rets);
    LoadCudnn();
    const ScopedContext context(stream);
    ThreadHandle(device, stream);  // so that execute need not make one during a capture
    Lookup(*site, call, kFullAlignment, device, stream);
    // Inside a loop the pointers are not known yet. Slices of a stack whose size is odd will be
    // misaligned.
    bool odd = call.alignment != kFullAlignment;
    for (size_t i = 0; i < args.size(); ++i) {
      odd |= args.get<ffi::AnyBuffer>(i).value().size_bytes() % kFullAlignment != 0;
    }
    if (odd) Lookup(*site, call, ByteWidth(call.problem.dtype), device, stream);
  });
}

template <Op op>
ffi::Error Execute(CUstream stream, int32_t device, CallSite* site, ffi::Dictionary,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Call call;
  return Guard(op, &call, [&] {
    call = ParseCall(site->config, args, rets);
    const ScopedContext context(stream);
    const int64_t alignment =
        call.alignment == kFullAlignment ? kFullAlignment : ByteWidth(call.problem.dtype);
    Lookup(*site, call, alignment, device, stream)
        .Execute(call.buffers, call.plan_workspace(), stream);
  });
}

template <Op op>
ffi::Error HostExecute(ffi::Dictionary attributes, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  Call call;
  return Guard(op, &call, [&] {
    const Config config = ParseConfig(op, attributes);
    call = ParseCall(config, args, rets);
    for (const RouteSpec& route : Routes(call.problem)) {
      if (!config.route.empty() && route.name != config.route) continue;
      for (const GraphSpec& graph : route.graphs) EvaluateOnHost(graph, call.buffers);
      return;
    }
    throw std::invalid_argument("no route " + config.route);
  });
}

// The symbols XLA calls: one set of four for each op.
#define JAX_SWIGLU_DEFINE_HANDLERS(Name)                              \
  XLA_FFI_DEFINE_HANDLER(Name##Instantiate, Instantiate<Op::k##Name>, \
                         ffi::Ffi::BindInstantiate().Attrs());        \
  XLA_FFI_DEFINE_HANDLER(Name##Initialize, Initialize<Op::k##Name>,   \
                         ffi::Ffi::BindInitialize()                   \
                             .Ctx<ffi::PlatformStream<CUstream>>()    \
                             .Ctx<ffi::DeviceOrdinal>()               \
                             .Ctx<ffi::State<CallSite>>()             \
                             .Attrs()                                 \
                             .RemainingArgs()                         \
                             .RemainingRets());                       \
  XLA_FFI_DEFINE_HANDLER(Name##Execute, Execute<Op::k##Name>,         \
                         ffi::Ffi::Bind()                             \
                             .Ctx<ffi::PlatformStream<CUstream>>()    \
                             .Ctx<ffi::DeviceOrdinal>()               \
                             .Ctx<ffi::State<CallSite>>()             \
                             .Attrs()                                 \
                             .RemainingArgs()                         \
                             .RemainingRets(),                        \
                         {ffi::Traits::kCmdBufferCompatible});        \
  XLA_FFI_DEFINE_HANDLER(Name##HostExecute, HostExecute<Op::k##Name>, \
                         ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets())

JAX_SWIGLU_DEFINE_HANDLERS(GluFwd);
JAX_SWIGLU_DEFINE_HANDLERS(GluBwd);
JAX_SWIGLU_DEFINE_HANDLERS(Matmul);

#undef JAX_SWIGLU_DEFINE_HANDLERS

}  // namespace

std::vector<OpHandlers> AllHandlers() {
  return {{Op::kGluFwd, "jax_swiglu_glu_fwd", GluFwdInstantiate, GluFwdInitialize, GluFwdExecute,
           GluFwdHostExecute},
          {Op::kGluBwd, "jax_swiglu_glu_bwd", GluBwdInstantiate, GluBwdInitialize, GluBwdExecute,
           GluBwdHostExecute},
          {Op::kMatmul, "jax_swiglu_matmul", MatmulInstantiate, MatmulInitialize, MatmulExecute,
           MatmulHostExecute}};
}

XLA_FFI_TypeId* CallSiteTypeId() { return &CallSite::id; }

XLA_FFI_TypeInfo* CallSiteTypeInfo() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_swiglu
