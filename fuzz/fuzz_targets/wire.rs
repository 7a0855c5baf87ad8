//! [`kvferry_fuzz::wire`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = kvferry_fuzz::wire::run(data);
});
