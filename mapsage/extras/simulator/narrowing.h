// 64-bit numbers on a card, which keeps them in 32 bits.
//
// The storage of a simulated tensor has 64 bits, for the CPU's kernels; what a kernel wrote is
// then made a number that 32 bits hold.
#pragma once

#include <algorithm>
#include <limits>

#include "settings.h"

namespace sim {

enum class Narrowing {
  kWrap,   // as a copy and the vendor's kernels do
  kClamp,  // as fill_ does (gcu_tensor_factories.cpp:35-63)
};

inline bool is_narrowed(at::ScalarType dtype) {
  return (profile.float64_narrows && dtype == at::kDouble) ||
         (profile.int64_wraps && (dtype == at::kLong || dtype == at::kUInt64));
}

// Once a process and type, in the vendor's words (gcu_utils.h:19-37).
inline void warn_narrowed(at::ScalarType dtype) {
  const char* end = ", maybe lead to unexpected overflow issues.";
  if (dtype == at::kDouble) {
    TORCH_WARN_ONCE("GCU not support ", dtype, " use Float replace", end);
  } else if (dtype == at::kLong) {
    TORCH_WARN_ONCE("GCU not support ", dtype, " use Int replace", end);
  } else if (dtype == at::kUInt64) {
    TORCH_WARN_ONCE("GCU not support ", dtype, " use UInt32 replace", end);
  }
}

template <typename Wide, typename Narrow>
Wide narrowed(Wide value, Narrowing how) {
  constexpr auto most = static_cast<Wide>(std::numeric_limits<Narrow>::max());
  constexpr auto least = static_cast<Wide>(std::numeric_limits<Narrow>::lowest());
  if (how == Narrowing::kClamp && (value > most || value < least)) {
    const Wide limit = value > most ? most : least;
    TORCH_WARN_ONCE("GCU not support fill ", value, " to an ", c10::CppTypeToScalarType<Wide>(),
                    " tensor. Fill ", limit, " instead.");
    return limit;
  }
  return static_cast<Wide>(static_cast<Narrow>(value));
}

template <typename Wide, typename Narrow>
void narrow_values(Wide* values, int64_t count, Narrowing how) {
  for (int64_t i = 0; i < count; ++i) {
    const Wide kept = narrowed<Wide, Narrow>(values[i], how);
    // Only what changes is written: other threads may read a tensor that is an argument here too.
    // A NaN differs from itself.
    if (kept != values[i] && kept == kept) values[i] = kept;
  }
}

// Make the values of a tensor in host memory those that a card would keep.
inline void narrow_host(const at::Tensor& host, Narrowing how) {
  if (!host.defined() || !is_narrowed(host.scalar_type()) || host.numel() == 0) return;
  warn_narrowed(host.scalar_type());
  if (!host.is_non_overlapping_and_dense()) {
    auto dense = host.contiguous();
    narrow_host(dense, how);
    if (!dense.equal(host)) host.copy_(dense);
    return;
  }
  switch (host.scalar_type()) {
    case at::kDouble:
      return narrow_values<double, float>(host.mutable_data_ptr<double>(), host.numel(), how);
    case at::kLong:
      return narrow_values<int64_t, int32_t>(host.mutable_data_ptr<int64_t>(), host.numel(), how);
    default:
      return narrow_values<uint64_t, uint32_t>(host.mutable_data_ptr<uint64_t>(), host.numel(),
                                               how);
  }
}

}  // namespace sim
