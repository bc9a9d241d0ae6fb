#include "host_eval.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace jax_swiglu {
namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float Bf16ToFloat(uint16_t value) { return FromBits(uint32_t{value} << 16); }

uint16_t FloatToBf16(float value) {
  const uint32_t bits = Bits(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep it a quiet NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // ties to even
}

float F16ToFloat(uint16_t value) {
  const uint32_t sign = uint32_t{value & 0x8000u} << 16;
  const uint32_t exponent = (value >> 10) & 0x1f;
  const uint32_t fraction = value & 0x3ff;
  if (exponent == 0x1f) return FromBits(sign | 0x7f800000 | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -magnitude : magnitude;
  }
  return FromBits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

uint16_t FloatToF16(float value) {
  const uint16_t sign = static_cast<uint16_t>((Bits(value) >> 16) & 0x8000);
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // rounds to infinity
  if (magnitude < 0x1p-14f) {                       // subnormal: a multiple of 2^-24
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  }
  const uint32_t bits = Bits(magnitude) - (uint32_t{112} << 23);
  return sign | static_cast<uint16_t>((bits + 0xfff + ((bits >> 13) & 1)) >> 13);  // ties to even
}

float Load(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Bf16ToFloat(static_cast<const uint16_t*>(data)[index]);
    case DType::kF16:
      return F16ToFloat(static_cast<const uint16_t*>(data)[index]);
    case DType::kF32:
      return static_cast<const float*>(data)[index];
  }
  return 0;
}

float Round(float value, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Bf16ToFloat(FloatToBf16(value));
    case DType::kF16:
      return F16ToFloat(FloatToF16(value));
    case DType::kF32:
      return value;
  }
  return value;
}

int64_t Size(const Tensor& t) { return t.dims[0] * t.dims[1] * t.dims[2]; }

// Calls f(position in dense row-major order, position in memory) for each element.
template <typename F>
void ForEach(const Tensor& t, F f) {
  int64_t dense = 0;
  for (int64_t b = 0; b < t.dims[0]; ++b) {
    for (int64_t r = 0; r < t.dims[1]; ++r) {
      for (int64_t c = 0; c < t.dims[2]; ++c) {
        f(dense++, b * t.strides[0] + r * t.strides[1] + c * t.strides[2]);
      }
    }
  }
}

void Matmul(const Tensor& a, const Tensor& b, const float* lhs, const float* rhs, float* out) {
  const int64_t batch = a.dims[0], m = a.dims[1], k = a.dims[2], n = b.dims[2];
  std::fill_n(out, batch * m * n, 0.0f);
  for (int64_t row = 0; row < batch * m; ++row) {
    const float* matrix = rhs + row / m * k * n;
    float* out_row = out + row * n;
    for (int64_t i = 0; i < k; ++i) {
      const float factor = lhs[row * k + i];
      const float* rhs_row = matrix + i * n;
      for (int64_t j = 0; j < n; ++j) out_row[j] += factor * rhs_row[j];
    }
  }
}

float Pointwise(NodeKind kind, float a, float b) {
  switch (kind) {
    case NodeKind::kSigmoid:
      return 1.0f / (1.0f + std::exp(-a));
    case NodeKind::kMul:
      return a * b;
    case NodeKind::kAdd:
      return a + b;
    case NodeKind::kSub:
      return a - b;
    case NodeKind::kMatmul:
      break;
  }
  return 0;
}

// XLA's CPU threads flush subnormal numbers to zero, and those of bfloat16 are subnormal in float32
// too. Within this scope they are kept.
class KeepSubnormals {
 public:
  KeepSubnormals() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~KeepSubnormals() { std::fesetenv(&saved_); }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace

void StoreFloat(void* data, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<uint16_t*>(data)[index] = FloatToBf16(value);
      return;
    case DType::kF16:
      static_cast<uint16_t*>(data)[index] = FloatToF16(value);
      return;
    case DType::kF32:
      static_cast<float*>(data)[index] = value;
      return;
  }
}

void EvaluateOnHost(const GraphSpec& graph, const Buffers& buffers) {
  const KeepSubnormals keep_subnormals;
  std::vector<std::vector<float>> values(graph.tensors.size());
  std::vector<bool> computed(graph.tensors.size(), false);
  for (const Node& node : graph.nodes) computed[node.output] = true;
  for (size_t i = 0; i < values.size(); ++i) {
    const Tensor& t = graph.tensors[i];
    values[i].resize(Size(t));
    if (computed[i]) continue;
    ForEach(t, [&](int64_t dense, int64_t memory) {
      values[i][dense] = Load(buffers[t.buffer], t.offset + memory, t.dtype);
    });
  }
  for (const Node& node : graph.nodes) {
    const std::vector<float>&a = values[node.a], &b = values[node.b];
    std::vector<float>& out = values[node.output];
    if (node.kind == NodeKind::kMatmul) {
      Matmul(graph.tensors[node.a], graph.tensors[node.b], a.data(), b.data(), out.data());
    } else {
      for (size_t i = 0; i < out.size(); ++i) out[i] = Pointwise(node.kind, a[i], b[i]);
    }
    const Tensor& t = graph.tensors[node.output];
    for (float& value : out) value = Round(value, t.dtype);
    if (t.is_virtual()) continue;
    ForEach(t, [&](int64_t dense, int64_t memory) {
      StoreFloat(buffers[t.buffer], t.offset + memory, t.dtype, out[dense]);
    });
  }
}

}  // namespace jax_swiglu
