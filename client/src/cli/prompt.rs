//! Texts and token ids from arguments or standard input.

use std::io::{IsTerminal, Read};

use rocmforge_client::wire::limits;

use super::report::Failure;

/// The argument; standard input if it is `-` or missing.
pub fn text(argument: Option<&str>) -> Result<String, Failure> {
    match argument {
        Some(text) if text != "-" => return Ok(text.to_owned()),
        None if std::io::stdin().is_terminal() => {
            return Err(Failure::usage(
                "nothing to read: give it as an argument, or pipe it in; `-` reads the terminal",
            ));
        }
        _ => {}
    }
    // Reads one byte more than a request holds, so that longer input is refused instead of cut.
    let mut bytes = Vec::new();
    let read = std::io::stdin().take(limits::TEXT_BYTES_MAX as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::usage(&format!("standard input: {error}")))?;
    if bytes.len() > limits::TEXT_BYTES_MAX {
        let max = limits::TEXT_BYTES_MAX;
        return Err(Failure::TooLong(format!(
            "standard input has more than {max} bytes, the most that a request holds: pass less"
        )));
    }
    String::from_utf8(bytes).map_err(|error| Failure::usage(&format!("standard input is not UTF-8: {error}")))
}

/// Parses token ids, separated by commas or white space.
pub fn ids(text: &str) -> Result<Vec<u32>, Failure> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let parse = |word: &str| {
        word.parse()
            .map_err(|_| Failure::usage(&format!("{word:?} is not a token id: give a number below 2^32")))
    };
    words.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_spaces() {
        assert_eq!(ids("1, 403,407\n 5 ").unwrap(), [1, 403, 407, 5]);
        assert_eq!(ids("").unwrap(), Vec::<u32>::new());
        assert!(ids("1,-2").is_err());
        assert!(ids("4294967296").is_err());
    }
}
