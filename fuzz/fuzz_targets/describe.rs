//! [`kvferry_fuzz::describe`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    drop(kvferry_fuzz::describe::run(data));
});
