// NCCL's functions that submit an operation, and small ones.
#include "collectives.h"
#include "submission.h"

using namespace cuda_double;

namespace {

constexpr auto kCollective = Operation::Kind::kCollective;
constexpr int kNoRoot = -1;

}  // namespace

CUDA_DOUBLE_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
CUDA_DOUBLE_API const char* ncclGetErrorString(ncclResult_t code) {
  switch (code) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

CUDA_DOUBLE_API ncclResult_t ncclAllReduce(const void* source, void* target, size_t count,
                                           ncclDataType_t type, ncclRedOp_t reduction,
                                           ncclComm_t comm, cudaStream_t stream) {
  return submit({"AllReduce", kCollective, comm, source, target, count, type, reduction, kNoRoot,
                 &all_reduce, count, count},
                stream);
}
// On other ranks than the root, NCCL leaves the target alone.
CUDA_DOUBLE_API ncclResult_t ncclReduce(const void* source, void* target, size_t count,
                                        ncclDataType_t type, ncclRedOp_t reduction, int root,
                                        ncclComm_t comm, cudaStream_t stream) {
  if (comm && comm->rank != root) target = nullptr;
  return submit({"Reduce", kCollective, comm, source, target, count, type, reduction, root,
                 &reduce_to_root, count, count},
                stream);
}
// In place, the root's buffer is only read.
CUDA_DOUBLE_API ncclResult_t ncclBroadcast(const void* source, void* target, size_t count,
                                           ncclDataType_t type, int root, ncclComm_t comm,
                                           cudaStream_t stream) {
  if (comm && comm->rank != root) source = nullptr;
  if (source == target) target = nullptr;
  return submit({"Broadcast", kCollective, comm, source, target, count, type, ncclSum, root,
                 &broadcast, count, count},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root,
                                       ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
CUDA_DOUBLE_API ncclResult_t ncclReduceScatter(const void* source, void* target, size_t count,
                                               ncclDataType_t type, ncclRedOp_t reduction,
                                               ncclComm_t comm, cudaStream_t stream) {
  const size_t ranks = comm ? comm->ranks : 0;
  return submit({"ReduceScatter", kCollective, comm, source, target, count, type, reduction,
                 kNoRoot, &reduce_scatter, count * ranks, count},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclAllGather(const void* source, void* target, size_t count,
                                           ncclDataType_t type, ncclComm_t comm,
                                           cudaStream_t stream) {
  const size_t ranks = comm ? comm->ranks : 0;
  return submit({"AllGather", kCollective, comm, source, target, count, type, ncclSum, kNoRoot,
                 &all_gather, count, count * ranks},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclGather(const void* source, void* target, size_t count,
                                        ncclDataType_t type, int root, ncclComm_t comm,
                                        cudaStream_t stream) {
  const size_t ranks = comm ? comm->ranks : 0;
  if (comm && comm->rank != root) target = nullptr;
  return submit({"Gather", kCollective, comm, source, target, count, type, ncclSum, root, &gather,
                 count, count * ranks},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclScatter(const void* source, void* target, size_t count,
                                         ncclDataType_t type, int root, ncclComm_t comm,
                                         cudaStream_t stream) {
  const size_t ranks = comm ? comm->ranks : 0;
  if (comm && comm->rank != root) source = nullptr;
  return submit({"Scatter", kCollective, comm, source, target, count, type, ncclSum, root,
                 &scatter, count * ranks, count},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclAlltoAll(const void* source, void* target, size_t count,
                                          ncclDataType_t type, ncclComm_t comm,
                                          cudaStream_t stream) {
  const size_t ranks = comm ? comm->ranks : 0;
  return submit({"AlltoAll", kCollective, comm, source, target, count, type, ncclSum, kNoRoot,
                 &all_to_all, count * ranks, count * ranks},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t type,
                                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({"Send", Operation::Kind::kSend, comm, source, nullptr, count, type, ncclSum,
                 peer, nullptr, count, 0},
                stream);
}
CUDA_DOUBLE_API ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t type, int peer,
                                      ncclComm_t comm, cudaStream_t stream) {
  return submit({"Recv", Operation::Kind::kReceive, comm, nullptr, target, count, type, ncclSum,
                 peer, nullptr, 0, count},
                stream);
}

CUDA_DOUBLE_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* reduction, void* scalar,
                                                      ncclDataType_t type, ncclScalarResidence_t,
                                                      ncclComm_t comm) {
  if (type < ncclFloat16 || type > ncclBfloat16) {
    return fail(ncclInvalidArgument, "PreMulSum takes floating-point numbers here");
  }
  *reduction = comm->add_factor(read_number(scalar, type));
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
CUDA_DOUBLE_API ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
CUDA_DOUBLE_API ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
CUDA_DOUBLE_API ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t,
                                              void** handle) {
  *handle = buffer;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
