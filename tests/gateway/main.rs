//! The gateway before a real daemon: its answers are compared with those that the daemon gives on its own socket.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test helpers fail by panicking

mod aliases;
mod anthropic;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod door;
mod drain;
mod echo;
mod embeddings;
mod forms;
mod hostile;
mod http;
mod load;
mod ollama;
mod openai;
#[path = "../common/packages.rs"]
mod packages;
mod responses;
#[path = "../scenario/rig.rs"]
#[allow(dead_code)] // this binary uses a part
mod rig;
mod routers;
mod sdks;
mod several;
mod smuggling;
mod thinking;
mod tools;
mod users;

use rocmforge_test_support::forge;
