//! The HIP runtime's functions, loaded at run time. One binary serves every ROCm version and machines without ROCm.
//!
//! Types and constants come from hip-sys. The compiler compares each function's type with hip-sys' declaration, with
//! two exceptions. Results and error-code arguments are plain numbers, because a code that hip-sys' enum lacks would be
//! undefined behaviour. hip-sys describes HIP 5.4. The argument lists of these functions have not changed since; the
//! properties structure has (see [`properties`]).

mod api;
mod library;
pub(in crate::backend::hip) mod properties;

pub(in crate::backend::hip) use api::{Api, Raw};
pub use library::{Library, LibraryError};

pub(in crate::backend::hip) use hip_sys::hiprt as sys;
