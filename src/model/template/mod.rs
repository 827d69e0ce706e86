//! Chat templates: Jinja of the model file, rendered in a process of its own with hard limits.
