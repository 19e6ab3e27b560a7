// See header.h.
#include "format/header.h"

#include <algorithm>

#include "anyprec/model_error.h"
#include "format/checksum.h"

namespace anyprec {

using Type = Json::Type;

void bad_tensor(std::string_view name, const std::string &what) {
    throw ModelError(ModelErrorKind::BadTensor, "tensor " + quote(name) + " " + what);
}

namespace {

TensorRow parse_row(std::string_view name, Json::Value entry) {
    TensorRow row;
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

} // namespace

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
            throw ModelError(ModelErrorKind::BadHeader, "__metadata__ in the header is not an object of strings");
        for (auto text = metadata.begin(); text != metadata.end(); ++text) {
            if (!(*text).is(Type::string))
                throw ModelError(ModelErrorKind::BadHeader, "__metadata__ in the header is not an object of strings");
            if (text.key() == "anyprec") {
                header.graph = (*text).string();
                has_graph = true;
            } else if (text.key() == "anyprec.crc32") {
                stored_crc = (*text).string();
            }
        }
    }
    std::sort(header.rows.begin(), header.rows.end(), [](const TensorRow &a, const TensorRow &b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    size_t end = 0;
    for (const TensorRow &row : header.rows) {
        if (row.begin != end)
            bad_tensor(row.name, "at offset " + std::to_string(row.begin) +
                                     (row.begin < end ? " overlaps the one before, which ends at "
                                                      : " leaves a gap after the one before, which ends at ") +
                                     std::to_string(end));
        end = row.end;
    }
    if (!has_graph)
        throw ModelError(ModelErrorKind::NotAModelFile,
                         "is a safetensors file without a graph of anyprec; make a model file with 'anyprec pack'");
    uint32_t crc = crc32(reinterpret_cast<const uint8_t *>(header.graph.data()), header.graph.size());
    if (stored_crc != show_crc32(crc))
        throw ModelError(ModelErrorKind::ChecksumMismatch, "its graph has checksum " + show_crc32(crc) +
                                                               ", written was " + quote(stored_crc) +
                                                               "; fetch it again");
    return header;
}

} // namespace anyprec
