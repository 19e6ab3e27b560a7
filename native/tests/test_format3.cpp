// Tests of format 3: shapes of its operations, and graphs that the reader takes or refuses.
#include <string>
#include <vector>

#include "format/shapes.h"
#include "small_file.h"

namespace anyprec::tests {
namespace {

// A graph of format 3: indices and a mask in, most operations once.
struct Tokens : Builder {
    Tokens() {
        format = "3";
        input = R"({"shape":[null],"image":null,"integer":true})";
        planes = R"({"1":[0]})";
        profiles = R"([{"name":"1","weights":1,"acts":1,"accuracy":null}])";
        weights = R"({"rows":{"shape":[10,1,1,8],"float":true},"bias":{"shape":[1,1,1,8],"float":true},)"
                  R"("gates":{"shape":[24,1,1,9],"float":true}})";
        ops = R"([{"name":"mask","op":"input","in":[],"shape":[null,8],"integer":false},)"
              R"({"name":"embed","op":"embedding","in":["input"],"weight":"rows"},)"
              R"({"name":"bias","op":"constant","in":[],"weight":"bias","shape":[1,8]},)"
              R"({"name":"sum","op":"binary","in":["embed","bias"],"function":"add"},)"
              R"({"name":"norm","op":"norm","in":["sum"],"axes":[1],"eps":1e-5},)"
              R"({"name":"heads","op":"reshape","in":["norm"],"shape":[null,2,4]},)"
              R"({"name":"turned","op":"transpose","in":["heads"],"order":[1,0,2]},)"
              R"({"name":"scores","op":"matmul","in":["turned","turned"],"transposed":true},)"
              R"({"name":"soft","op":"softmax","in":["scores"],"single":true},)"
              R"({"name":"mixed","op":"matmul","in":["soft","turned"],"transposed":false},)"
              R"({"name":"part","op":"slice","in":["mixed"],"axis":2,"start":-3,"stop":null,"step":1},)"
              R"({"name":"chosen","op":"gather","in":["part"],"axis":2,"index":[2,0,1,0,0,0,0,0,0,0,0,0]},)"
              R"({"name":"gelu","op":"pointwise","in":["chosen"],"function":"gelu"},)"
              R"({"name":"wide","op":"reshape","in":["gelu"],"shape":[null,24]},)"
              R"({"name":"states","op":"recurrent","in":["wide"],"function":"gru","weight":"gates","reverse":true},)"
              R"({"name":"both","op":"concat","in":["states","states"],"axis":0},)"
              R"({"name":"mean","op":"reduce","in":["both"],"function":"mean","axes":[0]}])";
        outputs = R"(["mean"])";
        tensors = {{"weight.bias", "F32", "[1,1,1,8]", std::string(4 * 8, '\0')},
                   {"weight.gates", "F32", "[24,1,1,9]", std::string(4 * 24 * 9, '\0')},
                   {"weight.rows", "F32", "[10,1,1,8]", std::string(4 * 80, '\0')}};
    }
};

void test_tokens() {
    const Tokens tokens;
    auto file = open_bytes(tokens.file());
    const Graph &graph = file->graph();
    expect(graph.input_count() == 2 && graph.integer_input && graph.input.rank == 1, "inputs");
    expect(graph.ops[14].channels == 8 && graph.ops[7].channels == 0, "channels");
    const std::vector<Shape> shapes = infer_shapes(graph, {Shape(3, {5}), Shape(3, {5, 8})});
    expect(shapes[2] == Shape(3, {5, 8}) && shapes[6] == Shape(3, {5, 2, 4}) && shapes[8] == Shape(3, {2, 5, 5}),
           "shapes");
    expect(shapes[11] == Shape(3, {2, 5, 3}) && shapes[15] == Shape(3, {5, 8}) && shapes[17] == Shape(3, {1, 8}),
           "shapes behind the slice");
    for (const std::vector<Shape> &wrong : std::vector<std::vector<Shape>>{{Shape(3, {5})},
                                                                           {Shape(3, {5}), Shape(2, {5, 8})},
                                                                           {Shape(3, {5}), Shape(3, {5, 7})},
                                                                           {Shape(3, {5, 1}), Shape(3, {5, 8})},
                                                                           {Shape(0, {5}), Shape(0, {5, 8})}}) {
        bool refused = false;
        try {
            infer_shapes(graph, wrong);
        } catch (const InputError &) {
            refused = true;
        }
        expect(refused, "inputs that do not fit");
    }
}

void test_refused() {
    const auto broken = [](const std::string &from, const std::string &to) {
        Tokens tokens;
        std::string &part = tokens.input.find(from) != std::string::npos     ? tokens.input
                            : tokens.weights.find(from) != std::string::npos ? tokens.weights
                                                                             : tokens.ops;
        part = replaced(part, from, to);
        expect_kind(tokens.file(), "BadGraph", from + " -> " + to);
    };
    broken(R"("shape":[null,2,4])", R"("shape":[null,null,4])");
    broken(R"("shape":[null,2,4])", R"("shape":[])");
    broken(R"("shape":[null,2,4])", R"("shape":[1,1,1,1,1,2,4])");
    broken(R"("shape":[null,2,4])", R"("shape":[2147483647,2147483647,2147483647,2147483647,2147483647,2147483647])");
    broken(R"("shape":[null,2,4])", R"("shape":[null,2,2147483648])");
    broken(R"("shape":[null,2,4])", R"("shape":[null,0,4])");
    broken(R"("shape":[null,2,4])", R"("shape":[null,-2,4])");
    broken(R"("order":[1,0,2])", R"("order":[1,0])");
    broken(R"("order":[1,0,2])", R"("order":[1,1,0])");
    broken(R"("order":[1,0,2])", R"("order":[3,0,2])");
    broken(R"("order":[1,0,2])", R"("order":[1,-1,2])");
    broken(R"("axes":[1])", R"("axes":[1,0])");
    broken(R"("axes":[1])", R"("axes":[1,1])");
    broken(R"("axes":[1])", R"("axes":[])");
    broken(R"("axes":[1])", R"("axes":[2])");
    broken(R"("eps":1e-5)", R"("eps":1)");
    broken(R"("eps":1e-5)", R"("eps":-1e-9)");
    broken(R"("start":-3)", R"("start":4)");
    broken(R"("start":-3)", R"("start":-9000000000)");
    broken(R"("step":1)", R"("step":0)");
    broken(R"("axis":2,"start")", R"("axis":6,"start")");
    broken(R"("index":[2,)", R"("index":[3,)");
    broken(R"("index":[2,)", R"("index":[-1,)");
    broken(R"("index":[2,0,1,0,0,0,0,0,0,0,0,0])", R"("index":[])");
    broken(R"("function":"gelu")", R"("function":"add")");
    broken(R"("function":"add")", R"("function":"pow")");
    broken(R"("function":"gru")", R"("function":"lstm")");
    broken(R"("single":true)", R"("single":false)");
    broken(R"("transposed":true)", R"("transposed":1)");
    broken(R"("in":["embed","bias"])", R"("in":["embed","mask","bias"])");
    broken(R"("in":["embed","bias"])", R"("in":["embed","input"])");
    broken(R"("in":[],"weight")", R"("in":["input"],"weight")");
    broken(R"("weight":"bias","shape":[1,8])", R"("weight":"bias","shape":[8,2])");
    broken(R"("weight":"bias","shape":[1,8])", R"("weight":"rows","shape":[10,8])");
    broken(R"("shape":[null,8],"integer":false)", R"("shape":[null,null],"integer":false)");
    broken(R"({"name":"norm","op":"norm")", R"({"name":"late","op":"input","in":[],"shape":[1],"integer":true},)"
                                            R"({"name":"norm","op":"norm")");
    broken(R"("image":null)", R"("image":null,"size":[3,3])");
    broken(R"("image":null)", R"("image":{"scale":[1],"shift":[0]})");
    broken(R"("integer":true)", R"("integer":1)");
    broken(R"("shape":[24,1,1,9])", R"("shape":[24,1,9,1])");
    for (const char *older : {"1", "2"}) {
        Tokens old;
        old.format = older;
        expect_kind(old.file(), "BadGraph", std::string("format ") + older);
    }
    Tokens flatten;
    flatten.ops = replaced(flatten.ops, R"("op":"pointwise","in":["chosen"],"function":"gelu")",
                           R"("op":"flatten","in":["states"])");
    expect_kind(flatten.file(), "BadGraph", "an op for images reads other values");
}

// Two products: of codes with codes, which has a table, and of floats.
struct Products : Builder {
    Products() {
        format = "3";
        input = R"({"shape":[null,8],"image":null})";
        planes = R"({"1":[0]})";
        profiles = R"([{"name":"8","weights":1,"acts":{"q":8,"k":8},"accuracy":null}])";
        profiles = replaced(profiles, R"("name":"8")", R"("name":"most")");
        weights = "{}";
        ops = R"([{"name":"q","op":"quantize","in":["input"],"signed":true,"rectify":false,"affine":false},)"
              R"({"name":"k","op":"quantize","in":["input"],"signed":false,"rectify":false,"affine":false},)"
              R"({"name":"turned","op":"transpose","in":["q"],"order":[1,0]},)"
              R"({"name":"scores","op":"matmul","in":["turned","k"],"transposed":false},)"
              R"({"name":"mixed","op":"matmul","in":["input","scores"],"transposed":false}])";
        outputs = R"(["mixed"])";
        tensors = {{"table.scores", "F32", "[1,2]", std::string(8, '\0')}};
    }
};

void test_products() {
    const Products products;
    auto file = open_bytes(products.file());
    const Graph &graph = file->graph();
    expect(graph.ops[3].multiplies_codes && graph.ops[3].table && graph.ops[3].table_row == 2, "a product of codes");
    expect(!graph.ops[4].multiplies_codes && !graph.ops[4].table, "a product of floats");
    const auto broken = [](const std::string &from, const std::string &to, const char *error) {
        Products other;
        std::string &part = other.input.find(from) != std::string::npos      ? other.input
                            : other.profiles.find(from) != std::string::npos ? other.profiles
                                                                             : other.ops;
        part = replaced(part, from, to);
        expect_kind(other.file(), error, from + " -> " + to);
    };
    broken(R"("in":["turned","k"])", R"("in":["turned","input"])", "BadGraph");
    broken(R"("in":["input","scores"])", R"("in":["input","k"])", "BadGraph");
    broken(R"("in":["input","scores"])", R"("in":["q","k"])", "BadTensor");
    broken(R"("k":8)", R"("k":32)", "BadGraph");
    broken(R"("shape":[null,8])", R"("shape":[16384,8])", "BadGraph"); // 16384 x 2^16 is 2^30
    broken(R"("transposed":false}])", R"("transposed":false,"signed":true}])", "BadGraph");
    Products fits;
    fits.input = replaced(fits.input, "[null,8]", "[16383,8]");
    open_bytes(fits.file());
    Products without;
    without.tensors.clear();
    expect_kind(without.file(), "BadTensor", "a product of codes without its table");
}

// Height of a transposed convolution's result, or 0 for an InputError.
int transposed_height(int size, int kernel, int stride, int pad, int dilation, int extra) {
    Op op;
    op.kind = OpKind::conv;
    op.name = "up";
    op.inputs = {0};
    op.weight = 0;
    op.transposed = true;
    for (int i = 0; i < 2; i++) {
        op.kernel[i] = kernel;
        op.stride[i] = stride;
        op.dilation[i] = dilation;
        op.pad[i] = op.pad[i + 2] = pad;
        op.output_pad[i] = extra;
    }
    Graph graph;
    graph.input = Shape(0, {0, 0, 3});
    graph.ops = {op};
    graph.weights.resize(1);
    graph.weights[0].shape[0] = 2;
    graph.weights[0].shape[3] = 3;
    try {
        return infer_shapes(graph, 1, size, size).back().h();
    } catch (const InputError &) {
        return 0;
    }
}

void test_transposed() {
    expect(transposed_height(7, 2, 2, 0, 1, 0) == 14, "twice as large");
    expect(transposed_height(7, 4, 2, 1, 1, 0) == 14, "twice as large, with padding");
    expect(transposed_height(7, 3, 2, 1, 1, 1) == 14, "and output_pad");
    expect(transposed_height(1, 3, 1, 1, 2, 0) == 3, "dilation");
    expect(transposed_height(7, 3, 2, 1, 1, 2) == 0, "output_pad as large as the stride");
    expect(transposed_height(1, 3, 1, 2, 1, 0) == 0, "nothing is left");
    expect(transposed_height(40000, 1, 40000, 0, 1, 0) == 0, "too many pixels");
    expect(transposed_height(2, 2147483647, 1, 0, 2147483647, 0) == 0, "windows past 2^31");
}

} // namespace

void test_format3() {
    test_tokens();
    test_refused();
    test_products();
    test_transposed();
}

} // namespace anyprec::tests
