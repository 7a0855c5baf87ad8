//! MLA cases: items that every rank holds whole, alone and beside items that are split.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;

use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Closing;
use kvferry_proto::peer::ReadsEnd;
use kvferry_proto::request::Step;
use kvferry_tests::by_hand::{Engine, Pair, kv, latent, request};
use kvferry_tests::by_hand_states::{Leased, has_read, leased};
use kvferry_tests::over_mem::World;

const BLOCK: u64 = 16 * 1152;

fn mla(tp: u32) -> Engine {
    Engine::new(vec![latent("mla", 1152)], tp)
}

#[test]
fn mla_01_one_replica_is_read_whole() {
    let pair = Pair::new(&mla(8), &mla(2));
    let bound = pair.bind(request(16, &[3], &[5]));
    let mut read = BTreeSet::new();
    for dst in 0..2 {
        let sources = pair.sources(dst);
        let [src] = sources.as_slice() else { panic!("rank {dst} reads {sources:?}") };
        assert_eq!(pair.runs(*src, dst, &bound), [(3 * BLOCK, 5 * BLOCK, BLOCK)]);
        assert_eq!(pair.consumers(*src), [dst]);
        read.insert(*src);
    }
    assert_eq!(read.len(), 2, "two consumers of eight replicas read two of them");
    // Ranks that nobody reads are named in no consumer's set: no release is due from them.
    assert_eq!(pair.consumer_counts().iter().sum::<usize>(), 2);
}

#[test]
fn mla_01_sixteen_replicas_and_one_consumer() {
    let pair = Pair::new(&mla(16), &mla(1));
    assert_eq!(pair.peers.pairs().len(), 1);
    assert_eq!(pair.sources(0).len(), 1);
}

#[test]
fn mla_01_more_consumers_than_replicas_share_evenly() {
    let pair = Pair::new(&mla(2), &mla(8));
    assert!((0..8).all(|dst| pair.sources(dst).len() == 1));
    assert_eq!(pair.consumer_counts(), [4, 4]);
}

#[test]
fn mla_03_replicated_and_split_items_of_one_model() {
    let engine = |tp| Engine::new(vec![latent("mla", 1152), kv("draft", 8, 128)], tp);
    let pair = Pair::new(&engine(1), &engine(4));
    let bound = pair.bind(request(16, &[0], &[0]));
    let all = pair.descriptors(0, 3, &bound);
    let read: Vec<_> = all.iter().map(|d| (d.src_region.get(), d.src_offset, d.dst_offset, d.len)).collect();
    assert_eq!(read, [(0, 0, 0, 18432), (1, 3 * 8192, 0, 8192)]);
}

#[test]
fn mla_01_only_ranks_that_are_read_hear_a_notice() {
    let pair = Pair::new(&mla(8), &mla(2));
    let bound = pair.bind(request(16, &[3], &[5]));
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    for src in 0..8 {
        assert_eq!(world.notices(src), pair.consumers(src), "source rank {src}");
    }
    assert_eq!(world.dst_memory(), pair.deliver(&bound, 0xEE));
}

#[test]
fn mla_01_the_release_names_the_producers_lease() {
    // The owners' machines. Whatever the consumer calls the request, every message names it as the producer offered it, and one
    // release ends it, from however many ranks was read.
    let pair = Pair::new(&mla(8), &mla(2));
    let Leased { consumer, bound, granted } = leased(&pair, 0x92d6_8142, request(16, &[3], &[5]).src);
    let offered = bound.fence().clone();
    assert_eq!((offered.engine.as_str(), offered.lease.get()), ("prefill", 0x92d6_8142));
    let reading = granted.read(&pair.peers);
    let (first, second) = (RankId::new(0), RankId::new(1));
    let Step::Waiting(reading) = reading.on_rank(first, Ok(has_read(&pair, 0))) else { panic!("rank 1 still reads") };
    let Step::Next(ended) = reading.on_rank(second, Ok(has_read(&pair, 1))) else { panic!("both have read") };
    let (releasing, release) = ended.release().expect("all named sources were read");
    assert_eq!((&release.fence, release.reads), (&offered, ReadsEnd::Complete));
    let (closed, answer) = bound.release(&release, &consumer, Duration::ZERO).expect("its consumer");
    assert_eq!((closed.fence(), closed.how()), (&offered, Closing::Read));
    assert!(matches!(releasing.on_answer(&answer), Step::Next(Ok(_))), "held");
}

#[test]
fn mla_03_fewer_decode_ranks_read_the_latent_once_and_the_draft_from_all() {
    let engine = |tp| Engine::new(vec![latent("mla", 1152), kv("draft", 8, 128)], tp);
    let pair = Pair::new(&engine(4), &engine(1));
    let bound = pair.bind(request(16, &[0], &[0]));
    let mut latents = Vec::new();
    for src in pair.sources(0) {
        for d in pair.descriptors(src, 0, &bound) {
            match d.dst_region.get() {
                0 => latents.push((d.src_offset, d.dst_offset, d.len)),
                // Two heads of 4096 B from each rank.
                _ => assert_eq!((d.src_offset, d.dst_offset, d.len), (0, u64::from(src) * 8192, 8192)),
            }
        }
    }
    assert_eq!(latents, [(0, 0, 18432)]);
    assert_eq!(pair.sources(0), [0, 1, 2, 3]);
    // Sizes that don't divide each other.
    let pair = Pair::new(&engine(4), &engine(3));
    let bound = pair.bind(request(16, &[0], &[0]));
    for dst in 0..3 {
        let all: Vec<_> = pair.sources(dst).into_iter().flat_map(|src| pair.descriptors(src, dst, &bound)).collect();
        let bytes = |region| all.iter().filter(|d| d.dst_region.get() == region).map(|d| d.len).sum::<u64>();
        let heads = [2, 3, 3][dst as usize];
        assert_eq!((bytes(0), bytes(1)), (18432, heads * 4096), "rank {dst}");
    }
}
