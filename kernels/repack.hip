// From the file's bytes to the device's planes (quant/planes.h). Run on the upload stream; memory bound, changes no value.
//
// repack_t(file, planes, weights, first, groups)   quantised type t: groups `first .. first + groups` of a tensor of `weights`
//     values, whole file blocks whose bytes begin at `file`, any address. A tensor may come in pieces.
// repack_rows(file, planes, first, rows, row_bytes)   float types: rows `first .. first + rows` of `row_bytes` each, whose bytes
//     begin at `file`, any address; each is padded with zeros to a multiple of 16.
//
// 256 threads a block, any number of blocks.
#include "quant/repack.h"

template <class T> DEV void repack(const u8* file, u8* planes, u64 weights, u64 first, u64 groups) {
    constexpr u32 GROUPS = Repack<T>::BLOCK / 32;
    for (u64 i = u64(block_x()) * 256 + thread_id(); i < groups; i += u64(grid_x()) * 256) {
        Repack<T>::to_planes(file + i / GROUPS * Repack<T>::BYTES, planes, weights, first + i);
    }
}

#define REPACK(NAME, T)                                                                                                        \
    KERNEL(256, repack_##NAME, const u8* file, u8* planes, u64 weights, u64 first, u64 groups) {                              \
        wait_for_predecessor();                                                                                                \
        repack<T>(file, planes, weights, first, groups);                                                                       \
    }
REPACK(q8_0, Q8_0)
REPACK(q4_0, Q4_0)
REPACK(q4_1, Q4_1)
REPACK(q5_0, Q5_0)
REPACK(q5_1, Q5_1)
REPACK(mxfp4, MXFP4)
REPACK(q4_k, Q4_K)
REPACK(q5_k, Q5_K)
REPACK(q6_k, Q6_K)

KERNEL(256, repack_rows, const u8* file, u8* planes, u64 first, u64 rows, u64 row_bytes) {
    wait_for_predecessor();
    const u64 chunks = (row_bytes + 15) / 16;
    for (u64 i = u64(block_x()) * 256 + thread_id(); i < rows * chunks; i += u64(grid_x()) * 256) {
        const u64 row = i / chunks, chunk = i % chunks, left = row_bytes - 16 * chunk;
        const u8* from = file + row * row_bytes + 16 * chunk;
        u32 words[4] = {0, 0, 0, 0};
        UNROLL for (u32 b = 0; b < 16; b++) {
            if (b < left) words[b / 4] |= u32(from[b]) << (8 * (b % 4));
        }
        store16(planes + 16 * (first * chunks + i), {words[0], words[1], words[2], words[3]});
    }
}
