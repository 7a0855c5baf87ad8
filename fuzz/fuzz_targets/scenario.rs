//! [`kvferry_fuzz::scenario`] under libFuzzer.
#![no_main]

#[path = "../../tests/tests/counting/mod.rs"]
mod counting;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    kvferry_fuzz::bounded("scenario", data, |run| counting::peak(run));
});
