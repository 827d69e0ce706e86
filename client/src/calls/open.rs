//! A call, or a list of calls, of which a part was told.

use super::parser::{Parser, State, Step};
use super::scan::{Found, Scan};
use super::{Event, body, head};
use head::HEAD_BYTES_MAX;

/// The place within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Open {
    pub stage: Stage,
    /// The arguments are a field of an object.
    pub wrapped: bool,
    /// The object is in a list.
    pub in_list: bool,
    /// Bytes of the mark before the calls; 0 without one.
    pub mark: usize,
    /// The mark that may follow the calls.
    pub end: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Arguments(Scan),
    /// After the arguments, in the call's object.
    Tail,
    /// In further fields, which change nothing.
    Fields(Scan),
    /// After an object of a list.
    Between,
    /// Before an object of a list.
    Element,
    /// Where the end mark may be.
    Close,
}

impl Parser {
    /// Goes on in a call that was begun.
    pub(super) fn open(&mut self, open: Open, last: bool, events: &mut Vec<Event>) -> Step {
        if let Stage::Arguments(scan) = open.stage {
            return self.tell_arguments(open, scan, last, events);
        }
        // White space in fields may be in a text.
        let there = matches!(open.stage, Stage::Fields(_)) || self.skip_space();
        self.clear_space();
        let next = match open.stage {
            Stage::Fields(scan) => self.skip_fields(open, scan),
            Stage::Element if there => return self.element(open, last),
            Stage::Close => return self.close(open, last),
            _ => self.after(open),
        };
        match next {
            Some(stage) => {
                self.state = State::Open(Open { stage, ..open });
                Step::On
            }
            None if last => {
                // A comma at most.
                self.drop_front(self.buffer.len());
                self.state = State::Start(true);
                Step::On
            }
            None => Step::More,
        }
    }

    /// The stage after further fields; `None` if they go on.
    fn skip_fields(&mut self, open: Open, mut scan: Scan) -> Option<Stage> {
        match scan.go_on(&self.buffer) {
            Found::End(end) => {
                self.drop_front(end);
                Some(open.after_object())
            }
            Found::More | Found::No => {
                self.drop_front(self.buffer.len());
                self.state = State::Open(Open { stage: Stage::Fields(scan.of_rest()), ..open });
                None
            }
        }
    }

    fn tell_arguments(&mut self, open: Open, mut scan: Scan, last: bool, events: &mut Vec<Event>) -> Step {
        let found = scan.go_on(&self.buffer);
        let until = if let Found::End(end) = found { end } else { self.buffer.len() };
        if until > 0 {
            let text = self.buffer[..until].to_owned();
            self.drop_front(until);
            self.arguments.push_str(&text);
            events.push(Event::Arguments(text));
        }
        let ended = matches!(found, Found::End(_));
        if !ended && !last {
            self.state = State::Open(Open { stage: Stage::Arguments(scan.of_rest()), ..open });
            return Step::More;
        }
        let arguments = std::mem::take(&mut self.arguments);
        events.push(Event::CallEnd { whole: ended && body::is_object(&arguments) });
        let stage = if open.wrapped { Stage::Tail } else { Stage::Close };
        self.state = State::Open(Open { stage, ..open });
        Step::On
    }

    /// The stage after the next byte; `None` if it is not there.
    fn after(&mut self, open: Open) -> Option<Stage> {
        let rest = self.buffer.as_bytes();
        let (bytes, stage) = match (open.stage, *rest.first()?) {
            (Stage::Tail, b'}') => (1, open.after_object()),
            (Stage::Tail, b',') => {
                let next = rest[1..].iter().take(HEAD_BYTES_MAX).find(|byte| !byte.is_ascii_whitespace());
                match next {
                    Some(b'"') => (1, Stage::Fields(Scan::inside())),
                    None if rest.len() <= HEAD_BYTES_MAX => return None,
                    _ => (0, open.after_object()),
                }
            }
            // A closing brace is missing: what follows tells how it goes on.
            (Stage::Tail, _) => (0, open.after_object()),
            (_, b',') => (1, Stage::Element),
            (_, b']') => (1, Stage::Close),
            _ => (0, Stage::Close),
        };
        self.drop_front(bytes);
        Some(stage)
    }

    /// An object of a list: a call that begins, a whole one, or the text after the calls.
    fn element(&mut self, open: Open, last: bool) -> Step {
        if !self.buffer.starts_with('{') {
            self.drop_front(usize::from(self.buffer.starts_with(']')));
            self.state = State::Open(Open { stage: Stage::Close, ..open });
            return Step::On;
        }
        let found = match self.begun(0, Open { in_list: true, ..open }) {
            Ok(step) => return step,
            Err(head::Not::Yet) => Found::More,
            Err(head::Not::Ever) => self.scan.get_or_insert_with(|| Scan::from(0)).go_on(&self.buffer),
        };
        match found {
            Found::End(end) => match body::of_json(&self.buffer[..end], self.known(open.mark)) {
                Some(calls) => Step::Calls(calls, end, State::Open(Open { stage: Stage::Between, ..open })),
                None => Step::Text(end),
            },
            _ if last => Step::Text(self.buffer.len()),
            _ => Step::More,
        }
    }

    fn close(&mut self, open: Open, last: bool) -> Step {
        if let Some(end) = open.end {
            if self.buffer.starts_with(end) {
                self.drop_front(end.len());
            } else if !last && end.starts_with(self.buffer.as_str()) {
                return Step::More;
            }
        }
        self.state = State::Start(true);
        Step::On
    }
}

impl Open {
    fn after_object(self) -> Stage {
        if self.in_list { Stage::Between } else { Stage::Close }
    }
}
