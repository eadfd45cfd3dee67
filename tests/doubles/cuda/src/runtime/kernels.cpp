// Kernels cannot run. Their names are recorded, so that a launch fails with the kernel's name.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "unsupported.h"

namespace cuda_double {
namespace {

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

std::mutex kernel_names_mutex;
thread_local std::vector<LaunchConfiguration> launch_configurations;

std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, const char*>;
  return *names;
}

std::string kernel_name(const void* function) {
  std::lock_guard<std::mutex> lock(kernel_names_mutex);
  const auto entry = kernel_names().find(function);
  if (entry == kernel_names().end()) return "an unknown kernel";
  int status = 0;
  char* demangled = abi::__cxa_demangle(entry->second, nullptr, nullptr, &status);
  std::string name = demangled ? demangled : entry->second;
  free(demangled);
  return name;
}

cudaError_t refuse_launch(const void* function) {
  fprintf(stderr, "CUDA double: cannot launch %.400s\n", kernel_name(function).c_str());
  show_backtrace();
  return remember(cudaErrorNotSupported);
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

// What the compiler of CUDA adds to a library: it registers its kernels when it is loaded.
CUDA_DOUBLE_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
CUDA_DOUBLE_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_DOUBLE_API void __cudaUnregisterFatBinary(void**) {}
CUDA_DOUBLE_API char __cudaInitModule(void**) { return 1; }
CUDA_DOUBLE_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
CUDA_DOUBLE_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name,
                                            int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(kernel_names_mutex);
  kernel_names()[function] = name;
}
CUDA_DOUBLE_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

// What the compiler makes of kernel<<<grid, block, shared_bytes, stream>>>(...).
CUDA_DOUBLE_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                     void* stream) {
  launch_configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
CUDA_DOUBLE_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                                       size_t* shared_bytes, void* stream) {
  if (launch_configurations.empty()) return cudaErrorInvalidValue;
  const auto& configuration = launch_configurations.back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  launch_configurations.pop_back();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t,
                                               cudaStream_t) {
  return refuse_launch(kernel);
}
CUDA_DOUBLE_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t,
                                             cudaStream_t) {
  return refuse_launch(function);
}
CUDA_DOUBLE_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function,
                                                void**) {
  return refuse_launch(function);
}
CUDA_DOUBLE_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**,
                                                        size_t, cudaStream_t) {
  return refuse_launch(function);
}
CUDA_DOUBLE_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

// PyTorch gets the driver's functions by name; they are in our libcuda.so.1.
CUDA_DOUBLE_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, "cuda_double_unknown_driver_function");
  if (status) {
    *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
