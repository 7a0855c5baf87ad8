//! Cross-crate tests of kvferry.
