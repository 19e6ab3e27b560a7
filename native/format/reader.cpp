// See reader.h. The header is read, parsed and freed. A prefix of the tensors is copied into memory; later tensors are
// copied into separate pieces as they arrive, so that pointers stay valid.
#include "format/reader.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "format/checksum.h"
#include "format/format_limits.h"
#include "format/graph_json.h"
#include "format/header.h"
#include "format/json.h"
#include "format/large_pages.h"
#include "format/source.h"
#include "format/tensors.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "Tensors are little-endian and used where they lie; this needs a little-endian machine."
#endif

namespace anyprec {

using Kind = ModelErrorKind;
static_assert(sizeof(size_t) == 8, "limits of FORMAT.md need 64 bit sizes");

// A part of the file, copied into memory.
struct Piece {
    std::unique_ptr<uint8_t[]> bytes; // new aligns it for floats
    size_t begin, size;               // of the part, in the file

    Piece(size_t from, size_t to) : bytes(new uint8_t[to - from]), begin(from), size(to - from) {
        use_large_pages(bytes.get(), size);
    }
    uint8_t *at(size_t offset) const { return bytes.get() + (offset - begin); }
};

struct ModelFile::Impl {
    std::string name;
    std::unique_ptr<Source> source; // nullptr once nothing more will be read
    std::vector<Piece> pieces;
    Graph graph;
    std::vector<TensorPlace> buffers;
    std::vector<size_t> plane_ends; // where each plane ends in the file
    size_t head_end = 0;            // where tables, float weights and codes of fixed bits end
    size_t tails_end = 0;           // 0 without tails
    size_t total = 0;
    size_t limit = 0;      // end of what max_bits allows
    size_t loaded_end = 0; // everything from the head up to here is loaded
    size_t next_place = 0; // the first tensor that is not loaded
    bool verify = false;
    bool keep_copy = true;
    bool holds_copy = true;                  // something was read since release
    std::vector<std::vector<size_t>> places; // of a weight's planes and tail, by weight; only without keep_copy
    std::vector<bool> released;              // by place

    void open(std::unique_ptr<Source> from, int max_bits);
    void read_head(size_t size);
    void find_ends(size_t data_start, int max_bits);
    size_t profile_end(const Profile &profile) const;
    void check_long_enough(size_t size) const;
    bool load(size_t size);
    void read_again(size_t place);
    std::string title(const TensorPlace &place) const;
    void check_bytes(const TensorPlace &place, const uint8_t *bytes) const;
    void check_floats(const TensorPlace &place, const uint8_t *bytes) const;
    void give(const TensorPlace &place, const uint8_t *bytes);
};

void ModelFile::Impl::open(std::unique_ptr<Source> from, int max_bits) {
    source = std::move(from);
    size_t size = source->size();
    read_head(size);
    size_t data_start = loaded_end;
    find_ends(data_start, max_bits);
    if (size > total)
        throw ModelError(Kind::BadTensor, "has " + std::to_string(size - total) +
                                              " bytes after its last tensor, which ends at " + std::to_string(total));
    check_long_enough(size);
    load(size);
}

// Fills graph and places; sets loaded_end to the start of the tensors.
void ModelFile::Impl::read_head(size_t size) {
    if (size < 8)
        throw ModelError(Kind::TruncatedFile,
                         "has " + std::to_string(size) + " bytes, not even the 8 that say how long its header is");
    uint64_t length = 0;
    uint8_t first[9] = {0};
    source->read(0, std::min<size_t>(size, 9), first);
    for (int i = 8; i-- > 0;)
        length = length << 8 | first[i];
    if (length > MAX_HEADER || length < 2)
        throw ModelError(Kind::BadHeader, "its first 8 bytes say the header has " + std::to_string(length) +
                                              " bytes; 2 to 100000000 are allowed; is it a model file?");
    if (size > 8 && first[8] != '{')
        throw ModelError(Kind::BadHeader, "its header does not start with '{'; is it a model file?");
    if (size < 8 + length)
        throw ModelError(Kind::TruncatedFile, "has " + std::to_string(size) + " bytes, its header alone needs " +
                                                  std::to_string(8 + length) + "; wait for more, or fetch it again");
    std::string text(size_t(length), '\0');
    source->read(8, 8 + size_t(length), reinterpret_cast<uint8_t *>(text.data()));
    std::string_view stripped(text);
    stripped = stripped.substr(0, stripped.find_last_not_of(' ') + 1);
    if (stripped.back() != '}') // it starts with '{': not empty
        throw ModelError(Kind::BadHeader, "its header does not end in '}' and spaces; the file is damaged");
    try {
        Json json(stripped);
        Header header = parse_header(json);
        ParsedGraph parsed = parse_graph(header.graph);
        buffers = place_tensors(header, parsed, 8 + size_t(length));
        graph = std::move(parsed.graph);
    } catch (const JsonError &error) {
        throw ModelError(Kind::BadHeader, "its header is not JSON: " + std::string(error.what()));
    }
    loaded_end = 8 + size_t(length);
}

void ModelFile::Impl::find_ends(size_t data_start, int max_bits) {
    head_end = data_start;
    for (const std::vector<int> &numbers : graph.planes)
        if (!numbers.empty())
            plane_ends.resize(size_t(numbers.back()) + 1);
    for (const TensorPlace &place : buffers)
        if (place.part == TensorPlace::table || place.part == TensorPlace::values || place.part == TensorPlace::codes)
            head_end = place.end;
    std::fill(plane_ends.begin(), plane_ends.end(), head_end); // for a graph without quantized weights
    for (const TensorPlace &place : buffers) {
        if (place.part == TensorPlace::plane)
            plane_ends[place.number] = place.end;
        if (place.part == TensorPlace::tail)
            tails_end = place.end;
    }
    total = buffers.empty() ? data_start : buffers.back().end;
    limit = total;
    if (max_bits >= 1 && max_bits <= 8) {
        limit = head_end;
        for (int bits = 1; bits <= max_bits; bits++)
            if (!graph.planes[size_t(bits)].empty())
                limit = plane_ends[size_t(graph.planes[size_t(bits)].back())];
    }
}

// Length of the file that this profile needs.
size_t ModelFile::Impl::profile_end(const Profile &profile) const {
    size_t end = head_end;
    for (size_t i = 0; i < graph.weights.size(); i++) {
        if (graph.weights[i].is_float)
            continue;
        uint8_t bits = profile.weight_bits[i];
        if (bits == FLOAT_BITS)
            end = std::max(end, tails_end);
        else if (!graph.weights[i].fixed_bits) // whose codes are before head_end
            end = std::max(end, plane_ends[size_t(graph.planes[bits].back())]);
    }
    return end;
}

void ModelFile::Impl::check_long_enough(size_t size) const {
    size_t least = SIZE_MAX; // beyond the limit: no profile is within max_bits
    for (const Profile &profile : graph.profiles)
        least = std::min(least, profile_end(profile));
    if (size < least)
        throw ModelError(Kind::TruncatedFile, "has " + std::to_string(size) + " bytes, its narrowest profile needs " +
                                                  std::to_string(least) + "; wait for more, or fetch it again");
}

// Reads and checks the available tensors that max_bits allows. True if there were new ones.
bool ModelFile::Impl::load(size_t size) {
    size_t stop = next_place;
    while (stop < buffers.size() && buffers[stop].end <= std::min(size, limit))
        stop++;
    if (stop > next_place) {
        size_t end = buffers[stop - 1].end;
        if (end - loaded_end > physical_memory())
            throw ModelError(Kind::ModelFileError, "needs " + std::to_string(end - loaded_end) +
                                                       " bytes of memory, more than this machine has; load it with "
                                                       "fewer bits (max_bits)");
        Piece piece(loaded_end, end);
        for (size_t i = next_place; i < stop; i++) { // one by one: a tensor is checked while it is in the cache
            source->read(buffers[i].begin, buffers[i].end, piece.at(buffers[i].begin));
            check_bytes(buffers[i], piece.at(buffers[i].begin));
            if (!verify && !keep_copy) // what is read again must be what was read now
                buffers[i].crc = crc32(piece.at(buffers[i].begin), buffers[i].end - buffers[i].begin);
        }
        pieces.push_back(std::move(piece));
        for (size_t i = next_place; i < stop; i++)
            give(buffers[i], pieces.back().at(buffers[i].begin));
        loaded_end = end;
        holds_copy = true;
    }
    bool news = stop > next_place;
    next_place = stop;
    if (loaded_end >= limit && keep_copy)
        source.reset();
    return news;
}

void ModelFile::Impl::read_again(size_t place) {
    const TensorPlace &tensor = buffers[place];
    for (const Piece &piece : pieces) {
        if (tensor.begin < piece.begin || tensor.end > piece.begin + piece.size)
            continue;
        source->read(tensor.begin, tensor.end, piece.at(tensor.begin));
        if (crc32(piece.at(tensor.begin), tensor.end - tensor.begin) != tensor.crc)
            throw ModelError(Kind::ChecksumMismatch,
                             "was rewritten since it was loaded: tensor " + quote(title(tensor)) +
                                 " has other bytes; load it again, or load with keep_copy, which reads files once");
        released[place] = false;
        holds_copy = true;
    }
}

std::string ModelFile::Impl::title(const TensorPlace &place) const {
    const char *parts[] = {"table.", "weight.", "codes.", "plane", "tail."};
    std::string number = place.part == TensorPlace::plane ? std::to_string(place.number) + "." : "";
    return std::string(parts[place.part]) + (number.size() == 2 ? "0" : "") + number +
           (place.part == TensorPlace::table ? graph.ops[size_t(place.owner)].name
                                             : graph.weights[size_t(place.owner)].name);
}

// FORMAT.md, section 4: the checksum (on request), no bits past a plane's end, no NaN and no infinity.
void ModelFile::Impl::check_bytes(const TensorPlace &place, const uint8_t *bytes) const {
    if (verify)
        if (uint32_t crc = crc32(bytes, place.end - place.begin); crc != place.crc)
            throw ModelError(Kind::ChecksumMismatch, "tensor " + quote(title(place)) + " at byte " +
                                                         std::to_string(place.begin) + " has checksum " +
                                                         show_crc32(crc) + ", written was " + show_crc32(place.crc) +
                                                         "; fetch it again");
    if (place.part == TensorPlace::plane) {
        size_t used = graph.weights[size_t(place.owner)].count % 8;
        if (used && bytes[place.end - place.begin - 1] >> used)
            bad_tensor(title(place), "has bits past its end set; the file is damaged or badly written");
    } else if (place.part != TensorPlace::codes) {
        check_floats(place, bytes);
    }
}

void ModelFile::Impl::check_floats(const TensorPlace &place, const uint8_t *bytes) const {
    const size_t count = (place.end - place.begin) / 4;
    auto bits = [bytes](size_t i) {
        uint32_t value;
        std::memcpy(&value, bytes + 4 * i, 4); // a tail may be unaligned
        return value;
    };
    constexpr uint32_t kInfinity = 0x7f800000, kMinus = 0x80000000;
    uint32_t any = 0; // the top bit is set if some exponent is all ones: adding 1 to the exponent carries into it
    for (size_t i = 0; i < count; i++)
        any |= (bits(i) & ~kMinus) + 0x00800000;
    if (!(any & kMinus))
        return;
    const bool clip = place.part == TensorPlace::table && graph.ops[size_t(place.owner)].kind == OpKind::clip;
    for (size_t i = 0; i < count; i++) {
        if (clip && bits(i) == (i % 2 ? kInfinity : kInfinity | kMinus))
            continue; // no upper bound, no lower bound
        if ((bits(i) & kInfinity) == kInfinity)
            bad_tensor(title(place), "has a NaN or an infinity at number " + std::to_string(i) +
                                         (clip ? "; a clip may have -inf as its lower and inf as its upper bound"
                                               : "; all of its numbers must be finite"));
    }
}

void ModelFile::Impl::give(const TensorPlace &place, const uint8_t *bytes) {
    size_t owner = size_t(place.owner);
    switch (place.part) {
    case TensorPlace::table: // aligned: Placement saw to it, and the first piece, which holds all floats, starts with
                             // one
        graph.ops[owner].table = reinterpret_cast<const float *>(bytes);
        break;
    case TensorPlace::values:
        graph.weights[owner].values = reinterpret_cast<const float *>(bytes);
        break;
    case TensorPlace::codes:
        graph.weights[owner].codes = bytes;
        break;
    case TensorPlace::plane:
        graph.weights[owner].planes[place.number] = bytes;
        break;
    case TensorPlace::tail:
        graph.weights[owner].tail = bytes;
        break;
    }
}

namespace {

// Adds the path to errors of parts that do not know it.
template <class Work> auto naming(const std::string &name, Work work) {
    try {
        return work();
    } catch (const ModelError &error) {
        throw ModelError(error.kind, name + ": " + error.what());
    }
}

} // namespace

ModelFile::ModelFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ModelFile::~ModelFile() = default;

std::shared_ptr<ModelFile> ModelFile::open(const std::string &path, int max_bits, bool verify, bool keep_copy) {
    return naming(path, [&] {
        auto impl = std::make_unique<Impl>();
        impl->name = path;
        impl->verify = verify;
        impl->keep_copy = keep_copy;
        impl->open(file_source(path), max_bits);
        return std::shared_ptr<ModelFile>(new ModelFile(std::move(impl)));
    });
}

std::shared_ptr<ModelFile> ModelFile::from_memory(const uint8_t *bytes, size_t size, int max_bits, bool verify,
                                                  const std::string &name) {
    return naming(name, [&] {
        auto impl = std::make_unique<Impl>();
        impl->name = name;
        impl->verify = verify;
        impl->open(memory_source(bytes, size), max_bits);
        impl->source.reset(); // memory does not grow
        return std::shared_ptr<ModelFile>(new ModelFile(std::move(impl)));
    });
}

const Graph &ModelFile::graph() const {
    return impl_->graph;
}

bool ModelFile::available(int profile) const {
    return impl_->profile_end(impl_->graph.profiles[size_t(profile)]) <= impl_->loaded_end;
}

int ModelFile::planes_available() const {
    int count = 0;
    for (size_t end : impl_->plane_ends)
        count += end <= impl_->loaded_end;
    return count;
}

bool ModelFile::refresh() {
    if (!impl_->source || complete())
        return false;
    return naming(impl_->name, [&] {
        size_t size = impl_->source->size();
        if (size < impl_->loaded_end)
            throw ModelError(Kind::TruncatedFile,
                             "has " + std::to_string(size) + " bytes now, and had " +
                                 std::to_string(impl_->loaded_end) +
                                 " when it was read: it was cut or is being written anew; what was loaded stays, load "
                                 "it again for the rest");
        if (size > impl_->total)
            throw ModelError(Kind::BadTensor,
                             "has grown past its last tensor, which ends at byte " + std::to_string(impl_->total));
        return impl_->load(size);
    });
}

void ModelFile::release() {
    Impl &file = *impl_;
    if (file.keep_copy || !file.holds_copy)
        return;
    file.released.resize(file.buffers.size());
    for (const Piece &piece : file.pieces) {
        const size_t begin = std::max(piece.begin, file.head_end), end = piece.begin + piece.size;
        if (begin >= end || !release_pages(piece.at(begin), end - begin))
            continue;
        file.holds_copy = false;
        for (size_t i = 0; i < file.next_place; i++)
            if (file.buffers[i].begin >= begin && file.buffers[i].end <= end)
                file.released[i] = true; // in parts, at least
    }
}

void ModelFile::need(int weight, int bits) {
    Impl &file = *impl_;
    if (file.keep_copy || file.released.empty())
        return;
    if (file.places.empty()) {
        file.places.resize(file.graph.weights.size());
        for (size_t i = 0; i < file.buffers.size(); i++)
            if (file.buffers[i].part == TensorPlace::plane || file.buffers[i].part == TensorPlace::tail)
                file.places[size_t(file.buffers[i].owner)].push_back(i);
    }
    naming(file.name, [&] {
        for (const size_t i : file.places[size_t(weight)]) {
            const TensorPlace &place = file.buffers[i];
            const std::vector<int> &numbers = file.graph.planes[bits > 8 ? 0 : size_t(bits)];
            const bool wanted = place.part == TensorPlace::tail
                                    ? bits == FLOAT_BITS
                                    : std::find(numbers.begin(), numbers.end(), place.number) != numbers.end();
            if (wanted && i < file.released.size() && file.released[i])
                file.read_again(i);
        }
    });
}

bool ModelFile::complete() const {
    return impl_->loaded_end >= impl_->limit;
}

size_t ModelFile::bytes_for(int bits) const {
    if (bits == FLOAT_BITS)
        return impl_->tails_end;
    if (bits < 1 || bits > 8 || impl_->graph.planes[size_t(bits)].empty())
        return 0;
    return impl_->plane_ends[size_t(impl_->graph.planes[size_t(bits)].back())];
}

size_t ModelFile::file_bytes() const {
    return impl_->total;
}

size_t ModelFile::loaded_bytes() const {
    return impl_->holds_copy ? impl_->loaded_end : impl_->head_end;
}

} // namespace anyprec
