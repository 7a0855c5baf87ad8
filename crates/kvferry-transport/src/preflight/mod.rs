//! Is the lane to a peer the one that it should be, and how fast is it? Asked before anything depends on it.
//!
//! A backend says which [`Lane`](crate::Lane) it uses; libraries fall back silently, and a lane may be the right one and slow. A
//! [`Policy`] says what is required and refuses the rest with the reason; a [`Probe`] measures: reads of the peer's registered
//! regions into a scratch region of ours, with no help of the peer and no change to its memory. [`run`] is the probe with a loop
//! around it.
//!
//! It is not a benchmark: it runs for a second at most on a lane that works, takes what the machine gives at that moment, and its
//! figures are for choosing and refusing.
//!
//! ```
//! use kvferry_transport::{Region, Transport, mem::MemNetwork, preflight::{Policy, ProbeOptions, run}};
//! let net = MemNetwork::new(1);
//! let (mut p, mut d) = (net.endpoint()?, net.endpoint()?);
//! p.register(Region::zeroed(1 << 20).unwrap())?;
//! let peer = d.connect(&p.blob())?;
//! let start = std::time::Instant::now();
//! let scratch = Region::zeroed(1 << 20).unwrap();
//! let report = run(&mut d, peer, scratch, &mut || start.elapsed(), &ProbeOptions::quick(), &mut Vec::new())?;
//! Policy::new(["in-process"], Some(1_000_000))?.check(&report.lane)?;
//! let refusal = Policy::new(["rdma", "cuda_ipc"], None)?.check(&report.lane).unwrap_err();
//! assert!(refusal.to_string().contains("requires rdma or cuda_ipc"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod policy;
mod probe;
mod report;

pub use policy::{Found, Policy, PolicyError};
pub use probe::{Probe, ProbeError, ProbeOptions, run};
pub use report::{Rate, Registration, Report};
