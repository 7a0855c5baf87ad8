//! The death of a peer in the middle, on the reference backend: what other backends show with processes.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers")]

use std::collections::BTreeSet;
use std::time::Duration;

use kvferry_transport::conformance::bytes::{PEER, fill};
use kvferry_transport::conformance::death::{Aftermath, Death, Victim, dies_in_the_middle};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork, MemTransport};
use kvferry_transport::{LostCause, Region, Transport};

struct Mortal {
    network: MemNetwork,
    endpoint: MemTransport,
}

impl Mortal {
    fn new(network: &MemNetwork, bytes: u64) -> Self {
        let region = Region::zeroed(usize::try_from(bytes).unwrap()).unwrap();
        fill(&region, 0, bytes, PEER).unwrap();
        let mut endpoint = network.endpoint().unwrap();
        endpoint.register(region).unwrap();
        Self { network: network.clone(), endpoint }
    }
}

impl Victim for Mortal {
    fn blob(&self) -> Vec<u8> {
        self.endpoint.blob()
    }

    fn kill(&mut self) -> Result<(), String> {
        self.network.kill(self.endpoint.endpoint()).then_some(()).ok_or_else(|| "it was dead".to_owned())
    }
}

fn dies(faults: MemFaults, death: &Death) -> Result<Aftermath, String> {
    let network = MemNetwork::new(3);
    let mut near = network.endpoint().unwrap();
    network.set_faults(near.endpoint(), faults);
    let ours = Region::zeroed(usize::try_from(death.our_bytes()).unwrap()).unwrap();
    // Twice with one endpoint: the first death leaves it as it was.
    dies_in_the_middle(&mut near, &ours, &mut Mortal::new(&network, death.bytes), death)?;
    dies_in_the_middle(&mut near, &ours, &mut Mortal::new(&network, death.bytes), death)
}

#[test]
fn a_peer_dies_while_it_is_read_and_written() {
    const BYTES: u64 = 16 << 20;
    for death in [Death::reading(BYTES), Death::writing(BYTES, Duration::from_millis(3))] {
        let slow = MemFaults { slice: Some(64 << 10), ..MemFaults::default() };
        let slow = MemFaults { completion_delay: Duration::from_secs(5)..Duration::from_secs(6), ..slow };
        let aftermath = dies(slow, &death).unwrap();
        assert_eq!((aftermath.failed + aftermath.in_doubt, &aftermath.cause), (3, &LostCause::Gone), "{aftermath:?}");
    }
}

/// What the function must notice: an end that is never told, and a death that came too late.
#[test]
fn what_does_not_hold_is_told() {
    let death = Death { within: Duration::from_millis(300), ..Death::writing(1 << 20, Duration::from_millis(20)) };
    let why = dies(MemFaults::default(), &death).unwrap_err();
    assert!(why.contains("all operations were done before the death"), "{why}");
    let broken: BTreeSet<u64> = (0..6).collect();
    let faults = MemFaults {
        fail: broken.iter().map(|k| (*k, Break { at_byte: 100, in_doubt: false })).collect(),
        ..MemFaults::default()
    };
    // Ends that have nothing to do with the death are ends all the same.
    assert_eq!(dies(faults, &death).unwrap().failed, 3);
}
