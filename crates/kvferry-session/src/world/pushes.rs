//! Push between whole engines, with real ranks and bytes.

use kvferry_geometry::request::{BlockTable, SrcPaged, SrcState, Tail};
use kvferry_geometry::units::TokenRange;
use kvferry_proto::names::Attempt;

use super::tests::{N, decode, held, listed, prefill, room, slot, states};
use super::*;
use crate::owner::Mode;
use crate::{FailureCause, FailurePolicy};

const SRC: [u32; 3] = [3, 0, 6];
const DST: [u32; 3] = [9, 4, 2];

pub(super) fn source() -> Vec<SrcGroup> {
    vec![held(&SRC), states(&[(N, 5)])]
}

pub(super) fn push(w: &World, fence: &Fence, assurance: Assurance) -> PullWish {
    let wish = w.wish(fence, N, vec![room(&DST, 0), slot(Some(11), &[])]);
    PullWish { mode: Mode::Push { progress: true }, assurance, ..wish }
}

/// Whether all of what a salt stands for is at the consumer, and nothing of it is missing.
pub(super) fn arrived(w: &World, salt: u64) -> bool {
    let (paged, missing) = w.d.found(salt, 0, &listed(&DST), (0, N));
    let (state, lacking) = w.d.found(salt, 1, &[(BlockId::new(11), N)], (0, 0));
    paged > 0 && state > 0 && (missing, lacking) == (0, 0)
}

fn announce(w: &mut World, groups: Vec<SrcGroup>) -> Fence {
    let offer = Offer { groups, content_key: KEY };
    w.leases += 1;
    w.p.owner.announce(LeaseId::new(w.leases), offer, Ttl::Usual, w.now).unwrap()
}

/// The first blocks of the table, and no state.
fn first(blocks: usize) -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(N));
    let table = BlockTable::new(0, &SRC[..blocks].iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>());
    vec![SrcPaged { table, held, tail: Tail::Exact }.into(), SrcState::default().into()]
}

/// TP 4, PP 2 to TP 2 with groups that share memory: pushed, each byte is where a pull would have put it.
#[test]
fn a_push_delivers_what_a_pull_delivers() {
    for assurance in [Assurance::Fenced, Assurance::Full] {
        let mut w = World::new(prefill(), decode());
        w.p.fill(1, &source());
        let fence = w.offer(source());
        let pull = w.d.owner.pull(push(&w, &fence, assurance), w.now);
        w.run(60);
        let delivered = w.end_of(pull).unwrap().unwrap();
        assert!(arrived(&w, 1), "{assurance}");
        let report = delivered.report();
        assert!(report.pairs.iter().all(|p| p.bytes.get() == 0 || !p.lane.is_empty()));
        assert_eq!(report.compared.get() > 0, assurance == Assurance::Full);
        assert_eq!(w.p.closed, [(fence, Closing::Read)]);

        let mut other = World::new(prefill(), decode());
        other.p.fill(1, &source());
        let pulled = other.pull(N, source(), vec![room(&DST, 0), slot(Some(11), &[])]).unwrap();
        let pairs = |d: &Delivered| d.report().pairs.iter().map(|p| (p.src, p.dst, p.bytes)).collect::<Vec<_>>();
        assert_eq!(pairs(&pulled), pairs(&delivered));
    }
}

/// Layer by layer and block by block, in an order of its own, with blocks listed as they come: nothing arrives before it was said to
/// be final, all of it in the end. What was not final yet is computed over and over meanwhile.
#[test]
fn a_streamed_push_moves_only_what_is_final() {
    let mut w = World::new(prefill(), decode());
    let fence = announce(&mut w, first(1));
    let (lease, attempt) = (fence.lease, Attempt::FIRST);
    let pull = w.d.owner.pull(push(&w, &fence, Assurance::Full), w.now);
    let items = [0u32, 2, 4, 6].map(ItemId::new);
    w.run(20);
    for chunk in 0..3u64 {
        let (from, to) = (chunk * 16, N.min((chunk + 1) * 16));
        w.p.owner.extend(lease, attempt, first(usize::try_from(chunk).unwrap() + 1), w.now).unwrap();
        // Garbage where it is still being computed.
        w.p.fill(1000 + chunk, &source());
        w.run(5);
        assert_eq!(w.d.found(1000 + chunk, 0, &listed(&DST), (from, N)).0 / 64, 0, "by chance a few bytes are alike");
        w.p.fill(1, &source());
        for item in if chunk % 2 == 0 { items } else { [items[3], items[1], items[2], items[0]] } {
            let tokens = TokenRange::new(Tokens::new(from), Tokens::new(to));
            w.p.owner.region_ready(lease, attempt, &[item], tokens, w.now).unwrap();
            w.run(4);
        }
        let (_, missing) = w.d.found(1, 0, &listed(&DST), (0, to));
        assert_eq!(missing, 0, "what is final is there before the seal");
    }
    assert!(w.end_of(pull).is_none());
    w.p.owner.seal(lease, attempt, source(), w.now).unwrap();
    w.run(40);
    w.end_of(pull).unwrap().unwrap();
    assert!(arrived(&w, 1));
    assert!(w.p.owner.snapshot(w.now).leases.is_empty() && w.d.owner.quarantined() == 0);
}

/// A prefill that begins anew in other blocks: what the consumer gets is the new run's.
#[test]
fn ls_07_a_restarted_prefill_delivers_the_new_run() {
    let mut w = World::new(prefill(), decode());
    w.p.fill(1, &source());
    let fence = announce(&mut w, first(3));
    let pull = w.d.owner.pull(push(&w, &fence, Assurance::Full), w.now);
    w.run(20);
    let all = TokenRange::new(Tokens::ZERO, Tokens::new(16));
    let items = [0u32, 2].map(ItemId::new);
    w.p.owner.region_ready(fence.lease, Attempt::FIRST, &items, all, w.now).unwrap();
    w.run(1);
    let next = vec![held(&[7, 8, 1]), states(&[(N, 2)])];
    let attempt = w.p.owner.restart(fence.lease, next.clone(), w.now).unwrap();
    w.p.fill(2, &next);
    w.run(10);
    assert!(w.p.owner.region_ready(fence.lease, Attempt::FIRST, &items, all, w.now).is_err());
    w.p.owner.seal(fence.lease, attempt, next, w.now).unwrap();
    w.run(60);
    let delivered = w.end_of(pull).unwrap().unwrap();
    assert!(arrived(&w, 2) && delivered.report().attempts == 2);
}

/// FR-09, FR-05: given up in the middle, also by a writer that takes no note: the blocks are lent until it has stopped.
#[test]
fn a_push_that_is_given_up_frees_nothing_under_a_writer() {
    let mut w = World::new(prefill(), decode());
    w.p.fill(1, &source());
    let fence = announce(&mut w, first(3));
    let pull = w.d.owner.pull(push(&w, &fence, Assurance::Fenced), w.now);
    w.run(20);
    let all = TokenRange::new(Tokens::ZERO, Tokens::new(32));
    w.p.owner.region_ready(fence.lease, Attempt::FIRST, &[ItemId::new(2)], all, w.now).unwrap();
    w.run(1);
    w.d.owner.cancel(pull, w.now);
    w.run(60);
    let failed = w.end_of(pull).unwrap().unwrap_err();
    assert!(matches!(failed.cause, FailureCause::Cancelled) && failed.report.writers_in_doubt.is_empty());
    assert!(w.d.owner.quarantined() == 0 && w.p.closed.len() == 1);
    let fence = w.offer(source());
    let again = w.d.owner.pull(push(&w, &fence, Assurance::Full), w.now);
    w.run(60);
    w.end_of(again).unwrap().unwrap();
    assert!(arrived(&w, 1));
}

/// A writer that is killed in the middle: its blocks stay in quarantine until it is known to be another.
#[test]
fn fr_09_a_killed_writer_is_in_doubt_until_it_is_back() {
    let mut w = World::new(prefill(), decode());
    w.p.fill(1, &source());
    let fence = announce(&mut w, first(3));
    let policy = FailurePolicy { attempts: 1, ..FailurePolicy::default() };
    let pull = w.d.owner.pull(PullWish { policy, ..push(&w, &fence, Assurance::Fenced) }, w.now);
    w.run(20);
    let now = w.now;
    w.p.kill(5, now);
    w.run(20);
    let failed = w.end_of(pull).unwrap().unwrap_err();
    assert_eq!(failed.report.writers_in_doubt, [RankId::new(5)]);
    assert!(w.d.owner.quarantined() > 0);
    let (network, now) = (w.network.clone(), w.now);
    w.p.revive(5, &network, now);
    w.run(60);
    assert_eq!(w.d.owner.quarantined(), 0);
}
