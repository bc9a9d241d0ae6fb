#include "plan_store.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "cuda_driver.h"
#include "cudnn_runtime.h"
#include "host_eval.h"
#include "tuner.h"

namespace jax_swiglu {
namespace {

std::vector<int> BuffersInMemory(const GraphSpec& graph) {
  std::vector<int> buffers;
  for (const Tensor& t : graph.tensors) {
    if (!t.is_virtual()) buffers.push_back(t.buffer);
  }
  return buffers;
}

std::vector<void*> Pointers(const std::vector<int>& which, const Buffers& buffers) {
  std::vector<void*> pointers;
  pointers.reserve(which.size());
  for (int buffer : which) pointers.push_back(buffers[buffer]);
  return pointers;
}

bool TuningEnabled() {
  const char* value = std::getenv("JAX_SWIGLU_TUNING");
  return value == nullptr || std::strcmp(value, "0") != 0;
}

// Tells about plan selection on stderr, where JAX_SWIGLU_LOG asks for it.
template <typename... Args>
void Log(const char* format, Args... args) {
  const char* value = std::getenv("JAX_SWIGLU_LOG");
  if (value == nullptr || std::strcmp(value, "0") == 0) return;
  std::fprintf(stderr, (std::string("jax_swiglu: ") + format + "\n").c_str(), args...);
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Stream {
 public:
  Stream() {
    CheckCuda(Driver().stream_create(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~Stream() { Driver().stream_destroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream get() const { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

class Event {
 public:
  Event() { CheckCuda(Driver().event_create(&event_, CU_EVENT_DEFAULT), "cuEventCreate"); }
  ~Event() { Driver().event_destroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CUevent get() const { return event_; }

 private:
  CUevent event_ = nullptr;
};

// Thrown where the device has no room for private memory.
struct NoPrivateMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Device memory that stands in for the buffers of an op while its plans are timed. Holds random
// values: on constant ones the GPU needs less power and runs faster than it ever will. Small
// problems get several sets, used in turn, since in a model the weights of the other layers have
// passed through the L2 cache before these are needed again.
class PrivateBuffers {
 public:
  explicit PrivateBuffers(const Problem& problem) {
    std::array<int64_t, kScratch + 1> bytes{};
    std::array<DType, kScratch + 1> dtypes{};
    for (const RouteSpec& route : Routes(problem)) {
      for (const GraphSpec& graph : route.graphs) {
        for (const Tensor& t : graph.tensors) {
          if (t.is_virtual()) continue;
          const int64_t size = t.dims[0] * t.dims[1] * t.dims[2] * ByteWidth(t.dtype);
          bytes[t.buffer] = (size + 255) / 256 * 256;
          dtypes[t.buffer] = t.dtype;
        }
      }
    }
    int64_t set_bytes = 0;
    for (int64_t b : bytes) set_bytes += b;
    constexpr int64_t kBeyondL2 = int64_t{256} << 20;
    const int64_t sets = std::clamp<int64_t>(kBeyondL2 / set_bytes, 1, 8);
    const int64_t total = sets * set_bytes + kPlanWorkspaceBytes;

    size_t free_bytes = 0, all_bytes = 0;
    CheckCuda(Driver().mem_get_info(&free_bytes, &all_bytes), "cuMemGetInfo");
    constexpr int64_t kLeaveFree = int64_t{256}
                                   << 20;  // for the kernels that are about to be loaded
    if (static_cast<int64_t>(free_bytes) < total + kLeaveFree ||
        Driver().mem_alloc(&memory_, total) != CUDA_SUCCESS) {
      memory_ = 0;
      throw NoPrivateMemory("timing plans needs " + std::to_string(total >> 20) +
                            " MiB of device memory outside of XLA's pool");
    }
    CUdeviceptr next = memory_;
    workspace_ = reinterpret_cast<void*>(next);
    next += kPlanWorkspaceBytes;
    for (int64_t s = 0; s < sets; ++s) {
      Buffers set{};
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] == 0) continue;
        set[i] = reinterpret_cast<void*>(next);
        FillRandom(next, bytes[i], dtypes[i]);
        next += bytes[i];
      }
      sets_.push_back(set);
    }
    CheckCuda(Driver().ctx_synchronize(), "cuCtxSynchronize");
  }
  ~PrivateBuffers() { Driver().mem_free(memory_); }
  PrivateBuffers(const PrivateBuffers&) = delete;
  PrivateBuffers& operator=(const PrivateBuffers&) = delete;

  const Buffers& set(int64_t i) const { return sets_[i % sets_.size()]; }
  void* workspace() const { return workspace_; }

 private:
  // Normally distributed values, as activations and weights are: the power that a GEMM needs, and
  // with it the clock, depends on them.
  static void FillRandom(CUdeviceptr to, int64_t bytes, DType dtype) {
    static const std::vector<float> noise = [] {
      std::vector<float> values(1 << 19);
      std::mt19937 generator(0);
      std::normal_distribution<float> normal;
      for (float& v : values) v = normal(generator);
      return values;
    }();
    std::vector<char> values(noise.size() * ByteWidth(dtype));
    for (size_t i = 0; i < noise.size(); ++i) {
      StoreFloat(values.data(), static_cast<int64_t>(i), dtype, noise[i]);
    }
    int64_t filled = std::min<int64_t>(bytes, values.size());
    CheckCuda(Driver().memcpy_htod(to, values.data(), filled), "cuMemcpyHtoD");
    while (filled < bytes) {
      const int64_t more = std::min(filled, bytes - filled);
      CheckCuda(Driver().memcpy_dtod(to + filled, to, more), "cuMemcpyDtoD");
      filled += more;
    }
  }

  CUdeviceptr memory_ = 0;
  void* workspace_ = nullptr;
  std::vector<Buffers> sets_;
};

// Seconds that one run of `steps` takes, over `repeats` runs in a row on `stream`.
double TimeSteps(const std::vector<Step>& steps, const PrivateBuffers& memory, int repeats,
                 int device, CUstream stream) {
  cudnnContext* handle = ThreadHandle(device, stream);
  const Event begin, end;
  CheckCuda(Driver().event_record(begin.get(), stream), "cuEventRecord");
  for (int i = 0; i < repeats; ++i) {
    for (const Step& step : steps) {
      step.plan->Execute(handle, Pointers(step.buffers, memory.set(i)), memory.workspace());
    }
  }
  CheckCuda(Driver().event_record(end.get(), stream), "cuEventRecord");
  CheckCuda(Driver().event_synchronize(end.get()), "cuEventSynchronize");
  float milliseconds = 0;
  CheckCuda(Driver().event_elapsed_time(&milliseconds, begin.get(), end.get()),
            "cuEventElapsedTime");
  return milliseconds * 1e-3 / repeats;
}

class Store {
 public:
  std::shared_ptr<const PreparedRoute> Prepare(const Problem& problem, const std::string& route,
                                               int64_t alignment, int device, CUstream stream) {
    // One at a time, for the whole process: timings must not disturb each other.
    const std::lock_guard<std::mutex> lock(prepare_mutex_);
    const RouteKey key{device, problem.ToString(), route, alignment};
    {
      const std::lock_guard<std::mutex> read_lock(routes_mutex_);
      if (const auto it = routes_.find(key); it != routes_.end()) return it->second;
    }
    std::shared_ptr<PreparedRoute> prepared = Choose(problem, route, alignment, device, stream);
    prepared->problem = problem.ToString();
    prepared->device = device;
    prepared->alignment = alignment;
    const std::lock_guard<std::mutex> write_lock(routes_mutex_);
    routes_[key] = prepared;
    order_.push_back(prepared);
    return prepared;
  }

  std::vector<std::shared_ptr<const PreparedRoute>> All() {
    const std::lock_guard<std::mutex> lock(routes_mutex_);
    return order_;
  }

 private:
  using RouteKey = std::tuple<int, std::string, std::string, int64_t>;
  using PlanKey = std::tuple<int, std::string, int64_t, bool>;

  std::shared_ptr<PreparedRoute> Choose(const Problem& problem, const std::string& wanted,
                                        int64_t alignment, int device, CUstream stream) {
    const size_t colon = wanted.find(':');
    const std::string name = wanted.substr(0, colon);
    const size_t proposal = colon == std::string::npos ? 0 : std::stoul(wanted.substr(colon + 1));
    std::vector<RouteSpec> routes = Routes(problem);
    if (!name.empty()) {
      routes.erase(std::remove_if(routes.begin(), routes.end(),
                                  [&](const RouteSpec& r) { return r.name != name; }),
                   routes.end());
      if (routes.empty()) {
        throw std::invalid_argument(std::string(Name(problem.op)) + " has no route " + name);
      }
    }
    // Plans for odd pointers are rare and need not be fast.
    if (alignment == kFullAlignment && TuningEnabled() && colon == std::string::npos) {
      try {
        return Tune(problem, routes, device);
      } catch (const NoPrivateMemory& e) {
        static std::once_flag once;
        std::call_once(once, [&] {
          std::fprintf(stderr,
                       "jax_swiglu: %s; using untuned plans. Lower XLA_PYTHON_CLIENT_MEM_FRACTION "
                       "to leave room for tuning.\n",
                       e.what());
        });
      }
    }
    const RouteSpec& route = routes.back();
    auto prepared = std::make_shared<PreparedRoute>();
    prepared->route = route.name;
    for (const GraphSpec& graph : route.graphs) {
      // An explicit proposal is meant for the last graph, the one with the activation.
      const bool chosen = colon != std::string::npos && &graph == &route.graphs.back();
      prepared->steps.push_back({chosen ? ProposedPlan(graph, proposal, alignment, device, stream)
                                        : FirstPlan(graph, alignment, device, stream),
                                 BuffersInMemory(graph)});
    }
    return prepared;
  }

  static std::shared_ptr<Plan> ProposedPlan(const GraphSpec& graph, size_t index, int64_t alignment,
                                            int device, CUstream stream) {
    cudnnContext* handle = ThreadHandle(device, stream);
    const std::vector<PlanConfig> configs = ProposePlans(graph, alignment, handle);
    if (index >= configs.size()) {
      throw std::invalid_argument("cuDNN proposes " + std::to_string(configs.size()) + " plans");
    }
    return BuildPlan(graph, configs[index], alignment, handle);
  }

  // The heuristics' first plan that can be built.
  std::shared_ptr<Plan> FirstPlan(const GraphSpec& graph, int64_t alignment, int device,
                                  CUstream stream) {
    std::shared_ptr<Plan>& plan = plans_[{device, graph.Key(), alignment, false}];
    if (plan != nullptr) return plan;
    cudnnContext* handle = ThreadHandle(device, stream);
    std::string error = "no plan proposed";
    for (const PlanConfig& config : ProposePlans(graph, alignment, handle)) {
      try {
        plan = BuildPlan(graph, config, alignment, handle);
        return plan;
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    throw std::runtime_error(error);
  }

  std::shared_ptr<PreparedRoute> Tune(const Problem& problem, const std::vector<RouteSpec>& routes,
                                      int device) {
    const Stopwatch time;
    const Stream stream;
    const PrivateBuffers memory(problem);
    TuneGraphs(routes, memory, device, stream.get());

    std::vector<std::shared_ptr<PreparedRoute>> candidates;
    for (const RouteSpec& route : routes) {
      auto candidate = std::make_shared<PreparedRoute>();
      candidate->route = route.name;
      candidate->tuned = true;
      for (const GraphSpec& graph : route.graphs) {
        const auto plan = plans_.find({device, graph.Key(), kFullAlignment, true});
        if (plan == plans_.end()) break;
        candidate->steps.push_back({plan->second, BuffersInMemory(graph)});
      }
      if (candidate->steps.size() == route.graphs.size()) candidates.push_back(candidate);
    }
    const Fastest fastest = PickFastest(
        static_cast<int>(candidates.size()),
        [&](int i, int repeats) {
          const double seconds =
              TimeSteps(candidates[i]->steps, memory, repeats, device, stream.get());
          Log("  route %s, %d runs: %.1f us", candidates[i]->route.c_str(), repeats, seconds * 1e6);
          return seconds;
        },
        /*budget_seconds=*/2);
    if (fastest.candidate < 0) throw std::runtime_error("cuDNN has no working plan for this");
    candidates[fastest.candidate]->seconds = fastest.seconds;
    Log("%s: route %s at %.1f us, chosen in %.2f s", problem.ToString().c_str(),
        candidates[fastest.candidate]->route.c_str(), fastest.seconds * 1e6, time.seconds());
    return candidates[fastest.candidate];
  }

  // One candidate plan for a graph.
  struct Candidate {
    const GraphSpec* graph;
    PlanConfig config;
    std::shared_ptr<Plan> plan;  // null where it cannot be built
  };

  // Finds the fastest plan for each graph of the routes that has none yet.
  void TuneGraphs(const std::vector<RouteSpec>& routes, const PrivateBuffers& memory, int device,
                  CUstream stream) {
    std::map<std::string, const GraphSpec*> graphs;
    for (const RouteSpec& route : routes) {
      for (const GraphSpec& graph : route.graphs) {
        const std::string key = graph.Key();
        if (plans_.count({device, key, kFullAlignment, true}) == 0) graphs[key] = &graph;
      }
    }
    std::vector<Candidate> candidates;
    for (const auto& [key, graph] : graphs) {
      try {
        for (PlanConfig& config :
             ProposePlans(*graph, kFullAlignment, ThreadHandle(device, stream))) {
          candidates.push_back({graph, std::move(config), nullptr});
        }
      } catch (const std::exception& e) {
        Log("no plans for a graph of %zu nodes: %s", graph->nodes.size(), e.what());
      }
    }
    BuildAll(candidates, device, stream);

    for (const auto& [key, graph] : graphs) {
      std::vector<std::shared_ptr<Plan>> plans;
      for (const Candidate& c : candidates) {
        if (c.graph == graph && c.plan != nullptr) plans.push_back(c.plan);
      }
      const std::vector<int> buffers = BuffersInMemory(*graph);
      const Fastest fastest = PickFastest(
          static_cast<int>(plans.size()),
          [&](int i, int repeats) {
            const double seconds =
                TimeSteps({{plans[i], buffers}}, memory, repeats, device, stream);
            Log("  %zu nodes, %s, %d runs: %.1f us", graph->nodes.size(), plans[i]->name().c_str(),
                repeats, seconds * 1e6);
            return seconds;
          },
          /*budget_seconds=*/2);
      if (fastest.candidate < 0) continue;
      plans_[{device, key, kFullAlignment, true}] = plans[fastest.candidate];
    }
  }

  // Compiles the candidates on several threads. Stops taking up new ones when the time is over.
  static void BuildAll(std::vector<Candidate>& candidates, int device, CUstream stream) {
    constexpr double kBudgetSeconds = 10;
    const Stopwatch time;
    std::atomic<size_t> next{0};
    const auto work = [&] {
      try {
        const ScopedContext context(stream);
        cudnnContext* handle = ThreadHandle(device, stream);
        for (size_t i; (i = next++) < candidates.size() && time.seconds() < kBudgetSeconds;) {
          Candidate& c = candidates[i];
          try {
            c.plan = BuildPlan(*c.graph, c.config, kFullAlignment, handle);
          } catch (const std::exception& e) {
            Log("  %zu nodes, %s: %s", c.graph->nodes.size(), c.config.name.c_str(), e.what());
          }
        }
      } catch (const std::exception& e) {
        Log("a thread could not compile plans: %s", e.what());
      }
    };
    const size_t threads = std::min<size_t>(
        {candidates.size(), std::max(1u, std::thread::hardware_concurrency()), 16});
    std::vector<std::thread> workers;
    for (size_t i = 1; i < threads; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
    Log("  %zu candidates compiled in %.2f s", candidates.size(), time.seconds());
  }

  std::mutex prepare_mutex_;
  std::map<PlanKey, std::shared_ptr<Plan>> plans_;  // guarded by prepare_mutex_

  std::mutex routes_mutex_;
  std::map<RouteKey, std::shared_ptr<const PreparedRoute>> routes_;
  std::vector<std::shared_ptr<const PreparedRoute>> order_;
};

// Never destroyed: at process exit CUDA may be gone before static objects are.
Store& TheStore() {
  static Store& store = *new Store;
  return store;
}

}  // namespace

void PreparedRoute::Execute(const Buffers& buffers, void* plan_workspace, CUstream stream) const {
  cudnnContext* handle = ThreadHandle(device, stream);
  for (const Step& step : steps) {
    step.plan->Execute(handle, Pointers(step.buffers, buffers), plan_workspace);
  }
  ++executions;
}

std::shared_ptr<const PreparedRoute> Prepare(const Problem& problem, const std::string& route,
                                             int64_t alignment, int device, CUstream stream) {
  return TheStore().Prepare(problem, route, alignment, device, stream);
}

std::vector<std::shared_ptr<const PreparedRoute>> PreparedRoutes() { return TheStore().All(); }

}  // namespace jax_swiglu
