//! The forms in which families of models write tool calls.

/// A family's form of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM 3, Granite 4.
    Hermes,
    /// `{"name": .., "parameters": ..}`, or such objects after `<|python_tag|>`: Llama 3.
    Llama,
    /// `[TOOL_CALLS]`, then a list of objects, or a name, `[ARGS]` and an object: Mistral.
    Mistral,
    /// A line with the name, then an object: GLM 4.
    Glm,
    /// `<tool_call>name`, then `<arg_key>` and `<arg_value>` for each argument: GLM 4.5.
    GlmTags,
    /// Messages on channels: gpt-oss.
    Harmony,
    /// `{"name": .., "arguments": ..}`, as the tools' description asks for it: models whose template knows no tools.
    Generic,
    /// The same, of a model whose template describes the tools itself; perhaps after `<|tool_call|>`: Granite 3, Phi 4.
    Described,
}

impl Form {
    /// Every form.
    pub const ALL: [Self; 8] = [
        Self::Hermes,
        Self::Llama,
        Self::Mistral,
        Self::Glm,
        Self::GlmTags,
        Self::Harmony,
        Self::Generic,
        Self::Described,
    ];

    /// The form that a chat template asks for: its marks are in the template's text.
    pub fn of_template(template: &str) -> Self {
        let has = |mark| template.contains(mark);
        match () {
            () if !has("tools") => Self::Generic,
            () if has("<|channel|>") => Self::Harmony,
            () if has("[TOOL_CALLS]") => Self::Mistral,
            () if has("<arg_key>") => Self::GlmTags,
            () if has("<tool_call>") => Self::Hermes,
            () if has("<|observation|>") => Self::Glm,
            () if has("<|python_tag|>") || has("<|start_header_id|>ipython") => Self::Llama,
            () => Self::Described,
        }
    }

    /// Its name in the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Glm => "glm",
            Self::GlmTags => "glm-tags",
            Self::Harmony => "harmony",
            Self::Generic => "generic",
            Self::Described => "described",
        }
    }

    /// The form of that name; [`Form::Generic`] for names that this version does not know.
    pub fn of_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|form| form.name() == name).unwrap_or(Self::Generic)
    }
}
