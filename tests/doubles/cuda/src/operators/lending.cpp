#include "lending.h"

#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

// In our libcudart.so.13.
extern "C" void cuda_double_wait_for_stream(cudaStream_t stream, int device);

namespace cuda_double {
namespace {

at::Tensor tensor_like(const at::Tensor& tensor, c10::Storage storage) {
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = host.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

c10::Storage host_storage_over(const c10::Storage& storage) {
  c10::DataPtr memory(storage.mutable_data(), nullptr, [](void*) {}, c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory),
      c10::GetCPUAllocator(), /*resizable=*/true));
}

}  // namespace

bool is_on_cuda(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void wait_for_current_stream(c10::Device device) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  cuda_double_wait_for_stream(stream.stream(), device.index());
}

at::Tensor host_view(const at::Tensor& tensor) {
  return is_on_cuda(tensor) ? tensor_like(tensor, host_storage_over(tensor.storage())) : tensor;
}

c10::Storage LentTensors::lend_storage(const c10::Storage& storage) {
  const auto lent = host_storages_.find(storage.unsafeGetStorageImpl());
  if (lent != host_storages_.end()) return lent->second;
  auto host = host_storage_over(storage);
  host_storages_.emplace(storage.unsafeGetStorageImpl(), host);
  cuda_storages_.emplace(host.unsafeGetStorageImpl(), storage);
  return host;
}

at::Tensor LentTensors::lend(const at::Tensor& tensor) {
  if (!is_on_cuda(tensor)) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "the CUDA double has strided tensors only");
  auto host = tensor_like(tensor, lend_storage(tensor.storage()));
  cuda_and_host_.emplace_back(tensor, host);
  return host;
}

void LentTensors::follow_changes() {
  for (auto& [tensor, host] : cuda_and_host_) {
    const auto& memory = host.storage();
    if (memory.data() != tensor.storage().data()) {
      auto grown = at::empty({static_cast<int64_t>(memory.nbytes())},
                             at::TensorOptions().dtype(at::kByte).device(device_));
      std::memcpy(grown.mutable_data_ptr(), memory.data(), memory.nbytes());
      c10::Storage storage = tensor.storage();
      storage.set_data_ptr_noswap(grown.storage().set_data_ptr(c10::DataPtr(nullptr, device_)));
      storage.set_nbytes(memory.nbytes());
    }
    if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides() ||
        tensor.storage_offset() != host.storage_offset()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                          host.storage_offset());
    }
  }
}

at::Tensor LentTensors::take(const at::Tensor& result) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (const auto& [tensor, host] : cuda_and_host_) {
    if (host.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return tensor;
  }
  const auto owner = cuda_storages_.find(result.storage().unsafeGetStorageImpl());
  if (owner != cuda_storages_.end()) {
    auto view = at::empty({0}, result.options().device(device_));
    view.set_(owner->second, result.storage_offset(), result.sizes(), result.strides());
    return view;
  }
  auto copy = at::empty_strided(result.sizes(), result.strides(),
                                at::TensorOptions().dtype(result.dtype()).device(device_));
  const auto bytes = at::detail::computeStorageNbytes(result.sizes(), result.strides(),
                                                      result.dtype().itemsize());
  if (bytes) std::memcpy(copy.mutable_data_ptr(), result.const_data_ptr(), bytes);
  copy._set_conj(result.is_conj());
  copy._set_neg(result.is_neg());
  return copy;
}

}  // namespace cuda_double
