//! Character classes for pre-tokenisers: the first letter of the Unicode general category, case, and white space.

use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// A set of character classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u8);

impl Class {
    pub const LETTER: Self = Self(1);
    pub const NUMBER: Self = Self(2);
    pub const MARK: Self = Self(4);
    pub const PUNCTUATION: Self = Self(8);
    pub const SYMBOL: Self = Self(16);
    /// `\s`: the property White_Space, for any category.
    pub const SPACE: Self = Self(32);
    /// `\p{Lu}` and `\p{Lt}`: letters that begin a word.
    pub const UPPER: Self = Self(64);
    /// `\p{Ll}`.
    pub const LOWER: Self = Self(128);

    /// The classes of `character`. ASCII by table, others by binary search (about 12 steps).
    pub fn of(character: char) -> Self {
        match ASCII.get(character as usize) {
            Some(&class) => Self(class),
            None => Self(classify(character)),
        }
    }

    /// True when the sets share a class.
    pub fn any(self, classes: Self) -> bool {
        self.0 & classes.0 != 0
    }

    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const ASCII: [u8; 128] = ascii();

const fn ascii() -> [u8; 128] {
    let mut table = [0; 128];
    let mut code = 0;
    while code < 128 {
        let byte = code as u8;
        table[code] = match byte {
            b'0'..=b'9' => Class::NUMBER.0,
            b'A'..=b'Z' => Class::LETTER.0 | Class::UPPER.0,
            b'a'..=b'z' => Class::LETTER.0 | Class::LOWER.0,
            b' ' | b'\t'..=b'\r' => Class::SPACE.0,
            b'$' | b'+' | b'<'..=b'>' | b'^' | b'`' | b'|' | b'~' => Class::SYMBOL.0,
            b'!'..=b'~' => Class::PUNCTUATION.0,
            _ => 0,
        };
        code += 1;
    }
    table
}

fn classify(character: char) -> u8 {
    let class = match character.general_category_group() {
        GeneralCategoryGroup::Letter => Class::LETTER.0 | case(character),
        GeneralCategoryGroup::Number => Class::NUMBER.0,
        GeneralCategoryGroup::Mark => Class::MARK.0,
        GeneralCategoryGroup::Punctuation => Class::PUNCTUATION.0,
        GeneralCategoryGroup::Symbol => Class::SYMBOL.0,
        GeneralCategoryGroup::Separator | GeneralCategoryGroup::Other => 0,
    };
    if character.is_whitespace() { class | Class::SPACE.0 } else { class }
}

/// The case of a letter.
fn case(letter: char) -> u8 {
    match letter.general_category() {
        GeneralCategory::UppercaseLetter | GeneralCategory::TitlecaseLetter => Class::UPPER.0,
        GeneralCategory::LowercaseLetter => Class::LOWER.0,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ascii_table_agrees_with_unicode() {
        for code in 0..128u8 {
            assert_eq!(Class::of(char::from(code)), Class(classify(char::from(code))), "{code:#x}");
        }
    }

    #[test]
    fn characters_beyond_ascii_have_their_classes() {
        for (character, class) in [
            ('é', Class::LETTER.or(Class::LOWER)),
            ('É', Class::LETTER.or(Class::UPPER)),
            ('ǅ', Class::LETTER.or(Class::UPPER)),
            ('ª', Class::LETTER),
            ('日', Class::LETTER),
            ('²', Class::NUMBER),
            ('٣', Class::NUMBER),
            ('\u{301}', Class::MARK),
            ('。', Class::PUNCTUATION),
            ('€', Class::SYMBOL),
            ('\u{3000}', Class::SPACE),
            ('\u{85}', Class::SPACE),
        ] {
            assert_eq!(Class::of(character), class, "{character:?}");
        }
        assert_eq!(Class::of('\u{200d}'), Class(0));
    }
}
