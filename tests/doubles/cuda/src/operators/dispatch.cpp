// Every CUDA kernel of PyTorch's `aten` operators, replaced by the CPU's kernel of that operator.
//
// The CPU kernel gets CPU tensors over the memory of the CUDA tensors (lending.h). What it returns
// is copied into memory of the real CUDA caching allocator. PyTorch's own CUDA code stays where it
// launches no kernel: allocation, views, resizing, item(), copies between devices and the host,
// streams, events, generators, process groups.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "../visible.h"
#include "lending.h"
#include "random_numbers.h"
#include "refusals.h"
#include "special_kernels.h"

namespace cuda_double {
namespace {

using torch::jit::Stack;

// Replaces tensors and devices of an argument by those of the CPU.
void lend_value(c10::IValue& value, LentTensors& tensors) {
  if (value.isTensor()) {
    value = tensors.lend(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(tensors.lend(tensor));
    value = c10::IValue(std::move(list));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(tensors.lend(*tensor)) : std::nullopt);
    }
    value = c10::IValue(std::move(list));
  } else if (value.isDevice() && value.toDevice().is_cuda()) {
    value = c10::Device(c10::kCPU);
  }
}

void take_value(c10::IValue& value, LentTensors& tensors) {
  if (value.isTensor()) {
    value = tensors.take(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(tensors.take(tensor));
    value = c10::IValue(std::move(list));
  }
}

// Draws numbers for an operator without a generator argument. Attention draws for dropout only.
bool draws_by_default(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) &&
         op.schema().name().find("attention") == std::string::npos;
}

// Replaces the arguments on the stack, which are its last `count` values, by the results.
void run_cpu_kernel(const c10::OperatorHandle& op, Stack* stack, size_t count) {
  if (const auto kernel = find_special_kernel(op.operator_name())) {
    auto results = kernel(Values(stack->end() - count, stack->end()));
    stack->erase(stack->end() - count, stack->end());
    for (auto& result : results) stack->push_back(std::move(result));
    return;
  }
  TORCH_CHECK(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "the CUDA double has no ",
              op.operator_name(), ": the CPU has no kernel of that name");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, count);
  const c10::Device device = check_devices(schema, arguments);
  c10::OptionalDeviceGuard guard(device);
  refuse_nondeterministic(schema.name(), arguments);
  wait_for_current_stream(device);
  LentTensors tensors(device);
  std::optional<DrawsFrom> draws;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isGenerator()) {
      draws.emplace(value.toGenerator());
      value = c10::IValue();
    } else {
      lend_value(value, tensors);
    }
  }
  if (!draws && draws_by_default(op)) draws.emplace(at::globalContext().defaultGenerator(device));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  run_cpu_kernel(op, stack, count);
  draws.reset();
  tensors.follow_changes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    take_value((*stack)[i], tensors);
  }
}

bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.dtype() == b.dtype() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// Copies between CUDA tensors that PyTorch would do with a kernel. All others are PyTorch's own.
at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (!is_on_cuda(target) || !is_on_cuda(source) || have_same_layout(target, source)) {
    return at::native::copy_(target, source, non_blocking);
  }
  c10::OptionalDeviceGuard guard(target.device());
  wait_for_current_stream(source.device());
  wait_for_current_stream(target.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  host_view(target).copy_(host_view(source));
  return target;
}

// CUDA kernels that launch nothing.
bool is_pytorchs_own(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::view", "aten::view_as_real", "aten::view_as_complex", "aten::as_strided",
      "aten::unfold", "aten::_reshape_alias", "aten::empty", "aten::empty_strided",
      "aten::resize_", "aten::record_stream", "aten::set_", "aten::_local_scalar_dense",
      "aten::is_set_to", "aten::_nested_view_from_buffer", "aten::copy_"};
  return names.count(name) > 0;
}

// PyTorch warns about each kernel that is replaced, which is the purpose here.
struct IgnoreWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace
}  // namespace cuda_double

// Called once, by boot.py. Returns the number of replaced kernels.
CUDA_DOUBLE_API int cuda_double_register_operators() {
  using namespace cuda_double;
  IgnoreWarnings ignore;
  c10::WarningUtils::WarningHandlerGuard guard(&ignore);
  // Never destroyed: that would give the kernels back.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                            __FILE__, __LINE__);
  int count = 0;
  const auto replace = [&](const c10::OperatorName& name) {
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    const std::string name_in_aten = name.name.substr(strlen("aten::")) + overload;
    library->impl(name_in_aten.c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    ++count;
  };
  for (const auto& name :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) == 0 && !is_pytorchs_own(name.name)) replace(name);
  }
  // Convolution chooses a library by the device, so that it is replaced as a whole.
  for (const char* name : {"convolution", "_convolution", "convolution_backward"}) {
    replace({std::string("aten::") + name, ""});
  }
  library->impl("copy_", torch::CppFunction(&copy_));
  return count;
}
