#include "random_numbers.h"

#include <ATen/Context.h>

namespace cuda_double {
namespace {

// The CPU has one default generator for all devices.
std::mutex& cpu_generator_mutex() {
  static std::mutex mutex;
  return mutex;
}

// splitmix64: seeds and offsets that differ little give seeds that differ much.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace

DrawsFrom::DrawsFrom(at::Generator cuda_generator)
    : lock_(cpu_generator_mutex()),
      cpu_generator_(at::globalContext().defaultGenerator(c10::kCPU)) {
  uint64_t seed;
  {
    std::lock_guard<std::mutex> lock(cuda_generator.mutex());
    const uint64_t offset = cuda_generator.get_offset();
    seed = mix(cuda_generator.current_seed() + mix(offset));
    // Offsets of CUDA's generator are multiples of 4.
    cuda_generator.set_offset(offset + 4);
  }
  std::lock_guard<std::mutex> lock(cpu_generator_.mutex());
  cpu_state_ = cpu_generator_.get_state();
  cpu_generator_.set_current_seed(seed);
}

DrawsFrom::~DrawsFrom() {
  std::lock_guard<std::mutex> lock(cpu_generator_.mutex());
  cpu_generator_.set_state(cpu_state_);
}

}  // namespace cuda_double
