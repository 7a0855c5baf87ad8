//! The worlds of `kvferry-model`, explored to their ends with stateright; and the same with planted faults, each of which is found.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod checked;
mod faults;
mod pushes;
mod worlds;
