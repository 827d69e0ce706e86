//! Answers of gpt-oss: messages on channels.

use super::parser::kept;
use super::scan::{Found, Scan};
use super::{Event, body, head};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// Marks that end a message's text.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
/// Beginnings of headers: the prompt has the mark of the first message, and its role.
const BEGINS: [&str; 4] = [START, CHANNEL, " to=", "to="];
const CONSTRAIN: &str = "<|constrain|>";
/// The recipient of calls.
const FUNCTIONS: &str = "to=functions.";

/// Reads one answer, which begins with a message's header or inside a message.
#[derive(Clone, Debug, Default)]
pub struct Harmony {
    buffer: String,
    state: State,
    /// Bytes of the buffer in which no mark begins that was looked for.
    searched: usize,
    /// The arguments so far of the call that was begun.
    arguments: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum State {
    /// Between messages.
    #[default]
    Outside,
    /// In the text of a message of this kind.
    Inside(Kind),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Text,
    /// A call of this function, after a header of so many bytes, which the buffer still has.
    Call(String, usize),
    /// The arguments of a call that was begun.
    Arguments(Scan),
    /// After them, where white space is left out.
    After,
}

impl Harmony {
    /// Takes more text. The cost is linear in the answer's length, for all pieces together.
    pub fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        self.buffer.push_str(text);
        while self.step(false, events) {}
    }

    /// Takes the end of the answer.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        while self.step(true, events) {}
    }

    fn drop_front(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        self.searched = 0;
    }

    /// True if there is more to do.
    fn step(&mut self, last: bool, events: &mut Vec<Event>) -> bool {
        match self.state.clone() {
            State::Outside => self.outside(last, events),
            State::Inside(Kind::Call(name, header)) => self.call(&name, header, last, events),
            State::Inside(Kind::Arguments(scan)) => self.arguments(scan, last, events),
            State::Inside(Kind::After) => {
                self.drop_front(self.buffer.len() - self.buffer.trim_start().len());
                self.state = State::Inside(if self.buffer.is_empty() { Kind::After } else { Kind::Text });
                !self.buffer.is_empty()
            }
            State::Inside(kind) => self.inside(&kind, last, events),
        }
    }

    fn outside(&mut self, last: bool, events: &mut Vec<Event>) -> bool {
        if self.buffer.is_empty() {
            return false;
        }
        if !BEGINS.iter().any(|mark| self.buffer.starts_with(mark)) {
            if !last && BEGINS.iter().any(|mark| mark.starts_with(self.buffer.as_str())) {
                return false;
            }
            self.state = State::Inside(Kind::Text);
            return true;
        }
        let from = self.searched;
        let Some(at) = self.buffer[from..].find(MESSAGE).map(|at| from + at) else {
            self.searched = from + kept(&self.buffer[from..], &[MESSAGE]);
            if last {
                events.push(Event::Text(std::mem::take(&mut self.buffer)));
                self.searched = 0;
            }
            return false;
        };
        let header = self.buffer[..at].replace(CONSTRAIN, " ");
        let length = at + MESSAGE.len();
        let channel = header.split_once(CHANNEL).map_or("", |(_, after)| after.trim_start());
        let kind = match header.split_once(FUNCTIONS) {
            Some((_, name)) => {
                let end = name.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(name.len());
                Kind::Call(name[..end].to_owned(), length)
            }
            None if channel.starts_with("analysis") => Kind::Reasoning,
            None => Kind::Text,
        };
        self.searched = length;
        if !matches!(kind, Kind::Call(..)) {
            self.drop_front(length);
        }
        self.state = State::Inside(kind);
        true
    }

    fn inside(&mut self, kind: &Kind, last: bool, events: &mut Vec<Event>) -> bool {
        let end = end_of(&self.buffer);
        let until = match end {
            Some((at, _)) => at,
            None if last => self.buffer.len(),
            None => kept(&self.buffer, &ENDS),
        };
        let text: String = self.buffer.drain(..until).collect();
        if !text.is_empty() {
            events.push(if *kind == Kind::Reasoning { Event::Reasoning(text) } else { Event::Text(text) });
        }
        let Some((_, mark)) = end else { return false };
        self.drop_front(mark);
        self.state = State::Outside;
        true
    }

    fn call(&mut self, name: &str, header: usize, last: bool, events: &mut Vec<Event>) -> bool {
        let begins =
            if body::is_name(name) { head::arguments_begin(&self.buffer, header) } else { Some(false) };
        if begins == Some(true) {
            let at = header + self.buffer[header..].find('{').unwrap_or(0);
            events.push(Event::CallBegin { name: name.to_owned(), id: None });
            self.drop_front(at);
            self.state = State::Inside(Kind::Arguments(Scan::from(0)));
            return true;
        }
        let from = self.searched;
        let (end, mark) = match end_of(&self.buffer[from..]) {
            Some((at, mark)) => (from + at, mark),
            None if last => (self.buffer.len(), 0),
            None => {
                self.searched = from + kept(&self.buffer[from..], &ENDS);
                return false;
            }
        };
        events.push(Event::Text(self.buffer[..end].to_owned()));
        self.drop_front(end + mark);
        self.state = State::Outside;
        !self.buffer.is_empty()
    }

    /// Arguments end with their message, and with their object: what follows that is text.
    fn arguments(&mut self, mut scan: Scan, last: bool, events: &mut Vec<Event>) -> bool {
        let end = end_of(&self.buffer);
        let until = match end {
            Some((at, _)) => at,
            None if last => self.buffer.len(),
            None => kept(&self.buffer, &ENDS),
        };
        let found = scan.go_on(&self.buffer[..until]);
        let until = if let Found::End(end) = found { end } else { until };
        let text: String = self.buffer.drain(..until).collect();
        self.arguments.push_str(&text);
        if !text.is_empty() {
            events.push(Event::Arguments(text));
        }
        let ended = matches!(found, Found::End(_));
        if !ended && end.is_none() && !last {
            self.state = State::Inside(Kind::Arguments(scan.of_rest()));
            return false;
        }
        let arguments = std::mem::take(&mut self.arguments);
        events.push(Event::CallEnd { whole: ended && body::is_object(&arguments) });
        self.searched = 0;
        self.state = State::Inside(Kind::After);
        true
    }
}

/// Where a message's text ends, and the bytes of the mark that is not part of the next message.
fn end_of(text: &str) -> Option<(usize, usize)> {
    let found = ENDS.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min();
    found.map(|(at, mark)| (at, if mark == START || mark == CHANNEL { 0 } else { mark.len() }))
}
