// A rank's end of a communicator.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
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

  // NCCL runs the operations of a communicator in the order of their calls, whatever their streams.
  // A call takes a ticket; in its stream it waits for its turn, unless the communicator is aborted.
  uint64_t take_ticket() { return tickets_++; }
  void wait_for_turn(uint64_t ticket);
  void end_turn();

  // Factors of ncclRedOpCreatePreMulSum. A reduction's index follows those that NCCL defines.
  ncclRedOp_t add_factor(double factor);
  double factor(ncclRedOp_t reduction);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint64_t> tickets_{0};
  uint64_t ended_turns_ = 0;
  std::vector<double> factors_;
};

namespace cuda_double {

// Writes the message to stderr, keeps it for ncclGetLastError and returns the code.
ncclResult_t fail(ncclResult_t code, const std::string& message);

}  // namespace cuda_double
