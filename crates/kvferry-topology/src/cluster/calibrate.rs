//! Figures that were measured, from what `cargo xtask preflight --json` prints.
//!
//! A preflight reads from one other process, at several sizes with a few reads in flight, and a small one by itself. From that follow
//!
//! - the rate: what each further byte of a larger read takes;
//! - the cost of a message: what a read takes beside its bytes while others are in flight;
//! - the latency: what the small read took beyond that, half of it for each direction.
//!
//! It reads one descriptor at a time, so it says nothing of their cost, unless it is as much as the whole small read. What lane it was
//! decides which figures they replace: shared memory those of `[host]`, a device's direct access those of `[nvlink]` or else
//! `[pcie]`, RDMA and TCP those of `[nic]`, or of `[host]` in a cluster of one machine without cards.

use std::time::Duration;

use serde::Deserialize;

use super::MAX_BYTES;
use super::fault::{ClusterErrors, ClusterFault, Faults};
use super::machine::{Lane, Machine, Parts};

/// What one preflight found, by transport.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Calibration {
    /// Those transports that came up, in the order of the file. Where two have the same kind of lane, the first counts.
    pub measured: Vec<Measured>,
}

/// What was found of one transport.
#[derive(Clone, PartialEq, Debug)]
pub struct Measured {
    /// `shm`, `ucx` or `nixl`.
    pub transport: String,
    /// The kind of its lane: `shm`, `cma`, `in-process`, `device`, `rdma`, `tcp`.
    pub lane: String,
    /// Bytes a second.
    pub rate: f64,
    /// One way.
    pub latency: Duration,
    /// Of one operation, beside its bytes.
    pub per_message: Duration,
    /// What the small read took: no descriptor can cost more.
    pub small: Duration,
}

/// The file. What else is in it, and what will be, is nobody's business here.
#[derive(Deserialize)]
struct File {
    command: Option<String>,
    #[serde(default)]
    transports: Vec<Transport>,
}

#[derive(Deserialize)]
struct Transport {
    transport: String,
    lane: Option<LaneName>,
    measured: Option<Figures>,
}

#[derive(Deserialize)]
struct LaneName {
    kind: String,
}

#[derive(Deserialize)]
struct Figures {
    #[serde(default)]
    reads: Vec<Read>,
    small_read_seconds: f64,
}

#[derive(Deserialize)]
struct Read {
    bytes: u64,
    bytes_per_second: f64,
}

impl Calibration {
    /// Reads what a preflight has printed. `file` is what faults call it.
    ///
    /// # Errors
    ///
    /// It is nothing that a preflight prints, no transport came up, or figures can't be.
    pub fn from_json(file: &str, text: &str) -> Result<Self, ClusterErrors> {
        let mut faults = Faults::of(file);
        if text.len() > MAX_BYTES {
            let (got, limit) = (text.len() as u64, MAX_BYTES as u64);
            faults.add("", ClusterFault::TooMany { what: "its length in bytes", got, limit });
            return faults.or(None);
        }
        let found: File = match serde_json::from_str(text) {
            Ok(found) => found,
            Err(error) => {
                faults.add("", ClusterFault::Form(format!("not what a preflight prints: {error}")));
                return faults.or(None);
            }
        };
        if found.command.as_deref() != Some("preflight") {
            let got = format!("{:?}", found.command.unwrap_or_default().chars().take(80).collect::<String>());
            let change = "it must be \"preflight\": give what `cargo xtask preflight --json` has printed".to_owned();
            faults.add("command", ClusterFault::Invalid { got, change });
            return faults.or(None);
        }
        let mut measured = Vec::new();
        for (i, transport) in found.transports.into_iter().enumerate() {
            measured.extend(one(&mut faults, i, transport));
        }
        if measured.is_empty() {
            faults.add("transports", ClusterFault::Missing("no transport came up, so nothing was measured"));
        }
        faults.or(Some(Self { measured }))
    }

    /// Only what was found of one transport.
    #[must_use]
    pub fn only(&self, transport: &str) -> Self {
        Self { measured: self.measured.iter().filter(|m| m.transport == transport).cloned().collect() }
    }
}

fn one(faults: &mut Faults, i: usize, found: Transport) -> Option<Measured> {
    let (lane, mut figures) = (found.lane?.kind, found.measured?);
    figures.reads.sort_by_key(|r| r.bytes);
    for (j, read) in figures.reads.iter().enumerate() {
        if read.bytes == 0 || !(1.0..=1e15).contains(&read.bytes_per_second) {
            let got = format!("{} bytes at {} a second", read.bytes, read.bytes_per_second);
            let change = "both must be above 0; measure again".to_owned();
            faults.add(format!("transports[{i}].measured.reads[{j}]"), ClusterFault::Invalid { got, change });
            return None;
        }
    }
    let small = figures.small_read_seconds;
    if !(0.0..=10.0).contains(&small) {
        let change = "it must be from 0 to 10; measure again".to_owned();
        let fault = ClusterFault::Invalid { got: small.to_string(), change };
        faults.add(format!("transports[{i}].measured.small_read_seconds"), fault);
        return None;
    }
    let (Some(first), Some(last)) = (figures.reads.first(), figures.reads.last()) else {
        let what = "the rates of reads; measure again";
        faults.add(format!("transports[{i}].measured.reads"), ClusterFault::Missing(what));
        return None;
    };
    let (rate, message) = line(first, last);
    let message = message.min(small);
    let [latency, per_message, small] = [(small - message) / 2.0, message, small].map(Duration::from_secs_f64);
    Some(Measured { transport: found.transport, lane, rate, latency, per_message, small })
}

/// Bytes a second, and seconds of a read beside its bytes, of the line through the smallest and the largest read; if that would have no
/// or less than no cost, what the largest got.
fn line(first: &Read, last: &Read) -> (f64, f64) {
    // No figure of a preflight has more than 53 bits.
    #[allow(clippy::cast_precision_loss, reason = "sizes of reads")]
    let [a, b] = [first, last].map(|r| (r.bytes as f64, r.bytes as f64 / r.bytes_per_second));
    let slope = (b.1 - a.1) / (b.0 - a.0);
    let beside = a.1 - a.0 * slope;
    if slope.is_finite() && slope > 0.0 && beside > 0.0 { (1.0 / slope, beside) } else { (last.bytes_per_second, 0.0) }
}

/// Puts what was measured in the place of what was read.
pub(super) fn apply(parts: &mut Parts, calibration: &Calibration) {
    // The first of a kind counts, so it is written last.
    for measured in calibration.measured.iter().rev() {
        for machine in &mut parts.machines {
            if let Some(lane) = place(machine, &measured.lane) {
                replace(lane, measured);
            }
        }
    }
}

fn place<'a>(machine: &'a mut Machine, lane: &str) -> Option<&'a mut Lane> {
    let Machine { nvlink, pcie, host, nics, .. } = machine;
    let host = host.as_mut().map(|(lane, _)| lane);
    match lane {
        "shm" | "cma" | "in-process" => host,
        "device" => nvlink.as_mut().map(|(lane, _)| lane).or(pcie.as_mut()),
        "rdma" | "tcp" => nics.as_mut().map(|n| &mut n.lane).or(host),
        _ => None,
    }
}

fn replace(lane: &mut Lane, measured: &Measured) {
    lane.rate = measured.rate;
    lane.latency = measured.latency;
    lane.per_message = measured.per_message;
    if !measured.small.is_zero() {
        lane.posts = lane.posts.max(1.0 / measured.small.as_secs_f64());
    }
    if lane.flow.is_finite() {
        lane.flow = measured.rate;
    }
}
