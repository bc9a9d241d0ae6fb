#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace jax_swiglu {
namespace {

CudaDriver LoadDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver could not be loaded: ") + dlerror());
  }
  const auto load = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("libcuda.so.1 has no symbol ") + name);
    }
  };
  CudaDriver driver;
  load(driver.ctx_get_current, "cuCtxGetCurrent");
  load(driver.ctx_set_current, "cuCtxSetCurrent");
  load(driver.ctx_get_device, "cuCtxGetDevice");
  load(driver.ctx_synchronize, "cuCtxSynchronize");
  load(driver.device_get_attribute, "cuDeviceGetAttribute");
  load(driver.device_get_name, "cuDeviceGetName");
  load(driver.stream_get_ctx, "cuStreamGetCtx");
  load(driver.stream_is_capturing, "cuStreamIsCapturing");
  load(driver.stream_create, "cuStreamCreate");
  load(driver.stream_destroy, "cuStreamDestroy_v2");
  load(driver.event_create, "cuEventCreate");
  load(driver.event_destroy, "cuEventDestroy_v2");
  load(driver.event_record, "cuEventRecord");
  load(driver.event_synchronize, "cuEventSynchronize");
  load(driver.event_elapsed_time, "cuEventElapsedTime");
  load(driver.mem_alloc, "cuMemAlloc_v2");
  load(driver.mem_free, "cuMemFree_v2");
  load(driver.mem_get_info, "cuMemGetInfo_v2");
  load(driver.memcpy_htod, "cuMemcpyHtoD_v2");
  load(driver.memcpy_dtod, "cuMemcpyDtoD_v2");
  load(driver.get_error_name, "cuGetErrorName");
  return driver;
}

}  // namespace

const CudaDriver& Driver() {
  static const CudaDriver driver = LoadDriver();
  return driver;
}

void CheckCuda(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  Driver().get_error_name(result, &name);
  throw std::runtime_error(std::string(what) + ": " + (name ? name : "unknown CUDA error"));
}

ScopedContext::ScopedContext(CUstream stream) {
  CUcontext wanted = nullptr;
  CheckCuda(Driver().stream_get_ctx(stream, &wanted), "cuStreamGetCtx");
  CheckCuda(Driver().ctx_get_current(&previous_), "cuCtxGetCurrent");
  if (previous_ == wanted) return;
  CheckCuda(Driver().ctx_set_current(wanted), "cuCtxSetCurrent");
  changed_ = true;
}

ScopedContext::~ScopedContext() {
  if (changed_) Driver().ctx_set_current(previous_);
}

bool IsCapturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CheckCuda(Driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

Gpu CurrentGpu() {
  CUdevice device = 0;
  CheckCuda(Driver().ctx_get_device(&device), "cuCtxGetDevice");
  char name[256] = "";
  CheckCuda(Driver().device_get_name(name, sizeof(name), device), "cuDeviceGetName");
  Gpu gpu;
  gpu.name = name;
  const auto get = [&](int& value, CUdevice_attribute attribute) {
    CheckCuda(Driver().device_get_attribute(&value, attribute, device), "cuDeviceGetAttribute");
  };
  get(gpu.major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  get(gpu.minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  return gpu;
}

}  // namespace jax_swiglu
