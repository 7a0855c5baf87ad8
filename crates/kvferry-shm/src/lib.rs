//! Same-host transport of kvferry over shared memory.
