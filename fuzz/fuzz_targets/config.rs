//! [`kvferry_fuzz::config`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    drop(kvferry_fuzz::config::run(data));
});
