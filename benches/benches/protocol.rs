//! What the protocol costs without sockets and threads: first contact of two large engines, and small requests through two
//! whole sessions on the in-memory transport. The bytes that move are few on purpose.
//!
//! `KVFERRY_BENCH_ROUNDS` sets the rounds (default 9), `KVFERRY_BENCH_REQUESTS` the requests of one (default 20,000).
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::sync::Arc;
use std::time::Duration;

use kvferry_benches::engines::{Pair, listed, shape, wanted};
use kvferry_benches::measure::{median, number, thread_cpu};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;
use kvferry_proto::handshake::{Expected, Greeting, IdentityCheck, LocalSide};
use kvferry_proto::manifest::{EngineManifest, RankContact};
use kvferry_proto::names::{EngineId, Epoch, ModelIdentity};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::wire::{FrameReader, decode_peer, encode_peer};
use kvferry_session::owner::Mode;

fn main() {
    let rounds = number("KVFERRY_BENCH_ROUNDS", 9);
    first_contact(rounds);
    requests(rounds, number("KVFERRY_BENCH_REQUESTS", 20_000));
}

/// 8 ranks of 100 regions of 100,000 blocks each, on both sides.
fn side(id: &str) -> Arc<LocalSide> {
    let (spec, groups, ranks) = shape(100, 256, 8, 100_000);
    let contacts = ranks.iter().map(|_| RankContact { epoch: Epoch::new(3), blob: vec![5; 120].into() }).collect();
    let cache = Manifest::new(spec, groups, ranks).unwrap();
    let manifest = Arc::new(EngineManifest::new(EngineId::new(id).unwrap(), Epoch::new(1), cache, contacts).unwrap());
    let (identity, check) = (ModelIdentity::unspecified(), IdentityCheck::Required);
    Arc::new(LocalSide { identity, check, stripe: false, allowed: None, manifest })
}

fn first_contact(rounds: usize) {
    println!(
        "first contact: 100,000 blocks x 100 regions x 8 ranks on both sides; CPU of one side, median of {rounds}\n"
    );
    let (ours, theirs) = (side("p"), side("d"));
    let mut times: [Vec<Duration>; 4] = Default::default();
    let mut bytes = 0;
    for _ in 0..rounds {
        let mut lap = Lap::start();
        let (greeting, hello) = Greeting::start(ours.clone(), Expected::default());
        let sent = encode_peer(&PeerMessage::Hello(hello)).unwrap();
        times[0].push(lap.lap());
        let came = encode_peer(&PeerMessage::Hello(Greeting::start(theirs.clone(), Expected::default()).1)).unwrap();
        bytes = came.len();
        lap.lap();
        let mut frames = FrameReader::default();
        frames.extend(&came);
        let Ok(PeerMessage::Hello(hello)) = decode_peer(&frames.next_frame().unwrap().unwrap()) else { return };
        times[1].push(lap.lap());
        let met = greeting.on_hello(&hello).unwrap();
        let matched = Compatible::new(ours.manifest.cache().clone(), met.peer.cache().clone()).unwrap();
        times[2].push(lap.lap());
        let map = PeerMap::new(&matched, 1).unwrap();
        times[3].push(lap.lap());
        assert!(sent.len() > 1000 && map.pairs().len() == 8);
    }
    let [encode, decode, judge, map] = times.map(|t| median(t) * 1e6);
    println!("| hello | encode | decode and check | compare | map of peers | all |\n|---|---|---|---|---|---|");
    let all = encode + decode + judge + map;
    println!("| {bytes} B | {encode:.0} us | {decode:.0} us | {judge:.0} us | {map:.0} us | {all:.0} us |\n");
}

/// CPU time of this thread, so that what else runs on the machine doesn't count.
struct Lap(Duration);

impl Lap {
    fn start() -> Self {
        Self(thread_cpu())
    }

    fn lap(&mut self) -> Duration {
        let before = std::mem::replace(&mut self.0, thread_cpu());
        self.0.saturating_sub(before)
    }
}

fn requests(rounds: usize, count: usize) {
    println!(
        "requests of 3 blocks, 2 layers, pulled and pushed through two sessions in one thread, 64 at a time; median of {rounds}\n"
    );
    println!("| ranks | | us a request | owner P | owner D | ranks P | ranks D | frames | requests/s of one core |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let modes = [("pull", Mode::Pull), ("push", Mode::Push { progress: false })];
    for ((p, d), (what, mode)) in
        [(1, 1), (2, 2), (2, 1), (4, 8)].into_iter().flat_map(|ranks| modes.map(|mode| (ranks, mode)))
    {
        let blocks = 3 * 64;
        let mut pair = Pair::new(shape(2, 32, p, blocks), shape(2, 32, d, blocks));
        // The first one makes the link.
        let fence = pair.p.offer(u128::MAX, listed(&[0]), Duration::ZERO);
        pair.d.pull(mode, fence, 16, wanted(&[0]), Duration::ZERO);
        pair.settle(Duration::ZERO);
        (pair.frames, pair.d.ended) = Default::default();
        let (mut walls, mut parts) = (Vec::new(), Vec::new());
        let (mut lease, mut clock) = (0u128, 0);
        for _ in 0..rounds {
            (pair.p.spent, pair.d.spent) = Default::default();
            let began = thread_cpu();
            for _ in 0..count / 64 {
                clock += 1;
                let now = Duration::from_micros(clock);
                for n in 0..64u32 {
                    lease += 1;
                    let ids = [3 * n, 3 * n + 2, 3 * n + 1];
                    let fence = pair.p.offer(lease, listed(&ids), now);
                    pair.d.pull(mode, fence, 48, wanted(&ids), now);
                }
                pair.settle(now);
            }
            walls.push(thread_cpu().saturating_sub(began));
            parts.push([pair.p.spent.0, pair.d.spent.0, pair.p.spent.1, pair.d.spent.1]);
        }
        assert_eq!(pair.d.ended, (rounds * (count / 64) * 64, 0), "{:?}", pair.d.failure);
        let each = (count / 64 * 64) as f64;
        let of = |i: usize| median(parts.iter().map(|p: &[Duration; 4]| p[i]).collect()) * 1e6 / each;
        let wall = median(walls) * 1e6 / each;
        let row: Vec<String> = (0..4).map(|i| format!("{:.2}", of(i))).collect();
        let frames = pair.frames as f64 / (each * rounds as f64);
        println!("| {p} to {d} | {what} | {wall:.2} | {} | {frames:.2} | {:.0} |", row.join(" | "), 1e6 / wall);
    }
    println!();
}
