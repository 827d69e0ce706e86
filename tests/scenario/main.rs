//! The real daemon on a real socket: clients, files, signals and systemd act on it, and the tests check its answers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test helpers fail by panicking

mod acting;
mod activation;
mod bench;
mod broken_gpu;
mod changes;
mod chats;
mod checked;
mod child;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod company;
mod crowds;
mod descriptors;
mod device;
mod device_memory;
mod disks;
mod draft_models;
mod drafts;
mod embeddings;
mod encoders;
mod experts;
mod fairness;
mod faults;
mod files;
mod frame_fields;
mod frames;
#[path = "../common/good.rs"]
mod good;
mod good_models;
#[path = "../common/gpu.rs"]
mod gpu;
mod hanging;
#[path = "../common/hooked.rs"]
mod hooked;
mod kept;
mod lifecycle;
mod limits;
mod malformed_models;
mod many;
mod metrics;
mod orders;
#[path = "../common/packages.rs"]
mod packages;
mod paths;
mod perplexity;
mod prefixes;
mod pressure;
mod published;
mod python;
mod raw;
mod requests;
mod residency;
mod rig;
mod schemas;
mod scores;
mod sessions;
mod shared_gpu;
mod shortages;
mod shown;
mod split;
mod steering;
mod tools;
mod top;
mod units;
mod users;

use rocmforge_test_support::{forge, hanging as hangs, malformed};
