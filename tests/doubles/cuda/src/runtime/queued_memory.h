// Memory that work in a stream's queue will read or write: late copies, and operations of NCCL.
//
// Its values are needed, or not there yet. Other work has run when its call returns.
#pragma once

#include <cstddef>

#include "../visible.h"

// Whether any byte of this memory is needed by queued work.
CUDA_DOUBLE_API bool cuda_double_memory_is_queued(const void* begin, size_t bytes);

// Remember and forget memory, in pairs of calls with the same arguments.
CUDA_DOUBLE_API void cuda_double_add_queued_memory(const void* begin, size_t bytes);
CUDA_DOUBLE_API void cuda_double_remove_queued_memory(const void* begin, size_t bytes);
