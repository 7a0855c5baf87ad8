//! Benchmarks of kvferry.
