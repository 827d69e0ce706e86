// sample_draw: report[l] = token drawn by temperature, top-k, top-p and min-p; tops[l] = the likeliest tokens
//
// The order is that of src/backend/cpu/sample.rs: top-k, top-p and min-p at temperature 1, temperature, draw. Candidates, ranks
// and random numbers are the same.
// Shapes     logits: f32[L][vocab]; settings: u32[L][8] as `Settings` below reads them; reports: as sample_greedy wrote them;
//            tops: u32[L][top_stride][2], or null: id and bits of the logit of the row's likeliest tokens, falling;
//            a row that failed, or that is greedy and wants no list, is not written
// Requires   vocab <= 2^20; sample_greedy ran before
// Launch     grid = L, block = 1024
// Alignment  4 bytes
// Sums in    u64, exact in any order: weights are whole multiples of 2^-40 of the likeliest token's, each within 2^-22 of its
//            f64 value. A row's bits depend on the row alone
// Tolerance  0 for the token, unless the random number or a cut lies within 2^-21 of the total from a boundary between two
//            tokens; 0 for tops; the sum of weights within 2^-22 of its f64 value
// Reference  a sort and f64 sums in tests/kernels/sample.rs
// Moves      4 * vocab bytes in per row, twice for ranked draws and lists, once for others; up to fifteen times where more than
//            1024 tokens compete (a flat distribution, a large top-k); bound by the one block of a row
#include "prelude/prelude.h"

#include "sampling/shares.h"

namespace sampling {

constexpr u32 LIST_MAX = 1024, ID_BITS = 20, SETTING_WORDS = 8;
// Linear bins that select the list's tokens: logits up to 64 below the best.
constexpr f32 BINS_PER_LOGIT = 64.0f;
constexpr u32 EVERY = 0xffffffffu;

struct Settings {
    f32 temperature;
    u32 top_k;
    f32 top_p, min_p_log; // ln(min_p), minus infinity for none
    u64 seed;
    u32 position, top;

    DEV explicit Settings(const u32* words)
        : temperature(as_f32(words[0])), top_k(words[1]), top_p(as_f32(words[2])), min_p_log(as_f32(words[3])),
          seed((u64)words[5] << 32 | words[4]), position(words[6]), top(words[7]) {}

    // A NaN draws as temperature 0 does.
    DEV bool greedy() const { return !(temperature > 0.0f); }
};

DEV u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// A number in [0, 1) that depends on seed and position only: two rounds of SplitMix64's finaliser, as on the CPU.
DEV double uniform_number(u64 seed, u32 position) {
    constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;
    u64 bits = mix(mix(seed + GOLDEN) + GOLDEN * ((u64)position + 1));
    return (double)(bits >> 11) / 9007199254740992.0;
}

// Keeps the tokens that rank at or before a given one.
struct Cut {
    u32 likelihood, id;
    DEV bool keeps(u32 of, u32 token) const { return of > likelihood || (of == likelihood && token <= id); }
};

// A row's tokens: all of them, or a list in LDS of the likeliest, which then holds every token that can still be drawn.
struct Tokens {
    const f32* logits;
    u32 vocab;
    f32* list_logits;
    u32* list_ids;
    u32 listed;
    bool use_list;

    template <class Use> DEV void each(Use use) const {
        if (use_list) {
            if (thread_id() < listed) use(list_logits[thread_id()], list_ids[thread_id()]);
            return;
        }
#pragma unroll 4
        for (u32 id = thread_id(); id < vocab; id += THREADS) use(logits[id], id);
    }
};

DEV u32 linear_bin(f32 logit, f32 best) {
    f32 below = (best - logit) * BINS_PER_LOGIT;
    return BINS - 1 - (below < (f32)(BINS - 1) ? (u32)below : BINS - 1);
}

struct Draw {
    Tokens tokens;
    Settings settings;
    f32 best;
    Room& room;
    u32* slots;
    // At least as many as have a weight at this temperature or a share at temperature 1. They are the likeliest.
    u32 can_be_drawn;

    // The token at which the running sum of kept tokens' weights, likeliest first, passes `target` (below their sum).
    template <class Weight> DEV Cut rank(u64 target, Weight weight) {
        u32 found = descend<32>(
            [&](auto add) {
                tokens.each([&](f32 logit, u32 id) {
                    u64 w = weight(logit, id);
                    if (w != 0) add(likelihood(logit), w);
                });
            },
            target, room);
        u32 last = (1u << ID_BITS) - 1;
        u32 by_id = descend<ID_BITS>(
            [&](auto add) {
                tokens.each([&](f32 logit, u32 id) {
                    if (likelihood(logit) != found) return;
                    u64 w = weight(logit, id);
                    if (w != 0) add(last - id, w);
                });
            },
            target, room);
        return {found, last - by_id};
    }

    template <class Weight> DEV u64 sum(Weight weight) {
        u64 mine = 0;
        tokens.each([&](f32 logit, u32 id) { mine += weight(logit, id); });
        return total(mine, room);
    }

    // Lists the tokens whose bin is at least `bin` and that `cut` keeps. At most LIST_MAX of them exist.
    DEV void list(u32 bin, Cut cut) {
        tokens.use_list = false;
        barrier_lds();
        if (thread_id() == 0) slots[0] = 0;
        barrier_lds();
        tokens.each([&](f32 logit, u32 id) {
            if (linear_bin(logit, best) < bin || !cut.keeps(likelihood(logit), id)) return;
            u32 slot = atomic_add(&slots[0], 1);
            if (slot < LIST_MAX) tokens.list_logits[slot] = logit, tokens.list_ids[slot] = id;
        });
        barrier_lds();
        tokens.listed = min_u32(slots[0], LIST_MAX);
    }

    // Lists the likeliest tokens, in whole bins. Returns the sum of all shares at temperature 1.
    DEV u64 list_likeliest() {
        clear_bins(room);
        u64 mine = 0;
        // Each thread counts its tokens of the lowest bin itself. A mask puts most of the vocabulary there, and additions to one bin
        // wait for each other.
        u32 lowest = 0, drawable = 0;
        const f32 scale = min_f32(LOG2_E, LOG2_E / settings.temperature);
        tokens.each([&](f32 logit, u32) {
            const u32 bin = linear_bin(logit, best);
            if (bin == 0) lowest++;
            else atomic_add(&room.low[bin], 1);
            mine += share(logit, best, (double)LOG2_E);
            drawable += (best - logit) * scale < (f32)(SHARE_BITS + 2) ? 1 : 0;
        });
        lowest = team_sum(lowest);
        if (team_lane() == 0) atomic_add(&room.low[0], lowest);
        u64 shares = total(mine, room), target = LIST_MAX;
        can_be_drawn = (u32)total(drawable, room);
        // The bin that holds token LIST_MAX does not fit; all bins above it do.
        u32 bin = tokens.vocab <= LIST_MAX ? 0 : locate_bin(target, room) + 1;
        list(bin, {0, EVERY});
        return shares;
    }

    DEV u32 draw_ranked(u64 shares) {
        u32 top_k = settings.top_k == 0 ? tokens.vocab : min_u32(settings.top_k, tokens.vocab);
        bool by_p = settings.top_p < 1.0f;
        auto plain = [&](f32 logit, u32) { return share(logit, best, (double)LOG2_E); };
        Cut cut{0, EVERY};
        // The list serves where it holds all tokens that are kept, or all that have a weight: a mask may leave fewer than top_k.
        // Else each pass reads all tokens.
        tokens.use_list = true;
        const bool lists_all = can_be_drawn <= tokens.listed;
        if (lists_all) top_k = top_k < tokens.listed ? top_k : tokens.vocab;
        else if (top_k < tokens.vocab) tokens.use_list = top_k <= tokens.listed;
        else tokens.use_list = tokens.listed == tokens.vocab || sum(plain) > portion(shares);
        if (top_k < tokens.vocab) {
            cut = rank(top_k - 1, [](f32, u32) { return (u64)1; });
            if (by_p) shares = sum([&](f32 logit, u32 id) { return kept(cut, logit, id) ? plain(logit, id) : 0; });
        }
        if (by_p) {
            cut = rank(portion(shares), [&](f32 logit, u32 id) { return kept(cut, logit, id) ? plain(logit, id) : 0; });
        }
        f32 floor = min_p_floor();
        double scale = 1.4426950408889634 / (double)settings.temperature;
        auto weight = [&](f32 logit, u32 id) {
            return kept(cut, logit, id) && logit >= floor ? share(logit, best, scale) : 0;
        };
        return rank(below(sum(weight)), weight).id;
    }

    // As on the CPU: tokens by id; first choose a chunk of 1024, then a token of the chunk.
    DEV u32 draw_by_id() {
        f32 floor = min_p_floor();
        double scale = 1.4426950408889634 / (double)settings.temperature;
        auto weight = [&](u32 id) {
            f32 logit = id < tokens.vocab ? tokens.logits[id] : best;
            return id < tokens.vocab && logit >= floor ? share(logit, best, scale) : 0;
        };
        clear_bins(room);
        // Every team makes the same number of turns: the two teams of a wave of 64 reduce together.
        for (u32 first = 0; first * THREADS < tokens.vocab; first += THREADS / TEAM) {
            u32 chunk = first + team_id();
            u64 part = 0;
#pragma unroll 4
            for (u32 i = 0; i < THREADS; i += TEAM) part += weight(chunk * THREADS + i + team_lane());
            part = team_sum(part);
            if (team_lane() == 0) room.low[chunk] = (u32)part, room.high[chunk] = (u32)(part >> 32);
        }
        barrier_lds();
        u64 mine = bin_weight(room, thread_id());
        u64 target = below(total(mine, room));
        u32 chunk = locate(mine, target, room);
        return chunk * THREADS + locate(weight(chunk * THREADS + thread_id()), target, room);
    }

    DEV static bool kept(const Cut& cut, f32 logit, u32 id) { return cut.keeps(likelihood(logit), id); }

    // The sum of shares that the last token of the nucleus passes: top_p of `shares`.
    DEV u64 portion(u64 shares) const {
        double wanted = (double)settings.top_p * (double)shares;
        u64 whole = wanted > 0.0 ? (u64)wanted : 0;
        // The sum may equal top_p of the shares, so the target is one less if that is whole.
        return whole > 0 && (double)whole == wanted ? whole - 1 : whole;
    }

    DEV u64 below(u64 weights) const {
        u64 target = (u64)(uniform_number(settings.seed, settings.position) * (double)weights);
        return target < weights ? target : weights - 1;
    }

    DEV f32 min_p_floor() const { return min_f32(best + settings.min_p_log, best); }

    // Writes the likeliest tokens of the list, by rank.
    DEV void write_tops(u32* tops, u32 count) {
        if (thread_id() >= tokens.listed) return;
        u32 mine = likelihood(tokens.list_logits[thread_id()]), id = tokens.list_ids[thread_id()], rank = 0;
        for (u32 i = 0; i < tokens.listed; i++) {
            rank += Cut{mine, id}.keeps(likelihood(tokens.list_logits[i]), tokens.list_ids[i]) ? 1 : 0;
        }
        // The rank counts the token itself.
        if (rank > count) return;
        tops[2 * (rank - 1)] = id;
        tops[2 * (rank - 1) + 1] = as_u32(tokens.list_logits[thread_id()]);
    }
};

} // namespace sampling

KERNEL(1024, sample_draw, const f32* logits, const u32* settings, u32* reports, u32* tops, u32 vocab, u32 top_stride) {
    using namespace sampling;
    LDS(room, Room);
    LDS(list_logits, f32[LIST_MAX]);
    LDS(list_ids, u32[LIST_MAX]);
    LDS(slots, u32[1]);
    wait_for_predecessor();
    u32 row = block_x();
    u32* report = reports + (u64)row * REPORT_WORDS;
    Settings wanted(settings + (u64)row * SETTING_WORDS);
    u32 count = tops ? min_u32(min_u32(wanted.top, vocab), min_u32(top_stride, LIST_MAX)) : 0;
    if (report[REPORT_FAILED] != 0 || (wanted.greedy() && count == 0)) return;
    Tokens tokens{logits + (u64)row * vocab, vocab, list_logits, list_ids, 0, false};
    Draw draw{tokens, wanted, as_f32(report[REPORT_BEST]), room, slots, vocab};
    bool ranked = !wanted.greedy() && ((wanted.top_k != 0 && wanted.top_k < vocab) || wanted.top_p < 1.0f);
    u64 shares = ranked || count > 0 ? draw.list_likeliest() : 0;
    u32 id = wanted.greedy() ? report[REPORT_ID] : ranked ? draw.draw_ranked(shares) : draw.draw_by_id();
    if (count > draw.tokens.listed) {
        draw.tokens.use_list = false;
        Cut cut = draw.rank(count - 1, [](f32, u32) { return (u64)1; });
        draw.list(0, cut);
    }
    if (count > 0) draw.write_tops(tops + (u64)row * top_stride * 2, count);
    // All threads have read the report.
    barrier();
    if (thread_id() != 0) return;
    report[REPORT_ID] = id;
    report[REPORT_LOGIT] = as_u32(draw.tokens.logits[id]);
    report[REPORT_TOTAL_LOW] = (u32)shares;
    report[REPORT_TOTAL_HIGH] = (u32)(shares >> 32);
    report[REPORT_TOP] = count;
}
