// XLA FFI handlers of the three operations. Each is a custom call with the operands and results of
// the buffer enums in graph_spec.h, a uint8 workspace as last result, and the attributes
//   lhs_transposed, rhs_transposed, extra : bool   (see Problem)
//   route : string                                 (the name of a route, or "" for the fastest)
//   packing : string, up_first : bool              (of the weight; "" where it is not packed)
// On the platform CUDA cuDNN runs them; on cpu the host evaluator does.

#ifndef JAX_SWIGLU_HANDLERS_H_
#define JAX_SWIGLU_HANDLERS_H_

#include <string>
#include <vector>

#include "graph_spec.h"
#include "xla/ffi/api/ffi.h"

namespace jax_swiglu {

// What XLA keeps for each call in a compiled program.
struct CallSite;

struct OpHandlers {
  Op op;
  std::string target;  // the name of the custom call
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* host_execute;
};

std::vector<OpHandlers> AllHandlers();

// For the registration of CallSite with XLA.
XLA_FFI_TypeId* CallSiteTypeId();
XLA_FFI_TypeInfo* CallSiteTypeInfo();

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_HANDLERS_H_
