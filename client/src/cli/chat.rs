//! `chat`: a conversation with a model, line by line.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use rocmforge_client::calls::{Event, Form, Parser};
use rocmforge_client::{Client, ClientError, Connection, printable_text, random_request_id, wire};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use wire::{ChatMessage, ErrorCode, GenerateRequest, Prompt, SamplingOptions, limits};

use super::chat_args::ChatArguments;
use super::model_named;
use super::near::nearest;
use super::report::{EXIT_CANCELLED, Failure};

/// Most bytes of a saved chat.
const SAVED_BYTES_MAX: usize = 16 << 20;
/// Most bytes of an answer.
const ANSWER_BYTES_MAX: usize = limits::TEXT_BYTES_MAX;

const COMMANDS: [&str; 7] = ["/help", "/clear", "/system", "/save", "/load", "/exit", "/quit"];

const HELP: &str = "\
/clear         forget what was said; the system's message stays
/system TEXT   set the system's message, or remove it with no text
/save FILE     write the chat to a new file
/load FILE     go on with a chat from a file
/exit          end; so does Ctrl-D
Ctrl-C ends an answer early.";

/// The running answer, which Ctrl-C ends.
type Running = Arc<Mutex<Option<(Connection, u32)>>>;

struct Chat<'a> {
    client: &'a Client,
    model: String,
    sampling: SamplingOptions,
    max_tokens: u32,
    system: Option<String>,
    messages: Vec<ChatMessage>,
    running: Running,
    /// Whether the output is a terminal.
    terminal: bool,
}

/// The step after a line.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Line,
    End,
}

/// Chats until the input ends. On a terminal, lines can be edited, and earlier ones are kept in a file.
pub fn run(client: &Client, arguments: &ChatArguments) -> Result<ExitCode, Failure> {
    let model = model_named(client, &arguments.model)?;
    let shown = client.show(&model, false)?;
    if !shown.chat_template {
        let text = format!(
            "{model} has no chat template, so it cannot chat: `rocmforge-client run {model} TEXT` continues a text"
        );
        return Err(Failure::usage(&text));
    }
    let running = Running::default();
    watch_interrupts(Arc::clone(&running))?;
    let mut chat = Chat {
        client,
        model,
        sampling: arguments.sampling.options(arguments.seed, 0),
        max_tokens: arguments.max_tokens,
        system: arguments.system.clone(),
        messages: Vec::new(),
        running,
        terminal: io::stdout().is_terminal(),
    };
    if let Some(path) = &arguments.load {
        chat.load(path)?;
    }
    let editing = io::stdin().is_terminal() && chat.terminal;
    let mut failed = None;
    if editing {
        println!("{}; /help shows the commands", chat.model);
    }
    let mut lines = Lines::new(editing)?;
    while let Some(line) = lines.next()? {
        match chat.take(&line) {
            Ok(Next::Line) => {}
            Ok(Next::End) => break,
            Err(failure @ Failure::Output(_)) => return Err(failure),
            // A person reads the reason and goes on; a script's exit code is that of the last failure.
            Err(failure) => failed = Some(super::report::Output { json: false }.fail(&failure)),
        }
    }
    lines.keep();
    Ok(failed.filter(|_| !editing).unwrap_or(ExitCode::SUCCESS))
}

/// Ctrl-C cancels the running answer. Without one, or once more, it ends the program.
fn watch_interrupts(running: Running) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT])
        .map_err(|error| Failure::Resources(format!("Ctrl-C could not be watched: {error}")))?;
    let watch = move || {
        for _ in signals.forever() {
            // Taken, so that a second Ctrl-C ends the program if the daemon does not answer the first.
            let running = running.lock().unwrap_or_else(PoisonError::into_inner).take();
            match running {
                Some((connection, stream)) if connection.cancel(stream).is_ok() => {}
                _ => std::process::exit(EXIT_CANCELLED.into()),
            }
        }
    };
    let begun = std::thread::Builder::new().name("signals".into()).spawn(watch);
    begun.map(drop).map_err(|error| Failure::Resources(format!("no thread could be started: {error}")))
}

/// The lines of the input.
enum Lines {
    Edited(Box<DefaultEditor>, Option<PathBuf>),
    Plain,
}

impl Lines {
    fn new(editing: bool) -> Result<Self, Failure> {
        if !editing {
            return Ok(Self::Plain);
        }
        let failed =
            |error: ReadlineError| Failure::Resources(format!("the terminal cannot be used: {error}"));
        let mut editor = DefaultEditor::new().map_err(failed)?;
        let path = history();
        // A history that is not there yet, or cannot be read, is an empty one.
        let _ = path.as_ref().map(|path| editor.load_history(path));
        Ok(Self::Edited(Box::new(editor), path))
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Result<Option<String>, Failure> {
        let editor = match self {
            Self::Edited(editor, _) => editor,
            Self::Plain => return plain_line(),
        };
        loop {
            match editor.readline("> ") {
                Ok(line) => {
                    let _ = editor.add_history_entry(line.as_str()); // only the history lacks it
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => println!("Ctrl-D or /exit ends the chat"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => {
                    return Err(Failure::Resources(format!("the terminal cannot be read: {error}")));
                }
            }
        }
    }

    /// Writes the history, for this user alone.
    fn keep(&mut self) {
        if let Self::Edited(editor, Some(path)) = self
            && let Some(dir) = path.parent()
            && std::fs::create_dir_all(dir).is_ok()
        {
            let _ = editor.save_history(path); // nothing else depends on it
        }
    }
}

/// A line of standard input, at most as long as a request can be.
fn plain_line() -> Result<Option<String>, Failure> {
    let mut bytes = Vec::new();
    let limit = limits::TEXT_BYTES_MAX as u64 + 1;
    let read = io::BufRead::read_until(&mut io::stdin().lock().take(limit), b'\n', &mut bytes);
    read.map_err(|error| Failure::usage(&format!("standard input: {error}")))?;
    if bytes.len() > limits::TEXT_BYTES_MAX {
        let max = limits::TEXT_BYTES_MAX;
        return Err(Failure::TooLong(format!(
            "a line has more than {max} bytes, the most that a request holds"
        )));
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    let line = String::from_utf8(bytes)
        .map_err(|error| Failure::usage(&format!("standard input is not UTF-8: {error}")))?;
    Ok(Some(line.trim_end_matches(['\n', '\r']).to_owned()))
}

fn history() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = from("XDG_STATE_HOME").or_else(|| Some(from("HOME")?.join(".local/state")))?;
    Some(state.join("rocmforge/chat-history"))
}

impl Chat<'_> {
    fn take(&mut self, line: &str) -> Result<Next, Failure> {
        let line = line.trim();
        if line.is_empty() {
            return Ok(Next::Line);
        }
        if !line.starts_with('/') {
            return self.ask(line).map(|()| Next::Line);
        }
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match command {
            "/help" => println!("{HELP}"),
            "/clear" => self.messages.clear(),
            "/system" => self.system = (!rest.is_empty()).then(|| rest.to_owned()),
            "/save" | "/load" if rest.is_empty() => {
                return Err(Failure::usage(&format!("{command} needs a file's name")));
            }
            "/save" => self.save(Path::new(rest))?,
            "/load" => self.load(Path::new(rest))?,
            "/exit" | "/quit" => return Ok(Next::End),
            other => {
                let near = nearest(other, COMMANDS.into_iter());
                let near = near.map_or_else(String::new, |near| format!("did you mean {near}? "));
                return Err(Failure::usage(&format!("{other} is no command; {near}/help shows all")));
            }
        }
        Ok(Next::Line)
    }

    /// Asks for an answer and prints it. A failed one is not part of the chat; a cancelled one is.
    fn ask(&mut self, text: &str) -> Result<(), Failure> {
        let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
        let mut messages: Vec<ChatMessage> = self.system.iter().map(|text| message("system", text)).collect();
        messages.extend(self.messages.iter().cloned());
        messages.push(message("user", text));
        let request = GenerateRequest {
            max_tokens: self.max_tokens,
            sampling: self.sampling.clone(),
            request_id: random_request_id(),
            ..GenerateRequest::new(&self.model, Prompt::Chat(messages)).with_marks()
        };
        let answer = self.answer(&request)?;
        self.messages.extend([message("user", text), message("assistant", &answer)]);
        Ok(())
    }

    fn answer(&self, request: &GenerateRequest) -> Result<String, Failure> {
        let mut run = self.client.generate(request)?;
        let set = |value| *self.running.lock().unwrap_or_else(PoisonError::into_inner) = value;
        set(Some((run.connection().clone(), run.stream())));
        let mut printed = Printed {
            parser: Parser::new(Form::Generic, Vec::new()),
            text: String::new(),
            any: false,
            reasons: false,
            chat: self,
        };
        let outcome = loop {
            match run.next_item() {
                Ok(Some(item)) => {
                    if item.begins_in_reasoning() {
                        printed.parser.begin_in_reasoning();
                    }
                    printed.push(&item.text)?;
                    if printed.text.len() > ANSWER_BYTES_MAX {
                        break Err(
                            rocmforge_client::ProtocolError::AnswerTooLong { max: ANSWER_BYTES_MAX }.into()
                        );
                    }
                }
                Ok(None) => break Ok(run.end().map(|end| end.text.clone()).unwrap_or_default()),
                Err(error) => break Err(error),
            }
        };
        set(None);
        let rest = match outcome {
            Ok(rest) => rest,
            Err(ClientError::Server(error)) if error.code == ErrorCode::Cancelled as u16 => String::new(),
            Err(error) => {
                if printed.any {
                    printed.end()?;
                }
                return Err(error.into());
            }
        };
        printed.push(&rest)?;
        printed.end()
    }

    /// Writes the chat to a file that is not there yet, for this user alone.
    fn save(&self, path: &Path) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::File(format!("{}: {error}", path.display()));
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let said = self.messages.iter().map(|one| json!({"role": one.role, "content": one.content}));
        let value = json!({"model": self.model, "messages": system.chain(said).collect::<Vec<_>>()});
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        writeln!(file, "{value}").map_err(failed)
    }

    /// Goes on with the chat of a file, whatever model it was with.
    fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let failed = |why: String| Failure::usage(&format!("{}: {why}", path.display()));
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
        let read = file.take(SAVED_BYTES_MAX as u64 + 1).read_to_string(&mut text);
        read.map_err(|error| failed(error.to_string()))?;
        if text.len() > SAVED_BYTES_MAX {
            return Err(failed(format!("it has more than {SAVED_BYTES_MAX} bytes")));
        }
        let value: Value =
            serde_json::from_str(&text).map_err(|error| failed(format!("it is no saved chat: {error}")))?;
        let one = |value: &Value| {
            let text = |key: &str| value[key].as_str().map(str::to_owned);
            Some(ChatMessage { role: text("role")?, content: text("content")? })
        };
        let messages: Option<Vec<ChatMessage>> =
            value["messages"].as_array().and_then(|list| list.iter().map(one).collect());
        let mut messages = messages
            .ok_or_else(|| failed("it is no saved chat: its messages have no role or text".into()))?;
        self.system = None;
        if messages.first().is_some_and(|first| first.role == "system") {
            self.system = Some(messages.remove(0).content);
        }
        self.messages = messages;
        Ok(())
    }
}

/// An answer while it is printed. Reasoning is shown faint on a terminal, and not at all elsewhere.
struct Printed<'a> {
    parser: Parser,
    text: String,
    /// Whether something was printed.
    any: bool,
    /// Whether reasoning was printed last.
    reasons: bool,
    chat: &'a Chat<'a>,
}

impl Printed<'_> {
    fn push(&mut self, text: &str) -> Result<(), Failure> {
        let mut events = Vec::new();
        self.parser.push(text, &mut events);
        self.print(events)
    }

    fn print(&mut self, events: Vec<Event>) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        self.any |= !events.is_empty();
        for event in events {
            match event {
                Event::Text(text) => {
                    if std::mem::take(&mut self.reasons) {
                        write!(stdout, "\n\n")?;
                    }
                    let shown = if self.chat.terminal { printable_text(&text) } else { text.clone() };
                    write!(stdout, "{shown}")?;
                    self.text.push_str(&text);
                }
                Event::Reasoning(text) if self.chat.terminal => {
                    self.reasons = true;
                    write!(stdout, "\x1b[2m{}\x1b[0m", printable_text(&text))?;
                }
                _ => {}
            }
        }
        Ok(stdout.flush()?)
    }

    /// Ends the line, and returns the answer's text.
    fn end(mut self) -> Result<String, Failure> {
        let mut events = Vec::new();
        self.parser.finish(&mut events);
        self.print(events)?;
        writeln!(io::stdout())?;
        Ok(self.text)
    }
}
