//! What one request moves from which rank to which: said by the planner that moves it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Mismatches;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::{BoundRequest, Request, RequestErrors, Tail};
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::names::SALTS;
use kvferry_session::pairing::{Direction, PairingError};

use crate::answer::Descriptors;
use crate::blocks::{Ask, Free, NoRoom};
use crate::scenario::Scenario;

/// What goes from one rank to another for one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// P's rank.
    pub src: u32,
    /// D's rank.
    pub dst: u32,
    /// Bytes.
    pub bytes: u64,
    /// Descriptors that a transport is given.
    pub descriptors: u64,
}

/// Why nothing can be said of a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrafficError {
    /// D can't take over what P has.
    #[error("D cannot take over P's cache: {0}")]
    Mismatch(#[from] Mismatches),
    /// There is no map of peers or no plan.
    #[error(transparent)]
    Pairing(#[from] PairingError),
    /// The request can't be served.
    #[error(transparent)]
    Request(#[from] RequestErrors),
    /// It does not fit into an engine, even if that has nothing else to do.
    #[error("{side}: {error}")]
    NoRoom {
        /// Whose blocks.
        side: &'static str,
        /// The group.
        error: NoRoom,
    },
}

/// The plans of two kinds of engines, for requests whose blocks lie as those of an engine with nothing else to do.
#[derive(Debug)]
pub struct Traffic {
    direction: Direction,
    sides: (Arc<Manifest>, Arc<Manifest>),
    stripe: bool,
    free: (Free, Free),
    known: BTreeMap<(u64, u64, u64), Vec<Part>>,
}

/// The most requests whose parts are remembered.
const KNOWN: usize = 65_536;
/// The most descriptors of a request that are measured one by one.
const MEASURED: u64 = 1 << 20;

impl Traffic {
    /// That of a scenario's engines.
    ///
    /// # Errors
    /// All mismatches.
    pub fn new(scenario: &Scenario) -> Result<Self, TrafficError> {
        let (src, dst) = (&scenario.prefill.manifest, &scenario.decode.manifest);
        let direction = match Direction::new(src.clone(), dst.clone(), scenario.transfer.compat) {
            Err(PairingError::Mismatch(mismatches)) => return Err(mismatches.into()),
            other => other?,
        };
        let free = (Free::new(src, |_, _| {}), Free::new(dst, |_, _| {}));
        let sides = (src.clone(), dst.clone());
        Ok(Self { direction, sides, stripe: scenario.transfer.stripe, free, known: BTreeMap::new() })
    }

    fn options(&self, salt: u64) -> PeerOptions {
        PeerOptions { salt: salt % SALTS, stripe: self.stripe }
    }

    /// A request of so many tokens, of which D has so many.
    fn bind(&mut self, tokens: u64, cached: u64) -> Result<BoundRequest, TrafficError> {
        let (src, dst) = &self.sides;
        let ask = Ask { tokens, states: 1 };
        let from = self.free.0.take(src, ask).map_err(|error| TrafficError::NoRoom { side: "prefill", error })?;
        let to = self.free.1.take(dst, ask);
        self.free.0.give(&from);
        let to = to.map_err(|error| TrafficError::NoRoom { side: "decode", error })?;
        self.free.1.give(&to);
        let request = Request {
            tokens: Tokens::new(tokens),
            src: ask.src(src, &from, Tail::Exact),
            dst: ask.dst(dst, &to, cached, 0),
        };
        Ok(BoundRequest::new(self.direction.compatible(), request)?)
    }

    fn batches(
        &mut self,
        salt: u64,
        bound: &BoundRequest,
        mut visit: impl FnMut(RankId, RankId, &Batch, u64),
    ) -> Result<(), TrafficError> {
        let options = self.options(salt);
        let map = self.direction.map(options)?;
        for pair in map.pairs() {
            let plan = self.direction.plan(options, pair.src(), pair.dst())?;
            let batch = plan.resolve(bound).map_err(PairingError::from)?;
            if !batch.is_empty() {
                visit(pair.src(), pair.dst(), &batch, plan.uncoalesced(bound).map_err(PairingError::from)?);
            }
        }
        Ok(())
    }

    /// What a request moves, by destination, then source. `salt` decides between replicas, as a lease's number does.
    ///
    /// # Errors
    /// If it can't be served.
    pub fn of(&mut self, salt: u64, tokens: u64, cached: u64) -> Result<&[Part], TrafficError> {
        let key = (salt % SALTS, tokens, cached);
        if !self.known.contains_key(&key) {
            let bound = self.bind(tokens, cached)?;
            let mut parts = Vec::new();
            self.batches(salt, &bound, |src, dst, batch, _| {
                let (bytes, descriptors) = (batch.bytes().get(), batch.descriptors());
                parts.push(Part { src: src.get(), dst: dst.get(), bytes, descriptors });
            })?;
            if self.known.len() >= KNOWN {
                self.known.clear();
            }
            self.known.insert(key, parts);
        }
        Ok(self.known.get(&key).map_or(&[], Vec::as_slice))
    }

    /// Adds the sizes of a request's descriptors.
    ///
    /// # Errors
    /// If it can't be served.
    pub fn measure(&mut self, salt: u64, tokens: u64, cached: u64, into: &mut Sizes) -> Result<(), TrafficError> {
        let bound = self.bind(tokens, cached)?;
        into.requests += 1;
        self.batches(salt, &bound, |_, _, batch, before| {
            let bytes = batch.bytes().get();
            into.add_before(bytes / before.max(1), before);
            if batch.descriptors() > MEASURED {
                return into.add_after(bytes / batch.descriptors().max(1), batch.descriptors());
            }
            let (mut cursor, mut buffer) = (batch.cursor(), vec![Descriptor::default(); 1024]);
            loop {
                let filled = cursor.fill(&mut buffer);
                let Some(some) = buffer.get(..filled).filter(|b| !b.is_empty()) else { return };
                some.iter().for_each(|d| into.add_after(d.len, 1));
            }
        })
    }
}

/// How many descriptors there are of which size, by powers of two.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    requests: u64,
    before: BTreeMap<u32, u64>,
    after: BTreeMap<u32, u64>,
}

impl Sizes {
    fn power(size: u64) -> u32 {
        size.max(1).next_power_of_two().trailing_zeros()
    }

    fn add_before(&mut self, size: u64, count: u64) {
        *self.before.entry(Self::power(size)).or_default() += count;
    }

    fn add_after(&mut self, size: u64, count: u64) {
        *self.after.entry(Self::power(size)).or_default() += count;
    }

    /// Without gaps, from the smallest to the largest.
    #[must_use]
    pub fn descriptors(&self) -> Descriptors {
        let keys = || self.before.keys().chain(self.after.keys()).copied();
        let (Some(low), Some(high)) = (keys().min(), keys().max()) else { return Descriptors::default() };
        let of = |map: &BTreeMap<u32, u64>| (low..=high).map(|k| map.get(&k).copied().unwrap_or(0)).collect();
        Descriptors {
            requests: self.requests,
            sizes: (low..=high).map(|k| 1u64.checked_shl(k).unwrap_or(u64::MAX)).collect(),
            before: of(&self.before),
            after: of(&self.after),
        }
    }
}
