// How a function that the double does not have says so.
#pragma once

namespace cuda_double {

// Writes the C++ frames of the caller to stderr if CUDA_DOUBLE_BACKTRACE is set.
void show_backtrace();

}  // namespace cuda_double
