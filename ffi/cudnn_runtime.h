// The cuDNN library, found at run time, and its handles.

#ifndef JAX_SWIGLU_CUDNN_RUNTIME_H_
#define JAX_SWIGLU_CUDNN_RUNTIME_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

struct cudnnContext;  // as in cudnn.h; cudnnHandle_t is a pointer to it

namespace jax_swiglu {

// Paths or sonames under which to look for libcudnn.
void SetCudnnCandidates(std::vector<std::string> candidates);

// Loads libcudnn at the first call: the one that is in the process already, if there is one, so
// that XLA and we use the same; else the first candidate that loads. Returns its version, e.g.
// 91900. Throws std::runtime_error with the loader's messages.
int64_t LoadCudnn();

// The version of the loaded library, 0 before LoadCudnn.
int64_t CudnnVersion();

// A cuDNN handle of `device`, for one thread at a time, with its stream set. cuDNN handles must not
// be shared by threads and belong to the device they were made on. A thread keeps its handle, so
// that none has to be made while a stream is being captured; when the thread ends, the handle goes
// to the next one. The context of `stream` must be current.
cudnnContext* ThreadHandle(int device, CUstream stream);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_CUDNN_RUNTIME_H_
