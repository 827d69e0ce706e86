//! A file's map of characters (`tokenizer.ggml.precompiled_charsmap`): what sequences of bytes become before text is cut.
//!
//! SentencePiece compiles it. It begins with the length of an array in bytes. The array of 32-bit nodes follows, then texts that
//! end with a zero byte. All numbers are little-endian. The array is a trie of double-array form (`darts-clone`). A node's child
//! for a byte is at the exclusive or of the node's offset and the byte, and states that byte. A node may lead to a leaf, whose
//! value is the place of a text. Everything in it comes from a file, and is checked when it is followed.

use super::TokenizerError;

/// Longest sequence that is replaced, and longest replacement, in bytes: so no file makes texts much longer or slower. Real ones
/// stay below 40.
const SEQUENCE_BYTES_MAX: usize = 64;

/// A map; the empty one changes nothing.
#[derive(Debug, Default)]
pub(super) struct CharsMap {
    nodes: Vec<u32>,
    texts: Vec<u8>,
}

/// A node of the trie.
#[derive(Clone, Copy)]
struct Node(u32);

impl Node {
    /// The number that makes a child's number of its byte.
    fn offset(self) -> u32 {
        (self.0 >> 10) << ((self.0 & 1 << 9) >> 6)
    }

    /// The byte that leads to it; above 255 for a leaf.
    fn label(self) -> u32 {
        self.0 & (1 << 31 | 0xff)
    }

    fn has_leaf(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    /// The value of a leaf.
    fn value(self) -> u32 {
        self.0 & !(1 << 31)
    }
}

impl CharsMap {
    /// Reads a map. No bytes are the empty map.
    ///
    /// # Errors
    /// [`TokenizerError::CharsMap`] where the array does not fit.
    pub fn new(bytes: &[u8]) -> Result<Self, TokenizerError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let broken = || TokenizerError::CharsMap { bytes: bytes.len() };
        let (length, rest) = bytes.split_first_chunk().ok_or_else(broken)?;
        let (array, texts) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(broken)?;
        let (nodes, odd) = array.as_chunks();
        if !odd.is_empty() {
            return Err(broken());
        }
        Ok(Self {
            nodes: nodes.iter().map(|node| u32::from_le_bytes(*node)).collect(),
            texts: texts.to_vec(),
        })
    }

    /// Calls `each` with the characters that `text` becomes. At each place the longest known sequence is replaced.
    pub fn map(&self, text: &str, mut each: impl FnMut(char)) {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            match self.longest(rest) {
                Some((bytes, replacement)) => {
                    replacement.chars().for_each(&mut each);
                    rest = &rest[bytes..];
                }
                None => {
                    each(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
    }

    /// The longest known beginning of `text` and what it becomes. `None` for none, and for one that ends inside a character or
    /// becomes no text of [`SEQUENCE_BYTES_MAX`].
    fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let node = |at: u32| self.nodes.get(at as usize).copied().map(Node);
        let mut at = node(0)?.offset();
        let mut found = None;
        for (index, byte) in text.bytes().take(SEQUENCE_BYTES_MAX).enumerate() {
            at ^= u32::from(byte);
            let Some(child) = node(at).filter(|child| byte != 0 && child.label() == u32::from(byte)) else {
                break;
            };
            at ^= child.offset();
            if child.has_leaf() {
                found = Some((index + 1, node(at)?.value()));
            }
        }
        let (bytes, place) = found?;
        let replacement = self.texts.get(place as usize..)?;
        let end = replacement.iter().take(SEQUENCE_BYTES_MAX + 1).position(|byte| *byte == 0)?;
        let replacement = &replacement[..end];
        text.is_char_boundary(bytes).then_some((bytes, std::str::from_utf8(replacement).ok()?))
    }
}
