//! One message of a request is lost, or its link ends there, whichever message it is: the request ends once, by itself, and leaves nothing
//! behind.

use kvferry::{Assurance, LeaseTerms, Mode, OwnerBuilder, PullSpec};

use crate::between::{Between, Fate, Way};
use crate::running::{SECOND, World, blocks_of, expected_in, offer, pull, roomy_shape, wish_into};

/// One loss of one message, whichever it is: every request ends once, what is delivered is right, both sides' tables are empty
/// afterwards, and the next request by the same way is served.
///
/// # Panics
/// Where that is not so.
pub async fn one_loss(fate: Fate, mode: Mode, cases: &[(Way, usize)]) {
    let terms = LeaseTerms { ttl: Some(2 * SECOND), extension: 2 * SECOND, beat: SECOND / 2, margin: SECOND / 20 };
    let pulls = u32::try_from(2 * cases.len()).expect("few");
    let told = |o: OwnerBuilder| o.lease(terms).handshake_timeout(SECOND / 2);
    let engines = World::start_as(&roomy_shape(pulls), told, told).await;
    let mut delivered = Vec::new();
    for (n, &(way, number)) in (0u32..).zip(cases) {
        let between = Between::start(engines.p.address(), move |seen| {
            let it = seen.connection == 0 && (seen.way, seen.number) == (way, number);
            if it { fate } else { Fate::Pass }
        })
        .await;
        for blocks in [2 * n, 2 * n + 1] {
            let reference = between.by_way(&engines.p.owner.offer(offer()).await.expect("an offer"));
            let spec = PullSpec { deadline: 2 * SECOND, mode: Some(mode), ..wish_into(blocks, Assurance::Fenced) };
            let ended = pull(&engines.d, &reference, spec).await;
            match &ended {
                Ok(_) => delivered.push(blocks_of(blocks)),
                Err(error) => assert!(blocks % 2 == 0, "{way:?} {number}: the next request fails: {error}"),
            }
        }
        let struck = between.seen().iter().any(|s| s.connection == 0 && (s.way, s.number) == (way, number));
        assert!(struck, "{mode:?}: there is no message {number} {way:?}");
    }
    let empty = async {
        loop {
            let (p, d) = (
                engines.p.owner.snapshot().await.expect("it runs"),
                engines.d.owner.snapshot().await.expect("it runs"),
            );
            assert!(d.pulls.is_empty(), "every request has ended: {:?}", d.pulls);
            // The producer has its blocks again, and nobody writes the consumer's.
            if p.leases.is_empty() && d.quarantine.is_empty() {
                break;
            }
            tokio::time::sleep(SECOND / 20).await;
        }
    };
    tokio::time::timeout(10 * SECOND, empty).await.expect("both have all their blocks again");
    assert_eq!(engines.d.owner.quarantined().await.expect("it runs"), 0);
    // Blocks of requests that failed hold what was read, or not; those that were delivered are right to the last byte.
    let (have, want) = (engines.d.store(), expected_in(&engines.p.manifest, &engines.d.manifest, &delivered));
    let layouts = engines.d.manifest.ranks();
    for (rank, described) in layouts.iter().enumerate() {
        for view in described.layout.views.iter().flatten() {
            let region = view.region().index();
            for block in delivered.iter().flatten() {
                let start =
                    usize::try_from(view.offset().get() + u64::from(*block) * view.stride().get()).expect("small");
                let range = start..start + usize::try_from(view.stride().get()).expect("small");
                let same = have.ranks[rank][region][range.clone()] == want.ranks[rank][region][range];
                assert!(same, "rank {rank}, block {block}");
            }
        }
    }
    engines.stop().await;
}
