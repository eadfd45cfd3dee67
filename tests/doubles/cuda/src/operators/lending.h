// Host tensors over the memory of CUDA tensors, which is host memory (runtime/memory.cpp).
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuda_double {

bool is_on_cuda(const at::Tensor& tensor);

// Waits for the current stream of a CUDA device, as a kernel waits for its turn.
void wait_for_current_stream(c10::Device device);

// A CPU tensor over the memory of a CUDA tensor; other tensors as they are.
at::Tensor host_view(const at::Tensor& tensor);

// The tensors of one call of an operator: lent to a CPU kernel, and taken back.
class LentTensors {
 public:
  explicit LentTensors(c10::Device device) : device_(device) {}

  // The CPU tensor for an argument. Arguments that share memory share it here too.
  at::Tensor lend(const at::Tensor& tensor);

  // Gives arguments the memory and the shape that the kernel gave them: resized outputs.
  void follow_changes();

  // The CUDA tensor for a result of the kernel: an argument, a view of one, or new memory with
  // the result's values.
  at::Tensor take(const at::Tensor& result);

 private:
  c10::Storage lend_storage(const c10::Storage& storage);

  const c10::Device device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cuda_storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> cuda_and_host_;
};

}  // namespace cuda_double
