#include "numbers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace cuda_double {
namespace {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

// widen() gives the type in which numbers are added; narrow() stores the sum.
float widen(Half number) {
  _Float16 value;
  memcpy(&value, &number.bits, sizeof value);
  return static_cast<float>(value);
}
float widen(Bfloat16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
T widen(T number) {
  return number;
}

void narrow(float value, Half* target) {
  const _Float16 rounded = static_cast<_Float16>(value);
  memcpy(&target->bits, &rounded, sizeof rounded);
}
void narrow(float value, Bfloat16* target) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  // To the nearest, to the even one of two; any NaN becomes the quiet one.
  target->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <typename T>
void narrow(T value, T* target) {
  *target = value;
}

template <typename T>
void reduce_as(const std::vector<char*>& sources, size_t begin, size_t end, char* target,
               Reduction reduction, const std::vector<double>& factors) {
  using Wide = decltype(widen(T()));
  for (size_t i = begin; i < end; ++i) {
    Wide total{};
    for (size_t rank = 0; rank < sources.size(); ++rank) {
      Wide number = widen(reinterpret_cast<const T*>(sources[rank])[i]);
      if (reduction == Reduction::kPreMulSum) number = static_cast<Wide>(number * factors[rank]);
      if (rank == 0) {
        total = number;
        continue;
      }
      switch (reduction) {
        case Reduction::kProd: total = static_cast<Wide>(total * number); break;
        case Reduction::kMax: total = std::max(total, number); break;
        case Reduction::kMin: total = std::min(total, number); break;
        default: total = static_cast<Wide>(total + number);
      }
    }
    if (reduction == Reduction::kAvg) total = static_cast<Wide>(total / Wide(sources.size()));
    narrow(total, reinterpret_cast<T*>(target) + i);
  }
}

template <typename T>
void fill_with_lowest(void* numbers, size_t count) {
  std::fill_n(static_cast<T*>(numbers), count, std::numeric_limits<T>::min());
}

template <typename T>
T load(const void* number) {
  T value;
  memcpy(&value, number, sizeof value);
  return value;
}

}  // namespace

size_t bytes_of_a_number(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

double read_number(const void* number, ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: return load<double>(number);
    case ncclFloat32: return load<float>(number);
    case ncclFloat16: return widen(load<Half>(number));
    case ncclBfloat16: return widen(load<Bfloat16>(number));
    default: return 1;
  }
}

void poison(void* numbers, size_t count, ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return fill_with_lowest<int8_t>(numbers, count);
    case ncclInt32: return fill_with_lowest<int32_t>(numbers, count);
    case ncclInt64: return fill_with_lowest<int64_t>(numbers, count);
    // All bits set are NaN in every floating-point type, and the largest unsigned integer.
    default: memset(numbers, 0xff, count * bytes_of_a_number(type));
  }
}

bool reduce_numbers(const std::vector<char*>& sources, size_t begin, size_t end, char* target,
                    ncclDataType_t type, Reduction reduction, const std::vector<double>& factors) {
  const auto reduce = [&](auto number) {
    reduce_as<decltype(number)>(sources, begin, end, target, reduction, factors);
    return true;
  };
  switch (type) {
    case ncclInt8: return reduce(int8_t{});
    case ncclUint8: return reduce(uint8_t{});
    case ncclInt32: return reduce(int32_t{});
    case ncclUint32: return reduce(uint32_t{});
    case ncclInt64: return reduce(int64_t{});
    case ncclUint64: return reduce(uint64_t{});
    case ncclFloat16: return reduce(Half{});
    case ncclBfloat16: return reduce(Bfloat16{});
    case ncclFloat32: return reduce(float{});
    case ncclFloat64: return reduce(double{});
    default: return false;
  }
}

}  // namespace cuda_double
