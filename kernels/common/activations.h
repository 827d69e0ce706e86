// All activations by number. `activated` in prelude/numbers.h has those that fused products take.
#pragma once
#include "../prelude/prelude.h"

constexpr u32 SIGMOID = 3, LINEAR = 4, SQUARED_RELU = 5;

// 0 SiLU, 1 GELU, 3 sigmoid, 4 the value itself, 5 the square of a positive value, else 0. A NaN stays NaN. The number is the
// same for all lanes.
DEV f32 activated_by(f32 a, u32 activation) {
    if (activation == LINEAR) return a;
    if (activation == SIGMOID) return sigmoid_f32(a);
    if (activation == SQUARED_RELU) return a < 0.0f ? 0.0f : a * a;
    return activated(a, activation);
}
