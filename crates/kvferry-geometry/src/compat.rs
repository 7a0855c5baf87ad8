//! Can two engines talk? They can when they cache the same items.
//!
//! What must agree, by item name: heads, retention, and components by name with width, span and encoding; of states, parts by
//! name with units, rows, width and encoding. What may differ is not compared: parallelism, block sizes, layouts, groups, the
//! order of items and of components. One thing of the placement must agree: where one value stands for all heads of a rank
//! (a scale for a whole block), both engines must cut the heads alike. Items that only one engine has are mismatches unless
//! the caller says that they are none of the transfer's business ([`CompatOptions`]). Model identity (equal weights) is the
//! handshake's question, not geometry's.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::placement::HeadRange;
use crate::spec::{Component, Item, ItemKind, PagedItem, Retention, StateItem, ValueHeads, write_list};
use crate::token_set::lcm;
use crate::units::{Bytes, GroupId, ItemId, Name};

/// One way in which two engines differ that can't be bridged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The source lacks an item.
    #[error(
        "item {item}: the destination needs it ({shape}), the source has no item of that name; \
         ignore items that only the destination has, where it can do without"
    )]
    MissingAtSource {
        /// The item.
        item: Name,
        /// What the destination says of it.
        shape: String,
    },
    /// The destination lacks an item.
    #[error(
        "item {item}: the source holds it ({shape}), the destination has no item of that name; \
         ignore items that only the source has, where that is meant"
    )]
    MissingAtDestination {
        /// The item.
        item: Name,
        /// What the source says of it.
        shape: String,
    },
    /// Not one item of the destination is one of the source's.
    #[error(
        "item {item}, and all others of the destination's {dst}: none is among the source's {src}; these are different models"
    )]
    NothingInCommon {
        /// The destination's first item.
        item: Name,
        /// Items of the source.
        src: usize,
        /// Items of the destination.
        dst: usize,
    },
    /// A paged item on one side, a state on the other.
    #[error("item {item}: source has {src}, destination {dst}")]
    Kind {
        /// The item.
        item: Name,
        /// What the source says of it.
        src: String,
        /// What the destination says of it.
        dst: String,
    },
    /// A number of the whole model differs.
    #[error("item {item}: source has {src} {what}, destination {dst}; both must serve the same model")]
    Count {
        /// The item.
        item: Name,
        /// What is counted, of which component or part.
        what: String,
        /// At the source.
        src: u64,
        /// At the destination.
        dst: u64,
    },
    /// One value covers another number of entries, or other heads.
    #[error(
        "item {item}: one value of component {component} covers {src} at the source, {dst} at the destination; \
         a value can't be split or joined, so use the same scale granularity (and block size) on both"
    )]
    Coverage {
        /// The item.
        item: Name,
        /// The component or part.
        component: Name,
        /// What a value covers at the source.
        src: String,
        /// What a value covers at the destination.
        dst: String,
    },
    /// One value stands for all heads of a rank, and the engines cut the heads in different places.
    #[error(
        "item {item}: component {component} has one value for all heads of a rank, which can't be re-sharded: \
         source ranks hold heads {src:?}, destination ranks {dst:?}; use one tensor-parallel size, or scales for each head"
    )]
    SharedValue {
        /// The item.
        item: Name,
        /// The component or part.
        component: Name,
        /// The intervals of the source's ranks.
        src: Vec<HeadRange>,
        /// The intervals of the destination's ranks.
        dst: Vec<HeadRange>,
    },
    /// Retention differs.
    #[error("item {item}: source keeps {src}, destination {dst}; set the same window or chunk on both")]
    Retention {
        /// The item.
        item: Name,
        /// At the source.
        src: Retention,
        /// At the destination.
        dst: Retention,
    },
    /// A component or part only one side has.
    #[error("item {item}: source has components or parts {src:?}, destination {dst:?}")]
    Components {
        /// The item.
        item: Name,
        /// At the source, sorted.
        src: Vec<Name>,
        /// At the destination, sorted.
        dst: Vec<Name>,
    },
    /// The width of a component or part differs.
    #[error("item {item}: component {component} is {src} wide at the source, {dst} at the destination (each value)")]
    Width {
        /// The item.
        item: Name,
        /// The component or part.
        component: Name,
        /// At the source.
        src: Bytes,
        /// At the destination.
        dst: Bytes,
    },
    /// The encoding of a component or part differs.
    #[error(
        "item {item}: component {component} is encoded as {src} at the source, {dst} at the destination; \
         use one KV cache type on both, no conversion is done"
    )]
    Encoding {
        /// The item.
        item: Name,
        /// The component or part.
        component: Name,
        /// At the source.
        src: Name,
        /// At the destination.
        dst: Name,
    },
}

impl Mismatch {
    /// The item that differs.
    #[must_use]
    pub fn item(&self) -> &Name {
        match self {
            Self::MissingAtSource { item, .. }
            | Self::MissingAtDestination { item, .. }
            | Self::NothingInCommon { item, .. }
            | Self::Kind { item, .. }
            | Self::Count { item, .. }
            | Self::Coverage { item, .. }
            | Self::SharedValue { item, .. }
            | Self::Retention { item, .. }
            | Self::Components { item, .. }
            | Self::Width { item, .. }
            | Self::Encoding { item, .. } => item,
        }
    }
}

/// Every mismatch between two engines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatches(pub Vec<Mismatch>);

impl fmt::Display for Mismatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, &self.0)
    }
}
impl core::error::Error for Mismatches {}

/// What becomes of items that only one engine has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Unmatched {
    /// They are a mismatch.
    #[default]
    Refuse,
    /// They don't move: the cache of a draft model that one engine runs alone, say.
    Ignore,
}

/// What the caller lets pass. Both engines must be asked with the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct CompatOptions {
    /// Items that only the source has.
    pub source_only: Unmatched,
    /// Items that only the destination has: it goes on without their bytes.
    pub destination_only: Unmatched,
}

/// Two engines whose caches hold the same items; `src` is read, `dst` is written.
#[derive(Clone, Debug)]
pub struct Compatible {
    src: Arc<Manifest>,
    dst: Arc<Manifest>,
    /// By destination item; `None` where the source lacks it.
    src_item: Vec<Option<ItemId>>,
    /// Destination items without one.
    unmatched: Arc<[ItemId]>,
    /// What groups share, sorted.
    links: Vec<Link>,
}

/// Items of one source group and one destination group that keep the same tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Link {
    pub(crate) src: GroupId,
    pub(crate) dst: GroupId,
    /// `None` for states.
    pub(crate) retention: Option<Retention>,
    /// The least common multiple of the tokens of values that cover several entries; 1 where none does.
    pub(crate) span: u64,
}

impl Compatible {
    /// Compares two engines, item by item and by name.
    ///
    /// # Errors
    /// All mismatches at once.
    pub fn new(src: Arc<Manifest>, dst: Arc<Manifest>) -> Result<Self, Mismatches> {
        Self::with(src, dst, CompatOptions::default())
    }

    /// The same with a say in what may pass.
    ///
    /// # Errors
    /// All mismatches at once.
    pub fn with(src: Arc<Manifest>, dst: Arc<Manifest>, options: CompatOptions) -> Result<Self, Mismatches> {
        let mut errors = Vec::new();
        let mut src_item = Vec::new();
        for (id, wanted) in dst.spec().iter() {
            let found = src.spec().find(&wanted.name).and_then(|id| Some((id, src.spec().get(id)?)));
            if let Some((src_id, held)) = found {
                compare(held, wanted, &mut errors);
                if held.as_paged().is_some() {
                    check_shared(wanted, (&src, src_id), (&dst, id), &mut errors);
                }
            } else if options.destination_only == Unmatched::Refuse {
                let (item, shape) = (wanted.name.clone(), crate::spec::describe(wanted));
                errors.push(Mismatch::MissingAtSource { item, shape });
            }
            src_item.push(found.map(|f| f.0));
        }
        for held in src.spec().items() {
            if dst.spec().find(&held.name).is_none() && options.source_only == Unmatched::Refuse {
                let (item, shape) = (held.name.clone(), crate::spec::describe(held));
                errors.push(Mismatch::MissingAtDestination { item, shape });
            }
        }
        if let (true, Some(first)) = (src_item.iter().all(Option::is_none), dst.spec().items().first()) {
            let (src, dst) = (src.spec().items().len(), dst.spec().items().len());
            errors.push(Mismatch::NothingInCommon { item: first.name.clone(), src, dst });
        }
        if !errors.is_empty() {
            return Err(Mismatches(errors));
        }
        let mut links: BTreeMap<(GroupId, GroupId, Option<Retention>), u64> = BTreeMap::new();
        for ((id, item), src_id) in dst.spec().iter().zip(&src_item) {
            let Some(src_id) = src_id else { continue };
            let paged = item.as_paged();
            let spans = paged
                .into_iter()
                .flat_map(|p| p.components.iter().filter(|c| c.span > 1).map(|c| p.tokens_per_value(c)));
            let key = (src.group_of(*src_id), dst.group_of(id), paged.map(|p| p.retention));
            let known = links.entry(key).or_insert(1);
            // A hit must be whole in every one of them.
            *known = spans.fold(*known, |all, span| lcm(all, span).unwrap_or(u64::MAX));
        }
        let link = |((src, dst, retention), span)| Link { src, dst, retention, span };
        let unmatched = dst.spec().iter().zip(&src_item).filter(|(_, s)| s.is_none()).map(|((id, _), _)| id).collect();
        Ok(Self { src, dst, src_item, unmatched, links: links.into_iter().map(link).collect() })
    }

    /// The engine that is read.
    #[must_use]
    pub fn src(&self) -> &Manifest {
        &self.src
    }

    /// The engine that is written.
    #[must_use]
    pub fn dst(&self) -> &Manifest {
        &self.dst
    }

    /// The digests of both manifests.
    pub(crate) fn digests(&self) -> (Digest, Digest) {
        (self.src.digest(), self.dst.digest())
    }

    /// Destination items that the source doesn't have.
    pub(crate) fn unmatched(&self) -> Arc<[ItemId]> {
        Arc::clone(&self.unmatched)
    }

    /// What groups of the two engines share.
    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    /// The source's id of a destination's item; `None` where the source lacks it.
    #[must_use]
    pub fn src_item(&self, dst: ItemId) -> Option<ItemId> {
        self.src_item.get(dst.index()).copied().flatten()
    }
}

fn compare(src: &Item, dst: &Item, errors: &mut Vec<Mismatch>) {
    match (&src.kind, &dst.kind) {
        (ItemKind::Paged(s), ItemKind::Paged(d)) => compare_paged(&dst.name, s, d, errors),
        (ItemKind::State(s), ItemKind::State(d)) => compare_states(&dst.name, s, d, errors),
        _ => {
            let (src, dst_shape) = (crate::spec::describe(src), crate::spec::describe(dst));
            errors.push(Mismatch::Kind { item: dst.name.clone(), src, dst: dst_shape });
        }
    }
}

/// Whether both list the same names.
fn compare_names<'a>(
    item: &Name,
    src: impl Iterator<Item = &'a Name>,
    dst: impl Iterator<Item = &'a Name>,
    errors: &mut Vec<Mismatch>,
) {
    let (mut src, mut dst): (Vec<Name>, Vec<Name>) = (src.cloned().collect(), dst.cloned().collect());
    src.sort();
    dst.sort();
    if src != dst {
        errors.push(Mismatch::Components { item: item.clone(), src, dst });
    }
}

fn count(item: &Name, what: impl FnOnce() -> String, (src, dst): (u32, u32), errors: &mut Vec<Mismatch>) {
    if src != dst {
        let (src, dst) = (u64::from(src), u64::from(dst));
        errors.push(Mismatch::Count { item: item.clone(), what: what(), src, dst });
    }
}

/// What a value is, of a component or of a part: its name, its width, its encoding.
type Value<'a> = (&'a Name, Bytes, &'a Name);

fn compare_values(item: &Name, src: Value<'_>, dst: Value<'_>, errors: &mut Vec<Mismatch>) {
    let component = || dst.0.clone();
    if src.1 != dst.1 {
        errors.push(Mismatch::Width { item: item.clone(), component: component(), src: src.1, dst: dst.1 });
    }
    if src.2 != dst.2 {
        let (src, dst) = (src.2.clone(), dst.2.clone());
        errors.push(Mismatch::Encoding { item: item.clone(), component: component(), src, dst });
    }
}

fn compare_states(item: &Name, s: &StateItem, d: &StateItem, errors: &mut Vec<Mismatch>) {
    compare_names(item, s.parts.iter().map(|p| &p.name), d.parts.iter().map(|p| &p.name), errors);
    for part in &d.parts {
        let Some(other) = s.parts.iter().find(|o| o.name == part.name) else { continue };
        count(item, || format!("units of {}", part.name), (other.units, part.units), errors);
        count(item, || format!("rows of {}", part.name), (other.rows, part.rows), errors);
        let (src, dst) = (&other.encoding, &part.encoding);
        compare_values(item, (&other.name, other.width, src), (&part.name, part.width, dst), errors);
    }
}

fn compare_paged(item: &Name, s: &PagedItem, d: &PagedItem, errors: &mut Vec<Mismatch>) {
    count(item, || "KV heads".into(), (s.heads, d.heads), errors);
    count(item, || "tokens an entry".into(), (s.tokens_per_entry, d.tokens_per_entry), errors);
    if s.retention != d.retention {
        errors.push(Mismatch::Retention { item: item.clone(), src: s.retention, dst: d.retention });
    }
    compare_names(item, s.components.iter().map(|c| &c.name), d.components.iter().map(|c| &c.name), errors);
    for c in &d.components {
        let Some(o) = s.components.iter().find(|o| o.name == c.name) else { continue };
        compare_values(item, (&o.name, o.width, &o.encoding), (&c.name, c.width, &c.encoding), errors);
        if (o.span, o.heads) != (c.span, c.heads) {
            let (src, dst) = (covered(o), covered(c));
            errors.push(Mismatch::Coverage { item: item.clone(), component: c.name.clone(), src, dst });
        }
    }
}

fn covered(c: &Component) -> String {
    let heads = if c.heads == ValueHeads::Shared { "all heads of a rank" } else { "one head" };
    format!("{} entries of {heads}", c.span)
}

/// Values that stand for all heads of a rank move whole, so both engines must cut the heads alike.
fn check_shared(
    item: &Item,
    (src, src_id): (&Manifest, ItemId),
    (dst, dst_id): (&Manifest, ItemId),
    errors: &mut Vec<Mismatch>,
) {
    let shared = item.as_paged().into_iter().flat_map(|p| &p.components).filter(|c| c.heads == ValueHeads::Shared);
    let intervals = |m: &Manifest, id: ItemId| -> Vec<HeadRange> {
        let placed = m.ranks().iter().filter_map(|r| Some(r.placement.get(id.index())?.as_ref()?.as_paged()?.heads));
        let set: BTreeSet<HeadRange> = placed.collect();
        set.into_iter().collect()
    };
    let (s, d) = (intervals(src, src_id), intervals(dst, dst_id));
    if s != d || s.windows(2).any(|w| w[1].start() < w[0].end()) {
        errors.extend(shared.map(|c| Mismatch::SharedValue {
            item: item.name.clone(),
            component: c.name.clone(),
            src: s.clone(),
            dst: d.clone(),
        }));
    }
}
