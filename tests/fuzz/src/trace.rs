//! Recorded requests.

use kvferry_topology::load::trace::{TraceOptions, read};
use kvferry_topology::load::{MAX_TOKENS, Prefix};

use crate::Reached;

/// A trace in any of its formats. Its first requests are left out, and only so many are taken, where its length is odd.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    let whole = TraceOptions::default();
    let options =
        if data.len().is_multiple_of(2) { whole } else { TraceOptions { first: 1, limit: 2, speed: 0.5, ..whole } };
    match read("trace", data, &options) {
        Ok(load) => {
            reached.at("trace");
            assert!(!load.requests.is_empty() && load.requests.len() as u64 <= options.limit);
            assert!(load.requests.is_sorted_by_key(|r| r.at), "requests out of turn");
            for request in &load.requests {
                assert!((1..=MAX_TOKENS).contains(&request.prompt) && request.output <= MAX_TOKENS, "{request:?}");
                match &request.prefix {
                    Prefix::None => reached.at("no prefix"),
                    _ => reached.at("prefix"),
                }
            }
        }
        Err(errors) => {
            assert!(!errors.faults.is_empty(), "refused without a fault");
            for fault in &errors.faults {
                reached.fault(&fault.fault);
                assert!(fault.to_string().starts_with("trace"), "{fault}");
            }
        }
    }
    reached
}
