// Operators that have a CUDA kernel and no CPU kernel of the same name. Other operators compute
// them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace cuda_double {

using Values = std::vector<c10::IValue>;

// Gets the operator's arguments, with CPU tensors, and returns its results.
using SpecialKernel = Values (*)(const Values& arguments);

// Their kernels by name, "aten::...".
std::unordered_map<std::string, SpecialKernel> normalization_kernels();
std::unordered_map<std::string, SpecialKernel> attention_kernels();

// The kernel of an operator; null if it has none here.
SpecialKernel find_special_kernel(const c10::OperatorName& name);

// An argument of type "Tensor?", in both of the forms that PyTorch's functions take.
inline at::Tensor tensor_or_undefined(const c10::IValue& value) {
  return value.isNone() ? at::Tensor() : value.toTensor();
}
inline std::optional<at::Tensor> optional_tensor(const c10::IValue& value) {
  const auto tensor = tensor_or_undefined(value);
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace cuda_double
