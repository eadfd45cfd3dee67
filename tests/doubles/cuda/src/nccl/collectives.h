// The collectives, as they run in a stream's thread: through the slots of the shared memory.
#pragma once

#include "operation.h"

namespace cuda_double {

// Each returns false if the communicator was aborted meanwhile, or the type cannot be reduced.
bool all_reduce(Operation& operation);
bool reduce_to_root(Operation& operation);
bool reduce_scatter(Operation& operation);
bool broadcast(Operation& operation);
bool all_gather(Operation& operation);
bool gather(Operation& operation);
bool scatter(Operation& operation);
bool all_to_all(Operation& operation);

// Whether all ranks are in the same collective. If not, NCCL hangs or gives garbage; we say which
// ranks differ, and hang until the communicator is aborted.
bool wait_for_same_collective(Operation& operation);

}  // namespace cuda_double
