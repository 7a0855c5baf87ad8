//! Two owners with any number of links between them, each with a clock of its own; everything that is said is noted.

use super::*;

pub(super) struct Pair {
    pub(super) p: Side,
    pub(super) d: Side,
    /// The consumer's and the producer's names of each link.
    pub(super) links: Vec<(LinkId, LinkId)>,
    pub(super) now: Duration,
    /// How far each one's clock is ahead of `now`: the consumer's and the producer's.
    pub(super) skew: (Duration, Duration),
    /// Who has said what, by kind.
    pub(super) said: Vec<(char, &'static str)>,
    /// What was not delivered: by the consumer to the producer, or the other way round.
    pub(super) kept: Vec<(bool, LinkId, PeerMessage)>,
    /// Whether whoever is connected to answers.
    pub(super) answers: bool,
    /// The versions that the producer speaks and understands.
    pub(super) speaks: Option<Versions>,
}

pub(super) fn kind(m: &PeerMessage) -> &'static str {
    match m {
        PeerMessage::Hello(_) => "Hello",
        PeerMessage::Again(_) => "Again",
        PeerMessage::ManifestWanted => "ManifestWanted",
        PeerMessage::Manifest(_) => "Manifest",
        PeerMessage::Refused(_) => "Refused",
        PeerMessage::Bind(_) => "Bind",
        PeerMessage::BindAnswer(_) => "BindAnswer",
        PeerMessage::Release(_) => "Release",
        PeerMessage::ReleaseAnswer(_) => "ReleaseAnswer",
        PeerMessage::Heartbeat(_) => "Heartbeat",
        PeerMessage::HeartbeatAnswer(_) => "HeartbeatAnswer",
        PeerMessage::Closed(_) => "Closed",
        PeerMessage::RunDigest(_) => "RunDigest",
        PeerMessage::RunDigestAnswer(_) => "RunDigestAnswer",
        PeerMessage::Gather(_) => "Gather",
        PeerMessage::GatherAnswer(_) => "GatherAnswer",
        PeerMessage::PushBind(_) => "PushBind",
        PeerMessage::Written(_) => "Written",
        PeerMessage::Progress(_) => "Progress",
        PeerMessage::Stop(_) => "Stop",
        PeerMessage::Stopped(_) => "Stopped",
        other => panic!("{other:?}"),
    }
}

/// Loses these kinds.
pub(super) fn losing(kinds: &'static [&'static str]) -> impl Fn(&PeerMessage) -> bool {
    move |m| kinds.contains(&kind(m))
}

pub(super) fn nothing(_: &PeerMessage) -> bool {
    false
}

impl Pair {
    pub(super) fn of(p: Side, d: Side) -> Self {
        Self {
            p,
            d,
            links: Vec::new(),
            now: Duration::ZERO,
            skew: (Duration::ZERO, Duration::ZERO),
            said: Vec::new(),
            kept: Vec::new(),
            answers: true,
            speaks: None,
        }
    }

    /// A producer of four ranks and a consumer of two, whose leases end as they usually do.
    pub(super) fn leased() -> Self {
        let usual = |id, epoch, ranks| OwnerConfig { lease: LeaseTerms::default(), ..config(id, epoch, ranks) };
        Self::of(Side::with(usual("p", 1, 4)), Side::with(usual("d", 2, 2)))
    }

    /// Two ranks that hold all alike are read by one.
    pub(super) fn replicated() -> Self {
        Self::of(Side::replicas("p", 1, 2), Side::replicas("d", 2, 1))
    }

    pub(super) fn d_now(&self) -> Duration {
        self.now + self.skew.0
    }

    pub(super) fn p_now(&self) -> Duration {
        self.now + self.skew.1
    }

    pub(super) fn offer(&mut self, lease: u128, ttl: Ttl) -> Fence {
        let now = self.p_now();
        self.p.session.offer(LeaseId::new(lease), offer(), ttl, now).unwrap()
    }

    /// A long request of blocks of its own.
    pub(super) fn pull(&mut self, fence: &Fence) -> PullId {
        let groups = other_dst_groups(u32::try_from(self.d.ended.len() + self.d.session.pulls.open.len()).unwrap());
        self.pull_as(PullWish { groups, deadline: 1000 * SECOND, ..wish(fence) })
    }

    pub(super) fn pull_as(&mut self, wish: PullWish) -> PullId {
        let now = self.d_now();
        self.d.session.pull(wish, now)
    }

    /// Carries everything there is to carry, in order, but for what is to be kept back.
    pub(super) fn carry(&mut self, keep: impl Fn(&PeerMessage) -> bool) {
        loop {
            let mut moved = self.p.take() | self.d.take();
            for (link, m) in std::mem::take(&mut self.d.to_peer) {
                self.said.push(('d', kind(&m)));
                if keep(&m) { self.kept.push((true, link, m)) } else { self.tell_p(link, m) }
            }
            for (link, m) in std::mem::take(&mut self.p.to_peer) {
                self.said.push(('p', kind(&m)));
                if keep(&m) { self.kept.push((false, link, m)) } else { self.tell_d(link, m) }
            }
            for link in std::mem::take(&mut self.d.closes) {
                self.d.closed_links.push(link);
                if let Some(at) = self.links.iter().position(|(ours, _)| *ours == link) {
                    let (_, theirs) = self.links.remove(at);
                    self.p.session.link_closed(theirs, "closed by the peer", self.p_now());
                }
            }
            for link in std::mem::take(&mut self.p.closes) {
                self.p.closed_links.push(link);
                if let Some(at) = self.links.iter().position(|(_, theirs)| *theirs == link) {
                    let (ours, _) = self.links.remove(at);
                    self.d.session.link_closed(ours, "closed by the peer", self.d_now());
                }
            }
            if self.answers {
                moved |= !self.d.connects.is_empty() || !self.p.connects.is_empty();
                for ours in std::mem::take(&mut self.d.connects) {
                    let theirs = self.p.session.accept(None, self.p_now());
                    self.links.push((ours, theirs));
                    assert!(self.d.session.link_opened(ours, None, self.d_now()));
                }
                for theirs in std::mem::take(&mut self.p.connects) {
                    let ours = self.d.session.accept(None, self.d_now());
                    self.links.push((ours, theirs));
                    assert!(self.p.session.link_opened(theirs, None, self.p_now()));
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn as_spoken(&self, m: PeerMessage) -> PeerMessage {
        match (m, self.speaks) {
            (PeerMessage::Hello(hello), Some(versions)) => {
                PeerMessage::Hello(kvferry_proto::handshake::Hello { versions, ..hello })
            }
            (m, _) => m,
        }
    }

    pub(super) fn tell_p(&mut self, link: LinkId, m: PeerMessage) {
        if let Some((_, theirs)) = self.links.iter().find(|(ours, _)| *ours == link).copied() {
            let m = self.as_spoken(m);
            self.p.session.peer_message(theirs, m, self.p_now());
        }
    }

    pub(super) fn tell_d(&mut self, link: LinkId, m: PeerMessage) {
        if let Some((ours, _)) = self.links.iter().find(|(_, theirs)| *theirs == link).copied() {
            let m = self.as_spoken(m);
            self.d.session.peer_message(ours, m, self.d_now());
        }
    }

    /// Delivers what was kept back.
    pub(super) fn resume(&mut self) {
        for (by_d, link, m) in std::mem::take(&mut self.kept) {
            if by_d { self.tell_p(link, m) } else { self.tell_d(link, m) }
        }
    }

    /// Lets time pass at both, and carries what comes of it.
    pub(super) fn pass(&mut self, time: Duration, keep: impl Fn(&PeerMessage) -> bool) {
        self.now += time;
        self.d.session.step(self.d_now());
        self.p.session.step(self.p_now());
        self.carry(keep);
    }

    /// All links break.
    pub(super) fn cut(&mut self) {
        for (ours, theirs) in std::mem::take(&mut self.links) {
            self.d.session.link_closed(ours, "cut", self.d_now());
            self.p.session.link_closed(theirs, "cut", self.p_now());
        }
        self.p.take();
        self.d.take();
    }

    /// What a rank of the consumer says of a request: where it was read well, exactly the sources that the map names.
    pub(super) fn say(&mut self, pull: PullId, rank: usize, result: Result<(), RankFault>) {
        let result = match result {
            Ok(()) => report(&sources_of(&mut self.d, pull, rank)),
            Err(fault) => Err(fault),
        };
        let message = FromRank::Pulled { pull, result };
        self.d.session.rank_message(self.d.rank_links[rank], message, self.d_now());
    }

    /// All ranks have read their shares of a request.
    pub(super) fn read(&mut self, pull: PullId) {
        for rank in 0..self.d.rank_links.len() {
            self.say(pull, rank, Ok(()));
        }
    }

    /// Ranks stop where they were told to.
    pub(super) fn stop(&mut self, pull: PullId) {
        self.d.take();
        for rank in 0..self.d.rank_links.len() {
            let link = self.d.rank_links[rank];
            if self.d.orders.contains(&(link, ToRank::Cancel(pull))) {
                self.say(pull, rank, Err(fault(Stage::Cancelled, false)));
            }
        }
    }

    /// How a request has ended: the name of its cause.
    pub(super) fn end_of(&self, pull: PullId) -> String {
        match self.result_of(pull) {
            None => "-".into(),
            Some(Ok(_)) => "Delivered".into(),
            Some(Err(failed)) => name(&failed.cause),
        }
    }

    pub(super) fn result_of(&self, pull: PullId) -> Option<&Result<Delivered, Failed>> {
        let mut of = self.d.ended.iter().filter(|(id, _)| *id == pull);
        let first = of.next().map(|(_, r)| r);
        assert!(of.next().is_none(), "a request ends once");
        first
    }

    pub(super) fn failed(&self, pull: PullId) -> &Failed {
        self.result_of(pull).unwrap().as_ref().unwrap_err()
    }

    pub(super) fn count(&self, who: char, what: &str) -> usize {
        self.said.iter().filter(|(by, kind)| *by == who && *kind == what).count()
    }

    pub(super) fn phase(&self, pull: PullId) -> Option<Phase> {
        self.d.session.pulls.open.get(&pull).map(|p| p.phase())
    }

    /// An offer that is read to its end.
    pub(super) fn one_request(&mut self, lease: u128) -> PullId {
        let fence = self.offer(lease, Ttl::Usual);
        let pull = self.pull(&fence);
        self.carry(nothing);
        self.read(pull);
        self.carry(nothing);
        pull
    }
}

/// Which of the producer's ranks a consumer's rank reads for a request now.
pub(super) fn sources_of(side: &mut Side, pull: PullId, rank: usize) -> Vec<u32> {
    let rank = RankId::new(u32::try_from(rank).unwrap());
    let found = side.session.pulls.open.get(&pull).and_then(|p| Some((p.link?, p.pairing?)));
    let Some((link, pairing)) = found else { return vec![0] };
    let Some((_, Ok(direction))) = side.session.reading(link) else { return vec![0] };
    direction.map(pairing.options).unwrap().sources_of(rank).map(RankId::get).collect()
}

/// Nothing is left over at a side that has no links, no requests and no leases.
pub(super) fn is_clean(side: &OwnerSession) -> bool {
    side.pulls.is_clean()
        && side.leases.is_clean()
        && side.asks.is_empty()
        && side.beats.is_empty()
        && side.pushes.is_empty()
        && side.roads.is_empty()
        && side.links.is_empty()
}
