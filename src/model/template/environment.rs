//! Jinja as set up by transformers, and one rendering in it.
//!
//! This code runs in the rendering process only. It bounds steps, depth and output; the kernel bounds the rest.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Serde, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::json;

use super::{Message, OUTPUT_BYTES_MAX, TemplateRequest, time, tojson};
use crate::lock::{Mutex, Rank};

/// Most steps of a rendering. Real templates take about 100 for each message.
const FUEL: u64 = 20_000_000;

/// Why a rendering ended without a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Syntax(String),
    Refused(String),
    Failed(String),
    OutOfSteps,
    OutputTooLong,
}

/// Renders a request to text.
pub(super) fn render(request: &TemplateRequest) -> Result<String, Failure> {
    let refusal = Arc::new(Mutex::new(Rank::TemplateRefusal, None));
    let environment = environment(request.now_unix_s, Arc::clone(&refusal))
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let source = without_generation_tags(&request.template);
    let template =
        environment.template_from_str(&source).map_err(|error| Failure::Syntax(error.to_string()))?;
    let output = RefCell::new(Bounded { text: Vec::new(), full: false });
    let rendered = template.render_captured_to(variables(request), Shared(&output)).map(drop);
    let output = output.into_inner();
    if output.full {
        return Err(Failure::OutputTooLong);
    }
    match rendered {
        Ok(()) => String::from_utf8(output.text).map_err(|error| Failure::Failed(error.to_string())),
        Err(error) => Err(failure(&error, &refusal)),
    }
}

/// The first of `variables` that the template reads before it sets it: anywhere in its text, or in a conversation.
pub(super) fn find(template: &str, variables: &[String]) -> Result<Option<String>, Failure> {
    let request = TemplateRequest::new(template, vec![Message::new("user", "a")]);
    let environment = environment(request.now_unix_s, Arc::new(Mutex::new(Rank::TemplateRefusal, None)))
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let source = without_generation_tags(template);
    let template =
        environment.template_from_str(&source).map_err(|error| Failure::Syntax(error.to_string()))?;
    // The analysis takes `set a = a|default(1)` for a variable that is set, and a rendering does not.
    let anywhere = template.undeclared_variables(false);
    let asked = variables.iter().map(|name| (name.clone(), AtomicBool::new(anywhere.contains(name))));
    let watched = Arc::new(Watched { given: self::variables(&request), asked: asked.collect() });
    let output = RefCell::new(Bounded { text: Vec::new(), full: false });
    // The names that were read before a failure count too.
    let _ = template.render_captured_to(Value::from_dyn_object(Arc::clone(&watched)), Shared(&output));
    let found = watched.asked.iter().find(|(_, read)| read.load(Ordering::Relaxed));
    Ok(found.map(|(name, _)| name.clone()))
}

/// Variables of a rendering that notes which of some names the template reads.
#[derive(Debug)]
struct Watched {
    given: Value,
    asked: Vec<(String, AtomicBool)>,
}

impl Object for Watched {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let asked = self.asked.iter().find(|(name, _)| key.as_str() == Some(name));
        if let Some((_, read)) = asked {
            read.store(true, Ordering::Relaxed);
        }
        self.given.get_item(key).ok().filter(|value| !value.is_undefined())
    }
}

/// Renders in this process, without the kernel's bounds of memory and time. For fuzzing templates that cannot grow.
///
/// # Errors
/// The reason why there is no text.
pub fn render_unconfined(request: &TemplateRequest) -> Result<String, String> {
    render(request).map_err(|failure| format!("{failure:?}"))
}

fn environment(now_unix_s: i64, refusal: Arc<Mutex<Option<String>>>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_function("strftime_now", move |format: &str| time::strftime(now_unix_s, format));
    environment.add_function("raise_exception", move |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, message.clone());
        *refusal.lock() = Some(message);
        Err(error)
    });
    Ok(environment)
}

/// The variables of the template. The request's own variables do not replace the standard ones.
fn variables(request: &TemplateRequest) -> Value {
    let mut variables = request.variables.clone();
    let mut set = |name: &str, value: serde_json::Value| variables.insert(name.to_owned(), value);
    set("tools", if request.tools.is_empty() { json!(null) } else { json!(request.tools) });
    set("documents", json!(null));
    set("messages", json!(request.messages));
    set("add_generation_prompt", json!(request.add_generation_prompt));
    for (name, text) in [("bos_token", &request.bos_token), ("eos_token", &request.eos_token)] {
        if let Some(text) = text {
            set(name, json!(text));
        }
    }
    Value::from(Serde(variables))
}

fn failure(error: &Error, refusal: &Mutex<Option<String>>) -> Failure {
    if error.kind() == ErrorKind::OutOfFuel {
        return Failure::OutOfSteps;
    }
    match refusal.lock().take() {
        Some(message) => Failure::Refused(message),
        None => Failure::Failed(error.to_string()),
    }
}

/// Replaces `{% generation %}`, which marks an assistant's text for training and has no meaning in a prompt.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        // Search after the opening: in `{%}` both delimiters would share the percent sign.
        let Some(length) = rest[start + 2..].find("%}") else { break };
        let inside = &rest[start + 2..start + 2 + length];
        let name = inside.trim_matches(['-', '+']).trim();
        text.push_str(&rest[..start + 2]);
        match name {
            "generation" => text.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => text.push_str(&inside.replace("endgeneration", "endif")),
            _ => text.push_str(inside),
        }
        text.push_str("%}");
        rest = &rest[start + 2 + length + 2..];
    }
    text.push_str(rest);
    text
}

/// Output buffer that fails at the limit.
struct Bounded {
    text: Vec<u8>,
    full: bool,
}

struct Shared<'a>(&'a RefCell<Bounded>);

impl Write for Shared<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut output = self.0.borrow_mut();
        if bytes.len() > OUTPUT_BYTES_MAX - output.text.len() {
            output.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        output.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(template: &str, expected: &str) {
        let mut request = TemplateRequest::new(template, vec![Message::new("user", " Hi ")]);
        request.now_unix_s = 0;
        assert_eq!(render(&request).unwrap(), expected, "{template}");
    }

    /// Features that real templates need beyond standard Jinja.
    #[test]
    fn templates_find_what_transformers_gives_them() {
        check("{{ messages[0].content.strip().split('i')[0] }}", "H");
        check("{{ 'a-b-c'.split('-', 1)[1] ~ 'x'.upper() ~ {'k': 1}.get('k') }}", "b-cX1");
        check("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}.", ".");
        check("{{ strftime_now('%Y') }}{{ tools is none }}{{ bos_token is defined }}", "1970TrueFalse");
        check("{%- generation -%} a {%- endgeneration %}b", "ab");
        check("  {% if true %}\n  a\n  {% endif %}\n", "  a\n");
        check("{{ '<b>' }}{{ messages|tojson }}", "<b>[{\"role\": \"user\", \"content\": \" Hi \"}]");
        check("{{ {'a': none, 'b': [true, 'x']} }}", "{'a': None, 'b': [True, 'x']}");
    }

    #[test]
    fn a_variable_is_found_where_the_template_reads_it() {
        let names = ["a".to_owned(), "b".to_owned()];
        let found = |template: &str| find(template, &names).unwrap();
        for template in [
            "{% if a is defined and a is false %}x{% endif %}",
            "{% set a = a if a is defined else true %}{{ b }}",
            "{% macro m() %}{{ a }}{% endmacro %}{{ m() }}",
            "{% set ns = namespace(a=a|default(true)) %}",
            "{{ b }}{{ a }}",
            "{% if tools and a %}x{% endif %}",
            "{% for m in messages %}{% if m.role == 'tool' %}{{ a }}{% endif %}{% endfor %}",
            "{% set a = a|default(1) %}{{ raise_exception('no') }}",
        ] {
            assert_eq!(found(template).as_deref(), Some("a"), "{template}");
        }
        assert_eq!(found("{{ b }}").as_deref(), Some("b"));
        for template in ["{# a #}", "a {{ 'a' }}", "{{ messages[0].a }}", "{% set a = 1 %}{{ a }}", ""] {
            assert_eq!(found(template), None, "{template}");
        }
        assert!(matches!(find("{% a", &names), Err(Failure::Syntax(_))));
    }

    #[test]
    fn an_unknown_tag_is_a_syntax_error() {
        for template in ["{%}", "{%}a{%}%}", "{%", "{%%}", "a{%}generation%}"] {
            let request = TemplateRequest::new(template, vec![]);
            assert!(matches!(render(&request), Err(Failure::Syntax(_))), "{template}");
        }
        assert_eq!(without_generation_tags("{%}{% generation %}"), "{%}{% generation %}");
        assert_eq!(without_generation_tags("{% a %}{%generation%}b"), "{% a %}{%if true%}b");
    }

    #[test]
    fn own_variables_do_not_replace_the_conversation() {
        let mut request = TemplateRequest::new("{{ messages|length }} {{ thinking }}", vec![]);
        request.variables.insert("messages".into(), json!("none of these"));
        request.variables.insert("thinking".into(), json!(true));
        assert_eq!(render(&request).unwrap(), "0 True");
    }
}
