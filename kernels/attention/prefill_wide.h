// attn_prefill on the wide matrix unit: f16 queries, keys, weights and values, f32 sums; heads of 64 or 128 values.
//
// Two teams of four waves take 64 queries each, 16 a wave: the queries and their sums stay in registers. Keys and values of 64
// tokens go through LDS as they lie in their pages, by copies that run two steps ahead; both teams read them there. Scores become
// weights where they are: a product's sums lie in a lane as the operand of the next product wants them. While a team weighs the
// scores of a step, the matrix unit has its weights of the step before, and the keys of the next one.
#pragma once
#include "prefill.h"

#if HAS_WIDE_MATRIX
namespace prefill {

constexpr u32 WIDE_TEAMS = 2, WIDE_QUERIES = 64 * WIDE_TEAMS, WIDE_THREADS = WIDE_TEAMS * Wide::TEAM * WAVE;
// Tokens of a step, products of their weights with values, and steps in LDS: three are used and two on their way.
constexpr u32 STEP_TOKENS = 64, STEP_PRODUCTS = STEP_TOKENS / 16, STEP_PAGES = STEP_TOKENS / KV_PAGE_TOKENS, SLOTS = 5;
// Values of a tile: eight rows of 64; and of eight tokens in two tiles side by side. Heads of 128 have tiles of keys apart from
// those of values, heads of 64 have one of keys beside one of values.
constexpr u32 TILE = 512, OCTET = 2 * TILE;

template <u32 HEAD> struct WideSizes {
    static constexpr bool SPLIT = HEAD == 128;
    static constexpr u32 PLANE = STEP_TOKENS / 8 * OCTET, SLOT = SPLIT ? 2 * PLANE : PLANE;
    // Where a slot's values begin.
    static constexpr u32 VALUES = SPLIT ? PLANE : TILE;
    // Chunks of 16 bytes of a key, and the tokens whose chunks the block copies together.
    static constexpr u32 CHUNKS = HEAD / 8, TOGETHER = WIDE_THREADS / CHUNKS;
};

// Copies keys and values to LDS, step by step.
template <u32 HEAD> struct StepFeed {
    using S = WideSizes<HEAD>;
    static constexpr u32 AHEAD = SLOTS - 3;
    const HeadPages<f16>& pages;
    f16* slots;
    // Tokens that some query sees and the block walks.
    u32 from, end;
    // The step that is copied next, and its slot; and the slot that is taken next.
    u32 start, slot, taken;
    // Addresses of its pages, and the numbers of those of the step after it. Each is loaded a step before it is needed: waits
    // for them took a sixth of the time.
    u64 bases[STEP_PAGES];
    u32 numbers[STEP_PAGES];

    DEV StepFeed(const HeadPages<f16>& pages, f16* slots, u32 first, u32 from, u32 end)
        : pages(pages), slots(slots), from(from), end(end), start(first), slot(0), taken(0) {
        UNROLL for (u32 i = 0; i < STEP_PAGES; i++) {
            bases[i] = pages.page_base[number(first, i)];
            numbers[i] = number(first + STEP_TOKENS, i);
        }
        UNROLL for (u32 i = 0; i < AHEAD; i++) copy();
    }

    // The number of a step's page. Pages of no token that is walked may not be read, and may have none.
    DEV u32 number(u32 step, u32 i) const {
        return pages.table[min_u32(max_u32(step + i * KV_PAGE_TOKENS, from), end - 1) / KV_PAGE_TOKENS];
    }
    // Copies the next step, if there is one. Tokens that are not walked become 0.
    DEV void copy() {
        if (start < end) {
            const u32 chunk = thread_id() % S::CHUNKS;
            f16* to = slots + slot * S::SLOT + chunk / 8 * TILE;
            UNROLL for (u32 i = 0; i < STEP_TOKENS / S::TOGETHER; i++) {
                const u32 token = i * S::TOGETHER + thread_id() / S::CHUNKS, row = token % 8;
                f16* keys = global_address<f16>(bases[i * S::TOGETHER / KV_PAGE_TOKENS] + pages.head_offset);
                const u32 from_page = token % KV_PAGE_TOKENS * HEAD + chunk * 8;
                f16* at = to + token / 8 * OCTET + row * 64 + (chunk % 8 ^ row) * 8;
                const bool there = start + token - from < end - from;
                copy16_or_0_async(at, keys + from_page, there);
                copy16_or_0_async(at + S::VALUES, pages.values_of(keys) + from_page, there);
            }
            start += STEP_TOKENS;
            slot = (slot + 1) % SLOTS;
            UNROLL for (u32 i = 0; i < STEP_PAGES; i++) {
                bases[i] = pages.page_base[numbers[i]];
                numbers[i] = number(start + STEP_TOKENS, i);
            }
        }
        end_copies();
    }
    // The next step, which is in LDS then. All threads call, when their products of all but the last two steps are done.
    DEV Wide::Address take() {
        wait_copies<AHEAD - 1>();
        Wide::publish();
        barrier_lds();
        copy();
        const Wide::Address step = Wide::address(slots + taken * S::SLOT);
        taken = (taken + 1) % SLOTS;
        return step;
    }
};

// Online softmax of a wave's 16 queries, of which a lane has parts of two.
template <u32 HEAD> struct WideState {
    static constexpr u32 HELD = Wide::HELD, PARTS = HEAD / 16, LANES = Wide::K_LANES;
    u32 queries[PARTS][2 * HELD];
    Wide::Sums<HEAD> values;
    // Of two steps in turn: some are made while the others are read.
    Wide::Sums<STEP_TOKENS> scores[2];
    u32 weights[2][STEP_PRODUCTS][2 * HELD];
    // Of each query: tokens from `from` to `end` are its own; the greatest score; the lane's part of the sum of weights.
    u32 from[HELD], end[HELD];
    f32 most[HELD], sum[HELD];

    DEV static u32 query(u32 h) { return wave() * 16 + Wide::held(h); }

    template <class Tile> DEV WideState(const Tile& tile, u32 walk_end) {
        UNROLL for (u32 h = 0; h < HELD; h++) {
            const u32 i = query(h);
            from[h] = tile.seen_from(i), end[h] = min_u32(tile.length(i), walk_end);
            most[h] = NO_SCORE, sum[h] = 0.0f;
            // Queries that the tile lacks are not stored. They have values of one that is there: loads need no branch.
            const f32* q = tile.task.q + tile.at(min_u32(i, tile.queries() - 1)) + 2 * Wide::k_lane();
            UNROLL for (u32 part = 0; part < PARTS; part++) {
                UNROLL for (u32 half = 0; half < 2; half++) {
                    const u32x2 raw = load8(q + part * 16 + half * 8);
                    queries[part][h + HELD * half] = pack_f16x2(as_f32(raw.x) * tile.task.scale, as_f32(raw.y) * tile.task.scale);
                }
            }
        }
        values.clear();
        Wide::begin(queries);
    }

    // Before products: all that they read is complete.
    template <u32 TURN> DEV void begin() {
        scores[1 - TURN].settle();
        values.settle();
        Wide::begin(weights[TURN]);
    }
    // Starts the products of queries and a step's keys.
    template <u32 TURN> DEV void score(Wide::Address step) {
        UNROLL for (u32 part = 0; part < PARTS; part++) {
            if (part == 0) scores[TURN].start(queries[part], step, part / 4, part % 4);
            else scores[TURN].add(queries[part], step, part / 4, part % 4);
        }
        Wide::end();
    }
    // Starts the products of a step's weights and its values.
    template <u32 TURN> DEV void add(Wide::Address step) {
        const Wide::Address at = Wide::past(step, WideSizes<HEAD>::VALUES);
        UNROLL for (u32 i = 0; i < STEP_PRODUCTS; i++) values.add_down(weights[TURN][i], at, i);
        Wide::end();
    }
    DEV void rescale(const f32 (&factor)[HELD]) {
        values.settle();
        UNROLL for (u32 i = 0; i < values.ROWS; i++) {
            UNROLL for (u32 h = 0; h < HELD; h++) values.set(i, h, values.get(i, h) * factor[h]);
        }
    }

    template <u32 TURN> DEV void hold(f32 cap) {
        UNROLL for (u32 i = 0; i < scores[TURN].ROWS; i++) {
            UNROLL for (u32 h = 0; h < HELD; h++) scores[TURN].set(i, h, capped(scores[TURN].get(i, h), cap));
        }
    }
    // Removes tokens that are not a query's own.
    template <u32 TURN> DEV void hide(u32 start) {
        UNROLL for (u32 i = 0; i < scores[TURN].ROWS; i++) {
            const u32 token = start + scores[TURN].row(i);
            UNROLL for (u32 h = 0; h < HELD; h++) {
                if (token < from[h] || token >= end[h]) scores[TURN].set(i, h, -INFINITY_F32);
            }
        }
    }
    // Makes weights 2^(score - greatest); `sum` adds the rounded ones. Values so far are to be multiplied by `factor`. Chains of
    // sums are short: two waves of a unit do not hide longer ones.
    template <u32 TURN> DEV void weigh(f32 (&factor)[HELD]) {
        constexpr u32 ROWS = Wide::Sums<STEP_TOKENS>::ROWS, CHAINS = 4;
        UNROLL for (u32 h = 0; h < HELD; h++) {
            f32 tops[CHAINS], more[CHAINS];
            UNROLL for (u32 i = 0; i < ROWS; i++) {
                const f32 score = scores[TURN].get(i, h);
                tops[i % CHAINS] = i < CHAINS ? score : max_f32(tops[i % CHAINS], score);
            }
            const f32 top = wave_max<LANES>(max_f32(most[h], max_f32(max_f32(tops[0], tops[1]), max_f32(tops[2], tops[3]))));
            factor[h] = exp2_or_0_f32(most[h] - top);
            most[h] = top;
            UNROLL for (u32 i = 0; i < ROWS; i += 2) {
                const auto weight = [&](u32 i) { return exp2_or_0_f32(scores[TURN].get(i, h) - top); };
                const u32 both = pack_f16x2(weight(i), weight(i + 1));
                weights[TURN][i / 4][h + HELD * (i / 2 % 2)] = both;
                const f32x2 rounded = unpack_f16x2(both);
                const f32 two = rounded.x + rounded.y;
                more[i / 2 % CHAINS] = i / 2 < CHAINS ? two : more[i / 2 % CHAINS] + two;
            }
            sum[h] = fma_f32(sum[h], factor[h], (more[0] + more[1]) + (more[2] + more[3]));
        }
    }

    // The sum of a query's weights.
    DEV f32 total(u32 h) const { return wave_sum<LANES>(sum[h]); }

    // The result, or with several blocks this one's share of it.
    template <class Tile> DEV void store(const Tile& tile) const {
        UNROLL for (u32 h = 0; h < HELD; h++) {
            const u32 i = query(h);
            const f32 all = total(h);
            if (i >= tile.queries()) continue;
            if (grid_z() == 1) {
                const f32 inverse = 1.0f / (all + tile.sink(i, most[h]));
                UNROLL for (u32 d = 0; d < values.ROWS; d += 2) {
                    tile.store_two(i, values.row(d), values.get(d, h) * inverse, values.get(d + 1, h) * inverse);
                }
            } else {
                if (Wide::k_lane() == 0) tile.store_stats(i, most[h], all);
                f32* to = tile.part(block_z(), i);
                UNROLL for (u32 d = 0; d < values.ROWS; d += 2) {
                    store8(to + values.row(d), {as_u32(values.get(d, h)), as_u32(values.get(d + 1, h))});
                }
            }
        }
    }
};

// A block's walk through the tokens of its tile.
template <u32 HEAD> struct WideWalk {
    WideState<HEAD>& state;
    StepFeed<HEAD>& feed;
    // Tokens that all queries of the wave see.
    u32 whole_from, whole_end;
    f32 cap;
    // The step that is weighed next, and where it and the one before are in LDS.
    u32 start;
    Wide::Address step, before;

    // Until all products are done. Most steps raise no query's greatest score; then nothing is rescaled. A factor of 1 changes no
    // bit.
    DEV void wait(const f32 (&factor)[Wide::HELD]) {
        Wide::wait<0>();
        if (any(factor[0] != 1.0f || factor[1] != 1.0f)) state.rescale(factor);
    }
    // Caps and hides scores of step `start` before they are weighed. A branch while products run would make the compiler wait for
    // them.
    template <u32 TURN> DEV void prepare() {
        state.scores[TURN].settle();
        if (cap != 0.0f) state.template hold<TURN>(cap);
        if (start < whole_from || start + STEP_TOKENS > whole_end) state.template hide<TURN>(start);
    }

    DEV void begin() {
        step = feed.take();
        state.scores[0].settle();
        Wide::begin(state.queries);
        state.template score<0>(step);
        Wide::wait<0>();
        prepare<0>();
    }
    // Weighs a step, of number TURN modulo 2, that another one follows.
    template <u32 TURN, bool FIRST> DEV void advance() {
        f32 factor[Wide::HELD];
        const Wide::Address next = feed.take();
        state.template begin<1 - TURN>();
        state.template score<1 - TURN>(next);
        if constexpr (!FIRST) state.template add<1 - TURN>(before);
        state.template weigh<TURN>(factor);
        wait(factor);
        start += STEP_TOKENS;
        before = step, step = next;
        prepare<1 - TURN>();
    }
    // Weighs the last step.
    template <u32 TURN, bool FIRST> DEV void finish() {
        f32 factor[Wide::HELD];
        state.template begin<1 - TURN>();
        if constexpr (!FIRST) state.template add<1 - TURN>(before);
        state.template weigh<TURN>(factor);
        wait(factor);
        state.template begin<TURN>();
        state.template add<TURN>(step);
        Wide::wait<0>();
        state.values.settle();
    }
    // Whether step `start` is the last of those up to `end`.
    DEV bool is_last(u32 end) const { return end - start <= STEP_TOKENS; }

    DEV void run(u32 end) {
        begin();
        if (is_last(end)) return finish<0, true>();
        advance<0, true>();
        ROLLED while (true) {
            if (is_last(end)) return finish<1, false>();
            advance<1, false>();
            if (is_last(end)) return finish<0, false>();
            advance<0, false>();
        }
    }
};

template <u32 HEAD> DEV void run_wide(const Task& t) {
    using S = WideSizes<HEAD>;
    LDS_DYNAMIC(f16, buffer);
    wait_for_predecessor();
    const Tile<false, WIDE_QUERIES> tile(t);
    const HeadPages<f16> pages = tile.template pages<f16>();
    const u32 length = tile.longest(WIDE_QUERIES), from = tile.seen_from(0);
    // Whole steps from a multiple: a query's weights do not depend on where its tile begins.
    const Walk walk = tile.walk(from / STEP_TOKENS * STEP_TOKENS, length);
    WideState<HEAD> state(tile, walk.end);
    // With several blocks, the pages of the first may all be before those that a query sees.
    const u32 seen = max_u32(from, walk.start);
    if (seen < walk.end) {
        const u32 first = wave() * 16, last = min_u32(first + 16, tile.queries()) - 1;
        const bool is_used = first < tile.queries();
        const u32 whole_from = is_used ? tile.seen_from(last) : 0, whole_end = is_used ? min_u32(tile.length(first), walk.end) : 0;
        // Tiles begin at multiples of 1024 bytes.
        StepFeed<HEAD> feed(pages, buffer + Wide::to_tile(buffer) / 2, walk.start, seen, walk.end);
        WideWalk<HEAD>{state, feed, whole_from, whole_end, t.cap, walk.start, {}, {}}.run(walk.end);
    }
    state.store(tile);
    if (grid_z() > 1) {
        static_assert(WIDE_QUERIES * SHARE_STRIDE * sizeof(f32) <= SLOTS * S::SLOT * sizeof(f16),
                      "weights of shares lie where steps lay");
        tile.join((f32*)buffer);
    }
    tile.store_scales();
}

} // namespace prefill
#endif
