//! [`kvferry_fuzz::config`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = kvferry_fuzz::config::run(data);
});
