#include "streams.h"

#include <pthread.h>

#include <thread>
#include <vector>

#include "devices.h"

void CUstream_st::enqueue(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_thread_) {
    has_thread_ = true;
    // The thread lives as long as the process; so do streams.
    std::thread([this] { run_tasks(); }).detach();
  }
  tasks_.push_back(std::move(task));
  ++queued_;
  changed_.notify_all();
}

void CUstream_st::wait() {
  if (is_idle()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = queued_;
  changed_.wait(lock, [&] { return done_ >= target; });
}

void CUstream_st::run_tasks() {
  pthread_setname_np(pthread_self(), "cuda-stream");
  cuda_double::set_current_device(device);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

namespace cuda_double {
namespace {

std::mutex streams_mutex;

std::vector<CUstream_st*>& streams() {
  static auto* list = new std::vector<CUstream_st*>;
  return *list;
}

CUstream_st* make_stream(int device, unsigned flags, int priority) {
  auto* stream = new CUstream_st(device, flags, priority);
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams().push_back(stream);
  return stream;
}

bool is_default_stream(cudaStream_t handle) { return reinterpret_cast<uintptr_t>(handle) <= 2; }

CUstream_st* default_stream(int device) {
  static std::atomic<CUstream_st*> default_streams[kMaxDevices];
  static std::mutex mutex;
  auto& slot = default_streams[device];
  if (auto* stream = slot.load()) return stream;
  std::lock_guard<std::mutex> lock(mutex);
  if (!slot.load()) slot = make_stream(device, 0, 0);
  return slot.load();
}

}  // namespace

CUstream_st* resolve(cudaStream_t handle) {
  return is_default_stream(handle) ? default_stream(current_device()) : handle;
}

void wait_for_device(int device) {
  std::vector<CUstream_st*> all_streams;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    all_streams = streams();
  }
  for (auto* stream : all_streams) {
    if (stream->device == device) stream->wait();
  }
}

void wait_for_all_devices() {
  for (int device = 0; device < static_cast<int>(visible_devices().size()); ++device) {
    wait_for_device(device);
  }
}

}  // namespace cuda_double

using namespace cuda_double;

// Operators call this before they touch memory, as a kernel would wait for its turn.
CUDA_DOUBLE_API void cuda_double_wait_for_stream(cudaStream_t stream, int device) {
  (is_default_stream(stream) ? default_stream(device) : stream)->wait();
}

CUDA_DOUBLE_API cudaError_t cudaDeviceSynchronize() {
  RETURN_UNLESS_USABLE();
  wait_for_device(current_device());
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                         int priority) {
  RETURN_UNLESS_USABLE();
  open_context(current_device());
  *stream = make_stream(current_device(), flags, priority);
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
CUDA_DOUBLE_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
// The memory of the stream is kept, because its thread still uses it.
CUDA_DOUBLE_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  RETURN_UNLESS_USABLE();
  resolve(stream)->wait();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_UNLESS_USABLE();
  resolve(stream)->wait();
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RETURN_UNLESS_USABLE();
  return resolve(stream)->is_idle() ? cudaSuccess : remember(cudaErrorNotReady);
}
CUDA_DOUBLE_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  RETURN_UNLESS_USABLE();
  *priority = resolve(stream)->priority;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                                               void* data) {
  RETURN_UNLESS_USABLE();
  resolve(stream)->enqueue([=] { function(data); });
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                                  cudaStreamCallback_t callback, void* data,
                                                  unsigned) {
  RETURN_UNLESS_USABLE();
  resolve(stream)->enqueue([=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// There are no CUDA graphs: no stream is ever captured.
CUDA_DOUBLE_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  RETURN_UNLESS_USABLE();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t,
                                                     cudaStreamCaptureStatus* status,
                                                     unsigned long long* id, cudaGraph_t*,
                                                     const cudaGraphNode_t**,
                                                     const cudaGraphEdgeData**, size_t*) {
  RETURN_UNLESS_USABLE();
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
CUDA_DOUBLE_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return check_usable();
}
