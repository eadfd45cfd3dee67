// How ranks find each other, and how a communicator is split and ended.
#include "communicator.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

// In our libcudart.so.13.
extern "C" int cuda_double_physical_device(int device);

bool ncclComm::barrier() {
  const uint32_t generation = state().generation;
  if (state().arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
    state().arrived = 0;
    ++state().generation;
    cuda_double::wake_all(state().generation);
    return !is_aborted;
  }
  while (state().generation == generation) {
    if (is_aborted) return false;
    cuda_double::sleep_while(state().generation, generation);
  }
  return true;
}

void ncclComm::wait_for_turn(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (ended_turns_ < ticket && !is_aborted) {
    changed_.wait_for(lock, std::chrono::milliseconds(50));
  }
}

void ncclComm::end_turn() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++ended_turns_;
  changed_.notify_all();
}

ncclRedOp_t ncclComm::add_factor(double factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  factors_.push_back(factor);
  return static_cast<ncclRedOp_t>(ncclNumOps + factors_.size() - 1);
}

double ncclComm::factor(ncclRedOp_t reduction) {
  std::lock_guard<std::mutex> lock(mutex_);
  return factors_.at(reduction - ncclNumOps);
}

namespace cuda_double {
namespace {

thread_local std::string last_message;

void make_unique_id(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", getpid(), random(), random());
}

// Waits for all ranks. NCCL has no deadline here either, but notices a rank that has died.
ncclResult_t wait_for_ranks(const ncclComm& comm) {
  auto& state = comm.state();
  uint32_t attached;
  while ((attached = state.attached) < static_cast<uint32_t>(comm.ranks)) {
    for (int rank = 0; rank < comm.ranks; ++rank) {
      if (state.process[rank] && !is_alive(state.process[rank])) {
        return fail(ncclRemoteError,
                    "rank " + std::to_string(rank) + " ended while ranks were joining");
      }
    }
    sleep_while(state.attached, attached);
  }
  return ncclSuccess;
}

ncclResult_t refuse_shared_cards(const ncclComm& comm) {
  const auto& cards = comm.state().card;
  for (int rank = 0; rank < comm.ranks; ++rank) {
    for (int peer = 0; peer < rank; ++peer) {
      if (cards[rank] != cards[peer]) continue;
      return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(peer) +
                                        " and rank " + std::to_string(rank) + " both on card " +
                                        std::to_string(cards[rank] - 1));
    }
  }
  return ncclSuccess;
}

ncclResult_t join(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank) {
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return fail(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                         std::to_string(ranks) + " ranks; at most 64 can join");
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return fail(ncclUnhandledCudaError, "no device");
  auto comm = std::make_unique<ncclComm>(rank, ranks, device, id);
  if (!comm->memory.is_mapped()) return fail(ncclSystemError, "cannot share memory in /dev/shm");
  comm->state().card[rank] = cuda_double_physical_device(device) + 1;
  comm->state().process[rank] = getpid();
  ++comm->state().attached;
  wake_all(comm->state().attached);
  ncclResult_t status = wait_for_ranks(*comm);
  if (status == ncclSuccess) status = refuse_shared_cards(*comm);
  if (status == ncclSuccess) comm->barrier();
  if (status != ncclSuccess || rank == 0) comm->memory.remove_name();
  // It is never destroyed: a stream's thread may still look at it.
  if (status == ncclSuccess) *out = comm.release();
  return status;
}

}  // namespace

ncclResult_t fail(ncclResult_t code, const std::string& message) {
  last_message = message;
  fprintf(stderr, "CUDA double, NCCL: %s\n", message.c_str());
  return code;
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API const char* ncclGetLastError(ncclComm_t) { return last_message.c_str(); }
CUDA_DOUBLE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  make_unique_id(id);
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                                    int rank, ncclConfig_t*) {
  return join(comm, ranks, id, rank);
}
CUDA_DOUBLE_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                              int rank) {
  return join(comm, ranks, id, rank);
}
CUDA_DOUBLE_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int,
                                                      ncclUniqueId* ids, ncclConfig_t*) {
  return join(comm, ranks, ids[0], rank);
}

// Every rank proposes an id; that of the first member of each color counts.
CUDA_DOUBLE_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                                           ncclConfig_t*) {
  auto& state = comm->state();
  *out = nullptr;
  ncclUniqueId id;
  make_unique_id(&id);
  state.color[comm->rank] = color;
  state.key[comm->rank] = key;
  memcpy(state.split_id[comm->rank], id.internal, sizeof id.internal);
  if (!comm->barrier()) return ncclRemoteError;
  std::vector<int> members;
  for (int rank = 0; rank < comm->ranks; ++rank) {
    if (color >= 0 && state.color[rank] == color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return state.key[a] < state.key[b]; });
  if (!members.empty()) memcpy(id.internal, state.split_id[members[0]], sizeof id.internal);
  if (!comm->barrier()) return ncclRemoteError;
  if (members.empty()) return ncclSuccess;
  const auto position = std::find(members.begin(), members.end(), comm->rank);
  return join(out, static_cast<int>(members.size()), id,
              static_cast<int>(position - members.begin()));
}
CUDA_DOUBLE_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm) return ncclInvalidArgument;
  *error = comm->error;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
CUDA_DOUBLE_API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }

// Ends the waiting of this rank; the others time out by themselves.
CUDA_DOUBLE_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  comm->is_aborted = true;
  wake_all(comm->state().generation);
  wake_all(comm->state().channel_changes);
  return ncclSuccess;
}
