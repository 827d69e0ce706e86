//! Every payload of the protocol. `PROTOCOL.md` describes each byte.
//!
//! Rules: no `usize`, no floats below 32 bits, no maps, no recursion, no elements of size zero, no serde attributes.
//! Every message ends in `ext`. Once released, a message's fields stay, and enum variants are only appended.

mod daemon;
mod doctor;
mod generate;
mod limits;
mod model;
mod residency;
mod users;

pub use daemon::*;
pub use doctor::*;
pub use generate::*;
pub use limits::*;
pub use model::*;
pub use residency::*;
pub use users::*;

/// Extensions: `(key, bytes)` pairs at the end of every message, no key twice. An unknown key with [`EXT_CRITICAL`]
/// set fails the request; other unknown keys are ignored.
pub type Ext = Vec<(u16, Vec<u8>)>;

/// High bit of an extension key: the receiver must understand the extension.
pub const EXT_CRITICAL: u16 = 0x8000;
