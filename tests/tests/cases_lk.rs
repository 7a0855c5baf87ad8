//! LK cases: nothing is left of what has ended. Alone in its process, so that its memory can be looked at.
//!
//! `KVFERRY_LEAK_ROUNDS` sets how many transfers there are (default 100,000); peers and aborts are a hundredth of it each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Instant;

use kvferry::{
    Address, Assurance, ContentKey, Engine, EngineId, OfferSpec, OwnerEvent, OwnerEvents, PullError, PullSpec, Tokens,
};
use kvferry_tests::by_hand::{self, kv};
use kvferry_tests::running::{SECOND, memory_of, offer_of, resident, wanted};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork, MemTransport};
use kvferry_transport::{EndpointId, Transport};

/// How many requests run at a time.
const AT_ONCE: u32 = 32;
/// More memory than at first, at most: two hundredths of it, and what an allocator keeps besides.
const SLACK: i64 = 4 << 20;

/// One rank, blocks of 16.
fn shape() -> by_hand::Engine {
    by_hand::Engine::new(vec![kv("a", 1, 16)], 1).blocks(16, 3 * AT_ONCE)
}

async fn engine(id: &str, at: Option<&Address>, network: &MemNetwork) -> (Engine, EndpointId) {
    let manifest = shape().manifest();
    let (spec, groups) = (manifest.spec().clone(), manifest.groups().to_vec());
    let mut builder = Engine::builder(EngineId::new(id).unwrap(), spec, groups).model_identity("model@1").grace(SECOND);
    if let Some(at) = at {
        builder = builder.listen(at.clone());
    }
    let rank = manifest.ranks()[0].clone();
    let regions = rank.layout.regions.iter().map(memory_of).collect();
    let lane: MemTransport = network.endpoint().unwrap();
    let endpoint = lane.endpoint();
    (builder.rank(rank, regions, Box::new(lane)).start().await.unwrap(), endpoint)
}

/// 37 tokens in three blocks of the `n`-th of those that run at a time.
fn blocks(n: u32) -> [u32; 3] {
    [3 * n, 3 * n + 1, 3 * n + 2]
}

fn wish(n: u32) -> PullSpec {
    let key = kvferry_tests::running::key();
    let spec = PullSpec::new(Tokens::new(37), vec![wanted(&blocks(n), 0)], key);
    PullSpec {
        assurance: Assurance::Fenced,
        deadline: 60 * SECOND,
        policy: kvferry::FailurePolicy { attempts: 1, ..spec.policy.clone() },
        ..spec
    }
}

/// Both engines and what was counted of them.
struct Pair {
    p: Engine,
    d: Engine,
    events: [OwnerEvents; 2],
    network: MemNetwork,
    reader: EndpointId,
    offered: u64,
    released: u64,
    delivered: u64,
    failed: u64,
}

impl Pair {
    /// So many requests, one in ten of which fails: the content is another, or the lane breaks, or it is given up at once.
    async fn transfers(&mut self, count: u32) {
        for first in (0..count).step_by(AT_ONCE as usize) {
            let mut running = Vec::new();
            for slot in 0..AT_ONCE {
                let reference = self.p.offer(offer()).await.unwrap();
                self.offered += 1;
                let mut spec = wish(slot);
                let n = first + slot;
                if n % 20 == 3 {
                    spec.content_key = ContentKey::of(&[n], "", &[]);
                }
                let handle = self.d.pull(reference.clone(), spec).await.unwrap();
                if n % 40 == 17 {
                    handle.cancel().await.unwrap();
                }
                running.push((reference, handle));
            }
            for (reference, handle) in running {
                match handle.await {
                    Ok(_) => self.delivered += 1,
                    Err(PullError::Failed(_)) => {
                        self.failed += 1;
                        // Not bound, it would stay until its end; bound, it is over already.
                        self.p.withdraw(reference.lease()).await.unwrap();
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            self.drain_events().await;
        }
    }

    /// So many engines come, read once, and go.
    async fn peers(&mut self, count: u32) {
        for n in 0..count {
            let (visitor, _) = engine(&format!("visitor-{n}"), None, &self.network).await;
            let reference = self.p.offer(offer()).await.unwrap();
            self.offered += 1;
            visitor.pull(reference, wish(0)).await.unwrap().await.unwrap();
            self.delivered += 1;
            visitor.shutdown().await;
            self.drain_events().await;
        }
    }

    /// So many requests are given up while they read.
    async fn aborts(&mut self, count: u32) {
        let slow = MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() };
        assert!(self.network.set_faults(self.reader, slow));
        for first in (0..count).step_by(AT_ONCE as usize) {
            let mut running = Vec::new();
            for slot in 0..AT_ONCE.min(count - first) {
                let reference = self.p.offer(offer()).await.unwrap();
                self.offered += 1;
                running.push((reference.clone(), self.d.pull(reference, wish(slot)).await.unwrap()));
            }
            // Some are given up before they are bound, some while they are read.
            if first % 2 == 0 {
                tokio::time::sleep(SECOND / 200).await;
            }
            for (reference, handle) in running {
                handle.cancel().await.unwrap();
                assert!(matches!(handle.await, Err(PullError::Failed(_))), "it would take a minute");
                self.failed += 1;
                self.p.withdraw(reference.lease()).await.unwrap();
            }
            self.drain_events().await;
        }
        self.healthy();
    }

    /// One lane operation in forty breaks.
    fn healthy(&self) {
        let fail = (0..400_000).step_by(40).map(|op| (op, Break { at_byte: 100, in_doubt: false })).collect();
        assert!(self.network.set_faults(self.reader, MemFaults { fail, ..MemFaults::default() }));
    }

    async fn drain_events(&mut self) {
        // What it has told by the time that it answers.
        self.p.quarantined().await.unwrap();
        self.d.quarantined().await.unwrap();
        for events in &mut self.events {
            while let Ok(Some(event)) = tokio::time::timeout(std::time::Duration::ZERO, events.next()).await {
                self.released += u64::from(matches!(event, OwnerEvent::Released { .. }));
            }
        }
    }

    /// Nothing is open, lent, linked or waited for but the one link between the two.
    async fn nothing_is_left(&mut self) {
        self.drain_events().await;
        assert_eq!(self.released, self.offered, "each lease is released once");
        let (p, d) = (self.p.snapshot().await.unwrap(), self.d.snapshot().await.unwrap());
        assert!(p.leases.is_empty() && p.pulls.is_empty() && p.quarantine.is_empty(), "{p:?}");
        assert!(d.leases.is_empty() && d.pulls.is_empty() && d.quarantine.is_empty(), "{d:?}");
        assert_eq!((p.links.len(), d.links.len()), (1, 1), "{p:?}");
        assert_eq!((p.links[0].bound, d.links[0].pulls), (0, 0));
    }
}

fn offer() -> OfferSpec {
    offer_of(&[0, 1, 2])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lk_01_nothing_is_left_of_what_has_ended() {
    let rounds: u32 = std::env::var("KVFERRY_LEAK_ROUNDS").map_or(100_000, |n| n.parse().expect("a number"));
    let network = MemNetwork::new(7);
    let at = Address::memory("lk-01").unwrap();
    let (mut p, _) = engine("prefill", Some(&at), &network).await;
    let (mut d, reader) = engine("decode", None, &network).await;
    let events = [p.take_events().unwrap(), d.take_events().unwrap()];
    let mut pair = Pair { p, d, events, network, reader, offered: 0, released: 0, delivered: 0, failed: 0 };
    pair.healthy();
    // Whatever is made once is made by then.
    pair.transfers(rounds / 5).await;
    pair.peers(rounds / 500).await;
    pair.aborts(rounds / 500).await;
    pair.nothing_is_left().await;
    let before = resident();
    let start = Instant::now();
    pair.transfers(rounds).await;
    let (transfers, took) = (resident(), start.elapsed());
    pair.peers(rounds / 100).await;
    let peers = resident();
    pair.aborts(rounds / 100).await;
    let aborts = resident();
    pair.nothing_is_left().await;
    println!(
        "{} delivered, {} failed; {rounds} transfers in {took:?}; resident {before} bytes, then {transfers} after transfers, \
         {peers} after peers, {aborts} after aborts",
        pair.delivered, pair.failed
    );
    assert!(pair.failed * 12 > pair.delivered, "one in ten fails, or so");
    let most = before + before / 50 + SLACK;
    assert!(aborts <= most, "{before} bytes before, {aborts} after {rounds} transfers, more than {most}");
    pair.d.shutdown().await;
    pair.p.shutdown().await;
}
