//! Makes the manual page of the configuration from the example file that shows every key.

use std::fmt::Write;

use super::roff::{escaped, marked, title};

/// Adjacent keys, and their common description.
#[derive(Debug, PartialEq)]
pub struct Entry {
    /// Table name; empty for keys outside of tables.
    pub table: String,
    /// Names and values as in the example.
    pub keys: Vec<(String, String)>,
    /// Description.
    pub text: String,
}

/// Parses the example. A line `#key = value` shows a default, and `# text` is a comment. A comment before no key
/// describes the whole file: an entry without keys.
pub fn entries(example: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let (mut table, mut comment) = (String::new(), String::new());
    let mut after_key = false;
    for line in example.lines().chain([""]) {
        if let Some(text) = line.strip_prefix("# ") {
            comment.push_str(text);
            comment.push('\n');
            after_key = false;
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name.clone_into(&mut table);
        } else if let Some((key, value)) = line.trim_start_matches('#').split_once(" = ") {
            let key = (key.to_owned(), value.to_owned());
            match entries.last_mut() {
                Some(last) if after_key => last.keys.push(key),
                _ => {
                    let text = std::mem::take(&mut comment);
                    entries.push(Entry { table: table.clone(), keys: vec![key], text });
                }
            }
            after_key = true;
            continue;
        } else if !comment.is_empty() {
            let text = std::mem::take(&mut comment);
            entries.push(Entry { table: table.clone(), keys: vec![], text });
        }
        after_key = false;
    }
    entries
}

/// The manual page, in roff.
pub fn page(entries: &[Entry]) -> String {
    let mut page = title("rocmforge-config", 5);
    page.push_str(
        ".SH NAME\nrocmforge\\-config, config.toml \\- configuration of the rocmforged inference daemon\n\
         .SH SYNOPSIS\n/etc/rocmforge/config.toml\n.br\n/etc/rocmforge/conf.d/*.toml\n.SH DESCRIPTION\n",
    );
    let mut table = "";
    for entry in entries {
        if entry.table != table {
            table = &entry.table;
            let _ = writeln!(page, ".SH \"TABLE [{}]\"", escaped(table));
        }
        for (number, (key, value)) in entry.keys.iter().enumerate() {
            let tag = if number == 0 { ".TP" } else { ".TQ" };
            let _ = writeln!(page, "{tag}\n\\fB{}\\fR = {}", escaped(key), escaped(value));
        }
        if entry.keys.is_empty() {
            page.push_str(".PP\n");
        }
        let _ = writeln!(page, "{}", marked(entry.text.trim_end()));
    }
    page.push_str(
        ".SH \"SEE ALSO\"\n.BR rocmforged (8),\n.BR rocmforge\\-client (1),\n.BR rocmforge\\-protocol (7)\n",
    );
    page
}
