//! What a test does that can't run on this machine.
//!
//! It says why and is counted as skipped by `cargo xtask test`, never as passed. `KVFERRY_REQUIRE=shm,ptrace,ucx,nixl,browser`
//! turns the skips of these backends (and of what needs Chromium with its driver) into failures, for machines that are known to have
//! them.

use std::io::Write as _;

/// Reports that the running test can't run here: `backend` is what it needs, `why` what this machine lacks. The caller
/// returns from the test next.
///
/// # Panics
/// Where `KVFERRY_REQUIRE` lists `backend`, so that the test fails.
pub fn skip(backend: &str, why: &str) {
    let required = std::env::var("KVFERRY_REQUIRE").unwrap_or_default();
    assert!(!is_listed(&required, backend), "{backend} is required by KVFERRY_REQUIRE={required}, but: {why}");
    let thread = std::thread::current();
    // Not print!, which the test harness holds back for tests that pass. The line must start a line of its own even
    // when the harness has just written "test name ... ".
    let line = format!("\nSKIPPED {} ({backend}): {why}\n", thread.name().unwrap_or("test"));
    let mut out = std::io::stdout().lock();
    let printed = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    assert!(printed.is_ok(), "a skip that nobody is told of would count as passed");
}

fn is_listed(list: &str, backend: &str) -> bool {
    list.split(',').any(|entry| entry.trim() == backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_whole_names() {
        assert!(is_listed("shm, ucx", "ucx"));
        assert!(!is_listed("shm,ucx", "uc"));
        assert!(!is_listed("", "shm"));
    }
}
