// Whether all numbers of an image are finite. Input with NaN or infinity is refused: it would get a confident answer,
// since max(NaN, 0) is 0. In: float32 numbers. Out: yes or no. Called by bindings.cpp and run_main.cpp; the engine
// itself computes such numbers as ARITHMETIC.md says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "anyprec/input_error.h"

namespace anyprec {

// NaN and infinity have all exponent bits set. Adding 2^23 then carries into the sign, so one OR over all numbers
// suffices. Four vectors at a time, unrolled by hand: the module is compiled for size, and a plain loop took 13 times
// as long.
inline bool all_finite(const float *x, size_t count) {
    typedef uint32_t Lanes __attribute__((vector_size(16)));
    typedef uint32_t Numbers __attribute__((vector_size(16), aligned(4), may_alias));
    constexpr size_t kAtOnce = 4, kLanes = sizeof(Lanes) / sizeof(float);
    Lanes seen[kAtOnce] = {};
    size_t i = 0;
    for (; i + kAtOnce * kLanes <= count; i += kAtOnce * kLanes) {
        const Numbers *bits = reinterpret_cast<const Numbers *>(x + i);
        seen[0] |= (bits[0] & 0x7fffffffu) + 0x00800000u;
        seen[1] |= (bits[1] & 0x7fffffffu) + 0x00800000u;
        seen[2] |= (bits[2] & 0x7fffffffu) + 0x00800000u;
        seen[3] |= (bits[3] & 0x7fffffffu) + 0x00800000u;
    }
    const Lanes all = seen[0] | seen[1] | seen[2] | seen[3];
    uint32_t any = all[0] | all[1] | all[2] | all[3];
    for (; i < count; ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, x + i, sizeof bits);
        any |= (bits & 0x7fffffffu) + 0x00800000u;
    }
    return !(any & 0x80000000u);
}

inline void refuse_nonfinite(const float *x, size_t count) {
    if (!all_finite(x, count))
        throw InputError("the input has NaN or infinity in it; repair the images first");
}

} // namespace anyprec
