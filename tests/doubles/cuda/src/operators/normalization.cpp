// Batch normalization: the parts of SyncBatchNorm, and cuDNN's where PyTorch asks for it by name.
#include "special_kernels.h"

namespace cuda_double {
namespace {

std::vector<int64_t> all_dimensions_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dimensions;
  for (int64_t i = 0; i < input.dim(); ++i) {
    if (i != 1) dimensions.push_back(i);
  }
  return dimensions;
}

// The values of the channels in a shape that broadcasts over the input.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return values.view(shape);
}

void update_running(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(value.to(running.dtype()), momentum);
}

Values cudnn_batch_norm(const Values& arguments) {
  const auto [output, mean, inverse_std] = at::native_batch_norm(
      arguments[0].toTensor(), optional_tensor(arguments[1]), optional_tensor(arguments[2]),
      optional_tensor(arguments[3]), optional_tensor(arguments[4]), arguments[5].toBool(),
      arguments[6].toDouble(), arguments[7].toDouble());
  return {output, mean, inverse_std, at::empty({0}, at::kByte)};
}

Values cudnn_batch_norm_backward(const Values& arguments) {
  const auto [input, weight, bias] = at::native_batch_norm_backward(
      arguments[1].toTensor(), arguments[0].toTensor(), optional_tensor(arguments[2]),
      optional_tensor(arguments[3]), optional_tensor(arguments[4]), optional_tensor(arguments[5]),
      optional_tensor(arguments[6]), true, arguments[7].toDouble(), {true, true, true});
  return {input, weight, bias};
}

Values batch_norm_stats(const Values& arguments) {
  const auto input = arguments[0].toTensor();
  const auto [variance, mean] =
      at::var_mean(input.to(at::kFloat), all_dimensions_but_channels(input), false);
  return {mean, (variance + arguments[1].toDouble()).rsqrt()};
}

Values batch_norm_elemt(const Values& arguments) {
  const auto input = arguments[0].toTensor();
  const auto weight = tensor_or_undefined(arguments[1]), bias = tensor_or_undefined(arguments[2]);
  const auto mean = arguments[3].toTensor(), inverse_std = arguments[4].toTensor();
  auto output =
      (input.to(at::kFloat) - per_channel(mean, input)) * per_channel(inverse_std, input);
  if (weight.defined()) output = output * per_channel(weight, input);
  if (bias.defined()) output = output + per_channel(bias, input);
  return {output.to(input.dtype())};
}

Values batch_norm_gather_stats_with_counts(const Values& arguments) {
  const double momentum = arguments[5].toDouble(), epsilon = arguments[6].toDouble();
  const auto means = arguments[1].toTensor().to(at::kDouble);
  const auto variances = arguments[2].toTensor().to(at::kDouble).pow(-2) - epsilon;
  const auto counts = arguments[7].toTensor().to(at::kDouble).view({-1, 1});
  const auto total = counts.sum();
  const auto mean = (means * counts).sum(0) / total;
  const auto variance = ((variances + (means - mean).pow(2)) * counts).sum(0) / total;
  update_running(tensor_or_undefined(arguments[3]), mean, momentum);
  update_running(tensor_or_undefined(arguments[4]), variance * total / (total - 1), momentum);
  return {mean.to(at::kFloat), (variance + epsilon).rsqrt().to(at::kFloat)};
}

Values batch_norm_backward_reduce(const Values& arguments) {
  const auto gradient = arguments[0].toTensor().to(at::kFloat), input = arguments[1].toTensor();
  const auto mean = arguments[2].toTensor(), inverse_std = arguments[3].toTensor();
  const auto weight = tensor_or_undefined(arguments[4]);
  const bool needs_input = arguments[5].toBool();
  const auto dimensions = all_dimensions_but_channels(input);
  const auto sum = gradient.sum(dimensions);
  const auto sum_with_deviation =
      (gradient * (input.to(at::kFloat) - per_channel(mean, input))).sum(dimensions);
  const auto as_weight = [&](const at::Tensor& value) {
    return weight.defined() ? value.to(weight.dtype()) : value;
  };
  return {needs_input ? sum : at::Tensor(), needs_input ? sum_with_deviation : at::Tensor(),
          arguments[6].toBool() ? as_weight(sum_with_deviation * inverse_std) : at::Tensor(),
          arguments[7].toBool() ? as_weight(sum.clone()) : at::Tensor()};
}

Values batch_norm_backward_elemt(const Values& arguments) {
  const auto gradient = arguments[0].toTensor(), input = arguments[1].toTensor();
  const auto mean = arguments[2].toTensor(), inverse_std = arguments[3].toTensor();
  const auto weight = tensor_or_undefined(arguments[4]);
  const auto count = arguments[7].toTensor().sum().to(at::kFloat);
  const auto mean_gradient = arguments[5].toTensor() / count;
  const auto factor = arguments[6].toTensor() / count * inverse_std * inverse_std;
  const auto scale = weight.defined() ? inverse_std * weight : inverse_std;
  const auto deviation = input.to(at::kFloat) - per_channel(mean, input);
  const auto output = (gradient.to(at::kFloat) - per_channel(mean_gradient, input) -
                       deviation * per_channel(factor, input)) *
                      per_channel(scale, input);
  return {output.to(input.dtype())};
}

}  // namespace

std::unordered_map<std::string, SpecialKernel> normalization_kernels() {
  return {{"aten::cudnn_batch_norm", &cudnn_batch_norm},
          {"aten::cudnn_batch_norm_backward", &cudnn_batch_norm_backward},
          {"aten::batch_norm_stats", &batch_norm_stats},
          {"aten::batch_norm_elemt", &batch_norm_elemt},
          {"aten::batch_norm_gather_stats_with_counts", &batch_norm_gather_stats_with_counts},
          {"aten::batch_norm_backward_reduce", &batch_norm_backward_reduce},
          {"aten::batch_norm_backward_elemt", &batch_norm_backward_elemt}};
}

}  // namespace cuda_double
