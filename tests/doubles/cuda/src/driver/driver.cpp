// The few functions of the CUDA driver (libcuda.so.1) that PyTorch calls by themselves. The build
// generates the others that it imports; they fail with a message.
#include <cuda.h>

#include <cstdio>

#include "../visible.h"

// In our libcudart.so.13.
extern "C" int cuda_double_has_context(int device);

CUDA_DOUBLE_API CUresult cuda_double_unknown_driver_function() {
  fprintf(stderr, "CUDA double: a function of the CUDA driver is not supported\n");
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUDA_DOUBLE_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUDA_DOUBLE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUDA_DOUBLE_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags,
                                                    int* active) {
  *flags = 0;
  *active = cuda_double_has_context(device);
  return CUDA_SUCCESS;
}
CUDA_DOUBLE_API CUresult cuCtxGetCurrent(CUcontext* context) {
  static int only_context;
  *context = reinterpret_cast<CUcontext>(&only_context);
  return CUDA_SUCCESS;
}
CUDA_DOUBLE_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUDA_DOUBLE_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUDA_DOUBLE_API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "not supported by the CUDA double";
  return CUDA_SUCCESS;
}
#if CUDA_VERSION >= 12090
CUDA_DOUBLE_API CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle*) {
  return CUDA_SUCCESS;
}
CUDA_DOUBLE_API CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif
