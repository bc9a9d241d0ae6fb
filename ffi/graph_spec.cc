#include "graph_spec.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_swiglu {
namespace {

// Builds one graph; methods return the index of the tensor they add.
class GraphBuilder {
 public:
  explicit GraphBuilder(const Problem& problem) : p_(problem) {}

  int Lhs(const char* name, int buffer) {
    return Matrix(name, buffer, p_.dtype, p_.m, p_.k, p_.lhs_transposed);
  }
  int Rhs(const char* name, int buffer) {
    return Matrix(name, buffer, p_.dtype, p_.k, p_.n, p_.rhs_transposed);
  }
  // An [m, n] tensor.
  int Out(const char* name, int buffer, DType dtype) {
    return Matrix(name, buffer, dtype, p_.m, p_.n, /*transposed=*/false);
  }
  int Out(const char* name, int buffer) { return Out(name, buffer, p_.dtype); }

  // Adds a node; without an output, one that exists only inside the graph, in float32.
  int Add(NodeKind kind, int a, int b, int output) {
    spec_.nodes.push_back({kind, a, b, output});
    return output;
  }
  int Add(NodeKind kind, int a, int b) {
    return Add(kind, a, b, Out("virtual", kVirtual, DType::kF32));
  }

  // silu(gate) * up -> h
  void Activation(int gate, int up, int h) {
    const int sigmoid = Add(NodeKind::kSigmoid, gate, gate);
    const int silu = Add(NodeKind::kMul, gate, sigmoid);
    Add(NodeKind::kMul, silu, up, h);
  }

  // The derivative of silu(gate) * up, and, where wanted, the value:
  //   dup = dh * silu(gate),  dgate = dh * up * silu'(gate),  h = silu(gate) * up
  // with silu' = sigmoid + silu - silu * sigmoid, which needs no constant operand.
  void ActivationGrad(int dh, int gate, int up, bool with_h) {
    const int sigmoid = Add(NodeKind::kSigmoid, gate, gate);
    const int silu = Add(NodeKind::kMul, gate, sigmoid);
    const int product = Add(NodeKind::kMul, silu, sigmoid);
    const int rest = Add(NodeKind::kSub, silu, product);
    const int slope = Add(NodeKind::kAdd, sigmoid, rest);
    const int dh_up = Add(NodeKind::kMul, dh, up);
    Add(NodeKind::kMul, dh_up, slope, Out("dgate", glu_bwd_buffer::kDGate));
    Add(NodeKind::kMul, dh, silu, Out("dup", glu_bwd_buffer::kDUp));
    if (with_h) Add(NodeKind::kMul, silu, up, Out("h", glu_bwd_buffer::kH));
  }

  GraphSpec Build() { return std::move(spec_); }

 private:
  int Matrix(const char* name, int buffer, DType dtype, int64_t rows, int64_t columns,
             bool transposed) {
    const int64_t size = rows * columns;
    const std::array<int64_t, 3> strides = transposed ? std::array<int64_t, 3>{size, 1, rows}
                                                      : std::array<int64_t, 3>{size, columns, 1};
    spec_.tensors.push_back({name, buffer, dtype, {p_.batch, rows, columns}, strides});
    return static_cast<int>(spec_.tensors.size()) - 1;
  }

  const Problem& p_;
  GraphSpec spec_;
};

GraphSpec Gemm(const Problem& p, int lhs, int rhs, int out, DType out_dtype) {
  GraphBuilder g(p);
  const int a = g.Lhs("lhs", lhs);
  const int b = g.Rhs("rhs", rhs);
  g.Add(NodeKind::kMatmul, a, b, g.Out("out", out, out_dtype));
  return g.Build();
}

std::vector<RouteSpec> GluFwdRoutes(const Problem& p) {
  using namespace glu_fwd_buffer;
  // Without residuals gate still has to be stored between two graphs.
  const int gate_buffer = p.extra ? kGate : kScratch;

  GraphBuilder dual(p);
  {
    const int x = dual.Lhs("x", kX);
    const int w_gate = dual.Rhs("w_gate", kWGate);
    const int w_up = dual.Rhs("w_up", kWUp);
    // gate and up have the operands' dtype even where they are virtual, so that h does not depend
    // on whether they are saved.
    const int gate = dual.Out("gate", p.extra ? kGate : kVirtual);
    const int up = dual.Out("up", p.extra ? kUp : kVirtual);
    dual.Add(NodeKind::kMatmul, x, w_gate, gate);
    dual.Add(NodeKind::kMatmul, x, w_up, up);
    dual.Activation(gate, up, dual.Out("h", kH));
  }

  GraphBuilder epilogue(p);
  {
    const int x = epilogue.Lhs("x", kX);
    const int w_up = epilogue.Rhs("w_up", kWUp);
    const int gate = epilogue.Out("gate", gate_buffer);
    const int up = epilogue.Out("up", p.extra ? kUp : kVirtual);
    epilogue.Add(NodeKind::kMatmul, x, w_up, up);
    epilogue.Activation(gate, up, epilogue.Out("h", kH));
  }

  GraphBuilder pointwise(p);
  {
    const int gate = pointwise.Out("gate", gate_buffer);
    const int up = pointwise.Out("up", p.extra ? kUp : kH);
    pointwise.Activation(gate, up, pointwise.Out("h", kH));
  }

  const GraphSpec gate_gemm = Gemm(p, kX, kWGate, gate_buffer, p.dtype);
  const GraphSpec up_gemm = Gemm(p, kX, kWUp, p.extra ? kUp : kH, p.dtype);
  return {{"dual", {dual.Build()}},
          {"epilogue", {gate_gemm, epilogue.Build()}},
          {"pointwise", {gate_gemm, up_gemm, pointwise.Build()}}};
}

std::vector<RouteSpec> GluBwdRoutes(const Problem& p) {
  using namespace glu_bwd_buffer;
  GraphBuilder epilogue(p);
  {
    const int dout = epilogue.Lhs("dout", kDOut);
    const int w_down = epilogue.Rhs("w_down", kWDown);
    const int gate = epilogue.Out("gate", kGate);
    const int up = epilogue.Out("up", kUp);
    const int dh = epilogue.Add(NodeKind::kMatmul, dout, w_down);
    epilogue.ActivationGrad(dh, gate, up, p.extra);
  }

  GraphBuilder pointwise(p);
  {
    const int dh = pointwise.Out("dh", kDUp);
    const int gate = pointwise.Out("gate", kGate);
    const int up = pointwise.Out("up", kUp);
    pointwise.ActivationGrad(dh, gate, up, p.extra);
  }

  return {{"epilogue", {epilogue.Build()}},
          {"pointwise", {Gemm(p, kDOut, kWDown, kDUp, p.dtype), pointwise.Build()}}};
}

std::vector<RouteSpec> MatmulRoutes(const Problem& p) {
  using namespace matmul_buffer;
  if (!p.extra) return {{"gemm", {Gemm(p, kA, kB, kOut, p.out_dtype)}}};

  GraphBuilder epilogue(p);
  {
    const int a = epilogue.Lhs("a", kA);
    const int b = epilogue.Rhs("b", kB);
    const int addend = epilogue.Out("addend", kAddend, p.out_dtype);
    const int product = epilogue.Add(NodeKind::kMatmul, a, b);
    epilogue.Add(NodeKind::kAdd, product, addend, epilogue.Out("out", kOut, p.out_dtype));
  }

  GraphBuilder pointwise(p);
  {
    const int product = pointwise.Out("product", kOut, p.out_dtype);
    const int addend = pointwise.Out("addend", kAddend, p.out_dtype);
    pointwise.Add(NodeKind::kAdd, product, addend, pointwise.Out("out", kOut, p.out_dtype));
  }

  return {{"epilogue", {epilogue.Build()}},
          {"pointwise", {Gemm(p, kA, kB, kOut, p.out_dtype), pointwise.Build()}}};
}

}  // namespace

int64_t ByteWidth(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
  }
  return "";
}

const char* Name(Op op) {
  switch (op) {
    case Op::kGluFwd:
      return "glu_fwd";
    case Op::kGluBwd:
      return "glu_bwd";
    case Op::kMatmul:
      return "matmul";
  }
  return "";
}

Op OpFromName(const std::string& name) {
  for (Op op : {Op::kGluFwd, Op::kGluBwd, Op::kMatmul}) {
    if (name == Name(op)) return op;
  }
  throw std::invalid_argument("unknown op " + name);
}

std::string Problem::ToString() const {
  std::ostringstream s;
  s << Name(op) << " batch=" << batch << " m=" << m << " k=" << k << " n=" << n
    << " dtype=" << Name(dtype) << " out_dtype=" << Name(out_dtype)
    << " lhs=" << (lhs_transposed ? "km" : "mk") << " rhs=" << (rhs_transposed ? "nk" : "kn");
  if (extra) {
    s << (op == Op::kGluFwd ? " with gate, up" : op == Op::kGluBwd ? " with h" : " with addend");
  }
  return s.str();
}

bool GraphSpec::has_matmul() const {
  return std::any_of(nodes.begin(), nodes.end(),
                     [](const Node& node) { return node.kind == NodeKind::kMatmul; });
}

std::string GraphSpec::Key() const {
  std::ostringstream s;
  for (const Tensor& t : tensors) {
    s << (t.is_virtual() ? 'v' : 't') << static_cast<int>(t.dtype);
    for (int64_t d : t.dims) s << ',' << d;
    for (int64_t d : t.strides) s << ',' << d;
    s << ';';
  }
  for (const Node& n : nodes) {
    s << static_cast<int>(n.kind) << ':' << n.a << ',' << n.b << '>' << n.output << ';';
  }
  return s.str();
}

std::vector<RouteSpec> Routes(const Problem& problem) {
  switch (problem.op) {
    case Op::kGluFwd:
      return GluFwdRoutes(problem);
    case Op::kGluBwd:
      return GluBwdRoutes(problem);
    case Op::kMatmul:
      return MatmulRoutes(problem);
  }
  return {};
}

int64_t ScratchBytes(const Problem& p) {
  if (p.op != Op::kGluFwd || p.extra) return 0;
  const int64_t bytes = p.batch * p.m * p.n * ByteWidth(p.dtype);
  return (bytes + 255) / 256 * 256;
}

int64_t WorkspaceBytes(const Problem& problem) {
  return ScratchBytes(problem) + kPlanWorkspaceBytes;
}

}  // namespace jax_swiglu
