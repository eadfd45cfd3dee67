// Random numbers of the simulated devices: the CPU's generator, or a stream for each device.
//
// The state of a device's stream is the vendor's: a seed and an offset, 16 bytes. The numbers are
// not the vendor's. Each call of an operator draws from the CPU's generator, seeded with a hash of
// seed and offset, and moves the offset.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>

#include "settings.h"

namespace sim {

struct RandomStream {
  uint64_t seed = c10::default_rng_seed_val;
  int64_t offset = 0;

  static constexpr int64_t kStateBytes = sizeof(uint64_t) + sizeof(int64_t);
  static constexpr int64_t kStep = 4;  // offsets are multiples of it
};

inline std::array<RandomStream, kMaxDevices> random_streams;
inline std::mutex random_mutex;

// splitmix64 (Steele, Lea, Flood 2014), of a seed and an offset.
inline uint64_t mixed(uint64_t seed, uint64_t offset) {
  uint64_t bits = seed + (offset + 1) * 0x9e3779b97f4a7c15ULL;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31);
}

inline at::Tensor generator_state(at::Generator generator) {  // a handle, not a copy
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// While it lives, the CPU's kernels draw from a device's stream.
class DrawFrom {
 public:
  explicit DrawFrom(RandomStream& stream)
      : lock_(random_mutex), host_(at::detail::getDefaultCPUGenerator()) {
    host_state_ = generator_state(host_);
    std::lock_guard<std::mutex> lock(host_.mutex());
    host_.set_current_seed(mixed(stream.seed, static_cast<uint64_t>(stream.offset)));
    stream.offset += RandomStream::kStep;
  }
  ~DrawFrom() {
    std::lock_guard<std::mutex> lock(host_.mutex());
    host_.set_state(host_state_);
  }

 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator host_;
  at::Tensor host_state_;
};

inline void set_seed(int device, uint64_t seed) {
  if (settings.own_streams) {
    random_streams[device] = {seed, 0};
    return;
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

inline uint64_t seed_of(int device) {
  return settings.own_streams ? random_streams[device].seed
                              : at::detail::getDefaultCPUGenerator().current_seed();
}

// Copy the state to `bytes`, unless that is null; return its size.
inline int64_t get_random_state(int device, uint8_t* bytes) {
  if (settings.own_streams) {
    const auto& stream = random_streams[device];
    if (bytes) {
      std::memcpy(bytes, &stream.seed, sizeof stream.seed);
      std::memcpy(bytes + sizeof stream.seed, &stream.offset, sizeof stream.offset);
    }
    return RandomStream::kStateBytes;
  }
  const auto state = generator_state(at::detail::getDefaultCPUGenerator());
  if (bytes) std::memcpy(bytes, state.const_data_ptr<uint8_t>(), state.numel());
  return state.numel();
}

// `bytes` has the size of a state; return whether its offset is valid.
inline bool set_random_state(int device, const uint8_t* bytes) {
  if (settings.own_streams) {
    RandomStream stream;
    std::memcpy(&stream.seed, bytes, sizeof stream.seed);
    std::memcpy(&stream.offset, bytes + sizeof stream.seed, sizeof stream.offset);
    if (stream.offset % RandomStream::kStep != 0) return false;
    random_streams[device] = stream;
    return true;
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  auto state = generator_state(generator).clone();
  std::memcpy(state.data_ptr<uint8_t>(), bytes, state.numel());
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
  return true;
}

}  // namespace sim
