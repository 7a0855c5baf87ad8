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
//! - **No fault for want of file.** A peer's memory file is mapped only if it is sealed against resizing and long enough.
//!   Whatever a peer does and however it ends, an access to it stays inside the file; a peer's death ends operations with an
//!   error. A page that the peer never touched, or punched out, is made at our access, and where memory is limited (a memory
//!   cgroup, `vm.overcommit_memory=2`) there may be none for it, which kills the process: owners should touch their buffers.
//! - **Who may write.** To read, a peer gets a descriptor opened read-only. To write, it gets a writable one, if
//!   [`Config::grant_writes`] and the region allow it. A peer of another user can't open the file again for writing, if its mode
//!   is 400, which is checked where [`Config::other_users`] lets such in. One of the same user can, and can do much else
//!   (ptrace): only a memfd with `F_SEAL_FUTURE_WRITE` is protected by the kernel against all.
//! - **Done** means that the bytes were moved *and* that the peer's endpoint was alive after the last of them. That the
//!   bytes are the right ones is the business of leases and fences above.
//! - **Hardly ever in doubt.** Our threads do the copying, so an end is `Done` or `Failed`, and after it nothing is touched. The
//!   exception is a thread that the system holds in the middle of a slice, which a peer can bring about: memory behind
//!   `userfaultfd`, or of a file system that does not answer. An operation that was told to stop and has not after 2 s ends
//!   `InDoubt`. Its job keeps all that it uses alive and the connection's socket open; another thread takes the held one's
//!   place, up to 32 in all; and the end of the endpoint waits half a second for such threads, then leaves them to themselves.
//! - **Deregistration.** Peers' operations on the region fail as [`Stale`](kvferry_transport::TransferError::Stale) at the end of
//!   a slice (512 KiB, or 4 MiB that the kernel copies), checked after the last byte too. The memory's owner is kept alive until
//!   no conforming peer is inside a slice, also one that was sent away. A region cannot be taken back from a peer that does not
//!   conform and has it mapped; so [`revoke`](kvferry_transport::Transport::revoke) is
//!   [`Unsupported`](kvferry_transport::Revocation::Unsupported), and evidence that a peer has stopped is the end of its process.
//! - **The peer's process.** Memory that the kernel copies is reached by a process id, and a word in the peer's memory shows that
//!   it is still that process. A read brings the word along; before a write it is read by a call of its own, so a write can
//!   go astray if between these two calls the peer's process ends and the system gives its number to another.
//! - **Forks.** An endpoint belongs to the process that opened it. A child of a fork gets errors from it and refuses peers.
//! - **Bounded.** Frames, texts, guests, mappings and the number of notifications that wait (4,096 of up to 64 KiB) have limits;
//!   nothing is allocated from a number that a peer announces.
//! - **Who is it?** A peer's id in a notification is what it said of itself. Whoever has our blob may connect under any id that no
//!   connected peer has.
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
