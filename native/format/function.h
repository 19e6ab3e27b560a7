// Function: the attribute `function` of pointwise, binary, reduce and recurrent ops (FORMAT.md, section 3). What each
// computes is in ARITHMETIC.md, section 8. Set by the reader, read by the kernels.
#pragma once

#include <cstdint>

namespace anyprec {

enum class Function : uint8_t {
    // pointwise
    abs,
    sqrt,
    reciprocal,
    exp,
    log,
    sigmoid,
    tanh,
    erf,
    gelu,
    gelu_tanh,
    silu,
    mish,
    // binary; max and min also of reduce
    add,
    sub,
    mul,
    div,
    max,
    min,
    // reduce
    sum,
    mean,
    // recurrent
    lstm,
    gru,
};

} // namespace anyprec
