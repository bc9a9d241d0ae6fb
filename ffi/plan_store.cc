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
#include "op_tuner.h"

namespace jax_swiglu {
namespace {

std::vector<Location> TensorsInMemory(const GraphSpec& graph) {
  std::vector<Location> locations;
  for (const Tensor& t : graph.tensors) {
    if (!t.is_virtual()) locations.push_back({t.buffer, t.byte_offset()});
  }
  return locations;
}

std::vector<void*> Pointers(const std::vector<Location>& locations, const Buffers& buffers) {
  std::vector<void*> pointers;
  pointers.reserve(locations.size());
  for (const Location& at : locations) {
    pointers.push_back(static_cast<char*>(buffers[at.buffer]) + at.byte_offset);
  }
  return pointers;
}

// What each choice may take, of a plan for a graph or of a route for an op; 0 for no tuning at all.
// A forward and backward pass has about fifteen of them.
double SecondsPerChoice() {
  const char* value = std::getenv("JAX_SWIGLU_TUNING");
  constexpr double kDefault = 0.5;
  if (value == nullptr) return kDefault;
  char* end = nullptr;
  const double seconds = std::strtod(value, &end);
  return end != value && *end == '\0' && seconds >= 0 ? seconds : kDefault;
}

// JAX_SWIGLU_LOG: 0 is silent, 1 tells what is tried; progress is told by default.
int LogLevel() {
  const char* value = std::getenv("JAX_SWIGLU_LOG");
  if (value == nullptr) return 0;
  return std::strcmp(value, "0") == 0 ? -1 : 1;
}

template <typename... Args>
void Print(const char* format, Args... args) {
  std::fprintf(stderr, (std::string("jax_swiglu: ") + format + "\n").c_str(), args...);
}

template <typename... Args>
void Log(const char* format, Args... args) {
  if (LogLevel() > 0) Print(format, args...);
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

// Device memory that stands in for the buffers of an op while its plans are tried. For timing it
// holds random values: on constant ones the GPU needs less power and runs faster than it ever will.
// Small problems then get several sets, used in turn, since in a model the weights of the other
// layers have passed through the L2 cache before these are needed again.
class PrivateBuffers {
 public:
  PrivateBuffers(const Problem& problem, bool for_timing) {
    std::array<int64_t, kScratch + 1> bytes{};
    std::array<DType, kScratch + 1> dtypes{};
    for (const RouteSpec& route : Routes(problem)) {
      for (const GraphSpec& graph : route.graphs) {
        for (const Tensor& t : graph.tensors) {
          if (t.is_virtual()) continue;
          const int64_t size = (t.extent() * ByteWidth(t.dtype) + 255) / 256 * 256;
          bytes[t.buffer] = std::max(bytes[t.buffer], size);
          dtypes[t.buffer] = t.dtype;
        }
      }
    }
    int64_t set_bytes = 0;
    for (int64_t b : bytes) set_bytes += b;
    constexpr int64_t kBeyondL2 = int64_t{256} << 20;
    const int64_t sets = for_timing ? std::clamp<int64_t>(kBeyondL2 / set_bytes, 1, 8) : 1;
    const int64_t total = sets * set_bytes + kPlanWorkspaceBytes;

    size_t free_bytes = 0, all_bytes = 0;
    CheckCuda(Driver().mem_get_info(&free_bytes, &all_bytes), "cuMemGetInfo");
    constexpr int64_t kLeaveFree = int64_t{256}
                                   << 20;  // for the kernels that are about to be loaded
    if (static_cast<int64_t>(free_bytes) < total + kLeaveFree ||
        Driver().mem_alloc(&memory_, total) != CUDA_SUCCESS) {
      memory_ = 0;
      throw NoPrivateMemory("timing plans needs " + std::to_string(total >> 20) +
                            " MiB of device memory outside of XLA's pool; lower "
                            "XLA_PYTHON_CLIENT_MEM_FRACTION to leave room");
    }
    CUdeviceptr next = memory_;
    workspace_ = reinterpret_cast<void*>(next);
    next += kPlanWorkspaceBytes;
    for (int64_t s = 0; s < sets; ++s) {
      Buffers set{};
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] == 0) continue;
        set[i] = reinterpret_cast<void*>(next);
        if (for_timing) FillRandom(next, bytes[i], dtypes[i]);
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
      step.plan->Execute(handle, Pointers(step.tensors, memory.set(i)), memory.workspace());
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
    if (alignment == kFullAlignment && colon == std::string::npos) {
      const Gpu gpu = CurrentGpu();
      const Machine machine{gpu.name, std::to_string(gpu.major) + "." + std::to_string(gpu.minor),
                            CudnnVersion()};
      const std::string key = problem.ToString() + (name.empty() ? "" : " route=" + name);
      const std::shared_ptr<PlanCache> cache = ThePlanCache();
      for (const Choice& choice : cache->Find(machine, key)) {
        try {
          return Rebuild(problem, routes, choice, device);
        } catch (const std::exception& e) {
          Log("%s: the choice from %s does not work: %s", key.c_str(), choice.source.c_str(),
              e.what());
        }
      }
      if (auto tuned = TuneIfPossible(problem, routes, device)) {
        Choice choice{tuned->route, {}, tuned->seconds, ""};
        for (const Step& step : tuned->steps) choice.engines.push_back(step.plan->name());
        cache->Put(machine, key, choice);
        return tuned;
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
                                 TensorsInMemory(graph)});
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

  static std::shared_ptr<Plan> ProposedPlan(const GraphSpec& graph, const std::string& name,
                                            int device, CUstream stream) {
    cudnnContext* handle = ThreadHandle(device, stream);
    for (const PlanConfig& config : ProposePlans(graph, kFullAlignment, handle)) {
      if (config.name == name && config.proposal >= 0) {
        return BuildPlan(graph, config, kFullAlignment, handle);
      }
    }
    throw std::runtime_error("no plan " + name);
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

  // One candidate plan for a graph.
  struct Candidate {
    const GraphSpec* graph;
    PlanConfig config;
    std::shared_ptr<Plan> plan;  // null where it cannot be built
  };

  // The route and plans of a choice that was made before. Throws std::exception where they cannot
  // be had or do not run.
  std::shared_ptr<PreparedRoute> Rebuild(const Problem& problem,
                                         const std::vector<RouteSpec>& routes, const Choice& choice,
                                         int device) {
    const auto route = std::find_if(routes.begin(), routes.end(), [&](const RouteSpec& r) {
      return r.name == choice.route && r.graphs.size() == choice.engines.size();
    });
    if (route == routes.end()) throw std::runtime_error("no such route");
    const Stream stream;
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < route->graphs.size(); ++i) {
      candidates.push_back({&route->graphs[i], {-1, choice.engines[i]}, nullptr});
      const auto known = plans_.find({device, route->graphs[i].Key(), kFullAlignment, true});
      if (known != plans_.end() && known->second->name() == choice.engines[i]) {
        candidates.back().plan = known->second;
      }
    }
    BuildAll(candidates, std::numeric_limits<double>::infinity(), device, stream.get());

    auto prepared = std::make_shared<PreparedRoute>();
    prepared->route = choice.route;
    prepared->source = choice.source;
    prepared->seconds = choice.seconds;
    for (Candidate& c : candidates) {
      // A knob that the frontend does not know can only be had from the heuristics.
      if (c.plan == nullptr) c.plan = ProposedPlan(*c.graph, c.config.name, device, stream.get());
      prepared->steps.push_back({c.plan, TensorsInMemory(*c.graph)});
    }
    // A trial, which also loads the kernels before a CUDA graph is captured.
    try {
      const PrivateBuffers memory(problem, /*for_timing=*/false);
      TimeSteps(prepared->steps, memory, 1, device, stream.get());
    } catch (const NoPrivateMemory&) {
    }
    for (const Candidate& c : candidates) {
      plans_.emplace(PlanKey{device, c.graph->Key(), kFullAlignment, true}, c.plan);
    }
    return prepared;
  }

  // The fastest of the routes; null where tuning is off, fails, or finds none that works.
  std::shared_ptr<PreparedRoute> TuneIfPossible(const Problem& problem,
                                                const std::vector<RouteSpec>& routes, int device) {
    const double seconds_per_choice = SecondsPerChoice();
    if (seconds_per_choice == 0) return nullptr;
    try {
      return Tune(problem, routes, seconds_per_choice, device);
    } catch (const std::exception& e) {
      static std::once_flag once;
      std::call_once(once, [&] { Print("%s; using untuned plans", e.what()); });
      return nullptr;
    }
  }

  std::shared_ptr<PreparedRoute> Tune(const Problem& problem, const std::vector<RouteSpec>& routes,
                                      double seconds_per_choice, int device) {
    const Stopwatch time;
    const Stream stream;
    const PrivateBuffers memory(problem, /*for_timing=*/true);

    // The distinct graphs of the routes. Those that have a plan already, from other routes or ops,
    // keep it.
    OpTask task;
    std::vector<const GraphSpec*> graphs;
    std::vector<std::vector<Candidate>> candidates;
    std::map<std::string, int> index;
    double budget = routes.size() > 1 ? seconds_per_choice : 0;
    for (const RouteSpec& route : routes) {
      task.routes.emplace_back();
      for (const GraphSpec& graph : route.graphs) {
        const auto [it, is_new] = index.try_emplace(graph.Key(), static_cast<int>(graphs.size()));
        task.routes.back().push_back(it->second);
        if (!is_new) continue;
        graphs.push_back(&graph);
        candidates.push_back(Candidates(graph, device, stream.get()));
        task.proposals.push_back(static_cast<int>(candidates.back().size()));
        if (candidates.back().empty() || candidates.back()[0].plan == nullptr) {
          budget += seconds_per_choice;
        }
      }
    }
    constexpr double kPatience = 2;
    if (tuning_seconds_ + budget > kPatience && LogLevel() >= 0) {
      Print("choosing cuDNN plans for %s, up to %.1f s (JAX_SWIGLU_LOG=0 silences this)",
            problem.ToString().c_str(), budget);
    }

    const auto candidate = [&](PlanId id) -> Candidate& { return candidates[id.first][id.second]; };
    // Graphs that share a plan, as those of gate and up do, differ in their buffers.
    const auto steps = [&](int route, const std::vector<int>& plans) {
      std::vector<Step> all;
      for (size_t i = 0; i < task.routes[route].size(); ++i) {
        const int graph = task.routes[route][i];
        all.push_back(
            {candidate({graph, plans[graph]}).plan, TensorsInMemory(routes[route].graphs[i])});
      }
      return all;
    };
    task.build = [&](const std::vector<PlanId>& order, double seconds) {
      std::vector<Candidate> ordered;
      for (PlanId id : order) ordered.push_back(candidate(id));
      BuildAll(ordered, seconds, device, stream.get());
      std::vector<bool> built;
      for (size_t i = 0; i < order.size(); ++i) {
        candidate(order[i]).plan = ordered[i].plan;
        built.push_back(ordered[i].plan != nullptr);
      }
      return built;
    };
    task.time_plan = [&](PlanId id, int repeats) {
      const Step step{candidate(id).plan, TensorsInMemory(*graphs[id.first])};
      const double seconds = TimeSteps({step}, memory, repeats, device, stream.get());
      Log("  %zu nodes, %s, %d runs: %.1f us", graphs[id.first]->nodes.size(),
          candidate(id).config.name.c_str(), repeats, seconds * 1e6);
      return seconds;
    };
    task.time_route = [&](int route, const std::vector<int>& plans, int repeats) {
      const double seconds = TimeSteps(steps(route, plans), memory, repeats, device, stream.get());
      Log("  route %s, %d runs: %.1f us", routes[route].name.c_str(), repeats, seconds * 1e6);
      return seconds;
    };
    const OpChoice choice = TuneOp(task, budget);
    tuning_seconds_ += time.seconds();

    for (size_t g = 0; g < graphs.size(); ++g) {
      if (choice.plans[g] < 0) continue;
      plans_.emplace(PlanKey{device, graphs[g]->Key(), kFullAlignment, true},
                     candidates[g][choice.plans[g]].plan);
    }
    if (choice.route < 0) {
      Log("%s: no candidate works", problem.ToString().c_str());
      return nullptr;
    }
    auto tuned = std::make_shared<PreparedRoute>();
    tuned->route = routes[choice.route].name;
    tuned->source = "tuned";
    tuned->seconds = choice.seconds;
    tuned->steps = steps(choice.route, choice.plans);
    Log("%s: route %s at %.1f us, chosen in %.2f s", problem.ToString().c_str(),
        tuned->route.c_str(), choice.seconds * 1e6, time.seconds());
    return tuned;
  }

  // The plan that the graph has, or else what cuDNN proposes.
  std::vector<Candidate> Candidates(const GraphSpec& graph, int device, CUstream stream) {
    const auto known = plans_.find({device, graph.Key(), kFullAlignment, true});
    if (known != plans_.end()) return {{&graph, {-1, known->second->name()}, known->second}};
    std::vector<Candidate> candidates;
    try {
      for (PlanConfig& config : ProposePlans(graph, kFullAlignment, ThreadHandle(device, stream))) {
        candidates.push_back({&graph, std::move(config), nullptr});
      }
    } catch (const std::exception& e) {
      Log("no plans for a graph of %zu nodes: %s", graph.nodes.size(), e.what());
    }
    return candidates;
  }

  // Compiles the candidates that have no plan yet, on several threads. Takes up no new ones after
  // `seconds`.
  static void BuildAll(std::vector<Candidate>& candidates, double seconds, int device,
                       CUstream stream) {
    const Stopwatch time;
    std::atomic<size_t> next{0};
    const auto work = [&] {
      try {
        const ScopedContext context(stream);
        cudnnContext* handle = ThreadHandle(device, stream);
        for (size_t i; (i = next++) < candidates.size() && time.seconds() < seconds;) {
          Candidate& c = candidates[i];
          if (c.plan != nullptr) continue;
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
  double tuning_seconds_ = 0;                       // likewise: spent on tuning so far

  std::mutex routes_mutex_;
  std::map<RouteKey, std::shared_ptr<const PreparedRoute>> routes_;
  std::vector<std::shared_ptr<const PreparedRoute>> order_;
};

// Never destroyed: at process exit CUDA may be gone before static objects are.
Store& TheStore() {
  static Store& store = *new Store;
  return store;
}

std::mutex cache_mutex;

std::shared_ptr<PlanCache>& CacheInUse() {
  static std::shared_ptr<PlanCache>& cache =
      *new std::shared_ptr<PlanCache>(std::make_shared<PlanCache>("", ""));
  return cache;
}

}  // namespace

void SetPlanFolders(const std::string& folder, const std::string& shipped) {
  const std::lock_guard<std::mutex> lock(cache_mutex);
  CacheInUse() = std::make_shared<PlanCache>(folder, shipped);
}

std::shared_ptr<PlanCache> ThePlanCache() {
  const std::lock_guard<std::mutex> lock(cache_mutex);
  return CacheInUse();
}

void PreparedRoute::Execute(const Buffers& buffers, void* plan_workspace, CUstream stream) const {
  cudnnContext* handle = ThreadHandle(device, stream);
  for (const Step& step : steps) {
    step.plan->Execute(handle, Pointers(step.tensors, buffers), plan_workspace);
  }
  ++executions;
}

std::shared_ptr<const PreparedRoute> Prepare(const Problem& problem, const std::string& route,
                                             int64_t alignment, int device, CUstream stream) {
  return TheStore().Prepare(problem, route, alignment, device, stream);
}

std::vector<std::shared_ptr<const PreparedRoute>> PreparedRoutes() { return TheStore().All(); }

}  // namespace jax_swiglu
