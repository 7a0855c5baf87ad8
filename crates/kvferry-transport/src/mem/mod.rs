//! The reference backend: endpoints of one process, real memory, faults on demand.
//!
//! It is what the contract means, said in code, and what the simulator and the tests run on. Bytes move in `step` of the
//! endpoint that submitted, on its caller's thread; one thread stepping all endpoints of a seeded [`MemNetwork`] sees the
//! same events in the same order every time. It is not a fast path between processes: that is `kvferry-shm`.
//!
//! Invariants: a slice of bytes moves only while both endpoints' access is held for reading, so that after `revoke`,
//! `deregister`, [`MemNetwork::kill`] or drop nothing is touched any more. Events and notifications wait without a limit: its
//! peers are its own tests.
//!
//! ```
//! use std::time::Duration;
//! use kvferry_transport::{Event, Region, Transport, mem::MemNetwork};
//! let net = MemNetwork::new(1);
//! let (mut p, mut d) = (net.endpoint()?, net.endpoint()?);
//! p.register(Region::zeroed(4096).unwrap())?;
//! let peer = d.connect(&p.blob())?;
//! d.step(Duration::ZERO);
//! assert_eq!(d.next_event(), Some(Event::Connected { peer }));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod endpoint;
mod faults;
mod network;
mod op;
mod signal;

pub use endpoint::MemTransport;
pub use faults::{Break, MemFaults};
pub use network::MemNetwork;

/// The backend's name.
pub const BACKEND: &str = "mem";
