// Memory: a device's memory is anonymous memory of the process, with a limit for each device.
#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "devices.h"
#include "streams.h"

namespace cuda_double {
namespace {

enum class MemoryKind { kDevice, kPinned, kRegistered };

struct Allocation {
  uintptr_t address;
  size_t bytes;
  int device;
  MemoryKind kind;
};

std::atomic<size_t> allocated_bytes[kMaxDevices];
std::mutex allocations_mutex;

// Never destroyed: threads of streams may run until the process has ended.
std::map<uintptr_t, Allocation>& allocations() {
  static auto* map = new std::map<uintptr_t, Allocation>;
  return *map;
}

std::optional<Allocation> allocation_around(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(allocations_mutex);
  auto next = allocations().upper_bound(address);
  if (next == allocations().begin()) return std::nullopt;
  const Allocation& allocation = std::prev(next)->second;
  if (address >= allocation.address + allocation.bytes) return std::nullopt;
  return allocation;
}

// False if an allocation begins at this address already.
bool add_allocation(void* pointer, size_t bytes, MemoryKind kind) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(allocations_mutex);
  return allocations().insert({address, {address, bytes, current_device(), kind}}).second;
}

// The allocation of this kind that began at `pointer`, now forgotten.
std::optional<Allocation> remove_allocation(void* pointer, MemoryKind kind) {
  std::lock_guard<std::mutex> lock(allocations_mutex);
  auto position = allocations().find(reinterpret_cast<uintptr_t>(pointer));
  if (position == allocations().end() || position->second.kind != kind) return std::nullopt;
  const Allocation allocation = position->second;
  allocations().erase(position);
  return allocation;
}

size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }

void* map_pages(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

bool is_device_memory(const void* pointer) {
  const auto allocation = allocation_around(pointer);
  return allocation && allocation->kind == MemoryKind::kDevice;
}

bool is_pinned_memory(const void* pointer) {
  const auto allocation = allocation_around(pointer);
  return allocation && allocation->kind != MemoryKind::kDevice;
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  RETURN_UNLESS_USABLE();
  const int device = current_device();
  if (const cudaError_t error = open_context(device)) return remember(error);
  if (!bytes) return cudaSuccess;
  bytes = whole_pages(bytes);
  void* memory = nullptr;
  if ((allocated_bytes[device] += bytes) <= memory_of_a_device()) memory = map_pages(bytes);
  if (!memory) {
    allocated_bytes[device] -= bytes;
    return remember(cudaErrorMemoryAllocation);
  }
  add_allocation(memory, bytes, MemoryKind::kDevice);
  *pointer = memory;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaFree(void* pointer) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  if (!pointer) return cudaSuccess;
  if (const auto allocation = allocation_around(pointer)) wait_for_device(allocation->device);
  const auto allocation = remove_allocation(pointer, MemoryKind::kDevice);
  if (!allocation) return remember(cudaErrorInvalidValue);
  allocated_bytes[allocation->device] -= allocation->bytes;
  munmap(pointer, allocation->bytes);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  RETURN_UNLESS_USABLE();
  *total_bytes = memory_of_a_device();
  *free_bytes = memory_of_a_device() - allocated_bytes[current_device()];
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = nullptr;
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  if (!bytes) return cudaSuccess;
  bytes = whole_pages(bytes);
  void* memory = map_pages(bytes);
  if (!memory) return remember(cudaErrorMemoryAllocation);
  add_allocation(memory, bytes, MemoryKind::kPinned);
  *pointer = memory;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaFreeHost(void* pointer) {
  RETURN_UNLESS_USABLE();
  if (!pointer) return cudaSuccess;
  wait_for_all_devices();
  const auto allocation = remove_allocation(pointer, MemoryKind::kPinned);
  if (!allocation) return remember(cudaErrorInvalidValue);
  munmap(pointer, allocation->bytes);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  RETURN_UNLESS_USABLE();
  return add_allocation(pointer, bytes, MemoryKind::kRegistered)
             ? cudaSuccess
             : remember(cudaErrorHostMemoryAlreadyRegistered);
}
CUDA_DOUBLE_API cudaError_t cudaHostUnregister(void* pointer) {
  RETURN_UNLESS_USABLE();
  wait_for_all_devices();
  return remove_allocation(pointer, MemoryKind::kRegistered)
             ? cudaSuccess
             : remember(cudaErrorHostMemoryNotRegistered);
}
CUDA_DOUBLE_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                     const void* pointer) {
  RETURN_UNLESS_USABLE();
  memset(attributes, 0, sizeof *attributes);
  attributes->device = -2;
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->hostPointer = const_cast<void*>(pointer);
  if (const auto allocation = allocation_around(pointer)) {
    const bool is_device = allocation->kind == MemoryKind::kDevice;
    attributes->device = allocation->device;
    attributes->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->devicePointer = const_cast<void*>(pointer);
    if (is_device) attributes->hostPointer = nullptr;
  }
  return cudaSuccess;
}
