// What every part of the runtime asks: settings, the devices of this process, the current one, and
// the last error of the calling thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "../visible.h"

// Leaves a function of the runtime with CUDA's error if the process cannot use CUDA at all.
#define RETURN_UNLESS_USABLE() \
  if (const cudaError_t usable_ = cuda_double::check_usable()) return cuda_double::remember(usable_)

namespace cuda_double {

constexpr int kMaxDevices = 64;

// The whole number that an environment variable holds, or `fallback` if it is unset or empty.
long setting(const char* variable, long fallback);

// Physical indices of the devices that this process sees, after CUDA_VISIBLE_DEVICES.
const std::vector<int>& visible_devices();

// Memory of each device in bytes: CUDA_DOUBLE_MEMORY, in MiB.
size_t memory_of_a_device();

// cudaSuccess, or why CUDA cannot be used here: no device, or a fork of a process that used CUDA.
cudaError_t check_usable();

// Returns `error`, which cudaGetLastError of this thread then returns as well.
cudaError_t remember(cudaError_t error);

int current_device();
void set_current_device(int device);

// Creates the context of a device, as its first use does.
cudaError_t open_context(int device);

}  // namespace cuda_double
