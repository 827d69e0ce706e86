// embed: x[m] = row ids[m] of a table on the device, as f32
//
// Shapes     table: rows x cols weights in planar form (quant/planes.h); ids: u32[M], each below `rows`; x: f32[M][cols]
// Variants   embed_<type>, type f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k mxfp4
// Requires   cols a multiple of the type's block; x 16-byte aligned
// Launch     grid = (ceil(cols / 8192), M), block = 256: a lane makes 32 values
// Exact      values equal ggml's dequantize_row_* to the bit
#include "prelude/prelude.h"
#include "common/activation.h"
#include "quant/floats.h"
#include "quant/types.h"

namespace embed {

template <class Type> DEV void quantised(const u8* table, const u32* ids, f32* x, u32 rows, u32 cols) {
    wait_for_predecessor();
    u32 of_row = block_x() * block_threads() + thread_id();
    if (of_row >= cols / 32) return;
    typename Type::View view = Type::view(table, (u64)rows * cols);
    u32 group = ids[block_y()] * (cols / 32) + of_row;
    Group decoded = Type::decode(Type::load(view, group), group);
    f32 value[32];
    group_values<Type>(decoded, value);
    f32* to = x + (u64)block_y() * cols + of_row * 32;
    UNROLL for (u32 i = 0; i < 32; i += 4) {
        store_four(to, i, 32, true, {{value[i], value[i + 1], value[i + 2], value[i + 3]}});
    }
}

template <class Type> DEV void floats(const u8* table, const u32* ids, f32* x, u32 cols) {
    wait_for_predecessor();
    u32 chunks = ceil_div(cols, Type::values);
    for (u32 i = 0; i < 32; i += Type::values) {
        u32 chunk = (block_x() * block_threads() + thread_id()) * (32 / Type::values) + i / Type::values;
        if (chunk >= chunks) return;
        f32 value[Type::values];
        Type::decode(Type::load(Type::view(table, 0), ids[block_y()] * chunks + chunk), value);
        f32* to = x + (u64)block_y() * cols;
        UNROLL for (u32 v = 0; v < Type::values; v++) {
            if (chunk * Type::values + v < cols) to[chunk * Type::values + v] = value[v];
        }
    }
}

} // namespace embed

#define EMBED(NAME, TYPE)                                                                                                      \
    KERNEL(256, NAME, const u8* table, const u32* ids, f32* x, u32 rows, u32 cols) {                                           \
        embed::quantised<TYPE>(table, ids, x, rows, cols);                                                                     \
    }
#define EMBED_FLOATS(NAME, TYPE)                                                                                               \
    KERNEL(256, NAME, const u8* table, const u32* ids, f32* x, [[maybe_unused]] u32 rows, u32 cols) {                           \
        embed::floats<TYPE>(table, ids, x, cols);                                                                              \
    }

EMBED_FLOATS(embed_f32, F32)
EMBED_FLOATS(embed_f16, F16)
EMBED_FLOATS(embed_bf16, BF16)
EMBED(embed_q8_0, Q8_0)
EMBED(embed_q4_0, Q4_0)
EMBED(embed_q4_1, Q4_1)
EMBED(embed_q5_0, Q5_0)
EMBED(embed_q5_1, Q5_1)
EMBED(embed_q4_k, Q4_K)
EMBED(embed_q5_k, Q5_K)
EMBED(embed_q6_k, Q6_K)
EMBED(embed_mxfp4, MXFP4)
