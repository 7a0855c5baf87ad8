//! Which coordinates each rank holds, as data: for every paged item a head interval and a token class, for every part of a
//! state item an interval of its units.
//!
//! Nothing past this module is derived from `(tp, rank)`. The usual rules are helpers that write the data:
//! [`split_heads`], [`TokenClass`], and [`Parallelism`] for whole engines. An engine whose placement follows another
//! rule writes its own.
//!
//! ```
//! use kvferry_geometry::placement::{HeadRange, split_heads};
//! assert_eq!(split_heads(8, 6, 1), HeadRange::new(1, 2).unwrap());  // 8 heads on 6 ranks: 1, 1, 2, 1, 1, 2
//! assert_eq!(split_heads(8, 6, 2), HeadRange::new(2, 4).unwrap());
//! assert_eq!(split_heads(4, 8, 5), HeadRange::new(2, 3).unwrap());  // replicated: ranks 4 and 5 hold head 2
//! ```

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use crate::spec::{Item, ItemKind, ModelSpec};
use crate::units::{ItemId, Name, RankId, Tokens};

/// The most ranks an engine can have.
pub const MAX_RANKS: u32 = 1 << 14;
/// The most placements of an engine, ranks times items, so that a few bytes that announce many of both are refused before
/// anything of that size is made.
pub const MAX_PLACEMENTS: usize = 1 << 18;
/// The largest context-parallel factor.
pub const MAX_CONTEXT: u32 = 1 << 10;

/// A non-empty interval `[start, end)` of KV heads, or of the units of a state's part.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeadRange {
    start: u32,
    end: u32,
}

impl HeadRange {
    /// The interval, or `None` where it is empty.
    #[must_use]
    pub const fn new(start: u32, end: u32) -> Option<Self> {
        if start < end { Some(Self { start, end }) } else { None }
    }

    /// First head.
    #[must_use]
    pub const fn start(self) -> u32 {
        self.start
    }

    /// One past the last head.
    #[must_use]
    pub const fn end(self) -> u32 {
        self.end
    }

    /// How many heads, at least 1.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.end - self.start
    }

    /// Whether all heads of `other` are in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl fmt::Display for HeadRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}

impl fmt::Debug for HeadRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The tokens that one index of `count` holds when tokens are dealt out `interleave` at a time.
///
/// Token `t` lives on index `(t / I) mod c`, there at local position `(t / (I·c))·I + t mod I`. With `c = 1` one index
/// holds all tokens in order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct TokenClass {
    count: u32,
    interleave: u32,
    index: u32,
}

impl TokenClass {
    /// All tokens.
    pub const ALL: Self = Self { count: 1, interleave: 1, index: 0 };

    /// The class `index` of `count`, or `None` where `count` or `interleave` is 0 or too large, or `index >= count`.
    #[must_use]
    pub const fn new(count: u32, interleave: u32, index: u32) -> Option<Self> {
        if count == 0 || count > MAX_CONTEXT || interleave == 0 || interleave > 1 << 20 || index >= count {
            return None;
        }
        // One holder of everything deals nothing out, whatever the interleave.
        if count == 1 { Some(Self::ALL) } else { Some(Self { count, interleave, index }) }
    }

    /// How many indices share the tokens.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Tokens dealt out at a time; 1 where `count` is 1.
    #[must_use]
    pub const fn interleave(self) -> u32 {
        self.interleave
    }

    /// Which of the indices this is.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Tokens after which the pattern repeats: `count * interleave`.
    #[must_use]
    pub const fn period(self) -> u64 {
        self.count as u64 * self.interleave as u64
    }

    /// Whether the class holds token `t`.
    #[must_use]
    pub const fn holds(self, t: Tokens) -> bool {
        (t.get() / self.interleave as u64) % self.count as u64 == self.index as u64
    }

    /// The local position of token `t`, for a `t` that the class holds.
    #[must_use]
    pub const fn local(self, t: Tokens) -> u64 {
        let (i, t) = (self.interleave as u64, t.get());
        t / self.period() * i + t % i
    }
}

impl fmt::Display for TokenClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 1 {
            return f.write_str("all tokens");
        }
        write!(f, "tokens {} of {}, {} at a time", self.index, self.count, self.interleave)
    }
}

/// What one rank holds of a paged item.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct PagedPlacement {
    /// Which heads.
    pub heads: HeadRange,
    /// Which tokens.
    pub tokens: TokenClass,
}

/// What one rank holds of a state item.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct StatePlacement {
    /// Which units of every part, in the order of the rank's own spec.
    pub parts: Vec<HeadRange>,
}

/// What one rank holds of one item.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Placement {
    /// Of a paged item.
    Paged(PagedPlacement),
    /// Of a state item.
    State(StatePlacement),
}

impl Placement {
    /// Of a paged item.
    #[must_use]
    pub fn paged(heads: HeadRange, tokens: TokenClass) -> Self {
        Self::Paged(PagedPlacement { heads, tokens })
    }

    /// Of a state item.
    #[must_use]
    pub fn state(parts: Vec<HeadRange>) -> Self {
        Self::State(StatePlacement { parts })
    }

    /// The placement, of a paged item.
    #[must_use]
    pub fn as_paged(&self) -> Option<&PagedPlacement> {
        match self {
            Self::Paged(p) => Some(p),
            Self::State(_) => None,
        }
    }

    /// The placement, of a state item.
    #[must_use]
    pub fn as_state(&self) -> Option<&StatePlacement> {
        match self {
            Self::Paged(_) => None,
            Self::State(s) => Some(s),
        }
    }

    /// What is held along one axis of the item (see [`Item::axes`]): a state holds all tokens.
    pub(crate) fn axis(&self, axis: usize) -> Option<PagedPlacement> {
        match self {
            Self::Paged(p) => (axis == 0).then_some(*p),
            Self::State(s) => s.parts.get(axis).map(|&heads| PagedPlacement { heads, tokens: TokenClass::ALL }),
        }
    }
}

/// What one rank holds: for each item of the spec, by id, its placement, or `None` where the rank doesn't own it.
pub type RankPlacement = Vec<Option<Placement>>;

/// The heads of rank `rank` of `tp` by the usual rule.
///
/// `heads >= tp`: heads `⌊r·H/tp⌋` up to `⌊(r+1)·H/tp⌋`. `heads < tp`: head `⌊r·H/tp⌋`, which several ranks hold.
/// `heads` and `tp` are at least 1 and `rank < tp` (a zero counts as 1, a larger rank as the last).
#[must_use]
pub fn split_heads(heads: u32, tp: u32, rank: u32) -> HeadRange {
    let (h, tp) = (u64::from(heads.max(1)), u64::from(tp.max(1)));
    let r = u64::from(rank).min(tp - 1);
    let start = r * h / tp;
    let end = if h >= tp { (r + 1) * h / tp } else { start + 1 };
    // Both are at most `heads`.
    HeadRange { start: u32::try_from(start).unwrap_or(u32::MAX), end: u32::try_from(end).unwrap_or(u32::MAX) }
}

/// How the heads of a paged item, or the units of a state's part, are spread over tensor-parallel ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HeadRule {
    /// [`split_heads`]; a single head (an MLA latent) is thereby on every rank.
    Split,
    /// All of them on every rank.
    Whole,
    /// [`split_heads`] over blocks of so many, which stay together: the channels of one head, say. It divides their number.
    Blocks(u32),
}

impl HeadRule {
    /// What rank `rank` of `tp` holds of `total`, or `None` where blocks don't divide them.
    #[must_use]
    pub fn of(self, total: u32, tp: u32, rank: u32) -> Option<HeadRange> {
        match self {
            Self::Split => Some(split_heads(total, tp, rank)),
            Self::Whole => Some(split_heads(total, 1, 0)),
            Self::Blocks(size) => {
                let blocks = total.checked_div(size).filter(|b| b.checked_mul(size) == Some(total))?;
                let range = split_heads(blocks, tp, rank);
                HeadRange::new(range.start * size, range.end * size)
            }
        }
    }
}

/// What prefill context parallelism does to the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PcpMode {
    /// Each PCP rank keeps its share of the tokens.
    Shard,
    /// Every PCP rank keeps all tokens of its DCP class.
    Replicate,
}

/// The usual parallel dimensions of an engine, from which [`Parallelism::place`] writes every rank's placement.
///
/// Ranks are numbered `((stage · pcp) + pcp_rank) · tp + tp_rank`. DCP re-uses the TP ranks: a rank's DCP index is
/// `tp_rank mod dcp`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parallelism {
    /// Tensor parallel size, at least 1.
    pub tp: u32,
    /// Decode context parallel size, at least 1; it divides `tp`.
    pub dcp: u32,
    /// Prefill context parallel size, at least 1.
    pub pcp: u32,
    /// What PCP does to the cache.
    pub pcp_mode: PcpMode,
    /// Tokens dealt out at a time between context-parallel ranks.
    pub interleave: u32,
    /// Pipeline stages: the items that each stage owns. An item on two stages is on both.
    pub stages: Vec<Vec<ItemId>>,
}

/// A rank's place in its engine's parallel dimensions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RankCoordinates {
    /// Pipeline stage.
    pub pp: u32,
    /// Prefill context-parallel rank.
    pub pcp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
}

impl fmt::Display for RankCoordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pp{}/pcp{}/tp{}", self.pp, self.pcp, self.tp)
    }
}

/// A fault of a [`Parallelism`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelismError {
    /// A size outside its range.
    #[error("{what} is {got}; it must be 1 to {limit}")]
    OutOfRange {
        /// Which size.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest value allowed.
        limit: u64,
    },
    /// DCP re-uses TP ranks and so must divide them.
    #[error("dcp {dcp} does not divide tp {tp}; choose a dcp that does, since it re-uses the tensor-parallel ranks")]
    DcpNotInTp {
        /// DCP size.
        dcp: u32,
        /// TP size.
        tp: u32,
    },
    /// A stage names an item that the spec lacks.
    #[error("stage {stage} owns item id {item}, but the model has {items} items")]
    UnknownItem {
        /// The stage.
        stage: usize,
        /// The id.
        item: ItemId,
        /// Items of the model.
        items: usize,
    },
    /// A rule's blocks don't divide what they are made of.
    #[error("item {item}: {rule:?} does not divide its {total} heads or units")]
    Blocks {
        /// The item.
        item: Name,
        /// The rule.
        rule: HeadRule,
        /// Heads of the item, or units of the part.
        total: u32,
    },
    /// A stage lists an item twice.
    #[error("stage {stage} lists item {item} twice")]
    RepeatedItem {
        /// The stage.
        stage: usize,
        /// The item's name.
        item: Name,
    },
}

impl Parallelism {
    /// Tensor parallelism alone, over all items of `spec`.
    #[must_use]
    pub fn tensor(spec: &ModelSpec, tp: u32) -> Self {
        Self {
            tp,
            dcp: 1,
            pcp: 1,
            pcp_mode: PcpMode::Replicate,
            interleave: 1,
            stages: vec![spec.iter().map(|(id, _)| id).collect()],
        }
    }

    /// How many ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        let stages = u32::try_from(self.stages.len()).unwrap_or(u32::MAX);
        self.tp.saturating_mul(self.pcp).saturating_mul(stages)
    }

    /// How many indices share the tokens: `pcp·dcp` when PCP shards, else `dcp`.
    #[must_use]
    pub fn context(&self) -> u32 {
        match self.pcp_mode {
            PcpMode::Shard => self.pcp.saturating_mul(self.dcp),
            PcpMode::Replicate => self.dcp,
        }
    }

    /// The coordinates of a rank.
    #[must_use]
    pub fn coordinates(&self, rank: RankId) -> RankCoordinates {
        let (tp, pcp) = (self.tp.max(1), self.pcp.max(1));
        RankCoordinates { tp: rank.get() % tp, pcp: rank.get() / tp % pcp, pp: rank.get() / tp / pcp }
    }

    /// Every rank's placement. `rule` is asked for every paged item, with 0, and for every part of a state item, with its index.
    /// States hold all tokens: every context-parallel rank has a copy.
    ///
    /// # Errors
    /// All faults of the sizes and stages. Whether the ranks together hold everything is not asked here: a
    /// [`Manifest`](crate::manifest::Manifest) checks that.
    pub fn place(
        &self,
        spec: &ModelSpec,
        rule: impl Fn(&Item, usize) -> HeadRule,
    ) -> Result<Vec<RankPlacement>, Vec<ParallelismError>> {
        self.check(spec)?;
        let mut ranks = Vec::new();
        for stage in &self.stages {
            for pcp in 0..self.pcp {
                for tp in 0..self.tp {
                    let tokens = self.tokens(pcp, tp);
                    let mut placement: RankPlacement = vec![None; spec.items().len()];
                    for &id in stage {
                        let Some(item) = spec.get(id) else { continue };
                        let range = |(axis, total)| {
                            let faulty =
                                || ParallelismError::Blocks { item: item.name.clone(), rule: rule(item, axis), total };
                            rule(item, axis).of(total, self.tp, tp).ok_or_else(|| vec![faulty()])
                        };
                        let parts = item.axes().enumerate().map(range).collect::<Result<Vec<HeadRange>, _>>()?;
                        placement[id.index()] = match (&item.kind, parts.first()) {
                            (ItemKind::Paged(_), Some(&heads)) => Some(Placement::paged(heads, tokens)),
                            _ => Some(Placement::state(parts)),
                        };
                    }
                    ranks.push(placement);
                }
            }
        }
        Ok(ranks)
    }

    fn tokens(&self, pcp: u32, tp: u32) -> TokenClass {
        let dcp = tp % self.dcp;
        let index = match self.pcp_mode {
            PcpMode::Shard => pcp * self.dcp + dcp,
            PcpMode::Replicate => dcp,
        };
        // In range: `check` has passed.
        TokenClass::new(self.context(), self.interleave, index).unwrap_or(TokenClass::ALL)
    }

    fn check(&self, spec: &ModelSpec) -> Result<(), Vec<ParallelismError>> {
        let mut errors = Vec::new();
        let mut range = |what, got: u64, limit: u64| {
            if got == 0 || got > limit {
                errors.push(ParallelismError::OutOfRange { what, got, limit });
            }
        };
        range("tp", u64::from(self.tp), u64::from(MAX_RANKS));
        range("dcp", u64::from(self.dcp), u64::from(MAX_CONTEXT));
        range("pcp", u64::from(self.pcp), u64::from(MAX_CONTEXT));
        range("context size (pcp x dcp)", u64::from(self.pcp) * u64::from(self.dcp), u64::from(MAX_CONTEXT));
        range("interleave", u64::from(self.interleave), 1 << 20);
        range("pp", self.stages.len() as u64, u64::from(MAX_RANKS));
        range("ranks", u64::from(self.ranks()), u64::from(MAX_RANKS));
        let placements = u64::from(self.ranks()) * spec.items().len() as u64;
        range("ranks times items", placements, MAX_PLACEMENTS as u64);
        if self.dcp > 0 && !self.tp.is_multiple_of(self.dcp) {
            errors.push(ParallelismError::DcpNotInTp { dcp: self.dcp, tp: self.tp });
        }
        for (stage, ids) in self.stages.iter().enumerate() {
            let mut seen = vec![false; spec.items().len()];
            for &item in ids {
                match (spec.get(item), seen.get_mut(item.index())) {
                    (Some(found), Some(seen)) => {
                        if core::mem::replace(seen, true) {
                            errors.push(ParallelismError::RepeatedItem { stage, item: found.name.clone() });
                        }
                    }
                    _ => errors.push(ParallelismError::UnknownItem { stage, item, items: spec.items().len() }),
                }
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
