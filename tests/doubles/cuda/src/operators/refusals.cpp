#include "refusals.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <unordered_map>

#include "lending.h"

namespace cuda_double {
namespace {

// Operators whose CUDA kernel always calls alertNotDeterministic, with the name that it passes, in
// torch 2.14.1. tests/cuda/test_double_refusals.py compares the names with PyTorch's library.
const std::unordered_map<std::string, const char*>& always_refused() {
  static const std::unordered_map<std::string, const char*> names = {
      {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
      {"aten::_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
      {"aten::adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
      {"aten::avg_pool3d_backward", "avg_pool3d_backward_cuda"},
      {"aten::fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
      {"aten::fractional_max_pool3d_backward", "fractional_max_pool3d_backward_cuda"},
      {"aten::max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward_cuda"},
      {"aten::max_unpool2d", "max_unpooling2d_forward_out"},
      {"aten::max_unpool3d", "max_unpooling3d_forward_out"},
      {"aten::upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
      {"aten::upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
      {"aten::_upsample_bilinear2d_aa_backward", "upsample_bilinear2d_aa_backward_out_cuda"},
      {"aten::upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
      {"aten::_upsample_bicubic2d_aa_backward", "upsample_bicubic2d_aa_backward_out_cuda"},
      {"aten::upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
      {"aten::reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
      {"aten::reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
      {"aten::replication_pad1d_backward", "replication_pad1d_backward_cuda"},
      {"aten::replication_pad2d_backward", "replication_pad2d_backward_cuda"},
      {"aten::replication_pad3d_backward", "replication_pad3d_backward_cuda"},
      {"aten::grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
      {"aten::grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"},
      {"aten::cudnn_grid_sampler_backward", "cudnn_grid_sampler_backward"},
      {"aten::index_reduce", "index_reduce_cuda"},
      {"aten::index_reduce_", "index_reduce_cuda"},
      {"aten::_ctc_loss_backward", "ctc_loss_backward_gpu"}};
  return names;
}

bool has_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// Operators that are refused for some arguments only; null if these are not refused.
const char* refused_for(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  if (name == "aten::nll_loss2d_forward" && arguments[3].toInt() != at::Reduction::None) {
    return "nll_loss2d_forward_out_cuda_template";
  }
  if (name == "aten::histc" && arguments[0].toTensor().is_floating_point()) {
    return "_histc_cuda with floating point input";
  }
  if (name == "aten::bincount" && has_tensor(arguments[1])) return "_bincount_cuda";
  if ((name == "aten::median" || name == "aten::nanmedian") && arguments.size() > 1 &&
      arguments[1].isInt()) {
    return "median CUDA with indices output";
  }
  constexpr int64_t kMaxOfABag = 2;
  // Unless the gradient is sparse, it calls _embedding_bag_dense_backward, which CUDA refuses.
  if (name == "aten::_embedding_bag_backward" && arguments[8].toInt() == kMaxOfABag &&
      !arguments[9].toBool()) {
    return "embedding_bag_backward_cuda_max";
  }
  if ((name == "aten::scatter" || name == "aten::scatter_") && arguments.size() > 4 &&
      arguments[4].isString()) {
    return "scatter_reduce_cuda_kernel";
  }
  if ((name == "aten::scatter_reduce" || name == "aten::scatter_reduce_") &&
      arguments[4].toStringView() == "prod") {
    return "scatter_reduce_cuda_prod_";
  }
  // PyTorch's own check is in code for both devices, and would see CPU tensors.
  if (name == "aten::put_" && arguments[3].toBool()) return "put_";
  return nullptr;
}

bool uses_cublas(const std::string& name) {
  static const std::set<std::string> products = {
      "aten::mm",      "aten::addmm",    "aten::addmm_", "aten::bmm", "aten::baddbmm",
      "aten::baddbmm_", "aten::addmv",   "aten::dot",    "aten::_addmm_activation"};
  return products.count(name) > 0;
}

void refuse_cublas_without_workspace() {
  const char* value = getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string workspace = value ? value : "";
  if (workspace == ":4096:8" || workspace == ":16:8") return;
  const char* message =
      "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` "
      "or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
      "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic "
      "behavior in this case, you must set an environment variable before running your PyTorch "
      "application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8.";
  if (at::globalContext().deterministicAlgorithmsWarnOnly()) {
    TORCH_WARN(message);
  } else {
    TORCH_CHECK(false, message);
  }
}

template <typename Visit>
void for_each_tensor(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                     Visit visit) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = schema.arguments()[i].name();
    if (arguments[i].isTensor()) {
      visit(arguments[i].toTensor(), name);
    } else if (arguments[i].isList()) {
      for (const auto& item : arguments[i].toListRef()) {
        if (item.isTensor()) visit(item.toTensor(), name);
      }
    }
  }
}

// CUDA's kernels of these take a tensor on the host beside those on a device.
bool takes_host_tensors(const std::string& name) {
  for (const char* part : {"index", "_fused_", "_foreach_"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

void refuse_nondeterministic(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  auto& context = at::globalContext();
  if (!context.deterministicAlgorithms()) return;
  const auto entry = always_refused().find(name);
  if (entry != always_refused().end()) context.alertNotDeterministic(entry->second);
  if (const char* kernel = refused_for(name, arguments)) context.alertNotDeterministic(kernel);
  if (uses_cublas(name)) refuse_cublas_without_workspace();
}

c10::Device check_devices(const c10::FunctionSchema& schema,
                          c10::ArrayRef<c10::IValue> arguments) {
  const c10::Device current(c10::kCUDA, c10::cuda::getCurrentCUDAStream().device_index());
  std::optional<c10::Device> device;
  for_each_tensor(schema, arguments, [&](const at::Tensor& tensor, const std::string&) {
    if (is_on_cuda(tensor) && !device) device = tensor.device();
  });
  if (!device) {
    for (const auto& value : arguments) {
      if (value.isDevice()) device = value.toDevice();
    }
    return device && device->is_cuda() && device->has_index() ? *device : current;
  }
  for_each_tensor(schema, arguments, [&](const at::Tensor& tensor, const std::string& argument) {
    if (!tensor.defined() || tensor.device() == *device) return;
    if (tensor.is_cpu() && (tensor.dim() == 0 || takes_host_tensors(schema.name()))) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", *device, " and ", tensor.device(), "! (when checking argument for "
                "argument ", argument, " in method ", schema.name(), ")");
  });
  return *device;
}

}  // namespace cuda_double
