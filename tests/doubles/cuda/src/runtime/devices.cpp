// Devices: how many there are, which of them the process sees, and their properties.
#include "devices.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace cuda_double {
namespace {

std::atomic<bool> has_context[kMaxDevices];
std::atomic<bool> was_used{false};
bool is_fork_of_user = false;
thread_local int device_of_thread = 0;
thread_local cudaError_t error_of_thread = cudaSuccess;

// Our uuids consist of 0x5a and end with the index of the device; PyTorch writes them in hex.
int parse_device(const std::string& entry) {
  const bool is_uuid = entry.rfind("GPU-", 0) == 0;
  if (entry.empty() || (is_uuid && entry.size() != 40)) return -1;
  char* end = nullptr;
  const long index =
      is_uuid ? strtol(entry.c_str() + 38, &end, 16) : strtol(entry.c_str(), &end, 10);
  return *end ? -1 : static_cast<int>(index);
}

std::vector<int> parse_visible_devices() {
  const int count = static_cast<int>(
      std::min<long>(std::max(setting("CUDA_DOUBLE_DEVICES", 0), 0L), kMaxDevices));
  std::vector<int> devices;
  const char* mask = getenv("CUDA_VISIBLE_DEVICES");
  if (!mask) {
    for (int device = 0; device < count; ++device) devices.push_back(device);
    return devices;
  }
  const std::string entries = std::string(mask) + ",";
  for (size_t begin = 0, end; (end = entries.find(',', begin)) != std::string::npos;
       begin = end + 1) {
    const int device = parse_device(entries.substr(begin, end - begin));
    // As on a GPU, an invalid entry hides what follows it.
    if (device < 0 || device >= count) break;
    devices.push_back(device);
  }
  return devices;
}

bool is_visible(int device) {
  return device >= 0 && device < static_cast<int>(visible_devices().size());
}

}  // namespace

long setting(const char* variable, long fallback) {
  const char* text = getenv(variable);
  return text && *text ? atol(text) : fallback;
}

const std::vector<int>& visible_devices() {
  static const std::vector<int> devices = parse_visible_devices();
  return devices;
}

size_t memory_of_a_device() {
  static const size_t bytes = static_cast<size_t>(setting("CUDA_DOUBLE_MEMORY", 81920)) << 20;
  return bytes;
}

cudaError_t check_usable() {
  if (!was_used.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { is_fork_of_user = true; });
  }
  if (is_fork_of_user) return cudaErrorInitializationError;
  return visible_devices().empty() ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) error_of_thread = error;
  return error;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

cudaError_t open_context(int device) {
  if (!is_visible(device)) return cudaErrorInvalidDevice;
  has_context[device] = true;
  return cudaSuccess;
}

}  // namespace cuda_double

using namespace cuda_double;

// For our libcuda.so.1.
CUDA_DOUBLE_API int cuda_double_has_context(int device) {
  return device >= 0 && device < kMaxDevices && has_context[device];
}
// For our NCCL, which refuses two ranks on one card.
CUDA_DOUBLE_API int cuda_double_physical_device(int device) { return visible_devices().at(device); }

CUDA_DOUBLE_API cudaError_t cudaGetLastError() {
  const auto error = error_of_thread;
  error_of_thread = cudaSuccess;
  return error;
}
CUDA_DOUBLE_API cudaError_t cudaPeekAtLastError() { return error_of_thread; }

CUDA_DOUBLE_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  RETURN_UNLESS_USABLE();
  *count = static_cast<int>(visible_devices().size());
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaGetDevice(int* device) {
  RETURN_UNLESS_USABLE();
  *device = current_device();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaSetDevice(int device) {
  RETURN_UNLESS_USABLE();
  if (const cudaError_t error = open_context(device)) return remember(error);
  set_current_device(device);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = visible_devices().empty() ? 0 : CUDART_VERSION;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// The figures are those of an H100, where PyTorch chooses by them.
CUDA_DOUBLE_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  RETURN_UNLESS_USABLE();
  if (!is_visible(device)) return remember(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  const int card = visible_devices()[device];
  snprintf(properties->name, sizeof properties->name, "CUDA double (no GPU)");
  memset(properties->uuid.bytes, 0x5a, 15);
  properties->uuid.bytes[15] = static_cast<char>(card);
  properties->pciBusID = 0x10 + card;
  properties->totalGlobalMem = memory_of_a_device();
  properties->major = 9;
  if (const char* capability = getenv("CUDA_DOUBLE_CAPABILITY")) {
    sscanf(capability, "%d.%d", &properties->major, &properties->minor);
  }
  properties->multiProcessorCount = 132;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerMultiprocessor = properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->textureAlignment = properties->texturePitchAlignment = 512;
  properties->asyncEngineCount = 3;
  properties->concurrentKernels = properties->cooperativeLaunch = 1;
  properties->unifiedAddressing = properties->managedMemory = 1;
  properties->canMapHostMemory = properties->hostRegisterSupported = 1;
  properties->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                                   int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = properties.sharedMemPerBlockOptin;
      break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  RETURN_UNLESS_USABLE();
  if (!is_visible(device)) return remember(cudaErrorInvalidDevice);
  snprintf(text, length, "0000:%02X:00.0", 0x10 + visible_devices()[device]);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RETURN_UNLESS_USABLE();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  RETURN_UNLESS_USABLE();
  *can = device != peer;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return check_usable(); }
CUDA_DOUBLE_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
CUDA_DOUBLE_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
