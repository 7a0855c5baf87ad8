//! Runtime-free orchestration of kvferry ranks and owners.
