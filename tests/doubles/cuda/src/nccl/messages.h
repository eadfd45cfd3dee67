// Messages between two ranks, as they run in a stream's thread: through channels.
#pragma once

#include <vector>

#include "operation.h"

namespace cuda_double {

// Carries out the messages of a group at the same time, so that the order of messages with
// different peers does not matter. Messages with the same peer, in the same direction, keep theirs.
// Returns false if the communicator was aborted meanwhile, or a message is longer than its target.
bool exchange_messages(std::vector<Operation*>& messages);

}  // namespace cuda_double
