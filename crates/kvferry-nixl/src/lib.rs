//! The NIXL backend of kvferry.
