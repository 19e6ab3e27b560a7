// Tests of the reader on files that are as they should be: whole, cut to fewer bits, still growing.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "format/checksum.h"
#include "format/shapes.h"
#include "small_file.h"

namespace anyprec::tests {
namespace {

namespace fs = std::filesystem;

void test_good() {
    auto file = open_bytes(Builder().file(), 0, true);
    const Graph &graph = file->graph();
    expect(graph.name == "small" && graph.made_by == "a test", "names");
    expect(graph.input == Shape(0, {4, 6, 3}), "input");
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
    expect(file->file_bytes() == total && file->bytes_for(32) == total && file->loaded_bytes() == total,
           "bytes of the file");
    expect(file->bytes_for(3) == total - 140 && file->bytes_for(1) == total - 150 && file->bytes_for(4) == 0,
           "bytes of a width");
    expect(file->planes_available() == 3 && file->complete() && !file->refresh(), "complete");
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
        expect(file->loaded_bytes() == file->bytes_for(bits) && file->complete(), "loaded as far as needed");
    }
    Builder wide; // no width is as narrow as max_bits
    wide.planes = R"({"2":[0,1],"3":[0,1,2]})";
    wide.profiles = replaced(wide.profiles, R"("name":"1","weights":1)", R"("name":"w2a1","weights":2)");
    auto file = open_bytes(wide.file(), 1);
    expect(file->planes_available() == 0 && !file->available(0) && file->graph().ops[4].table, "nothing but the head");
    expect(kind_of([&] { open_bytes(wide.file().substr(0, wide.file().size() - 146), 1); }) == "TruncatedFile",
           "not even the narrowest profile");
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

    write(0, least);
    auto bad = ModelFile::open(path.string(), 0, true);
    bytes[least] ^= 1;
    write(least, total);
    expect(kind_of([&] { bad->refresh(); }) == "ChecksumMismatch" && bad->planes_available() == 1,
           "a bad plane arrives");
    write(total - 1, total); // one byte too many
    auto longer = kind_of([&] { ModelFile::open(path.string()); });
    expect(longer == "BadTensor", "longer than its tensors: " + longer);
    bytes[least] ^= 1;
    write(0, least);
    auto cut = ModelFile::open(path.string());
    write(0, 100); // in place
    expect(kind_of([&] { cut->refresh(); }) == "TruncatedFile" && cut->available(0), "cut after it was opened");
    expect(cut->graph().weights[1].planes[0][4] == 5 && cut->graph().ops[1].table[55] == 55.5f, "its numbers stay");
    fs::remove(path);
    expect(kind_of([&] { ModelFile::open(path.string()); }) == "ModelFileError", "no such file");
    expect(kind_of([&] { ModelFile::open(fs::temp_directory_path().string()); }) == "ModelFileError", "a folder");
}

// Short ones by tables, longer ones by multiplication where the CPU can, otherwise in quarters.
void test_checksums() {
    std::string bytes;
    for (uint32_t i = 0, x = 1; i < 20000; i++, x = x * 1664525 + 1013904223)
        bytes += char(x >> 24);
    for (size_t size = 0; size <= bytes.size(); size += size < 600 ? 1 : 4801)
        for (size_t from : {size_t(0), size_t(3)}) {
            const std::string part = bytes.substr(from, size);
            expect(crc32(reinterpret_cast<const uint8_t *>(part.data()), part.size()) == slow_crc32(part), "checksum");
        }
}

} // namespace

void test_good_files() {
    test_checksums();
    test_good();
    test_max_bits();
    test_growing();
}

} // namespace anyprec::tests
