// attn_decode on a matrix unit: f16 pages, heads whose size is known when compiled.
//
// A wave takes a chunk of 16 tokens at a time. Keys are the rows of a product with up to 8 queries; values, read as columns, are
// the rows of a product with the weights. Both go from memory to the registers where the unit wants them. Queries and weights are
// the sums of two f16 numbers each, in columns 8 apart: results are as near as with f32.
//
// The waves of a block share each split, chunk by chunk in turn. Where registers suffice, the next chunk loads while one is
// computed.
#pragma once
#include "decode.h"

#if HAS_MATRIX_UNIT
namespace attn_decode {

constexpr u32 MATRIX_THREADS = 128, WAVES = MATRIX_THREADS / WAVE;
// Tokens of a chunk, queries of a block, lanes that share a query's scores, and the scores of each.
constexpr u32 CHUNK = 16, QUERIES = 8, QUERY_LANES = WAVE / QUERIES, SCORES = CHUNK / QUERY_LANES;
// Distances of rows in LDS: rows are 16-byte aligned, and bank conflicts are few.
constexpr u32 SCORE_STRIDE = CHUNK + 4, WEIGHT_STRIDE = CHUNK + 8;
// Weights are this many powers of two larger, until a split ends. Those far below the greatest are then no subnormal f16 either.
constexpr f32 WEIGHT_BITS = 14.0f, WEIGHT_UNIT = 1.0f / 16384;

// A number as the sum of two f16: within 2^-22 of it.
struct Pair {
    f16 high, low;
    DEV explicit Pair(f32 v) : high(f32_to_f16(v)), low(f32_to_f16(v - f16_to_f32(high))) {}
};

// The chunks that a wave takes, one after the other. Tokens from..end of a chunk count.
template <u32 HEAD> struct Chunk {
    // Strips that hold a lane's part of a key, and products that a value takes: each has 16 rows.
    static constexpr u32 PARTS = HEAD / (16 * Strip::K_LANES), TILES = HEAD / 16;
    // Registers of keys, values and sums, and whether they leave room for the next chunk to load while one is computed. With
    // 192, on RDNA 3, AMD's compiler would spill 334 of 256.
    static constexpr u32 HELD = PARTS * Strip::HELD * 8 + Frag::A::SIZE * 4 + TILES * Frag::Folded::SIZE;
    static constexpr bool AHEAD = HELD <= 128;
    const Task& task;
    u32 sequence, kv_head;
    const f16* plane;
    u32 first, from, end;
    // Where the keys of page `page` + lane() of the sequence lie, up to its last. An address takes two loads, one after the other.
    u64 address;
    u32 page, last_page;

    DEV Chunk(const Task& t, const Place& at)
        : task(t), sequence(t.row_seq[at.row]), kv_head(at.kv_head), plane(nullptr), first(0), from(0), end(0), address(0),
          page(at.len), last_page((at.len - 1) / KV_PAGE_TOKENS) {}

    // Made from the launch's arguments where it is used: it would take eight registers.
    DEV HeadPages<f16> pages() const {
        return HeadPages<f16>(task.page_base, task.page_tables, task.table_stride, sequence, task.layer_offset, task.n_kv_heads,
                              kv_head, HEAD);
    }

    DEV bool exists() const { return first < end; }

    // The wave's first chunk of tokens from..end.
    DEV void begin(u32 start, u32 stop) {
        from = start, end = stop;
        look_up(start / CHUNK * CHUNK + wave() * CHUNK);
    }
    // The wave's next chunk of the same tokens.
    DEV void next() { look_up(first + WAVES * CHUNK); }
    DEV void look_up(u32 token) {
        first = token;
        if (!exists()) return;
        const u32 mine = first / KV_PAGE_TOKENS;
        if (mine - page >= WAVE) {
            page = mine;
            address = (u64)pages().keys(min_u32(page + lane(), last_page));
        }
        plane = global_address<f16>(shfl(address, mine - page));
    }

    // A bit for each of the chunk's tokens that counts.
    DEV u32 counted() const {
        const u32 before = max_u32(from, first) - first, after = min_u32(end - first, CHUNK);
        return (1u << after) - (1u << before);
    }
    // The chunk's token `i`. In place of one that does not count it is one that does: its score will not count.
    DEV u32 token(u32 i) const { return min_u32(max_u32(first + i, from), end - 1) % KV_PAGE_TOKENS; }
    // Where the lane's keys of part `p` begin among those of a token.
    DEV static u32 key_at(u32 p) { return (p * Strip::K_LANES + Strip::k_lane()) * 16; }

    DEV void fetch_keys(Strip (&keys)[PARTS]) const {
        UNROLL for (u32 i = 0; i < Strip::HELD; i++) {
            const f16* key = plane + token(Strip::held(i)) * HEAD;
            UNROLL for (u32 p = 0; p < PARTS; p++) {
                keys[p].v[i][0] = load16(key + key_at(p));
                keys[p].v[i][1] = load16(key + key_at(p) + 8);
            }
        }
    }
    // Row r of tile j of the values' product is value r * TILES + j.
    DEV static void load(u32x4& v, const f16* token, u32 row) {
        if constexpr (TILES == 8) {
            v = load16(token + row * TILES);
        } else {
            const u32x2 half = load8(token + row * TILES);
            v.x = half.x, v.y = half.y;
        }
    }
    DEV void fetch_values(u32x4 (&values)[Frag::A::SIZE]) const {
        const f16* plane_of_values = pages().values_of((f16*)plane);
        UNROLL for (u32 l = 0; l < Frag::A::SIZE; l++) {
            load(values[l], plane_of_values + token(Frag::A::k(l)) * HEAD, Frag::A::row(l));
        }
    }

    // Puts the row's own token, number `last`, in place of what its page held when it was read.
    DEV void renew_keys(u32 last, const Newest<f16, HEAD>& newest, Strip (&keys)[PARTS]) const {
        if (first + CHUNK <= last) return;
        UNROLL for (u32 i = 0; i < Strip::HELD; i++) {
            if (first + Strip::held(i) < last) continue;
            UNROLL for (u32 p = 0; p < PARTS; p++) {
                keys[p].v[i][0] = load16(newest.values(false) + key_at(p));
                keys[p].v[i][1] = load16(newest.values(false) + key_at(p) + 8);
            }
        }
    }
    DEV void renew_values(u32 last, const Newest<f16, HEAD>& newest, u32x4 (&values)[Frag::A::SIZE]) const {
        if (first + CHUNK <= last) return;
        UNROLL for (u32 l = 0; l < Frag::A::SIZE; l++) {
            if (first + Frag::A::k(l) >= last) load(values[l], newest.values(true), Frag::A::row(l));
        }
    }
};

// LDS of a block while it walks its splits.
template <u32 HEAD> struct MatrixShared {
    static constexpr u32 QUERY_STRIDE = HEAD + 8, SUM_STRIDE = HEAD + 8;
    f16* queries;    // [2 * QUERIES][QUERY_STRIDE]: the high parts, then the low ones; scaled, 0 past the block's heads
    f32* sums;       // [WAVES][QUERIES][SUM_STRIDE]; before the walk, the queries in f32
    f32* most;       // [WAVES][QUERIES]
    f32* sum;        // [WAVES][QUERIES]
    f32* scores;     // of a wave: [QUERIES][SCORE_STRIDE]
    f16* weights;    // of a wave: [2 * QUERIES][WEIGHT_STRIDE]: the high parts, then the low ones
};

// Online softmax of the block's queries over a wave's chunks of a split. Lanes from QUERY_LANES * q on share query q.
template <u32 HEAD> struct MatrixState {
    using C = Chunk<HEAD>;
    using Lds = MatrixShared<HEAD>;
    Frag::Folded values[C::TILES];
    f32 most, sum;

    DEV static u32 query() { return lane() / QUERY_LANES; }
    DEV static u32 first_score() { return lane() % QUERY_LANES * SCORES; }

    DEV void clear() {
        most = NO_SCORE, sum = 0.0f;
        UNROLL for (u32 j = 0; j < C::TILES; j++) values[j] = Frag::folded_zero();
    }

    // Writes the chunk's scores to lds.scores.
    DEV static void score(const Strip (&keys)[C::PARTS], const Lds& lds) {
        Frag::C c = Frag::zero();
        UNROLL for (u32 p = 0; p < C::PARTS; p++) {
            Strip queries;
            UNROLL for (u32 i = 0; i < Strip::HELD; i++) {
                const f16* of = lds.queries + Strip::held(i) * Lds::QUERY_STRIDE + C::key_at(p);
                queries.v[i][0] = load16(of);
                queries.v[i][1] = load16(of + 8);
            }
            c = Strip::mma(keys[p], queries, c);
        }
        const Frag::Folded folded = Frag::fold(c);
        UNROLL for (u32 l = 0; l < Frag::Folded::SIZE; l++) {
            const f32 score = folded.sum(l);
            lds.scores[Frag::Folded::col(l) * SCORE_STRIDE + Frag::Folded::row(l)] = score;
        }
        wave_sync();
    }

    // Writes the weights of the chunk's tokens to lds.weights. `counted`: a bit for each that counts.
    DEV void weigh(u32 counted, f32 cap, const Lds& lds) {
        f32 score[SCORES], top = most, more = 0.0f;
        UNROLL for (u32 i = 0; i < SCORES; i += 2) {
            const u32x2 two = load8(lds.scores + query() * SCORE_STRIDE + first_score() + i);
            score[i] = as_f32(two.x), score[i + 1] = as_f32(two.y);
        }
        UNROLL for (u32 i = 0; i < SCORES; i++) {
            score[i] = capped(score[i], cap);
            score[i] = counted >> (first_score() + i) & 1 ? score[i] : -INFINITY_F32;
            top = max_f32(top, score[i]);
        }
        top = wave_max<QUERY_LANES>(top);
        const f32 factor = exp2_f32(most - top);
        f16* high = lds.weights + query() * WEIGHT_STRIDE + first_score();
        UNROLL for (u32 i = 0; i < SCORES; i += 2) {
            const f32 a = exp2_f32(score[i] - top + WEIGHT_BITS), b = exp2_f32(score[i + 1] - top + WEIGHT_BITS);
            const u32 both = pack_f16x2(a, b);
            const f32x2 back = unpack_f16x2(both);
            *(u32*)(high + i) = both;
            *(u32*)(high + i + QUERIES * WEIGHT_STRIDE) = pack_f16x2(a - back.x, b - back.y);
            more += a + b;
        }
        sum = fma_f32(sum, factor, more);
        // Most chunks raise no maximum. A factor of 1 changes no bit.
        if (any(top != most)) rescale(factor);
        most = top;
        wave_sync();
    }

    DEV void rescale(f32 factor) {
        UNROLL for (u32 l = 0; l < Frag::Folded::SIZE; l++) {
            const f32 of_column = shfl(factor, Frag::Folded::col(l) * QUERY_LANES);
            UNROLL for (u32 j = 0; j < C::TILES; j++) values[j].set(l, values[j].get(l) * of_column);
        }
    }

    DEV void add(const u32x4 (&raw)[Frag::A::SIZE], const Lds& lds) {
        const Frag::B weights = Frag::load_bt_lds(lds.weights, WEIGHT_STRIDE);
        UNROLL for (u32 j = 0; j < C::TILES; j++) {
            Frag::A a;
            UNROLL for (u32 l = 0; l < Frag::A::SIZE; l++) {
                const u32 two = raw[l][j / 2];
                a.set(l, f16_from_bits((u16)(j % 2 ? two >> 16 : two)));
            }
            values[j] = Frag::mma_folded(a, weights, values[j]);
        }
    }

    // Writes the wave's part of the split to LDS.
    DEV void hand_over(const Lds& lds, u32 heads) {
        sum = wave_sum<QUERY_LANES>(sum);
        if (lane() % QUERY_LANES == 0) {
            lds.most[wave() * QUERIES + query()] = most;
            lds.sum[wave() * QUERIES + query()] = sum;
        }
        UNROLL for (u32 l = 0; l < Frag::Folded::SIZE; l++) {
            f32 all[C::TILES];
            UNROLL for (u32 j = 0; j < C::TILES; j++) all[j] = values[j].sum(l);
            const u32 column = Frag::Folded::col(l);
            if (column >= heads) continue;
            f32* to = lds.sums + (wave() * QUERIES + column) * Lds::SUM_STRIDE + Frag::Folded::row(l) * C::TILES;
            UNROLL for (u32 j = 0; j < C::TILES; j += 4) {
                store16(to + j, {as_u32(all[j]), as_u32(all[j + 1]), as_u32(all[j + 2]), as_u32(all[j + 3])});
            }
        }
    }
};

// Joins the waves' parts of a split: into `result` if the row has no other split, else for the last block of the row to combine.
template <u32 HEAD> DEV void join_waves(const Task& t, const Place& at, const MatrixShared<HEAD>& lds, f32* result) {
    for (u32 i = thread_id() * 4; i < at.heads * HEAD; i += MATRIX_THREADS * 4) {
        const u32 g = i / HEAD, d = i % HEAD;
        f32 top = NO_SCORE, sum = 0.0f;
        f32 v[4] = {};
        UNROLL for (u32 w = 0; w < WAVES; w++) top = max_f32(top, lds.most[w * QUERIES + g]);
        UNROLL for (u32 w = 0; w < WAVES; w++) {
            const f32 factor = exp2_f32(lds.most[w * QUERIES + g] - top) * WEIGHT_UNIT;
            const f32x4 part = *(const f32x4*)(lds.sums + (w * QUERIES + g) * lds.SUM_STRIDE + d);
            sum = fma_f32(lds.sum[w * QUERIES + g], factor, sum);
            UNROLL for (u32 k = 0; k < 4; k++) v[k] = fma_f32(part[k], factor, v[k]);
        }
        if (at.splits == 1) {
            const f32 inverse = 1.0f / (sum + t.sink(at.first_head + g, top));
            UNROLL for (u32 k = 0; k < 4; k++) result[i + k] = v[k] * inverse;
        } else {
            const u64 split = (((u64)at.slot * t.n_heads + at.first_head + g) * t.room() + at.split);
            store16(t.part_values + split * HEAD + d, {as_u32(v[0]), as_u32(v[1]), as_u32(v[2]), as_u32(v[3])});
            if (d == 0) t.part_stats[2 * split] = top, t.part_stats[2 * split + 1] = sum;
        }
    }
}

// Puts the queries in lds.sums, which are f32, into lds.queries.
template <u32 HEAD> DEV void split_queries(const Place& at, const MatrixShared<HEAD>& lds) {
    for (u32 i = thread_id(); i < QUERIES * HEAD; i += MATRIX_THREADS) {
        const u32 g = i / HEAD, d = i % HEAD;
        const Pair parts(g < at.heads ? lds.sums[i] : 0.0f);
        lds.queries[g * lds.QUERY_STRIDE + d] = parts.high;
        lds.queries[(g + QUERIES) * lds.QUERY_STRIDE + d] = parts.low;
    }
}

// What a wave has on its way.
template <u32 HEAD> struct Flight {
    Chunk<HEAD> chunk;
    Strip keys[Chunk<HEAD>::PARTS];
    u32x4 values[Frag::A::SIZE];

    DEV Flight(const Task& t, const Place& at) : chunk(t, at) { chunk.begin(at.start, at.end); }

    DEV void fetch() {
        if (!Chunk<HEAD>::AHEAD || !chunk.exists()) return;
        chunk.fetch_keys(keys);
        chunk.fetch_values(values);
    }
    // Goes on to the wave's first chunk of the block's next split, if it has both.
    DEV void cross(const Place& at) {
        if (at.has_next()) chunk.begin(at.end, min_u32(at.end + at.tokens, at.len));
    }

    // Adds the wave's chunks of the split. The first of the next split are on their way at its end. `newest`: the row's own token,
    // where the block `makes` it.
    DEV void add_split(const Task& t, const Place& at, const MatrixShared<HEAD>& lds, MatrixState<HEAD>& state,
                       const Newest<f16, HEAD>& newest, bool makes) {
        constexpr bool AHEAD = Chunk<HEAD>::AHEAD;
        if (!chunk.exists()) {
            cross(at);
            return fetch();
        }
        for (bool is_last = false; !is_last;) {
            const u32 counted = chunk.counted();
            const bool has_newest = makes && at.end == at.len;
            if (!AHEAD) chunk.fetch_keys(keys);
            if (has_newest) chunk.renew_keys(at.len - 1, newest, keys);
            state.score(keys, lds);
            if (!AHEAD) chunk.fetch_values(values);
            if (has_newest) chunk.renew_values(at.len - 1, newest, values);
            chunk.next();
            is_last = !chunk.exists();
            if (is_last) cross(at);
            if (AHEAD && chunk.exists()) chunk.fetch_keys(keys);
            state.weigh(counted, t.cap, lds);
            state.add(values, lds);
            if (AHEAD && chunk.exists()) chunk.fetch_values(values);
        }
    }
};

template <u32 HEAD> DEV void run_matrix(const Task& t) {
    LDS(sums, f32[WAVES * QUERIES * MatrixShared<HEAD>::SUM_STRIDE]);
    LDS(queries, f16[2 * QUERIES * MatrixShared<HEAD>::QUERY_STRIDE]);
    LDS(scores, f32[WAVES][QUERIES * SCORE_STRIDE]);
    LDS(chunk_weights, f16[WAVES][2 * QUERIES * WEIGHT_STRIDE]);
    LDS(most, f32[WAVES * QUERIES]);
    LDS(sum, f32[WAVES * QUERIES]);
    LDS(result, f32[QUERIES * HEAD]);
    LDS(weights, f32[QUERIES * SPLITS_MAX]);
    LDS(newest_room, f16[Newest<f16, HEAD>::SIZE]);
    const Newest<f16, HEAD> newest{newest_room};
    const Shared shared{result, weights};
    const MatrixShared<HEAD> lds{queries, sums, most, sum, scores[wave()], chunk_weights[wave()]};
    // Rows, positions and page tables were copied before the step's first launch, which ended long ago.
    Place at(t, QUERIES, [](u32 len) { return coarse_split_tokens(len); });
    if (at.split >= max_u32(at.splits, 1)) return;
    if (at.padding) {
        wait_for_predecessor();
        for (u32 i = thread_id(); i < at.heads * HEAD; i += MATRIX_THREADS) result[i] = 0.0f;
        barrier_lds();
        write_out<MATRIX_THREADS>(t, at, shared);
        return;
    }
    Flight<HEAD> flight(t, at);
    const bool makes = t.source.qkv != nullptr;
    // Earlier steps wrote all tokens but the row's own.
    if (makes) flight.fetch();
    wait_for_predecessor();
    if (makes) {
        HeadMaker<MATRIX_THREADS, true, f16, HEAD>(t, at, at.heads).make(sums, flight.chunk.pages(), newest);
    } else {
        flight.fetch();
        const f32* q = t.q + ((u64)at.row * t.n_heads + at.first_head) * HEAD;
        for (u32 i = thread_id(); i < at.heads * HEAD; i += MATRIX_THREADS) sums[i] = q[i] * t.scale;
    }
    barrier_lds();
    split_queries(at, lds);
    barrier_lds();
    MatrixState<HEAD> state;
    for (;;) {
        state.clear();
        flight.add_split(t, at, lds, state, newest, makes);
        // The parts of the split before were read.
        barrier_lds();
        state.hand_over(lds, at.heads);
        barrier_lds();
        join_waves<HEAD>(t, at, lds, result);
        if (!at.has_next()) break;
        at.next();
    }
    if (at.splits > 1) {
        if (!last_block(t.counters + at.slot * grid_x() + block_x(), ceil_div(at.splits, t.each))) return;
        combine<MATRIX_THREADS, HEAD, 8>(t, at, shared);
    } else {
        barrier_lds();
    }
    write_out<MATRIX_THREADS>(t, at, shared);
}

} // namespace attn_decode
#endif
