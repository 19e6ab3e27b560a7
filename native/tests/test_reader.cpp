// Tests of json, graph_json, shapes and reader: one case per way a file can be broken, and what a good one gives.
// Stands alone: builds its files itself, prints what fails, returns the number of failures. Built by
// -DANYPREC_TESTS=ON.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "json.h"
#include "reader.h"
#include "shapes.h"

using namespace anyprec;
namespace fs = std::filesystem;

namespace {

int failures = 0, checks = 0;

void expect(bool holds, const std::string &what) {
    checks++;
    if (!holds) {
        failures++;
        std::printf("FAILED: %s\n", what.c_str());
    }
}

// The kind of error `work` ends in, or "opened"; the message goes to `message`.
std::string kind_of(const std::function<void()> &work, std::string *message = nullptr) {
    try {
        work();
        return "opened";
    } catch (const ModelError &error) {
        if (message)
            *message = error.what();
        return kind_name(error.kind);
    }
}

// Bit by bit, and so another one than the reader's.
uint32_t slow_crc32(const std::string &bytes) {
    uint32_t crc = ~uint32_t(0);
    for (char c : bytes) {
        crc ^= uint8_t(c);
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

std::string hex(uint32_t crc) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", unsigned(crc));
    return digits;
}

struct Tensor {
    std::string name, dtype, shape, bytes;
};

// A small network: float 1x1 stem, quantised 1x1 body of 35 weights (5 bytes a plane, 3 bits in the last), affine.
struct Builder {
    std::string input = R"({"shape":[4,6,3],"image":{"scale":[0.5,0.25,1],"shift":[0,-1,2.5e-1]}})";
    std::string planes = R"({"1":[0],"2":[0,1],"3":[0,1,2]})";
    std::string profiles = R"([{"name":"1","weights":1,"acts":1,"accuracy":null},)"
                           R"({"name":"3","weights":3,"acts":3,"accuracy":91.25},)"
                           R"({"name":"mixed","weights":{"body":2},"acts":{"q":8},"accuracy":50},)"
                           R"({"name":"32","weights":32,"acts":32,"accuracy":null}])";
    std::string weights = R"({"stem":{"shape":[7,1,1,3],"float":true},"body":{"shape":[5,1,1,7],"float":false}})";
    std::string ops =
        R"([{"name":"stem","op":"conv","in":["input"],"weight":"stem","kernel":[1,1],"stride":[1,1],"pad":[0,0,0,0],)"
        R"("dilation":[1,1],"groups":1,"signed":false,"affine":false},)"
        R"({"name":"q","op":"quantize","in":["stem"],"signed":true,"rectify":false,"affine":true},)"
        R"({"name":"pool","op":"max_pool","in":["q"],"kernel":[3,3],"stride":[2,2],"pad":[1,1,1,1],"dilation":[1,1],"ceil":false},)"
        R"({"name":"body","op":"linear","in":["pool"],"weight":"body","signed":true,"affine":true},)"
        R"({"name":"last","op":"affine","in":["body"]}])";
    std::string outputs = R"(["last"])";
    std::string format = "1", extra;
    std::vector<Tensor> tensors;
    std::string metadata_extra;
    bool wrong_crc = false, without_graph = false;

    Builder() {
        auto floats = [](int count) {
            std::string bytes;
            for (int i = 0; i < count; i++) {
                float value = float(i) + 0.5f;
                bytes.append(reinterpret_cast<const char *>(&value), 4);
            }
            return bytes;
        };
        tensors = {{"table.body", "F32", "[4,2,5]", floats(40)},
                   {"table.last", "F32", "[4,2,5]", floats(40)},
                   {"table.q", "F32", "[4,2,7]", floats(56)},
                   {"weight.stem", "F32", "[7,1,1,3]", floats(21)},
                   {"plane00.body", "U8", "[5]", {"\x01\x02\x03\x04\x05"}},
                   {"plane01.body", "U8", "[5]", {"\xff\xff\xff\xff\x07"}},
                   {"plane02.body", "U8", "[5]", {"\x80\x40\x20\x10\x01"}},
                   {"tail.body", "U8", "[140]", floats(35)}};
    }

    std::string graph() const {
        std::string checksums;
        for (const Tensor &tensor : tensors)
            checksums +=
                (checksums.empty() ? "\"" : ",\"") + tensor.name + "\":\"" + hex(slow_crc32(tensor.bytes)) + "\"";
        return "{\"format\":" + format + R"(,"name":"small","made_by":"a test","input":)" + input +
               R"(,"labels":["cat","d\u00f6g"],"planes":)" + planes + ",\"profiles\":" + profiles +
               ",\"weights\":" + weights + ",\"ops\":" + ops + ",\"outputs\":" + outputs + ",\"checksums\":{" +
               checksums + "}" + extra + "}";
    }

    static std::string with_length(std::string header) {
        header.resize((header.size() + 8 + 63) / 64 * 64 - 8, ' ');
        std::string length;
        for (int i = 0; i < 8; i++)
            length += char(uint64_t(header.size()) >> (8 * i));
        return length + header;
    }

    std::string head() const {
        std::string text = graph(), escaped, rows;
        for (char c : text)
            escaped += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
        size_t at = 0;
        for (const Tensor &tensor : tensors) {
            rows += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":" + tensor.shape +
                    ",\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(at + tensor.bytes.size()) + "]}";
            at += tensor.bytes.size();
        }
        std::string crc = wrong_crc ? "00000000" : hex(slow_crc32(text));
        std::string metadata =
            without_graph ? "\"format\":\"pt\"" : "\"anyprec\":\"" + escaped + "\",\"anyprec.crc32\":\"" + crc + "\"";
        return with_length("{\"__metadata__\":{" + metadata + metadata_extra + "}" + rows + "}");
    }

    std::string file() const {
        std::string bytes = head();
        for (const Tensor &tensor : tensors)
            bytes += tensor.bytes;
        return bytes;
    }
};

std::shared_ptr<ModelFile> open_bytes(const std::string &bytes, int max_bits = 0, bool verify = false) {
    // A copy of exactly that length: a sanitizer then sees a read past its end.
    std::vector<uint8_t> copy(bytes.begin(), bytes.end());
    return ModelFile::from_memory(copy.data(), copy.size(), max_bits, verify);
}

std::string replaced(std::string text, const std::string &from, const std::string &to) {
    size_t at = text.find(from);
    expect(at != text.npos, "the test replaces '" + from + "'");
    return at == text.npos ? text : text.replace(at, from.size(), to);
}

void expect_kind(const std::string &bytes, const std::string &kind, const std::string &what, bool verify = false) {
    std::string message;
    std::string got = kind_of([&] { open_bytes(bytes, 0, verify); }, &message);
    expect(got == kind, what + ": expected " + kind + ", got " + got + " (" + message + ")");
}

// ---- json ----

void test_json() {
    auto good = [](const std::string &text) {
        try {
            Json json(text);
            return true;
        } catch (const JsonError &) {
            return false;
        }
    };
    for (const char *text : {"{}", "[]", " [ 1 , 2 ] ", "0", "-0", "1.5e3", "\"\"", "true", "null", "{\"a\":{\"a\":1}}",
                             "\"\\ud83d\\ude00\"", "\"\xf0\x9f\x98\x80\"", "1e-400", "\"\\u0000\"", "[[],{}]"})
        expect(good(text), std::string("good JSON: ") + text);
    for (const char *text : {"",
                             " ",
                             "{",
                             "[",
                             "[1",
                             "[1,",
                             "[1,]",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{a:1}",
                             "01",
                             "1.",
                             ".5",
                             "1e",
                             "+1",
                             "-",
                             "1e999",
                             "NaN",
                             "Infinity",
                             "nul",
                             "truee",
                             "\"",
                             "\"\\\"",
                             "\"\\x\"",
                             "\"\\u12\"",
                             "\"\\ud800\"",
                             "\"\\udc00\"",
                             "\"\\ud800\\u0041\"",
                             "\"\n\"",
                             "\"\xff\"",
                             "\"\xc0\x80\"",
                             "\"\xe0\x80\x80\"",
                             "\"\\udc00\\udc00\"",
                             "\"\xed\xa0\x80\"",
                             "\"\xf4\x90\x80\x80\"",
                             "\"\xe2\x82\"",
                             "{\"a\":1,\"a\":2}",
                             "{\"a\":1,\"\\u0061\":2}",
                             "1 2",
                             "[1}",
                             "{1:2}",
                             "'a'",
                             "/**/1",
                             "\xef\xbb\xbf{}"})
        expect(!good(text), std::string("bad JSON: ") + text);
    expect(good(std::string(64, '[') + std::string(64, ']')), "64 levels");
    expect(!good(std::string(65, '[') + std::string(65, ']')), "65 levels");
    expect(!good(std::string(1000000, '[')), "a million levels");
    expect(!good(std::string("[\0]", 3)), "a NUL");

    std::string text = R"({"a":[1,-25,2.5,true,"x\n\u00e9\ud83d\ude00y"],"b":{"c":null},"big":9223372036854775808})";
    Json json(text);
    auto member = json.root().begin();
    expect(member.key() == "a" && (*member).size() == 5, "first member");
    auto item = (*member).begin();
    expect((*item).integer() == 1, "1");
    ++item;
    expect((*item).integer() == -25, "-25");
    ++item;
    expect((*item).is(Json::Type::real) && (*item).number() == 2.5, "2.5");
    ++item;
    expect((*item).boolean(), "true");
    ++item;
    expect((*item).string() == "x\n\xc3\xa9\xf0\x9f\x98\x80y", "escapes");
    ++item;
    expect(!(item != (*member).end()), "end of the array");
    ++member;
    expect(member.key() == "b" && (*(*member).begin()).is(Json::Type::null), "nested object");
    ++member;
    expect((*member).is(Json::Type::real) && (*member).number() == 9223372036854775808.0, "too large for 64 bit");
}

// ---- a good file ----

void test_good() {
    auto file = open_bytes(Builder().file(), 0, true);
    const Graph &graph = file->graph();
    expect(graph.name == "small" && graph.made_by == "a test", "names");
    expect(graph.input_h == 4 && graph.input_w == 6 && graph.input_c == 3, "input");
    expect(graph.image_scale == std::vector<float>{0.5f, 0.25f, 1} &&
               graph.image_shift == std::vector<float>{0, -1, 0.25f},
           "image");
    expect(graph.labels == std::vector<std::string>{"cat", "d\xc3\xb6g"}, "labels");
    expect(graph.planes.size() == 9 && graph.planes[3] == std::vector<int>{0, 1, 2} && graph.planes[4].empty(),
           "planes");
    expect(graph.profiles.size() == 4 && std::isnan(graph.profiles[0].accuracy) && graph.profiles[1].accuracy == 91.25,
           "profiles");
    expect(graph.profiles[2].weight_bits == std::vector<uint8_t>{32, 2}, "mixed weights");
    expect(graph.profiles[2].act_bits == std::vector<uint8_t>{0, 8, 0, 0, 0}, "mixed acts");
    expect(graph.ops.size() == 5 && graph.outputs == std::vector<int>{5}, "ops");
    expect(graph.ops[2].codes && graph.ops[2].quantizer == 1 && !graph.ops[3].codes, "codes go through a max_pool");
    expect(graph.ops[3].kind == OpKind::linear && graph.ops[3].weight == 1 &&
               graph.ops[3].inputs == std::vector<int>{3},
           "linear");
    expect(graph.ops[0].channels == 7 && graph.ops[4].channels == 5, "channels");
    expect(graph.ops[0].table == nullptr && graph.ops[3].table_row == 10 && graph.ops[3].table[39] == 39.5f, "tables");
    expect(graph.weights[0].values[20] == 20.5f && graph.weights[1].values == nullptr, "float weight");
    expect(graph.weights[1].count == 35 && graph.weights[1].planes[1][4] == 7, "planes of a weight");
    float tail = 0;
    std::memcpy(&tail, graph.weights[1].tail + 4 * 34, 4);
    expect(tail == 34.5f, "tail");
    for (int p = 0; p < 4; p++)
        expect(file->available(p), "profile available");
    size_t total = Builder().file().size();
    expect(file->file_bytes() == total && file->bytes_for(32) == total && file->mapped_bytes() == total,
           "bytes of the file");
    expect(file->bytes_for(3) == total - 140 && file->bytes_for(1) == total - 150 && file->bytes_for(4) == 0,
           "bytes of a width");
    expect(file->planes_available() == 3 && file->complete() && !file->refresh(), "complete");
    file->drop_pages();
    expect(graph.weights[1].planes[0][0] == 1, "planes after drop_pages");
}

void test_max_bits() {
    for (int bits = 1; bits <= 3; bits++) {
        auto file = open_bytes(Builder().file(), bits);
        const Weight &weight = file->graph().weights[1];
        for (int plane = 0; plane < 3; plane++)
            expect((weight.planes[size_t(plane)] != nullptr) == (plane < bits), "planes within max_bits");
        expect(weight.tail == nullptr && !file->available(3), "no tail within max_bits");
        expect(file->available(0) && file->available(1) == (bits == 3) && file->available(2) == (bits >= 2),
               "profiles");
        expect(file->mapped_bytes() == file->bytes_for(bits) && file->complete(), "mapped as far as needed");
    }
    Builder wide; // no width is as narrow as max_bits
    wide.planes = R"({"2":[0,1],"3":[0,1,2]})";
    wide.profiles = replaced(wide.profiles, R"("weights":1)", R"("weights":2)");
    auto file = open_bytes(wide.file(), 1);
    expect(file->planes_available() == 0 && !file->available(0) && file->graph().ops[4].table, "nothing but the head");
}

void test_growing() {
    Builder builder;
    std::string bytes = builder.file();
    size_t total = bytes.size(), least = total - 150;
    for (size_t size = 0; size < total; size++) {
        std::string message;
        std::string kind = kind_of([&] { open_bytes(bytes.substr(0, size)); }, &message);
        expect(kind == (size < least ? "TruncatedFile" : "opened"),
               "cut at byte " + std::to_string(size) + ": " + message);
        if (size > 8 && size < least)
            expect(message.find(std::to_string(size)) != message.npos, "says how many bytes are there");
    }
    // With one width, the narrowest profile needs two planes.
    Builder two;
    two.planes = R"({"2":[0,1]})";
    two.profiles = R"([{"name":"2","weights":2,"acts":2,"accuracy":null}])";
    two.tensors.resize(6);
    for (size_t i = 0; i < 3; i++) {
        two.tensors[i].shape[1] = '1';
        two.tensors[i].bytes.resize(two.tensors[i].bytes.size() / 4);
    }
    expect_kind(two.file(), "opened", "one width", true);
    expect_kind(two.file().substr(0, two.file().size() - 1), "TruncatedFile", "one width without its second plane");

    fs::path path = fs::temp_directory_path() / "anyprec_test_reader.apm";
    auto write = [&](size_t from, size_t to) {
        std::ofstream out(path, from ? std::ios::binary | std::ios::app : std::ios::binary);
        out.write(bytes.data() + from, std::streamsize(to - from));
    };
    write(0, least);
    auto file = ModelFile::open(path.string(), 0, true);
    const Weight &weight = file->graph().weights[1];
    const uint8_t *first = weight.planes[0];
    const float *table = file->graph().ops[1].table;
    expect(file->planes_available() == 1 && file->available(0) && !file->available(2) && !file->complete(),
           "one plane");
    expect(!file->refresh(), "nothing new");
    write(least, least + 3);
    expect(!file->refresh() && !weight.planes[1], "half a plane");
    write(least + 3, least + 5);
    expect(file->refresh() && file->planes_available() == 2 && file->available(2), "two planes");
    expect(weight.planes[1] && weight.planes[1][4] == 7 && weight.planes[0] == first, "pointers stay");
    write(least + 5, total);
    expect(file->refresh() && file->available(1) && file->available(3) && file->complete(), "all of it");
    expect(first[4] == 5 && table[55] == 55.5f && weight.planes[2][0] == 0x80 && weight.tail, "numbers");
    file->drop_pages();
    expect(first[4] == 5 && table[55] == 55.5f && weight.planes[2][0] == 0x80, "numbers after drop_pages");

    write(0, least);
    auto bad = ModelFile::open(path.string(), 0, true);
    bytes[least] ^= 1;
    write(least, total);
    expect(kind_of([&] { bad->refresh(); }) == "ChecksumMismatch" && bad->planes_available() == 1,
           "a bad plane arrives");
    write(total - 1, total); // one byte too many
    auto longer = kind_of([&] { ModelFile::open(path.string()); });
    expect(longer == "BadTensor", "longer than its tensors: " + longer);
    fs::remove(path);
    expect(kind_of([&] { ModelFile::open(path.string()); }) == "ModelFileError", "no such file");
    expect(kind_of([&] { ModelFile::open(fs::temp_directory_path().string()); }) == "ModelFileError", "a folder");
}

// ---- broken files ----

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
    for (const char *format : {"2", "0", "-1", "1.0", "\"1\"", "null"}) {
        other = good;
        other.format = format;
        expect_kind(other.file(), "UnsupportedVersion", std::string("format ") + format);
    }
    std::string bytes = good.file();
    bytes.back() ^= 1;
    expect_kind(bytes, "opened", "a flipped bit, not looked at");
    expect_kind(bytes, "ChecksumMismatch", "a flipped bit", true);
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
    other.profiles = replaced(other.profiles, R"("weights":32,"acts":32)", R"("weights":3,"acts":3)");
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
    for (const char *input : {"null", "{\"shape\":[4,6],\"image\":null}", "{\"shape\":[4,6,null],\"image\":null}",
                              "{\"shape\":[4,0,3],\"image\":null}", "{\"shape\":[4,2147483648,3],\"image\":null}",
                              "{\"shape\":[1048576,1048576,3],\"image\":null}", "{\"shape\":[4,6,3]}",
                              "{\"shape\":[4,6,3],\"image\":{\"scale\":[1,1],\"shift\":[1,1,1]}}",
                              "{\"shape\":[4,6,3],\"image\":{\"scale\":[1,1,1e39],\"shift\":[1,1,1]}}",
                              "{\"shape\":[4,6,4],\"image\":null}"})
        bad(std::string("input ") + input, [&](Builder &b) { b.input = input; });
    for (const char *planes :
         {"[]", "{\"0\":[]}", "{\"9\":[0,1,2,3,4,5,6,7,8]}", "{\"1\":[0,1]}", "{\"1\":[1]}", "{\"2\":[1,0]}",
          "{\"2\":[0,0]}", "{\"1\":[-1]}", "{\"1\":[36]}", "{\"1\":[0],\"2\":[1,2],\"3\":[0,1,2]}",
          "{\"1\":[0],\"3\":[0,1,2]}", "{\"01\":[0]}", "{\"1\":0}"})
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

// ---- shapes ----

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
    graph.input_c = 3;
    graph.ops = ops;
    try {
        return infer_shapes(graph, 2, h, w).back().h;
    } catch (const InputError &) {
        return 0;
    }
}

void test_shapes() {
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
        graph.input_c = 3;
        graph.ops = {op};
        graph.weights.resize(1);
        graph.weights[0].shape[0] = 1;
        graph.weights[0].shape[3] = 3;
        try {
            return infer_shapes(graph, 1, size, size).back().h;
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
    graph.input_c = 3;
    graph.ops = {flatten, simple(OpKind::softmax, {1})};
    expect(infer_partial_shapes(graph, 1, 0, 7)[2].c == 0, "channels of a free size");
    graph.input_h = 8;
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
    expect(file->graph().input_h == 0 && infer_shapes(file->graph(), 2, 9, 5).back() == Shape{2, 5, 3, 5}, "free size");
    free.ops = replaced(free.ops, R"({"name":"last","op":"affine","in":["body"]})",
                        R"({"name":"flat","op":"flatten","in":["body"]},{"name":"last","op":"affine","in":["flat"]})");
    expect_kind(free.file(), "BadGraph", "a table for channels of a free size");
}

} // namespace

int main() {
    test_json();
    test_good();
    test_max_bits();
    test_growing();
    test_header();
    test_tensors();
    test_graph();
    test_fixed_bits();
    test_shapes();
    test_free_size();
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
