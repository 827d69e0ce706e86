//! Class 6: hostile chat templates. The model opens, and answers prompts that are not chats.

use crate::forge::{Forge, Value};

/// Templates, named by their attack; each chat is refused because its template failed.
pub fn templates() -> Vec<(&'static str, Forge)> {
    let nested = format!("{{{{ {}1{} }}}}", "[".repeat(30_000), "]".repeat(30_000));
    let sources: [(&str, String); 10] = [
        ("ten MiB", "x".repeat(10 << 20)),
        (
            "endless",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        ),
        ("nested", nested),
        ("recursive", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned()),
        ("python", "{{ ''.__class__.__mro__[1].__subclasses__() }}".to_owned()),
        ("globals", "{{ cycler.__init__.__globals__.os.popen('id').read() }}".to_owned()),
        ("wide", "{{ '%0900000000d'|format(1) }}".to_owned()),
        ("include", "{% include '/etc/passwd' %}".to_owned()),
        ("syntax", "{% if %}".to_owned()),
        (
            "long output",
            "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}".to_owned(),
        ),
    ];
    let model = |source: String| super::good().set("tokenizer.chat_template", Value::string(&source));
    sources.into_iter().map(|(what, source)| (what, model(source))).collect()
}
