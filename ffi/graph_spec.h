// What each operation computes, as plain data: which buffers it has, and which graphs of matmul and
// pointwise nodes lead from the operands to the results. Two consumers read these descriptions: the
// builder of cuDNN graphs (cudnn_graph.h) and the CPU evaluator (host_eval.h).

#ifndef JAX_SWIGLU_GRAPH_SPEC_H_
#define JAX_SWIGLU_GRAPH_SPEC_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_swiglu {

enum class DType { kBF16, kF16, kF32 };

int64_t ByteWidth(DType dtype);
const char* Name(DType dtype);

enum class Op { kGluFwd, kGluBwd, kMatmul };

const char* Name(Op op);
Op OpFromName(const std::string& name);  // throws std::invalid_argument

// How one array holds w_gate and w_up, outermost dimension first. The activations that belong to
// them, gate and up or their cotangents, then share an array [rows, 2, I].
enum class Packing { kNone, kH2I, k2HI, k2IH };

const char* Name(Packing packing);                 // "H 2 I" and so on, "" for kNone
Packing PackingFromName(const std::string& name);  // throws std::invalid_argument

// Everything the graphs of one call depend on. Sizes are those of the op's GEMM,
// lhs[batch, m, k] @ rhs[batch, k, n]:
//   glu_fwd: lhs = x, rhs = w_gate and w_up           (k = H, n = I)
//   glu_bwd: lhs = dout, rhs = w_down transposed      (k = O, n = I)
//   matmul:  lhs = a, rhs = b
// Packed, sizes are those for one of gate and up. Of matmul, only the packing 2 H I is here, summed
// over both for the input gradient, else (lhs_transposed) the two weight gradients; the others make
// one plain GEMM.
struct Problem {
  Op op = Op::kMatmul;
  int64_t batch = 1, m = 0, k = 0, n = 0;
  DType dtype = DType::kBF16;      // operands and results, but for:
  DType out_dtype = DType::kBF16;  // the result and the addend of matmul
  bool lhs_transposed = false;     // lhs is stored as [batch, k, m]
  bool rhs_transposed = false;     // rhs is stored as [batch, n, k]
  // glu_fwd: gate and up are results too. glu_bwd: h is a result too. matmul: there is an addend.
  bool extra = false;
  Packing packing = Packing::kNone;
  bool up_first = false;  // packed with up before gate

  std::string ToString() const;
};

// The buffers of an op, in the order in which its handler receives them. What is packed is in the
// first of the two buffers.
namespace glu_fwd_buffer {
enum : int { kX, kWGate, kWUp, kH, kGate, kUp };
}
namespace glu_bwd_buffer {
enum : int { kDOut, kWDown, kGate, kUp, kDGate, kDUp, kH };
}
namespace matmul_buffer {
enum : int { kA, kB, kOut, kAddend };
}
// Not a buffer of the call: the value exists only inside a graph.
inline constexpr int kVirtual = -1;
// The part of the workspace that holds a value on its way from one graph to the next: gate, packed
// gate and up, or the product of one half.
inline constexpr int kScratch = 7;
// The buffers of a call, indexed by Tensor::buffer.
using Buffers = std::array<void*, kScratch + 1>;

// Alignment in bytes that a plan may assume of all buffers. XLA's own have at least this one; a
// slice of a stack of weights is aligned only as its size is.
inline constexpr int64_t kFullAlignment = 16;

struct Tensor {
  std::string name;
  int buffer;
  DType dtype;
  std::array<int64_t, 3> dims;     // [batch, rows, columns]
  std::array<int64_t, 3> strides;  // in elements
  int64_t offset = 0;              // of its first element in the buffer, in elements

  bool is_virtual() const { return buffer == kVirtual; }
  int64_t byte_offset() const { return offset * ByteWidth(dtype); }
  // Elements from the start of the buffer to the last one of this tensor.
  int64_t extent() const;
  // Alignment in bytes of its first element, given that of the buffer.
  int64_t alignment(int64_t of_buffer) const;
};

enum class NodeKind { kMatmul, kSigmoid, kMul, kAdd, kSub };

// output = kind(a, b); b is unused by kSigmoid. Arithmetic is in float32, and the output is rounded
// to its tensor's dtype, virtual or not.
struct Node {
  NodeKind kind;
  int a, b, output;  // indices into GraphSpec::tensors
};

struct GraphSpec {
  std::vector<Tensor> tensors;
  std::vector<Node> nodes;  // in topological order

  bool has_matmul() const;
  // Equal for graphs that compute the same with the same shapes, strides, dtypes and alignments,
  // whatever buffers they are bound to: plans are shared under this key.
  std::string Key() const;
};

// One way to compute an op: graphs to run one after the other. A GEMM may leave its value in a
// result that the pointwise graph behind it reads and overwrites element by element.
struct RouteSpec {
  std::string name;
  std::vector<GraphSpec> graphs;
};

// All routes of a problem. The last one is the reliable one: plain GEMMs and pointwise graphs, for
// which even the first plan cuDNN proposes is a good one.
std::vector<RouteSpec> Routes(const Problem& problem);

// Workspace that a cuDNN plan may use. cuDNN 9.19's best GEMM engine asks for 32 MiB on Hopper and
// the fused ones for next to nothing.
inline constexpr int64_t kPlanWorkspaceBytes = int64_t{64} << 20;

// Bytes of the scratch part, a multiple of 256; the plan's workspace lies behind it.
int64_t ScratchBytes(const Problem& problem);

// Size of the workspace result. It depends on the problem alone, never on which plan was chosen, so
// that every process of a job compiles the same program.
int64_t WorkspaceBytes(const Problem& problem);

}  // namespace jax_swiglu

#endif  // JAX_SWIGLU_GRAPH_SPEC_H_
