// Tests of shapes: the size of every value, and what does not fit.
#include <string>
#include <utility>
#include <vector>

#include "format/shapes.h"
#include "small_file.h"

namespace anyprec::tests {
namespace {

Op simple(OpKind kind, std::vector<int> inputs) {
    Op op;
    op.kind = kind;
    op.name = "op";
    op.inputs = std::move(inputs);
    return op;
}

// H of the value of the last op, or 0 for an InputError.
int last_h(const std::vector<Op> &ops, int h, int w) {
    Graph graph;
    graph.input = Shape(0, {0, 0, 3});
    graph.ops = ops;
    try {
        return infer_shapes(graph, 2, h, w).back().h();
    } catch (const InputError &) {
        return 0;
    }
}

void test_sizes() {
    auto pool = [](int kernel, int stride, int pad, bool ceil, int dilation = 1) {
        Op op = simple(OpKind::max_pool, {0});
        for (int i = 0; i < 2; i++) {
            op.kernel[i] = kernel;
            op.stride[i] = stride;
            op.dilation[i] = dilation;
            op.pad[i] = op.pad[i + 2] = pad;
        }
        op.ceil = ceil;
        return std::vector<Op>{op};
    };
    expect(last_h(pool(3, 2, 1, false), 112, 112) == 56, "the pool of a ResNet");
    expect(last_h(pool(3, 2, 0, true), 6, 6) == 3, "ceil: a window that starts in the image stays"); // starts 0, 2, 4
    expect(last_h(pool(2, 2, 1, true), 3, 3) == 2, "ceil: one that starts in the padding goes");     // starts -1, 1, 3
    expect(last_h(pool(3, 2, 0, true), 2, 2) == 1, "ceil: a window larger than the image");
    expect(last_h(pool(3, 2, 0, false), 2, 2) == 0, "the same without ceil");
    expect(last_h(pool(2, 2, 2, false), 4, 4) == 0, "a window in the padding alone");
    expect(last_h(pool(2, 1, 1, false, 3), 2, 2) == 0, "a window that steps over the image");
    expect(last_h(pool(2147483647, 1, 0, false), 2147483647, 1) == 0, "windows past 2^31");

    auto conv_h = [](int kernel, int pad, int size) {
        Op op = simple(OpKind::conv, {0});
        op.weight = 0;
        for (int i = 0; i < 2; i++) {
            op.kernel[i] = kernel;
            op.pad[i] = op.pad[i + 2] = pad;
        }
        Graph graph;
        graph.input = Shape(0, {0, 0, 3});
        graph.ops = {op};
        graph.weights.resize(1);
        graph.weights[0].shape[0] = 1;
        graph.weights[0].shape[3] = 3;
        try {
            return infer_shapes(graph, 1, size, size).back().h();
        } catch (const InputError &) {
            return 0;
        }
    };
    expect(conv_h(1, 11000, 1) == 22001, "484 million output pixels");
    expect(conv_h(1, 12000, 1) == 0, "576 million are over 2^29");
    expect(conv_h(3, 4000, 3) == 0 && conv_h(3, 3800, 3) == 7601, "of 9 taps each");
    expect(conv_h(32768, 0, 32768) == 0, "2^30 taps of one pixel");

    Op resize = simple(OpKind::resize, {0});
    resize.scale[0] = resize.scale[1] = 0.3;
    expect(last_h({resize}, 10, 10) == 3, "resize by 0.3"); // 10 * 0.3 is 3 in doubles
    expect(last_h({resize}, 3, 3) == 0, "nothing is left");
    resize.scale[0] = resize.scale[1] = 1e9;
    expect(last_h({resize}, 3, 3) == 0, "too large");
    Op flatten = simple(OpKind::flatten, {0});
    expect(last_h({flatten}, 32, 32) == 1, "flatten");
    expect(last_h({flatten}, 65536, 65536) == 0, "flatten to 3 * 2^32 channels");
    Op pad = simple(OpKind::pad, {0});
    pad.pad[0] = 1;
    expect(last_h({pad}, 5, 5) == 6, "pad");
    expect(last_h({pad, simple(OpKind::add, {0, 1})}, 5, 5) == 0, "add of different shapes");
    expect(last_h({pad, simple(OpKind::concat, {0, 1})}, 5, 5) == 0, "concat of different shapes");
    Op like = simple(OpKind::resize, {1});
    like.like = 0;
    expect(last_h({pad, like, simple(OpKind::add, {0, 2})}, 5, 5) == 5, "add after resize to the same size");
    expect(last_h({pad}, 0, 5) == 0 && last_h({pad}, -1, 5) == 0, "empty input");
    expect(last_h({pad}, 1000000, 1000000) == 0, "2^40 elements");

    Graph graph;
    graph.input = Shape(0, {0, 0, 3});
    graph.ops = {flatten, simple(OpKind::softmax, {1})};
    graph.input = Shape(0, {0, 7, 3});
    expect(infer_partial_shapes(graph)[2].c() == 0, "channels of a free size");
    graph.input = Shape(0, {8, 0, 3});
    bool refused = false;
    try {
        infer_shapes(graph, 1, 9, 9);
    } catch (const InputError &) {
        refused = true;
    }
    expect(refused, "another size than the graph's");
}

void test_free_size() {
    Builder free;
    free.input = R"({"shape":[null,null,3],"image":null})";
    auto file = open_bytes(free.file());
    expect(file->graph().image_h == 0 && file->graph().image_w == 0, "nothing about the size it was made for");
    free.input = R"({"shape":[null,6,3],"image":null,"size":[5,6]})";
    expect(open_bytes(free.file())->graph().image_h == 5 && open_bytes(free.file())->graph().image_w == 6, "made for");
    free.input = R"({"shape":[null,null,3],"image":null})";
    expect(file->graph().input.h() == 0 && infer_shapes(file->graph(), 2, 9, 5).back() == Shape(2, {5, 3, 5}),
           "free size");
    free.ops = replaced(free.ops, R"({"name":"last","op":"affine","in":["body"]})",
                        R"({"name":"flat","op":"flatten","in":["body"]},{"name":"last","op":"affine","in":["flat"]})");
    expect_kind(free.file(), "BadGraph", "a table for channels of a free size");
}

} // namespace

void test_shapes() {
    test_sizes();
    test_free_size();
}

} // namespace anyprec::tests
