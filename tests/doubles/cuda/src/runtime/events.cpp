// Events: each recording is an object of its own, which is done when its stream has reached it.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "devices.h"
#include "streams.h"

namespace cuda_double {

class Recording {
 public:
  bool is_done() const { return done_; }
  std::chrono::steady_clock::time_point time() const { return time_; }
  void finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = std::chrono::steady_clock::now();
    done_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_.load(); });
  }

 private:
  std::atomic<bool> done_{false};
  std::chrono::steady_clock::time_point time_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace cuda_double

struct CUevent_st {
 public:
  CUevent_st(unsigned flags, int device) : flags(flags), device(device) {}

  const unsigned flags;
  const int device;

  // The latest recording; null if there is none.
  std::shared_ptr<cuda_double::Recording> recording() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recording_;
  }
  void set_recording(std::shared_ptr<cuda_double::Recording> recording) {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_ = std::move(recording);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<cuda_double::Recording> recording_;
};

using namespace cuda_double;

CUDA_DOUBLE_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  *event = new CUevent_st(flags, current_device());
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
CUDA_DOUBLE_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  RETURN_UNLESS_USABLE();
  delete event;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  RETURN_UNLESS_USABLE();
  auto* stream = resolve(handle);
  if (stream->device != event->device) return remember(cudaErrorInvalidResourceHandle);
  auto recording = std::make_shared<Recording>();
  if (stream->is_idle()) {
    recording->finish();
  } else {
    stream->enqueue([recording] { recording->finish(); });
  }
  event->set_recording(std::move(recording));
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                     unsigned) {
  return cudaEventRecord(event, stream);
}
CUDA_DOUBLE_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_UNLESS_USABLE();
  const auto recording = event->recording();
  return !recording || recording->is_done() ? cudaSuccess : remember(cudaErrorNotReady);
}
CUDA_DOUBLE_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_UNLESS_USABLE();
  if (const auto recording = event->recording()) recording->wait();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                                 cudaEvent_t end) {
  RETURN_UNLESS_USABLE();
  const auto from = start->recording(), to = end->recording();
  if (!from || !to || ((start->flags | end->flags) & cudaEventDisableTiming)) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (!from->is_done() || !to->is_done()) return remember(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(to->time() - from->time()).count();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RETURN_UNLESS_USABLE();
  const auto recording = event->recording();
  if (recording && !recording->is_done()) {
    resolve(stream)->enqueue([recording] { recording->wait(); });
  }
  return cudaSuccess;
}
