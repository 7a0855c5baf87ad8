//! Leases that are offered while their bytes are still being computed.
//!
//! The engine announces a stream, lists its blocks as it gets them, says which bytes are final, and seals it: then everything is,
//! and the lease is one like any other. What was said to be final must not change before the lease is closed or the prefill begins
//! anew. Our ranks are told what the engine says; what they write of it is their consumers' grants' matter
//! ([`pushes`](super::pushes)).

use super::{BTreeSet, Duration, Fence, LeaseId, OfferError, OwnerSession, SrcGroup, Ttl};

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::SrcPaged;
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{ItemId, Name, TokenRange, Tokens};
use kvferry_proto::lease::Offer;
use kvferry_proto::names::Attempt;
use kvferry_proto::push::{Ready, Stream};
use kvferry_proto::rank::ToRank;

use super::leases::Then;
use super::loans::Place;

/// How far a stream is.
#[derive(Debug)]
pub(super) struct StreamState {
    /// Which run of the prefill.
    pub(super) attempt: Attempt,
    pub(super) sealed: bool,
    /// By item: the bytes of all tokens before this one are final.
    ready: Vec<Tokens>,
}

impl StreamState {
    /// What a rank is told that has not heard of it, or has been told before.
    pub(super) fn so_far(&self, lease: LeaseId, groups: &[SrcGroup]) -> Vec<ToRank> {
        let (attempt, sealed) = (self.attempt, self.sealed);
        let mut all = vec![ToRank::Stream(Stream { lease, attempt, groups: groups.to_vec(), sealed })];
        let mut marks: Vec<Tokens> = self.ready.iter().copied().filter(|t| *t > Tokens::ZERO).collect();
        marks.sort_unstable();
        marks.dedup();
        all.extend(marks.into_iter().filter(|_| !sealed).map(|tokens| {
            let items = (0u32..).zip(&self.ready).filter(|(_, at)| **at == tokens).map(|(id, _)| ItemId::new(id));
            ToRank::Ready(Ready { lease, attempt, items: items.collect(), tokens })
        }));
        all
    }
}

/// What an engine says of a stream is refused; nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// There is no such lease (any more).
    #[error("lease {lease} is not open: it was never announced, or has ended")]
    Unknown {
        /// The lease.
        lease: LeaseId,
    },
    /// It was offered whole.
    #[error("lease {lease} was offered, not announced: all of it is final")]
    NotStreamed {
        /// The lease.
        lease: LeaseId,
    },
    /// All of it is final already.
    #[error("lease {lease} is sealed: all of it is final, and nothing of it changes")]
    Sealed {
        /// The lease.
        lease: LeaseId,
    },
    /// The prefill has begun anew since, or has not yet.
    #[error("lease {lease}: attempt {got} of its prefill was named, attempt {current} runs")]
    WrongAttempt {
        /// The lease.
        lease: LeaseId,
        /// The one that runs.
        current: Attempt,
        /// The one named.
        got: Attempt,
    },
    /// The model has no such item.
    #[error("item {item} is none of the model's, which has {items}")]
    UnknownItem {
        /// The item.
        item: ItemId,
        /// How many there are.
        items: usize,
    },
    /// It is a state: there is nothing of it before the whole is sealed.
    #[error("item {item} is a state, which is final when the lease is sealed and not before")]
    IsState {
        /// The item.
        item: Name,
    },
    /// Tokens were left out, or final bytes are said to be final a second time.
    #[error("item {item}: tokens {got} are said to be final, but those before {final_to} are; go on from there")]
    Gap {
        /// The item.
        item: Name,
        /// What was final.
        final_to: Tokens,
        /// What was said.
        got: TokenRange,
    },
    /// No block is listed for them.
    #[error(
        "group {group}: tokens up to {got} are said to be final, but the blocks listed end at {listed}; list them first"
    )]
    NotListed {
        /// The group.
        group: Name,
        /// The last token, exclusive.
        got: Tokens,
        /// Where the listed blocks end.
        listed: Tokens,
    },
    /// Blocks that were listed are not any more, or others stand in their place.
    #[error(
        "group {group}: the blocks listed before must stay as they are while the attempt runs; only append to them"
    )]
    Relisted {
        /// The group.
        group: Name,
    },
    /// The blocks can't be offered.
    #[error(transparent)]
    Offer(#[from] OfferError),
}

impl OwnerSession {
    /// Offers blocks whose bytes are still being computed: as [`offer`](Self::offer), but `held` of each group is a promise, and
    /// blocks and states may be listed later. The prefill's first run is [`Attempt::FIRST`].
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn announce(&mut self, lease: LeaseId, mut offer: Offer, ttl: Ttl, now: Duration) -> Result<Fence, OfferError> {
        // What is listed is lent, whether it is promised already or not.
        let whole = listed_whole(&offer.groups);
        let groups = std::mem::replace(&mut offer.groups, whole);
        let fence = self.offer(lease, offer, ttl, now)?;
        let items = self.life.local().map_or(0, |l| l.manifest.cache().spec().items().len());
        let stream = StreamState { attempt: Attempt::FIRST, sealed: false, ready: vec![Tokens::ZERO; items] };
        if let Some(open) = self.leases.open.get_mut(&lease) {
            open.stream = Some(Box::new(stream));
            open.regroup(&groups);
        }
        self.tell_stream(lease, groups);
        Ok(fence)
    }

    /// Lists more blocks of a stream, appended to those listed before. `groups` are all of them, one entry for each group.
    ///
    /// # Errors
    /// If the stream is not in that attempt, or blocks can't be offered; then nothing has changed.
    pub fn extend(
        &mut self,
        lease: LeaseId,
        attempt: Attempt,
        groups: Vec<SrcGroup>,
        now: Duration,
    ) -> Result<(), StreamError> {
        self.now = now;
        self.running(lease, attempt)?;
        self.relist(lease, groups, true)
    }

    /// Promises that bytes are final, from where it was promised last of each item: whoever was granted room is sent them at once.
    ///
    /// # Errors
    /// If the stream is not in that attempt, or what is promised doesn't join what was before, for the first item of which that is
    /// so; then nothing has changed.
    pub fn region_ready(
        &mut self,
        lease: LeaseId,
        attempt: Attempt,
        items: &[ItemId],
        tokens: TokenRange,
        now: Duration,
    ) -> Result<(), StreamError> {
        self.now = now;
        self.running(lease, attempt)?;
        let Some(m) = self.life.local().map(|l| l.manifest.cache().clone()) else { return Ok(()) };
        let Some(open) = self.leases.open.get_mut(&lease) else { return Ok(()) };
        let Some(groups) = open.state.offer().map(|offer| &offer.groups) else { return Ok(()) };
        let Some(stream) = &mut open.stream else { return Ok(()) };
        for &item in items {
            let Some(of) = m.spec().get(item) else {
                return Err(StreamError::UnknownItem { item, items: m.spec().items().len() });
            };
            let at = stream.ready.get(item.index()).copied().unwrap_or_default();
            let Some(paged) = of.as_paged() else { return Err(StreamError::IsState { item: of.name.clone() }) };
            if tokens.start() != at || tokens.is_empty() {
                return Err(StreamError::Gap { item: of.name.clone(), final_to: at, got: tokens });
            }
            if let Some((group, listed)) = listed(&m, groups, item)
                && !matches!(paged.retention, Retention::Ring(_))
                && listed < tokens.end()
            {
                return Err(StreamError::NotListed { group, got: tokens.end(), listed });
            }
        }
        for item in items {
            if let Some(at) = stream.ready.get_mut(item.index()) {
                *at = tokens.end();
            }
        }
        let writers: Vec<_> = open.push.iter().flat_map(|push| push.writing.pending()).collect();
        for rank in writers {
            let ready = Ready { lease, attempt, items: items.to_vec(), tokens: tokens.end() };
            self.send_rank(rank, ToRank::Ready(ready), None);
        }
        Ok(())
    }

    /// The prefill is complete: `groups` is all that is offered, and every byte of it is final, also what was never said to be ready.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn seal(
        &mut self,
        lease: LeaseId,
        attempt: Attempt,
        groups: Vec<SrcGroup>,
        now: Duration,
    ) -> Result<(), StreamError> {
        self.now = now;
        self.running(lease, attempt)?;
        let stream = self.leases.open.get_mut(&lease).and_then(|open| open.stream.as_mut());
        if let Some(stream) = stream {
            stream.sealed = true;
        }
        let listed = self.relist(lease, groups, true);
        if listed.is_err()
            && let Some(stream) = self.leases.open.get_mut(&lease).and_then(|open| open.stream.as_mut())
        {
            stream.sealed = false;
        }
        listed
    }

    /// The prefill begins anew, with these blocks. Gives the number of the new run. What is written of the run before is stopped, and
    /// nothing of the new one is written before that has ended and the consumer has granted its room anew. What was said to be final
    /// is not any more.
    ///
    /// # Errors
    /// If there is no such stream, it is sealed, or blocks can't be offered; then nothing has changed.
    pub fn restart(&mut self, lease: LeaseId, groups: Vec<SrcGroup>, now: Duration) -> Result<Attempt, StreamError> {
        self.now = now;
        let current = self.stream(lease)?.attempt;
        self.running(lease, current)?;
        let attempt = current.next().ok_or(StreamError::Unknown { lease })?;
        let stream = self.leases.open.get_mut(&lease).and_then(|open| open.stream.as_mut());
        let before = stream.map(|stream| {
            let ready = vec![Tokens::ZERO; stream.ready.len()];
            std::mem::replace(&mut **stream, StreamState { attempt, sealed: false, ready })
        });
        if let Err(error) = self.relist(lease, groups, false) {
            let stream = self.leases.open.get_mut(&lease).and_then(|open| open.stream.as_mut());
            if let (Some(stream), Some(before)) = (stream, before) {
                **stream = before;
            }
            return Err(error);
        }
        self.end_bound(lease, Then::Reopen);
        Ok(attempt)
    }

    fn stream(&self, lease: LeaseId) -> Result<&StreamState, StreamError> {
        // One whose time is up has ended, though nobody has looked yet.
        let open = self.leases.open.get(&lease).filter(|open| !open.is_over(self.now));
        let open = open.ok_or(StreamError::Unknown { lease })?;
        open.stream.as_deref().ok_or(StreamError::NotStreamed { lease })
    }

    /// Whether something may be said of this run.
    fn running(&self, lease: LeaseId, attempt: Attempt) -> Result<(), StreamError> {
        let stream = self.stream(lease)?;
        if stream.attempt != attempt {
            return Err(StreamError::WrongAttempt { lease, current: stream.attempt, got: attempt });
        }
        if stream.sealed {
            return Err(StreamError::Sealed { lease });
        }
        Ok(())
    }

    /// Lists the blocks of a stream anew; appended to those before, or in their place.
    fn relist(&mut self, lease: LeaseId, groups: Vec<SrcGroup>, append: bool) -> Result<(), StreamError> {
        let m = self.life.local().ok_or(OfferError::NotReady)?.manifest.cache().clone();
        let sealed = self.stream(lease)?.sealed;
        let places = if sealed { self.offered(&m, &groups)? } else { self.offered(&m, &listed_whole(&groups))? };
        let Some(open) = self.leases.open.get_mut(&lease) else { return Err(StreamError::Unknown { lease }) };
        let before = open.state.offer().map(|offer| &offer.groups).ok_or(StreamError::Unknown { lease })?;
        if append && let Some(group) = relisted(&m, before, &groups) {
            return Err(StreamError::Relisted { group });
        }
        let lent: BTreeSet<Place> = open.places.iter().copied().collect();
        let new: Vec<Place> = places.into_iter().filter(|place| !lent.contains(place)).collect();
        self.loans.read(&m, &new).map_err(OfferError::from)?;
        let Some(open) = self.leases.open.get_mut(&lease) else { return Ok(()) };
        // Those that are listed no more stay lent until nothing is written of them: until the lease ends.
        open.places.extend(new);
        open.regroup(&groups);
        self.tell_stream(lease, groups);
        Ok(())
    }

    /// Tells all ranks of a stream; each of them may compute a part of it.
    fn tell_stream(&mut self, lease: LeaseId, groups: Vec<SrcGroup>) {
        let Ok(stream) = self.stream(lease) else { return };
        let (attempt, sealed) = (stream.attempt, stream.sealed);
        self.tell_ranks(|| ToRank::Stream(Stream { lease, attempt, groups: groups.clone(), sealed }));
    }

    pub(super) fn tell_ranks(&mut self, message: impl Fn() -> ToRank) {
        for rank in self.ranks.joined() {
            self.send_rank(rank, message(), None);
        }
    }
}

/// The same, with all that is listed promised where nothing is.
fn listed_whole(groups: &[SrcGroup]) -> Vec<SrcGroup> {
    let all = TokenRange::new(Tokens::ZERO, Tokens::new(u64::MAX));
    let whole = |g: &SrcGroup| match g {
        SrcGroup::Paged(p) if p.held.is_empty() => SrcPaged { held: all, ..p.clone() }.into(),
        other => other.clone(),
    };
    groups.iter().map(whole).collect()
}

/// A group whose blocks are not those listed before with more of them at the end.
fn relisted(m: &Manifest, before: &[SrcGroup], after: &[SrcGroup]) -> Option<Name> {
    let same = |pair: &(&SrcGroup, &SrcGroup)| match pair {
        (SrcGroup::Paged(a), SrcGroup::Paged(b)) => {
            let kept = a.table.is_empty() || a.table.first_position() == b.table.first_position();
            kept && a.table.len() <= b.table.len() && a.table.iter().zip(b.table.iter()).all(|(a, b)| a == b)
        }
        (SrcGroup::State(_), SrcGroup::State(_)) => true,
        _ => false,
    };
    let changed = before.iter().zip(after).position(|pair| !same(&pair))?;
    m.groups().get(changed).map(|g| g.name.clone())
}

/// The group of an item, and where its listed blocks end.
fn listed(m: &Manifest, groups: &[SrcGroup], item: ItemId) -> Option<(Name, Tokens)> {
    let index = m.groups().iter().position(|g| g.items.contains(&item))?;
    let group = m.groups().get(index)?;
    match groups.get(index)? {
        SrcGroup::Paged(g) => {
            let blocks = g.table.first_position().saturating_add(g.table.len());
            Some((group.name.clone(), Tokens::new(blocks.saturating_mul(group.block_tokens.get()))))
        }
        SrcGroup::State(_) => None,
    }
}
