// What a block of gemm has, on either matrix unit: its rows, its weights as operands, its results and the sums of its splits.
#pragma once
#include "../quant/floats.h"
#include "../quant/types.h"

#if HAS_MATRIX_UNIT

constexpr u32 STEP = 128, GROUPS = STEP / 32, TILE = 128, WAVES = 256 / WAVE;
// Tiles of 16 outputs of a wave.
constexpr u32 ACROSS = TILE / 16 / WAVES;

struct Matrix {
    const u8* w;
    const f32* bias;
    u32 n;
    f32* out;
};

// The matrix of a block, and its first output there. A grid may be too wide: then that is past the last one.
struct Tile {
    Matrix matrix;
    u32 first;

    DEV static u32 count(const Matrix& m0, const Matrix& m1, const Matrix& m2) {
        return ceil_div(m0.n, TILE) + ceil_div(m1.n, TILE) + ceil_div(m2.n, TILE);
    }
    DEV Tile(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 number) {
        const u32 end0 = ceil_div(m0.n, TILE), end1 = end0 + ceil_div(m1.n, TILE);
        matrix = number < end0 ? m0 : number < end1 ? m1 : m2;
        first = (number - (number < end0 ? 0 : number < end1 ? end0 : end1)) * TILE;
    }
};

// The rows of a block: neighbours.
struct Neighbours {
    static constexpr bool ARE_NEIGHBOURS = true;
    u32 first, count;
    DEV u32 from(u32 r) const { return first + r; }
    DEV u32 to(u32 r) const { return first + r; }
};

// The rows of a block: pairs of a row and an expert.
struct Pairs {
    static constexpr bool ARE_NEIGHBOURS = false;
    const u32* pair; // in LDS
    u32 count, slots;
    DEV u32 from(u32 r) const { return pair[r] / slots; }
    DEV u32 to(u32 r) const { return pair[r]; }
};

// The groups of a lane in one pass, as loaded. Operand: Strip or Wide, which say what a lane holds.
template <class T, class Operand> struct Loaded {
    typename T::Raw raw[ACROSS][Operand::HELD];
};

// The weight rows of a lane: row held(h) of 16 in each of the wave's tiles. The block's first row is the same for all lanes, and
// the rest fits 32 bits: a load takes few registers.
template <class T, class Operand> struct LaneWeights {
    static constexpr u32 HELD = Operand::HELD;
    typename T::View block;
    u32 row[ACROSS][HELD], groups;

    DEV LaneWeights(const u8* planes, u32 n, u32 first, u32 cols)
        : block(T::from(T::view(planes, u64(n) * cols), first * (cols / 32))), groups(cols / 32) {
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) {
                row[j][h] = min_u32((wave() * ACROSS + j) * 16 + Operand::held(h), n - 1 - first) * groups;
            }
        }
    }
    // The lane's group in a pass. Passes are counted through all steps.
    DEV static u32 group(u32 pass) { return pass * Operand::K_LANES + Operand::k_lane(); }
    DEV Loaded<T, Operand> load(u32 pass) const {
        Loaded<T, Operand> loaded;
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) loaded.raw[j][h] = T::load(block, row[j][h] + min_u32(group(pass), groups - 1));
        }
        return loaded;
    }
};

// Codes as bytes from 0 on, and what they then exceed the codes by.
template <class T> constexpr u32 FLIP = T::negative ? 0x80808080u : 0;
template <class T> constexpr i32 LESS = T::offset + (T::negative ? 128 : 0);

// Whether values may be past f16's range, finite though they are: of this lane, and of any lane of the wave.
struct Large {
    bool mine, any;
};

// A group for `decode_word`. Two digits would take too many registers.
template <class T> DEV Group decode_for_words(const typename T::Raw& raw, u32 g) {
    if constexpr (HAS_HIGH<T>) return T::decode_floats(raw);
    else return T::decode(raw, g);
}

// Says so of these groups: |code - offset| is at most 128, and a float at most T::most. Brings their scales and minimums into the range then.
template <class T, u32 COUNT> DEV Large limit_groups(Group (&groups)[COUNT]) {
    f32 most = 0.0f, code = 128.0f;
    if constexpr (HAS_HIGH<T>) code = T::most;
    UNROLL for (u32 i = 0; i < COUNT; i++) {
        const Group& group = groups[i];
        const f32 scale = T::halves ? max_f32(abs_f32(group.scale[0]), abs_f32(group.scale[1])) : abs_f32(group.scale[0]);
        const f32 min = T::halves ? max_f32(abs_f32(group.min[0]), abs_f32(group.min[1])) : abs_f32(group.min[0]);
        most = max_f32(most, fma_f32(code, scale, min));
    }
    const bool mine = most > 65000.0f && most < INFINITY_F32;
    const Large large = {mine, any(mine)};
    if (large.any) {
        UNROLL for (u32 i = 0; i < COUNT; i++) {
            groups[i].scale[0] = within_f16(groups[i].scale[0]);
            groups[i].scale[1] = within_f16(groups[i].scale[1]);
            groups[i].min[0] = within_f16(groups[i].min[0]);
            groups[i].min[1] = within_f16(groups[i].min[1]);
        }
    }
    return large;
}

// The scale of half a group, and its minimum, twice each in f16.
struct Factors {
    u32 scales, mins;
};
template <class T> DEV Factors factors(const Group& group, u32 half) {
    const f32 scale = group.scale[half];
    return {pack_f16x2(scale, scale), T::affine ? pack_f16x2(group.min[half], group.min[half]) : 0};
}

// Word w of a group's codes, four of them, in f16: code * scale + min, rounded once.
template <class T> DEV void decode_word(const Group& group, u32 w, const Factors& by, u32 (&words)[2]) {
    UNROLL for (u32 b = 0; b < 2; b++) {
        u32 codes;
        if constexpr (HAS_HIGH<T>) codes = T::floats_f16x2(u32(group.code[w]), 2 * b);
        else codes = bytes_f16x2<LESS<T>>(u32(group.code[w]) ^ FLIP<T>, 2 * b);
        words[b] = fma_f16x2(codes, by.scales, by.mins);
    }
}

template <class Which> struct Out {
    f32* p;
    const f32 *scale, *bias;
    Which which;
    u32 first, n, stride, add;

    // Writes some sums, each of a row and an output. All loads come before the first store.
    template <u32 COUNT> DEV void put(const u32 (&r)[COUNT], const u32 (&o)[COUNT], const f32 (&sums)[COUNT]) const {
        f32 by[COUNT], old[COUNT];
        UNROLL for (u32 i = 0; i < COUNT; i++) by[i] = r[i] < which.count ? scale[which.from(r[i])] : 0.0f;
        if (add != 0) {
            UNROLL for (u32 i = 0; i < COUNT; i++) {
                const bool real = r[i] < which.count && first + o[i] < n;
                old[i] = real ? p[u64(which.to(r[i])) * stride + first + o[i]] : 0.0f;
            }
        }
        UNROLL for (u32 i = 0; i < COUNT; i++) {
            if (r[i] >= which.count || first + o[i] >= n) continue;
            f32 v = by[i] * sums[i];
            if (bias != nullptr) v += bias[first + o[i]];
            if (add != 0) v += old[i];
            p[u64(which.to(r[i])) * stride + first + o[i]] = v;
        }
    }
    // The same of some outputs of some rows.
    template <u32 ROWS, u32 COUNT> DEV void put(const u32 (&r)[ROWS], const u32 (&o)[COUNT], const f32 (&sums)[ROWS][COUNT]) const {
        f32 by[ROWS], old[ROWS][COUNT];
        UNROLL for (u32 k = 0; k < ROWS; k++) by[k] = r[k] < which.count ? scale[which.from(r[k])] : 0.0f;
        if (add != 0) {
            UNROLL for (u32 k = 0; k < ROWS; k++) {
                UNROLL for (u32 i = 0; i < COUNT; i++) {
                    const bool real = r[k] < which.count && first + o[i] < n;
                    old[k][i] = real ? p[u64(which.to(r[k])) * stride + first + o[i]] : 0.0f;
                }
            }
        }
        UNROLL for (u32 k = 0; k < ROWS; k++) {
            UNROLL for (u32 i = 0; i < COUNT; i++) {
                if (r[k] >= which.count || first + o[i] >= n) continue;
                f32 v = by[k] * sums[k][i];
                if (bias != nullptr) v += bias[first + o[i]];
                if (add != 0) v += old[k][i];
                p[u64(which.to(r[k])) * stride + first + o[i]] = v;
            }
        }
    }
};

template <u32 M> struct Splits {
    f32* parts;
    u32* counters;

    // The place of this thread's first four sums of a split; the next four of all threads follow. A tile's splits lie side by side.
    DEV f32* of(u32 split) const {
        return parts + (u64(block_y() * grid_x() + block_x()) * grid_z() + split) * M * TILE + 4 * thread_id();
    }
    // The whole block calls. `sums` are those of this block.
    template <class Sums, class Which> DEV void join(Sums& sums, const Out<Which>& out) const {
        constexpr u32 FOURS = Sums::COUNT / 4, STRIDE = 4 * 256;
        static_assert(Sums::COUNT * 256 == M * TILE, "a thread has whole fours");
        f32* mine = of(block_z());
        UNROLL for (u32 i = 0; i < FOURS; i++) {
            store16(mine + STRIDE * i, {as_u32(sums.at(4 * i)), as_u32(sums.at(4 * i + 1)), as_u32(sums.at(4 * i + 2)),
                                        as_u32(sums.at(4 * i + 3))});
        }
        if (!last_block(counters + block_y() * grid_x() + block_x(), grid_z())) return;
        // Loads of some splits are in flight together, in 64 registers: one after the other, eight splits take eight latencies.
        constexpr u32 EACH = FOURS < 8 ? FOURS : 8, TOGETHER = 16 / EACH;
        UNROLL for (u32 begin = 0; begin < FOURS; begin += EACH) {
            f32 all[4 * EACH];
            UNROLL for (u32 i = 0; i < 4 * EACH; i++) all[i] = 0.0f;
            ROLLED for (u32 split = 0; split < grid_z(); split += TOGETHER) {
                u32x4 four[TOGETHER][EACH];
                UNROLL for (u32 s = 0; s < TOGETHER; s++) {
                    const f32* from = of(min_u32(split + s, grid_z() - 1)) + STRIDE * begin;
                    UNROLL for (u32 i = 0; i < EACH; i++) four[s][i] = load16(from + STRIDE * i);
                }
                UNROLL for (u32 s = 0; s < TOGETHER; s++) {
                    if (split + s >= grid_z()) break;
                    UNROLL for (u32 i = 0; i < EACH; i++) {
                        all[4 * i] += as_f32(four[s][i].x);
                        all[4 * i + 1] += as_f32(four[s][i].y);
                        all[4 * i + 2] += as_f32(four[s][i].z);
                        all[4 * i + 3] += as_f32(four[s][i].w);
                    }
                }
            }
            UNROLL for (u32 i = 0; i < 4 * EACH; i++) sums.set_at(4 * begin + i, all[i]);
        }
        sums.put(out);
    }
};

#endif
