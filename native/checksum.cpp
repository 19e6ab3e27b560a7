// See checksum.h.
#include "checksum.h"

#include <cstring>

namespace anyprec {

// Eight bytes a step with a table each, about 1.5 GB/s: a checked 25 MB file costs 17 ms.
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

std::string show_crc32(uint32_t crc) {
    std::string digits(8, '0');
    for (size_t i = 8; i-- > 0; crc >>= 4)
        digits[i] = "0123456789abcdef"[crc & 15];
    return digits;
}

bool parse_crc32(std::string_view digits, uint32_t &crc) {
    crc = 0;
    for (char c : digits) {
        if (c >= '0' && c <= '9')
            crc = crc * 16 + uint32_t(c - '0');
        else if (c >= 'a' && c <= 'f')
            crc = crc * 16 + uint32_t(c - 'a' + 10);
        else
            return false;
    }
    return digits.size() == 8;
}

} // namespace anyprec
