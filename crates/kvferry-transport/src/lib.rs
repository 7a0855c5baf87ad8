//! The transport contract of kvferry, its in-memory reference, wrappers and conformance suite.
