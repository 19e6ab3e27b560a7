// Tests of the reader on broken files: one case per way a file can be wrong.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "small_file.h"

namespace anyprec::tests {
namespace {

void test_header() {
    Builder good;
    expect_kind("", "TruncatedFile", "empty");
    expect_kind("hello, world", "BadHeader", "text");
    expect_kind(std::string("\xff\xff\xff\xff\0\0\0\0{", 9), "BadHeader", "a header of 4 GB");
    expect_kind(std::string("\0\0\0\0\0\0\0\0", 8), "BadHeader", "no header");
    expect_kind(Builder::with_length("[1]"), "BadHeader", "not an object");
    expect_kind(Builder::with_length("{\"a\":1"), "BadHeader", "not closed");
    expect_kind(Builder::with_length("{}"), "NotAModelFile", "no metadata");
    expect_kind(Builder::with_length("{\"__metadata__\":[]}"), "BadHeader", "metadata is a list");
    Builder other = good;
    other.without_graph = true;
    expect_kind(other.file(), "NotAModelFile", "another safetensors file");
    other = good;
    other.wrong_crc = true;
    expect_kind(other.file(), "ChecksumMismatch", "the graph's checksum");
    other = good;
    other.metadata_extra = ",\"x\":1";
    expect_kind(other.file(), "BadHeader", "metadata that is no string");
    other.metadata_extra = ",\"format\":\"pt\"";
    expect_kind(other.file(), "opened", "other metadata");
    other.metadata_extra = ",\"anyprec\":\"\"";
    expect_kind(other.file(), "BadHeader", "metadata twice");
    for (const char *format : {"4", "0", "-1", "1.0", "\"1\"", "null"}) {
        other = good;
        other.format = format;
        expect_kind(other.file(), "UnsupportedVersion", std::string("format ") + format);
    }
    other = good;
    other.format = "2";
    expect_kind(other.file(), "BadGraph", "format 2 without preprocessing");
    std::string bytes = good.file();
    bytes.back() ^= 1;
    expect_kind(bytes, "opened", "a flipped bit, not looked at");
    expect_kind(bytes, "ChecksumMismatch", "a flipped bit", true);
}

// With checksums that agree, so that they are looked at or not.
void test_numbers() {
    const float odd[] = {NAN, INFINITY, -INFINITY, 3.4e38f};
    for (size_t tensor : {0, 1, 2, 3, 7}) // tables, a float weight, a tail
        for (float number : odd) {
            Builder b;
            std::memcpy(b.tensors[tensor].bytes.data() + b.tensors[tensor].bytes.size() - 4, &number, 4);
            for (bool verify : {false, true})
                expect_kind(b.file(), number == 3.4e38f ? "opened" : "BadTensor",
                            b.tensors[tensor].name + " ends in " + std::to_string(number), verify);
        }
    for (size_t tensor : {4, 5, 6})
        for (int bit = 0; bit < 8; bit++) {
            Builder b; // 35 weights: bits 0 to 2 of the last byte
            b.tensors[tensor].bytes.back() = char(1 << bit);
            for (bool verify : {false, true})
                expect_kind(b.file(), bit < 3 ? "opened" : "BadTensor", "bit " + std::to_string(bit), verify);
        }
    const float bounds[][3] = {{-INFINITY, INFINITY, 1},
                               {INFINITY, INFINITY, 0},
                               {-INFINITY, -INFINITY, 0},
                               {NAN, INFINITY, 0},
                               {0, NAN, 0},
                               {0, 6, 1}};
    for (const auto &row : bounds) {
        Builder b;
        b.ops = replaced(b.ops, R"({"name":"last","op":"affine","in":["body"]})",
                         R"({"name":"last","op":"clip","in":["body"]})");
        b.tensors[1] = {"table.last", "F32", "[4,2]", ""};
        for (int profile = 0; profile < 4; profile++)
            b.tensors[1].bytes.append(reinterpret_cast<const char *>(row), 8);
        expect_kind(b.file(), row[2] != 0 ? "opened" : "BadTensor",
                    "a clip between " + std::to_string(row[0]) + " and " + std::to_string(row[1]), true);
    }
}

void test_profile_names() {
    for (const char *name : {"random", "random:1,2", "2", "8", "007", "99999999999999999999"}) {
        Builder b;
        b.profiles = replaced(b.profiles, "mixed", name);
        expect_kind(b.file(), "BadGraph", std::string("a mixed profile called ") + name);
    }
    for (const char *name : {"randomly", "Random", "2x", "mixed 2"}) {
        Builder b;
        b.profiles = replaced(b.profiles, "mixed", name);
        expect_kind(b.file(), "opened", std::string("a mixed profile called ") + name);
    }
    Builder b;
    b.profiles = replaced(b.profiles, R"("weights":3,"acts":3)", R"("weights":3,"acts":2)");
    expect_kind(b.file(), "BadGraph", "3 whose acts have 2 bits");
}

void test_tensors() {
    const Builder good;
    auto header_with = [&](const std::string &from, const std::string &to) {
        std::string head = good.head(), bytes = good.file().substr(head.size());
        head = head.substr(8, head.find_last_not_of(' ') - 7);
        return Builder::with_length(replaced(head, from, to)) + bytes;
    };
    const std::string row = R"("plane00.body":{"dtype":"U8","shape":[5],"data_offsets":[628,633]})";
    expect_kind(header_with(row, row), "opened", "unchanged");
    auto row_with = [&](const std::string &from, const std::string &to) {
        return header_with(row, replaced(row, from, to));
    };
    expect_kind(row_with("U8", "F32"), "BadTensor", "dtype");
    expect_kind(row_with("U8", "I8"), "BadTensor", "unknown dtype");
    expect_kind(row_with("[5]", "[]"), "BadTensor", "no shape");
    expect_kind(row_with("[5]", "[5,1]"), "BadTensor", "another shape");
    expect_kind(row_with("[5]", "[-5]"), "BadTensor", "negative shape");
    expect_kind(row_with("[5]", "[4294967296,4294967296,4294967296,4294967296]"), "BadTensor", "2^128 elements");
    expect_kind(row_with("[5]", "[5.0]"), "BadTensor", "real shape");
    expect_kind(row_with("[628,633]", "[627,632]"), "BadTensor", "overlap");
    // The last tensor one byte early and the file one byte shorter: overlapping is all that is wrong with it.
    std::string early = header_with("[643,783]", "[642,782]");
    expect_kind(early.substr(0, early.size() - 1), "BadTensor", "overlap of the last one");
    expect_kind(row_with("[628,633]", "[633,628]"), "BadTensor", "backwards");
    expect_kind(row_with("[628,633]", "[628,999999999999999999]"), "BadTensor", "past the end");
    expect_kind(row_with("[628,633]", "[18446744073709551615,4]"), "BadTensor", "an offset of 2^64 - 1");
    expect_kind(row_with("[628,633]", "[628]"), "BadTensor", "one offset");
    expect_kind(row_with("\"dtype\"", "\"type\""), "BadTensor", "no dtype");
    expect_kind(row_with("plane00.body", "plane00.nobody"), "BadTensor", "another name");
    expect_kind(header_with(row, "\"plane00.body\":3"), "BadTensor", "not an object");
    expect_kind(header_with(row + ",", ""), "BadTensor", "gap");

    Builder other = good;
    std::swap(other.tensors[4], other.tensors[5]);
    expect_kind(other.file(), "BadTensor", "planes in the wrong order");
    other = good;
    other.tensors.erase(other.tensors.begin());
    expect_kind(other.file(), "BadTensor", "no table");
    other = good;
    other.tensors.pop_back();
    expect_kind(other.file(), "BadTensor", "no tail");
    other.profiles =
        replaced(other.profiles, R"("name":"32","weights":32,"acts":32)", R"("name":"w3","weights":3,"acts":3)");
    expect_kind(other.file(), "opened", "no tail needed");
    other = good;
    other.tensors.push_back({"tail.more", "U8", "[1]", "x"});
    expect_kind(other.file(), "BadTensor", "one too many");
    other = good;
    other.tensors[5].bytes[4] = 15;
    expect_kind(other.file(), "BadTensor", "bits past the end of a plane");
    other = good;
    std::string head = other.head(), data = other.file().substr(head.size());
    head[0] = char(head[0] + 2); // the data starts at byte 2 of a word
    expect_kind(head + "  " + data, "BadTensor", "floats not aligned");
}

void test_graph() {
    using Change = std::function<void(Builder &)>;
    auto bad = [](const std::string &what, const Change &change) {
        Builder builder;
        change(builder);
        expect_kind(builder.file(), "BadGraph", what);
    };
    auto op = [&](const std::string &from, const std::string &to) {
        bad("op: " + from + " -> " + to, [&](Builder &b) { b.ops = replaced(b.ops, from, to); });
    };
    auto profile = [&](const std::string &from, const std::string &to) {
        bad("profile: " + from + " -> " + to, [&](Builder &b) { b.profiles = replaced(b.profiles, from, to); });
    };
    bad("unknown member", [](Builder &b) { b.extra = ",\"more\":1"; });
    bad("not JSON", [](Builder &b) { b.extra = ",}"; });
    bad("a key twice", [](Builder &b) { b.extra = ",\"name\":\"x\""; });
    for (const char *input :
         {"null", "{\"shape\":[4,6],\"image\":null}", "{\"shape\":[4,6,null],\"image\":null}",
          "{\"shape\":[4,0,3],\"image\":null}", "{\"shape\":[4,2147483648,3],\"image\":null}",
          "{\"shape\":[1048576,1048576,3],\"image\":null}", "{\"shape\":[4,6,3]}",
          "{\"shape\":[4,6,3],\"image\":{\"scale\":[1,1],\"shift\":[1,1,1]}}",
          "{\"shape\":[4,6,3],\"image\":{\"scale\":[1,1,1e39],\"shift\":[1,1,1]}}",
          "{\"shape\":[4,6,4],\"image\":null}", "{\"shape\":[4,6,3],\"image\":null,\"size\":null}",
          "{\"shape\":[4,6,3],\"image\":null,\"size\":[4,6,3]}", "{\"shape\":[4,6,3],\"image\":null,\"size\":[4,7]}",
          "{\"shape\":[null,6,3],\"image\":null,\"size\":[0,6]}",
          "{\"shape\":[null,null,3],\"image\":null,\"size\":[1048576,1048576]}"})
        bad(std::string("input ") + input, [&](Builder &b) { b.input = input; });
    for (const char *planes :
         {"[]", "{\"0\":[]}", "{\"9\":[0,1,2,3,4,5,6,7,8]}", "{\"1\":[0,1]}", "{\"1\":[1]}", "{\"2\":[1,0]}",
          "{\"2\":[0,0]}", "{\"1\":[-1]}", "{\"1\":[36]}", "{\"1\":[0],\"2\":[1,2],\"3\":[0,1,2]}",
          "{\"1\":[0],\"3\":[0,1,2]}", "{\"1\":[0],\"2\":[0,2],\"3\":[0,1,3]}", "{\"01\":[0]}", "{\"1\":0}"})
        bad(std::string("planes ") + planes, [&](Builder &b) { b.planes = planes; });
    for (const char *weights :
         {"[]", "{}", "{\"stem\":{\"shape\":[7,1,1,3],\"float\":true},\"body\":{\"shape\":[5,1,1],\"float\":false}}",
          "{\"stem\":{\"shape\":[7,1,1,3],\"float\":1},\"body\":{\"shape\":[5,1,1,7],\"float\":false}}",
          "{\"stem\":{\"shape\":[7,1,1,3],\"float\":true},\"body\":{\"shape\":[65536,65536,256,1],\"float\":false}}",
          "{\"stem\":{\"shape\":[7,1,1,3],\"float\":true},\"body\":{\"shape\":[5,1,1,8],\"float\":false}}",
          "{\"stem\":{\"shape\":[7,1,1,3],\"float\":false},\"body\":{\"shape\":[5,1,1,7],\"float\":false}}"})
        bad(std::string("weights ") + weights, [&](Builder &b) { b.weights = weights; });
    bad("an unused weight", [](Builder &b) { b.weights.replace(1, 0, R"("more":{"shape":[1,1,1,1],"float":true},)"); });
    for (const char *outputs :
         {"[]", "\"last\"", "[\"nothing\"]", "[\"input\"]", "[\"q\"]", "[\"last\",\"last\"]", "[3]"})
        bad(std::string("outputs ") + outputs, [&](Builder &b) { b.outputs = outputs; });
    bad("no ops", [](Builder &b) { b.ops = "[]"; });
    op(R"("op":"affine")", R"("op":"gelu")");
    op(R"("op":"affine")", R"("op":"softmax","axis":1)");
    op(R"("op":"affine")", R"("op":"dequantize")");
    op(R"("name":"last")", R"("name":"body")");
    op(R"("name":"last")", R"("name":"input")");
    op(R"("name":"last")", R"("name":"")");
    op(R"("name":"last")", "\"name\":\"l\xc3\xa4st\"");
    op(R"("name":"last")", "\"name\":\"" + std::string(201, 'x') + "\"");
    op(R"("in":["body"])", R"("in":["last"])");
    op(R"("in":["body"])", R"("in":["nothing"])");
    op(R"("in":["body"])", R"("in":["body","body"])");
    op(R"("in":["body"])", R"("in":[])");
    op(R"("in":["body"])", R"("in":["q"])");
    op(R"("in":["pool"])", R"("in":["stem"])");
    op(R"("in":["stem"])", R"("in":["input"])" + std::string(",\"more\":1"));
    op(R"("ceil":false)", R"("ceil":0)");
    op(R"(,"ceil":false)", "");
    op(R"("signed":true,"rectify")", R"("signed":false,"rectify")");
    op(R"("weight":"body")", R"("weight":"nobody")");
    op(R"("kernel":[3,3])", R"("kernel":[3,0])");
    op(R"("kernel":[3,3])", R"("kernel":[3])");
    op(R"("kernel":[3,3])", R"("kernel":[2147483648,3])");
    op(R"("kernel":[3,3],"stride":[2,2],"pad":[1,1,1,1])", R"("kernel":[1,1],"stride":[2,2],"pad":[1,1,1,1])");
    op(R"("kernel":[3,3],"stride":[2,2],"pad":[1,1,1,1])", R"("kernel":[9,9],"stride":[2,2],"pad":[1,1,1,1])");
    op(R"("dilation":[1,1],"ceil")", R"("dilation":[2147483647,1],"ceil")");
    op(R"("kernel":[1,1])", R"("kernel":[1,2])");
    op(R"("groups":1)", R"("groups":2)");
    op(R"("groups":1)", R"("groups":0)");
    profile(R"("weights":3)", R"("weights":4)");
    profile(R"("weights":3)", R"("weights":0)");
    profile(R"("acts":3)", R"("acts":9)");
    profile(R"("acts":3)", R"("acts":32)");
    profile(R"("weights":32)", R"("weights":3)");
    profile(R"("name":"3")", R"("name":"1")");
    profile(R"({"body":2})", R"({"stem":2})");
    profile(R"({"body":2})", R"({})");
    profile(R"({"q":8})", R"({"q":8,"pool":8})");
    profile(R"({"q":8})", R"({"q":true})");
    profile("91.25", "101");
    profile("91.25", "\"91\"");
    bad("no profiles", [](Builder &b) { b.profiles = "[]"; });
    bad("257 profiles", [](Builder &b) {
        b.profiles = "[";
        for (int i = 0; i < 257; i++)
            b.profiles += (i ? "," : "") + std::string("{\"name\":\"") + std::to_string(i) +
                          R"(","weights":1,"acts":1,"accuracy":null})";
        b.profiles += "]";
    });
    // 33,026 products of 255 * 255 are the first that reach 2^31: 33,025 * 65,025 = 2,147,450,625.
    for (int taps : {33025, 33026}) {
        Builder b;
        b.input = R"({"shape":[4,6,)" + std::to_string(taps) + R"(],"image":null})";
        b.planes = R"({"8":[0,1,2,3,4,5,6,7]})";
        b.profiles = R"([{"name":"8","weights":8,"acts":8,"accuracy":null}])";
        b.weights = R"({"body":{"shape":[1,1,1,)" + std::to_string(taps) + R"(],"float":false}})";
        b.ops = R"([{"name":"q","op":"quantize","in":["input"],"signed":false,"rectify":false,"affine":false},)"
                R"({"name":"body","op":"linear","in":["q"],"weight":"body","signed":false,"affine":false}])";
        b.outputs = R"(["body"])";
        b.tensors.clear();
        std::string plane(size_t(taps + 7) / 8, '\0');
        for (int i = 0; i < 8; i++)
            b.tensors.push_back(
                {"plane0" + std::to_string(i) + ".body", "U8", "[" + std::to_string(plane.size()) + "]", plane});
        expect_kind(b.file(), taps == 33025 ? "opened" : "BadGraph", "sums of " + std::to_string(taps) + " products");
    }
}

// The small network with a stem of 8 bits in every profile but the float one.
Builder with_fixed_stem() {
    Builder b;
    b.weights = replaced(b.weights, R"("float":true})", R"("float":false,"bits":8})");
    b.ops = R"([{"name":"qs","op":"quantize","in":["input"],"signed":true,"rectify":false,"affine":false,"bits":8},)" +
            replaced(b.ops.substr(1), R"("in":["input"])", R"("in":["qs"])");
    b.ops = replaced(b.ops, R"("groups":1,"signed":false)", R"("groups":1,"signed":true)");
    b.tensors[3] = {"codes.stem", "U8", "[21]", "abcdefghijklmnopqrstu"};
    b.tensors.push_back({"tail.stem", "U8", "[84]", std::string(84, 'x')});
    return b;
}

void test_fixed_bits() {
    std::string bytes = with_fixed_stem().file();
    auto file = open_bytes(bytes, 0, true);
    const Graph &graph = file->graph();
    const Weight &stem = graph.weights[0];
    expect(stem.fixed_bits == 8 && !stem.is_float && stem.planes.empty() && !stem.values, "a weight of 8 bits");
    expect(stem.codes && !std::memcmp(stem.codes, "abcdefghijklmnopqrstu", 21), "its codes");
    expect(stem.tail && stem.tail[83] == 'x', "its tail");
    for (const Profile &profile : graph.profiles) {
        int bits = profile.name == "32" ? 32 : 8;
        expect(profile.weight_bits[0] == bits && profile.act_bits[0] == bits, "8 bits in profile " + profile.name);
        expect(profile.weight_bits[1] == (profile.name == "mixed" ? 2 : std::stoi(profile.name)),
               "the body's in profile " + profile.name);
    }
    // max_bits and a file that ends after plane 00 keep the codes; the float profile needs both tails.
    auto narrow = open_bytes(bytes, 1);
    expect(narrow->available(0) && !narrow->available(1) && narrow->graph().weights[0].codes, "1 bit with its codes");
    auto cut = open_bytes(bytes.substr(0, file->bytes_for(1)));
    expect(cut->available(0) && cut->planes_available() == 1, "the prefix of 1 bit");
    auto most = open_bytes(bytes.substr(0, bytes.size() - 1));
    expect(most->available(1) && !most->available(3), "all but the last byte of a tail");
    expect_kind(bytes.substr(0, file->bytes_for(1) - 6), "TruncatedFile", "cut inside the codes");

    auto bad = [](const std::string &what, const std::string &kind, const std::function<void(Builder &)> &change) {
        Builder b = with_fixed_stem();
        change(b);
        expect_kind(b.file(), kind, what);
    };
    for (const char *bits : {"7", "0", "-8", "16", "8.0", "true", "null", "\"8\"", "[8]"}) {
        std::string to = std::string("\"bits\":") + bits + "}";
        bad("weight bits " + to, "BadGraph", [&](Builder &b) { b.weights = replaced(b.weights, "\"bits\":8}", to); });
        bad("op bits " + to, "BadGraph", [&](Builder &b) { b.ops = replaced(b.ops, "\"bits\":8}", to); });
    }
    bad("float and bits", "BadGraph",
        [](Builder &b) { b.weights = replaced(b.weights, "false,\"bits\"", "true,\"bits\""); });
    bad("bits of a conv", "BadGraph",
        [](Builder &b) { b.ops = replaced(b.ops, R"("groups":1)", R"("groups":1,"bits":8)"); });
    bad("a profile that names it", "BadGraph",
        [](Builder &b) { b.profiles = replaced(b.profiles, R"({"body":2})", R"({"body":2,"stem":8})"); });
    bad("a profile that names its quantize", "BadGraph",
        [](Builder &b) { b.profiles = replaced(b.profiles, R"({"q":8})", R"({"q":8,"qs":8})"); });
    bad("a profile float for one of the two", "BadGraph", [](Builder &b) {
        b.profiles = replaced(b.profiles, R"("weights":32,"acts":32)", R"("weights":32,"acts":{"q":32})");
    });
    bad("no codes", "BadTensor", [](Builder &b) { b.tensors.erase(b.tensors.begin() + 3); });
    bad("codes of another name", "BadTensor", [](Builder &b) { b.tensors[3].name = "codes.body"; });
    bad("codes as floats", "BadTensor",
        [](Builder &b) { b.tensors[3] = {"codes.stem", "F32", "[21]", std::string(84, 'x')}; });
    bad("a code too few", "BadTensor",
        [](Builder &b) { b.tensors[3] = {"codes.stem", "U8", "[20]", std::string(20, 'x')}; });
    bad("codes behind a plane", "BadTensor", [](Builder &b) { std::swap(b.tensors[3], b.tensors[4]); });
    bad("no tail", "BadTensor", [](Builder &b) { b.tensors.pop_back(); });
}

} // namespace

void test_broken_files() {
    test_header();
    test_numbers();
    test_profile_names();
    test_tensors();
    test_graph();
    test_fixed_bits();
}

} // namespace anyprec::tests
