// Activations of up to M rows in LDS, a stretch of columns at a time, and their products with weights from registers.
//
// A tile is cut into *units*. A lane multiplies one unit at once: 32 columns of a quantised type, 8 or 4 of a float type. Each
// 16-byte part of a unit lies in an array of its own. Neighbouring lanes take neighbouring units and so read neighbouring
// 16-byte words: no bank conflicts.
//
// Rows past the last and units past a row's end are zeros: they add nothing, and no lane needs a branch.
#pragma once
#include "../quant/floats.h"
#include "../quant/types.h"

struct A8In {
    const u8* codes;   // i8 [rows][cols]
    const f32* scales; // [rows][cols / 32]
    const u32* sums;   // i16 pairs [rows][cols / 32]
};

// 8-bit activations: 20 KB for every M.
template <u32 M> struct A8Tile {
    static constexpr u32 UNITS = 512 / M;
    static constexpr bool LOADS_FIRST = true;
    using In = A8In;
    u32x4 low[M][UNITS], high[M][UNITS];
    f32 scale[M][UNITS];
    u32 sums[M][UNITS];

    // Fills `count` units from unit `first` of rows of `total` units; `rows` of the M rows exist, from row `row` of `in`.
    DEV void stage(const In& in, u32 row, u32 rows, u32 first, u32 count, u32 total) {
        ROLLED for (u32 i = thread_id(); i < 2 * count; i += 256) {
            UNROLL for (u32 m = 0; m < M; m += 4) stage_some<(M < 4 ? M : 4)>(in, m, row + m, rows - min_u32(m, rows), first, count, total, i);
        }
    }

    // Part i of rows m .. m + N: codes 16 i .., and scale and sums i. All its loads are issued before the first store waits.
    template <u32 N> DEV void stage_some(const In& in, u32 m, u32 row, u32 rows, u32 first, u32 count, u32 total, u32 i) {
        const u32 have = min_u32(count, total - first);
        u32x4 codes[N];
        f32 scales[N];
        u32 pairs[N];
        UNROLL for (u32 n = 0; n < N; n++) {
            const u64 start = u64(row + n) * total + first;
            const bool exists = n < rows;
            codes[n] = {0, 0, 0, 0};
            scales[n] = 0.0f;
            pairs[n] = 0;
            if (exists && i / 2 < have) codes[n] = load16(in.codes + start * 32 + i * 16);
            if (exists && i < have) {
                scales[n] = in.scales[start + i];
                pairs[n] = in.sums[start + i];
            }
        }
        UNROLL for (u32 n = 0; n < N; n++) {
            if (i % 2 == 0) low[m + n][i / 2] = codes[n];
            else high[m + n][i / 2] = codes[n];
            if (i < count) {
                scale[m + n][i] = scales[n];
                sums[m + n][i] = pairs[n];
            }
        }
    }

    // acc[r * M + m] += weights raw[r] (group `g` of its row) times unit `at` of row m.
    template <class T, u32 R> DEV void multiply(const typename T::Raw (&raw)[R], u32 g, u32 at, f32 (&acc)[R * M]) const {
        Group w[R];
        UNROLL for (u32 r = 0; r < R; r++) w[r] = T::decode(raw[r], g);
        UNROLL for (u32 m = 0; m < M; m++) {
            const u32x4 a = low[m][at], b = high[m][at];
            const f32 d = scale[m][at];
            const i32 sum_a = i32(i16(sums[m][at])), sum_b = i32(sums[m][at]) >> 16;
            UNROLL for (u32 r = 0; r < R; r++) {
                const i32* c = w[r].code;
                i32 dot_a = T::halves ? -OFFSET<T> * sum_a : 0, dot_b = T::halves ? -OFFSET<T> * sum_b : -OFFSET<T> * (sum_a + sum_b);
                dot_a = dot4(c[3], i32(a.w), dot4(c[2], i32(a.z), dot4(c[1], i32(a.y), dot4(c[0], i32(a.x), dot_a))));
                dot_b = dot4(c[7], i32(b.w), dot4(c[6], i32(b.z), dot4(c[5], i32(b.y), dot4(c[4], i32(b.x), dot_b))));
                if constexpr (HAS_HIGH<T>) {
                    static_assert(!T::halves);
                    const i32* h = w[r].high;
                    const i32 lower = dot4(h[3], i32(a.w), dot4(h[2], i32(a.z), dot4(h[1], i32(a.y), dot4(h[0], i32(a.x), 0))));
                    dot_a += DIGIT * dot4(h[7], i32(b.w), dot4(h[6], i32(b.z), dot4(h[5], i32(b.y), dot4(h[4], i32(b.x), lower))));
                }
                f32 part;
                if constexpr (T::halves) part = fma_f32(w[r].scale[1], f32(dot_b), w[r].scale[0] * f32(dot_a));
                else part = w[r].scale[0] * f32(dot_a + dot_b);
                if constexpr (T::affine && T::halves) part = fma_f32(w[r].min[0], f32(sum_a), fma_f32(w[r].min[1], f32(sum_b), part));
                else if constexpr (T::affine) part = fma_f32(w[r].min[0], f32(sum_a + sum_b), part);
                acc[r * M + m] = fma_f32(d, part, acc[r * M + m]);
            }
        }
    }
};

struct F32In {
    const f32* x; // [rows][stride]
    u32 cols, stride;
};

// f32 activations in units of VALUES columns: 32 KB for every M.
template <u32 VALUES, u32 M> struct F32Tile {
    static constexpr u32 UNITS = 8192 / VALUES / M;
    // On gfx942 a pass of f16 weights would wait for two loads instead of one.
    static constexpr bool LOADS_FIRST = false;
    using In = F32In;
    f32x4 x[M][VALUES / 4][UNITS];

    DEV void stage(const In& in, u32 row, u32 rows, u32 first, u32 count, u32) {
        UNROLL for (u32 m = 0; m < M; m++) {
            const f32* from = in.x + u64(row + m) * in.stride;
            const bool aligned = in.stride % 4 == 0;
            ROLLED for (u32 i = thread_id(); i < count * (VALUES / 4); i += 256) {
                const u32 col = first * VALUES + 4 * i;
                f32x4 v = {0.0f, 0.0f, 0.0f, 0.0f};
                if (m < rows && col < in.cols) {
                    if (aligned && col + 4 <= in.cols) {
                        const u32x4 words = load16(from + col);
                        v = {as_f32(words.x), as_f32(words.y), as_f32(words.z), as_f32(words.w)};
                    } else {
                        v.x = from[col];
                        if (col + 1 < in.cols) v.y = from[col + 1];
                        if (col + 2 < in.cols) v.z = from[col + 2];
                        if (col + 3 < in.cols) v.w = from[col + 3];
                    }
                }
                x[m][i % (VALUES / 4)][i / (VALUES / 4)] = v;
            }
        }
    }

    template <class T, u32 R> DEV void multiply(const typename T::Raw (&raw)[R], u32 g, u32 at, f32 (&acc)[R * M]) const {
        f32 w[R][VALUES];
        UNROLL for (u32 r = 0; r < R; r++) {
            if constexpr (VALUES == 32) group_values<T>(T::decode(raw[r], g), w[r]);
            else T::decode(raw[r], w[r]);
        }
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 p = 0; p < VALUES / 4; p++) {
                const f32x4 v = x[m][p][at];
                UNROLL for (u32 r = 0; r < R; r++) {
                    f32& sum = acc[r * M + m];
                    sum = fma_f32(w[r][4 * p], v.x, sum);
                    sum = fma_f32(w[r][4 * p + 1], v.y, sum);
                    sum = fma_f32(w[r][4 * p + 2], v.z, sum);
                    sum = fma_f32(w[r][4 * p + 3], v.w, sum);
                }
            }
        }
    }
};
