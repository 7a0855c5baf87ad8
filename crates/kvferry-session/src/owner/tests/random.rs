//! Anything, in any order.

use std::collections::BTreeSet;

use super::pair::sources_of;
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

    fn index(&mut self, n: usize) -> usize {
        usize::try_from(self.below(n as u64)).unwrap()
    }
}

/// A link: its two ends by engine, what is on its way to each, and who has closed it.
struct Wire {
    ends: [(usize, LinkId); 2],
    to: [VecDeque<PeerMessage>; 2],
    closed_by: Option<usize>,
    /// Something was lost or repeated on it: it breaks soon, as a stream would.
    broken: bool,
}

struct Request {
    who: usize,
    pull: PullId,
    fence: Fence,
}

/// A producer and two consumers, one of which is read by the producer now and then.
struct Story {
    seed: u64,
    dice: Dice,
    sides: Vec<Side>,
    skew: [Duration; 3],
    now: Duration,
    wires: Vec<Wire>,
    requests: Vec<Request>,
    fences: Vec<(usize, Fence)>,
    /// Who read when its rank, or the owner, went away.
    doubtful: Vec<(usize, PullId, RankId)>,
    lost: [BTreeSet<u32>; 3],
    /// How leases have ended, also those of former lives.
    closed: Vec<(Fence, Closing)>,
    lives: u128,
}

impl Story {
    fn new(seed: u64) -> Self {
        let replicas = seed.is_multiple_of(2);
        let sides = if replicas {
            vec![Side::replicas("p", 1, 2), Side::replicas("d", 2, 1), Side::new("e", 3, 2)]
        } else {
            vec![Side::new("p", 1, 4), Side::new("d", 2, 2), Side::new("e", 3, 2)]
        };
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let skew = std::array::from_fn(|_| Duration::from_millis(dice.below(1_000_000)));
        let mut story = Self {
            seed,
            dice,
            sides,
            skew,
            now: Duration::ZERO,
            wires: Vec::new(),
            requests: Vec::new(),
            fences: Vec::new(),
            doubtful: Vec::new(),
            lost: Default::default(),
            closed: Vec::new(),
            lives: 1000,
        };
        for who in 0..3 {
            story.set_terms(who);
        }
        story
    }

    fn set_terms(&mut self, who: usize) {
        let ms = Duration::from_millis;
        let ttl = (!self.seed.is_multiple_of(3)).then_some(ms(3000));
        let config = &mut self.sides[who].session.config;
        config.lease = LeaseTerms { ttl, extension: ms(1500), beat: ms(400), margin: ms(100) };
        config.idle = (self.seed.is_multiple_of(5)).then_some(ms(2000));
    }

    fn at(&self, who: usize) -> Duration {
        self.now + self.skew[who]
    }

    fn ranks(&self, who: usize) -> u64 {
        self.sides[who].rank_links.len() as u64
    }

    /// Takes what all sides want, and puts what they say on its way.
    fn collect(&mut self) {
        loop {
            let mut moved = false;
            for who in 0..3 {
                moved |= self.sides[who].take();
                self.closed.append(&mut self.sides[who].closed);
                for (link, m) in std::mem::take(&mut self.sides[who].to_peer) {
                    if let Some((wire, end)) = self.wire(who, link) {
                        self.wires[wire].to[1 - end].push_back(m);
                    }
                }
                for link in std::mem::take(&mut self.sides[who].closes) {
                    self.sides[who].connects.retain(|l| *l != link);
                    if let Some((wire, end)) = self.wire(who, link) {
                        self.wires[wire].closed_by.get_or_insert(end);
                    }
                }
            }
            for i in (0..self.wires.len()).rev() {
                let Some(end) = self.wires[i].closed_by else { continue };
                if self.wires[i].to[1 - end].is_empty() {
                    let (who, link) = self.wires.remove(i).ends[1 - end];
                    let now = self.at(who);
                    self.sides[who].session.link_closed(link, "closed by the peer", now);
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn wire(&self, who: usize, link: LinkId) -> Option<(usize, usize)> {
        let of = |(i, w): (usize, &Wire)| w.ends.iter().position(|e| *e == (who, link)).map(|end| (i, end));
        self.wires.iter().enumerate().find_map(of)
    }

    fn cut(&mut self, wire: usize) {
        for (who, link) in self.wires.remove(wire).ends {
            let now = self.at(who);
            self.sides[who].session.link_closed(link, "cut", now);
        }
    }

    fn deliver(&mut self, times: u64) {
        if self.wires.is_empty() {
            return;
        }
        let (wire, end) = (self.dice.index(self.wires.len()), self.dice.index(2));
        let (who, link) = self.wires[wire].ends[end];
        let now = self.at(who);
        for _ in 0..times {
            let Some(m) = self.wires[wire].to[end].pop_front() else { return };
            self.sides[who].session.peer_message(link, m, now);
        }
    }

    fn offer(&mut self, who: usize) -> Option<Fence> {
        let now = self.at(who);
        let lease = LeaseId::new(u128::from(1 + self.dice.below(u64::MAX / 2)));
        let fence = self.sides[who].session.offer(lease, offer(), Ttl::Usual, now).ok()?;
        self.fences.push((who, fence.clone()));
        Some(fence)
    }

    fn pull(&mut self, who: usize, from: usize, fence: Fence) {
        let (now, groups) = (self.at(who), other_dst_groups(u32::try_from(self.requests.len()).unwrap()));
        let attempts = u32::try_from(1 + self.dice.below(3)).unwrap();
        let deadline = Duration::from_millis(300 + self.dice.below(8_000));
        let wish = PullWish { address: from.to_string(), groups, policy: tries(attempts), deadline, ..wish(&fence) };
        let pull = self.sides[who].session.pull(wish, now);
        self.requests.push(Request { who, pull, fence });
    }

    /// A rank says how its share of some request has ended, whether or not it was asked.
    fn rank_says(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let i = self.dice.index(self.requests.len());
        let (who, pull) = (self.requests[i].who, self.requests[i].pull);
        let rank = self.dice.index(self.sides[who].rank_links.len());
        let (now, id) = (self.at(who), u32::try_from(rank).unwrap());
        let result = match self.dice.below(12) {
            0 => {
                let in_doubt = self.dice.below(2) == 0;
                let waits = self.sides[who].session.pulls.pending(RankId::new(id)).contains(&pull);
                if in_doubt && waits && !self.lost[who].contains(&id) {
                    self.doubtful.push((who, pull, RankId::new(id)));
                }
                Err(fault(Stage::Read, in_doubt))
            }
            1 => report(&[0]),
            2 => Err(fault(Stage::Connect, false)),
            _ => report(&sources_of(&mut self.sides[who], pull, rank)),
        };
        let link = self.sides[who].rank_links[rank];
        self.sides[who].session.rank_message(link, FromRank::Pulled { pull, result }, now);
    }

    fn lose_rank(&mut self, who: usize) {
        let (rank, now) = (u32::try_from(self.dice.below(self.ranks(who))).unwrap(), self.at(who));
        if self.lost[who].insert(rank) {
            let id = RankId::new(rank);
            let pending = self.sides[who].session.pulls.pending(id);
            self.doubtful.extend(pending.into_iter().map(|pull| (who, pull, id)));
            self.sides[who].lose(rank, now);
        }
    }

    fn rejoin(&mut self, who: usize) {
        let now = self.at(who);
        if let Some(rank) = self.lost[who].pop_first() {
            let open = &self.sides[who].session.pulls.open;
            self.doubtful.retain(|(w, pull, r)| *w != who || r.get() != rank || !open.contains_key(pull));
            self.sides[who].rejoin(rank, now);
        }
    }

    /// The producer's owner is killed and begins anew at its address.
    fn restart(&mut self) {
        self.collect();
        self.check_requests(0, false);
        while let Some(wire) = self.wires.iter().position(|w| w.ends.iter().any(|(who, _)| *who == 0)) {
            let ends = self.wires.remove(wire).ends;
            for (who, link) in ends.into_iter().filter(|(who, _)| *who > 0) {
                let now = self.at(who);
                self.sides[who].session.link_closed(link, "killed", now);
            }
        }
        self.lives += 1;
        let replicas = self.seed.is_multiple_of(2);
        self.sides[0] = if replicas { Side::replicas("p", self.lives, 2) } else { Side::new("p", self.lives, 4) };
        self.set_terms(0);
        self.lost[0].clear();
        self.requests.retain(|r| r.who > 0);
        self.doubtful.retain(|(who, ..)| *who > 0);
        self.fences.retain(|(who, fence)| *who > 0 || self.seed.is_multiple_of(4) && fence.lease.get() % 2 == 0);
    }

    fn connect(&mut self) {
        let first = self.dice.index(3);
        let waits = (first..first + 3).map(|who| who % 3).find(|who| !self.sides[*who].connects.is_empty());
        let Some(who) = waits else { return };
        let (link, now) = (self.sides[who].connects.remove(0), self.at(who));
        let to: usize = self.sides[who].leads_to[&link].parse().unwrap();
        if self.dice.below(8) == 0 {
            return self.sides[who].session.link_closed(link, "connection refused", now);
        }
        if self.sides[who].session.link_opened(link, None, now) {
            let then = self.at(to);
            let theirs = self.sides[to].session.accept(None, then);
            let ends = [(who, link), (to, theirs)];
            self.wires.push(Wire { ends, to: Default::default(), closed_by: None, broken: false });
        }
    }

    /// A message is lost or repeated; the link breaks before long.
    fn disturb(&mut self) {
        if self.wires.is_empty() {
            return;
        }
        let (wire, end, what) = (self.dice.index(self.wires.len()), self.dice.index(2), self.dice.below(2));
        let queue = &mut self.wires[wire].to[end];
        let Some(first) = queue.front().cloned() else { return };
        if what == 0 {
            drop(queue.pop_front())
        } else {
            queue.push_front(first)
        }
        self.wires[wire].broken = true;
    }

    fn happen(&mut self) {
        let what = self.dice.below(100);
        match what {
            0..=46 => self.deliver(2),
            47..=66 => self.rank_says(),
            67..=73 => {
                // Most read from the producer; it reads from one of them now and then.
                let (who, from) = [(1, 0), (2, 0), (1, 0), (2, 0), (0, 1)][self.dice.index(5)];
                if let Some(fence) = self.offer(from) {
                    self.pull(who, from, fence);
                }
            }
            74..=79 => self.connect(),
            80..=85 => self.now += Duration::from_millis(100),
            86 if self.dice.below(3) == 0 => self.now += SECOND,
            87 | 88 if !self.requests.is_empty() => {
                let i = self.dice.index(self.requests.len());
                let (who, pull, fence) = (self.requests[i].who, self.requests[i].pull, self.requests[i].fence.clone());
                let now = self.at(who);
                match self.dice.below(3) {
                    0 => self.sides[who].session.cancel(pull, now),
                    // Another one has the reference too.
                    1 if who == 1 => self.pull(2, 0, fence),
                    _ => self.sides[who].session.decline("0", fence, now),
                }
            }
            89 if !self.fences.is_empty() => {
                let (who, fence) = self.fences[self.dice.index(self.fences.len())].clone();
                let now = self.at(who);
                self.sides[who].session.withdraw(fence.lease, now);
            }
            90 if !self.wires.is_empty() => {
                let wire = self.dice.index(self.wires.len());
                self.cut(wire);
            }
            91 if self.seed % 4 > 1 => {
                let who = self.dice.index(3);
                self.lose_rank(who);
            }
            92 | 93 => {
                let who = self.dice.index(3);
                self.rejoin(who);
            }
            94 if self.seed.is_multiple_of(7) && self.dice.below(3) == 0 => self.restart(),
            95 if self.seed % 2 == 1 => self.disturb(),
            96 if !self.requests.is_empty() => {
                let i = self.dice.index(self.requests.len());
                let (who, pull) = (self.requests[i].who, self.requests[i].pull);
                let (now, link) = (self.at(who), self.sides[who].rank_links[0]);
                let wanted = FromRank::DigestWanted { pull, src: RankId::new(0), windows: Vec::new() };
                self.sides[who].session.rank_message(link, wanted, now);
            }
            97 if !self.fences.is_empty() => {
                let (who, fence) = self.fences[self.dice.index(self.fences.len())].clone();
                if who == 0 {
                    let now = self.at(1);
                    self.sides[1].session.decline("0", fence, now);
                }
            }
            _ => {}
        }
        if self.dice.below(12) == 0
            && let Some(wire) = self.wires.iter().position(|w| w.broken)
        {
            self.cut(wire);
        }
        self.step();
    }

    fn step(&mut self) {
        for who in 0..3 {
            let now = self.at(who);
            self.sides[who].session.step(now);
        }
        self.collect();
        for side in &self.sides {
            self.check_loans(&side.session);
        }
    }

    /// Blocks are lent exactly as long as what has lent them is open, or may still write.
    fn check_loans(&self, s: &OwnerSession) {
        let written: usize = s.pulls.open.values().map(|p| p.places.len()).sum();
        let expected = (written + s.loans.quarantined(), s.leases.shown());
        assert_eq!(s.loans.lent(), expected, "seed {}: {:?}", self.seed, s.loans);
    }

    /// Every request of a side has ended once at most; or exactly once.
    fn check_requests(&self, who: usize, all: bool) {
        let mut ended: Vec<PullId> = self.sides[who].ended.iter().map(|(pull, _)| *pull).collect();
        ended.sort_unstable();
        let mut asked: Vec<PullId> = self.requests.iter().filter(|r| r.who == who).map(|r| r.pull).collect();
        asked.sort_unstable();
        if all {
            assert_eq!(ended, asked, "seed {}: every request of {who} ends once", self.seed);
        } else {
            let mut once = ended.clone();
            once.dedup();
            assert_eq!(ended, once, "seed {}: a request ends twice", self.seed);
        }
    }

    fn end(&mut self) {
        self.collect();
        while !self.wires.is_empty() {
            self.cut(0);
        }
        if self.seed.is_multiple_of(3) {
            for who in 0..3 {
                for rank in 0..u32::try_from(self.ranks(who)).unwrap() {
                    let pending = self.sides[who].session.pulls.pending(RankId::new(rank));
                    self.doubtful.extend(pending.into_iter().map(|pull| (who, pull, RankId::new(rank))));
                }
                let now = self.at(who);
                self.sides[who].session.shut_down(now);
                assert!(self.sides[who].session.pulls.is_clean(), "seed {}: a shutdown ends them all", self.seed);
            }
        }
        for _ in 0..4 {
            self.now += 20 * SECOND;
            self.step();
        }
    }
}

/// Random stories of many requests between three engines whose clocks have nothing in common: messages delayed, lost and repeated,
/// leases that expire, are taken back and declined, ranks that fail, are lost and join again, owners that are killed, links cut,
/// engines that give up. However it goes, every request ends once, delivered means that this very attempt was held to its end,
/// blocks are lent as long as they must be, and nothing is left over.
#[test]
fn whatever_happens_every_request_ends_once_and_delivered_means_held() {
    let (mut delivered, mut failed, mut quarantined, mut again, mut hows) = (0, 0, 0, 0, BTreeMap::new());
    let mut causes: BTreeMap<&str, u32> = BTreeMap::new();
    for seed in 1..=1500u64 {
        let mut story = Story::new(seed);
        for _ in 0..400 {
            story.happen();
        }
        story.end();
        let mut leases: Vec<_> = story.closed.iter().map(|(f, _)| (f.engine.clone(), f.epoch, f.lease)).collect();
        leases.sort_unstable();
        leases.dedup();
        assert_eq!(leases.len(), story.closed.len(), "seed {seed}: a lease ends once");
        for (_, how) in &story.closed {
            *hows.entry(how.name()).or_insert(0) += 1;
        }
        let mut read = BTreeSet::new();
        for who in 0..3 {
            story.check_requests(who, true);
            for (pull, result) in &story.sides[who].ended {
                match result {
                    Ok(told) => {
                        delivered += 1;
                        let report = told.report();
                        again += usize::from(report.attempts > 1);
                        let held = (report.fence.clone(), Closing::Read);
                        assert!(story.closed.contains(&held), "seed {seed}: delivered, but not held to the end");
                        let named = (report.fence.engine.clone(), report.fence.epoch, report.fence.lease);
                        assert!(read.insert(named), "seed {seed}: a lease is delivered once");
                    }
                    Err(told) => {
                        failed += 1;
                        *causes.entry(told.cause.kind()).or_default() += 1;
                        let expected = story.doubtful.iter().filter(|(w, p, _)| *w == who && p == pull);
                        for (.., rank) in expected {
                            assert!(told.report.in_doubt.contains(rank), "seed {seed}: {pull} forgets rank {rank}");
                        }
                    }
                }
            }
            let doubt =
                story.sides[who].ended.iter().any(|(_, r)| r.as_ref().is_err_and(|f| !f.report.in_doubt.is_empty()));
            assert!(doubt || story.sides[who].session.quarantined() == 0, "seed {seed}");
            quarantined += usize::from(story.sides[who].session.quarantined() > 0);
            // When the last ranks have begun anew and the last leases are taken back, nothing is left.
            let now = story.at(who);
            for rank in 0..u32::try_from(story.ranks(who)).unwrap() {
                if !story.lost[who].remove(&rank) {
                    story.sides[who].lose(rank, now);
                }
                story.sides[who].rejoin(rank, now);
            }
            for (_, fence) in story.fences.iter().filter(|(w, _)| *w == who) {
                story.sides[who].session.withdraw(fence.lease, now);
            }
            let session = &story.sides[who].session;
            assert!(session.loans.is_empty(), "seed {seed}: {:?}", session.loans);
            assert!(super::pair::is_clean(session), "seed {seed}, {who}: {session:?}");
        }
    }
    let seen = format!("{delivered} delivered, {again} by another attempt, {failed} failed: {causes:?}, {hows:?}");
    assert!(quarantined > 50, "{quarantined}");
    assert!(delivered > 2000 && failed > 2000 && again > 20, "all kinds of ends are common: {seen}");
    for how in ["read", "abandoned", "declined", "consumer lost", "withdrawn", "expired", "rank lost"] {
        assert!(hows.contains_key(how), "{how}: {seen}");
    }
    for cause in
        ["rank lost", "link", "stale epoch", "refused", "transfer", "lease expired", "lease closed", "deadline"]
    {
        assert!(causes.contains_key(cause), "{cause}: {seen}");
    }
}
