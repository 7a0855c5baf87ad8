//! The UCX backend of kvferry.
