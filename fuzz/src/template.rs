//! Target `chat_template`: a model file's template over a short chat.

use rocmforge::model::template::{Message, OUTPUT_BYTES_MAX, TemplateRequest, render_unconfined};

/// Parts of a template that can make long output from short input. The daemon renders in a process with kernel limits.
/// There are none here, so templates with any of these parts are parsed and not run.
const GROWING: [&str; 16] = [
    "*", "~", "+", "%}{%", "range", "replace", "format", "join", "indent", "center", "macro", "call", "for",
    "just", "split", "tojson",
];

/// Renders `data` over a chat of two messages. For any input: no panic, and a text within its limit or a reason.
pub fn chat_template(data: &[u8], plant: bool) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let runs = source.len() <= 512 && !GROWING.iter().any(|part| source.contains(part));
    // The exception ends the run at once, but the whole source is parsed.
    let source = if runs { source.to_owned() } else { format!("{{{{ raise_exception('read') }}}}{source}") };
    let mut request =
        TemplateRequest::new(source, vec![Message::new("user", "Hi"), Message::new("assistant", "ho")]);
    request.now_unix_s = 0;
    request.bos_token = Some("<s>".into());
    match render_unconfined(&request) {
        Ok(text) => {
            assert!(runs && text.len() <= OUTPUT_BYTES_MAX);
            if plant {
                crate::planted_short(text.as_bytes());
            }
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}
