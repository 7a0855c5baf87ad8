//! The engines of [`by_hand`](crate::by_hand) on the in-memory transport: real regions, real operations, faults on
//! demand. What a rank does by itself (submit, wait for every end, zero the rest) is done here in plain sight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::request::BoundRequest;
use kvferry_geometry::units::RankId;
use kvferry_geometry::zero::ZeroPlan;
use kvferry_transport::mem::{MemFaults, MemNetwork, MemTransport};
use kvferry_transport::{Event, OpId, OpKind, Outcome, Region, Submission, Transport};

use crate::by_hand::{Pair, source_byte};

/// One rank: its endpoint and its memory by region id.
#[derive(Debug)]
struct Rank {
    transport: MemTransport,
    regions: Vec<Region>,
}

/// All ranks of two engines, registered.
#[derive(Debug)]
pub struct World {
    network: MemNetwork,
    src: Vec<Rank>,
    dst: Vec<Rank>,
    now: Duration,
}

/// The operations of one request by (source, destination) rank, and how those that have ended did.
#[derive(Debug, Default)]
pub struct Pull {
    ops: BTreeMap<(u32, u32), OpId>,
    ends: BTreeMap<(u32, u32), Vec<Outcome>>,
}

impl Pull {
    /// How one pair's operation ended, if it has.
    ///
    /// # Panics
    /// Where it ended twice.
    #[must_use]
    pub fn end(&self, src: u32, dst: u32) -> Option<&Outcome> {
        let ends = self.ends.get(&(src, dst)).map_or(&[][..], Vec::as_slice);
        assert!(ends.len() <= 1, "the operation from {src} to {dst} ended twice: {ends:?}");
        ends.first()
    }

    /// Whether every operation has ended well.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ops.keys().all(|&(src, dst)| matches!(self.end(src, dst), Some(Outcome::Done(_))))
    }
}

impl World {
    /// Source memory is [`source_byte`], every destination byte is `before`.
    ///
    /// # Panics
    /// Where memory or descriptors run out.
    #[must_use]
    pub fn new(pair: &Pair, before: u8) -> Self {
        let network = MemNetwork::new(1);
        let ranks = |manifest: &kvferry_geometry::manifest::Manifest, is_src: bool| {
            let rank = |number: u32| {
                let mut transport = network.endpoint().expect("an endpoint");
                let lens = manifest.region_lens(RankId::new(number));
                let region = |(index, len): (u32, &kvferry_geometry::units::Bytes)| {
                    let region = Region::zeroed(usize::try_from(len.get()).expect("small")).expect("memory");
                    let byte = |at| if is_src { source_byte(number, index, at) } else { before };
                    region.write(0, &(0..len.get()).map(byte).collect::<Vec<_>>()).expect("inside");
                    transport.register(region.clone()).expect("registered");
                    region
                };
                let regions = (0u32..).zip(&lens).map(region).collect();
                Rank { transport, regions }
            };
            (0u32..).take(manifest.ranks().len()).map(rank).collect::<Vec<_>>()
        };
        let (src, dst) = (ranks(pair.compatible.src(), true), ranks(pair.compatible.dst(), false));
        Self { network, src, dst, now: Duration::ZERO }
    }

    /// Sets the faults of a destination rank's endpoint. Its operations are counted from 0 in the order of source ranks.
    ///
    /// # Panics
    /// Where there is no such rank.
    pub fn set_faults(&self, dst: u32, faults: MemFaults) {
        assert!(self.network.set_faults(self.dst[dst as usize].transport.endpoint(), faults));
    }

    /// Connects every destination rank to its sources, submits its reads, and steps until nothing more happens.
    ///
    /// # Panics
    /// Where the transport refuses.
    #[must_use]
    pub fn pull(&mut self, pair: &Pair, request: &BoundRequest) -> Pull {
        let mut pull = Pull::default();
        for (number, dst) in (0u32..).zip(&mut self.dst) {
            let ours = pair.compatible.dst().region_lens(RankId::new(number));
            for src in pair.sources(number) {
                let peer = dst.transport.connect(&self.src[src as usize].transport.blob()).expect("connected");
                let theirs = dst.transport.peer(peer).expect("known").lens();
                let batch = pair.batch(src, number, request).check(&theirs, &ours).expect("inside both sides");
                let notify = Some(number.to_le_bytes().to_vec());
                let submission = Submission { peer, kind: OpKind::Read, batch: Arc::new(batch), notify };
                pull.ops.insert((src, number), dst.transport.submit(submission).expect("accepted"));
            }
        }
        self.run(&mut pull);
        pull
    }

    /// Steps all ranks until nothing more happens.
    pub fn run(&mut self, pull: &mut Pull) {
        for _ in 0..100 {
            self.now += Duration::from_millis(10);
            for rank in self.src.iter_mut().chain(&mut self.dst) {
                rank.transport.step(self.now);
            }
            for (number, dst) in (0u32..).zip(&mut self.dst) {
                while let Some(event) = dst.transport.next_event() {
                    let Event::Completed { op, outcome, .. } = event else { continue };
                    let pair = pull.ops.iter().find(|(pair, o)| pair.1 == number && **o == op).map(|(pair, _)| *pair);
                    pull.ends.entry(pair.expect("an operation of this pull")).or_default().push(outcome);
                }
            }
        }
    }

    /// Who told source rank `src` that it has read: destination ranks in the order heard.
    pub fn notices(&mut self, src: u32) -> Vec<u32> {
        let transport = &mut self.src[src as usize].transport;
        let mut heard = Vec::new();
        while let Some(event) = transport.next_event() {
            if let Event::Notification { payload, .. } = event {
                heard.push(u32::from_le_bytes(payload.try_into().expect("four bytes")));
            }
        }
        heard
    }

    /// Zeroes what a request leaves unfilled at every destination rank, as delivery does.
    ///
    /// # Panics
    /// Where a range leaves its region.
    pub fn zero(&self, pair: &Pair, request: &BoundRequest) {
        for (number, dst) in (0u32..).zip(&self.dst) {
            let plan = ZeroPlan::new(pair.compatible.dst(), RankId::new(number)).expect("a rank of it");
            for range in plan.resolve(request).expect("its request").ranges() {
                dst.regions[range.region.index()].fill(range.offset, range.len, 0).expect("inside");
            }
        }
    }

    /// All bytes of the destination, by rank and region.
    ///
    /// # Panics
    /// Never: it is host memory.
    #[must_use]
    pub fn dst_memory(&self) -> Vec<Vec<Vec<u8>>> {
        let rank = |r: &Rank| r.regions.iter().map(|r| r.to_vec().expect("host memory")).collect();
        self.dst.iter().map(rank).collect()
    }
}
