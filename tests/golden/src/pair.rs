//! A producer and a consumer that can talk, and what we plan for them.

use std::sync::Arc;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::peers::{PeerMap, PeerOptions};

use crate::blocks::Lists;
use crate::contents::{Names, contents, rows};
use crate::engine::{Engine, EngineError};
use crate::ours::{Refusal, planned};
use crate::relation::{ContentMap, Piece, Relation, compare};
use crate::same::{Consumer, needs};
use crate::schema::{Rank, Record, SideName};

/// Bytes of both engines' caches that the oracle fills.
const MAX_PROOF: u64 = 16 << 20;
/// Tokens of the longest block that it walks.
const MAX_PROOF_BLOCK: u64 = 1 << 20;

/// Both engines.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The producer.
    pub src: Engine,
    /// The consumer.
    pub dst: Engine,
    compatible: Compatible,
}

/// Why there is no pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoPair {
    /// kvferry's reason.
    Refused(String),
    /// The record can't be read.
    Record(String),
}

impl Pair {
    /// Rebuilds both engines from their ranks.
    ///
    /// # Errors
    /// What kvferry refuses, or what the record lacks.
    pub fn new(record: &Record, src: &[Rank], dst: &[Rank]) -> Result<Self, NoPair> {
        let scenario = &record.scenario;
        let no = |side: &str, e: EngineError| match e {
            EngineError::Spec(_) | EngineError::Manifest(_) => NoPair::Refused(format!("{side}: {e}")),
            _ => NoPair::Record(format!("{side}: {e}")),
        };
        let src = Engine::new(&scenario.model, &scenario.prefill, src).map_err(|e| no("producer", e))?;
        let dst = Engine::new(&scenario.model, &scenario.decode, dst).map_err(|e| no("consumer", e))?;
        let compatible = Compatible::new(Arc::new(src.manifest.clone()), Arc::new(dst.manifest.clone()))
            .map_err(|e| NoPair::Refused(e.to_string()))?;
        Ok(Self { src, dst, compatible })
    }

    /// Where a request's contents lie on each rank of the producer or the consumer.
    ///
    /// # Errors
    /// In words, what of it can't be listed.
    pub fn contents(&self, side: SideName, lists: &Lists, id: &str) -> Result<Vec<ContentMap>, String> {
        self.some_contents(side, lists, id, &|_, _| true)
    }

    /// A request's blocks on each rank of the consumer.
    ///
    /// # Errors
    /// In words, what of them can't be listed.
    pub fn consumers(&self, lists: &Lists, id: &str) -> Result<Vec<Consumer>, String> {
        let contents = self.contents(SideName::Decode, lists, id)?.into_iter().enumerate();
        let whole = contents.map(|(rank, contents)| Consumer { contents, rows: rows(&self.dst, rank, &lists.dst) });
        Ok(whole.collect())
    }

    fn some_contents(
        &self,
        side: SideName,
        lists: &Lists,
        id: &str,
        keep: &dyn Fn(usize, u64) -> bool,
    ) -> Result<Vec<ContentMap>, String> {
        let names = Names::new(&self.src.manifest);
        let (engine, lists) = match side {
            SideName::Prefill => (&self.src, &lists.src),
            SideName::Decode => (&self.dst, &lists.dst),
        };
        let of = |rank| contents(engine, &names, rank, lists, id, keep);
        (0..engine.bases.len()).map(of).collect::<Result<_, _>>().map_err(|e| e.to_string())
    }

    /// Our relation. Whichever replicas are read, it must be what the consumer needs by its own layout: no byte less, more
    /// or twice.
    ///
    /// # Errors
    /// In words, what of it is not so. The inner error is a refusal.
    pub fn exact(&self, lists: &Lists, id: &str) -> Result<Result<Relation, Refusal>, String> {
        let salt = salt(id);
        let mut relation = None;
        for options in [(salt, false), (!salt, false), (salt, true)] {
            let options = PeerOptions { salt: options.0, stripe: options.1 };
            let runs = match planned(&self.compatible, &self.src, &self.dst, lists, options) {
                Ok(runs) => runs,
                Err(refusal) => return Ok(Err(refusal)),
            };
            // The request is bound now, so that every listed block exists.
            let producers = self.contents(SideName::Prefill, lists, id)?;
            let ours = Relation::new(&runs, &producers);
            self.is_exact(&ours, lists, id).map_err(|why| format!("kvferry, with {options:?}, {why}"))?;
            relation = Some(ours);
        }
        relation.map(Ok).ok_or_else(|| "nothing was planned".to_owned())
    }

    fn is_exact(&self, ours: &Relation, lists: &Lists, id: &str) -> Result<(), String> {
        let needs = needs(&self.src, &self.dst, lists);
        let keep = |item: usize, byte: u64| needs.get(item).copied().flatten().is_some_and(|n| n.has(byte));
        let wanted = Relation::of_contents(&self.some_contents(SideName::Decode, lists, id, &keep)?);
        let diff = compare(ours, &wanted);
        let tell = |what: &str, p: &Piece| {
            format!("{what}: rank {}, address {:#x}, {} B, {}", p.rank, p.addr, p.len, p.content.words(&self.src))
        };
        if let Some(p) = diff.first_only.first() {
            return Err(tell("moves what is not needed", p));
        }
        if let Some(p) = diff.second_only.first() {
            return Err(tell("leaves out what is needed", p));
        }
        if let Some((p, _)) = diff.unequal.first() {
            return Err(tell("moves to a wrong place", p));
        }
        if ours.repeated > 0 || !ours.contradictions.is_empty() {
            return Err(format!("moves {} bytes twice", ours.repeated));
        }
        Ok(())
    }

    /// Fills both engines' memory, moves, and compares every byte; gives the bytes that moved. `None` where the caches are
    /// too large for that.
    ///
    /// # Errors
    /// What the oracle finds, in words.
    pub fn prove(&self, lists: &Lists, id: &str) -> Result<Option<u64>, String> {
        let (src, dst) = (&self.src.manifest, &self.dst.manifest);
        let regions = src.ranks().iter().chain(dst.ranks()).flat_map(|r| &r.layout.regions);
        let bytes = regions.fold(0u64, |sum, r| sum.saturating_add(r.len.get()));
        // It keeps a word for each token of a block.
        let longest = src.groups().iter().chain(dst.groups()).map(|g| g.block_tokens.get()).max().unwrap_or(0);
        if bytes > MAX_PROOF || longest > MAX_PROOF_BLOCK {
            return Ok(None);
        }
        let peers = PeerMap::new(&self.compatible, salt(id)).map_err(|e| e.to_string())?;
        let outcome = kvferry_oracle::prove(&self.compatible, &peers, &lists.request());
        Ok(Some(outcome.map_err(|e| format!("the oracle: {e}"))?.verdict.moved))
    }
}

/// Any number that differs between requests: it chooses among replicas, which must make no difference.
fn salt(id: &str) -> u64 {
    id.bytes().fold(7, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)))
}
