// See reader.h. The header is read into memory, parsed and given back; of the tensors a prefix is mapped, and later
// ones in pieces of their own as they arrive, so that pointers into the first stay where they are.
#include "reader.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "graph_json.h"
#include "json.h"

#if defined(_WIN32)
#include <filesystem>
#include <fstream>
#else
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "Tensors are little-endian and used where they lie; this needs a little-endian machine."
#endif

namespace anyprec {
namespace {

using Kind = ModelErrorKind;
using Type = Json::Type;
static_assert(sizeof(size_t) == 8, "limits of FORMAT.md need 64 bit sizes");

constexpr size_t MAX_HEADER = 100000000;

std::string quote(std::string_view text) {
    std::string shown(text.substr(0, 60));
    for (char &c : shown)
        if (c < 0x20 || c == 0x7f)
            c = '?';
    return "'" + shown + "'";
}

std::string hex(uint32_t crc) {
    std::string digits(8, '0');
    for (size_t i = 8; i-- > 0; crc >>= 4)
        digits[i] = "0123456789abcdef"[crc & 15];
    return digits;
}

// The CRC-32 of zlib and PNG. Eight bytes a step with a table each, about 1.5 GB/s: a checked 25 MB file costs 17 ms.
uint32_t crc32(const uint8_t *bytes, size_t size) {
    struct Tables {
        uint32_t rows[8][256];
        Tables() {
            for (uint32_t i = 0; i < 256; i++) {
                uint32_t crc = i;
                for (int bit = 0; bit < 8; bit++)
                    crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
                rows[0][i] = crc;
            }
            for (int row = 1; row < 8; row++)
                for (uint32_t i = 0; i < 256; i++)
                    rows[row][i] = (rows[row - 1][i] >> 8) ^ rows[0][rows[row - 1][i] & 255];
        }
    };
    static const Tables tables;
    const auto &t = tables.rows;
    uint32_t crc = ~uint32_t(0);
    for (; size >= 8; bytes += 8, size -= 8) {
        uint32_t low, high;
        std::memcpy(&low, bytes, 4);
        std::memcpy(&high, bytes + 4, 4);
        low ^= crc;
        crc = t[7][low & 255] ^ t[6][(low >> 8) & 255] ^ t[5][(low >> 16) & 255] ^ t[4][low >> 24] ^ t[3][high & 255] ^
              t[2][(high >> 8) & 255] ^ t[1][(high >> 16) & 255] ^ t[0][high >> 24];
    }
    for (; size > 0; bytes++, size--)
        crc = (crc >> 8) ^ t[0][(crc ^ *bytes) & 255];
    return ~crc;
}

// ---- bytes: a file or memory, looked at through pieces that stay where they are ----

// Bytes begin .. end of the source.
class Piece {
  public:
    virtual ~Piece() = default;
    virtual void drop(size_t, size_t) const {}
    const uint8_t *at(size_t offset) const { return first_ + (offset - begin_); }

  protected:
    const uint8_t *first_ = nullptr;
    size_t begin_ = 0;
};

class Source {
  public:
    virtual ~Source() = default;
    virtual size_t size() = 0; // now: a file may grow
    virtual void read(size_t begin, size_t end, char *into) = 0;
    virtual std::unique_ptr<Piece> piece(size_t begin, size_t end) = 0; // begin < end <= size()
};

class MemoryPiece : public Piece {
  public:
    MemoryPiece(size_t begin, size_t end) : bytes_(new uint8_t[end - begin]) {
        first_ = bytes_.get();
        begin_ = begin;
    }
    uint8_t *bytes() { return bytes_.get(); }

  private:
    std::unique_ptr<uint8_t[]> bytes_; // new aligns it for floats
};

class MemorySource : public Source {
  public:
    MemorySource(const uint8_t *bytes, size_t size) : bytes_(bytes), size_(size) {}
    size_t size() override { return size_; }
    void read(size_t begin, size_t end, char *into) override { std::memcpy(into, bytes_ + begin, end - begin); }
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        auto made = std::make_unique<MemoryPiece>(begin, end);
        std::memcpy(made->bytes(), bytes_ + begin, end - begin);
        return made;
    }

  private:
    const uint8_t *bytes_; // the caller's: read while opening and never later
    size_t size_;
};

[[noreturn]] void fail_system(const std::string &what, const std::string &reason) {
    throw ModelError(Kind::ModelFileError, "cannot be " + what + ": " + reason);
}

#if defined(_WIN32)

// Reads where others map: a mapped file could not be replaced or removed while a model is loaded.
class FileSource : public Source {
  public:
    explicit FileSource(const std::string &path) {
        std::filesystem::path where = std::filesystem::u8path(path);
        std::error_code error;
        if (!std::filesystem::is_regular_file(where, error))
            fail_system("opened", "it is not a regular file");
        file_.open(where, std::ios::binary);
        if (!file_)
            fail_system("opened", "access was refused");
    }
    size_t size() override {
        file_.clear();
        file_.seekg(0, std::ios::end);
        return size_t(file_.tellg());
    }
    void read(size_t begin, size_t end, char *into) override {
        file_.clear();
        file_.seekg(std::streamoff(begin));
        file_.read(into, std::streamsize(end - begin));
        if (size_t(file_.gcount()) != end - begin)
            throw ModelError(Kind::TruncatedFile, "was cut short while it was read; fetch it again");
    }
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        auto made = std::make_unique<MemoryPiece>(begin, end);
        read(begin, end, reinterpret_cast<char *>(made->bytes()));
        return made;
    }

  private:
    std::ifstream file_;
};

#else

size_t page_size() {
    static const size_t size = size_t(sysconf(_SC_PAGESIZE));
    return size;
}

class MappedPiece : public Piece {
  public:
    MappedPiece(int file, size_t begin, size_t end) : skip_(begin % page_size()), length_(end - begin + skip_) {
        void *mapped = mmap(nullptr, length_, PROT_READ, MAP_PRIVATE, file, off_t(begin - skip_));
        if (mapped == MAP_FAILED)
            fail_system("mapped", std::strerror(errno));
        map_ = static_cast<uint8_t *>(mapped);
        first_ = map_ + skip_;
        begin_ = begin;
    }
    ~MappedPiece() override { munmap(map_, length_); }

    // Whole pages alone. A hint: whether it works is all the same.
    void drop(size_t begin, size_t end) const override {
        size_t start = begin > begin_ ? begin - begin_ + skip_ : skip_;
        size_t stop = std::min(end > begin_ ? end - begin_ + skip_ : 0, length_);
        start = (start + page_size() - 1) / page_size() * page_size();
        stop = stop == length_ ? stop : stop / page_size() * page_size();
        if (start < stop)
            madvise(map_ + start, stop - start, MADV_DONTNEED);
    }

  private:
    size_t skip_, length_;
    uint8_t *map_;
};

class FileSource : public Source {
  public:
    explicit FileSource(const std::string &path) {
        if (path.find('\0') != path.npos)
            fail_system("opened", "its path has a NUL in it");
        // Not blocking: a pipe would wait for a writer here, and is refused below.
        file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file_ < 0)
            fail_system("opened", std::strerror(errno));
        struct stat about;
        if (fstat(file_, &about) != 0 || !S_ISREG(about.st_mode)) {
            ::close(file_);
            fail_system("opened", "it is not a regular file");
        }
    }
    ~FileSource() override { ::close(file_); }

    size_t size() override {
        struct stat about;
        if (fstat(file_, &about) != 0)
            fail_system("read", std::strerror(errno));
        return size_t(about.st_size);
    }
    void read(size_t begin, size_t end, char *into) override {
        while (begin < end) {
            ssize_t got = pread(file_, into, end - begin, off_t(begin));
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                fail_system("read", std::strerror(errno));
            if (got == 0)
                throw ModelError(Kind::TruncatedFile, "was cut short while it was read; fetch it again");
            begin += size_t(got);
            into += got;
        }
    }
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        return std::make_unique<MappedPiece>(file_, begin, end);
    }

  private:
    int file_ = -1;
};

#endif

// ---- the header: FORMAT.md section 1 ----

struct Row {
    std::string_view name;
    bool is_float = false; // F32, else U8
    std::vector<int64_t> shape;
    size_t begin = 0, end = 0; // counted from the tensor data
};

[[noreturn]] void bad_tensor(std::string_view name, const std::string &what) {
    throw ModelError(Kind::BadTensor, "tensor " + quote(name) + " " + what);
}

Row parse_row(std::string_view name, Json::Value entry) {
    Row row;
    row.name = name;
    bool has_dtype = false, has_shape = false, has_offsets = false;
    if (!entry.is(Type::object) || entry.size() != 3)
        bad_tensor(name, "is not described by dtype, shape and data_offsets");
    for (auto member = entry.begin(); member != entry.end(); ++member) {
        Json::Value value = *member;
        if (member.key() == "dtype") {
            has_dtype = value.is(Type::string) && (value.string() == "F32" || value.string() == "U8");
            row.is_float = has_dtype && value.string() == "F32";
        } else if (member.key() == "shape") {
            has_shape = value.is(Type::array) && value.size() >= 1 && value.size() <= 4;
            if (has_shape)
                for (Json::Value size : value) {
                    has_shape =
                        has_shape && size.is(Type::integer) && size.integer() >= 1 && size.integer() < int64_t(1) << 40;
                    row.shape.push_back(has_shape ? size.integer() : 0);
                }
        } else if (member.key() == "data_offsets") {
            size_t offsets[2] = {0, 0}, i = 0;
            has_offsets = value.is(Type::array) && value.size() == 2;
            if (has_offsets)
                for (Json::Value offset : value) {
                    has_offsets = has_offsets && offset.is(Type::integer) && offset.integer() >= 0;
                    offsets[i++] = has_offsets ? size_t(offset.integer()) : 0;
                }
            row.begin = offsets[0];
            row.end = offsets[1];
        }
    }
    if (!has_dtype)
        bad_tensor(name, "has no dtype, or one that is not F32 or U8");
    if (!has_shape)
        bad_tensor(name, "has no shape, or one that is not 1 to 4 sizes, each from 1, below 2^40");
    if (!has_offsets || row.begin > row.end)
        bad_tensor(name, "has no data_offsets, or other ones than [begin, end] with 0 <= begin <= end");
    size_t need = row.is_float ? 4 : 1;
    for (int64_t size : row.shape)
        need =
            need > (SIZE_MAX >> 1) / size_t(size) ? SIZE_MAX >> 1 : need * size_t(size); // no file is as long as that
    if (row.end - row.begin != need)
        bad_tensor(name, "of its shape needs " + std::to_string(need) + " bytes, data_offsets give it " +
                             std::to_string(row.end - row.begin));
    return row;
}

struct Header {
    std::vector<Row> rows; // in the order of their bytes, which follow each other without gap or overlap
    std::string_view graph;
};

// `json` must outlive the result.
Header parse_header(const Json &json) {
    Header header;
    std::string_view stored_crc;
    bool has_graph = false;
    for (auto member = json.root().begin(); member != json.root().end(); ++member) {
        if (member.key() != "__metadata__") {
            header.rows.push_back(parse_row(member.key(), *member));
            continue;
        }
        Json::Value metadata = *member;
        if (!metadata.is(Type::object))
            throw ModelError(Kind::BadHeader, "__metadata__ in the header is not an object of strings");
        for (auto text = metadata.begin(); text != metadata.end(); ++text) {
            if (!(*text).is(Type::string))
                throw ModelError(Kind::BadHeader, "__metadata__ in the header is not an object of strings");
            if (text.key() == "anyprec") {
                header.graph = (*text).string();
                has_graph = true;
            } else if (text.key() == "anyprec.crc32") {
                stored_crc = (*text).string();
            }
        }
    }
    std::sort(header.rows.begin(), header.rows.end(),
              [](const Row &a, const Row &b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
    size_t end = 0;
    for (const Row &row : header.rows) {
        if (row.begin != end)
            bad_tensor(row.name, "at offset " + std::to_string(row.begin) +
                                     (row.begin < end ? " overlaps the one before, which ends at "
                                                      : " leaves a gap after the one before, which ends at ") +
                                     std::to_string(end));
        end = row.end;
    }
    if (!has_graph)
        throw ModelError(Kind::NotAModelFile,
                         "is a safetensors file without a graph of anyprec; make a model file with 'anyprec pack'");
    uint32_t crc = crc32(reinterpret_cast<const uint8_t *>(header.graph.data()), header.graph.size());
    if (stored_crc != hex(crc))
        throw ModelError(Kind::ChecksumMismatch, "its graph has checksum " + hex(crc) + ", written was " +
                                                     quote(stored_crc) + "; fetch it again");
    return header;
}

// ---- tensors against the graph ----

// Where a tensor's bytes lie in the file and whose they are.
struct Place {
    enum Part : uint8_t { table, values, codes, plane, tail };
    size_t begin = 0, end = 0;
    uint32_t crc = 0;
    int owner = 0; // number of the op (table) or weight
    Part part = table;
    uint8_t number = 0; // of the plane
};

// Walks the tensors a graph needs, in file order, along those the header has. Nothing is allocated for a tensor that
// the header does not list: 65,536 weights with 36 planes each would be 2 million names.
class Placement {
  public:
    Placement(const Header &header, const ParsedGraph &parsed, size_t data_start)
        : header_(header), parsed_(parsed), data_start_(data_start) {}

    std::vector<Place> place() {
        const Graph &graph = parsed_.graph;
        const int64_t profiles = int64_t(graph.profiles.size());
        std::vector<int> ops = by_name(graph.ops), weights = by_name(graph.weights);
        for (int i : ops) {
            const Op &op = graph.ops[size_t(i)];
            if (op.affine)
                next("table.", op.name, true, {profiles, 2, int64_t(op.table_row / 2)}, {Place::table, i, 0});
            else if (has_table(op))
                next("table.", op.name, true, {profiles, 2}, {Place::table, i, 0});
        }
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; weight.is_float)
                next("weight.", weight.name, true, {weight.shape, weight.shape + 4}, {Place::values, i, 0});
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; weight.fixed_bits)
                next("codes.", weight.name, false, {int64_t(weight.count)}, {Place::codes, i, 0});
        size_t planes = 0;
        for (const std::vector<int> &numbers : graph.planes)
            planes = numbers.empty() ? planes : size_t(numbers.back()) + 1; // wider widths end later
        for (size_t number = 0; number < planes; number++) {
            std::string prefix = {'p', 'l', 'a', 'n', 'e', char('0' + number / 10), char('0' + number % 10), '.'};
            for (int i : weights)
                if (const Weight &weight = graph.weights[size_t(i)]; !weight.is_float && !weight.fixed_bits)
                    next(prefix, weight.name, false, {int64_t(weight.count + 7) / 8}, {Place::plane, i, number});
        }
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; !weight.is_float && needs_tail(i))
                next("tail.", weight.name, false, {int64_t(weight.count) * 4}, {Place::tail, i, 0});
        if (at_ < header_.rows.size())
            bad_tensor(header_.rows[at_].name, "is none that the graph needs, or not in its place");
        if (!without_checksum_.empty())
            throw ModelError(Kind::BadGraph, "the graph has no checksum of " + quote(without_checksum_));
        if (at_ < parsed_.checksums.size())
            throw ModelError(Kind::BadGraph, "the graph has checksums of tensors it does not need");
        return std::move(places_);
    }

  private:
    struct Whose {
        Place::Part part;
        int owner;
        size_t number;
    };

    template <class Named> static std::vector<int> by_name(const std::vector<Named> &all) {
        std::vector<int> order(all.size());
        for (size_t i = 0; i < order.size(); i++)
            order[i] = int(i);
        std::sort(order.begin(), order.end(), [&](int a, int b) { return all[size_t(a)].name < all[size_t(b)].name; });
        return order;
    }

    bool needs_tail(int weight) const {
        const std::vector<Profile> &profiles = parsed_.graph.profiles;
        return std::any_of(profiles.begin(), profiles.end(),
                           [&](const Profile &p) { return p.weight_bits[size_t(weight)] == FLOAT_BITS; });
    }

    void next(std::string_view prefix, const std::string &name, bool is_float, const std::vector<int64_t> &shape,
              Whose whose) {
        std::string full = std::string(prefix) + name;
        if (at_ >= header_.rows.size())
            bad_tensor(full, "is missing");
        const Row &row = header_.rows[at_++];
        if (row.name != full)
            bad_tensor(full, "is missing, or not in its place: " + quote(row.name) + " stands there");
        if (row.is_float != is_float || row.shape != shape)
            bad_tensor(full, "is not of the dtype and shape that the graph needs");
        Place place;
        place.begin = data_start_ + row.begin;
        place.end = data_start_ + row.end;
        place.part = whose.part;
        place.owner = whose.owner;
        place.number = uint8_t(whose.number);
        if (is_float && place.begin % alignof(float))
            bad_tensor(full, "starts at byte " + std::to_string(place.begin) + ", which is no multiple of 4");
        const auto &checksums = parsed_.checksums;
        auto found =
            std::lower_bound(checksums.begin(), checksums.end(), full,
                             [](const auto &entry, const std::string &wanted) { return entry.first < wanted; });
        if (found != checksums.end() && found->first == full)
            place.crc = found->second;
        else if (without_checksum_.empty())
            without_checksum_ = full;
        places_.push_back(place);
    }

    const Header &header_;
    const ParsedGraph &parsed_;
    size_t data_start_;
    size_t at_ = 0;
    std::string without_checksum_; // the first such tensor; said last, for a missing tensor is the worse news
    std::vector<Place> places_;
};

} // namespace

const char *kind_name(ModelErrorKind kind) {
    switch (kind) {
    case Kind::TruncatedFile:
        return "TruncatedFile";
    case Kind::BadHeader:
        return "BadHeader";
    case Kind::BadTensor:
        return "BadTensor";
    case Kind::BadGraph:
        return "BadGraph";
    case Kind::UnsupportedVersion:
        return "UnsupportedVersion";
    case Kind::ChecksumMismatch:
        return "ChecksumMismatch";
    case Kind::NotAModelFile:
        return "NotAModelFile";
    case Kind::ModelFileError:
        break;
    }
    return "ModelFileError";
}

// ---- ModelFile ----

struct ModelFile::Impl {
    std::string name;
    std::unique_ptr<Source> source; // nullptr once everything is mapped
    std::vector<std::unique_ptr<Piece>> pieces;
    Graph graph;
    std::vector<Place> places;
    std::vector<size_t> plane_ends; // where each plane ends in the file
    size_t head_end = 0;            // where tables, float weights and codes of fixed bits end
    size_t tails_end = 0;           // 0 without tails
    size_t total = 0;
    size_t limit = 0;      // where what max_bits allows ends
    size_t mapped_end = 0; // from head to here everything is mapped
    size_t next_place = 0; // the first that is not
    bool verify = false;

    void open(std::unique_ptr<Source> from, int max_bits);
    void read_head(size_t size);
    void find_ends(size_t data_start, int max_bits);
    size_t profile_end(const Profile &profile) const;
    void check_long_enough(size_t size, int max_bits) const;
    bool map(size_t size);
    void check_bytes(const Place &place, const uint8_t *bytes) const;
    void give(const Place &place, const uint8_t *bytes);
};

void ModelFile::Impl::open(std::unique_ptr<Source> from, int max_bits) {
    source = std::move(from);
    size_t size = source->size();
    read_head(size);
    size_t data_start = mapped_end;
    find_ends(data_start, max_bits);
    if (size > total)
        throw ModelError(Kind::BadTensor, "has " + std::to_string(size - total) +
                                              " bytes after its last tensor, which ends at " + std::to_string(total));
    check_long_enough(size, max_bits);
    map(size);
}

// Leaves graph and places filled, and mapped_end where the tensors begin.
void ModelFile::Impl::read_head(size_t size) {
    if (size < 8)
        throw ModelError(Kind::TruncatedFile,
                         "has " + std::to_string(size) + " bytes, not even the 8 that say how long its header is");
    uint64_t length = 0;
    char first[9] = {0};
    source->read(0, std::min<size_t>(size, 9), first);
    for (int i = 8; i-- > 0;)
        length = length << 8 | uint8_t(first[i]);
    if (length > MAX_HEADER || length < 2)
        throw ModelError(Kind::BadHeader, "its first 8 bytes say the header has " + std::to_string(length) +
                                              " bytes; 2 to 100000000 are allowed; is it a model file?");
    if (size > 8 && first[8] != '{')
        throw ModelError(Kind::BadHeader, "its header does not start with '{'; is it a model file?");
    if (size < 8 + length)
        throw ModelError(Kind::TruncatedFile, "has " + std::to_string(size) + " bytes, its header alone needs " +
                                                  std::to_string(8 + length) + "; wait for more, or fetch it again");
    std::string text(size_t(length), '\0');
    source->read(8, 8 + size_t(length), text.data());
    std::string_view stripped(text);
    stripped = stripped.substr(0, stripped.find_last_not_of(' ') + 1);
    if (stripped.back() != '}') // it starts with '{': not empty
        throw ModelError(Kind::BadHeader, "its header does not end in '}' and spaces; the file is damaged");
    try {
        Json json(stripped);
        Header header = parse_header(json);
        ParsedGraph parsed = parse_graph(header.graph);
        places = Placement(header, parsed, 8 + size_t(length)).place();
        graph = std::move(parsed.graph);
    } catch (const JsonError &error) {
        throw ModelError(Kind::BadHeader, "its header is not JSON: " + std::string(error.what()));
    }
    mapped_end = 8 + size_t(length);
}

void ModelFile::Impl::find_ends(size_t data_start, int max_bits) {
    head_end = data_start;
    for (const std::vector<int> &numbers : graph.planes)
        if (!numbers.empty())
            plane_ends.resize(size_t(numbers.back()) + 1);
    for (const Place &place : places)
        if (place.part == Place::table || place.part == Place::values || place.part == Place::codes)
            head_end = place.end;
    std::fill(plane_ends.begin(), plane_ends.end(), head_end); // for a graph without quantised weights
    for (const Place &place : places) {
        if (place.part == Place::plane)
            plane_ends[place.number] = place.end;
        if (place.part == Place::tail)
            tails_end = place.end;
    }
    total = places.empty() ? data_start : places.back().end;
    limit = total;
    if (max_bits >= 1 && max_bits <= 8) {
        limit = head_end;
        for (int bits = 1; bits <= max_bits; bits++)
            if (!graph.planes[size_t(bits)].empty())
                limit = plane_ends[size_t(graph.planes[size_t(bits)].back())];
    }
}

// How long the file must be for this profile.
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

void ModelFile::Impl::check_long_enough(size_t size, int max_bits) const {
    size_t least = SIZE_MAX;
    for (const Profile &profile : graph.profiles)
        if (size_t end = profile_end(profile); end <= limit)
            least = std::min(least, end);
    if (least == SIZE_MAX)
        least = head_end;
    if (size < least)
        throw ModelError(Kind::TruncatedFile,
                         "has " + std::to_string(size) + " bytes, its narrowest profile" +
                             (max_bits >= 1 && max_bits <= 8 ? " within " + std::to_string(max_bits) + " bits" : "") +
                             " needs " + std::to_string(least) + "; wait for more, or fetch it again");
}

// Maps what is there of what max_bits allows. True if there was something new.
bool ModelFile::Impl::map(size_t size) {
    size_t stop = next_place;
    while (stop < places.size() && places[stop].end <= std::min(size, limit))
        stop++;
    if (stop > next_place) {
        std::unique_ptr<Piece> piece = source->piece(mapped_end, places[stop - 1].end);
        for (size_t i = next_place; i < stop; i++)
            check_bytes(places[i], piece->at(places[i].begin));
        pieces.push_back(std::move(piece));
        for (size_t i = next_place; i < stop; i++)
            give(places[i], pieces.back()->at(places[i].begin));
    }
    bool news = stop > next_place;
    next_place = stop;
    mapped_end = stop ? places[stop - 1].end : mapped_end;
    if (mapped_end >= limit)
        source.reset();
    return news;
}

void ModelFile::Impl::check_bytes(const Place &place, const uint8_t *bytes) const {
    auto title = [&] {
        const char *parts[] = {"table.", "weight.", "codes.", "plane", "tail."};
        std::string number = place.part == Place::plane ? std::to_string(place.number) + "." : "";
        return std::string(parts[place.part]) + (number.size() == 2 ? "0" : "") + number +
               (place.part == Place::table ? graph.ops[size_t(place.owner)].name
                                           : graph.weights[size_t(place.owner)].name);
    };
    if (verify)
        if (uint32_t crc = crc32(bytes, place.end - place.begin); crc != place.crc)
            throw ModelError(Kind::ChecksumMismatch, "tensor " + quote(title()) + " at byte " +
                                                         std::to_string(place.begin) + " has checksum " + hex(crc) +
                                                         ", written was " + hex(place.crc) + "; fetch it again");
    if (place.part != Place::plane)
        return;
    size_t used = graph.weights[size_t(place.owner)].count % 8;
    if (used && bytes[place.end - place.begin - 1] >> used)
        bad_tensor(title(), "has bits past its end set; the file is damaged or badly written");
}

void ModelFile::Impl::give(const Place &place, const uint8_t *bytes) {
    size_t owner = size_t(place.owner);
    switch (place.part) {
    case Place::table: // aligned: Placement saw to it, and the first piece, which holds all floats, starts with one
        graph.ops[owner].table = reinterpret_cast<const float *>(bytes);
        break;
    case Place::values:
        graph.weights[owner].values = reinterpret_cast<const float *>(bytes);
        break;
    case Place::codes:
        graph.weights[owner].codes = bytes;
        break;
    case Place::plane:
        graph.weights[owner].planes[place.number] = bytes;
        break;
    case Place::tail:
        graph.weights[owner].tail = bytes;
        break;
    }
}

namespace {

// Errors of the parts that know no path get it in front.
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

std::shared_ptr<ModelFile> ModelFile::open(const std::string &path, int max_bits, bool verify) {
    return naming(path, [&] {
        auto impl = std::make_unique<Impl>();
        impl->name = path;
        impl->verify = verify;
        impl->open(std::make_unique<FileSource>(path), max_bits);
        return std::shared_ptr<ModelFile>(new ModelFile(std::move(impl)));
    });
}

std::shared_ptr<ModelFile> ModelFile::from_memory(const uint8_t *bytes, size_t size, int max_bits, bool verify,
                                                  const std::string &name) {
    return naming(name, [&] {
        auto impl = std::make_unique<Impl>();
        impl->name = name;
        impl->verify = verify;
        impl->open(std::make_unique<MemorySource>(bytes, size), max_bits);
        impl->source.reset(); // memory does not grow
        return std::shared_ptr<ModelFile>(new ModelFile(std::move(impl)));
    });
}

const Graph &ModelFile::graph() const {
    return impl_->graph;
}

bool ModelFile::available(int profile) const {
    return impl_->profile_end(impl_->graph.profiles[size_t(profile)]) <= impl_->mapped_end;
}

int ModelFile::planes_available() const {
    int count = 0;
    for (size_t end : impl_->plane_ends)
        count += end <= impl_->mapped_end;
    return count;
}

bool ModelFile::refresh() {
    if (!impl_->source)
        return false;
    return naming(impl_->name, [&] {
        size_t size = impl_->source->size();
        if (size > impl_->total)
            throw ModelError(Kind::BadTensor,
                             "has grown past its last tensor, which ends at byte " + std::to_string(impl_->total));
        return impl_->map(size);
    });
}

bool ModelFile::complete() const {
    return impl_->mapped_end >= impl_->limit;
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

size_t ModelFile::mapped_bytes() const {
    return impl_->mapped_end;
}

void ModelFile::drop_pages() const {
    for (const std::unique_ptr<Piece> &piece : impl_->pieces)
        piece->drop(0, impl_->mapped_end);
}

} // namespace anyprec
