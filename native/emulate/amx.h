// AMX in software, for a build that tests kernels on CPUs without it (ANYPREC_EMULATE in CMakeLists.txt; never in a
// wheel). In: the intrinsics of kernels_amx.cpp. Out: what Intel's manual (volume 2, and volume 1, chapter 18) says
// they do, for palette 1: 8 tiles of up to 16 lines of up to 64 bytes. What a CPU would refuse (#GP, #UD) ends the
// program with a message, and so does a thread that ends with its tiles configured: calls must leave none behind.
#pragma once

#include <immintrin.h> // before the names below become macros

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace anyprec {
namespace emulated {

[[noreturn]] inline void refuse(const char *instruction, const char *why) {
    std::fprintf(stderr, "emulated AMX: %s: %s\n", instruction, why);
    std::abort();
}

struct TileRegister {
    int rows = 0, bytes = 0; // 0: not configured
    uint8_t data[16][64] = {};
};

struct TileRegisters {
    bool configured = false;
    TileRegister tiles[8];

    ~TileRegisters() {
        if (configured)
            refuse("tilerelease", "missing: a thread ends with tiles configured");
    }

    void load_config(const void *from) {
        uint8_t bytes[64];
        std::memcpy(bytes, from, sizeof bytes);
        release();
        if (bytes[0] == 0)
            return;
        if (bytes[0] != 1)
            refuse("ldtilecfg", "a palette other than 0 and 1");
        if (bytes[1] != 0)
            refuse("ldtilecfg", "a start row, without an interrupted load before it");
        for (int i = 2; i < 16; ++i)
            if (bytes[i])
                refuse("ldtilecfg", "a reserved byte that is not 0");
        for (int t = 0; t < 16; ++t) {
            const int row_bytes = bytes[16 + 2 * t] | bytes[17 + 2 * t] << 8, rows = bytes[48 + t];
            if (t >= 8 && (row_bytes || rows))
                refuse("ldtilecfg", "a tile beyond the eighth");
            if (rows > 16 || row_bytes > 64)
                refuse("ldtilecfg", "more than 16 rows, or than 64 bytes a row");
            if ((rows == 0) != (row_bytes == 0))
                refuse("ldtilecfg", "rows without bytes, or bytes without rows");
            if (t < 8)
                tiles[t].rows = rows, tiles[t].bytes = row_bytes;
        }
        configured = true;
    }
    void release() {
        configured = false;
        for (TileRegister &tile : tiles)
            tile = TileRegister();
    }
    TileRegister &at(const char *instruction, int tile) {
        if (!configured)
            refuse(instruction, "no configuration is loaded");
        if (tile < 0 || tile >= 8)
            refuse(instruction, "no such tile");
        if (tiles[tile].rows == 0)
            refuse(instruction, "a tile that is not configured");
        return tiles[tile];
    }
    void zero(int tile) { std::memset(at("tilezero", tile).data, 0, sizeof(TileRegister::data)); }
    void load(int tile, const void *base, ptrdiff_t stride) {
        TileRegister &to = at("tileloadd", tile);
        std::memset(to.data, 0, sizeof to.data);
        for (int r = 0; r < to.rows; ++r)
            std::memcpy(to.data[r], static_cast<const uint8_t *>(base) + stride * r, static_cast<size_t>(to.bytes));
    }
    void store(int tile, void *base, ptrdiff_t stride) {
        const TileRegister &from = at("tilestored", tile);
        for (int r = 0; r < from.rows; ++r)
            std::memcpy(static_cast<uint8_t *>(base) + stride * r, from.data[r], static_cast<size_t>(from.bytes));
    }
    // sums += codes (unsigned) x weights (signed), modulo 2^32.
    void dpbusd(int sums, int codes, int weights) {
        TileRegister &to = at("tdpbusd", sums);
        const TileRegister &a = at("tdpbusd", codes), &b = at("tdpbusd", weights);
        if (sums == codes || sums == weights || codes == weights)
            refuse("tdpbusd", "the same tile twice");
        if (to.bytes % 4 || a.bytes % 4 || b.bytes % 4)
            refuse("tdpbusd", "bytes of a row that are no multiple of 4");
        if (to.rows != a.rows || to.bytes != b.bytes || a.bytes / 4 != b.rows)
            refuse("tdpbusd", "shapes that do not match");
        for (int m = 0; m < to.rows; ++m)
            for (int n = 0; n < to.bytes / 4; ++n) {
                uint32_t sum;
                std::memcpy(&sum, to.data[m] + 4 * n, 4);
                for (int k = 0; k < a.bytes; ++k)
                    sum += static_cast<uint32_t>(a.data[m][k] * static_cast<int8_t>(b.data[k / 4][4 * n + k % 4]));
                std::memcpy(to.data[m] + 4 * n, &sum, 4);
            }
    }
};

inline TileRegisters &tiles() {
    static thread_local TileRegisters of_this_thread;
    return of_this_thread;
}

} // namespace emulated
} // namespace anyprec

#undef _tile_zero // macros of gcc, where the compiler is allowed to use AMX
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig(config) anyprec::emulated::tiles().load_config(config)
#define _tile_release() anyprec::emulated::tiles().release()
#define _tile_zero(tile) anyprec::emulated::tiles().zero(tile)
#define _tile_loadd(tile, base, stride) anyprec::emulated::tiles().load(tile, base, stride)
#define _tile_stored(tile, base, stride) anyprec::emulated::tiles().store(tile, base, stride)
#define _tile_dpbusd(sums, codes, weights) anyprec::emulated::tiles().dpbusd(sums, codes, weights)
