//! Sources as the user names them: a URL, or a place on a hub. And the names of files.

use super::PullError;

/// Ending of a model's file.
pub const ENDING: &str = ".gguf";

/// Most bytes of a model's name, as in the protocol.
const NAME_BYTES_MAX: usize = 255 - ENDING.len();

/// A source.
#[derive(Debug, PartialEq, Eq)]
pub enum Named {
    Url(String),
    Hub(Place),
}

/// A model on a hub.
#[derive(Debug, PartialEq, Eq)]
pub struct Place {
    /// Owner and repository, with a `/` between them.
    pub repository: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// The file's path in the repository.
    pub file: Option<String>,
    /// A part of the file's name, such as the type of its weights.
    pub tag: Option<String>,
}

/// A file to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub url: String,
    /// Its name in the directory.
    pub file: String,
    pub sha256: Option<[u8; 32]>,
    pub bytes: Option<u64>,
    /// The URL is the hub's, which gets the token.
    pub of_hub: bool,
}

impl Wanted {
    /// The file of a URL, under its last segment's name.
    pub fn of_url(url: &str, sha256: Option<[u8; 32]>) -> Self {
        let path = url.split(['?', '#']).next().unwrap_or(url);
        let file = decoded(path.rsplit('/').next().unwrap_or(path));
        Self { url: url.to_owned(), file, sha256, bytes: None, of_hub: false }
    }
}

/// Reads what the user named.
pub fn parse(text: &str) -> Result<Named, PullError> {
    let wrong = |reason| PullError::Source { source_text: text.to_owned(), reason };
    if text.starts_with("https://") || text.starts_with("http://") {
        return Ok(Named::Url(text.to_owned()));
    }
    if text.contains("://") {
        return Err(wrong("only http and https are fetched"));
    }
    let (place, revision) = text.rsplit_once('@').unwrap_or((text, "main"));
    let mut segments = place.splitn(3, '/');
    let (Some(owner), Some(repository)) = (segments.next(), segments.next()) else {
        return Err(wrong("a name has a `/`"));
    };
    let file = segments.next().map(str::to_owned);
    let (repository, tag) = match repository.split_once(':') {
        Some((repository, tag)) => (repository, Some(tag.to_owned())),
        None => (repository, None),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c);
    let is_word = |word: &str| !word.is_empty() && word.chars().all(plain) && word != "." && word != "..";
    if !is_word(owner) || !is_word(repository) {
        return Err(wrong("owner and repository are of letters, digits, `-`, `_` and `.`"));
    }
    if tag.as_deref().is_some_and(|tag| !is_word(tag)) || (tag.is_some() && file.is_some()) {
        return Err(wrong("a tag is one word after the repository, without a file"));
    }
    let is_path = |path: &str| path.split('/').all(|segment| !["", ".", ".."].contains(&segment));
    if revision.is_empty() || file.as_deref().is_some_and(|file| !is_path(file)) {
        return Err(wrong("a revision or a segment of the path is empty"));
    }
    let repository = format!("{owner}/{repository}");
    Ok(Named::Hub(Place { repository, revision: revision.to_owned(), file, tag }))
}

/// Reads a digest of 64 hexadecimal digits.
pub fn digest(text: &str) -> Result<[u8; 32], String> {
    let wrong = || format!("{text:?} is no sha256, which has 64 hexadecimal digits");
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let mut bytes = [0; 32];
    if !rest.is_empty() || pairs.len() != bytes.len() || !text.is_ascii() {
        return Err(wrong());
    }
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(*high).zip(digit(*low)).map(|(high, low)| high * 16 + low).ok_or_else(wrong)?;
    }
    Ok(bytes)
}

/// The digits of a digest.
pub fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The files under the names that they get: that of `name`, if the user gave one. Parts of a model keep their numbers.
pub fn renamed(mut wanted: Vec<Wanted>, name: Option<&str>) -> Result<Vec<Wanted>, PullError> {
    for file in &mut wanted {
        if let Some(name) = name {
            let name = name.strip_suffix(ENDING).unwrap_or(name);
            let (_, part) = without_part(&file.file);
            file.file = format!("{name}{part}{ENDING}");
        }
        check_name(&file.file)?;
    }
    Ok(wanted)
}

/// The model's name: that of its file, or of its parts.
pub fn model_name(wanted: &[Wanted]) -> String {
    wanted.first().map_or(String::new(), |file| without_part(&file.file).0.to_owned())
}

/// A file's name without `.gguf`, cut before the number of its part: `-00001-of-00003`, or nothing.
pub fn without_part(file: &str) -> (&str, &str) {
    let stem = file.strip_suffix(ENDING).unwrap_or(file);
    let cut = stem.len().saturating_sub("-00001-of-00003".len());
    let Some((name, part)) = stem.split_at_checked(cut) else { return (stem, "") };
    let number = |text: &str| text.len() == 5 && text.bytes().all(|digit| digit.is_ascii_digit());
    match part.strip_prefix('-').and_then(|numbers| numbers.split_once("-of-")) {
        Some((one, all)) if number(one) && number(all) => (name, part),
        _ => (stem, ""),
    }
}

fn check_name(file: &str) -> Result<(), PullError> {
    let wrong = |reason| Err(PullError::Name { file: file.to_owned(), reason });
    let Some(name) = file.strip_suffix(ENDING) else { return wrong("it does not end in .gguf") };
    if name.is_empty() || name.starts_with('.') || name.trim() != name {
        return wrong("it is empty, begins with a dot, or has a space at an end");
    }
    if name.len() > NAME_BYTES_MAX {
        return wrong("it is longer than 250 bytes");
    }
    if name.contains('/') || rocmforge_client::printable(name) != name {
        return wrong("it has a `/`, or a character that does not show");
    }
    Ok(())
}

/// A segment of a URL, with `%41` as `A`. A segment that then is no text in UTF-8 stays as it is.
fn decoded(segment: &str) -> String {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| segment.to_owned())
}

/// A path for a URL, with all but plain characters as their codes.
pub fn encoded(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte);
    path.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(repository: &str, revision: &str, file: Option<&str>, tag: Option<&str>) -> Named {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let (repository, revision) = (repository.to_owned(), revision.to_owned());
        Named::Hub(Place { repository, revision, file: own(file), tag: own(tag) })
    }

    #[test]
    fn names_have_an_owner_and_may_have_more() {
        let good = [
            ("a/b", place("a/b", "main", None, None)),
            ("a/b:Q4_K_M@v1", place("a/b", "v1", None, Some("Q4_K_M"))),
            ("a/b.c/d/e f.gguf", place("a/b.c", "main", Some("d/e f.gguf"), None)),
            ("https://x.org/a", Named::Url("https://x.org/a".into())),
        ];
        for (text, named) in good {
            assert_eq!(parse(text).unwrap(), named, "{text}");
        }
        for text in
            ["", "story", "a/", "/b", "a/..", "a/b:", "a/b:c/d", "a/b@", "a/b/../c", "ftp://a/b", "a b/c"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_digest_has_64_digits() {
        let text = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        assert_eq!(hex(&digest(text).unwrap()), text);
        assert_eq!(digest(&text.to_uppercase()), digest(text));
        for wrong in ["", "9f", &text[1..], &format!("{text}0"), &text.replace('9', "g"), &"ä".repeat(32)] {
            assert!(digest(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_of_files_come_from_urls_and_are_checked() {
        let file = |url: &str| Wanted::of_url(url, None).file;
        assert_eq!(file("https://x.org/a/b%20c.gguf?download=true#x"), "b c.gguf");
        assert_eq!(file("https://x.org/%zz%4"), "%zz%4");
        let named = |url: &str, name: Option<&str>| {
            renamed(vec![Wanted::of_url(url, None)], name).map(|wanted| wanted[0].file.clone())
        };
        assert_eq!(named("https://x.org/b.gguf", Some("c")).unwrap(), "c.gguf");
        assert_eq!(
            named("https://x.org/b-00002-of-00003.gguf", Some("c.gguf")).unwrap(),
            "c-00002-of-00003.gguf"
        );
        for url in [
            "https://x.org/",
            "https://x.org/b.bin",
            "https://x.org/.gguf",
            "https://x.org/%2e%2e%2fb.gguf",
            "https://x.org/a%1b.gguf",
        ] {
            assert!(named(url, None).is_err(), "{url}");
        }
        assert!(named("https://x.org/b.gguf", Some(&"x".repeat(251))).is_err());
    }

    #[test]
    fn a_part_has_two_numbers_of_five_digits() {
        assert_eq!(without_part("m-00001-of-00003.gguf"), ("m", "-00001-of-00003"));
        for whole in
            ["m.gguf", "m-0001-of-00003.gguf", "m-00001-of-0000x.gguf", "-of-.gguf", "ääääääääääääääää.gguf"]
        {
            assert_eq!(without_part(whole).1, "", "{whole}");
        }
    }

    #[test]
    fn paths_in_urls_have_codes_for_what_is_not_plain() {
        assert_eq!(encoded("a/b c+ä.gguf"), "a/b%20c%2B%C3%A4.gguf");
        assert_eq!(decoded(&encoded("b c+ä?#%.gguf")), "b c+ä?#%.gguf");
    }
}
