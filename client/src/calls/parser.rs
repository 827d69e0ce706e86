//! Cuts an answer into text, reasoning and calls while it arrives.

use super::body::{self, Known};
use super::harmony::Harmony;
use super::head::{self, HEAD_BYTES_MAX};
use super::open::{Open, Stage};
use super::scan::{Found, Scan, may_begin};
use super::{Call, Event, Form, Tool};

const THINK: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const LIST: &str = "<|tool_call|>";
const LIST_END: &str = "<|/tool_call|>";
const PYTHON: &str = "<|python_tag|>";
const CALLS: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

/// Reads one answer. However the text is cut into pieces, the events are the same but for cuts between texts. Text that looks like
/// a call and turns out to be none is text. White space beside calls and reasoning is left out.
#[derive(Clone, Debug)]
pub struct Parser {
    form: Form,
    tools: Vec<Tool>,
    pub(super) state: State,
    /// Text that no event has yet.
    pub(super) buffer: String,
    /// White space before the buffer, which becomes text if text follows.
    space: String,
    /// The scan of the buffer's candidate.
    pub(super) scan: Option<Scan>,
    /// The arguments so far of the call that was begun.
    pub(super) arguments: String,
    harmony: Option<Harmony>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing was there yet.
    Begin,
    /// Until the end mark. `true` before the first character that is no white space.
    Reasoning(&'static str, bool),
    /// At a place where a call without a mark may begin. `true` after a call or reasoning.
    Start(bool),
    Text,
    /// The buffer begins with what may be a call; its mark has so many bytes.
    Candidate(usize),
    /// In a call that was begun.
    Open(Open),
}

/// A decision about the buffer's beginning.
pub(super) enum Step {
    /// More text is needed.
    More,
    /// The buffer or the state changed.
    On,
    /// So many bytes are calls, and the state after them.
    Calls(Vec<Call>, usize, State),
    /// A call begins, whose arguments begin at this byte.
    Begin(Call, usize, Open),
    /// So many bytes are text.
    Text(usize),
}

impl Parser {
    /// A parser of an answer in that form. Without tools, it finds no calls but harmony's.
    pub fn new(form: Form, tools: Vec<Tool>) -> Self {
        Self {
            form,
            tools,
            state: State::Begin,
            buffer: String::new(),
            space: String::new(),
            scan: None,
            arguments: String::new(),
            harmony: (form == Form::Harmony).then(Harmony::default),
        }
    }

    /// Says that the prompt ends with the begin mark of a reasoning. Call it before the first text.
    pub fn begin_in_reasoning(&mut self) {
        if self.state == State::Begin {
            self.state = State::Reasoning(THINK[0].1, true);
        }
    }

    /// Takes more text. The cost is linear in the answer's length, for all pieces together.
    pub fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        if let Some(harmony) = &mut self.harmony {
            return harmony.push(text, events);
        }
        self.buffer.push_str(text);
        self.go_on(false, events);
    }

    /// Takes the end of the answer.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        if let Some(harmony) = &mut self.harmony {
            return harmony.finish(events);
        }
        self.go_on(true, events);
        if !matches!(self.state, State::Start(true)) {
            push_text(&mut self.space, events);
        }
        self.space.clear();
    }

    fn go_on(&mut self, last: bool, events: &mut Vec<Event>) {
        loop {
            let step = match self.state {
                State::Begin => self.begin(last),
                State::Reasoning(end, fresh) => self.reasoning(end, fresh, last, events),
                State::Start(_) => self.start(last),
                State::Text => self.text(last, events),
                State::Candidate(mark) => self.candidate(mark, last),
                State::Open(open) => self.open(open, last, events),
            };
            match step {
                Step::More => return,
                Step::On => {}
                Step::Calls(calls, bytes, state) => {
                    self.space.clear();
                    self.drop_front(bytes);
                    events.extend(calls.into_iter().flat_map(Event::of_call));
                    self.state = state;
                }
                Step::Begin(Call { name, id, .. }, bytes, open) => {
                    self.space.clear();
                    self.drop_front(bytes);
                    events.push(Event::CallBegin { name, id });
                    self.state = State::Open(open);
                }
                Step::Text(bytes) => {
                    let mut text = std::mem::take(&mut self.space) + &self.buffer[..bytes];
                    self.drop_front(bytes);
                    push_text(&mut text, events);
                    self.state = State::Text;
                }
            }
            self.scan = self.scan.filter(|_| matches!(self.state, State::Candidate(_) | State::Open(_)));
        }
    }

    pub(super) fn drop_front(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        self.scan = None;
    }

    /// Moves white space at the buffer's beginning to `space`; false if nothing else is there.
    pub(super) fn skip_space(&mut self) -> bool {
        let bytes = self.buffer.len() - self.buffer.trim_start().len();
        self.space.extend(self.buffer.drain(..bytes));
        !self.buffer.is_empty()
    }

    pub(super) fn clear_space(&mut self) {
        self.space.clear();
    }

    /// The names of calls after a mark of so many bytes.
    pub(super) fn known(&self, mark: usize) -> Known<'_> {
        if mark > 0 { Known::ANY } else { Known::of(&self.tools) }
    }

    /// The step that begins the call of the object at that byte.
    pub(super) fn begun(&self, from: usize, open: Open) -> Result<Step, head::Not> {
        if self.scan.is_some() {
            return Err(head::Not::Ever);
        }
        let head = head::of_object(&self.buffer, from, self.known(open.mark))?;
        let call = Call { name: head.name, arguments: String::new(), id: head.id };
        Ok(Step::Begin(call, head.at, Open { stage: Stage::Arguments(Scan::from(0)), ..open }))
    }

    fn begin(&mut self, last: bool) -> Step {
        if !self.skip_space() {
            return Step::More;
        }
        for (mark, end) in THINK {
            if self.buffer.starts_with(mark) {
                self.space.clear();
                self.drop_front(mark.len());
                self.state = State::Reasoning(end, true);
                return Step::On;
            }
            if mark.starts_with(&self.buffer) && !last {
                return Step::More;
            }
        }
        self.state = State::Start(false);
        Step::On
    }

    fn reasoning(&mut self, end: &'static str, fresh: bool, last: bool, events: &mut Vec<Event>) -> Step {
        if fresh {
            let there = self.skip_space();
            self.space.clear();
            if !there {
                return Step::More;
            }
        }
        let found = self.buffer.find(end);
        let until =
            found.unwrap_or_else(|| if last { self.buffer.len() } else { kept(&self.buffer, &[end]) });
        let words = self.buffer[..until].trim_end().len();
        if words > 0 {
            let mut text = std::mem::take(&mut self.space) + &self.buffer[..words];
            events.push(Event::Reasoning(std::mem::take(&mut text)));
        }
        self.space.push_str(&self.buffer[words..until]);
        self.drop_front(until);
        if found.is_some() {
            self.space.clear();
            self.drop_front(end.len());
            self.state = State::Start(true);
            return Step::On;
        }
        self.state = State::Reasoning(end, fresh && words == 0);
        if last {
            self.space.clear();
        }
        Step::More
    }

    fn start(&mut self, last: bool) -> Step {
        let after = self.state == State::Start(true);
        if !self.skip_space() {
            return Step::More;
        }
        if after && self.form == Form::Llama && self.buffer.starts_with(';') {
            self.drop_front(1);
            return Step::On;
        }
        let without_mark = match self.form {
            _ if self.tools.is_empty() => false,
            Form::Generic | Form::Described | Form::Llama => match may_begin(&self.buffer) {
                Some(begins) => begins,
                None if last => false,
                None => return Step::More,
            },
            Form::Glm => true,
            Form::Hermes | Form::Mistral | Form::GlmTags | Form::Harmony => false,
        };
        if without_mark {
            self.state = State::Candidate(0);
            return Step::On;
        }
        if after {
            self.space.clear(); // reasoning and calls end with white space of their own
        }
        self.state = State::Text;
        Step::On
    }

    /// Marks of calls within text.
    fn marks(&self) -> &'static [&'static str] {
        match self.form {
            _ if self.tools.is_empty() => &[],
            Form::Hermes | Form::GlmTags => &[CALL],
            Form::Llama => &[PYTHON],
            Form::Mistral => &[CALLS],
            Form::Described => &[LIST],
            Form::Glm | Form::Harmony | Form::Generic => &[],
        }
    }

    fn text(&mut self, last: bool, events: &mut Vec<Event>) -> Step {
        let marks = self.marks();
        let found = marks.iter().filter_map(|mark| Some((self.buffer.find(mark)?, mark.len()))).min();
        let until = match found {
            Some((at, _)) => at,
            None if last => self.buffer.len(),
            None => kept(&self.buffer, marks),
        };
        // White space before a call is not part of the text.
        let words = if marks.is_empty() { until } else { self.buffer[..until].trim_end().len() };
        if words > 0 {
            let mut text = std::mem::take(&mut self.space) + &self.buffer[..words];
            push_text(&mut text, events);
        }
        self.space.push_str(&self.buffer[words..until]);
        self.drop_front(until);
        match found {
            Some((_, mark)) => {
                self.state = State::Candidate(mark);
                Step::On
            }
            None => Step::More,
        }
    }

    fn candidate(&mut self, mark: usize, last: bool) -> Step {
        let step = match self.form {
            Form::Hermes => self.object(mark, Some(CALL_END), last),
            Form::Described if mark > 0 => self.object(mark, Some(LIST_END), last),
            Form::Llama | Form::Generic | Form::Described => self.object(mark, None, last),
            Form::Mistral => self.mistral(mark, last),
            Form::GlmTags => self.tags(mark, last),
            Form::Glm => self.line(),
            Form::Harmony => Step::Text(self.buffer.len()),
        };
        match step {
            Step::More if last && !self.buffer.is_empty() => Step::Text(self.buffer.len()),
            step => step,
        }
    }

    /// An object, or a list of them, and then perhaps the end mark.
    fn object(&mut self, mark: usize, end: Option<&'static str>, last: bool) -> Step {
        if self.scan.is_none() {
            match may_begin(&self.buffer[mark..]) {
                None => return Step::More,
                Some(false) => return Step::Text(mark),
                Some(true) => {}
            }
            let brace = mark + self.buffer[mark..].find('{').unwrap_or(0);
            let in_list = self.buffer[mark..brace].contains('[');
            let open = Open { stage: Stage::Tail, wrapped: true, in_list, mark, end };
            match self.begun(brace, open) {
                Ok(step) => return step,
                Err(head::Not::Yet) => return Step::More,
                Err(head::Not::Ever) => {}
            }
        }
        let mut scan = self.scan.unwrap_or_else(|| Scan::from(mark));
        let found = scan.go_on(&self.buffer);
        let value_end = match found {
            Found::End(end) => end,
            Found::More => {
                self.scan = Some(scan);
                return Step::More;
            }
            Found::No => return Step::Text(mark),
        };
        let rest = self.buffer[value_end..].trim_start();
        let bytes = match end {
            Some(end) if rest.starts_with(end) => self.buffer.len() - rest.len() + end.len(),
            // The scan stays before the value, so that it is done again when more is there.
            Some(end) if !last && end.starts_with(rest) => {
                self.scan = Some(Scan::from(mark));
                return Step::More;
            }
            _ => value_end,
        };
        match body::of_json(&self.buffer[mark..value_end], self.known(mark)) {
            Some(calls) => Step::Calls(calls, bytes, State::Start(true)),
            None => Step::Text(bytes),
        }
    }

    fn mistral(&mut self, mark: usize, last: bool) -> Step {
        let after = self.buffer[mark..].trim_start();
        if after.is_empty() {
            return Step::More;
        }
        if after.starts_with('[') && !ARGS.starts_with(after) && !after.starts_with(ARGS) {
            return self.object(mark, None, last);
        }
        let skipped = self.buffer.len() - after.len();
        // A name and marks come before the arguments, and a name is short.
        let brace = match after.bytes().take(HEAD_BYTES_MAX).position(|byte| byte == b'{') {
            Some(brace) => brace,
            None if after.len() < HEAD_BYTES_MAX => return Step::More,
            None => return Step::Text(mark),
        };
        let head = &after[..brace];
        let (head, _) = head.split_once(ARGS).unwrap_or((head, ""));
        let (name, id) = match head.split_once(CALL_ID) {
            Some((name, id)) => (name, Some(id)),
            None => (head, None),
        };
        if !body::is_name(name.trim()) {
            return Step::Text(mark);
        }
        self.bare(name.trim(), id, skipped + brace, mark)
    }

    /// A call of that name whose arguments are an object at that byte, or after white space.
    fn bare(&self, name: &str, id: Option<&str>, at: usize, mark: usize) -> Step {
        match head::arguments_begin(&self.buffer, at) {
            None => return Step::More,
            Some(false) => return Step::Text(mark),
            Some(true) => {}
        }
        let at = at + self.buffer[at..].find('{').unwrap_or(0);
        let id = id.map(str::trim).filter(|id| !id.is_empty()).map(str::to_owned);
        let call = Call { name: name.to_owned(), arguments: String::new(), id };
        let stage = Stage::Arguments(Scan::from(0));
        Step::Begin(call, at, Open { stage, wrapped: false, in_list: false, mark, end: None })
    }

    fn tags(&mut self, mark: usize, last: bool) -> Step {
        let from = self.scan.map_or(mark, |scan| scan.at());
        match self.buffer[from..].find(CALL_END).map(|at| from + at) {
            Some(end) => match body::of_tags(&self.buffer[mark..end], &self.tools) {
                Some(call) => Step::Calls(vec![call], end + CALL_END.len(), State::Start(true)),
                None => Step::Text(end + CALL_END.len()),
            },
            None if last => match body::of_tags(&self.buffer[mark..], &self.tools) {
                Some(call) => Step::Calls(vec![call], self.buffer.len(), State::Start(true)),
                None => Step::Text(self.buffer.len()),
            },
            None => {
                self.scan = Some(Scan::from(from + kept(&self.buffer[from..], &[CALL_END])));
                Step::More
            }
        }
    }

    /// A line with a tool's name, then an object.
    fn line(&self) -> Step {
        let known = |line: &str| self.tools.iter().any(|tool| tool.name == line.trim());
        let Some(line) = self.buffer.find('\n') else {
            let may = self.tools.iter().any(|tool| tool.name.starts_with(self.buffer.trim_end()));
            return if may { Step::More } else { Step::Text(self.buffer.len()) };
        };
        if !known(&self.buffer[..line]) {
            return Step::Text(line);
        }
        match self.bare(self.buffer[..line].trim(), None, line, 0) {
            Step::Text(_) => Step::Text(line),
            step => step,
        }
    }
}

/// Bytes of a text before what may be the beginning of a mark at its end.
pub(super) fn kept(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
    let first = text.len().saturating_sub(longest);
    let may =
        |at: &usize| text.is_char_boundary(*at) && marks.iter().any(|mark| mark.starts_with(&text[*at..]));
    (first..text.len()).find(may).unwrap_or(text.len())
}

fn push_text(text: &mut String, events: &mut Vec<Event>) {
    if !text.is_empty() {
        events.push(Event::Text(std::mem::take(text)));
    }
}
