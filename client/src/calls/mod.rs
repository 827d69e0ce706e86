//! Tool calls and reasoning in a model's answer: pure text work, shared by all clients.
//!
//! The daemon's text of an answer is the model's own. Each family of models writes tool calls in a form of its own. The daemon
//! tells the name of the form, found in the chat template ([`Form::of_template`]), with `ShowReply`. A [`Parser`] then cuts the
//! text, as it arrives, into text, reasoning and calls. [`demand`] makes a constraint under which an answer must be a call.
//! [`conversation`] puts tools into the messages for models whose template knows none.

mod body;
mod conversation;
mod demand;
mod form;
mod harmony;
mod head;
mod open;
mod parser;
mod part;
mod scan;
mod size;

pub use conversation::{Conversation, Message, conversation};
pub use demand::{Demand, demand};
pub use form::Form;
pub use parser::Parser;
pub use part::{Part, Parts, parts};
pub use size::counts;

use serde_json::Value;

/// A tool that the model may call: a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The function's name.
    pub name: String,
    /// Its purpose, for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
}

impl Tool {
    /// The tool as chat templates know it.
    pub fn for_template(&self) -> Value {
        let mut function = serde_json::json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = description.as_str().into();
        }
        function["parameters"] = self.parameters.clone();
        serde_json::json!({"type": "function", "function": function})
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The function's name. Only forms without marks require that a tool has it.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: String,
    /// The name that the model gave to the call, in forms that have one.
    pub id: Option<String>,
}

/// The kind of the answer's next text. A call is told while it is written, once its name is known and its arguments begin. The
/// answer's end, or a fault in the arguments, ends the call there: the text that was told stays a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text for the reader.
    Text(String),
    /// The model's reasoning, which is not part of the answer.
    Reasoning(String),
    /// A call begins.
    CallBegin {
        /// The function's name.
        name: String,
        /// The name that the model gave to the call before its arguments.
        id: Option<String>,
    },
    /// Text of the call's arguments: all of it together is a JSON object in the model's own spelling.
    Arguments(String),
    /// The call's end.
    CallEnd {
        /// The arguments are a whole object.
        whole: bool,
    },
}

impl Event {
    /// The events of a whole call.
    fn of_call(call: Call) -> [Self; 3] {
        let Call { name, arguments, id } = call;
        [Self::CallBegin { name, id }, Self::Arguments(arguments), Self::CallEnd { whole: true }]
    }
}

#[cfg(test)]
mod tests;
