//! The alphabet of byte-level vocabularies: each byte written as one printable character (GPT-2 `bytes_to_unicode`).
//!
//! Printable bytes of Latin-1 stand for themselves; the other 68, in order, are U+0100 to U+0143.

/// The character that stands for `byte` in the texts of a byte-level vocabulary.
pub fn char_of_byte(byte: u8) -> char {
    match byte {
        // 33 bytes below the first printable one, then DEL to NBSP, then the soft hyphen.
        0..=32 => offset(u32::from(byte)),
        127..=160 => offset(33 + u32::from(byte) - 127),
        173 => offset(67),
        _ => char::from(byte),
    }
}

/// The byte that `character` stands for; `None` for a character outside the alphabet.
pub fn byte_of_char(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        33..=126 | 161..=172 | 174..=255 => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 127,
        0x143 => 173,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

fn offset(index: u32) -> char {
    // At most U+0143, which is a character.
    char::from_u32(0x100 + index).unwrap_or('\u{fffd}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_printable_character() {
        let mut seen = std::collections::HashSet::new();
        for byte in 0..=255 {
            let character = char_of_byte(byte);
            assert!(!character.is_whitespace() && !character.is_control(), "{byte}");
            assert!(seen.insert(character), "{byte}");
            assert_eq!(byte_of_char(character), Some(byte));
        }
        // As written in the vocabularies of the GPT-2 family.
        assert_eq!([' ', '\n', '\t', '\r'].map(|c| char_of_byte(c as u8)), ['Ġ', 'Ċ', 'ĉ', 'č']);
        assert_eq!(char_of_byte(0xad), 'Ń');
    }

    #[test]
    fn other_characters_stand_for_no_byte() {
        for character in [' ', '\n', '\u{7f}', '\u{a0}', '\u{ad}', '\u{144}', '日', '\u{10ffff}'] {
            assert_eq!(byte_of_char(character), None, "{character:?}");
        }
    }
}
