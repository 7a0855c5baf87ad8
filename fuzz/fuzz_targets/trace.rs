//! [`kvferry_fuzz::trace`] under libFuzzer.
#![no_main]

#[path = "../../tests/tests/counting/mod.rs"]
mod counting;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    kvferry_fuzz::bounded("trace", data, |run| counting::peak(run));
});
