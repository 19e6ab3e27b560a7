// 3x3 convolutions of training (stride 1, padding 1) by Winograd F(4x4, 3x3) in float: 36 products per pair of channels
// for 4 x 4 outputs instead of 144. In and out: dense float arrays, NHWC. Sums differ from the direct ones by rounding.
// Called by bindings.cpp for anyprec.nn.winograd; models are never run by it.
//
// With bf16 = true both factors of the products are rounded to bfloat16 and the sums stay float32: twice the products
// a second, for gradients, whose noise between batches is far larger. Only where winograd_has_bf16().
#pragma once

namespace anyprec {

struct WinogradSizes {
    int images, height, width; // any of them may be 0: nothing is done
    int from, to;              // channels of x and of y
};

// y (images, height, width, to) of x (images, height, width, from) and kernel (3, 3, from, to).
void winograd_convolve(const float *x, const float *kernel, float *y, const WinogradSizes &sizes, int threads,
                       bool bf16);

// gradient (3, 3, from, to) of the kernel, from x and the gradient of y.
void winograd_kernel_gradient(const float *x, const float *grad, float *gradient, const WinogradSizes &sizes,
                              int threads, bool bf16);

// Whether this CPU multiplies bfloat16 (avx512_bf16), and the instruction set in use is not held below it.
bool winograd_has_bf16();

} // namespace anyprec
