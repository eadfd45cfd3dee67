// A rank's end of a communicator.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "../visible.h"
#include "shared_memory.h"

struct ncclComm {
 public:
  ncclComm(int rank, int ranks, int device, const ncclUniqueId& id)
      : rank(rank), ranks(ranks), device(device), memory(id, ranks) {}

  const int rank, ranks;
  // Of this process, not of the machine.
  const int device;
  const cuda_double::SharedMemory memory;
  std::atomic<ncclResult_t> error{ncclSuccess};
  std::atomic<bool> is_aborted{false};

  cuda_double::SharedState& state() const { return memory.state(); }

  // Returns when all ranks are here; false if this rank's communicator was aborted meanwhile.
  bool barrier();

  // Factors of ncclRedOpCreatePreMulSum. A reduction's index follows those that NCCL defines.
  ncclRedOp_t add_factor(double factor);
  double factor(ncclRedOp_t reduction);

 private:
  std::mutex mutex_;
  std::vector<double> factors_;
};

namespace cuda_double {

// Writes the message to stderr, keeps it for ncclGetLastError and returns the code.
ncclResult_t fail(ncclResult_t code, const std::string& message);

}  // namespace cuda_double
