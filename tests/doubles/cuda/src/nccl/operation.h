// What a rank has asked of NCCL: one collective, or one end of a message.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "communicator.h"
#include "numbers.h"

namespace cuda_double {

struct Operation {
  enum class Kind { kCollective, kSend, kReceive };

  const char* name;
  Kind kind;
  ncclComm_t comm;
  // Null if this rank gives, or gets, nothing.
  const void* source;
  void* target;
  // As in NCCL's call: of numbers that one rank gives to, or gets from, one other.
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  // The root of a collective, the other end of a message; -1 if there is none.
  int peer;
  // Carries a collective out; returns false if it could not.
  bool (*run)(Operation&);
  // Numbers that this rank reads from `source` and writes to `target`.
  size_t source_count, target_count;

  // The values of `source` when the operation began.
  std::shared_ptr<std::vector<char>> snapshot = nullptr;

  size_t bytes() const { return count * bytes_of_a_number(type); }
  size_t source_bytes() const { return source ? source_count * bytes_of_a_number(type) : 0; }
  size_t target_bytes() const { return target ? target_count * bytes_of_a_number(type) : 0; }
  bool is_root() const { return comm->rank == peer; }

  // Chunks of what this rank gives and gets.
  const char* source_at(size_t offset) const { return snapshot->data() + offset; }
  char* target_at(size_t offset) const { return static_cast<char*>(target) + offset; }
};

}  // namespace cuda_double
