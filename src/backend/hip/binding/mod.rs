//! The HIP runtime's functions, found when the program runs: one binary serves every ROCm, and machines with none.
//!
//! Types and constants are hip-sys'. Each function's type is compared with hip-sys' declaration by the compiler, but for
//! two things: results are plain numbers, because a code that hip-sys' enum does not know would be undefined behaviour in it,
//! and so are the error codes that functions take. hip-sys describes HIP 5.4; argument lists of these functions have been
//! the same since, properties have not (see [`properties`]).

mod api;
mod library;
pub(super) mod properties;

pub(super) use api::{Api, Raw};
pub use library::{Library, LibraryError};

pub(super) use hip_sys::hiprt as sys;
