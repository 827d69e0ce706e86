// repack: planes[g] = group g of the file's blocks: the same bits, in planar form (quant/planes.h)
//
// Runs on the upload stream.
// Shapes     repack_<type>: groups first .. first + groups of a tensor of `weights` values, in whole blocks of the file, which
//            begin at `file`. A tensor may come in pieces
//            repack_rows: rows first .. first + rows of `row_bytes` each, which begin at `file`; each is padded with zeros to
//            a multiple of 16 bytes
// Variants   repack_<type>, type all of quant/list.h; repack_rows for float types
// Launch     grid = any width, block = 256: a lane moves one group, or 16 bytes of a row, at a time
// Alignment  any address for file; 16 bytes for planes
// Sums in    no sums: bits are moved
// Tolerance  0: equal values, and equal bits of the scales
// Reference  ggml's values and blocks (tests/golden/quant-blocks.bin) in tests/kernels/matmul/layout.rs
// Moves      the file's bytes in, as many out, of IQ and TQ1_0 up to 1.6 times (quant/planes.h), with padding; memory-bound, but for
//            codebooks
#include "quant/list.h"
#include "quant/repack_small.h"
#include "quant/repack_small_floats.h"

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
QUANT_TYPES(REPACK)

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
