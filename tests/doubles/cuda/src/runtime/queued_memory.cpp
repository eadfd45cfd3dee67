#include "queued_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace cuda_double {
namespace {

using Memory = std::pair<const char*, size_t>;

std::mutex queued_memory_mutex;

std::vector<Memory>& queued_memory() {
  static auto* list = new std::vector<Memory>;
  return *list;
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API bool cuda_double_memory_is_queued(const void* pointer, size_t bytes) {
  const auto* begin = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(queued_memory_mutex);
  return std::any_of(queued_memory().begin(), queued_memory().end(), [&](const Memory& queued) {
    return begin < queued.first + queued.second && queued.first < begin + bytes;
  });
}
CUDA_DOUBLE_API void cuda_double_add_queued_memory(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(queued_memory_mutex);
  queued_memory().emplace_back(static_cast<const char*>(pointer), bytes);
}
CUDA_DOUBLE_API void cuda_double_remove_queued_memory(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(queued_memory_mutex);
  const Memory memory(static_cast<const char*>(pointer), bytes);
  queued_memory().erase(std::find(queued_memory().begin(), queued_memory().end(), memory));
}
