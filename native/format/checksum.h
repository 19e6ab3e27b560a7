// CRC-32, as in zlib and PNG, for the text of GRAPH and for every tensor (FORMAT.md, sections 1 and 2). In: bytes. Out:
// the checksum, or its eight hex digits. Used by the reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace anyprec {

uint32_t crc32(const uint8_t *bytes, size_t size);

std::string show_crc32(uint32_t crc);

// Eight hex digits in lower case; false if it is anything else.
bool parse_crc32(std::string_view digits, uint32_t &crc);

} // namespace anyprec
