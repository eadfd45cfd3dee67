// Copies and fills. A copy is a memcpy in the caller's thread, after the stream's queue.
//
// CUDA_DOUBLE_LATE_COPIES=N makes asynchronous copies between a device and pinned host memory run
// in the stream's thread, N milliseconds late; their target holds garbage until then. So a caller
// that reads the target, or changes pinned memory that is being copied, without waiting for the
// stream sees what it may see on a GPU. CUDA stages pageable memory before the call returns, so
// that copies of it are not late.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "devices.h"
#include "memory.h"
#include "queued_memory.h"
#include "streams.h"

namespace cuda_double {
namespace {

// As float32: -2.7e7; as uint8: 203; as int64: far outside of any index.
constexpr int kGarbage = 0xcb;

cudaError_t check_kind(const void* target, const void* source, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (to_device && !is_device_memory(target)) {
    fprintf(stderr, "CUDA double: the target of a copy to a device is not device memory\n");
    return cudaErrorInvalidValue;
  }
  if (from_device && !is_device_memory(source)) {
    fprintf(stderr, "CUDA double: the source of a copy from a device is not device memory\n");
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t copy_now(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  if (!bytes) return cudaSuccess;
  if (const cudaError_t error = check_kind(target, source, kind)) return error;
  memmove(target, source, bytes);
  return cudaSuccess;
}

std::chrono::milliseconds lateness() {
  static const std::chrono::milliseconds lateness(setting("CUDA_DOUBLE_LATE_COPIES", 0));
  return lateness;
}

bool is_late(const void* target, const void* source, size_t bytes) {
  return lateness().count() && bytes &&
         ((is_device_memory(source) && is_pinned_memory(target)) ||
          (is_pinned_memory(source) && is_device_memory(target)));
}

// What is queued may still need what the target holds.
void copy_late(void* target, const void* source, size_t bytes, CUstream_st* stream) {
  if (!cuda_double_memory_is_queued(target, bytes)) memset(target, kGarbage, bytes);
  cuda_double_add_queued_memory(target, bytes);
  cuda_double_add_queued_memory(source, bytes);
  stream->enqueue([=] {
    memset(target, kGarbage, bytes);
    std::this_thread::sleep_for(lateness());
    memcpy(target, source, bytes);
    cuda_double_remove_queued_memory(target, bytes);
    cuda_double_remove_queued_memory(source, bytes);
  });
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes,
                                            cudaMemcpyKind kind, cudaStream_t handle) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  auto* stream = resolve(handle);
  if (is_late(target, source, bytes) && !check_kind(target, source, kind)) {
    copy_late(target, source, bytes, stream);
    return cudaSuccess;
  }
  stream->wait();
  return remember(copy_now(target, source, bytes, kind));
}
CUDA_DOUBLE_API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes,
                                       cudaMemcpyKind kind) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  resolve(nullptr)->wait();
  return remember(copy_now(target, source, bytes, kind));
}
CUDA_DOUBLE_API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int,
                                                size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
}
CUDA_DOUBLE_API cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch,
                                              const void* source, size_t source_pitch,
                                              size_t width, size_t height, cudaMemcpyKind kind,
                                              cudaStream_t handle) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  resolve(handle)->wait();
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        copy_now(static_cast<char*>(target) + row * target_pitch,
                 static_cast<const char*>(source) + row * source_pitch, width, kind);
    if (error) return remember(error);
  }
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes,
                                            cudaStream_t stream) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  resolve(stream)->wait();
  if (bytes && !is_device_memory(target)) return remember(cudaErrorInvalidValue);
  memset(target, value, bytes);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  return cudaMemsetAsync(target, value, bytes, nullptr);
}
