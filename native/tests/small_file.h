// What the tests of the reader share: counted checks, and a small model file to be broken in every way.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "format/reader.h"

namespace anyprec::tests {

inline int failures = 0, checks = 0;

inline void expect(bool holds, const std::string &what) {
    checks++;
    if (!holds) {
        failures++;
        std::printf("FAILED: %s\n", what.c_str());
    }
}

// The kind of error `work` ends in, or "opened"; the message goes to `message`.
inline std::string kind_of(const std::function<void()> &work, std::string *message = nullptr) {
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
inline uint32_t slow_crc32(const std::string &bytes) {
    uint32_t crc = ~uint32_t(0);
    for (char c : bytes) {
        crc ^= uint8_t(c);
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

inline std::string hex(uint32_t crc) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", unsigned(crc));
    return digits;
}

struct Tensor {
    std::string name, dtype, shape, bytes;
};

// A small network: float 1x1 stem, quantized 1x1 body of 35 weights (5 bytes a plane, 3 bits in the last), affine.
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

inline std::shared_ptr<ModelFile> open_bytes(const std::string &bytes, int max_bits = 0, bool verify = false) {
    // A copy of exactly that length: a sanitizer then sees a read past its end.
    std::vector<uint8_t> copy(bytes.begin(), bytes.end());
    return ModelFile::from_memory(copy.data(), copy.size(), max_bits, verify);
}

inline std::string replaced(std::string text, const std::string &from, const std::string &to) {
    size_t at = text.find(from);
    expect(at != text.npos, "the test replaces '" + from + "'");
    return at == text.npos ? text : text.replace(at, from.size(), to);
}

inline void expect_kind(const std::string &bytes, const std::string &kind, const std::string &what,
                        bool verify = false) {
    std::string message;
    std::string got = kind_of([&] { open_bytes(bytes, 0, verify); }, &message);
    expect(got == kind, what + ": expected " + kind + ", got " + got + " (" + message + ")");
}

// One file of tests each
void test_json();
void test_good_files();
void test_broken_files();
void test_shapes();
void test_format3();

} // namespace anyprec::tests
