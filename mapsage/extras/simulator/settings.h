// What the simulated machine is like, and the vendor's words for what it refuses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cctype>
#include <cstdint>
#include <set>
#include <string>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

struct Settings {
  int devices = 8;
  int64_t memory = 0;              // bytes a device holds; 0: no limit
  int64_t failing_allocation = 0;  // the n-th allocation of this process fails; 0: none
  std::set<int> absent;            // devices that are counted and cannot be used
  bool refuse_float64 = false;
  bool refuse_wide_int64 = false;        // values that 32 bits do not hold
  bool needs_workspace_setting = false;  // as CUDA's matrix products in deterministic mode
  bool own_streams = false;              // of random numbers, one a device
  std::set<std::string> refused_ops;     // schema names, "aten::bernoulli_"
};

// The quirks of a card in the profile of the vendor's software; profiles.py has the evidence.
struct Profile {
  bool int64_wraps = true;
  bool float64_narrows = true;
  bool int64_arithmetic = true;
  bool mixed_precision_sum = false;
  bool max_of_nan_is_nan = false;
  bool dtype_views = false;
  bool usable_after_fork = false;
};

inline Settings settings;
inline Profile profile;

// "aten::masked_fill_" to "topsatenMaskedFill", as the vendor's kernels are called.
inline std::string kernel_name(const std::string& op) {
  std::string name = "topsaten";
  bool starts_word = true;
  for (char letter : op.substr(op.find("::") == std::string::npos ? 0 : op.find("::") + 2)) {
    if (letter != '_') {
      name += starts_word ? static_cast<char>(std::toupper(letter)) : letter;
    }
    starts_word = letter == '_';
  }
  return name;
}

// Fail as a kernel of the vendor does that refuses its arguments (gcu_utils.cpp:60,74). There is
// no fallback to the CPU at that point.
[[noreturn]] inline void refuse(const std::string& op, const std::string& reason,
                                const char* variable = "MAPSAGE_SIM_GCU") {
  TORCH_CHECK(false, "Call TOPSOP fail, got error: TOPSATEN_STATUS_NOT_SUPPORT!\n",
              kernel_name(op), " (", op, "): ", reason, " (simulated: ", variable, ")");
  __builtin_unreachable();
}

}  // namespace sim
