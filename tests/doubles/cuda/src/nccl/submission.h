// How an operation gets from the call of NCCL's function into its stream.
#pragma once

#include "operation.h"

namespace cuda_double {

// Puts the operation into the stream, or into the open group (ncclGroupStart).
ncclResult_t submit(Operation operation, cudaStream_t stream);

}  // namespace cuda_double
