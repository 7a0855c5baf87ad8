//! Cross-crate tests of kvferry.

mod skip;

pub use skip::skip;
