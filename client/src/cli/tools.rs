//! Tools of `run`: their file, the choice among them, and the calls of an answer.

use std::path::{Path, PathBuf};

use clap::Args;
use rocmforge_client::Client;
use rocmforge_client::calls::{Call, Event, Form, Message, Parser, Part, Parts, Tool, conversation, demand};
use rocmforge_client::wire::{FormKind, GenerateRequest, Prompt, limits};
use serde_json::{Map, Value, json};

use super::report::Failure;
use super::steering::read;

/// Tools that the model may call.
#[derive(Debug, Args)]
pub struct Tools {
    /// Let the model call the tools in this file: a list in JSON, as OpenAI's API takes it
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with = "session")]
    pub tools: Option<PathBuf>,
    /// Whether the answer must be a call: `auto`, `required`, or the name of the tool to call [default: auto]
    #[arg(long, value_name = "CHOICE", requires = "tools")]
    pub tool_choice: Option<String>,
}

impl Tools {
    /// The request with the tools in its chat, and a reader of the answer; no reader without tools.
    ///
    /// # Errors
    /// A file that has no tools, a choice that is none of them, a form beside tools that is no schema; errors of the daemon.
    pub fn fill(
        &self,
        client: &Client,
        request: GenerateRequest,
    ) -> Result<(GenerateRequest, Option<Reader>), Failure> {
        let Some(path) = &self.tools else { return Ok((request, None)) };
        let tools = tools_of(path)?;
        let demanded = self.demanded(&tools)?;
        let schema = match request.form() {
            Ok(None) => None,
            Ok(Some(form)) if form.kind == FormKind::JsonSchema => Some(form.text),
            _ => return Err(Failure::usage("beside --tools the answer's form can only be a --schema")),
        };
        let form = Form::of_name(client.show(&request.model, false)?.calls().unwrap_or_default());
        let request = with_tools(form, &tools, request);
        // An answer that must be a call has no other form.
        let (asked, otherwise) = match (demanded.is_empty(), schema) {
            (true, None) => return Ok((request, Some(Reader::new(form, tools, false)))),
            (true, schema) => (tools.clone(), schema),
            (false, _) => (demanded, None),
        };
        // One call of a tool that is named, as OpenAI's API has it.
        let several = matches!(self.tool_choice.as_deref(), None | Some("auto" | "required"));
        let wanted = demand(form, &asked, several, otherwise.as_deref()).map_err(|bytes| {
            let max = limits::FORM_BYTES_MAX;
            let why = format!("as a constraint they have {bytes} bytes, at most {max} are taken");
            Failure::usage(&format!("--tools {}: {why}", path.display()))
        })?;
        Ok((request.with_form(&wanted.answer), Some(Reader::new(wanted.form, tools, true))))
    }

    /// The tools of which one must be called.
    fn demanded(&self, tools: &[Tool]) -> Result<Vec<Tool>, Failure> {
        match self.tool_choice.as_deref() {
            None | Some("auto") => Ok(Vec::new()),
            Some("required") => Ok(tools.to_vec()),
            Some(name) => {
                let named = tools.iter().filter(|tool| tool.name == name).cloned().collect::<Vec<_>>();
                if named.is_empty() {
                    let names: Vec<&str> = tools.iter().map(|tool| &*tool.name).collect();
                    let why = format!("it is neither auto, required nor a tool: {}", names.join(", "));
                    return Err(Failure::usage(&format!("--tool-choice {name}: {why}")));
                }
                Ok(named)
            }
        }
    }
}

/// The request, whose chat tells the model of the tools.
fn with_tools(form: Form, tools: &[Tool], request: GenerateRequest) -> GenerateRequest {
    let Prompt::Chat(chat) = request.prompt.clone() else { return request };
    let message = |of: rocmforge_client::wire::ChatMessage| Message {
        role: of.role,
        content: Some(of.content),
        ..Message::default()
    };
    let chat = conversation(form, tools, chat.into_iter().map(message).collect(), Map::new());
    let request = GenerateRequest { prompt: Prompt::Chat(chat.messages), ..request }.with_marks();
    match chat.extras {
        Some(extras) => request.with_chat_extras(&extras),
        None => request,
    }
}

/// The tools of a file.
fn tools_of(path: &Path) -> Result<Vec<Tool>, Failure> {
    let refused = |why: String| Failure::usage(&format!("--tools {}: {why}", path.display()));
    let text = read("--tools", path)?;
    let value: Value = serde_json::from_str(&text).map_err(|error| refused(format!("no JSON: {error}")))?;
    let list = value.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| refused("it is no list of tools".to_owned()))?;
    if list.len() > limits::TOOLS_MAX {
        return Err(refused(format!("{} tools, but at most {} are taken", list.len(), limits::TOOLS_MAX)));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    for (number, value) in list.iter().enumerate() {
        let tool = tool(value).map_err(|why| refused(format!("tool {}: {why}", number + 1)))?;
        if tools.iter().any(|earlier| earlier.name == tool.name) {
            return Err(refused(format!("tool {}: another one is called {:?} too", number + 1, tool.name)));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// A function, in OpenAI's form or by itself.
fn tool(value: &Value) -> Result<Tool, &'static str> {
    let function = value.get("function").unwrap_or(value);
    let name = function["name"].as_str().filter(|name| !name.is_empty()).ok_or("it has no name")?;
    let parameters = match function.get("parameters") {
        None => json!({"type": "object", "properties": {}}),
        Some(schema) if schema.is_object() => schema.clone(),
        Some(_) => return Err("its parameters are no JSON schema of an object"),
    };
    let description = function["description"].as_str().map(str::to_owned);
    Ok(Tool { name: name.to_owned(), description, parameters })
}

/// Reads an answer that may have calls.
#[derive(Clone, Debug)]
pub struct Reader {
    parser: Parser,
    /// A constraint keeps the answer from beginning with reasoning.
    demanded: bool,
    parts: Parts,
    text: String,
    reasoning: String,
    calls: Vec<Call>,
    /// The tool of a call that did not end.
    cut: Option<String>,
    /// Text without the end of its line was shown last.
    open_line: bool,
}

impl Reader {
    fn new(form: Form, tools: Vec<Tool>, demanded: bool) -> Self {
        Self {
            parser: Parser::new(form, tools),
            demanded,
            parts: Parts::default(),
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            cut: None,
            open_line: false,
        }
    }

    /// Says that the prompt ends within a reasoning. Call it before the first text.
    pub fn begin_in_reasoning(&mut self) {
        if !self.demanded {
            self.parser.begin_in_reasoning();
        }
    }

    /// Takes more of the answer. Returns text to print: that for the reader, and each call that has ended as a line of JSON.
    pub fn push(&mut self, text: &str) -> String {
        let mut events = Vec::new();
        self.parser.push(text, &mut events);
        self.take(&events)
    }

    /// Takes the answer's end.
    pub fn finish(&mut self) -> String {
        let mut events = Vec::new();
        self.parser.finish(&mut events);
        self.take(&events)
    }

    fn take(&mut self, events: &[Event]) -> String {
        let mut shown = String::new();
        events.iter().for_each(|event| self.parts.push(event));
        for part in self.parts.take() {
            match part {
                Part::Text(text) => {
                    self.open_line = !text.ends_with('\n');
                    self.text.push_str(&text);
                    shown.push_str(&text);
                }
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Call(call) => {
                    if std::mem::take(&mut self.open_line) {
                        shown.push('\n');
                    }
                    shown += &format!("{}\n", object(&call));
                    self.calls.push(call);
                }
                Part::Cut(call) => self.cut = Some(call.name),
            }
        }
        shown
    }

    /// Puts what the answer has into its object.
    pub fn describe(&self, answer: &mut Value) {
        answer["text"] = json!(self.text);
        answer["reasoning"] = json!(self.reasoning);
        answer["calls"] = self.calls.iter().map(object).collect();
    }

    /// The tool whose call did not end.
    pub fn cut(&self) -> Option<&str> {
        self.cut.as_deref()
    }
}

/// A call for programs.
fn object(call: &Call) -> Value {
    // The parser found that the arguments are an object.
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
    json!({"name": call.name, "arguments": arguments})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Vec<Tool>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tools.json");
        std::fs::write(&path, text).unwrap();
        tools_of(&path).map_err(|failure| failure.to_string())
    }

    #[test]
    fn tools_are_a_list_in_openais_form_or_functions_alone() {
        let tools = of(r#"[{"type": "function", "function": {"name": "a", "description": "A."}},
            {"name": "b", "parameters": {"type": "object"}}]"#);
        let names: Vec<String> = tools.unwrap().into_iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["a", "b"]);
        for (bad, why) in [
            ("{}", "it is no list of tools"),
            ("[]", "it is no list of tools"),
            ("[", "no JSON"),
            (r#"[{"name": ""}]"#, "tool 1: it has no name"),
            (r#"[{"name": "a"}, {"name": "b", "parameters": 1}]"#, "tool 2: its parameters"),
            (r#"[{"name": "a"}, {"name": "a"}]"#, "tool 2: another one is called \"a\" too"),
        ] {
            let error = of(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn calls_are_lines_after_the_text() {
        let tools = of(r#"[{"name": "a"}]"#).unwrap();
        let mut reader = Reader::new(Form::Hermes, tools, false);
        reader.begin_in_reasoning();
        let mut shown = String::new();
        for piece in
            ["hm</think>I ", "look.<tool_call>{\"name\": \"a\", \"argu", "ments\": {\"x\": 1}}</tool_call>"]
        {
            shown += &reader.push(piece);
        }
        shown += &reader.push("Then<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>");
        shown += &reader.push("<tool_call>{\"name\": \"a\", \"arguments\": {\"x");
        shown += &reader.finish();
        let [first, second] = [r#"{"name":"a","arguments":{"x":1}}"#, r#"{"name":"a","arguments":{}}"#];
        assert_eq!(shown, format!("I look.\n{first}\nThen\n{second}\n"));
        let mut answer = json!({});
        reader.describe(&mut answer);
        let calls = json!([{"name": "a", "arguments": {"x": 1}}, {"name": "a", "arguments": {}}]);
        assert_eq!(answer, json!({"text": "I look.Then", "reasoning": "hm", "calls": calls}));
        assert_eq!(reader.cut(), Some("a"));
    }
}
