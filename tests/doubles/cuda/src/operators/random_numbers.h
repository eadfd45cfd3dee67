// Random numbers of CUDA generators.
#pragma once

#include <ATen/ATen.h>

#include <mutex>

namespace cuda_double {

// While it lives, the CPU's kernels draw numbers that follow from a CUDA generator's seed and
// offset; the offset then advances. So a saved state of the CUDA generator repeats the numbers, and
// the CPU's generator is left as it was.
class DrawsFrom {
 public:
  explicit DrawsFrom(at::Generator cuda_generator);
  ~DrawsFrom();
  DrawsFrom(const DrawsFrom&) = delete;
  DrawsFrom& operator=(const DrawsFrom&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator cpu_generator_;
  at::Tensor cpu_state_;
};

}  // namespace cuda_double
