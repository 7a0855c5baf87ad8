//! LS cases: leases, their ends, and who may read what is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use kvferry::{Assurance, Closing, FailureCause, LeaseTerms, OwnerEvent, PullError, PullSpec, Ttl};
use kvferry_oracle::Memory;
use kvferry_proto::wire::kind;
use kvferry_tests::between::{Between, Fate};
use kvferry_tests::running::{
    SECOND, TOKENS, World, blocks_of, cause, decode_shape, event, offer, pull, roomy_shape, wanted, wish, wish_into,
};
use kvferry_transport::mem::MemFaults;

/// A fiftieth of a second stands for one of the case's.
const ONE: Duration = Duration::from_millis(20);

fn terms() -> LeaseTerms {
    LeaseTerms { ttl: Some(30 * ONE), extension: 20 * ONE, beat: 5 * ONE, margin: ONE }
}

/// The consumer's beats are lost and so are the producer's notices; its reads begin when the blocks are another request's. It knows
/// from the answer to its bind when the lease ends, and never answers from what is there then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_05_a_read_after_the_end_is_no_answer() {
    let mut world = World::start_as(&decode_shape(), |p| p.lease(terms()), |d| d.lease(terms())).await;
    let mut events = world.p.owner.take_events().unwrap();
    let deaf = Between::start(world.p.address(), |seen| match seen.kind {
        kind::HEARTBEAT | kind::CLOSED => Fate::Lose,
        _ => Fate::Pass,
    })
    .await;
    let late = MemFaults { start_delay: 45 * ONE..46 * ONE, ..MemFaults::default() };
    world.d.set_faults(&world.network, &late);
    let lease = world.p.owner.offer(offer()).await.unwrap();
    let reading = world.d.owner.pull(deaf.by_way(&lease), wish(Assurance::Fenced)).await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: lease.lease(), how: Closing::Expired }));
    // The blocks are another prompt's now, and offered again.
    for regions in &world.p.memory {
        for region in regions {
            region.fill(0, region.len().get(), 0xB7).unwrap();
        }
    }
    let again = world.p.owner.offer(offer()).await.unwrap();
    let Err(PullError::Failed(failed)) = reading.await else { panic!("answered from another prompt's blocks") };
    assert!(matches!(failed.cause, FailureCause::LeaseExpired { .. } | FailureCause::Stale), "{failed}");
    assert!(failed.report.groups.iter().all(|g| g.valid.end().get() <= 5), "only what was cached counts: {failed}");
    // Whoever has the blocks now is not touched by it.
    assert_eq!(world.p.open_leases().await, [again.lease().to_string()]);
    // The read was called off before it began: not a byte of the other prompt has landed.
    assert!(world.d.store() == Memory::background(&world.d.manifest), "{failed}");
    world.stop().await;
}

/// The reads were in time, and the release is not: the producer's word decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_05_a_release_after_the_end_is_stale() {
    let mut world = World::start_as(&decode_shape(), |p| p.lease(terms()), |d| d).await;
    let mut events = world.p.owner.take_events().unwrap();
    let slow = Between::start(world.p.address(), |seen| match seen.kind {
        kind::HEARTBEAT | kind::CLOSED => Fate::Lose,
        kind::RELEASE => Fate::Hold(45 * ONE),
        _ => Fate::Pass,
    })
    .await;
    let lease = world.p.owner.offer(offer()).await.unwrap();
    let reading = world.d.owner.pull(slow.by_way(&lease), wish(Assurance::Fenced)).await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: lease.lease(), how: Closing::Expired }));
    let again = world.p.owner.offer(offer()).await.unwrap();
    let ended = cause(reading.await);
    assert!(matches!(ended, FailureCause::Stale | FailureCause::LeaseExpired { .. }), "{ended}");
    assert_eq!(world.p.open_leases().await, [again.lease().to_string()]);
    world.stop().await;
}

/// The other side of it: beats that arrive keep a lease for as long as it is read, and a lost one is made up for by the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_04_a_lost_beat_is_made_up_for() {
    let terms = LeaseTerms { ttl: Some(SECOND), extension: SECOND, beat: SECOND / 5, margin: SECOND / 20 };
    let world = World::start_as(&decode_shape(), |p| p.lease(terms), |d| d.lease(terms)).await;
    let lossy = Between::start(world.p.address(), |seen| match seen.kind {
        kind::HEARTBEAT if seen.number % 2 == 0 => Fate::Lose,
        _ => Fate::Pass,
    })
    .await;
    world.late_reads(5 * SECOND / 2);
    let lease = world.p.owner.offer(offer()).await.unwrap();
    let delivered = pull(&world.d, &lossy.by_way(&lease), wish(Assurance::Fenced)).await.unwrap();
    assert!(delivered.report().took > 2 * SECOND);
    let beats = lossy.seen().iter().filter(|s| s.kind == kind::HEARTBEAT).count();
    assert!(beats >= 4, "{beats} beats");
    // Nothing is beaten for that is not read.
    tokio::time::sleep(SECOND / 2).await;
    assert!(lossy.seen().iter().filter(|s| s.kind == kind::HEARTBEAT).count() <= beats + 1);
    world.stop().await;
}

/// A request that was given up after its end, or after another one's, frees nothing; one that is given up while it reads frees
/// its lease once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_07_giving_up_what_has_ended_frees_nothing() {
    let mut world = World::roomy(2).await;
    let mut events = world.p.owner.take_events().unwrap();
    let first = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(first.clone(), wish_into(0, Assurance::Fenced)).await.unwrap();
    let id = handle.id();
    handle.await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: first.lease(), how: Closing::Read }));
    let waiting = world.p.owner.offer(offer()).await.unwrap();
    world.d.owner.abort(id).unwrap();
    tokio::time::sleep(SECOND / 10).await;
    assert_eq!(world.p.open_leases().await, [waiting.lease().to_string()], "the other one stays");
    assert!(world.pull(&waiting, wish_into(1, Assurance::Full)).await.is_ok());
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: waiting.lease(), how: Closing::Read }));
    world.stop().await;
}

/// Four samples of one prompt: one is read, three are hits of what it has brought. Each is released by its own name, at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_09_every_sample_is_released_though_one_is_read() {
    let mut world = World::start_as(&roomy_shape(1), |p| p, |d| d).await;
    let mut events = world.p.owner.take_events().unwrap();
    let mut samples = Vec::new();
    for _ in 0..4 {
        samples.push(world.p.owner.offer(offer()).await.unwrap());
    }
    world.pull(&samples[0], wish_into(0, Assurance::Full)).await.unwrap();
    for sample in &samples[1..] {
        let hit = PullSpec { groups: vec![wanted(&blocks_of(0), TOKENS)], ..wish(Assurance::Fenced) };
        assert_eq!(world.pull(sample, hit).await.unwrap().report().bytes().get(), 0);
    }
    for sample in &samples {
        let released = OwnerEvent::Released { lease: sample.lease(), how: Closing::Read };
        assert_eq!(event(&mut events).await, Some(released));
    }
    assert!(world.p.owner.snapshot().await.unwrap().leases.is_empty());
    world.stop().await;
}

/// A request that the consumer will never admit: its producer hears so, in one message each, and nothing is tracked for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_10_what_was_not_admitted_is_declined_at_once() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    let spec = kvferry::OfferSpec { ttl: Ttl::Never, ..offer() };
    let mut rejected = Vec::new();
    for _ in 0..3 {
        let reference = world.p.owner.offer(spec.clone()).await.unwrap();
        world.d.owner.decline(&reference).unwrap();
        rejected.push(reference.lease());
    }
    for lease in rejected {
        assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease, how: Closing::Declined }));
    }
    let d = world.d.owner.snapshot().await.unwrap();
    assert!(d.pulls.is_empty() && d.quarantine.is_empty(), "{d:?}");
    assert!(world.p.owner.snapshot().await.unwrap().leases.is_empty());
    world.stop().await;
}
