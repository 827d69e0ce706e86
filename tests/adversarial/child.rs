//! Runs tests that may end their process in a child: the test binary again, with only that test.

use std::process::{Command, Output};

const MARK: &str = "ROCMFORGE_TEST_CHILD";

/// True in the child that [`run`] started.
pub fn inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Runs `test` (its full path in this binary) in a child and waits.
pub fn run(test: &str) -> Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "{test} is not the name of a test: {text}");
    output
}

/// Runs `test` in a child; panics with the child's output if it fails there.
pub fn passes(test: &str) {
    let output = run(test);
    assert!(
        output.status.success(),
        "{test} failed in its child: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
