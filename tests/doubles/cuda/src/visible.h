// What a library of the double shows to others; everything else is hidden (-fvisibility=hidden).
#pragma once

#define CUDA_DOUBLE_API extern "C" __attribute__((visibility("default")))
