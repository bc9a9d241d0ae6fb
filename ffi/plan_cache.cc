#include "plan_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "cudnn_frontend/thirdparty/nlohmann/json.hpp"  // needs nothing else of the frontend

namespace jax_swiglu {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string FileNameOf(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](unsigned char c) { return !std::isalnum(c) && c != '.' && c != '-'; }, '_');
  return text;
}

std::string Name(const Machine& machine) {
  return FileNameOf(machine.gpu) + "-sm" + FileNameOf(machine.compute_capability) + "-cudnn" +
         std::to_string(machine.cudnn);
}

// FNV-1a, which is the same in every build, as std::hash need not be.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

fs::path PathOf(const std::string& folder, const Machine& machine, const std::string& key) {
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016llx", static_cast<unsigned long long>(Hash(key)));
  const std::string op = FileNameOf(key.substr(0, key.find(' ')));
  return fs::path(folder) / Name(machine) / (op + "-" + hash + ".json");
}

// Replaces the file in one step. Throws std::exception.
void Write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::string temporary = path.string() + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) throw std::system_error(errno, std::generic_category(), temporary);
  fchmod(file, 0644);  // for others who share the folder; mkstemp leaves it to the user alone
  const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (close(file) != 0 || !written || rename(temporary.c_str(), path.c_str()) != 0) {
    const std::system_error error(errno, std::generic_category(), path.string());
    unlink(temporary.c_str());
    throw error;
  }
}

}  // namespace

std::vector<Choice> PlanCache::Find(const Machine& machine, const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Choice> found;
  const auto look = [&](const Table& table, const char* source) {
    const auto it = table.find(key);
    if (it == table.end()) return;
    found.push_back(it->second);
    found.back().source = source;
  };
  look(memory_[Name(machine)], "memory");
  if (!folder_.empty()) {
    const std::string path = PathOf(folder_, machine, key);
    std::error_code error;
    if (fs::is_regular_file(path, error)) {
      if (const auto table = Read(path, machine, /*others_expected=*/false)) look(*table, "disk");
    }
  }
  look(Shipped(machine), "shipped");
  return found;
}

void PlanCache::Put(const Machine& machine, const std::string& key, const Choice& choice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_[Name(machine)][key] = choice;
  if (folder_.empty()) return;
  const Json file = {
      {"schema", kPlanSchema},
      {"gpu", machine.gpu},
      {"compute_capability", machine.compute_capability},
      {"cudnn", machine.cudnn},
      {"plans",
       {{key,
         {{"route", choice.route}, {"engines", choice.engines}, {"seconds", choice.seconds}}}}}};
  try {
    Write(PathOf(folder_, machine, key), file.dump(1) + "\n");
  } catch (const std::exception& e) {
    Warn(std::string("chosen plans are not kept: ") + e.what());
  }
}

// The choices of a file; none where it is damaged, or of another schema or machine.
std::optional<PlanCache::Table> PlanCache::Read(const std::string& path, const Machine& machine,
                                                bool others_expected) {
  try {
    std::ifstream stream(path);
    const Json file = Json::parse(stream);
    if (file.at("schema").get<int64_t>() != kPlanSchema) {
      throw std::runtime_error("its schema is not " + std::to_string(kPlanSchema));
    }
    const Machine of{file.at("gpu"), file.at("compute_capability"), file.at("cudnn")};
    if (!(of == machine)) {
      if (others_expected) return std::nullopt;
      throw std::runtime_error("it is for " + Name(of));
    }
    Table table;
    for (const auto& [key, plan] : file.at("plans").get<std::map<std::string, Json>>()) {
      table[key] = {plan.at("route"), plan.at("engines"), plan.at("seconds"), ""};
    }
    return table;
  } catch (const std::exception& e) {
    Warn("ignoring " + path + ": " + e.what());
    return std::nullopt;
  }
}

const PlanCache::Table& PlanCache::Shipped(const Machine& machine) {
  const auto [it, is_new] = shipped_tables_.try_emplace(Name(machine));
  if (!is_new || shipped_.empty()) return it->second;
  std::error_code error;
  for (fs::directory_iterator file(shipped_, error), end; !error && file != end;
       file.increment(error)) {
    if (file->path().extension() != ".json") continue;
    if (auto table = Read(file->path(), machine, /*others_expected=*/true)) {
      it->second.merge(*table);
    }
  }
  return it->second;
}

void PlanCache::Warn(const std::string& text) {
  if (std::exchange(warned_, true)) return;
  std::fprintf(stderr, "jax_swiglu: %s\n", text.c_str());
}

Engine ParseEngine(const std::string& name) {
  Engine engine;
  int read = 0;
  long long id = 0, type = 0, value = 0;
  const char* text = name.c_str();
  if (std::sscanf(text, "eng%lld%n", &id, &read) != 1) {
    throw std::invalid_argument("no engine in " + name);
  }
  engine.id = id;
  for (text += read; *text != '\0'; text += read) {
    if (std::sscanf(text, "_k%lld=%lld%n", &type, &value, &read) != 2) {
      throw std::invalid_argument("no knobs in " + name);
    }
    engine.knobs.emplace_back(type, value);
  }
  return engine;
}

}  // namespace jax_swiglu
