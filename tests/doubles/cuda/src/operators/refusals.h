// What CUDA refuses and the CPU does not.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace cuda_double {

// Fails, or warns, as CUDA's kernel does under torch.use_deterministic_algorithms. `arguments` are
// those of the operator `name`, "aten::..." without its overload.
void refuse_nondeterministic(const std::string& name, c10::ArrayRef<c10::IValue> arguments);

// Fails unless all tensors among the arguments are on one device, as CUDA's device checks do.
// Returns the CUDA device of the call: of its tensors, else of a device argument, else the current.
c10::Device check_devices(const c10::FunctionSchema& schema,
                          c10::ArrayRef<c10::IValue> arguments);

}  // namespace cuda_double
