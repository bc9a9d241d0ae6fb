// What was chosen for each problem, kept in memory, in files for later processes, and in tables
// that are shipped with the package. Knows nothing of cuDNN.

#ifndef JAX_SWIGLU_PLAN_CACHE_H_
#define JAX_SWIGLU_PLAN_CACHE_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jax_swiglu {

// The version of the files, to be raised with their format and with the graphs of the routes.
inline constexpr int64_t kPlanSchema = 1;

// A choice holds for one kind of GPU and one version of cuDNN.
struct Machine {
  std::string gpu;                 // as the driver names it: "NVIDIA H200"
  std::string compute_capability;  // "9.0"
  int64_t cudnn = 0;               // 91900

  bool operator==(const Machine& other) const {
    return gpu == other.gpu && compute_capability == other.compute_capability &&
           cudnn == other.cudnn;
  }
};

struct Choice {
  std::string route;
  std::vector<std::string> engines;  // the plan of each graph, by cuDNN's name of it (see Engine)
  double seconds = 0;                // of one run, as timed
  std::string source;                // "memory", "disk" or "shipped"; not stored
};

// The file of a choice, and a shipped table, are both such a JSON object:
//   {"schema": 1, "gpu": "NVIDIA H200", "compute_capability": "9.0", "cudnn": 91900,
//    "plans": {key: {"route": "gemm", "engines": ["eng0_k24=1"], "seconds": 0.00029}, ...}}
// A file that cannot be read is no error, and one line on stderr tells of the first of them.
class PlanCache {
 public:
  // Folders of the files and of the tables; none where empty.
  PlanCache(std::string folder, std::string shipped)
      : folder_(std::move(folder)), shipped_(std::move(shipped)) {}

  // All that is known for `key`, the choice to be preferred first.
  std::vector<Choice> Find(const Machine& machine, const std::string& key);

  // Keeps a choice. Files are replaced in one step, each holds one choice, and nothing is locked,
  // so any number of processes may write: the last one wins.
  void Put(const Machine& machine, const std::string& key, const Choice& choice);

 private:
  using Table = std::map<std::string, Choice>;

  std::optional<Table> Read(const std::string& path, const Machine& machine, bool others_expected);
  const Table& Shipped(const Machine& machine);
  void Warn(const std::string& text);

  const std::string folder_, shipped_;
  std::mutex mutex_;  // guards the rest
  std::map<std::string, Table> memory_, shipped_tables_;
  bool warned_ = false;
};

// One kernel of cuDNN: an engine, and values for its knobs by the number of their type.
struct Engine {
  int64_t id = 0;
  std::vector<std::pair<int64_t, int64_t>> knobs;
};

// Reads cuDNN's name of a plan, "eng4_k2=9_k24=46". Throws std::invalid_argument.
Engine ParseEngine(const std::string& name);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_PLAN_CACHE_H_
