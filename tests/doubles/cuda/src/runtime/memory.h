// Which addresses are device memory, pinned host memory, or neither.
#pragma once

namespace cuda_double {

bool is_device_memory(const void* pointer);
bool is_pinned_memory(const void* pointer);

}  // namespace cuda_double
