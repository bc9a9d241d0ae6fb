// Evaluates graph descriptions on the CPU, in plain C++. Serves implementation="host".

#ifndef JAX_SWIGLU_HOST_EVAL_H_
#define JAX_SWIGLU_HOST_EVAL_H_

#include "graph_spec.h"

namespace jax_swiglu {

// Runs one graph.
void EvaluateOnHost(const GraphSpec& graph, const Buffers& buffers);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_HOST_EVAL_H_
