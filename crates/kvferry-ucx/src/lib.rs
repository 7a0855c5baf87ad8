//! The UCX backend of kvferry: reads and writes over whatever UCX finds between two ranks, from InfiniBand to TCP.
//!
//! ```no_run
//! use kvferry_transport::{Region, Transport};
//! use kvferry_ucx::{UcxConfig, UcxTransport};
//!
//! let mut endpoint = UcxTransport::new(UcxConfig::default())?;
//! endpoint.register(Region::zeroed(1 << 20).ok_or("no memory")?)?;
//! let blob = endpoint.blob(); // For peers, over the control plane.
//! # let peers_blob = blob;
//! let peer = endpoint.connect(&peers_blob)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//! An endpoint has one or several *rails*. Each is a UCX context with workers of its own, possibly on devices of its own, owned by one
//! thread; raw handles never leave it. Orders come by a mailbox, what has happened goes back as reports, and a thread that has
//! nothing to do sleeps on UCX's event descriptors. A large batch is cut into byte ranges, one for each rail; a small one goes over one
//! rail, in turn. A rail has a bounded number of reads and writes under way.
//!
//! Every operation asks first ([`access`](kvferry_transport::access)): the peer's rail answers from its table, without its owner's
//! help, and keeps the named regions' owners alive until the operation has said that it has ended. That is said, with the
//! notification, after every `ucp_get_nbx` has completed ("when the data is in the local buffer"), and for writes after a
//! `ucp_ep_flush_nbx` on every rail that wrote: by then all operations "are completed both at the origin and at the
//! target" (`ucp.h`). UCX promises no order of active messages, and none is needed. An operation with a notification is `Done` when
//! the peer has said that it was told; if the lane breaks before that, it is in doubt.
//!
//! # What is promised of memory
//! [`Revocation::Fences`](kvferry_transport::Revocation::Fences): once `revoke` or `deregister` has returned, no further operation of
//! a peer is granted; one that was may go on until it ends, and the memory stays registered and alive until then. A peer
//! whose lane broke may be in the middle of a copy: what it has open is let go when it says so, when its process has ended, or, on
//! another host, when none of its lanes is left. That holds for peers that keep to the protocol. What UCX has against others:
//!
//! | what a peer uses | after `revoke` | after `deregister`, once nothing is open |
//! |---|---|---|
//! | remote access over `rc`, `dc` (the network card checks keys) | can touch the region with its old key | the card refuses |
//! | `cuda_ipc` and its like | can touch the region | can, as long as it keeps its mapping |
//! | `cma`, `posix`, `sysv` | can touch whatever the kernel lets its user touch, registered or not | the same |
//! | messages, over any lane, `tcp` and `ud` among them | can have our worker read and write any address of this process | the same |
//!
//! The last row is how UCX does reads and writes where nothing better is there; it serves such requests on every worker and
//! checks no keys. So **the network of the rails must be one that only trusted hosts reach** ([`Rail::devices`] chooses it), and
//! blobs must come from peers that were authenticated: UCX's `tcp` listens without asking who calls. What this crate
//! checks of a blob is its frame, all lengths and numbers in it, and the shape of UCX's addresses and keys, whose parsers would
//! follow anything; what stands in them is believed.
//!
//! # Peers that die
//! Endpoints of UCX report errors (`UCP_ERR_HANDLING_MODE_PEER`), idle ones are probed ([`UcxConfig::keepalive`]), and processes on
//! this host are watched by `pidfd`. A broken lane to a process that is dying is told as
//! [`Gone`](kvferry_transport::LostCause::Gone) once all threads of it have ended, which is when *it* can touch nothing any more
//! (memory that it shared with others may still change). A write that could not be flushed ends in doubt unless its peer's
//! process is known to have ended; so does one to an endpoint that goes while its process lives.
//!
//! # UCX itself
//! `UCX_*` variables of the environment apply, behind what [`UcxConfig`] sets. UCX writes its warnings to the standard output unless
//! `UCX_LOG_FILE` says otherwise. Memory is registered where it is; UCX's lanes of mapped memory (`ucp_rkey_ptr`) reach only what UCX
//! itself has allocated, so they carry messages here, and mapped memory on one host is the business of `kvferry-shm`. Host memory only; the feature `ib` builds the transports for InfiniBand and RoCE in.
//! UCX is part of the program, and patches `brk` before its first thread begins. Where the program is a library that others load (a
//! module of Python), set `UCX_MEM_MMAP_HOOK_MODE=none`, or load it before they have threads: see `kvferry-nixl`, "Load it early".
//!
//! | file | what it is |
//! |---|---|
//! | `config`, `error` | what can be set, and why an endpoint could not be opened |
//! | `transport` | [`UcxTransport`]: registrations, connections and operations as their owner sees them |
//! | `shared`, `mailbox`, `bell`, `work` | between the endpoint and its rails: orders, reports, an operation |
//! | `books` | the registrations, and who has what open on them |
//! | `rail` | the thread: loop, connections, guests, shares of operations |
//! | `walk` | a share of a batch as contiguous pieces |
//! | `wire`, `part`, `process` | what rails say to each other, our part of the blob, which process a peer is |
//! | `lane` | what carries the bytes, by UCX's own word |
//! | `sys` | owners of UCX's handles |

mod bell;
mod books;
#[cfg(test)]
mod broken;
mod config;
mod error;
mod lane;
mod mailbox;
mod part;
mod process;
mod rail;
mod shared;
mod sys;
#[cfg(test)]
mod tests;
mod transport;
mod walk;
mod wire;
mod work;

pub use config::{MAX_RAILS, Rail, UcxConfig};
pub use error::UcxError;
pub use transport::{RailInfo, UcxTransport};
