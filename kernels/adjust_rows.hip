// adjust_rows: logits[l][id] = change(logits[l][id]) for each change of row l; then MASKED for each id that its mask leaves out
//
// A change adds its bias, then divides a logit above 0 by its repeat and multiplies any other, then subtracts its less.
// MASKED is the lowest finite number: sample_greedy takes a logit that is not finite for a fault of the model.
// Shapes     logits: f32[L][vocab], changed in place; rows: u32[L][ROW_WORDS] as `Row` below reads them;
//            changes: u32[changes of all rows][CHANGE_WORDS] as `Change` below has them, or null; the word BEFORE is written,
//            for ids that the mask leaves out with any bits; masks: u32[masked rows][mask_words], bit id % 32 of word id / 32,
//            or null; a logit that is not finite is not masked
// Requires   ids below vocab, none twice in a row; repeat above 0; mask_words >= ceil(vocab / 32)
// Launch     grid = (ceil(vocab / 2048), L), block = 256
// Alignment  4 bytes
// Sums in    no sums; f32, each operation rounded once, as LogitChange::apply of src/backend/types.rs
// Tolerance  0: equal bits
// Reference  each operation in f64, rounded to f32, in tests/kernels/sample.rs
// Moves      20 bytes in and 8 out per change; with a mask vocab / 8 bytes in, and up to 8 * vocab bytes in and out; memory-bound
#include "prelude/prelude.h"
#include "sampling/report.h"

namespace adjust {

constexpr u32 THREADS = 256, TOKENS = 2048, ROW_WORDS = 4, CHANGE_WORDS = 5, NO_MASK = 0xffffffffu;
constexpr f32 MASKED = -3.40282346638528859811704183484516925e+38f;

// A row's words: its first change, their number, and the number of its mask or NO_MASK. The last word is not read.
struct Row {
    u32 first, count, mask;
    DEV explicit Row(const u32* words) : first(words[0]), count(words[1]), mask(words[2]) {}
};

enum Change {
    ID,
    BIAS,
    REPEAT,
    LESS,
    BEFORE, // becomes the bits of the logit as it was
};

DEV f32 changed(f32 logit, const u32* change) {
    f32 biased = logit + as_f32(change[BIAS]), repeat = as_f32(change[REPEAT]);
    f32 scaled = biased > 0.0f ? biased / repeat : biased * repeat;
    return scaled - as_f32(change[LESS]);
}

DEV bool allows(const u32* mask, u32 token) { return (mask[token / 32] >> (token % 32) & 1) != 0; }

} // namespace adjust

KERNEL(256, adjust_rows, f32* logits, const u32* rows, u32* changes, const u32* masks, u32 vocab, u32 mask_words) {
    using namespace adjust;
    wait_for_predecessor();
    Row row(rows + (u64)block_y() * ROW_WORDS);
    u32 first = block_x() * TOKENS;
    f32* x = logits + (u64)block_y() * vocab;
    bool masked = row.mask != NO_MASK;
    // The words of this block's tokens. They may lie in the host's memory, where few long reads are faster than many short ones.
    LDS(mask, u32[TOKENS / 32]);
    if (masked && thread_id() < TOKENS / 32 && first / 32 + thread_id() < mask_words) {
        mask[thread_id()] = masks[(u64)row.mask * mask_words + first / 32 + thread_id()];
    }
    barrier_lds();
    for (u32 i = thread_id(); i < row.count; i += THREADS) {
        u32* change = changes + (u64)(row.first + i) * CHANGE_WORDS;
        u32 id = change[ID];
        if (id < first || id - first >= TOKENS) continue;
        f32 before = x[id];
        change[BEFORE] = as_u32(before);
        // Another thread may mask it at this moment.
        if (!masked || allows(mask, id - first)) x[id] = changed(before, change);
    }
    if (!masked) return;
    UNROLL for (u32 i = 0; i < TOKENS / THREADS; i++) {
        u32 id = first + i * THREADS + thread_id();
        if (id < vocab && !allows(mask, id - first) && is_finite(x[id])) x[id] = MASKED;
    }
}
