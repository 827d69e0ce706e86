//! Kernels that multiply with weights, and those that lay weights out.

use super::kernels;

kernels! {}
