//! All other kernels.

use super::kernels;

kernels! {}
