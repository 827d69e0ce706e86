//! Every payload of the protocol. `PROTOCOL.md` describes each byte.
//!
//! Rules: no `usize`, no floats below 32 bits, no maps, no recursion, no elements of size zero, no serde attributes.
//! Every message ends in `ext`. Once released, a message's fields stay, and enum variants are only appended.

mod chat;
mod daemon;
mod doctor;
mod embedding;
mod generate;
mod limits;
mod model;
mod relevance;
mod residency;
mod samplers;
mod scores;
mod sessions;
mod steering;
mod users;

pub use chat::*;
pub use daemon::*;
pub use doctor::*;
pub use embedding::*;
pub use generate::*;
pub use limits::*;
pub use model::*;
pub use relevance::*;
pub use residency::*;
pub use samplers::*;
pub use scores::*;
pub use sessions::*;
pub use steering::*;
pub use users::*;

/// Extensions: `(key, bytes)` pairs at the end of every message, no key twice. An unknown key with [`EXT_CRITICAL`]
/// set fails the request; other unknown keys are ignored.
pub type Ext = Vec<(u16, Vec<u8>)>;

/// The little-endian u64 of an extension.
fn number(ext: &Ext, key: u16) -> Option<u64> {
    let (_, bytes) = ext.iter().find(|(of, _)| *of == key)?;
    Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?))
}

/// Extensions with those of the numbers that are above 0.
pub fn number_ext<const N: usize>(numbers: [(u16, u64); N]) -> Ext {
    let there = numbers.into_iter().filter(|(_, number)| *number > 0);
    there.map(|(key, number)| (key, number.to_le_bytes().to_vec())).collect()
}

/// High bit of an extension key: the receiver must understand the extension.
pub const EXT_CRITICAL: u16 = 0x8000;
