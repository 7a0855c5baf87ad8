//! Small worlds of kvferry's protocol, for a model checker: engines of two ranks that offer, announce, bind, read, write, release and
//! end, with all that may go wrong between them. [`World`] says what there is and what may happen how often, [`World::actions`] what
//! can happen in a [`State`], [`World::next`] what follows, and [`Rule`] what must hold in every state. The tests explore each world
//! to its end with `stateright`; this crate doesn't know it.
//!
//! # What is real, and what is modelled
//!
//! The states of leases and requests, their transitions, messages and answers are those of
//! `kvferry_proto::{lease, push, request, peer}`, and maps of peers those of `kvferry_geometry`: nothing of them is written again
//! here. What the owners and ranks of `kvferry-session` put around them is modelled by hand, as thin as it can be:
//!
//! | here | mirrors, in `kvferry-session/src` | leaves out |
//! |---|---|---|
//! | `producer` | `owner/leases.rs`: the table of leases, bind, release, heartbeat, expiry, withdrawal, lost links and ranks | limits, older versions, digests and gathers |
//! | `producer/pushes` | `owner/pushes.rs`, `owner/streams.rs`: named writers, grants, stop and who has stopped, writers in doubt, a prefill that begins anew | progress, lists of blocks that grow |
//! | `producer/writes` | `rank/{push,pushes,streams}.rs`: ordered, bytes arrive when they are final, at any moment, also after a cancel; ends once with all that was in flight | slices, lanes, the grant's own time |
//! | `consumer` | `owner/{pulls,ends,beats}.rs`: a request's states, stop, grace, another attempt, heartbeats; `owner/loans.rs`: blocks lent, quarantine; `owner/roads.rs`: one link for each producer, made anew when it is older than a request | limits, assurance above the fence, full hits, backoff, other sources, beats within less than a second |
//! | `consumer/receiving` | `owner/receiving.rs`: the grant, who has written, halting, evidence whenever and by whatever link it comes | reports of bytes, reclaiming by age |
//! | reads (in `consumer`) | `rank/pull.rs`: ordered, bytes arrive piece by piece at any moment, ends once with all that was in flight, cancelled | slices, staging, connecting |
//! | `network` | a link over a stream (`owner/links.rs`, the facade's sockets): in order until it breaks, what was sent before may still arrive, also after a later link has carried something, both ends find out at their own time | the handshake: a link that is made is greeted; but for one that nobody has asked for, whose consumer hears late what the producer has said of itself |
//! | `state` | the driver: messages, timers that are late by less than a second, engines that die, ranks that are lost and join again, blocks that are filled with other bytes once they were handed back | |
//!
//! [`Network::Anyhow`] is harsher than any link that kvferry uses: messages are lost, repeated and overtake each other. The rules
//! hold there too, but for what `tests/model/faults.rs` shows to need links as they are: two requests of one owner by the *same*
//! reference, and a rank's report that comes twice over two attempts. What is pushed is explored over links as they are: there a
//! message comes late, or out of order with others, by an older link beside a newer one.
//!
//! Who may still write is what the model knows and the owners don't: each write that was ordered stands in the state until its rank
//! has ended it, or another life of that rank has begun. So *lent while it may be written*, *kept while it is read*, *drained before
//! the next* and *never after it was said to have stopped* are looked up there, and not in what anybody believes.
//!
//! # Bounds
//!
//! Two ranks an engine, one block a lease, one or two leases and requests, up to two engines a side, time in whole seconds. Every
//! action uses up something (a message, a read, a write, a second, a chance), so that each world is finite and has no cycle: that all
//! ends is checked as a rule of states in which nothing can happen any more. Engines have something to say to each other again, some
//! day: a consumer that is left with a block in quarantine, and has no link to the producer, makes one.
//!
//! # Figures
//!
//! States of each world, and of the larger one of `KVFERRY_MODEL_DEPTH=2`, where that was explored to its end; one thread does some
//! 50,000 a second (optimised as tests are here), and all of the first column with all faults are 67 s of processor time.
//!
//! | world | states | larger |
//! |---|---|---|
//! | a block offered again | 107,145 | 762,752 |
//! | a consumer of writers restarts | 224,384 | - |
//! | a consumer's rank is lost | 67,551 | - |
//! | a consumer's rank is lost while written | 114,988 | - |
//! | a lease that ends | 33,575 | 172,766 |
//! | a producer of writers restarts | 13,673 | 87,005 |
//! | a producer's rank is lost | 34,229 | - |
//! | a rank joins between attempts | 11,773 | - |
//! | a stream | 87,321 | 719,396 |
//! | a stream over links that break | 354,924 | - |
//! | a stream that ends | 384,334 | - |
//! | a writer is lost | 238,660 | 512,688 |
//! | another attempt | 104,821 | 1,513,221 |
//! | another attempt to push | 116,138 | 252,496 |
//! | attempts, messages in any order | 102,117 | - |
//! | messages in any order | 107,219 | - |
//! | old news of a producer | 183,369 | - |
//! | one push | 85,062 | 634,168 |
//! | one reference pushed twice | 159,630 | 2,175,738 |
//! | one reference twice | 63,445 | 211,522 |
//! | one request | 45,034 | 868,968 |
//! | pushed then pulled | 15,862 | 197,713 |
//! | reads that never end | 115,394 | 1,333,372 |
//! | restarts | 42,497 | 307,195 |
//! | taken back while written | 46,439 | 508,511 |
//! | two consumers of one lease | 127,976 | 370,667 |
//! | two consumers push one lease | 166,283 | 469,116 |
//! | two engines a side | 67,031 | 524,768 |
//! | two leases of one heartbeat | 215,732 | - |
//! | writes that never end | 112,728 | 138,771 |
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
