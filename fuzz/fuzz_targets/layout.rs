//! [`kvferry_fuzz::layout`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = kvferry_fuzz::layout::run(data);
});
