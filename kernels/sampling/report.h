// The rank of logits and the report of a drawn token, which the sampling kernels share.
//
// Likelier tokens rank first, equal ones by id, lowest first. As one number: `likelihood` in the upper bits, ~id in the lower.
#pragma once
#include "../prelude/prelude.h"

// A row's report, u32[REPORT_WORDS].
constexpr u32 REPORT_WORDS = 8;
enum ReportWord {
    REPORT_ID,         // the drawn token
    REPORT_FAILED,     // 1 when a logit was NaN or infinite; then the other words mean nothing
    REPORT_LOGIT,      // bits of the drawn token's f32 logit
    REPORT_BEST,       // bits of the greatest logit
    REPORT_TOTAL_LOW,  // sum over the vocabulary of e^(logit - greatest) * 2^SHARE_BITS, low word; with top_logprobs only
    REPORT_TOTAL_HIGH, // high word
    REPORT_TOP,        // number of likeliest tokens that are listed
};

// Weights of tokens are whole multiples of 2^-SHARE_BITS, so that their sums do not depend on the order.
constexpr u32 SHARE_BITS = 40;

// Rises with the logit; -0 lies below 0.
DEV u32 likelihood(f32 logit) {
    u32 b = as_u32(logit);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
DEV f32 logit_of(u32 likelihood) {
    return as_f32(likelihood & 0x80000000u ? likelihood ^ 0x80000000u : ~likelihood);
}
DEV bool is_finite(f32 x) { return (as_u32(x) & 0x7f800000u) != 0x7f800000u; }
