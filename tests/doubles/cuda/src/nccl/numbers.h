// The number types of NCCL, and reductions over the ranks' values.
#pragma once

#include <cstddef>
#include <vector>

#include "nccl_abi.h"

namespace cuda_double {

enum class Reduction { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

size_t bytes_of_a_number(ncclDataType_t type);

// Reads a floating-point number; 1 for integers, which ncclRedOpCreatePreMulSum does not take.
double read_number(const void* number, ncclDataType_t type);

// Fills `count` numbers with NaN or, for integers, the most extreme value: what a buffer holds that
// a collective has not written yet.
void poison(void* numbers, size_t count, ncclDataType_t type);

// Reduces numbers `begin` to `end` of the ranks' `sources` into `target`, in the order of the ranks
// and in float for 16-bit types, so that every rank gets the same bits. Each rank's numbers are
// multiplied by its factor for kPreMulSum. Returns false if the type cannot be reduced.
bool reduce_numbers(const std::vector<char*>& sources, size_t begin, size_t end, char* target,
                    ncclDataType_t type, Reduction reduction, const std::vector<double>& factors);

}  // namespace cuda_double
