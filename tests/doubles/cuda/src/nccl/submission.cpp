// Groups, the stream's task, and what is in a collective's buffers while it has not run.
//
// A GPU reads a collective's source when its stream reaches the collective, and writes the target
// at any moment from then until it is done. Here the target holds poison from the call until the
// collective has run, so that a reader that does not wait for the stream sees garbage and not
// yesterday's data. Two things may forbid this at the time of the call: the stream is busy, so that
// the source may not be there yet, or another operation under way uses the same memory. Then the
// poison is written when the stream reaches the operation.
#include "submission.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>

#include "collectives.h"
#include "messages.h"

// In our libcudart.so.13.
extern "C" int cuda_double_stream_is_idle(cudaStream_t stream, int device);

namespace cuda_double {
namespace {

struct Submission {
  Operation operation;
  cudaStream_t stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Submission> group;

// ------------------------------------------------------------------ buffers under way

struct Buffer {
  const char* begin;
  size_t bytes;
};

std::mutex buffers_mutex;

// Sources and targets of all operations of this process that have not run.
std::list<Buffer>& buffers_under_way() {
  static auto* buffers = new std::list<Buffer>;
  return *buffers;
}

bool overlaps(const Buffer& a, const Buffer& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

Buffer source_of(const Operation& operation) {
  return {static_cast<const char*>(operation.source), operation.source_bytes()};
}
Buffer target_of(const Operation& operation) {
  return {static_cast<const char*>(operation.target), operation.target_bytes()};
}

bool is_under_way(const Buffer& buffer) {
  for (const auto& other : buffers_under_way()) {
    if (overlaps(buffer, other)) return true;
  }
  return false;
}

void take_snapshot(Operation& operation) {
  if (operation.snapshot) return;
  const auto source = source_of(operation);
  operation.snapshot =
      std::make_shared<std::vector<char>>(source.begin, source.begin + source.bytes);
}

void poison_target(const Operation& operation) {
  if (operation.target) poison(operation.target, operation.target_count, operation.type);
}

// ------------------------------------------------------------------ one task of a stream

// The operations of a group that go to one stream.
class Task {
 public:
  explicit Task(std::vector<Operation> operations) : operations_(std::move(operations)) {}

  // Called before the task is queued.
  void prepare(bool stream_is_idle) {
    std::lock_guard<std::mutex> lock(buffers_mutex);
    if (stream_is_idle) {
      for (auto& operation : operations_) take_snapshot(operation);
    }
    for (const auto& operation : operations_) {
      if (stream_is_idle || can_be_poisoned(operation)) poison_target(operation);
    }
    for (const auto& operation : operations_) {
      for (const auto& buffer : {source_of(operation), target_of(operation)}) {
        buffers_.push_back(
            buffers_under_way().insert(buffers_under_way().end(), buffer));
      }
    }
  }

  void run() {
    for (auto& operation : operations_) take_snapshot(operation);
    for (const auto& operation : operations_) poison_target(operation);
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
    std::lock_guard<std::mutex> lock(buffers_mutex);
    for (const auto& buffer : buffers_) buffers_under_way().erase(buffer);
  }

 private:
  // Whether nothing that waits in a stream needs what the target holds now.
  bool can_be_poisoned(const Operation& operation) const {
    const auto target = target_of(operation);
    for (const auto& other : operations_) {
      if (overlaps(target, source_of(other))) return false;
    }
    return !is_under_way(target);
  }

  template <typename Work>
  static void carry_out(ncclComm_t comm, Work work) {
    if (comm->is_aborted || comm->error != ncclSuccess || work()) return;
    if (comm->error == ncclSuccess) {
      comm->error = comm->is_aborted ? ncclRemoteError : ncclInternalError;
    }
  }

  std::vector<Operation> operations_;
  std::vector<std::list<Buffer>::iterator> buffers_;
};

void run_task(void* task) {
  static_cast<Task*>(task)->run();
  delete static_cast<Task*>(task);
}

ncclResult_t enqueue(std::unique_ptr<Task> task, cudaStream_t stream, int device) {
  task->prepare(cuda_double_stream_is_idle(stream, device));
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
