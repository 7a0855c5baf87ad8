//! Small worlds of kvferry's protocol, for a model checker: engines of two ranks that offer, bind, read, release and end, with
//! all that may go wrong between them. [`World`] says what there is and what may happen how often, [`World::actions`] what can
//! happen in a [`State`], [`World::next`] what follows, and [`Rule`] what must hold in every state. The tests explore each world
//! to its end with `stateright`; this crate doesn't know it.
//!
//! # What is real, and what is modelled
//!
//! The states of leases and requests, their transitions, messages and answers are those of `kvferry_proto::{lease, request, peer}`,
//! and maps of peers those of `kvferry_geometry`: nothing of them is written again here. What the owners and ranks of
//! `kvferry-session` put around them is modelled by hand, as thin as it can be:
//!
//! | here | mirrors, in `kvferry-session/src` | leaves out |
//! |---|---|---|
//! | `producer` | `owner/leases.rs`: the table of leases, bind, release, heartbeat, expiry, withdrawal, lost links and ranks | limits, older versions, digests and gathers |
//! | `consumer` | `owner/{pulls,ends,beats}.rs`: a request's states, stop, grace, another attempt, heartbeats; `owner/loans.rs`: blocks lent, quarantine; `owner/roads.rs`: one link for each producer, made anew when it is older than a request | limits, assurance above the fence, full hits, backoff, beats within less than a second |
//! | reads (in `consumer`) | `rank/pull.rs`: ordered, bytes arrive piece by piece at any moment, ends once with all that was in flight, cancelled | slices, staging, connecting |
//! | `network` | a link over a stream (`owner/links.rs`, the facade's sockets): in order until it breaks, what was sent before may still arrive, both ends find out at their own time | the handshake: a link that is made is greeted |
//! | `state` | the driver: messages, timers that are late by less than a second, engines that die, ranks that are lost and join again, blocks that are filled with other bytes once they were handed back | |
//!
//! [`Network::Anyhow`] is harsher than any link that kvferry uses: messages are lost, repeated and overtake each other. The rules
//! hold there too, but for what `tests/model/faults.rs` shows to need links as they are: two requests of one owner by the *same*
//! reference, and a rank's report that comes twice over two attempts.
//!
//! # Bounds
//!
//! Two ranks an engine, one block a lease, one or two leases and requests, up to two engines a side, time in whole seconds. Every
//! action uses up something (a message, a read, a second, a chance), so that each world is finite and has no cycle: that all ends is
//! checked as a rule of states in which nothing can happen any more.
//!
//! # Figures
//!
//! States of each world, and of the larger one of `KVFERRY_MODEL_DEPTH=2`; one thread does some 50,000 a second (optimised as
//! tests are here), and all of the first column with all faults are 21 s of processor time.
//!
//! | world | states | larger |
//! |---|---|---|
//! | a block offered again | 107,145 | 762,752 |
//! | a consumer's rank is lost | 42,228 | 1,838,227 |
//! | a lease that ends | 33,575 | 172,766 |
//! | a producer's rank is lost | 29,880 | 453,054 |
//! | a rank joins between attempts | 10,945 | 60,202 |
//! | another attempt | 104,821 | 1,513,221 |
//! | attempts, messages in any order | 102,039 | 480,652 |
//! | messages in any order | 107,141 | 249,843 |
//! | one reference twice | 63,445 | 211,522 |
//! | one request | 45,034 | 868,968 |
//! | reads that never end | 115,394 | 1,333,372 |
//! | restarts | 42,497 | 307,195 |
//! | two consumers of one lease | 127,976 | 370,667 |
//! | two engines a side | 67,031 | 524,768 |
//! | two leases of one heartbeat | 215,606 | (not explored to its end yet) |
#![forbid(unsafe_code)]

mod consumer;
mod fault;
mod network;
mod producer;
mod rules;
mod state;
mod world;

pub use consumer::How;
pub use fault::Fault;
pub use network::{End, LinkId};
pub use rules::Rule;
pub use state::{Action, Fate, Owner, State, Times};
pub use world::{Chances, LeasePlan, Network, PullPlan, RANKS, Shape, Start, Terms, World, WorldError};
