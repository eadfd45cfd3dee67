#include "collectives.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

namespace cuda_double {
namespace {

using Step = std::function<void(size_t offset, size_t bytes)>;

// For every chunk: all ranks share, and then all take.
bool exchange_chunks(ncclComm_t comm, size_t bytes, const Step& share, const Step& take) {
  for (size_t offset = 0; offset < bytes; offset += kChunk) {
    const size_t chunk = std::min(kChunk, bytes - offset);
    share(offset, chunk);
    if (!comm->barrier()) return false;
    take(offset, chunk);
    if (!comm->barrier()) return false;
  }
  return true;
}

// Brings `bytes` bytes of `root`, from this offset of its source, to `offset` of a target's target.
bool move_chunks(Operation& operation, int root, int target, size_t source_offset,
                 size_t target_offset) {
  auto* comm = operation.comm;
  return exchange_chunks(
      comm, operation.bytes(),
      [&](size_t offset, size_t bytes) {
        if (comm->rank != root) return;
        memcpy(comm->memory.slot(root), operation.source_at(source_offset + offset), bytes);
      },
      [&](size_t offset, size_t bytes) {
        if (comm->rank != target) return;
        memcpy(operation.target_at(target_offset + offset), comm->memory.slot(root), bytes);
      });
}

// Reduces `count` numbers. Each rank reduces its share of every chunk; `take` sees the result.
bool reduce_chunks(Operation& operation, size_t count, const Step& take) {
  auto* comm = operation.comm;
  const bool has_factor = operation.reduction >= ncclNumOps;
  const auto reduction =
      has_factor ? Reduction::kPreMulSum : static_cast<Reduction>(operation.reduction);
  const std::vector<double> factors(comm->ranks,
                                    has_factor ? comm->factor(operation.reduction) : 1);
  std::vector<char*> slots;
  for (int rank = 0; rank < comm->ranks; ++rank) slots.push_back(comm->memory.slot(rank));
  const size_t size = bytes_of_a_number(operation.type), total = count * size;
  bool is_reducible = true;
  for (size_t offset = 0; offset < total; offset += kChunk) {
    const size_t bytes = std::min(kChunk, total - offset), numbers = bytes / size;
    memcpy(slots[comm->rank], operation.source_at(offset), bytes);
    if (!comm->barrier()) return false;
    is_reducible = reduce_numbers(slots, numbers * comm->rank / comm->ranks,
                                  numbers * (comm->rank + 1) / comm->ranks,
                                  comm->memory.result_slot(), operation.type, reduction, factors);
    if (!comm->barrier()) return false;
    take(offset, bytes);
    if (!comm->barrier()) return false;
  }
  return is_reducible;
}

bool gather_to(Operation& operation, bool takes) {
  auto* comm = operation.comm;
  return exchange_chunks(
      comm, operation.bytes(),
      [&](size_t offset, size_t bytes) {
        memcpy(comm->memory.slot(comm->rank), operation.source_at(offset), bytes);
      },
      [&](size_t offset, size_t bytes) {
        if (!takes) return;
        for (int rank = 0; rank < comm->ranks; ++rank) {
          memcpy(operation.target_at(rank * operation.bytes() + offset), comm->memory.slot(rank),
                 bytes);
        }
      });
}

uint64_t hash_of(const Operation& operation) {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const char* letter = operation.name; *letter; ++letter) add(*letter);
  add(operation.count);
  add(operation.type);
  // The number of a reduction with a factor is each rank's affair.
  add(std::min<uint64_t>(operation.reduction, ncclNumOps));
  return hash;
}

}  // namespace

bool all_reduce(Operation& operation) {
  auto* comm = operation.comm;
  return reduce_chunks(operation, operation.count, [&](size_t offset, size_t bytes) {
    memcpy(operation.target_at(offset), comm->memory.result_slot(), bytes);
  });
}

bool reduce_to_root(Operation& operation) {
  auto* comm = operation.comm;
  return reduce_chunks(operation, operation.count, [&](size_t offset, size_t bytes) {
    if (operation.is_root()) {
      memcpy(operation.target_at(offset), comm->memory.result_slot(), bytes);
    }
  });
}

// Reduces everything, of which each rank takes its part.
bool reduce_scatter(Operation& operation) {
  auto* comm = operation.comm;
  const size_t begin = operation.bytes() * comm->rank, end = begin + operation.bytes();
  return reduce_chunks(
      operation, operation.count * comm->ranks, [&](size_t offset, size_t bytes) {
        const size_t from = std::max(begin, offset), to = std::min(end, offset + bytes);
        if (from >= to) return;
        memcpy(operation.target_at(from - begin), comm->memory.result_slot() + (from - offset),
               to - from);
      });
}

bool broadcast(Operation& operation) {
  auto* comm = operation.comm;
  const int root = operation.peer;
  return exchange_chunks(
      comm, operation.bytes(),
      [&](size_t offset, size_t bytes) {
        if (!operation.is_root()) return;
        memcpy(comm->memory.slot(root), operation.source_at(offset), bytes);
      },
      [&](size_t offset, size_t bytes) {
        if (operation.target) {
          memcpy(operation.target_at(offset), comm->memory.slot(root), bytes);
        }
      });
}

bool all_gather(Operation& operation) { return gather_to(operation, true); }

bool gather(Operation& operation) { return gather_to(operation, operation.is_root()); }

bool scatter(Operation& operation) {
  for (int target = 0; target < operation.comm->ranks; ++target) {
    if (!move_chunks(operation, operation.peer, target, target * operation.bytes(), 0)) {
      return false;
    }
  }
  return true;
}

bool all_to_all(Operation& operation) {
  for (int root = 0; root < operation.comm->ranks; ++root) {
    for (int target = 0; target < operation.comm->ranks; ++target) {
      if (!move_chunks(operation, root, target, target * operation.bytes(),
                       root * operation.bytes())) {
        return false;
      }
    }
  }
  return true;
}

bool wait_for_same_collective(Operation& operation) {
  auto* comm = operation.comm;
  const uint64_t hash = hash_of(operation);
  comm->state().collective[comm->rank] = hash;
  if (!comm->barrier()) return false;
  for (int rank = 0; rank < comm->ranks; ++rank) {
    if (comm->state().collective[rank] == hash) continue;
    fprintf(stderr,
            "CUDA double, NCCL: rank %d of %d is in %s of %zu numbers of type %d and rank %d is "
            "not: it hangs, as NCCL does\n",
            comm->rank, comm->ranks, operation.name, operation.count, operation.type, rank);
    while (!comm->is_aborted) usleep(20000);
    return false;
  }
  return comm->barrier();
}

}  // namespace cuda_double
