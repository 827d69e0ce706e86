#!/usr/bin/env python3
"""make_quant_blocks.py OUT.bin: golden quant blocks, quantised and decoded by ggml.

Random rows (numpy's default_rng(1)) are quantised by the C library of the PyPI
wheel `libggml-python` and decoded twice, by that C library and by the PyPI
package `gguf`; the two must agree to the bit. F16 comes from numpy, BF16 from
gguf, and so does NVFP4, of random bytes. The 6-bit floats, which ggml has not,
come from the PyPI package `ml_dtypes`: F16's values, scaled by powers of two as
in section 6.3 of the OCP microscaling formats, and a row of random blocks.
Nothing of this project is used.

OUT.bin, little-endian: per type u32 ggml number, u32 rows, u32 values per row,
u32 bytes per row, then all rows' bytes, then all values as f32."""
import ctypes as C, glob, os, struct, sys
import ml_dtypes
import numpy as np
import libggml
from gguf import quants
from gguf.constants import GGMLQuantizationType as Q

TYPES = [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q4_K, Q.Q6_K, Q.Q5_0, Q.Q5_1, Q.Q5_K, Q.MXFP4,
         Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ3_XXS, Q.IQ3_S, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ1_S, Q.IQ1_M,
         Q.TQ1_0, Q.TQ2_0, Q.NVFP4]
# Number of the type, its floats, and the exponent of the largest.
MXFP6 = [(6023, ml_dtypes.float6_e2m3fn, 2), (6032, ml_dtypes.float6_e3m2fn, 4)]
TERNARY = {Q.TQ1_0, Q.TQ2_0}
ROWS, COLS = 3, 512

base = glob.glob(os.path.join(list(libggml.__path__)[0], "lib*", "libggml-base.so"))[0]
lib = C.CDLL(base, mode=C.RTLD_GLOBAL)
lib.ggml_quantize_chunk.restype = C.c_size_t
lib.ggml_quantize_chunk.argtypes = [C.c_int, C.c_void_p, C.c_void_p] + [C.c_int64] * 3 + [C.c_void_p]
lib.ggml_row_size.restype = C.c_size_t
lib.ggml_row_size.argtypes = [C.c_int, C.c_int64]

g = np.random.default_rng(1)
x = (g.standard_normal((ROWS, COLS)) * g.lognormal(0, 1, (ROWS, 1))).astype(np.float32)
x[0, :256] = 0         # an all-zero block
x[1, :128:7] *= 100   # outliers
x[2, :256] *= 1e-6     # scales that are f16 subnormals
ones = np.ones(COLS, np.float32)



def mxfp6(floats, largest):
    """Blocks of a byte for the power of two, 16 bytes of nibbles, 8 bytes of upper bits; and their values."""
    source = x.astype(np.float16).astype(np.float64).reshape(ROWS, -1, 32)
    most = np.abs(source).max(axis=2)
    power = np.where(most > 0, np.floor(np.log2(np.maximum(most, 1e-300))) - largest, -127).astype(int)
    codes = np.ldexp(source, -power[:, :, None]).astype(floats).view(np.uint8) & 63
    e = power + 127
    codes[2] = g.integers(0, 64, codes[2].shape)
    e[2, :] = g.integers(110, 130, e.shape[1])
    e[2, :6] = range(6)  # scales that are f32 subnormals
    raw = np.zeros((*e.shape, 25), np.uint8)
    raw[:, :, 0] = e
    raw[:, :, 1:17] = (codes[:, :, :16] & 15) | (codes[:, :, 16:] & 15) << 4
    upper = codes.reshape(*e.shape, 2, 4, 4) >> 4
    raw[:, :, 17:] = sum(upper[:, :, :, w] << 2 * w for w in range(4)).reshape(*e.shape, 8)
    values = np.ldexp(codes.view(floats).astype(np.float64), e[:, :, None] - 127) + 0.0  # no -0, as in ggml
    return raw.reshape(ROWS, -1), values.reshape(ROWS, COLS).astype(np.float32)


with open(sys.argv[1], "wb") as out:
    for q in TYPES:
        if q == Q.F16:
            raw = x.astype(np.float16).view(np.uint8).reshape(ROWS, -1)
            values = x.astype(np.float16).astype(np.float32)
        elif q == Q.NVFP4:
            raw = g.integers(0, 256, (ROWS, COLS // 64 * 36), np.uint8)
            raw[0, ::36] = [0, 0x7f, 0x80, 0xff, 1, 7, 8, 0x7e]  # scales without a value, and the least and largest ones
            values = quants.dequantize(raw, q).astype(np.float32)
        else:
            raw = np.zeros((ROWS, lib.ggml_row_size(q.value, COLS)), np.uint8)
            # Three values, the middle one for what is below half of the largest: most would be 0.
            source = np.sign(x) * np.abs(x) ** np.float32(0.1) if q in TERNARY else x
            lib.ggml_quantize_chunk(q.value, source.ctypes.data, raw.ctypes.data, 0, ROWS, COLS, ones.ctypes.data)
            values = quants.dequantize(raw, q).astype(np.float32)
            if q != Q.BF16:
                decode = getattr(lib, "dequantize_row_" + q.name.lower().replace("_k", "_K"))
                decode.argtypes, decode.restype = [C.c_void_p, C.c_void_p, C.c_int64], None
                c = np.zeros((ROWS, COLS), np.float32)
                decode(raw.ctypes.data, c.ctypes.data, ROWS * COLS)
                assert np.array_equal(c.view(np.uint32), values.view(np.uint32)), q.name
        out.write(struct.pack("<4I", q.value, ROWS, COLS, raw.shape[1]))
        out.write(raw.tobytes())
        out.write(values.astype("<f4").tobytes())
    for number, floats, largest in MXFP6:
        raw, values = mxfp6(floats, largest)
        out.write(struct.pack("<4I", number, ROWS, COLS, raw.shape[1]))
        out.write(raw.tobytes())
        out.write(values.astype("<f4").tobytes())
