//! Finds the end of a JSON value in a text that is still growing.

/// Looks at each byte once, however the text arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Bytes that were looked at.
    at: usize,
    depth: usize,
    in_text: bool,
    escaped: bool,
}

/// The result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The value ends before this byte.
    End(usize),
    /// The value goes on.
    More,
    /// Objects, or a list of objects, do not begin so.
    No,
}

impl Scan {
    /// Scans from this byte.
    pub fn from(at: usize) -> Self {
        Self { at, ..Self::default() }
    }

    /// Scans the rest of an object from the text's beginning.
    pub fn inside() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    /// The scan of the text without the bytes that were looked at.
    #[must_use]
    pub fn of_rest(self) -> Self {
        Self { at: 0, ..self }
    }

    /// Bytes that were looked at.
    pub fn at(self) -> usize {
        self.at
    }

    /// Goes on in the same text, which may have grown. White space before the value is skipped. The value must be an object, or
    /// a list whose first element is an object or a list.
    pub fn go_on(&mut self, text: &str) -> Found {
        for (byte, at) in text.bytes().skip(self.at).zip(self.at..) {
            self.at = at + 1;
            match (self.in_text, byte) {
                (true, _) if self.escaped => self.escaped = false,
                (true, b'\\') => self.escaped = true,
                (_, b'"') if self.depth > 0 => self.in_text = !self.in_text,
                (true, _) => {}
                (false, b'{' | b'[') => self.depth += 1,
                (false, b'}' | b']') if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Found::End(at + 1);
                    }
                }
                (false, _) if self.depth == 0 && !byte.is_ascii_whitespace() => return Found::No,
                (false, _) => {}
            }
        }
        Found::More
    }
}

/// Whether a text may be the beginning of an object, or of a list of objects. `None` until enough of it is there.
pub fn may_begin(text: &str) -> Option<bool> {
    let mut bytes = text.bytes().filter(|byte| !byte.is_ascii_whitespace());
    match (bytes.next(), bytes.next()) {
        (Some(b'{'), Some(next)) => Some(matches!(next, b'"' | b'}')),
        (Some(b'['), Some(next)) => Some(next == b'{'),
        (Some(b'{' | b'['), None) | (None, _) => None,
        (Some(_), _) => Some(false),
    }
}
