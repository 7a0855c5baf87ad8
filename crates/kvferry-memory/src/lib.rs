//! Owned cache buffers for kvferry: host and shared memory, patterns, digests.
