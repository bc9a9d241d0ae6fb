#include "graph_spec.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_swiglu {
namespace {

// Gate and up, or what belongs to them.
enum Half : int { kGateHalf, kUpHalf };

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

  // w_gate or w_up: packed, part of the array in `w_gate`.
  int Weight(const char* name, int w_gate, Half half) {
    switch (p_.packing) {
      case Packing::kNone:
        return Rhs(name, w_gate + half);
      case Packing::kH2I:
        return SideBySide(name, w_gate, p_.k, p_.n, half);
      case Packing::k2HI:
      case Packing::k2IH:
        return Stacked(name, w_gate, p_.dtype, p_.k, p_.n, p_.rhs_transposed, half);
    }
    return -1;
  }
  // gate or up, or the cotangent of one: packed, part of the array in `gate`.
  int Activations(const char* name, int gate, Half half) {
    return p_.packing == Packing::kNone ? Out(name, gate + half)
                                        : SideBySide(name, gate, p_.m, p_.n, half);
  }
  // Half of an array [rows, 2, columns].
  int SideBySide(const char* name, int buffer, int64_t rows, int64_t columns, Half half) {
    const int64_t size = 2 * rows * columns;
    return Insert({name,
                   buffer,
                   p_.dtype,
                   {p_.batch, rows, columns},
                   {size, 2 * columns, 1},
                   Position(half) * columns});
  }
  // Half of an array [2, rows, columns], or [2, columns, rows].
  int Stacked(const char* name, int buffer, DType dtype, int64_t rows, int64_t columns,
              bool transposed, Half half) {
    const int i = Matrix(name, buffer, dtype, rows, columns, transposed);
    spec_.tensors[i].strides[0] *= 2;
    spec_.tensors[i].offset = Position(half) * rows * columns;
    return i;
  }

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
    using namespace glu_bwd_buffer;
    Add(NodeKind::kMul, dh_up, slope, Activations("dgate", kDGate, kGateHalf));
    Add(NodeKind::kMul, dh, silu, Activations("dup", kDGate, kUpHalf));
    if (with_h) Add(NodeKind::kMul, silu, up, Out("h", kH));
  }

  GraphSpec Build() { return std::move(spec_); }

 private:
  int Matrix(const char* name, int buffer, DType dtype, int64_t rows, int64_t columns,
             bool transposed) {
    const int64_t size = rows * columns;
    const std::array<int64_t, 3> strides = transposed ? std::array<int64_t, 3>{size, 1, rows}
                                                      : std::array<int64_t, 3>{size, columns, 1};
    return Insert({name, buffer, dtype, {p_.batch, rows, columns}, strides});
  }
  int Insert(Tensor tensor) {
    spec_.tensors.push_back(std::move(tensor));
    return static_cast<int>(spec_.tensors.size()) - 1;
  }
  int64_t Position(Half half) const { return p_.up_first ? 1 - half : half; }

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
  const bool packed = p.packing != Packing::kNone;
  // Without residuals gate, and packed also up, still has to be stored between two graphs.
  const int stored = p.extra ? kGate : kScratch;
  const auto gate_in = [&](GraphBuilder& g) { return g.Activations("gate", stored, kGateHalf); };
  const auto up_in = [&](GraphBuilder& g) {
    return p.extra || packed ? g.Activations("up", stored, kUpHalf) : g.Out("up", kH);
  };

  GraphBuilder dual(p);
  {
    const int x = dual.Lhs("x", kX);
    const int w_gate = dual.Weight("w_gate", kWGate, kGateHalf);
    const int w_up = dual.Weight("w_up", kWGate, kUpHalf);
    // gate and up have the operands' dtype even where they are virtual, so that h does not depend
    // on whether they are saved.
    const int gate = p.extra ? gate_in(dual) : dual.Out("gate", kVirtual);
    const int up = p.extra ? up_in(dual) : dual.Out("up", kVirtual);
    dual.Add(NodeKind::kMatmul, x, w_gate, gate);
    dual.Add(NodeKind::kMatmul, x, w_up, up);
    dual.Activation(gate, up, dual.Out("h", kH));
  }

  GraphBuilder epilogue(p);
  {
    const int x = epilogue.Lhs("x", kX);
    const int w_up = epilogue.Weight("w_up", kWGate, kUpHalf);
    const int gate = gate_in(epilogue);
    const int up = p.extra ? up_in(epilogue) : epilogue.Out("up", kVirtual);
    epilogue.Add(NodeKind::kMatmul, x, w_up, up);
    epilogue.Activation(gate, up, epilogue.Out("h", kH));
  }

  GraphBuilder pointwise(p);
  {
    const int gate = gate_in(pointwise);
    const int up = up_in(pointwise);
    pointwise.Activation(gate, up, pointwise.Out("h", kH));
  }

  const auto gemm = [&](Half half) {
    GraphBuilder g(p);
    const int x = g.Lhs("lhs", kX);
    const int w = g.Weight("rhs", kWGate, half);
    g.Add(NodeKind::kMatmul, x, w, half == kGateHalf ? gate_in(g) : up_in(g));
    return g.Build();
  };
  const GraphSpec activation = pointwise.Build();
  std::vector<RouteSpec> routes = {{"dual", {dual.Build()}},
                                   {"epilogue", {gemm(kGateHalf), epilogue.Build()}},
                                   {"pointwise", {gemm(kGateHalf), gemm(kUpHalf), activation}}};
  if (p.packing == Packing::kH2I || p.packing == Packing::k2IH) {
    Problem joint = p;
    joint.packing = Packing::kNone;
    joint.n *= 2;
    routes.push_back({"joint", {Gemm(joint, kX, kWGate, stored, p.dtype), activation}});
  }
  return routes;
}

std::vector<RouteSpec> GluBwdRoutes(const Problem& p) {
  using namespace glu_bwd_buffer;
  GraphBuilder epilogue(p);
  {
    const int dout = epilogue.Lhs("dout", kDOut);
    const int w_down = epilogue.Rhs("w_down", kWDown);
    const int gate = epilogue.Activations("gate", kGate, kGateHalf);
    const int up = epilogue.Activations("up", kGate, kUpHalf);
    const int dh = epilogue.Add(NodeKind::kMatmul, dout, w_down);
    epilogue.ActivationGrad(dh, gate, up, p.extra);
  }

  // dh waits where dup will be.
  GraphBuilder gemm(p);
  {
    const int dout = gemm.Lhs("lhs", kDOut);
    const int w_down = gemm.Rhs("rhs", kWDown);
    gemm.Add(NodeKind::kMatmul, dout, w_down, gemm.Activations("out", kDGate, kUpHalf));
  }

  GraphBuilder pointwise(p);
  {
    const int dh = pointwise.Activations("dh", kDGate, kUpHalf);
    const int gate = pointwise.Activations("gate", kGate, kGateHalf);
    const int up = pointwise.Activations("up", kGate, kUpHalf);
    pointwise.ActivationGrad(dh, gate, up, p.extra);
  }

  return {{"epilogue", {epilogue.Build()}}, {"pointwise", {gemm.Build(), pointwise.Build()}}};
}

// out = product + addend, which are as large as out. The product may be in the buffer of out.
GraphSpec Sum(const Problem& p, int product, int addend, int out) {
  GraphBuilder g(p);
  const int a = g.Out("product", product, p.out_dtype);
  const int b = g.Out("addend", addend, p.out_dtype);
  g.Add(NodeKind::kAdd, a, b, g.Out("out", out, p.out_dtype));
  return g.Build();
}

// dx from d_gate_up [m, 2, k] and a weight [2, n, k]: no stride leads from gate's columns to up's.
std::vector<RouteSpec> SummedRoutes(const Problem& p) {
  using namespace matmul_buffer;
  const auto product = [&](GraphBuilder& g, Half half, int out) {
    const int a = g.SideBySide("a", kA, p.m, p.k, half);
    const int b = g.Stacked("b", kB, p.dtype, p.k, p.n, p.rhs_transposed, half);
    return g.Add(NodeKind::kMatmul, a, b,
                 out == kVirtual ? g.Out("product", kVirtual, DType::kF32)
                                 : g.Out("product", out, p.out_dtype));
  };
  const auto gemm = [&](Half half, int out) {
    GraphBuilder g(p);
    product(g, half, out);
    return g.Build();
  };
  GraphBuilder epilogue(p);
  {
    const int up = product(epilogue, kUpHalf, kVirtual);
    const int gate = epilogue.Out("addend", kScratch, p.out_dtype);
    epilogue.Add(NodeKind::kAdd, up, gate, epilogue.Out("out", kOut, p.out_dtype));
  }
  const GraphSpec gate = gemm(kGateHalf, kScratch);
  return {{"epilogue", {gate, epilogue.Build()}},
          {"pointwise", {gate, gemm(kUpHalf, kOut), Sum(p, kOut, kScratch, kOut)}}};
}

// dw_gate_up [2, m, n] from x and d_gate_up [k, 2, n].
std::vector<RouteSpec> StackedRoutes(const Problem& p) {
  using namespace matmul_buffer;
  const auto gemm = [&](Half half) {
    GraphBuilder g(p);
    const int a = g.Lhs("a", kA);
    const int b = g.SideBySide("b", kB, p.k, p.n, half);
    g.Add(NodeKind::kMatmul, a, b,
          g.Stacked("out", kOut, p.out_dtype, p.m, p.n, /*transposed=*/false, half));
    return g.Build();
  };
  return {{"gemm", {gemm(kGateHalf), gemm(kUpHalf)}}};
}

std::vector<RouteSpec> MatmulRoutes(const Problem& p) {
  using namespace matmul_buffer;
  if (p.packing != Packing::kNone) return p.lhs_transposed ? StackedRoutes(p) : SummedRoutes(p);
  if (!p.extra) return {{"gemm", {Gemm(p, kA, kB, kOut, p.out_dtype)}}};

  GraphBuilder epilogue(p);
  {
    const int a = epilogue.Lhs("a", kA);
    const int b = epilogue.Rhs("b", kB);
    const int addend = epilogue.Out("addend", kAddend, p.out_dtype);
    const int product = epilogue.Add(NodeKind::kMatmul, a, b);
    epilogue.Add(NodeKind::kAdd, product, addend, epilogue.Out("out", kOut, p.out_dtype));
  }

  return {{"epilogue", {epilogue.Build()}},
          {"pointwise", {Gemm(p, kA, kB, kOut, p.out_dtype), Sum(p, kOut, kAddend, kOut)}}};
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

const char* Name(Packing packing) {
  switch (packing) {
    case Packing::kNone:
      return "";
    case Packing::kH2I:
      return "H 2 I";
    case Packing::k2HI:
      return "2 H I";
    case Packing::k2IH:
      return "2 I H";
  }
  return "";
}

Packing PackingFromName(const std::string& name) {
  for (Packing packing : {Packing::kNone, Packing::kH2I, Packing::k2HI, Packing::k2IH}) {
    if (name == Name(packing)) return packing;
  }
  throw std::invalid_argument("unknown packing " + name);
}

std::string Problem::ToString() const {
  std::ostringstream s;
  s << Name(op) << " batch=" << batch << " m=" << m << " k=" << k << " n=" << n
    << " dtype=" << Name(dtype) << " out_dtype=" << Name(out_dtype)
    << " lhs=" << (lhs_transposed ? "km" : "mk") << " rhs=" << (rhs_transposed ? "nk" : "kn");
  if (extra) {
    s << (op == Op::kGluFwd ? " with gate, up" : op == Op::kGluBwd ? " with h" : " with addend");
  }
  if (packing != Packing::kNone) s << " packed " << Name(packing);
  if (up_first) s << ", up first";
  return s.str();
}

int64_t Tensor::extent() const {
  int64_t last = offset;
  for (size_t i = 0; i < dims.size(); ++i) last += (dims[i] - 1) * strides[i];
  return last + 1;
}

int64_t Tensor::alignment(int64_t of_buffer) const {
  return byte_offset() % of_buffer == 0 ? of_buffer : std::min(of_buffer, ByteWidth(dtype));
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
    if (t.alignment(kFullAlignment) != kFullAlignment) s << ",odd";
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
  const bool packed = p.packing != Packing::kNone;
  int64_t bytes = 0;
  if (p.op == Op::kGluFwd && !p.extra) {
    bytes = p.batch * p.m * p.n * ByteWidth(p.dtype) * (packed ? 2 : 1);
  } else if (p.op == Op::kMatmul && p.packing == Packing::k2HI && !p.lhs_transposed) {
    bytes = p.batch * p.m * p.n * ByteWidth(p.out_dtype);
  }
  return (bytes + 255) / 256 * 256;
}

int64_t WorkspaceBytes(const Problem& problem) {
  return ScratchBytes(problem) + kPlanWorkspaceBytes;
}

}  // namespace jax_swiglu
