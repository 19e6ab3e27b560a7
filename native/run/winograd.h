// A convolution by Winograd (kernels.h, struct Winograd), planned and run. In: codes in the arena. Out: outputs through
// the epilogue, the same bits as the direct algorithm (ARITHMETIC.md, section 3). Called by plan_conv.cpp and
// execute_conv.cpp.
#pragma once

#include <memory>

#include "plan/plan.h"
#include "run/threads.h"

namespace anyprec {

// conv must have its kernel, blocks, panel and input.
std::unique_ptr<WinogradStep> plan_winograd(const ConvStep &conv, const Winograd &kernel, const Shape &in,
                                            const Shape &out, int images);

// Runs a convolution with c.winograd, whose window sums are computed. Allocates nothing.
void run_winograd(const ConvStep &c, int images, uint8_t *arena, Threads &threads);

} // namespace anyprec
