//! Values that can't be together.

use std::time::Duration;

use kvferry_geometry::units::Bytes;

use super::{ConfigFault, EngineConfig, SecurityMode};

/// The least that sockets need, in bytes: less than the description of a small engine.
const SMALLEST: usize = 4096;

/// Each with the key that is to be changed.
pub(super) fn contradictions(c: &EngineConfig) -> Vec<(&'static str, ConfigFault)> {
    let mut faults = Vec::new();
    let mut contradiction = |key, text: String| faults.push((key, ConfigFault::Contradiction(text)));
    let nonzero = [
        ("control.handshake_timeout", c.control.handshake_timeout),
        ("control.idle", c.control.idle.unwrap_or(Duration::MAX)),
        ("control.reclaim_after", c.control.reclaim_after.unwrap_or(Duration::MAX)),
        ("lease.ttl", c.lease.ttl.unwrap_or(Duration::MAX)),
        ("lease.beat", c.lease.beat),
        ("lease.extension", c.lease.extension),
        ("retry.first", c.retry.first),
        ("worker.connect_timeout", c.worker.connect_timeout),
    ];
    for (key, duration) in nonzero {
        if duration.is_zero() {
            contradiction(key, "is no time at all".into());
        }
    }
    let sizes = [
        ("worker.admission.slice", c.worker.admission.slice),
        ("worker.admission.peer_bytes", c.worker.admission.peer_bytes),
        ("worker.admission.bytes", c.worker.admission.bytes),
    ];
    for (key, size) in sizes {
        if size == Bytes::ZERO {
            contradiction(key, "is 0, so nothing could ever be read".into());
        }
    }
    let sockets = &c.connections;
    for (key, size) in [
        ("connections.stranger_message", sockets.stranger_message),
        ("connections.stranger_bytes", sockets.stranger_bytes),
        ("connections.waiting", sockets.waiting),
    ] {
        if size < SMALLEST {
            contradiction(
                key,
                format!("is {size} bytes, too little for any engine's description: give {SMALLEST} at least"),
            );
        }
    }
    if sockets.stranger_bytes < sockets.stranger_message {
        contradiction(
            "connections.stranger_bytes",
            "is less than connections.stranger_message: a message of that length could never be read".into(),
        );
    }
    if let Some(listen) = &c.control.listen {
        // Whether other hosts may reach it is judged at the start: how links are protected may be said in code.
        if c.control.advertise.is_none() && !listen.is_local() && !listen.is_definite() {
            contradiction(
                "control.listen",
                format!("is {listen}, which peers can't connect to: say with control.advertise where they shall"),
            );
        }
    }
    if let Some(advertise) = &c.control.advertise {
        if !advertise.is_definite() {
            contradiction("control.advertise", format!("is {advertise}, which peers can't connect to"));
        }
        if c.control.listen.is_none() {
            contradiction("control.advertise", "is set, but control.listen isn't: nobody would answer there".into());
        }
    }
    if c.security.mode == SecurityMode::Plaintext {
        if !c.security.allow.is_empty() {
            let text = "is there, but with security.mode = \"plaintext\" nobody proves a name, so everybody would be let in: \
                        set security.mode to \"tls\" or \"shared_key\", or take it out (what security in code allows is said there)";
            contradiction("security.allow", text.into());
        }
        if c.security.readable_by_others {
            let text = "is set, but with security.mode = \"plaintext\" no file with secrets is read: take it out";
            contradiction("security.readable_by_others", text.into());
        }
    }
    let lease = &c.lease;
    if lease.extension <= lease.beat {
        let (extension, beat) = (lease.extension, lease.beat);
        contradiction(
            "lease.extension",
            format!("is {extension:?}, no more than the {beat:?} between two heartbeats: every lease would expire"),
        );
    }
    if let Some(ttl) = lease.ttl
        && ttl <= lease.margin
    {
        let margin = lease.margin;
        contradiction("lease.margin", format!("is {margin:?}, but a lease lasts {ttl:?}: no read would ever start"));
    }
    if c.retry.most < c.retry.first {
        let (first, most) = (c.retry.first, c.retry.most);
        contradiction("retry.most", format!("is {most:?}, less than the {first:?} after which it is tried first"));
    }
    faults
}
