//! Anything, in any order.

use super::*;

/// A small generator, so that a seed is all that a failure needs.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Random stories of many requests: messages delayed, ranks that fail, links cut, leases taken back, engines that give up.
/// However it goes, every request ends once, delivered means held, and nothing is left over.
#[test]
fn whatever_happens_every_request_ends_once_and_delivered_means_held() {
    let (mut delivered, mut failed, mut quarantined) = (0, 0, 0);
    for seed in 1..=1500u64 {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut w = World::new();
        let mut pulls = vec![(w.pull, w.fence.clone())];
        // The dialogue in flight, in order in each direction.
        let (mut to_p, mut to_d) = (VecDeque::new(), VecDeque::new());
        // Who read when its rank, or the owner, went away, by rank.
        let mut doubtful: Vec<(PullId, RankId)> = Vec::new();
        let mut lost = false;
        for _ in 0..120 {
            w.p.take();
            w.d.take();
            to_p.extend(w.d.to_peer.drain(..).map(|(_, m)| m));
            to_d.extend(w.p.to_peer.drain(..).map(|(_, m)| m));
            let (pull, fence) = pulls[usize::try_from(dice.below(pulls.len() as u64)).unwrap()].clone();
            match dice.below(100) {
                0..=29 => {
                    if let (Some((_, theirs)), Some(m)) = (w.link, to_p.pop_front()) {
                        w.p.session.peer_message(theirs, m, w.now);
                    }
                }
                30..=59 => {
                    if let (Some((ours, _)), Some(m)) = (w.link, to_d.pop_front()) {
                        w.d.session.peer_message(ours, m, w.now);
                    }
                }
                60..=79 => {
                    let rank = usize::try_from(dice.below(2)).unwrap();
                    let sources: [u32; 2] = if rank == 0 { [0, 1] } else { [2, 3] };
                    let result = match dice.below(12) {
                        0 => {
                            let in_doubt = dice.below(2) == 0;
                            let waits = w.d.session.pulls.pending(RankId::new(u32::try_from(rank).unwrap()));
                            if in_doubt && !(lost && rank == 1) && waits.contains(&pull) {
                                doubtful.push((pull, RankId::new(u32::try_from(rank).unwrap())));
                            }
                            Err(fault(Stage::Read, in_doubt))
                        }
                        1 => report(&sources[..1]),
                        _ => report(&sources),
                    };
                    w.d.session.rank_message(w.d.rank_links[rank], FromRank::Pulled { pull, result }, w.now);
                }
                80..=87 => {
                    let lease = LeaseId::new(u128::from(1000 + dice.below(u64::MAX / 2)));
                    let offer = Offer { groups: src_groups(), content_key: key(1) };
                    let fence = w.p.session.offer(lease, offer, Ttl::Usual, w.now).unwrap();
                    let groups = other_dst_groups(u32::try_from(pulls.len()).unwrap());
                    pulls.push((w.d.session.pull(PullWish { groups, ..wish(&fence) }, w.now), fence));
                }
                88..=93 if w.link.is_none() => {
                    if !w.d.connects.is_empty() {
                        let theirs = w.p.session.accept(None, w.now);
                        let ours = w.d.connects.remove(0);
                        if w.d.session.link_opened(ours, None, w.now) {
                            w.link = Some((ours, theirs));
                        }
                    }
                }
                88..=93 => w.now += SECOND / 10,
                94 => w.d.session.cancel(pull, w.now),
                95 => drop(w.p.session.withdraw(fence.lease, w.now)),
                96 => {
                    if let Some((ours, theirs)) = w.link.take() {
                        w.d.session.link_closed(ours, "cut", w.now);
                        w.p.session.link_closed(theirs, "cut", w.now);
                        (to_p, to_d) = (VecDeque::new(), VecDeque::new());
                    }
                }
                97 => {
                    let wanted = FromRank::DigestWanted { pull, src: RankId::new(0), windows: Vec::new() };
                    w.d.session.rank_message(w.d.rank_links[0], wanted, w.now);
                }
                98 if seed % 4 == 0 && dice.below(4) == 0 => {
                    let rank = RankId::new(1);
                    if !lost {
                        doubtful.extend(w.d.session.pulls.pending(rank).into_iter().map(|pull| (pull, rank)));
                    }
                    lost = true;
                    w.d.session.rank_closed(w.d.rank_links[1], "killed", w.now);
                }
                _ => w.now += SECOND,
            }
            w.d.session.step(w.now);
            w.p.session.step(w.now);
        }
        w.link = None;
        if seed % 3 == 0 {
            for rank in [0, 1].map(RankId::new) {
                doubtful.extend(w.d.session.pulls.pending(rank).into_iter().map(|pull| (pull, rank)));
            }
            w.d.session.shut_down(w.now);
            assert!(w.d.session.pulls.is_clean(), "seed {seed}: a shutdown ends them all");
        }
        for _ in 0..3 {
            w.now += 20 * SECOND;
            w.d.session.step(w.now);
        }
        w.d.take();
        w.p.take();
        let mut ended: Vec<PullId> = w.d.ended.iter().map(|(pull, _)| *pull).collect();
        ended.sort_unstable();
        let mut expected: Vec<PullId> = pulls.iter().map(|(pull, _)| *pull).collect();
        expected.sort_unstable();
        assert_eq!(ended, expected, "seed {seed}: every request ends once");
        let mut closed: Vec<&Fence> = w.p.closed.iter().map(|(fence, _)| fence).collect();
        closed.sort_unstable();
        closed.dedup();
        assert_eq!(closed.len(), w.p.closed.len(), "seed {seed}: a lease ends once");
        for (pull, result) in &w.d.ended {
            let (_, fence) = pulls.iter().find(|(p, _)| p == pull).unwrap();
            match result {
                Ok(_) => {
                    delivered += 1;
                    let read = (fence.clone(), Closing::Read);
                    assert!(w.p.closed.contains(&read), "seed {seed}: delivered, but not held to the end");
                }
                Err(told) => {
                    failed += 1;
                    let expected = doubtful.iter().filter(|(p, _)| p == pull);
                    for (_, rank) in expected {
                        assert!(told.report.in_doubt.contains(rank), "seed {seed}: {pull} forgets rank {rank}");
                    }
                }
            }
        }
        assert!(w.d.session.pulls.is_clean(), "seed {seed}: nothing is left over");
        // Blocks are lent no longer, but for those that a rank has been silent about.
        let doubt = w.d.ended.iter().any(|(_, r)| r.as_ref().is_err_and(|f| !f.report.in_doubt.is_empty()));
        let loans = &w.d.session.loans;
        assert!(loans.is_empty() || (doubt && loans.quarantined() > 0), "seed {seed}: {loans:?}");
        quarantined += usize::from(loans.quarantined() > 0);
        for (_, fence) in &pulls {
            w.p.session.withdraw(fence.lease, w.now);
        }
        assert!(w.p.session.loans.is_empty(), "seed {seed}: {:?}", w.p.session.loans);
    }
    assert!(quarantined > 50, "{quarantined}");
    assert!(delivered > 500 && failed > 500, "both kinds of ends are common: {delivered} and {failed}");
}
