// Fuzzes the model file reader: whatever the bytes are, the answer is a graph or a ModelError, and every byte the
// graph points to is readable. Built by -DANYPREC_FUZZ=ON with address and undefined-behavior sanitizers.
//   fuzz_reader FILE|FOLDER ...                       runs each file once; how the kept corpus serves as a test
//   fuzz_reader --minutes N [--seed S] [--keep DIR] FILE|FOLDER ...
//       mutates them for N minutes; inputs that reach code no other did are mutated on, and written to DIR. The one
//       in work is in crash.apm, in DIR or else here, should it end the process.
// With clang and libFuzzer, define ANYPREC_LIBFUZZER and link -fsanitize=fuzzer: LLVMFuzzerTestOneInput is all it
// needs.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "format/graph_json.h"
#include "format/json.h"
#include "format/reader.h"
#include "format/shapes.h"

using namespace anyprec;

namespace {

volatile uint8_t sink; // so that no read is optimized away

void touch(const void *bytes, size_t size) {
    uint8_t sum = 0;
    for (size_t i = 0; i < size; i++)
        sum = uint8_t(sum + static_cast<const uint8_t *>(bytes)[i]);
    sink = sum;
}

// Reads everything a graph gives away, as an engine might.
void use(const ModelFile &file) {
    const Graph &graph = file.graph();
    for (const Op &op : graph.ops)
        if (op.table)
            touch(op.table, 4 * op.table_row * graph.profiles.size());
    for (const Weight &weight : graph.weights) {
        if (weight.values)
            touch(weight.values, 4 * weight.count);
        if (weight.codes)
            touch(weight.codes, weight.count);
        if (weight.tail)
            touch(weight.tail, 4 * weight.count);
        for (const uint8_t *plane : weight.planes)
            if (plane)
                touch(plane, (weight.count + 7) / 8);
    }
    for (size_t p = 0; p < graph.profiles.size(); p++)
        for (size_t i = 0; file.available(int(p)) && i < graph.weights.size(); i++) {
            const Weight &weight = graph.weights[i];
            int bits = graph.profiles[p].weight_bits[i];
            bool there = weight.is_float      ? weight.values != nullptr
                         : bits == FLOAT_BITS ? weight.tail != nullptr
                         : weight.fixed_bits  ? weight.codes != nullptr && bits == weight.fixed_bits
                                              : true;
            if (!weight.is_float && !weight.fixed_bits && bits != FLOAT_BITS)
                for (int plane : graph.planes[size_t(bits)])
                    there = there && weight.planes[size_t(plane)];
            if (!there)
                std::abort(); // said to be available
        }
    file.planes_available();
    for (int bits = 0; bits <= 32; bits++)
        if (file.bytes_for(bits) > file.file_bytes())
            std::abort();
    for (int size : {1, 7, 32, 2147483647}) {
        try {
            std::vector<Shape> inputs;
            for (size_t i = 0; i < graph.input_count(); i++) {
                inputs.push_back(graph.input_shape(i));
                inputs.back().n = 1 + size % 3;
                for (int &each : inputs.back().size)
                    each = each ? each : size;
            }
            for (const Shape &shape : infer_shapes(graph, inputs))
                if (shape.n < 1 || !shape.known() || shape.rank < 1 || shape.rank > MAX_AXES || shape.count() >> 40)
                    std::abort();
        } catch (const InputError &) {
        }
    }
}

// What one input led to, for the summary.
std::string run(const uint8_t *bytes, size_t size) {
    std::string outcome = "opened";
    // The options come from the input's length, so that a file alone tells what was run.
    for (int max_bits : {0, int(size % 9)}) {
        try {
            use(*ModelFile::from_memory(bytes, size, max_bits, size % 4 == 1));
        } catch (const ModelError &error) {
            outcome = kind_name(error.kind);
        }
    }
    return outcome;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    run(bytes, size);
    return 0;
}

#if !defined(ANYPREC_LIBFUZZER)

// gcc calls this at every branch of files compiled with -fsanitize-coverage=trace-pc; this file is not.
static uint8_t seen_places[1 << 16];
static size_t new_places;

extern "C" void __sanitizer_cov_trace_pc() {
    auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    uint8_t &seen = seen_places[(place ^ (place >> 16)) & 0xffff];
    new_places += !seen;
    seen = 1;
}

namespace {

using Bytes = std::vector<uint8_t>;
namespace fs = std::filesystem;

Bytes load(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

void store(const fs::path &path, const Bytes &bytes) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char *>(bytes.data()), std::streamsize(bytes.size()));
}

uint32_t slow_crc32(const std::string &text) {
    uint32_t crc = ~uint32_t(0);
    for (char c : text) {
        crc ^= uint8_t(c);
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

// A file taken apart as the writer makes it: {"__metadata__":{"anyprec":GRAPH,...},TENSORS} DATA. Without the mutated
// graph's own CRC-32 and the header's right length, nearly every mutation would end at the first checks.
struct Parts {
    std::string graph, tensors, data;
};

bool split(const Bytes &file, Parts &parts) {
    if (file.size() < 8)
        return false;
    uint64_t length = 0;
    for (int i = 8; i-- > 0;)
        length = length << 8 | file[size_t(i)];
    if (length > file.size() - 8)
        return false;
    std::string header(file.begin() + 8, file.begin() + 8 + std::ptrdiff_t(length));
    parts.data.assign(file.begin() + 8 + std::ptrdiff_t(length), file.end());
    try {
        Json json(header);
        Json::Value root = json.root();
        for (auto member = root.begin(); member != root.end(); ++member)
            if (member.key() == "__metadata__" && (*member).is(Json::Type::object))
                for (auto text = (*member).begin(); text != (*member).end(); ++text)
                    if (text.key() == "anyprec" && (*text).is(Json::Type::string))
                        parts.graph = (*text).string();
    } catch (const JsonError &) {
        return false;
    }
    size_t crc = header.find("\"anyprec.crc32\":\""), rest = crc == header.npos ? crc : header.find("},", crc);
    if (parts.graph.empty() || rest == header.npos)
        return false;
    parts.tensors = header.substr(rest + 1, header.find_last_not_of(' ') - rest);
    return true;
}

Bytes join(const Parts &parts) {
    std::string escaped;
    for (char c : parts.graph) {
        char code[8] = {c, 0};
        if (c == '"' || c == '\\')
            std::snprintf(code, sizeof code, "\\%c", c);
        else if (uint8_t(c) < 0x20)
            std::snprintf(code, sizeof code, "\\u%04x", unsigned(c));
        escaped += code;
    }
    char crc[9];
    std::snprintf(crc, sizeof crc, "%08x", unsigned(slow_crc32(parts.graph)));
    std::string header =
        "{\"__metadata__\":{\"anyprec\":\"" + escaped + "\",\"anyprec.crc32\":\"" + crc + "\"}" + parts.tensors;
    header.resize((header.size() + 8 + 63) / 64 * 64 - 8, ' ');
    Bytes file;
    for (int i = 0; i < 8; i++)
        file.push_back(uint8_t(uint64_t(header.size()) >> (8 * i)));
    file.insert(file.end(), header.begin(), header.end());
    file.insert(file.end(), parts.data.begin(), parts.data.end());
    return file;
}

class Mutator {
  public:
    explicit Mutator(uint64_t seed) : random_(seed) {}

    Bytes mutate(const Bytes &parent, const Bytes &other) {
        Parts parts, from;
        if (below(4) && split(parent, parts)) {
            bool both = split(other, from);
            for (size_t rounds = 1 + below(3) * below(2); rounds > 0; rounds--) {
                if (below(8))
                    mutate_text(parts.graph, both ? from.graph : parts.graph);
                else
                    mutate_text(parts.tensors, both ? from.tensors : parts.tensors);
                if (below(16) == 0)
                    parts.data.resize(below(2 * parts.data.size() + 1));
            }
            return join(parts);
        }
        Bytes bytes = parent;
        for (size_t rounds = 1 + below(8); rounds > 0; rounds--)
            mutate_bytes(bytes);
        return bytes;
    }

    size_t below(size_t limit) { return limit ? size_t(random_() % limit) : 0; }

  private:
    // Mostly one token for another of its kind, which JSON and the simple checks survive; sometimes anything.
    void mutate_text(std::string &text, const std::string &other) {
        size_t at = below(text.size() + 1), begin = 0, end = 0;
        token(text, at, begin, end);
        std::string old = text.substr(begin, end - begin);
        switch (below(16)) {
        case 0: // a byte
            if (at < text.size())
                text[at] = char(random_());
            break;
        case 1:
            text.erase(at, below(16));
            break;
        case 2:
            text.insert(at, odd_piece());
            break;
        case 3: { // from another place or file
            size_t from = below(other.size() + 1);
            text.insert(at, other.substr(from, below(64)));
            break;
        }
        case 4:
            text.insert(end, old);
            break;
        case 5: // any token for any
            text.replace(begin, end - begin, token_of(other, ""));
            break;
        case 6:
        case 7: // a whole member or element goes
            text.erase(begin, end - begin + (end < text.size()));
            break;
        case 8:
        case 9: // a number that another place has
            if (is_number(old))
                text.replace(begin, end - begin, token_of(other, "-0123456789"));
            break;
        default:
            if (is_number(old))
                text.replace(begin, end - begin, number());
            else if (old == "true" || old == "false")
                text.replace(begin, end - begin, old == "true" ? "false" : "true");
            else
                text.replace(begin, end - begin, token_of(other, "\""));
        }
        if (text.size() > 1 << 16)
            text.resize(1 << 16);
    }

    static bool is_number(const std::string &token) {
        return !token.empty() && std::string("-0123456789").find(token[0]) != std::string::npos;
    }

    // Some token that starts with one of `first`, if luck has it.
    std::string token_of(const std::string &text, const std::string &first) {
        std::string found;
        for (int tries = 0; tries < 16; tries++) {
            size_t begin = 0, end = 0;
            token(text, below(text.size() + 1), begin, end);
            found = text.substr(begin, end - begin);
            if (first.empty() || (!found.empty() && first.find(found[0]) != first.npos))
                break;
        }
        return found;
    }

    // Beside every limit there is.
    const char *number() {
        static const char *const numbers[] = {"0",
                                              "1",
                                              "2",
                                              "3",
                                              "4",
                                              "5",
                                              "7",
                                              "8",
                                              "9",
                                              "-1",
                                              "32",
                                              "33",
                                              "35",
                                              "36",
                                              "255",
                                              "256",
                                              "257",
                                              "65536",
                                              "65537",
                                              "2147483647",
                                              "2147483648",
                                              "4294967295",
                                              "1099511627775",
                                              "1099511627776",
                                              "999999999999999999",
                                              "9223372036854775807",
                                              "18446744073709551616",
                                              "1e308",
                                              "1e-400",
                                              "1e999",
                                              "0.5",
                                              "-0.0",
                                              "1.0"};
        return numbers[below(sizeof numbers / sizeof *numbers)];
    }

    const char *odd_piece() {
        static const char *const pieces[] = {"null",
                                             "[]",
                                             "{}",
                                             "[[",
                                             "]]",
                                             "\"\"",
                                             "\"",
                                             "\\u0000",
                                             "\\ud800",
                                             "\xff",
                                             "\xc3\xa9",
                                             ",",
                                             ":",
                                             "}",
                                             "\"input\"",
                                             "\"quantize\"",
                                             "\"dequantize\"",
                                             "\"linear\"",
                                             "\"reshape\"",
                                             "\"transpose\"",
                                             "\"gather\"",
                                             "\"matmul\"",
                                             "\"in\":[\"q\",\"k\"],",
                                             "\"constant\"",
                                             "\"recurrent\"",
                                             "\"axis\":1,",
                                             "\"single\":true,",
                                             "\"format\":3,",
                                             "\"size\":[2,2],",
                                             "\"ceil\":true,",
                                             "                "};
        return pieces[below(sizeof pieces / sizeof *pieces)];
    }

    // The stretch around `at` between two of ,:[]{}
    static void token(const std::string &text, size_t at, size_t &begin, size_t &end) {
        const char *borders = ",:[]{}";
        begin = at ? text.find_last_of(borders, at - 1) : text.npos;
        begin = begin == text.npos ? 0 : begin + 1;
        end = text.find_first_of(borders, at);
        end = end == text.npos ? text.size() : end;
    }

    void mutate_bytes(Bytes &bytes) {
        size_t at = below(bytes.size());
        switch (below(5)) {
        case 0:
            bytes.resize(below(bytes.size() + 2));
            break;
        case 1:
            bytes.insert(bytes.begin() + std::ptrdiff_t(at), uint8_t(random_()));
            break;
        case 2:
            if (!bytes.empty())
                bytes[below(8) % bytes.size()] = uint8_t(random_()); // the length of the header
            break;
        case 3:
            if (!bytes.empty())
                bytes[at] ^= uint8_t(1u << below(8));
            break;
        default:
            if (!bytes.empty())
                bytes[at] = uint8_t(random_());
        }
    }

    std::mt19937_64 random_;
};

struct Options {
    double minutes = 0;
    uint64_t seed = 1;
    fs::path keep;
    std::vector<Bytes> corpus;
};

void add(const fs::path &path, Options &options) {
    if (fs::is_directory(path)) {
        std::vector<fs::path> inside(fs::directory_iterator(path), fs::directory_iterator{});
        std::sort(inside.begin(), inside.end()); // the same seed, the same run
        for (const fs::path &file : inside)
            add(file, options);
    } else {
        options.corpus.push_back(load(path));
    }
}

void fuzz(Options &options, std::map<std::string, size_t> &outcomes) {
    Mutator mutator(options.seed);
    fs::path in_work = options.keep / "crash.apm";
    auto start = std::chrono::steady_clock::now();
    auto minutes = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 60; };
    size_t runs = 0, kept = 0;
    for (; minutes() < options.minutes; runs++) {
        // The newest know most: half of the time one of the last 32.
        size_t count = options.corpus.size(), recent = count > 32 && mutator.below(2) ? count - 32 : 0;
        Bytes input = mutator.mutate(options.corpus[recent + mutator.below(count - recent)],
                                     options.corpus[mutator.below(count)]);
        store(in_work, input);
        new_places = 0;
        std::string outcome = run(input.data(), input.size());
        outcomes[outcome]++;
        if (new_places > 0 && !options.keep.empty())
            store(options.keep / ("found" + std::to_string(++kept) + ".apm"), input);
        // Another graph that opens is a place to go on from too, though its code was seen.
        if (new_places > 0 || (outcome == "opened" && options.corpus.size() < 1000))
            options.corpus.push_back(std::move(input));
    }
    fs::remove(in_work);
    std::printf("%zu runs in %.1f minutes, seed %llu, %zu inputs kept\n", runs, minutes(),
                static_cast<unsigned long long>(options.seed), kept);
}

} // namespace

int main(int count, char **arguments) {
    Options options;
    for (int i = 1; i < count; i++) {
        std::string argument = arguments[i];
        bool has_value = i + 1 < count;
        if (argument == "--minutes" && has_value)
            options.minutes = std::atof(arguments[++i]);
        else if (argument == "--seed" && has_value)
            options.seed = std::strtoull(arguments[++i], nullptr, 10);
        else if (argument == "--keep" && has_value)
            options.keep = arguments[++i];
        else if (fs::exists(argument))
            add(argument, options);
        else {
            std::fprintf(stderr, "%s: no such file\n", arguments[i]);
            return 2;
        }
    }
    if (options.corpus.empty()) {
        std::fprintf(stderr, "usage: fuzz_reader [--minutes N] [--seed S] [--keep DIR] FILE|FOLDER ...\n");
        return 2;
    }
    std::map<std::string, size_t> outcomes;
    for (const Bytes &bytes : options.corpus)
        outcomes[run(bytes.data(), bytes.size())]++;
    if (options.minutes > 0)
        fuzz(options, outcomes);
    for (const auto &[outcome, times] : outcomes)
        std::printf("%10zu %s\n", times, outcome.c_str());
    return 0;
}

#endif
