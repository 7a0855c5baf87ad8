//! The NIXL transport of kvferry: two agents of NIXL's, asked before they touch anything.
//!
//! A [`NixlTransport`] owns one NIXL agent with one backend (plugin), on a thread of its own. Both ends are of this crate: what they tell
//! each other are NIXL's notifications with a prefix, and those of other agents are dropped and [counted](Telemetry::foreign).
//!
//! The library is opened at run time. Where it is missing, [`NixlTransport::new`] says what was looked for and how to get it;
//! [`available`] asks without opening anything else. To build, libclang is needed (the crate `nixl-sys` runs bindgen);
//! `cargo xtask native` fetches both.
//!
//! # What is guaranteed
//! - **Asked first.** Every operation asks its peer and is granted before its first byte, and says when it has stopped
//!   ([`kvferry_transport::access`]). So what is stale or revoked fails as that, a peer's memory *and its registration with NIXL* outlive
//!   each operation on it, and a notification comes once, behind the bytes: NIXL flushes the connection before a request is done.
//! - **Revocation** is [`Fences`](kvferry_transport::Revocation::Fences): after `revoke` nothing further begins; what is under way may touch
//!   the memory until it ends. NIXL can't take a key back from a peer that has it, so only peers that keep to the protocol are bound.
//! - **One end each.** `Done` once NIXL says so of every request of the operation and the peer was told: the telling can't succeed after
//!   a request of the connection failed. Cancelled, disconnected or with a lost peer, an operation stops posting and ends when its
//!   requests have, as `Failed`; one that takes longer than 2 s ends `InDoubt`. NIXL's own cancelling (to release a request in
//!   progress) is not used for that, because nothing tells when such a request has stopped: it stays with the thread, which keeps the
//!   memory's owners alive until it ends. A request that failed proves nothing of the bytes that were on their way: its operation ends
//!   `InDoubt`, keeps its memory and is not told as ended, unless the peer itself was *seen* to have ended (its process, or in the same
//!   process its thread). Farewells and broken connections are no such sight.
//! - **A notification** is given to UCX before its operation is `Done`. If the connection fails between that and its way out, it is lost, and
//!   the peer is lost with it.
//! - **A peer's death** shows by the end of its process on the same host (at once, also when idle), by its farewell, by NIXL failing to
//!   send, or by silence for [`NixlConfig::silence`] while something of ours waits for it (its thread answers pings).
//!   A killed process's memory goes before the process does: a failing request waits for that as its cause.
//! - **Memory that a peer was granted** is kept until the peer says that the operation has stopped, says its last word, or was seen to have
//!   ended. A peer of another host that is lost in the middle can do none of these: what it held is kept until this endpoint ends.
//! - **Dropped**, an endpoint says that it closes, waits up to a second for its requests and its guests' operations, and says its last
//!   word when nothing of it moves any more. Where a request that threads of the plugin shared has failed, NIXL's agent is left behind with
//!   those threads, as UCX aborts when it is destroyed then; memory is let go all the same, if its registration ends.
//!   What takes longer it leaves, with all that it needs, to the thread, which ends when that has.
//! - **No abort by statuses.** The library's statuses are values here.
//!
//! # Whom it trusts
//! Metadata is walked before NIXL gets it: every field and length in it, and that the blob's regions are in it. What is inside UCX's worker
//! addresses and keys is not checked, so a blob that somebody forged with care, with a right checksum, can bring down the process, or aim a lane of
//! this host at another process. And NIXL tells a sender by the name that the sender wrote: whoever reaches the UCX worker
//! can speak for another endpoint, and so have its memory let go. Blobs are to come from where the peer is known, and the workers to be
//! reachable by peers alone.
//!
//! # Lanes
//! [`PeerInfo::lane`](kvferry_transport::PeerInfo) tells UCX's transport that carries remote memory (`cma`, `rc_mlx5`, `tcp`, ...), although NIXL's
//! interface does not: it is read from the UCX that the plugin has loaded (see the module `truth`). For other plugins it is
//! [`Unknown`](kvferry_transport::LaneKind::Unknown), and the text says so.
//!
//! # How it waits
//! NIXL tells nobody when something has arrived. Its own progress thread, with the delay of 0 that is its default, burns a processor; with
//! a delay it sleeps on UCX's descriptor, but then UCX locks, and somebody still has to poll for what it found. So it is off, UCX runs
//! without locks on our thread, and that looks: for [`spin`](Waiting::spin) without pause after something happened, then with pauses that
//! double up to a bound for what is under way. On one host a sender also rings (an empty datagram to an abstract socket), so that the
//! longest pauses delay nobody there.
//!
//! Measured on two processors that other work kept busy, between two processes: an idle endpoint uses 0.2 to 0.3 % of a processor (1 % with
//! pauses of 2 ms, where peers are on other hosts); a read of 64 bytes takes 15 µs while busy, 0.12 ms after a pause of 1 ms and 0.25 ms
//! after 20 ms (1.4 ms without ringing); 100,000 small operations 11 µs each.
//!
//! # Lists
//! A batch's cursor merges neighbours, so each request is made of raw lists (with NIXL's own search for neighbours switched off), up
//! to [`Cutting`]'s limits, and nothing is cached. Per descriptor a raw list costs 20 ns to fill and 20 to 130 ns to turn into a
//! request; a prepared list 15 to 20 ns to prepare once and 30 to 100 ns to use by indices, for 64 bytes of memory a block and side: 100
//! regions of 100,000 blocks would be 0.6 GB a peer. To move 4 KiB takes 2,400 ns, 16 KiB 5,500 ns. So a prepared list would win at most
//! 3 % of the smallest blocks, and lose what merging wins.
//!
//! A whole batch takes as long as a bare loop of NIXL's calls over the same descriptors, within the noise of a machine that
//! is also used for other work; `docs/performance.md` has the figures, also with threads of the plugin.
//!
//! # Load it early
//! When the first endpoint loads NIXL's plugin UCX, UCX patches `mmap`, `brk` and their like in the running process, to learn what is
//! unmapped, and tries that by moving the end of glibc's main heap up and back, as if no other thread were there (UCX 1.22,
//! `ucm/mmap/install.c`). What another thread takes from that heap in between is cut off: `break adjusted to free malloc space`, or a
//! segmentation fault. So open the first endpoint before other threads begin, or set `UCX_MEM_MMAP_HOOK_MODE=none` in the environment
//! that the process starts with, as `cargo xtask` does: all memory is registered by name here, so that nothing needs the hooks. (Of
//! 100 loads beside a thread that did nothing but allocate, 7 crashed; of 200 without hooks, none.)
//!
//! # What it is not
//! It knows nothing of the meaning of bytes. Only host memory can be registered. Plugins that move bytes between memory and storage
//! are refused. A child of a fork gets errors.
//!
//! ```
//! use std::time::Duration;
//!
//! use kvferry_nixl::{NixlConfig, NixlError, NixlTransport};
//! use kvferry_transport::{Event, Region, Transport};
//!
//! let mut p = match NixlTransport::new(NixlConfig::default()) {
//!     Err(error @ NixlError::NoLibrary { .. }) => return Ok(println!("{error}")),
//!     other => other?,
//! };
//! let mut d = NixlTransport::new(NixlConfig::default())?;
//! p.register(Region::zeroed(4096).ok_or("no memory")?)?;
//! let peer = d.connect(&p.blob())?;
//! while d.next_event() != Some(Event::Connected { peer }) {
//!     d.wait(Some(Duration::from_millis(1)));
//!     d.step(Duration::ZERO);
//! }
//! println!("{}", d.peer(peer)?.lane.detail);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bell;
mod config;
mod error;
mod feed;
mod frame;
mod lane;
mod live;
mod metadata;
mod open;
mod process;
mod shared;
mod sys;
mod transport;
mod truth;
mod worker;

pub use config::{Cutting, NixlConfig, Waiting};
pub use error::NixlError;
pub use shared::Telemetry;
pub use transport::NixlTransport;

/// Whether NIXL's library is there and complete: where it was found.
///
/// # Errors
/// [`NixlError::NoLibrary`] or [`NixlError::OldLibrary`], which say what was looked for and how to get it.
pub fn available() -> Result<std::path::PathBuf, NixlError> {
    sys::library().map(|library| library.path)
}
