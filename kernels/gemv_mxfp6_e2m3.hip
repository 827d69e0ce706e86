// gemv_mxfp6_e2m3: out[row] = W x[row] (+ bias), W of MXFP6_E2M3 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small_floats.h"

#if defined(__GFX12__)
// In order, gate and up of eight rows would need one register more than a lane has.
template <class Tile> constexpr bool ORDERS_LOADS<MXFP6_E2M3, 8, Tile> = false;
#endif

GEMV_QUANT(mxfp6_e2m3, MXFP6_E2M3)
