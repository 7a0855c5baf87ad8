//! Who reads what from whom, where several ranks hold the same bytes: many small decode engines spread over a prefill engine's
//! replicas, and one consumer's bytes over all of them where the map stripes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::View;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::BoundRequest;
use kvferry_geometry::units::RankId;
use kvferry_proto::names::{Attempt, EngineId, LeaseId, pairing_salt};
use kvferry_tests::by_hand::{flat, request};
use kvferry_tests::by_hand_states::{Ask, Shape, delta_net, delta_rule, gqa, indexer, mla, prove};

/// Decode engines of the test.
const ENGINES: u64 = 32;

/// The salt as owners derive it: of the consumer's name and the lease.
fn salt(engine: u64, lease: u64) -> u64 {
    let id = EngineId::new(&format!("decode-{engine}")).expect("an id");
    // Lease ids are random; these are as good as.
    let id_of_lease = u128::from(lease + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    pairing_salt(&id, LeaseId::new(id_of_lease ^ u128::from(engine)), Attempt::FIRST)
}

/// What one request of three blocks reads from every source rank, after the map has been looked at from both sides.
fn read(compatible: &Compatible, options: PeerOptions) -> BTreeMap<u32, u64> {
    let map = PeerMap::with(compatible, options, |_, _| 0).expect("a map");
    // The other owner computes it from the same two manifests.
    let (src, dst) = (Arc::new(compatible.src().clone()), Arc::new(compatible.dst().clone()));
    let theirs = PeerMap::with(&Compatible::new(src, dst).expect("they fit"), options, |_, _| 0).expect("a map");
    assert_eq!(map.digest(), theirs.digest());
    // Consumers are named, and whom they read is the same set seen from the other side.
    let named = |ranks: &Manifest| (0u32..).map(RankId::new).take(ranks.ranks().len()).collect::<Vec<_>>();
    let consumers: BTreeSet<(RankId, RankId)> =
        named(compatible.src()).into_iter().flat_map(|s| map.consumers_of(s).map(move |d| (s, d))).collect();
    let sources: BTreeSet<(RankId, RankId)> =
        named(compatible.dst()).into_iter().flat_map(|d| map.sources_of(d).map(move |s| (s, d))).collect();
    assert_eq!(consumers, sources);

    let bound = BoundRequest::new(compatible, request(48, &[0, 1, 2], &[2, 0, 1])).expect("in order");
    let mut bytes = BTreeMap::new();
    let mut written: Vec<(RankId, u32, u64, u64)> = Vec::new();
    for pair in map.pairs() {
        let plan = PairPlan::new(compatible, &map, pair.src(), pair.dst()).expect("a plan");
        let batch = plan.resolve(&bound).expect("its request");
        assert!(!batch.is_empty(), "who is named is read");
        *bytes.entry(pair.src().get()).or_default() += batch.bytes().get();
        let place = |d: Descriptor| (pair.dst(), d.dst_region.get(), d.dst_offset, d.dst_offset + d.len);
        written.extend(flat(&batch).into_iter().map(place));
    }
    // Every byte is read once: no two moves meet, and together they are as long as the three blocks of all items.
    written.sort_unstable();
    let meet = |w: &[(RankId, u32, u64, u64)]| (w[0].0, w[0].1) == (w[1].0, w[1].1) && w[0].3 > w[1].2;
    assert!(!written.windows(2).any(meet), "a byte is read twice");
    let blocks = |view: &View| 3 * view.stride().get();
    let views = compatible.dst().ranks().iter().flat_map(|r| r.layout.views.iter().flatten());
    assert_eq!(bytes.values().sum::<u64>(), views.map(blocks).sum::<u64>());
    bytes
}

/// Bytes that every source rank gives to all decode engines together, `leases` requests each.
fn load(prefill: &Shape, decode: &Shape, stripe: bool, leases: u64) -> Vec<u64> {
    let compatible = Compatible::new(prefill.manifest(), decode.manifest()).expect("they fit");
    let mut total = vec![0; compatible.src().ranks().len()];
    for engine in 0..ENGINES {
        for lease in 0..leases {
            let options = PeerOptions { salt: salt(engine, lease), stripe };
            let bytes = read(&compatible, options);
            bytes.into_iter().for_each(|(src, n)| total[src as usize] += n);
        }
    }
    total
}

/// How far the busiest and the idlest rank are from the mean, in percent of it.
fn spread(load: &[u64]) -> f64 {
    let mean = load.iter().sum::<u64>() as f64 / load.len() as f64;
    load.iter().map(|&n| (n as f64 - mean).abs() / mean * 100.0).fold(0.0, f64::max)
}

fn deepseek(layers: usize, tp: u32) -> Shape {
    let names: Vec<String> = (0..layers).map(|i| format!("layers.{i}")).collect();
    Shape::new(names.iter().map(|n| mla(n)).collect(), tp)
}

#[test]
fn many_small_engines_read_all_replicas_evenly() {
    // 61 layers as in DeepSeek V3, which 8 ranks do not share evenly: which rank gets fewer must turn, too.
    let striped = load(&deepseek(61, 8), &deepseek(61, 1), true, 1);
    assert!(spread(&striped) <= 5.0, "{:.1} %: {striped:?}", spread(&striped));
    // One lease from each engine. Without stripes each reads one rank, whichever its salt says, so that balance is a matter of
    // chance: 32 engines on 8 ranks. With many leases chance evens out.
    let whole = load(&deepseek(61, 8), &deepseek(61, 1), false, 1);
    assert_eq!(whole.iter().sum::<u64>(), striped.iter().sum::<u64>());
    let read = whole.iter().filter(|n| **n > 0).count();
    println!(
        "32 engines of TP 1, one request each, from 8 replicas: {:.1} % off the mean when striped,",
        spread(&striped)
    );
    println!("{:.1} % without ({read} of 8 ranks are read),", spread(&whole));
    assert!(read > 1, "not all engines read one rank");
    let busy = load(&deepseek(2, 8), &deepseek(2, 1), false, 64);
    println!("{:.1} % without and with 64 requests each", spread(&busy));
    assert!(spread(&busy) < spread(&whole), "{busy:?}");
}

#[test]
fn a_single_consumer_reads_all_replicas_when_striped() {
    for layers in [8, 61, 3] {
        let compatible = Compatible::new(deepseek(layers, 8).manifest(), deepseek(layers, 1).manifest()).unwrap();
        let striped = read(&compatible, PeerOptions { salt: 3, stripe: true });
        assert_eq!(striped.len(), layers.min(8), "{striped:?}");
        let layer = 48 * 1152;
        let (least, most) = (striped.values().min().unwrap(), striped.values().max().unwrap());
        assert!(most - least <= layer, "no rank gives more than a layer more than another: {striped:?}");
        let whole = read(&compatible, PeerOptions { salt: 3, stripe: false });
        assert_eq!(whole.values().collect::<Vec<_>>(), [&(layer * layers as u64)], "one rank gives all");
    }
}

#[test]
fn replicated_heads_are_striped_too() {
    // 4 heads on 16 ranks: each is held by 4.
    let engine = |tp| {
        let names: Vec<String> = (0..8).map(|i| format!("layers.{i}")).collect();
        Shape::new(names.iter().map(|n| gqa(n, 4)).collect(), tp)
    };
    for tp in [1, 2, 4] {
        let striped = load(&engine(16), &engine(tp), true, 1);
        assert!(spread(&striped) <= 5.0, "{:.1} %: {striped:?}", spread(&striped));
        let whole = load(&engine(16), &engine(tp), false, 1);
        assert_eq!(whole.iter().sum::<u64>(), striped.iter().sum::<u64>());
        println!("TP {tp}: {:.1} % off when striped, {:.1} % without", spread(&striped), spread(&whole));
    }
    // Consumers of one engine take turns without stripes as well: 8 ranks with 4 heads, two of each.
    let compatible = Compatible::new(engine(8).manifest(), engine(8).manifest()).unwrap();
    for stripe in [false, true] {
        let bytes = read(&compatible, PeerOptions { salt: 1, stripe });
        assert_eq!(bytes.values().collect::<BTreeSet<_>>().len(), 1, "eight consumers, eight sources: {bytes:?}");
        assert_eq!(bytes.len(), 8);
    }
}

#[test]
fn what_is_held_once_is_not_striped() {
    let engine = |tp| Shape::new(vec![gqa("layers.0", 8), gqa("layers.1", 8)], tp);
    let compatible = Compatible::new(engine(4).manifest(), engine(2).manifest()).unwrap();
    let maps = [false, true].map(|stripe| read(&compatible, PeerOptions { salt: 2, stripe }));
    assert_eq!(maps[0], maps[1]);
    // The option is a part of the map's name: both engines must have it alike.
    let digests = [false, true]
        .map(|stripe| PeerMap::with(&compatible, PeerOptions { salt: 2, stripe }, |_, _| 0).unwrap().digest());
    assert_ne!(digests[0], digests[1]);
}

#[test]
fn striped_bytes_are_right() {
    // Layers, indexers and heads of one model, states and dealt-out tokens: whoever is read, the bytes are the same.
    let mixed = |tp| {
        let items = vec![mla("layers.0"), indexer("layers.0.indexer"), mla("layers.1"), gqa("draft.0", 2)];
        Shape::new(items, tp)
    };
    let hybrid = |tp| Shape::new(vec![gqa("layers.0", 2), delta_net("layers.1", 2, 4)], tp).rule(delta_rule);
    let shapes = [
        (mixed(8), mixed(1)),
        (mixed(8), mixed(3)),
        (mixed(4).dcp(2, 16), mixed(1)),
        (hybrid(8), hybrid(1)),
        (hybrid(8), hybrid(3)),
    ];
    for (src, dst) in shapes {
        let (src, dst) = (src.manifest(), dst.manifest());
        for salt in [0, 5] {
            let whole = prove(&src, &dst, Ask { peers: PeerOptions { salt, stripe: false }, ..Ask::of(55) });
            let striped = prove(&src, &dst, Ask { peers: PeerOptions { salt, stripe: true }, ..Ask::of(55) });
            assert_eq!(striped.moved, whole.moved);
            assert!(striped.pairs.len() >= whole.pairs.len());
        }
    }
}

#[test]
fn the_nearest_replica_is_read_first() {
    let compatible = Compatible::new(deepseek(4, 8).manifest(), deepseek(4, 2).manifest()).unwrap();
    // Ranks of one host are near: 0 to 3 and consumer 0, 4 to 7 and consumer 1.
    let far = |src: RankId, dst: RankId| u32::from(src.get() / 4 != dst.get());
    for salt in 0..8 {
        let near = PeerMap::with(&compatible, PeerOptions { salt, stripe: true }, far).unwrap();
        for dst in [0, 1] {
            let sources: Vec<u32> = near.sources_of(RankId::new(dst)).map(RankId::get).collect();
            assert!(sources.iter().all(|s| s / 4 == dst), "rank {dst} reads {sources:?}");
            assert_eq!(sources.len(), 4, "and all that are as near");
        }
    }
}
