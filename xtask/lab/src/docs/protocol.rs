//! Makes the manual page of the protocol from `PROTOCOL.md`, without the fields of each message.

use std::fmt::Write;

use super::roff::{escaped, marked, title};

/// Sections of the document that the page includes. The other sections describe layouts, which only the document has.
const SECTIONS: [&str; 7] = ["1", "3", "4", "6", "8", "9", "10"];

/// The manual page, in roff.
pub fn page(document: &str) -> String {
    let mut page = title("rocmforge-protocol", 7);
    page.push_str(
        ".SH NAME\nrocmforge\\-protocol \\- what goes over the socket of rocmforged\n.SH DESCRIPTION\n\
         This page lists the rules for programs. Every byte of every message is described in\n\
         .IR /usr/share/doc/rocmforge/PROTOCOL.md ,\nwhich also has the sections that this page names and omits.\n",
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

/// A table row as tag and text: the tag is its first two cells. `None` for head rows and separator rows.
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
