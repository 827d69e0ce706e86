// sample_greedy: report[l] = argmax of logits[l] (lowest id of equals), and whether all of them are finite
//
// Shapes     logits: f32[L][vocab]; parts: u64[L][grid x], scratch; counters: u32[L], 0 before the first launch and after each
//            reports: u32[L][REPORT_WORDS] (sampling/report.h); REPORT_TOP becomes 0, on failure REPORT_ID too
// Requires   vocab > 0
// Launch     grid = (ceil(vocab / 2048), L), block = 256
// Alignment  4 bytes; 8 for parts
// Sums in    no sums; ranks are compared as integers, -0 equal to 0, as in argmax of src/backend/cpu/sample.rs
// Tolerance  0: equal ids and flags, equal bits of the logit
// Reference  the greatest logit that tests/kernels/sample.rs placed
// Moves      4 * vocab bytes in per row; memory-bound
#include "prelude/prelude.h"
#include "common/reduce.h"
#include "sampling/report.h"

namespace greedy {

constexpr u32 THREADS = 256, TOKENS = 2048;
// Above every rank: marks a logit that is not finite.
constexpr u64 FAILED = ~0ull;

DEV u64 rank(f32 logit, u32 id) {
    if (!is_finite(logit)) return FAILED;
    return (u64)likelihood(logit == 0.0f ? 0.0f : logit) << 32 | (u32)~id;
}

} // namespace greedy

KERNEL(256, sample_greedy, const f32* logits, u64* parts, u32* counters, u32* reports, u32 vocab) {
    using namespace greedy;
    LDS(room, u64[TEAMS_MAX]);
    LDS(room_of_parts, u64[TEAMS_MAX]);
    wait_for_predecessor();
    u32 row = block_y(), first = block_x() * TOKENS;
    const f32* x = logits + (u64)row * vocab;
    u64 best = 0;
    UNROLL for (u32 i = 0; i < TOKENS / THREADS; i++) {
        u32 id = first + i * THREADS + thread_id();
        if (id < vocab) best = Max::of(best, rank(x[id], id));
    }
    best = teams_max(best, room);
    u64* part = parts + (u64)row * grid_x();
    if (thread_id() == 0) part[block_x()] = best;
    if (!last_block(counters + row, grid_x())) return;
    best = 0;
    for (u32 i = thread_id(); i < grid_x(); i += THREADS) best = Max::of(best, part[i]);
    best = teams_max(best, room_of_parts);
    if (thread_id() != 0) return;
    bool failed = best == FAILED;
    u32 id = failed ? 0 : ~(u32)best, logit = failed ? 0 : as_u32(logit_of((u32)(best >> 32)));
    u32* report = reports + (u64)row * REPORT_WORDS;
    report[REPORT_ID] = id;
    report[REPORT_FAILED] = failed;
    report[REPORT_LOGIT] = report[REPORT_BEST] = logit;
    report[REPORT_TOP] = 0;
}
