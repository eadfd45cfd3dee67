// Streams: a queue each, with a thread for what must not run in the caller's.
//
// What a caller asks for directly (copies, fills, operators) waits for the stream's queue and then
// runs in the caller's thread. What is queued (collectives, late copies, waiting for an event of
// another stream) runs in the stream's thread. So events are really "not ready" while a collective
// runs, and a caller that forgets to wait does not see its result.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

struct CUstream_st {
 public:
  CUstream_st(int device, unsigned flags, int priority)
      : device(device), flags(flags), priority(priority) {}

  const int device;
  const unsigned flags;
  const int priority;

  // Whether everything that was queued is done.
  bool is_idle() const { return done_ == queued_; }

  void enqueue(std::function<void()> task);

  // Returns when everything that is queued now is done.
  void wait();

 private:
  void run_tasks();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<uint64_t> queued_{0}, done_{0};
  bool has_thread_ = false;
};

namespace cuda_double {

// The stream behind a handle. Null, legacy and per-thread mean the current device's default stream.
CUstream_st* resolve(cudaStream_t handle);

void wait_for_device(int device);
void wait_for_all_devices();

}  // namespace cuda_double
