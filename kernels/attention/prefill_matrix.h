// attn_prefill on a matrix unit: f16 queries, keys, weights and values, f32 sums; head_dim known when compiled. Codes become f16
// on their way to LDS, each product with its scale rounded once.
//
// A wave keeps 16 queries as fragments, and 16 x head_dim sums. A page goes through LDS, keys by token, values transposed, so
// that both are read along a fragment's inner index; the next page loads meanwhile. Scores pass through LDS,
// because there a few lanes hold a whole row for every fragment layout. Weights are read back from there as an operand.
//
// Queries and sums of 256 values do not fit a lane's registers. Such heads are walked through twice, for one half of the values
// each time. The second walk computes the same weights again, half as much work more. RDNA 3 takes the plain body for them: its
// lanes hold queries twice.
#pragma once
#include "prefill.h"

#if HAS_MATRIX_UNIT
namespace prefill {

constexpr u32 WAVES = 4, SIDE = 16;
// Lanes that share a row of scores, and the tokens of each.
constexpr u32 ROW_LANES = WAVE / SIDE, ROW_TOKENS = KV_PAGE_TOKENS / ROW_LANES;
// Distances of rows in LDS: rows are 16-byte aligned, and bank conflicts are few.
constexpr u32 VALUE_STRIDE = KV_PAGE_TOKENS + 8, SCORE_STRIDE = KV_PAGE_TOKENS + 4, WEIGHT_STRIDE = KV_PAGE_TOKENS + 8;

// Registers that queries and sums take at most, and those that they take with a page in flight. With 192 and no page, or with
// 176 and a page, AMD's compiler spills 60 and 32 of 256. NVIDIA's takes 249 of 255 for 176.
constexpr u32 HELD_MOST = 170;
#if defined(__CUDA_ARCH__)
constexpr u32 AHEAD_MOST = 180;
#else
constexpr u32 AHEAD_MOST = 170;
#endif

template <u32 HEAD> struct Sizes {
    // Walks through the pages, and the values of a head that one of them sums.
    static constexpr u32 WALKS = HEAD > 128 ? 2 : 1, SUMMED = HEAD / WALKS;
    static constexpr u32 PARTS = HEAD / SIDE, SUMMED_PARTS = SUMMED / SIDE, KEY_STRIDE = HEAD + 8;
    // 16-byte chunks of a token's keys and of its summed values, and how many of a page a thread moves.
    static constexpr u32 KEY_CHUNKS = HEAD / 8, VALUE_CHUNKS = SUMMED / 8;
    static constexpr u32 KEYS_PER_THREAD = (KV_PAGE_TOKENS * KEY_CHUNKS + WAVES * WAVE - 1) / (WAVES * WAVE);
    static constexpr u32 VALUES_PER_THREAD = (KV_PAGE_TOKENS * VALUE_CHUNKS + WAVES * WAVE - 1) / (WAVES * WAVE);
    static constexpr u32 KEYS = KV_PAGE_TOKENS * KEY_STRIDE, VALUES = SUMMED * VALUE_STRIDE;
    // Queries are staged where pages will lie, SUMMED values of each at a time.
    static constexpr u32 STAGED_STRIDE = SUMMED + 8;
    static_assert(QUERIES * STAGED_STRIDE <= KEYS + VALUES, "queries are staged where pages will lie");
    static constexpr u32 HELD = PARTS * Frag::A::SIZE / 2 + SUMMED_PARTS * Frag::C::SIZE;
    // Whether a lane's registers are enough, and then also for the next page, which loads ahead.
    static constexpr bool FITS = HELD <= HELD_MOST;
    static constexpr bool AHEAD = HELD + 4 * (KEYS_PER_THREAD + VALUES_PER_THREAD) <= AHEAD_MOST;
};

// Eight values of a token in flight.
template <class T> struct Chunk;
template <> struct Chunk<f16> {
    u32x4 v;
    DEV void load(const f16* plane, u32, u32 at, u32) { v = load16(plane + at); }
    DEV void clear() { v = {0, 0, 0, 0}; }
    DEV u32x4 halves() const { return v; }
};
template <> struct Chunk<i8> {
    u32x2 v;
    f16 scale;
    // `at`: the first value's place among those of the plane, in a head of `dim` values.
    DEV void load(const i8* plane, u32 token, u32 at, u32 dim) {
        v = load8(plane + at), scale = scales_of(plane, token, dim)[(at - token * dim) / KV_GROUP];
    }
    DEV void clear() { v = {0, 0}, scale = f16_from_bits(0); }
    DEV u32x4 halves() const {
        const u32 both = (u32)f16_bits(scale) * 0x10001u, low = v.x ^ 0x80808080u, high = v.y ^ 0x80808080u;
        auto two = [&](u32 codes, u32 i) { return fma_f16x2(bytes_f16x2<128>(codes, i), both, 0); };
        return {two(low, 0), two(low, 2), two(high, 0), two(high, 2)};
    }
};

// A page of keys and values in flight from memory to LDS.
template <u32 HEAD, class T> struct Transfer {
    using S = Sizes<HEAD>;
    // Chunks of a thread that are in flight: a page, or a few of codes that have no room for one.
    static constexpr u32 AT_ONCE = 4;
    static constexpr bool WHOLE = S::AHEAD || !IS_CODED<T>;
    static constexpr u32 at_once(u32 chunks) { return WHOLE || chunks < AT_ONCE ? chunks : AT_ONCE; }
    static constexpr u32 KEYS = at_once(S::KEYS_PER_THREAD), VALUES = at_once(S::VALUES_PER_THREAD);
    Chunk<T> keys[KEYS], values[VALUES];

    // Loads keys, or values from `first` on, of the tokens `from`..`tokens`. The other tokens become 0: they were never written,
    // or no query sees them.
    DEV void fetch_keys(const T* plane, u32 from, u32 tokens, u32 begin = 0) {
        // Neighbouring lanes along a row.
        UNROLL for (u32 i = 0; i < KEYS; i++) {
            u32 chunk = (begin + i) * block_threads() + thread_id(), token = chunk / S::KEY_CHUNKS;
            keys[i].clear();
            if (token - from < tokens - from && chunk < KV_PAGE_TOKENS * S::KEY_CHUNKS) keys[i].load(plane, token, chunk * 8, HEAD);
        }
    }
    DEV void fetch_values(const T* plane, u32 from, u32 tokens, u32 first, u32 begin = 0) {
        // Neighbouring lanes down a column, the order in LDS.
        UNROLL for (u32 i = 0; i < VALUES; i++) {
            u32 chunk = (begin + i) * block_threads() + thread_id(), token = chunk % KV_PAGE_TOKENS;
            values[i].clear();
            if (token - from < tokens - from && chunk < KV_PAGE_TOKENS * S::VALUE_CHUNKS) {
                values[i].load(plane, token, token * HEAD + first + chunk / KV_PAGE_TOKENS * 8, HEAD);
            }
        }
    }

    DEV void store_keys(f16* to, u32 begin = 0) const {
        UNROLL for (u32 i = 0; i < KEYS; i++) {
            u32 chunk = (begin + i) * block_threads() + thread_id();
            if (chunk >= KV_PAGE_TOKENS * S::KEY_CHUNKS) continue;
            store16(to + chunk / S::KEY_CHUNKS * S::KEY_STRIDE + chunk % S::KEY_CHUNKS * 8, keys[i].halves());
        }
    }
    DEV void store_values(f16* to, u32 begin = 0) const {
        UNROLL for (u32 i = 0; i < VALUES; i++) {
            u32 chunk = (begin + i) * block_threads() + thread_id();
            if (chunk >= KV_PAGE_TOKENS * S::VALUE_CHUNKS) continue;
            f16* column = to + chunk / KV_PAGE_TOKENS * 8 * VALUE_STRIDE + chunk % KV_PAGE_TOKENS;
            const u32x4 halves = values[i].halves();
            UNROLL for (u32 d = 0; d < 8; d++) {
                u32 pair = halves[d / 2];
                column[d * VALUE_STRIDE] = f16_from_bits((u16)(d % 2 ? pair >> 16 : pair));
            }
        }
    }

    // Loads tokens `from`..`tokens` of page `index`, of their values those from `first` on.
    DEV void fetch(const HeadPages<T>& pages, u32 index, u32 from, u32 tokens, u32 first) {
        const T* key = pages.keys(index);
        fetch_keys(key, from, tokens);
        fetch_values(pages.values_of((T*)key), from, tokens, first);
    }
    DEV void store(f16* to_keys, f16* to_values) const {
        store_keys(to_keys);
        store_values(to_values);
    }
    // Loads and stores such a page, a few chunks at a time: fewer registers, and more waits.
    DEV void move(const HeadPages<T>& pages, u32 index, u32 from, u32 tokens, u32 first, f16* to_keys, f16* to_values) {
        const T* key = pages.keys(index);
        const T* value = pages.values_of((T*)key);
        ROLLED for (u32 i = 0; i < S::KEYS_PER_THREAD; i += KEYS) fetch_keys(key, from, tokens, i), store_keys(to_keys, i);
        ROLLED for (u32 i = 0; i < S::VALUES_PER_THREAD; i += VALUES) {
            fetch_values(value, from, tokens, first, i), store_values(to_values, i);
        }
    }
};

// Online softmax of a wave's 16 queries. ROW_LANES neighbouring lanes share a row's greatest score and sum.
template <u32 HEAD, bool AROUND> struct MatrixState {
    using S = Sizes<HEAD>;
    Frag::A queries[S::PARTS];
    Frag::C values[S::SUMMED_PARTS];
    u32 length;
    f32 most, sum;

    DEV static u32 row() { return lane() / ROW_LANES; }
    DEV static u32 first_token() { return lane() % ROW_LANES * ROW_TOKENS; }

    // `room`: LDS for QUERIES rows of SUMMED values; free again after the next block barrier.
    DEV MatrixState(const Tile<AROUND>& tile, f16* room) : length(tile.length(wave() * SIDE + row())) {
        f16* mine = room + wave() * SIDE * S::STAGED_STRIDE;
        UNROLL for (u32 first = 0; first < HEAD; first += S::SUMMED) {
            if (first > 0) wave_sync();
            stage(tile, mine, first);
            wave_sync();
            UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) {
                queries[first / SIDE + part] = Frag::load_a_lds(mine + part * SIDE, S::STAGED_STRIDE);
            }
        }
        begin();
    }

    // Values from `first` on of the wave's queries, as f16.
    DEV static void stage(const Tile<AROUND>& tile, f16* mine, u32 first) {
        for (u32 i = lane(); i < SIDE * S::SUMMED / 4; i += WAVE) {
            u32 query = wave() * SIDE + i / (S::SUMMED / 4), d = i % (S::SUMMED / 4) * 4;
            u32x4 raw = {0, 0, 0, 0};
            if (query < tile.queries()) raw = load16(tile.task.q + tile.at(query) + first + d);
            f32 scale = tile.task.scale;
            store8(mine + i / (S::SUMMED / 4) * S::STAGED_STRIDE + d,
                   {pack_f16x2(as_f32(raw.x) * scale, as_f32(raw.y) * scale),
                    pack_f16x2(as_f32(raw.z) * scale, as_f32(raw.w) * scale)});
        }
    }

    // Begins a walk.
    DEV void begin() {
        most = NO_SCORE, sum = 0.0f;
        UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) values[part] = Frag::zero();
    }

    // Writes the scores of the page's tokens to the wave's `scores`: [16][SCORE_STRIDE].
    DEV void score(const f16* keys, f32* scores) const {
        UNROLL for (u32 half = 0; half < KV_PAGE_TOKENS / SIDE; half++) {
            Frag::C c = Frag::zero();
            UNROLL for (u32 part = 0; part < S::PARTS; part++) {
                c = Frag::mma(queries[part],
                              Frag::load_bt_lds(keys + half * SIDE * S::KEY_STRIDE + part * SIDE, S::KEY_STRIDE), c);
            }
            UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
                scores[Frag::C::row(l) * SCORE_STRIDE + half * SIDE + Frag::C::col(l)] = c.get(l);
            }
        }
        wave_sync();
    }

    // Caps the wave's `scores`; each lane those that it weighs next. Apart from `score`, which has no register left for it.
    DEV void hold(f32* scores, f32 cap) const {
        ROLLED for (u32 i = 0; i < ROW_TOKENS; i++) {
            const u32 at = row() * SCORE_STRIDE + first_token() + i;
            scores[at] = capped(scores[at], cap);
        }
    }

    // Lowers the wave's `scores` by their distance from the query; each lane those that it weighs next.
    DEV void lower(const Tile<AROUND>& tile, f32* scores, u32 start) const {
        const u32 query = wave() * SIDE + row();
        if (query >= tile.queries()) return;
        const f32 slope = tile.slope(query), away = f32(tile.position(query)) - f32(start + first_token());
        ROLLED for (u32 i = 0; i < ROW_TOKENS; i++) {
            const u32 at = row() * SCORE_STRIDE + first_token() + i;
            scores[at] = fma_f32(-slope, abs_f32(away - f32(i)), scores[at]);
        }
    }

    // The first token that the lane's query sees.
    DEV u32 seen_from(const Tile<AROUND>& tile) const {
        if constexpr (AROUND) return tile.seen_from(wave() * SIDE + row());
        else return first_seen(length, tile.task.window);
    }

    // Removes tokens before the queries' windows from the wave's `scores`; each lane removes those that it weighs next.
    DEV void hide(f32* scores, u32 start, u32 from) const {
        u32 mine = start + first_token(), unseen = max_u32(from, mine) - mine;
        ROLLED for (u32 i = 0; i < min_u32(unseen, ROW_TOKENS); i++) {
            scores[row() * SCORE_STRIDE + first_token() + i] = -INFINITY_F32;
        }
    }

    // Writes weights 2^(score - greatest) to the wave's `weights`: [16][WEIGHT_STRIDE]. `sum` adds the rounded weights.
    DEV void weigh(const f32* scores, f16* weights, u32 start) {
        f32 score[ROW_TOKENS], top = most;
        UNROLL for (u32 i = 0; i < ROW_TOKENS; i += 4) {
            u32x4 raw = load16(scores + row() * SCORE_STRIDE + first_token() + i);
            UNROLL for (u32 j = 0; j < 4; j++) score[i + j] = as_f32(raw[j]);
        }
        u32 seen = length > start + first_token() ? length - start - first_token() : 0;
        UNROLL for (u32 i = 0; i < ROW_TOKENS; i++) top = i < seen ? max_f32(top, score[i]) : top;
        top = wave_max<ROW_LANES>(top);
        f32 factor = exp2_f32(most - top), more = 0.0f;
        UNROLL for (u32 i = 0; i < ROW_TOKENS; i += 8) {
            u32 packed[4];
            UNROLL for (u32 j = 0; j < 8; j += 2) {
                f32 a = i + j < seen ? exp2_f32(score[i + j] - top) : 0.0f;
                f32 b = i + j + 1 < seen ? exp2_f32(score[i + j + 1] - top) : 0.0f;
                packed[j / 2] = pack_f16x2(a, b);
                f32x2 rounded = unpack_f16x2(packed[j / 2]);
                more += rounded.x + rounded.y;
            }
            store16(weights + row() * WEIGHT_STRIDE + first_token() + i, {packed[0], packed[1], packed[2], packed[3]});
        }
        sum = fma_f32(sum, factor, wave_sum<ROW_LANES>(more));
        // Most pages raise no row's maximum; then nothing is rescaled. A factor of 1 changes no bit.
        if (any(top != most)) rescale(factor);
        most = top;
        wave_sync();
    }

    DEV void rescale(f32 factor) {
        UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
            f32 of_row = shfl(factor, Frag::C::row(l) * ROW_LANES);
            UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) values[part].set(l, values[part].get(l) * of_row);
        }
    }

    DEV void add(const f16* weights, const f16* page) {
        UNROLL for (u32 half = 0; half < KV_PAGE_TOKENS / SIDE; half++) {
            Frag::A a = Frag::load_a_lds(weights + half * SIDE, WEIGHT_STRIDE);
            UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) {
                values[part] = Frag::mma(
                    a, Frag::load_bt_lds(page + part * SIDE * VALUE_STRIDE + half * SIDE, VALUE_STRIDE), values[part]);
            }
        }
    }

    // Values from `first` on, as a block's share of the tile.
    DEV void hand_in(const Tile<AROUND>& tile, u32 first) const {
        u32 mine = wave() * SIDE + row();
        if (lane() % ROW_LANES == 0 && mine < tile.queries()) tile.store_stats(mine, most, sum);
        UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
            u32 query = wave() * SIDE + Frag::C::row(l);
            if (query >= tile.queries()) continue;
            f32* to = tile.part(block_z(), query) + first + Frag::C::col(l);
            UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) to[part * SIDE] = values[part].get(l);
        }
    }

    // Values from `first` on, as the result.
    DEV void store(const Tile<AROUND>& tile, u32 first) const {
        f32 inverse = 1.0f / (sum + tile.sink(wave() * SIDE + row(), most));
        UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
            u32 query = wave() * SIDE + Frag::C::row(l);
            f32 of_row = shfl(inverse, Frag::C::row(l) * ROW_LANES);
            if (query >= tile.queries()) continue;
            UNROLL for (u32 part = 0; part < S::SUMMED_PARTS; part++) {
                tile.store(query, first + part * SIDE + Frag::C::col(l), values[part].get(l) * of_row);
            }
        }
    }
};

template <u32 HEAD, bool AROUND, class T> DEV void run_matrix(const Task& t) {
    using S = Sizes<HEAD>;
    LDS(room, f16[S::KEYS + S::VALUES]);
    LDS(all_scores, f32[WAVES][SIDE * SCORE_STRIDE]);
    LDS(all_weights, f16[WAVES][SIDE * WEIGHT_STRIDE]);
    wait_for_predecessor();
    Tile<AROUND> tile(t);
    HeadPages<T> pages = tile.template pages<T>();
    f16 *keys = room, *values = room + S::KEYS;
    f32* scores = all_scores[wave()];
    f16* weights = all_weights[wave()];
    u32 length = tile.longest(QUERIES), wave_first = wave() * SIDE;
    // Tokens of this wave's longest query; 0 where the wave has none.
    u32 wave_length = wave_first < tile.queries() ? tile.longest(wave_first + SIDE) : 0;
    // The first token that any query of the wave sees, and the first that all of them see.
    u32 wave_from = tile.seen_from(wave_first), wave_whole = first_seen(wave_length, t.window);
    if constexpr (AROUND) wave_whole = tile.seen_from(min_u32(wave_first + SIDE, tile.queries()) - 1);
    MatrixState<HEAD, AROUND> state(tile, room);
    Transfer<HEAD, T> transfer;
    u32 from = tile.seen_from(0), first = from / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    const Walk walk = tile.walk(first, length);
    ROLLED for (u32 summed = 0; summed < HEAD; summed += S::SUMMED) {
        if (summed > 0) state.begin();
        if (S::AHEAD && walk.start < walk.end) {
            const u32 start = walk.start;
            transfer.fetch(pages, start / KV_PAGE_TOKENS, max_u32(from, start) - start, length - start, summed);
        }
        for (u32 start = walk.start; start < walk.end; start += KV_PAGE_TOKENS) {
            if (S::AHEAD) {
                barrier_lds();
                transfer.store(keys, values);
            } else if (!transfer.WHOLE) {
                barrier_lds();
                transfer.move(pages, start / KV_PAGE_TOKENS, max_u32(from, start) - start, length - start, summed, keys, values);
            } else {
                transfer.fetch(pages, start / KV_PAGE_TOKENS, max_u32(from, start) - start, length - start, summed);
                barrier_lds();
                transfer.store(keys, values);
            }
            barrier_lds();
            u32 next = start + KV_PAGE_TOKENS;
            if (S::AHEAD && next < walk.end) transfer.fetch(pages, next / KV_PAGE_TOKENS, 0, length - next, summed);
            if (start >= wave_length || next <= wave_from) continue;
            state.score(keys, scores);
            if (t.cap != 0.0f) state.hold(scores, t.cap);
            if constexpr (AROUND) {
                if (t.falls != 0) state.lower(tile, scores, start);
            }
            if (start < wave_whole) state.hide(scores, start, state.seen_from(tile));
            state.weigh(scores, weights, start);
            state.add(weights, values);
        }
        if (grid_z() == 1) state.store(tile, summed);
        else state.hand_in(tile, summed);
    }
    if (grid_z() > 1) {
        static_assert(QUERIES * SHARE_STRIDE <= WAVES * SIDE * SCORE_STRIDE, "weights of shares lie where scores lay");
        tile.join(all_scores[0]);
    }
    tile.store_scales();
}

} // namespace prefill
#endif
