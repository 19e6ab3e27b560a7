// A convolution by Winograd's transforms (kernels.h, struct Winograd), planned and run. In: codes in the arena. Out:
// what its Epilogue says, the same bits as any other way. Called by plan_conv.cpp and execute_conv.cpp.
#pragma once

#include <memory>

#include "plan.h"
#include "threads.h"

namespace anyprec {

// conv has its kernel, blocks, panel and input already.
std::unique_ptr<WinogradStep> plan_winograd(const ConvStep &conv, const Winograd &kernel, const Shape &in,
                                            const Shape &out, int images);

// A convolution with c.winograd, whose windows are there already. Allocates nothing.
void run_winograd(const ConvStep &c, int images, uint8_t *arena, Threads &threads);

} // namespace anyprec
