//! Sans-IO protocol of kvferry: names, handshake, leases and requests, and their wire form.
//!
//! Two kinds of links carry these messages. A *peer link* joins the owners of two engines ([`peer::PeerMessage`]); a
//! *rank link* joins an engine's owner and one of its ranks ([`rank::ToRank`], [`rank::FromRank`]). The machines here take
//! messages and give messages and values back; there is no socket, thread, clock or random number in this crate, and it
//! builds for `wasm32-unknown-unknown`.
//!
//! | module | what it is |
//! |---|---|
//! | [`names`] | engine ids, epochs, leases, attempts, the fence of all four; content keys |
//! | [`manifest`] | an engine's whole description: geometry, transport blobs, names, digest; how ranks join into it |
//! | [`handshake`] | hello both ways, then established, or every mismatch |
//! | [`lease`] | the producer's side of a request: offered, bound, closed |
//! | [`request`] | the consumer's side: wanted, bound, reading, releasing, released |
//! | [`push`] | the same where the producer writes: what is granted, who writes, how each ended |
//! | [`peer`], [`rank`] | the messages of the two kinds of links |
//! | [`wire`] | the bytes: frames, data transfer objects, and the one place where these become the types above |
//!
//! Invariants: only `wire` knows serde; what comes from a peer is checked once, in [`wire::convert`], and its faults are
//! reported as the peer's; decoding never panics and never allocates by a number that a peer chose; a closed lease
//! never answers *Held*.
#![forbid(unsafe_code)]

pub mod handshake;
pub mod lease;
pub mod manifest;
pub mod names;
pub mod peer;
pub mod push;
pub mod rank;
pub mod request;
#[cfg(test)]
mod testing;
pub mod wire;
