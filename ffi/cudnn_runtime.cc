#include "cudnn_runtime.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

// The frontend calls cuDNN through this handle (NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING).
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace jax_swiglu {
namespace {

std::mutex load_mutex;
std::atomic<int64_t> loaded_version{0};

std::vector<std::string>& Candidates() {
  static std::vector<std::string>& candidates = *new std::vector<std::string>;
  return candidates;
}

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(what) + ": " +
                           cudnn_frontend::detail::get_error_string(status));
}

// Handles of threads that have ended. Never destroyed: at process exit CUDA may already be gone.
struct IdleHandles {
  std::mutex mutex;
  std::map<int, std::vector<cudnnHandle_t>> by_device;
};

IdleHandles& Idle() {
  static IdleHandles& idle = *new IdleHandles;
  return idle;
}

struct ThreadHandles {
  std::map<int, cudnnHandle_t> by_device;

  ~ThreadHandles() {
    IdleHandles& idle = Idle();
    const std::lock_guard<std::mutex> lock(idle.mutex);
    for (const auto& [device, handle] : by_device) idle.by_device[device].push_back(handle);
  }
};

cudnnHandle_t TakeOrCreateHandle(int device) {
  {
    IdleHandles& idle = Idle();
    const std::lock_guard<std::mutex> lock(idle.mutex);
    std::vector<cudnnHandle_t>& handles = idle.by_device[device];
    if (!handles.empty()) {
      const cudnnHandle_t handle = handles.back();
      handles.pop_back();
      return handle;
    }
  }
  cudnnHandle_t handle = nullptr;
  CheckCudnn(cudnn_frontend::detail::create_handle(&handle), "cudnnCreate");
  return handle;
}

}  // namespace

void SetCudnnCandidates(std::vector<std::string> candidates) {
  const std::lock_guard<std::mutex> lock(load_mutex);
  Candidates() = std::move(candidates);
}

int64_t LoadCudnn() {
  if (loaded_version != 0) return loaded_version;
  const std::lock_guard<std::mutex> lock(load_mutex);
  if (loaded_version != 0) return loaded_version;
  void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
  std::string errors;
  for (const std::string& candidate : Candidates()) {
    if (library != nullptr) break;
    library = dlopen(candidate.c_str(), RTLD_NOW);
    if (library == nullptr) errors += (errors.empty() ? "" : "; ") + std::string(dlerror());
  }
  if (library == nullptr) throw std::runtime_error(errors);
  cudnn_frontend::cudnn_dlhandle = library;
  loaded_version = static_cast<int64_t>(cudnn_frontend::detail::get_backend_version());
  return loaded_version;
}

int64_t CudnnVersion() { return loaded_version; }

cudnnContext* ThreadHandle(int device, CUstream stream) {
  thread_local ThreadHandles handles;
  cudnnHandle_t& handle = handles.by_device[device];
  if (handle == nullptr) handle = TakeOrCreateHandle(device);
  CheckCudnn(cudnn_frontend::detail::set_stream(handle, stream), "cudnnSetStream");
  return handle;
}

}  // namespace jax_swiglu
