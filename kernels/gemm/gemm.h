// gemm: out[row][o] = x_scale[row] * sum over i < cols of x[row][i] * f16(w[o][i]) (+ bias[o]) (+ out[row][o] where add is 1)
//
// For more rows than gemv reads weights once for, and fewer than pay for writing expanded weights to memory: weights go from
// their planes to the matrix unit's operands in registers. GEMM_QUANT(t, T) makes the entry points of weight type t.
// gemm_experts multiplies the rows that chose an expert with its matrices, tile by tile of group_pairs.
// Shapes     gemm_t_x16_m(w0, w1, w2, n0, n1, n2, bias0, bias1, bias2, cols, x, x_stride, x_scale, rows, out, out_stride, add,
//            parts, counters)
//            Up to three matrices that share an input: n_i rows of planes at w_i (quant/planes.h), `cols` inputs (0 rows: no
//            matrix). Outputs over the rows of w0, then w1, then w2 go to out[row * out_stride + o]. A null bias adds nothing
//            x: f16[rows][x_stride]; x_scale: f32[rows]
//            parts: f32[blocks][m][128], not read before it is written, and counters: u32[grid x * grid y], zeros before and
//            after; both unused, and may be null, where grid z is 1
//            gemm_experts_t_x16_m(table0, table1, tiles, members, n, cols, x, x_stride, x_scale, slots, out, out_stride)
//            tiles: u32[grid y][4] and members as group_pairs writes them for tiles of m. Pair p, of row p / slots of x and
//            an expert, gets the n outputs of the matrix at table0[expert] and, where table1 is not null, n more of the one
//            at table1[expert], at out[p * out_stride ..]. A tile without members, or of an expert at address 0, writes
//            nothing
// Variants   m: rows of a block, 16, 32 or 64. Only for targets with a matrix unit
// Requires   cols a multiple of the type's block
// Launch     grid = (tiles of 128 outputs of one matrix, ceil(rows / m), splits), block = 256. Split z sums the z-th run of
//            ceil(steps / splits) steps of 128 inputs; the last block of a tile to end adds up its splits in order
//            gemm_experts: grid = (tiles of 128 outputs of both matrices, tiles of pairs), block = 256
// Alignment  16 bytes for planes and x; x_stride is a multiple of 8
// Sums in    f32: a split's steps in order, within a step as the matrix unit adds; then the splits in order. A row's bits
//            depend on the splits, but not on m, on the other rows or on the other grid dimensions
// Tolerance  |got - want| <= 2e-6 * sum of the terms' magnitudes + 1e-30; all variants give the same bits. Q4_K, Q5_K and
//            Q6_K round scales and minimums to f16 too: + 2^-12 * sum of |x| * (3 |w| + 2 * 63 |dmin|)
// Reference  f64 sums over ggml's values rounded to f16 in tests/kernels/matmul/gemm_quant.rs
// Moves      every weight once per block row, or tile of an expert, 17 to 34 bytes per 32; 256 * cols * m bytes of x per tile from a cache; twice
//            512 * m bytes of parts per block where grid z is above 1; memory-bound for few rows
#pragma once
#include "../quant/types.h"

#if HAS_MATRIX_UNIT

constexpr u32 STEP = 128, GROUPS = STEP / 32, TILE = 128, WAVES = 256 / WAVE;
// Tiles of 16 outputs of a wave. A step has so many passes; in each, a lane decodes one group of each of its weight rows.
constexpr u32 ACROSS = TILE / 16 / WAVES, PASSES = GROUPS / Strip::K_LANES, HELD = Strip::HELD;

// M rows of x in LDS, for one step, in parts of 16 bytes. Part q of group t of a row is part 4 q + t; every other row swaps
// parts with those 4 away. So lanes that read one part of four groups of two rows find eight different banks.
template <u32 M> struct Rows {
    f16 v[M * STEP];
    DEV f16* part(u32 row, u32 group, u32 q) { return v + row * STEP + ((4 * q + group) ^ (row % 2 * 4)) * 8; }
};

// The rows of a block: neighbours.
struct Neighbours {
    u32 first, count;
    DEV u32 from(u32 r) const { return first + r; }
    DEV u32 to(u32 r) const { return first + r; }
};

// The rows of a block: pairs of a row and an expert.
struct Pairs {
    const u32* pair; // in LDS
    u32 count, slots;
    DEV u32 from(u32 r) const { return pair[r] / slots; }
    DEV u32 to(u32 r) const { return pair[r]; }
};

template <u32 M> struct Input {
    // Of each row of which the thread copies a part: that part of the first step.
    const f16* part[M / 16];
    u32 groups;

    // The block's rows: the first M of `which`, or as many as there are, the last one again and again.
    template <class Which> DEV Input(const f16* x, u32 stride, u32 groups, const Which& which) : groups(groups) {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            const u32 r = min_u32(thread_id() / 16 + 16 * i, which.count - 1);
            part[i] = x + u64(which.from(r)) * stride + group() * 32 + quarter() * 8;
        }
    }
    // Neighbouring threads fill neighbouring banks.
    DEV static u32 group() { return thread_id() % 4; }
    DEV static u32 quarter() { return thread_id() / 4 % 4; }

    // Copies a step into LDS; zeros past the last group.
    DEV void stage(Rows<M>& to, u32 step) const {
        const bool is_there = step * GROUPS + group() < groups;
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            f16* at = to.part(thread_id() / 16 + 16 * i, group(), quarter());
            const f16* from = part[i] + u64(step) * STEP;
#if HAS_ASYNC_COPY
            if (is_there) copy16_async(at, from);
#else
            if (is_there) store16(at, load16(from));
#endif
            else store16(at, {0, 0, 0, 0});
        }
    }
};

// The groups of a lane in one pass, as loaded.
template <class T> struct Loaded {
    typename T::Raw raw[ACROSS][HELD];
};

// The weight rows of a lane: row held(h) of 16 in each of the wave's tiles.
template <class T> struct Weights {
    typename T::View row[ACROSS][HELD];
    u32 groups;

    DEV Weights(const u8* planes, u32 n, u32 first, u32 groups) : groups(groups) {
        const typename T::View view = T::view(planes, u64(n) * groups * 32);
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) {
                row[j][h] = T::from(view, min_u32(first + (wave() * ACROSS + j) * 16 + Strip::held(h), n - 1) * groups);
            }
        }
    }
    // The lane's group in a pass. Passes are counted through all steps.
    DEV static u32 group(u32 pass) { return pass * Strip::K_LANES + Strip::k_lane(); }
    DEV Loaded<T> load(u32 pass) const {
        Loaded<T> loaded;
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) loaded.raw[j][h] = T::load(row[j][h], min_u32(group(pass), groups - 1));
        }
        return loaded;
    }
};

// Codes as bytes from 0 on, and what they then exceed the codes by.
template <class T> constexpr u32 FLIP = T::negative ? 0x80808080u : 0;
template <class T> constexpr i32 LESS = T::offset + (T::negative ? 128 : 0);

// Four weights, word w of a group, in f32.
template <class T> DEV void four_values(const Group& group, u32 w, f32 (&v)[4]) {
    UNROLL for (u32 b = 0; b < 4; b++) {
        const f32 code = f32(i32(byte_u8(u32(group.code[w]) ^ FLIP<T>, b)) - LESS<T>);
        v[b] = T::affine ? fma_f32(group.scale[0], code, group.min) : group.scale[w / 4] * code;
    }
}

// Half `half` of a group. Two weights at a time in f16: code * scale + min, rounded once.
template <class T> DEV void decode_half(const Group& group, u32 half, u32x4 (&out)[2]) {
    const f32 scale = group.scale[half];
    const u32 scales = pack_f16x2(scale, scale), mins = T::affine ? pack_f16x2(group.min, group.min) : 0;
    u32 words[8];
    UNROLL for (u32 i = 0; i < 4; i++) {
        const u32 codes = u32(group.code[4 * half + i]) ^ FLIP<T>;
        UNROLL for (u32 b = 0; b < 2; b++) words[2 * i + b] = fma_f16x2(bytes_f16x2<LESS<T>>(codes, 2 * b), scales, mins);
    }
    // |code - offset| is at most 128. A group that may exceed f16, or holds no numbers, is rare.
    const f32 most = fma_f32(128.0f, abs_f32(scale), abs_f32(group.min));
    if (!(most <= 65000.0f)) {
        UNROLL for (u32 i = 0; i < 4; i++) {
            f32 v[4];
            four_values<T>(group, 4 * half + i, v);
            words[2 * i] = pack_f16x2(within_f16(v[0]), within_f16(v[1]));
            words[2 * i + 1] = pack_f16x2(within_f16(v[2]), within_f16(v[3]));
        }
    }
    UNROLL for (u32 c = 0; c < 2; c++) out[c] = {words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]};
}

template <u32 M> struct Sums {
    Frag::C c[M / 16][ACROSS];

    DEV void clear() {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Frag::zero();
        }
    }
    template <class T> DEV void add(Rows<M>& x, const Weights<T>& weights, const Loaded<T>& loaded, u32 pass) {
        const u32 g = weights.group(pass);
        Group group[ACROSS][HELD];
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) {
                group[j][h] = T::decode(loaded.raw[j][h], g);
                if (g >= weights.groups) group[j][h].scale[0] = group[j][h].scale[1] = group[j][h].min = 0.0f;
            }
        }
        UNROLL for (u32 half = 0; half < 2; half++) {
            Strip w[ACROSS];
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                UNROLL for (u32 h = 0; h < HELD; h++) decode_half<T>(group[j][h], half, w[j].v[h]);
            }
            UNROLL for (u32 i = 0; i < M / 16; i++) {
                Strip a;
                UNROLL for (u32 h = 0; h < HELD; h++) {
                    UNROLL for (u32 q = 0; q < 2; q++) a.v[h][q] = load16(x.part(16 * i + Strip::held(h), g % GROUPS, 2 * half + q));
                }
                UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Strip::mma(a, w[j], c[i][j]);
            }
        }
    }
    // Calls f(row, output, sum) for all of the lane's sums.
    template <class F> DEV void each(F f) const {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
                    f(16 * i + Frag::C::row(l), (wave() * ACROSS + j) * 16 + Frag::C::col(l), c[i][j].get(l));
                }
            }
        }
    }
};

template <class Which> struct Out {
    f32* p;
    const f32 *scale, *bias;
    Which which;
    u32 first, n, stride, add;

    DEV void put(u32 r, u32 o, f32 sum) const {
        if (r >= which.count || first + o >= n) return;
        f32* at = p + u64(which.to(r)) * stride + first + o;
        f32 v = scale[which.from(r)] * sum;
        if (bias != nullptr) v += bias[first + o];
        if (add != 0) v += *at;
        *at = v;
    }
};

// Adds the sums of steps `begin` .. `end`. Weights come two passes ahead of their use, x one step.
template <class T, u32 M>
DEV void multiply(Rows<M> (&stages)[2], const Input<M>& input, const Weights<T>& weights, u32 begin, u32 end, Sums<M>& sums) {
    u32 pass = begin * PASSES;
    const u32 passes = end * PASSES;
    Loaded<T> one = weights.load(pass), two = weights.load(min_u32(pass + 1, passes - 1));
    wait_for_predecessor_alone();
    input.stage(stages[begin % 2], begin);
    const auto turn = [&](Loaded<T>& loaded) {
        const u32 step = pass / PASSES;
        if (pass % PASSES == 0) {
#if HAS_ASYNC_COPY
            end_copies();
            wait_copies<0>();
#endif
            // All threads have filled this stage, and have read the other one.
            barrier_lds();
            if (step + 1 < end) input.stage(stages[(step + 1) % 2], step + 1);
        }
        const Loaded<T> current = loaded;
        loaded = weights.load(min_u32(pass + 2, passes - 1));
        sums.add(stages[step % 2], weights, current, pass);
        pass++;
    };
    ROLLED while (pass < passes) {
        turn(one);
        if (PASSES > 1 || pass < passes) turn(two);
    }
}

template <u32 M> struct Splits {
    f32* parts;
    u32* counters;

    // The place of a block's sums. A tile's splits lie side by side.
    DEV f32* of(u32 split) const {
        return parts + (u64(block_y() * grid_x() + block_x()) * grid_z() + split) * M * TILE;
    }
    template <class Which> DEV void join(const Sums<M>& sums, const Out<Which>& out) const {
        f32* mine = of(block_z());
        sums.each([&](u32 r, u32 o, f32 sum) { mine[r * TILE + o] = sum; });
        if (!last_block(counters + block_y() * grid_x() + block_x(), grid_z())) return;
        // Four sums at a time; all loads of a split are in flight together.
        constexpr u32 FOURS = M * TILE / 1024;
        f32 all[FOURS][4];
        UNROLL for (u32 i = 0; i < FOURS; i++) {
            UNROLL for (u32 e = 0; e < 4; e++) all[i][e] = 0.0f;
        }
        ROLLED for (u32 split = 0; split < grid_z(); split++) {
            const f32* from = of(split) + 4 * thread_id();
            u32x4 four[FOURS];
            UNROLL for (u32 i = 0; i < FOURS; i++) four[i] = load16(from + 1024 * i);
            UNROLL for (u32 i = 0; i < FOURS; i++) {
                all[i][0] += as_f32(four[i].x);
                all[i][1] += as_f32(four[i].y);
                all[i][2] += as_f32(four[i].z);
                all[i][3] += as_f32(four[i].w);
            }
        }
        UNROLL for (u32 i = 0; i < FOURS; i++) {
            const u32 at = 4 * thread_id() + 1024 * i;
            UNROLL for (u32 e = 0; e < 4; e++) out.put(at / TILE, at % TILE + e, all[i][e]);
        }
    }
};

struct Matrix {
    const u8* w;
    const f32* bias;
    u32 n;
    f32* out;
};

template <class T, u32 M>
DEV void gemm(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 cols, const f16* x, u32 x_stride, const f32* x_scale,
              u32 rows, u32 out_stride, u32 add, const Splits<M>& splits) {
    LDS(stages, Rows<M>[2]);
    const u32 end0 = ceil_div(m0.n, TILE), end1 = end0 + ceil_div(m1.n, TILE);
    const bool in0 = block_x() < end0, in1 = block_x() < end1;
    const u32 first = (block_x() - (in0 ? 0 : in1 ? end0 : end1)) * TILE, n = in0 ? m0.n : in1 ? m1.n : m2.n;
    // Of a grid that is too wide.
    if (first >= n) return;
    const u8* w = in0 ? m0.w : in1 ? m1.w : m2.w;
    const u32 groups = cols / 32, steps = ceil_div(groups, GROUPS), each = ceil_div(steps, grid_z());
    const u32 begin = min_u32(block_z() * each, steps), end = min_u32(begin + each, steps);
    const Neighbours which = {block_y() * M, rows - block_y() * M};
    const Input<M> input(x, x_stride, groups, which);
    const Out<Neighbours> out = {in0 ? m0.out : in1 ? m1.out : m2.out, x_scale, in0 ? m0.bias : in1 ? m1.bias : m2.bias,
                                 which, first, n, out_stride, add};
    Sums<M> sums;
    sums.clear();
    if (begin < end) multiply<T, M>(stages, input, Weights<T>(w, n, first, groups), begin, end, sums);
    else wait_for_predecessor_alone();
    if (grid_z() == 1) sums.each([&](u32 r, u32 o, f32 sum) { out.put(r, o, sum); });
    else splits.join(sums, out);
}

template <class T, u32 M>
DEV void gemm_experts(const u64* table0, const u64* table1, const u32* tiles, const u32* members, u32 n, u32 cols, const f16* x,
                      u32 x_stride, const f32* x_scale, u32 slots, f32* out, u32 out_stride) {
    LDS(stages, Rows<M>[2]);
    LDS(pairs, u32[M]);
    wait_for_predecessor_alone();
    const u32* tile = tiles + 4 * block_y();
    const u32 expert = tile[0], member = tile[1], count = tile[2];
    const u32 across = ceil_div(n, TILE), first = block_x() % across * TILE;
    const u64* table = block_x() < across ? table0 : table1;
    // Of a grid that is too wide; of no expert; of one that is not there.
    if (block_x() >= (table1 == nullptr ? across : 2 * across) || count == 0 || table[expert] == 0) return;
    if (thread_id() < M) pairs[thread_id()] = members[member + min_u32(thread_id(), count - 1)];
    barrier_lds();
    const Pairs which = {pairs, count, slots};
    const u32 groups = cols / 32, steps = ceil_div(groups, GROUPS);
    Sums<M> sums;
    sums.clear();
    multiply<T, M>(stages, Input<M>(x, x_stride, groups, which),
                   Weights<T>(global_address<const u8>(table[expert]), n, first, groups), 0, steps, sums);
    const Out<Pairs> to = {out + (table == table0 ? 0 : n), x_scale, nullptr, which, first, n, out_stride, 0};
    sums.each([&](u32 r, u32 o, f32 sum) { to.put(r, o, sum); });
}

#define GEMM_ROWS(NAME, T, M)                                                                                                  \
    KERNEL_TWICE(256, gemm_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2, const f32* bias0,     \
           const f32* bias1, const f32* bias2, u32 cols, const f16* x, u32 x_stride, const f32* x_scale, u32 rows, f32* out,   \
           u32 out_stride, u32 add, f32* parts, u32* counters) {                                                               \
        gemm<T, M>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0}, {w2, bias2, n2, out + n0 + n1}, cols, x, x_stride, x_scale,\
                   rows, out_stride, add, {parts, counters});                                                                  \
    }
#define GEMM_EXPERTS(NAME, T, M)                                                                                               \
    KERNEL_TWICE(256, gemm_experts_##NAME##_x16_##M, const u64* table0, const u64* table1, const u32* tiles, const u32* members,     \
           u32 n, u32 cols, const f16* x, u32 x_stride, const f32* x_scale, u32 slots, f32* out, u32 out_stride) {             \
        gemm_experts<T, M>(table0, table1, tiles, members, n, cols, x, x_stride, x_scale, slots, out, out_stride);             \
    }
#define GEMM_QUANT(NAME, T)                                                                                                    \
    GEMM_EXPERTS(NAME, T, 16)                                                                                                  \
    GEMM_EXPERTS(NAME, T, 32)                                                                                                  \
    GEMM_EXPERTS(NAME, T, 64)                                                                                                  \
    GEMM_ROWS(NAME, T, 16)                                                                                                     \
    GEMM_ROWS(NAME, T, 32)                                                                                                     \
    GEMM_ROWS(NAME, T, 64)

#else
#define GEMM_QUANT(NAME, T)
#endif
