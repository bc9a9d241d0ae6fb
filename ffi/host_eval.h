// Evaluates graph descriptions on the CPU, in plain C++. Serves implementation="host".

#ifndef JAX_SWIGLU_HOST_EVAL_H_
#define JAX_SWIGLU_HOST_EVAL_H_

#include <cstdint>

#include "graph_spec.h"

namespace jax_swiglu {

// Runs one graph.
void EvaluateOnHost(const GraphSpec& graph, const Buffers& buffers);

// Stores a value as the element `index` of an array of `dtype`, rounded to nearest, ties to even.
void StoreFloat(void* data, int64_t index, DType dtype, float value);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_HOST_EVAL_H_
