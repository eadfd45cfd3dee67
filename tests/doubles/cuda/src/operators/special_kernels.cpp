#include "special_kernels.h"

namespace cuda_double {
namespace {

Values cudnn_grid_sampler(const Values& arguments) {
  return {at::grid_sampler_2d(arguments[0].toTensor(), arguments[1].toTensor(), 0, 0, true)};
}

Values cudnn_grid_sampler_backward(const Values& arguments) {
  const auto [input, grid] = at::grid_sampler_2d_backward(
      arguments[2].toTensor(), arguments[0].toTensor(), arguments[1].toTensor(), 0, 0, true,
      {true, true});
  return {input, grid};
}

Values masked_scale(const Values& arguments) {
  const auto input = arguments[0].toTensor();
  return {input * arguments[1].toTensor().to(input.dtype()) * arguments[2].toDouble()};
}

std::unordered_map<std::string, SpecialKernel> all_kernels() {
  std::unordered_map<std::string, SpecialKernel> kernels = {
      {"aten::cudnn_grid_sampler", &cudnn_grid_sampler},
      {"aten::cudnn_grid_sampler_backward", &cudnn_grid_sampler_backward},
      {"aten::_masked_scale", &masked_scale}};
  kernels.merge(normalization_kernels());
  kernels.merge(attention_kernels());
  return kernels;
}

}  // namespace

SpecialKernel find_special_kernel(const c10::OperatorName& name) {
  static const auto kernels = all_kernels();
  if (!name.overload_name.empty()) return nullptr;
  const auto kernel = kernels.find(name.name);
  return kernel == kernels.end() ? nullptr : kernel->second;
}

}  // namespace cuda_double
