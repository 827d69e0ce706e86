// Products of many rows on the wide matrix unit: clusters of two blocks with the same rows of x and neighbouring outputs.
//
// A block has two teams that multiply and one whose first wave copies. Each block of a cluster copies half of the rows of x to the
// LDS of both, so a step of x comes from memory once for two blocks. A cluster takes tiles in turn, every grid_x() / CLUSTER-th.
// Copies and weights for the next tile are on their way while the sums of the last one are written.
#pragma once
#include "wide.h"

#if HAS_WIDE_MATRIX && HAS_BULK_COPY

constexpr u32 CLUSTER = 2, CLUSTER_THREADS = (WAVES + Wide::TEAM) * WAVE;
// Registers of a thread that copies, and of one that multiplies. A thread of each team has 504 together, of 512 that a unit has.
constexpr u32 COPY_REGISTERS = 40, MULTIPLY_REGISTERS = 232;

// Steps of x in LDS: slots that are filled and emptied in turn.
template <u32 M> struct Slots {
    static constexpr u32 COUNT = WIDE_STAGES<M>;
    struct Barriers {
        CopyBarrier full[COUNT], empty[COUNT];
    };
    Barriers& barriers;
    f16* values;
    u32 slot, parity;

    DEV Slots(Barriers& barriers, f16* values) : barriers(barriers), values(values), slot(0), parity(0) {}
    // One thread of each block, before a barrier of the cluster.
    DEV static void begin(Barriers& barriers) {
        UNROLL for (u32 i = 0; i < COUNT; i++) {
            barriers.full[i].begin(1);
            barriers.empty[i].begin(CLUSTER * WAVES);
        }
    }
    DEV void next() {
        slot++;
        if (slot == COUNT) slot = 0, parity ^= 1;
    }

    // Copies this block's half of a step of x to both blocks. `from`: the step of the first rows, which has 8 * octets rows;
    // `stride` values lie between eight rows and the next. A wave of each block calls.
    DEV void fill(const f16* from, u32 octets, u32 stride) {
        barriers.empty[slot].wait(parity ^ 1);
        if (lane() == 0) barriers.full[slot].expect(octets * 2 * TILED_STEP);
        wave_sync();
        if (lane() < octets && lane() % CLUSTER == cluster_rank()) {
            copy_bulk_both_async(values + slot * WIDE_STEP<M> + lane() * TILED_STEP, from + u64(lane()) * stride, 2 * TILED_STEP,
                                 barriers.full[slot]);
        }
        wave_sync();
        next();
    }
    // The address of the next step, once it is there.
    DEV Wide::Address take() {
        barriers.full[slot].wait(parity);
        const Wide::Address at = Wide::address(values + slot * WIDE_STEP<M>);
        next();
        return at;
    }
    // The wave's products of the step that was taken BEFORE others are done.
    template <u32 BEFORE> DEV void empty() const {
        if (lane() < CLUSTER) barriers.empty[(slot + COUNT - 1 - BEFORE) % COUNT].arrive_in(lane());
    }
};

// The tiles of a product, and the blocks that take them.
struct ClusterTiles {
    Matrix m0, m1, m2;
    u32 tiles, steps, rows, down, all;

    DEV ClusterTiles(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 cols, u32 rows, u32 side)
        : m0(m0), m1(m1), m2(m2), tiles(Tile::count(m0, m1, m2)), steps(ceil_div(cols, STEP)), rows(rows), down(ceil_div(rows, side)),
          all(ceil_div(tiles, CLUSTER) * down) {}
    DEV static u32 first() { return block_x() / CLUSTER; }
    DEV static u32 stride() { return grid_x() / CLUSTER; }
    // Rows vary fastest: clusters at work share weights.
    DEV u32 row(u32 at) const { return at % down; }
    DEV u32 number(u32 at) const { return at / down * CLUSTER + block_x() % CLUSTER; }
    // An odd number of tiles leaves one without a partner: the last is computed twice, and written once.
    DEV bool is_real(u32 at) const { return number(at) < tiles; }
    DEV Tile tile(u32 at) const { return Tile(m0, m1, m2, min_u32(number(at), tiles - 1)); }
};

// Adds the sums of all steps. `loaded` has the weights of the first one; those of the next come while a step is multiplied.
template <class T, u32 M>
DEV void multiply_tile(Slots<M>& slots, const WideWeights<T>& weights, typename WideWeights<T>::Ahead& loaded, u32 steps,
                       WideSums<M>& sums) {
    // Two products run while the operands of the next two are made, in the other registers.
    u32 a[2][2][4];
    const auto multiply = [&](u32 q, Wide::Address rows) {
        Wide::begin(a[q % 2]);
        UNROLL for (u32 i = 0; i < 2; i++) sums.add(a[q % 2][i], rows, q / 2, q % 2 * 2 + i);
        Wide::end();
        Wide::wait<1>();
    };
    ROLLED for (u32 step = 0; step < steps; step++) {
        const bool more = step + 1 < steps;
        const typename WideWeights<T>::Now now(loaded, weights.group(step));
        if constexpr (!IS_FLOAT<T>) {
            if (more) loaded = weights.load(step + 1);
        }
        Wide::Address rows = {};
        UNROLL for (u32 q = 0; q < 4; q++) {
            now.operands(q, a[q % 2]);
            if (q == 0) rows = slots.take();
            // A chunk of the next step takes the place of the one that became operands: there are no registers for both.
            if constexpr (IS_FLOAT<T>) {
                if (more) weights.load_chunk(step + 1, q, loaded);
            }
            multiply(q, rows);
            if (q == 0 && step > 0) slots.template empty<1>();
        }
    }
}

template <u32 M> DEV void copy_tiles(Slots<M>& slots, const ClusterTiles& of, const f16* x) {
    ROLLED for (u32 at = of.first(); at < of.all; at += of.stride()) {
        const u32 first = of.row(at) * M, octets = ceil_div(min_u32(of.rows - first, M), 8);
        const f16* from = x + tiled_rows(first, of.steps);
        ROLLED for (u32 step = 0; step < of.steps; step++) {
            slots.fill(from + step * TILED_STEP, octets, of.steps * TILED_STEP);
        }
    }
}

template <class T, u32 M>
DEV void gemm_cluster(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 cols, const f16* x, const f32* x_scale, u32 rows,
                      u32 out_stride, u32 add) {
    LDS_DYNAMIC(f16, buffer);
    LDS(barriers, typename Slots<M>::Barriers);
    // Tiles begin at multiples of 1024 bytes.
    Slots<M> slots(barriers, buffer + Wide::to_tile(buffer) / 2);
    if (thread_id() == 0) Slots<M>::begin(barriers);
    Wide::publish();
    barrier_cluster();
    const ClusterTiles of(m0, m1, m2, cols, rows, M);
    if (wave() >= WAVES) {
        fewer_registers<COPY_REGISTERS>();
        wait_for_predecessor_alone();
        if (wave() == WAVES) copy_tiles<M>(slots, of, x);
    } else {
        more_registers<MULTIPLY_REGISTERS>();
        const auto weights_of = [&](const Tile& tile) { return WideWeights<T>(tile.matrix.w, tile.matrix.n, tile.first, cols); };
        u32 at = of.first();
        Tile tile = of.tile(at);
        WideWeights<T> weights = weights_of(tile);
        typename WideWeights<T>::Ahead loaded = weights.load(0);
        wait_for_predecessor_alone();
        ROLLED while (at < of.all) {
            WideSums<M> sums;
            sums.clear();
            multiply_tile<T, M>(slots, weights, loaded, of.steps, sums);
            const Neighbours which = {of.row(at) * M, of.is_real(at) ? rows - of.row(at) * M : 0};
            const Out<Neighbours> out = {tile.matrix.out, x_scale, tile.matrix.bias, which, tile.first, tile.matrix.n, out_stride, add};
            at += of.stride();
            if (at < of.all) {
                tile = of.tile(at);
                weights = weights_of(tile);
                loaded = weights.load(0);
            }
            Wide::wait<0>();
            slots.template empty<0>();
            sums.put(out);
        }
    }
    let_successor_start();
    // The other block may still arrive at barriers of this one.
    barrier_cluster();
}

#endif
