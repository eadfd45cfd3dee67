// The memory that the ranks of a communicator share: a file in /dev/shm, named by the unique id.
//
// It holds the state below, a slot of kChunk bytes for each rank, one more for a result, and a
// channel from each rank to each other one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "nccl_abi.h"

namespace cuda_double {

constexpr int kMaxRanks = 64;
// Bytes that a rank shares at a time in a collective.
constexpr size_t kChunk = 1 << 20;
// Bytes that a channel carries at a time.
constexpr size_t kPiece = 64 << 10;

// The way of messages from one rank to another.
struct Channel {
  std::atomic<uint32_t> is_full;
  uint32_t bytes;
  char data[kPiece];
};

struct SharedState {
  // Ranks that have mapped the file; each one's process and physical card plus one (0: unknown).
  std::atomic<uint32_t> attached;
  std::atomic<int> process[kMaxRanks], card[kMaxRanks];
  // Of the barrier: ranks that have arrived, and how many barriers are over.
  std::atomic<uint32_t> arrived, generation;
  // Incremented at every change of a channel.
  std::atomic<uint32_t> channel_changes;
  // A hash of the collective that each rank is in, to find ranks that call different ones.
  uint64_t collective[kMaxRanks];
  // What each rank gives to ncclCommSplit.
  int color[kMaxRanks], key[kMaxRanks];
  char split_id[kMaxRanks][NCCL_UNIQUE_ID_BYTES];
};

// Sleeps until another process wakes those who wait for `word`, if it still has this value; at most
// 50 ms.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

bool is_alive(int process);

class SharedMemory {
 public:
  SharedMemory(const ncclUniqueId& id, int ranks);

  // False if the file could not be made or mapped.
  bool is_mapped() const { return memory_ != nullptr; }
  SharedState& state() const { return *reinterpret_cast<SharedState*>(memory_); }
  char* slot(int rank) const;
  char* result_slot() const { return slot(ranks_); }
  Channel& channel(int from, int to) const;

  // Removes the file's name. Processes that have mapped it keep it.
  void remove_name() const;

 private:
  std::string path_;
  int ranks_;
  char* memory_ = nullptr;
};

}  // namespace cuda_double
