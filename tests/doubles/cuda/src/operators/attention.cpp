// Fused attention. PyTorch chooses among CUDA's kernels by the device's capability, the types and
// the shapes; all of them are computed by the CPU's flash kernel.
#include "special_kernels.h"

namespace cuda_double {
namespace {

const c10::IValue kNoBias;

struct Forward {
  const c10::IValue &query, &key, &value, &bias, &dropout, &is_causal, &scale;
};

// The output and the logarithms of the sums.
std::tuple<at::Tensor, at::Tensor> attend(const Forward& call) {
  TORCH_CHECK(call.dropout.toDouble() == 0, "the CUDA double has no dropout in fused attention");
  return at::_scaled_dot_product_flash_attention_for_cpu(
      call.query.toTensor(), call.key.toTensor(), call.value.toTensor(), 0.,
      call.is_causal.toBool(), optional_tensor(call.bias), call.scale.toOptional<double>());
}

struct Backward {
  const c10::IValue &gradient, &query, &key, &value, &bias, &output, &sums, &dropout, &is_causal,
      &scale;
};

// The gradients of query, key and value.
Values attend_backward(const Backward& call) {
  const auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.gradient.toTensor(), call.query.toTensor(), call.key.toTensor(), call.value.toTensor(),
      call.output.toTensor(), call.sums.toTensor(), call.dropout.toDouble(),
      call.is_causal.toBool(), optional_tensor(call.bias), call.scale.toOptional<double>());
  return {query, key, value};
}

at::Tensor no_random_state() { return at::empty({}, at::kLong); }

Values efficient(const Values& arguments) {
  const auto [output, sums] = attend({arguments[0], arguments[1], arguments[2], arguments[3],
                                      arguments[5], arguments[6], arguments[7]});
  return {output, sums, no_random_state(), no_random_state()};
}

Values efficient_backward(const Values& arguments) {
  const bool needs_bias = arguments[10].toBoolList()[3];
  TORCH_CHECK(!needs_bias, "the CUDA double has no gradient of an attention bias");
  auto gradients = attend_backward({arguments[0], arguments[1], arguments[2], arguments[3],
                                    arguments[4], arguments[5], arguments[6], arguments[9],
                                    arguments[11], arguments[12]});
  gradients.push_back(at::Tensor());
  return gradients;
}

Values flash(const Values& arguments) {
  const auto [output, sums] = attend({arguments[0], arguments[1], arguments[2], kNoBias,
                                      arguments[3], arguments[4], arguments[6]});
  return {output, sums, at::Tensor(), at::Tensor(), arguments[0].toTensor().size(2),
          arguments[1].toTensor().size(2), at::empty({2}, at::kLong), no_random_state(),
          at::empty({0}, output.options())};
}

Values flash_backward(const Values& arguments) {
  return attend_backward({arguments[0], arguments[1], arguments[2], arguments[3], kNoBias,
                          arguments[4], arguments[5], arguments[10], arguments[11],
                          arguments[14]});
}

Values cudnn(const Values& arguments) {
  const auto [output, sums] = attend({arguments[0], arguments[1], arguments[2], arguments[3],
                                      arguments[5], arguments[6], arguments[8]});
  return {output, sums, at::Tensor(), at::Tensor(), arguments[0].toTensor().size(2),
          arguments[1].toTensor().size(2), no_random_state(), no_random_state(),
          at::empty({0}, output.options())};
}

Values cudnn_backward(const Values& arguments) {
  return attend_backward({arguments[0], arguments[1], arguments[2], arguments[3], arguments[8],
                          arguments[4], arguments[5], arguments[13], arguments[14],
                          arguments[15]});
}

}  // namespace

std::unordered_map<std::string, SpecialKernel> attention_kernels() {
  return {{"aten::_scaled_dot_product_efficient_attention", &efficient},
          {"aten::_scaled_dot_product_efficient_attention_backward", &efficient_backward},
          {"aten::_scaled_dot_product_flash_attention", &flash},
          {"aten::_scaled_dot_product_flash_attention_backward", &flash_backward},
          {"aten::_scaled_dot_product_cudnn_attention", &cudnn},
          {"aten::_scaled_dot_product_cudnn_attention_backward", &cudnn_backward}};
}

}  // namespace cuda_double
