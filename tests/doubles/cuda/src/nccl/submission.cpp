// Groups, the stream's task, and what is in a collective's buffers while it has not run.
//
// A GPU reads a collective's source when its stream reaches the collective, and writes the target
// at any moment from then until it is done. Here the target holds poison from the call until the
// collective has run, so that a reader that does not wait for the stream sees garbage and not
// yesterday's data. If work that is queued before needs the same memory, or has yet to write it,
// the poison comes when the stream reaches the collective.
#include "submission.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "../runtime/queued_memory.h"
#include "collectives.h"
#include "messages.h"

namespace cuda_double {
namespace {

struct Submission {
  Operation operation;
  cudaStream_t stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Submission> group;

// ------------------------------------------------------------------ one task of a stream

// The operations of a group that go to one stream.
class Task {
 public:
  explicit Task(std::vector<Operation> operations) : operations_(std::move(operations)) {}

  // Called before the task is queued.
  void prepare() {
    for (const auto& operation : operations_) {
      if (tickets_.count(operation.comm) == 0) {
        tickets_[operation.comm] = operation.comm->take_ticket();
      }
    }
    if (!needs_queued_memory()) begin();
    for (const auto& operation : operations_) {
      cuda_double_add_queued_memory(operation.source, operation.source_bytes());
      cuda_double_add_queued_memory(operation.target, operation.target_bytes());
    }
  }

  void run() {
    for (const auto& [comm, ticket] : tickets_) comm->wait_for_turn(ticket);
    if (!has_begun_) begin();
    for (size_t i = 0; i < operations_.size();) {
      auto* comm = operations_[i].comm;
      std::vector<Operation*> messages;
      while (i < operations_.size() && operations_[i].comm == comm &&
             operations_[i].kind != Operation::Kind::kCollective) {
        messages.push_back(&operations_[i++]);
      }
      if (!messages.empty()) {
        carry_out(comm, [&] { return exchange_messages(messages); });
      } else {
        auto& collective = operations_[i++];
        carry_out(comm, [&] {
          return wait_for_same_collective(collective) && collective.run(collective);
        });
      }
    }
  }

  ~Task() {
    for (const auto& [comm, ticket] : tickets_) comm->end_turn();
    for (const auto& operation : operations_) {
      cuda_double_remove_queued_memory(operation.source, operation.source_bytes());
      cuda_double_remove_queued_memory(operation.target, operation.target_bytes());
    }
  }

 private:
  bool needs_queued_memory() const {
    for (const auto& operation : operations_) {
      if (cuda_double_memory_is_queued(operation.source, operation.source_bytes()) ||
          cuda_double_memory_is_queued(operation.target, operation.target_bytes())) {
        return true;
      }
    }
    return false;
  }

  // Reads all sources, and then poisons all targets: in place, they are the same memory.
  void begin() {
    has_begun_ = true;
    for (auto& operation : operations_) {
      const auto* source = static_cast<const char*>(operation.source);
      operation.snapshot =
          std::make_shared<std::vector<char>>(source, source + operation.source_bytes());
    }
    for (const auto& operation : operations_) {
      if (operation.target) poison(operation.target, operation.target_count, operation.type);
    }
  }

  template <typename Work>
  static void carry_out(ncclComm_t comm, Work work) {
    if (comm->is_aborted || comm->error != ncclSuccess || work()) return;
    if (comm->error == ncclSuccess) {
      comm->error = comm->is_aborted ? ncclRemoteError : ncclInternalError;
    }
  }

  std::vector<Operation> operations_;
  std::map<ncclComm_t, uint64_t> tickets_;
  bool has_begun_ = false;
};

void run_task(void* task) {
  static_cast<Task*>(task)->run();
  delete static_cast<Task*>(task);
}

ncclResult_t enqueue(std::unique_ptr<Task> task, cudaStream_t stream, int device) {
  task->prepare();
  int device_before = 0;
  cudaGetDevice(&device_before);
  cudaSetDevice(device);
  const cudaError_t error = cudaLaunchHostFunc(stream, &run_task, task.release());
  cudaSetDevice(device_before);
  return error == cudaSuccess ? ncclSuccess
                              : fail(ncclUnhandledCudaError, cudaGetErrorString(error));
}

ncclResult_t enqueue_group() {
  const auto submissions = std::move(group);
  group.clear();
  for (size_t i = 0; i < submissions.size();) {
    const auto stream = submissions[i].stream;
    const int device = submissions[i].operation.comm->device;
    std::vector<Operation> operations;
    while (i < submissions.size() && submissions[i].stream == stream) {
      operations.push_back(submissions[i++].operation);
    }
    const auto status = enqueue(std::make_unique<Task>(std::move(operations)), stream, device);
    if (status != ncclSuccess) return status;
  }
  return ncclSuccess;
}

bool is_device_memory(const void* pointer) {
  cudaPointerAttributes attributes;
  return cudaPointerGetAttributes(&attributes, pointer) == cudaSuccess &&
         attributes.type == cudaMemoryTypeDevice;
}

void trace(const Operation& operation) {
  static const bool is_on = getenv("CUDA_DOUBLE_NCCL_TRACE") != nullptr;
  if (!is_on) return;
  fprintf(stderr, "CUDA double, NCCL: rank %d/%d %s count %zu type %d reduction %d peer %d\n",
          operation.comm->rank, operation.comm->ranks, operation.name, operation.count,
          operation.type, operation.reduction, operation.peer);
}

}  // namespace

ncclResult_t submit(Operation operation, cudaStream_t stream) {
  const std::string name = operation.name;
  if (!operation.comm) return fail(ncclInvalidArgument, name + ": the communicator is null");
  if (operation.comm->is_aborted) {
    return fail(ncclInvalidUsage, name + ": the communicator was aborted");
  }
  trace(operation);
  if (operation.source_bytes() && !is_device_memory(operation.source)) {
    return fail(ncclInvalidArgument, name + ": the source is not device memory");
  }
  if (operation.target_bytes() && !is_device_memory(operation.target)) {
    return fail(ncclInvalidArgument, name + ": the target is not device memory");
  }
  group.push_back({std::move(operation), stream});
  return group_depth ? ncclSuccess : enqueue_group();
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
CUDA_DOUBLE_API ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group_depth ? ncclSuccess : enqueue_group();
}
