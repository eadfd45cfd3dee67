#include "shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

namespace cuda_double {
namespace {

size_t whole_pages_of(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }

}  // namespace

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec limit{0, 50'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

bool is_alive(int process) { return kill(process, 0) == 0 || errno == EPERM; }

SharedMemory::SharedMemory(const ncclUniqueId& id, int ranks)
    : path_(std::string("/dev/shm/cuda-double-nccl-") + id.internal), ranks_(ranks) {
  const size_t channels = static_cast<size_t>(ranks) * ranks;
  const size_t bytes = whole_pages_of(sizeof(SharedState)) + (ranks + 1) * kChunk +
                       channels * whole_pages_of(sizeof(Channel));
  // Whoever comes first makes the file. It is full of zeros, which is the initial state.
  const int file = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (ftruncate(file, bytes) == 0) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) memory_ = static_cast<char*>(memory);
  }
  close(file);
}

char* SharedMemory::slot(int rank) const {
  return memory_ + whole_pages_of(sizeof(SharedState)) + rank * kChunk;
}

Channel& SharedMemory::channel(int from, int to) const {
  const size_t index = static_cast<size_t>(from) * ranks_ + to;
  return *reinterpret_cast<Channel*>(slot(ranks_ + 1) + index * whole_pages_of(sizeof(Channel)));
}

void SharedMemory::remove_name() const { unlink(path_.c_str()); }

}  // namespace cuda_double
