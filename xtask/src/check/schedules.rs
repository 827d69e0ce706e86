//! Runs the tests of random schedules for 25 times as many seeds as `cargo test` does.

use super::Done;
use crate::error::Result;
use crate::host;

const SCHEDULES: u32 = 100_000;

const TESTS: [&str; 2] = [
    "scheduler::schedule::tests::random_schedules_keep_the_rules",
    "scheduler::tests::schedules::no_schedule_breaks_a_rule",
];

pub fn run() -> Result<Done> {
    let mut command = host::cargo();
    command.args(["test", "--package", "rocmforge", "--lib", "--", "--exact"]).args(TESTS);
    command.env("ROCMFORGE_SCHEDULES", SCHEDULES.to_string());
    host::run(&mut command)?;
    Ok(Done::note(format!("{SCHEDULES} of each kind")))
}
