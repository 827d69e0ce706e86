//! The page of the protocol: what `PROTOCOL.md` says, without the fields of each message.

use std::fmt::Write;

use super::roff::{escaped, marked, title};

/// Sections of the document that the page has. The others are layouts, for which the document is the place.
const SECTIONS: [&str; 7] = ["1", "3", "4", "6", "8", "9", "10"];

/// The page.
pub fn page(document: &str) -> String {
    let mut page = title("rocmforge-protocol", 7);
    page.push_str(
        ".SH NAME\nrocmforge\\-protocol \\- what goes over the socket of rocmforged\n.SH DESCRIPTION\n\
         This page has what a program has to keep to. Every byte of every message is described in\n\
         .IR /usr/share/doc/rocmforge/PROTOCOL.md ,\nto which sections that are named here and missing belong.\n",
    );
    for section in document.split("\n## ").skip(1) {
        let (heading, text) = section.split_once('\n').unwrap_or((section, ""));
        let number = heading.split('.').next().unwrap_or_default();
        if SECTIONS.contains(&number) {
            let _ = writeln!(page, ".SH \"{}\"", escaped(&heading.to_uppercase()));
            body(&mut page, text);
        }
    }
    page.push_str(".SH \"SEE ALSO\"\n.BR rocmforged (8),\n.BR rocmforge\\-client (1)\n");
    page
}

fn body(page: &mut String, text: &str) {
    let mut code = false;
    let mut begun = true;
    for line in text.lines() {
        match line {
            _ if line.starts_with("```") => {
                page.push_str(if code { ".EE\n" } else { ".EX\n" });
                code = !code;
            }
            _ if code => page.push_str(&(escaped(line) + "\n")),
            "" => begun = true,
            _ if line.starts_with('|') => {
                if let Some((tag, rest)) = row(line) {
                    let _ =
                        writeln!(page, ".TP\n\\fB{}\\fR\n{}", marked(&tag.replace('`', "")), marked(&rest));
                }
            }
            _ => {
                if std::mem::take(&mut begun) {
                    page.push_str(".PP\n");
                }
                page.push_str(&(marked(line) + "\n"));
            }
        }
    }
}

/// A row of a table: its first two cells are what it is about. None for heads and what rules them off.
fn row(line: &str) -> Option<(String, String)> {
    let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
    let head = ["op", "offset", "code", "what", "type"].contains(&cells[0]);
    if head || cells[0].starts_with("---") {
        return None;
    }
    let (tag, rest) = cells.split_at(cells.len().min(2));
    let filled = rest.iter().filter(|cell| !cell.is_empty()).copied().collect::<Vec<_>>().join("; ");
    Some((tag.join(" "), filled))
}
