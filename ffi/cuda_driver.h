// The few CUDA driver functions that plan selection needs, found at run time: linking against the
// driver would tie the library to machines that have one.

#ifndef JAX_SWIGLU_CUDA_DRIVER_H_
#define JAX_SWIGLU_CUDA_DRIVER_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_swiglu {

// Function pointers, named as in the driver API. Obtained from Driver().
struct CudaDriver {
  CUresult (*ctx_get_current)(CUcontext*);
  CUresult (*ctx_set_current)(CUcontext);
  CUresult (*ctx_get_device)(CUdevice*);
  CUresult (*ctx_synchronize)();
  CUresult (*device_get_attribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*device_get_name)(char*, int, CUdevice);
  CUresult (*stream_get_ctx)(CUstream, CUcontext*);
  CUresult (*stream_is_capturing)(CUstream, CUstreamCaptureStatus*);
  CUresult (*stream_create)(CUstream*, unsigned);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*event_create)(CUevent*, unsigned);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_synchronize)(CUevent);
  CUresult (*event_elapsed_time)(float*, CUevent, CUevent);
  CUresult (*mem_alloc)(CUdeviceptr*, size_t);
  CUresult (*mem_free)(CUdeviceptr);
  CUresult (*mem_get_info)(size_t*, size_t*);
  CUresult (*memcpy_htod)(CUdeviceptr, const void*, size_t);
  CUresult (*memcpy_dtod)(CUdeviceptr, CUdeviceptr, size_t);
  CUresult (*get_error_name)(CUresult, const char**);
};

// Throws std::runtime_error where there is no usable driver.
const CudaDriver& Driver();

// Throws std::runtime_error, with the driver's name of the error, unless `result` is success.
void CheckCuda(CUresult result, const char* what);

// Makes the context of `stream` current on this thread for the lifetime of the object: XLA may call
// a handler on a thread whose current context belongs to another device.
class ScopedContext {
 public:
  explicit ScopedContext(CUstream stream);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  CUcontext previous_ = nullptr;
  bool changed_ = false;
};

bool IsCapturing(CUstream stream);

// What the device of the current context is.
struct Gpu {
  std::string name;
  int major = 0, minor = 0;  // compute capability
};
Gpu CurrentGpu();

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_CUDA_DRIVER_H_
