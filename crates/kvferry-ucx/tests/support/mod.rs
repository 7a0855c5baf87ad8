//! What the tests share: endpoints driven to an event, and batches of scattered blocks.
#![allow(dead_code, unused_imports, clippy::unwrap_used, clippy::panic, reason = "tests; each binary uses its part")]

pub(crate) use kvferry_transport::conformance::drive::{connected, drive, end_of};
use kvferry_transport::{LaneKind, Transport};
use kvferry_ucx::{Rail, UcxConfig, UcxTransport};

/// `rails` rails over these transports.
pub(crate) fn over(transports: &[&str], rails: usize) -> UcxConfig {
    let mut config = UcxConfig::with_rails(rails);
    config.rails.fill(Rail::default().with_transports(transports.iter().copied()));
    config
}

pub(crate) fn endpoint(rails: usize) -> UcxTransport {
    UcxTransport::new(UcxConfig::with_rails(rails)).unwrap()
}

/// The lane between two endpoints of this process.
pub(crate) fn lane_of(config: &UcxConfig) -> LaneKind {
    let mut near = UcxTransport::new(config.clone()).unwrap();
    let mut far = UcxTransport::new(config.clone()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    connected(&mut [&mut near, &mut far], peer);
    near.peer(peer).unwrap().lane.kind
}
