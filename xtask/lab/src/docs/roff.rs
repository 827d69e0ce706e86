//! Converts text to roff, the format of manual pages.

/// The `.TH` line.
pub fn title(name: &str, section: u8) -> String {
    let name = escaped(name);
    format!(".TH \"{name}\" \"{section}\" \"\" \"ROCmForge\" \"ROCmForge\"\n")
}

/// Escapes text so that no part of it is a request.
pub fn escaped(text: &str) -> String {
    let mut out = String::new();
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            out.push('\n');
        }
        // A line that starts with one of these would be a request.
        if line.starts_with(['.', '\'']) {
            out.push_str("\\&");
        }
        for c in line.chars() {
            match c {
                '\\' => out.push_str("\\e"),
                '-' => out.push_str("\\-"),
                '"' => out.push_str("\\(dq"),
                '`' => out.push_str("\\(ga"),
                '\'' => out.push_str("\\(aq"),
                '^' => out.push_str("\\(ha"),
                '~' => out.push_str("\\(ti"),
                c if c.is_ascii() => out.push(c),
                c => out.push_str(&format!("\\[u{:04X}]", u32::from(c))),
            }
        }
    }
    out
}

/// As [`escaped`], with text in backquotes in bold.
pub fn marked(text: &str) -> String {
    let mut out = String::new();
    for (at, piece) in text.split('`').enumerate() {
        let piece = escaped(piece);
        out.push_str(&if at % 2 == 1 { format!("\\fB{piece}\\fR") } else { piece });
    }
    // The first character may have been in bold.
    out.lines().map(guarded).collect::<Vec<_>>().join("\n")
}

fn guarded(line: &str) -> String {
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() }
}
