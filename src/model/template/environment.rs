//! Jinja as transformers sets it up, and one rendering in it.
//!
//! This runs in the rendering process only; it bounds what it can (steps, depth, output), the kernel bounds the rest.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};

use super::{OUTPUT_BYTES_MAX, TemplateRequest, json, time};

/// Steps of a rendering; real templates take some 100 for each message.
const FUEL: u64 = 20_000_000;

/// How a rendering ends without a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Syntax(String),
    Refused(String),
    Failed(String),
    OutOfSteps,
    OutputTooLong,
}

/// The text of a request.
pub(super) fn render(request: &TemplateRequest) -> Result<String, Failure> {
    let refusal = Arc::new(Mutex::new(None));
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

fn environment(now_unix_s: i64, refusal: Arc<Mutex<Option<String>>>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("strftime_now", move |format: &str| time::strftime(now_unix_s, format));
    environment.add_function("raise_exception", move |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, message.clone());
        *refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
        Err(error)
    });
    Ok(environment)
}

fn variables(request: &TemplateRequest) -> Value {
    let tools = if request.tools.is_empty() { Value::from(()) } else { Value::from(Serde(&request.tools)) };
    let own = context! {
        messages => Value::from(Serde(&request.messages)),
        tools,
        documents => Value::from(()),
        add_generation_prompt => request.add_generation_prompt,
        ..Value::from(Serde(&request.variables))
    };
    let token = |name: &str, text: &Option<String>| text.as_ref().map(|text| (name.to_owned(), text.clone()));
    let tokens = [token("bos_token", &request.bos_token), token("eos_token", &request.eos_token)];
    context! { ..own, ..Value::from_iter(tokens.into_iter().flatten()) }
}

fn failure(error: &Error, refusal: &Mutex<Option<String>>) -> Failure {
    if error.kind() == ErrorKind::OutOfFuel {
        return Failure::OutOfSteps;
    }
    match refusal.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(message) => Failure::Refused(message),
        None => Failure::Failed(error.to_string()),
    }
}

/// `{% generation %}` marks an assistant's text for training; for a prompt it means nothing.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inside = &rest[start + 2..start + length];
        let name = inside.trim_matches(['-', '+']).trim();
        text.push_str(&rest[..start + 2]);
        match name {
            "generation" => text.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => text.push_str(&inside.replace("endgeneration", "endif")),
            _ => text.push_str(inside),
        }
        text.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    text.push_str(rest);
    text
}

/// Output that stops at the limit.
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
