// Products on the wide matrix unit (prelude.h): weights in registers, and M rows of x in LDS that all waves share.
#pragma once
#include "../common/tiled.h"
#include "tile.h"

#if HAS_WIDE_MATRIX

// Steps of x in LDS: slots. A step is copied while two others may still be read.
template <u32 M> constexpr u32 WIDE_STAGES = M >= 256 ? 3 : 4;
// Values of x in a step, of M rows.
template <u32 M> constexpr u32 WIDE_STEP = M * STEP;

// Copies steps of x to LDS, each thread some parts of 16 bytes. Rows may lie anywhere.
template <u32 M, class Which> struct PartFeed {
    static constexpr u32 STAGES = WIDE_STAGES<M>, AHEAD = STAGES - 2;
    const f16* x;
    Which which;
    u32 steps, end;
    f16* stages;

    DEV PartFeed(const f16* x, const Which& which, u32 steps, f16* stages) : x(x), which(which), steps(steps), stages(stages) {}

    DEV void copy(u32 to, u32 step) const {
        const u32 part = thread_id() % 8, half = thread_id() / 8 % 2;
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            const u32 r = thread_id() / 16 + 16 * i, from = which.from(min_u32(r, which.count - 1));
            f16* at = stages + to * WIDE_STEP<M> + r / 8 * TILED_STEP + half * TILED_HALF + tiled_part(r, part);
            copy16_async(at, x + tiled_rows(from, steps) + step * TILED_STEP + half * TILED_HALF + tiled_part(from, part));
        }
    }
    DEV void begin(u32 first, u32 last) {
        end = last;
        UNROLL for (u32 i = 0; i < AHEAD; i++) {
            if (first + i < end) copy(i, first + i);
            end_copies();
        }
    }
    // The address of a step, once it is there.
    DEV Wide::Address wait(u32 slot, u32 step) {
        wait_copies<AHEAD - 1>();
        Wide::publish();
        // All threads have filled this slot, and all products of the step before the last are done.
        barrier_lds();
        if (step + AHEAD < end) copy((slot + AHEAD) % STAGES, step + AHEAD);
        end_copies();
        return Wide::address(stages + slot * WIDE_STEP<M>);
    }
    // This thread's products of the step before `step`, which is in `slot`, are done.
    DEV void done_before(u32, u32) {}
    // All slots were used.
    DEV void turn() {}
};

#if HAS_BULK_COPY
// Copies steps of neighbouring rows to LDS, eight rows at a time. The first wave starts the copies.
template <u32 M> struct BulkFeed {
    static constexpr u32 STAGES = WIDE_STAGES<M>;
    struct Barriers {
        CopyBarrier full[STAGES], empty[STAGES];
    };
    const f16* x;
    Barriers& barriers;
    f16* stages;
    u32 octets, stride, first, end, parity;

    DEV BulkFeed(const f16* x, const Neighbours& which, u32 steps, f16* stages, Barriers& barriers)
        : x(x + tiled_rows(which.first, steps)), barriers(barriers), stages(stages), octets(ceil_div(min_u32(which.count, M), 8)),
          stride(steps * TILED_STEP), parity(0) {
        if (thread_id() == 0) {
            UNROLL for (u32 i = 0; i < STAGES; i++) {
                barriers.full[i].begin(1);
                barriers.empty[i].begin(WAVES);
            }
        }
        Wide::publish();
        barrier_lds();
    }
    // The first wave calls.
    DEV void copy(u32 to, u32 step) {
        if (lane() == 0) barriers.full[to].expect(octets * 2 * TILED_STEP);
        wave_sync();
        if (lane() < octets) {
            copy_bulk_async(stages + to * WIDE_STEP<M> + lane() * TILED_STEP, x + u64(lane()) * stride + step * TILED_STEP,
                            2 * TILED_STEP, barriers.full[to]);
        }
    }
    DEV void begin(u32 first_step, u32 last) {
        first = first_step, end = last;
        if (wave() != 0) return;
        UNROLL for (u32 i = 0; i < STAGES; i++) {
            if (first + i < end) copy(i, first + i);
        }
    }
    DEV Wide::Address wait(u32 slot, u32) {
        barriers.full[slot].wait(parity);
        return Wide::address(stages + slot * WIDE_STEP<M>);
    }
    DEV void done_before(u32 slot, u32 step) {
        if (slot == 0 && step == first) return;
        const u32 before = (slot + STAGES - 1) % STAGES;
        if (lane() == 0) barriers.empty[before].arrive();
        if (wave() == 0 && step - 1 + STAGES < end) {
            barriers.empty[before].wait(slot == 0 ? parity ^ 1 : parity);
            copy(before, step - 1 + STAGES);
        }
    }
    DEV void turn() { parity ^= 1; }
};
#endif

template <u32 M> struct WideSums : Wide::Sums<M> {
    // The lane's sums as a list.
    static constexpr u32 COUNT = Wide::Sums<M>::ROWS * Wide::HELD;
    DEV f32 at(u32 i) const { return this->get(i / Wide::HELD, i % Wide::HELD); }
    DEV void set_at(u32 i, f32 v) { this->set(i / Wide::HELD, i % Wide::HELD, v); }

    // Writes the sums, some rows at a time: their loads are in flight together.
    template <class Which> DEV void put(const Out<Which>& out) const {
        constexpr u32 ROWS = Wide::Sums<M>::ROWS, TOGETHER = ROWS < 8 ? ROWS : 8;
        u32 o[Wide::HELD];
        UNROLL for (u32 h = 0; h < Wide::HELD; h++) o[h] = wave() * 16 + Wide::held(h);
        UNROLL for (u32 start = 0; start < ROWS; start += TOGETHER) {
            u32 rows[TOGETHER];
            f32 sums[TOGETHER][Wide::HELD];
            UNROLL for (u32 i = 0; i < TOGETHER; i++) {
                rows[i] = this->row(start + i);
                UNROLL for (u32 h = 0; h < Wide::HELD; h++) sums[i][h] = this->get(start + i, h);
            }
            out.put(rows, o, sums);
        }
    }
};

// Weights of quantised types.
template <class T> struct WideWeights : LaneWeights<T, Wide> {
    DEV WideWeights(const u8* planes, u32 n, u32 first, u32 cols) : LaneWeights<T, Wide>(planes, n, first, cols) {
        Wide::settle_pointers(this->block);
    }
    DEV u32 steps() const { return ceil_div(this->groups, GROUPS); }
    // A step's weights of a lane, as loaded.
    using Ahead = Loaded<T, Wide>;

    struct Now {
        Group group[Wide::HELD];
        Large large;
        Factors by[Wide::HELD][2];

        DEV Now(const Ahead& loaded, u32 g) {
            UNROLL for (u32 h = 0; h < Wide::HELD; h++) group[h] = decode_for_words<T>(loaded.raw[0][h], g);
            large = limit_groups<T>(group);
            UNROLL for (u32 h = 0; h < Wide::HELD; h++) {
                by[h][0] = factors<T>(group[h], 0);
                by[h][1] = T::halves ? factors<T>(group[h], 1) : by[h][0];
            }
        }
        // A of products 2 q and 2 q + 1 of the step.
        DEV void operands(u32 q, u32 (&a)[2][4]) const {
            UNROLL for (u32 i = 0; i < 2; i++) {
                UNROLL for (u32 h = 0; h < Wide::HELD; h++) {
                    u32 words[2];
                    decode_word<T>(group[h], 2 * q + i, by[h][q / 2], words);
                    a[i][h] = words[0], a[i][h + 2] = words[1];
                }
            }
            if (large.any) {
                UNROLL for (u32 i = 0; i < 8; i++) a[i / 4][i % 4] = large.mine ? within_f16x2(a[i / 4][i % 4]) : a[i / 4][i % 4];
            }
        }
    };
};

// Weights of F16 and BF16: 16 bytes, 8 weights, are there or not, because a row has a multiple of 8.
template <class T> struct WideFloats {
    const u8* block;
    u32 row[Wide::HELD], chunks;

    DEV WideFloats(const u8* w, u32 n, u32 first, u32 cols) : chunks(row_chunks<T>(cols)) {
        block = w + u64(first) * chunks * 16;
        UNROLL for (u32 h = 0; h < Wide::HELD; h++) row[h] = min_u32(wave() * 16 + Wide::held(h), n - 1 - first) * chunks;
    }
    DEV u32 steps() const { return ceil_div(chunks, STEP / T::values); }
    DEV static u32 group(u32 step) { return step * GROUPS + Wide::k_lane(); }

    struct Ahead {
        u32x4 raw[Wide::HELD][4];
        // Chunks of the lane's group that the row has.
        u32 count;
    };
    DEV Ahead load(u32 step) const {
        Ahead loaded;
        UNROLL for (u32 c = 0; c < 4; c++) load_chunk(step, c, loaded);
        return loaded;
    }
    // One of the four chunks.
    DEV void load_chunk(u32 step, u32 c, Ahead& loaded) const {
        const u32 first = min_u32(4 * group(step), chunks - 1);
        loaded.count = min_u32(chunks - first, 4);
        UNROLL for (u32 h = 0; h < Wide::HELD; h++) loaded.raw[h][c] = T::load(block, row[h] + first + min_u32(c, loaded.count - 1));
    }

    struct Now {
        Ahead loaded;
        DEV Now(const Ahead& ahead, u32) : loaded(ahead) {}
        DEV void operands(u32 q, u32 (&a)[2][4]) const {
            UNROLL for (u32 h = 0; h < Wide::HELD; h++) {
                const u32x4& raw = loaded.raw[h][q];
                a[0][h] = halves_of<T>(raw.x), a[0][h + 2] = halves_of<T>(raw.y);
                a[1][h] = halves_of<T>(raw.z), a[1][h + 2] = halves_of<T>(raw.w);
            }
            // Where x is 0, a weight of the next row may be no number.
            if (q >= loaded.count) {
                UNROLL for (u32 i = 0; i < 8; i++) a[i / 4][i % 4] = 0;
            }
        }
    };
};
template <> struct WideWeights<F16> : WideFloats<F16> {
    using WideFloats<F16>::WideFloats;
};
template <> struct WideWeights<BF16> : WideFloats<BF16> {
    using WideFloats<BF16>::WideFloats;
};

// The products of a step. Two run while the weights of the next two are decoded.
template <class T, u32 M, class Feed>
DEV void decoded_step(Feed& feed, u32 slot, u32 step, const typename WideWeights<T>::Now& now, WideSums<M>& sums) {
    u32 a[2][2][4];
    Wide::Address rows = {};
    UNROLL for (u32 q = 0; q < 4; q++) {
        now.operands(q, a[q % 2]);
        if (q == 0) rows = feed.wait(slot, step);
        Wide::begin(a[q % 2]);
        UNROLL for (u32 i = 0; i < 2; i++) sums.add(a[q % 2][i], rows, q / 2, q % 2 * 2 + i);
        Wide::end();
        // The other registers are free.
        Wide::wait<1>();
        if (q == 0) feed.done_before(slot, step);
    }
}

// The products of a step whose weights need no decoding: all together, after those of the step before.
template <class T, u32 M, class Feed>
DEV void copied_step(Feed& feed, u32 slot, u32 step, const typename WideWeights<T>::Now& now, WideSums<M>& sums) {
    Wide::wait<0>();
    feed.done_before(slot, step);
    u32 a[4][2][4];
    UNROLL for (u32 q = 0; q < 4; q++) now.operands(q, a[q]);
    const Wide::Address rows = feed.wait(slot, step);
    UNROLL for (u32 q = 0; q < 4; q++) Wide::begin(a[q]);
    UNROLL for (u32 q = 0; q < 4; q++) {
        UNROLL for (u32 i = 0; i < 2; i++) sums.add(a[q][i], rows, q / 2, q % 2 * 2 + i);
    }
    Wide::end();
}

// Adds the sums of steps `begin` .. `end`. Weights come a step ahead of their use.
template <class T, u32 M, class Feed>
DEV void multiply_wide(Feed& feed, const WideWeights<T>& weights, u32 begin, u32 end, WideSums<M>& sums) {
    typename WideWeights<T>::Ahead loaded = weights.load(begin);
    wait_for_predecessor_alone();
    feed.begin(begin, end);
    u32 step = begin;
    ROLLED while (step < end) {
        UNROLL for (u32 slot = 0; slot < Feed::STAGES; slot++) {
            if (step >= end) break;
            const typename WideWeights<T>::Now now(loaded, weights.group(step));
            if (step + 1 < end) loaded = weights.load(step + 1);
            if constexpr (IS_FLOAT<T>) copied_step<T, M>(feed, slot, step, now, sums);
            else decoded_step<T, M>(feed, slot, step, now, sums);
            step++;
        }
        feed.turn();
    }
    Wide::wait<0>();
}

template <u32 ROWS> struct AcrossWaves {
    static constexpr u32 M = ROWS;
    using Sums = WideSums<M>;
    template <class T> using Weights = WideWeights<T>;
    template <class T, class Which>
    DEV static void multiply(const f16* x, u32, const Which& which, const Weights<T>& weights, u32 begin, u32 end, Sums& sums) {
        LDS_DYNAMIC(f16, buffer);
        // Tiles begin at multiples of 1024 bytes.
        f16* stages = buffer + Wide::to_tile(buffer) / 2;
        const u32 steps = weights.steps();
#if HAS_BULK_COPY
        if constexpr (Which::ARE_NEIGHBOURS) {
            LDS(barriers, typename BulkFeed<M>::Barriers);
            BulkFeed<M> feed(x, which, steps, stages, barriers);
            multiply_wide<T, M>(feed, weights, begin, end, sums);
            return;
        }
#endif
        PartFeed<M, Which> feed(x, which, steps, stages);
        multiply_wide<T, M>(feed, weights, begin, end, sums);
    }
};

#endif
