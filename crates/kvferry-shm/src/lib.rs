//! The same-host transport of kvferry: many processes, no native library.
//!
//! A [`ShmTransport`] moves bytes between memory of two processes with its own copy threads, in one of two ways:
//!
//! | the peer's region is | and is reached by |
//! |---|---|
//! | backed by a memfd ([`Region::with_share`](kvferry_transport::Region::with_share)) | mapping it: one copy from mapping to mapping |
//! | any other memory | the kernel's copy between processes, in batches of 512 ranges; asked for at connect, and where the system refuses, the error names cause and cure |
//!
//! Each `connect` is one Unix socket in the abstract namespace; memory files travel over it when an operation first needs a
//! region. No file exists anywhere, so nothing is left behind, however a process ends.
//!
//! # What is guaranteed
//! - **No fault.** A peer's memory file is mapped only if it is sealed against resizing and long enough. Whatever a peer
//!   does and however it ends, an access to it never faults; a peer's death ends operations with an error.
//! - **Who may write.** To read, a peer gets a descriptor opened read-only. To write, it gets a writable one, if
//!   [`Config::grant_writes`] and the region allow it. Processes of one user can do much to each other regardless
//!   (ptrace); a memfd with `F_SEAL_FUTURE_WRITE` is protected by the kernel against all of them.
//! - **Done** means that the bytes were moved *and* that the peer's endpoint was alive after the last of them. That the
//!   bytes are the right ones is the business of leases and fences above.
//! - **Never in doubt.** Our threads did the copying, so an end is always `Done` or `Failed`, and after it nothing is touched.
//! - **Deregistration.** Peers' operations on the region fail as [`Stale`](kvferry_transport::TransferError::Stale) within one
//!   slice (512 KiB, or 4 MiB that the kernel copies), checked after the last byte too. The memory's owner is kept alive until no conforming peer is
//!   inside a slice. A region cannot be taken back from a peer that does not conform and has it mapped; so
//!   [`revoke`](kvferry_transport::Transport::revoke) is [`Unsupported`](kvferry_transport::Revocation::Unsupported), and evidence
//!   that a peer has stopped is the end of its process.
//! - **Bounded.** Frames, texts, guests, mappings and waiting notifications have limits; nothing is allocated from a number
//!   that a peer announces.
//! - **Told truly**: [`PeerInfo::lane`](kvferry_transport::PeerInfo) says which way a peer's regions are reached, whether the
//!   kernel lets us, and the best rate and shortest time that operations on this connection have shown.
//! - **Idle** endpoints sleep: the wake descriptor is an epoll descriptor over everything waited for.
//!
//! # What it is not
//! It knows nothing of the meaning of bytes, and does not hide that two processes must share a network namespace (for the
//! socket) and, for memory without a memfd, a pid namespace and a user.
//!
//! ```
//! use kvferry_shm::{Config, ShmTransport};
//! use kvferry_transport::{Event, Region, Transport};
//! # use std::time::Duration;
//! let mut p = ShmTransport::new(Config::default())?;
//! let mut d = ShmTransport::new(Config::default())?;
//! p.register(Region::zeroed(4096).unwrap())?;
//! let peer = d.connect(&p.blob())?;
//! while d.next_event() != Some(Event::Connected { peer }) {
//!     p.step(Duration::ZERO);
//!     d.step(Duration::ZERO);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod board;
mod config;
mod copy;
mod crew;
mod endpoint;
mod frame;
mod guest;
mod job;
mod lane;
mod link;
mod local;
mod poller;
mod process;
mod refusal;
mod sock;
#[cfg(test)]
mod tests;
mod window;

pub use config::{Config, OpenError};
pub use endpoint::ShmTransport;
