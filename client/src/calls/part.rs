//! The parts of an answer, from its events.

use super::{Call, Event};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text for the reader.
    Text(String),
    /// The model's reasoning.
    Reasoning(String),
    /// A whole call.
    Call(Call),
    /// A call whose arguments are only the beginning of an object, or have a fault.
    Cut(Call),
}

/// Joins events to parts.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    parts: Vec<Part>,
    open: Option<Call>,
}

impl Parts {
    /// Takes the next event.
    pub fn push(&mut self, event: &Event) {
        match event {
            Event::Text(more) => match self.parts.last_mut() {
                Some(Part::Text(text)) => text.push_str(more),
                _ => self.parts.push(Part::Text(more.clone())),
            },
            Event::Reasoning(more) => match self.parts.last_mut() {
                Some(Part::Reasoning(text)) => text.push_str(more),
                _ => self.parts.push(Part::Reasoning(more.clone())),
            },
            Event::CallBegin { name, id } => {
                self.open = Some(Call { name: name.clone(), arguments: String::new(), id: id.clone() });
            }
            Event::Arguments(more) => {
                if let Some(call) = &mut self.open {
                    call.arguments.push_str(more);
                }
            }
            Event::CallEnd { whole } => {
                let part = if *whole { Part::Call } else { Part::Cut };
                self.parts.extend(self.open.take().map(part));
            }
        }
    }

    /// Takes the parts that have ended out.
    pub fn take(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }
}

/// The parts of a whole answer.
pub fn parts<'a>(events: impl IntoIterator<Item = &'a Event>) -> Vec<Part> {
    let mut parts = Parts::default();
    events.into_iter().for_each(|event| parts.push(event));
    parts.take()
}
