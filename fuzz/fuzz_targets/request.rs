//! [`kvferry_fuzz::request`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    drop(kvferry_fuzz::request::run(data));
});
