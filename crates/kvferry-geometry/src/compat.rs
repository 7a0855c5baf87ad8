//! Can two engines talk? They can when they cache the same items.
//!
//! What must agree, by item name: heads, retention, and components by name with width and encoding. What may differ is
//! not compared: parallelism, block sizes, layouts, groups, the order of items and of components. Model identity (equal
//! weights) is the handshake's question, not geometry's.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::spec::{Component, Item, Retention, write_list};
use crate::units::{Bytes, GroupId, ItemId, Name};

/// One way in which two engines differ that can't be bridged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The source lacks an item.
    #[error("item {item}: the destination needs it ({shape}), the source has no item of that name")]
    MissingAtSource {
        /// The item.
        item: Name,
        /// What the destination says of it.
        shape: String,
    },
    /// The destination lacks an item.
    #[error("item {item}: the source holds it ({shape}), the destination has no item of that name")]
    MissingAtDestination {
        /// The item.
        item: Name,
        /// What the source says of it.
        shape: String,
    },
    /// KV heads of the whole model differ.
    #[error("item {item}: source has {src} KV heads, destination {dst}; both must serve the same model")]
    Heads {
        /// The item.
        item: Name,
        /// At the source.
        src: u32,
        /// At the destination.
        dst: u32,
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
    /// A component only one side has.
    #[error("item {item}: source has components {src:?}, destination {dst:?}")]
    Components {
        /// The item.
        item: Name,
        /// At the source, sorted.
        src: Vec<Name>,
        /// At the destination, sorted.
        dst: Vec<Name>,
    },
    /// A component's width differs.
    #[error(
        "item {item}: component {component} is {src} wide at the source, {dst} at the destination (per token and head)"
    )]
    Width {
        /// The item.
        item: Name,
        /// The component.
        component: Name,
        /// At the source.
        src: Bytes,
        /// At the destination.
        dst: Bytes,
    },
    /// A component's encoding differs.
    #[error(
        "item {item}: component {component} is encoded as {src} at the source, {dst} at the destination; \
         use one KV cache type on both, no conversion is done"
    )]
    Encoding {
        /// The item.
        item: Name,
        /// The component.
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
            | Self::Heads { item, .. }
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

/// Two engines whose caches hold the same items; `src` is read, `dst` is written.
#[derive(Clone, Debug)]
pub struct Compatible {
    src: Arc<Manifest>,
    dst: Arc<Manifest>,
    /// By destination item.
    src_item: Vec<ItemId>,
    /// Groups that share items, sorted.
    group_pairs: Vec<(GroupId, GroupId)>,
}

impl Compatible {
    /// Compares two engines, item by item and by name.
    ///
    /// # Errors
    /// All mismatches at once.
    pub fn new(src: Arc<Manifest>, dst: Arc<Manifest>) -> Result<Self, Mismatches> {
        let mut errors = Vec::new();
        let mut src_item = Vec::new();
        for wanted in dst.spec().items() {
            let found = src.spec().find(&wanted.name).and_then(|id| Some((id, src.spec().get(id)?)));
            match found {
                Some((id, held)) => {
                    compare(held, wanted, &mut errors);
                    src_item.push(id);
                }
                None => {
                    let (item, shape) = (wanted.name.clone(), crate::spec::describe(wanted));
                    errors.push(Mismatch::MissingAtSource { item, shape });
                }
            }
        }
        for held in src.spec().items() {
            if dst.spec().find(&held.name).is_none() {
                let (item, shape) = (held.name.clone(), crate::spec::describe(held));
                errors.push(Mismatch::MissingAtDestination { item, shape });
            }
        }
        if !errors.is_empty() {
            return Err(Mismatches(errors));
        }
        let pair = |(id, &src_id): (ItemId, &ItemId)| (src.group_of(src_id), dst.group_of(id));
        let mut group_pairs: Vec<(GroupId, GroupId)> =
            dst.spec().iter().map(|i| i.0).zip(&src_item).map(pair).collect();
        group_pairs.sort_unstable();
        group_pairs.dedup();
        Ok(Self { src, dst, src_item, group_pairs })
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

    /// Groups of the two engines that share items: (source's, destination's).
    pub(crate) fn group_pairs(&self) -> &[(GroupId, GroupId)] {
        &self.group_pairs
    }

    /// The source's id of a destination's item.
    pub(crate) fn src_item(&self, dst: ItemId) -> ItemId {
        self.src_item[dst.index()]
    }
}

fn compare(src: &Item, dst: &Item, errors: &mut Vec<Mismatch>) {
    let item = || dst.name.clone();
    let (s, d) = (src.as_paged(), dst.as_paged());
    if s.heads != d.heads {
        errors.push(Mismatch::Heads { item: item(), src: s.heads, dst: d.heads });
    }
    if s.retention != d.retention {
        errors.push(Mismatch::Retention { item: item(), src: s.retention, dst: d.retention });
    }
    let sorted = |list: &[Component]| {
        let mut names: Vec<Name> = list.iter().map(|c| c.name.clone()).collect();
        names.sort();
        names
    };
    let (names, wanted) = (sorted(&s.components), sorted(&d.components));
    if names != wanted {
        errors.push(Mismatch::Components { item: item(), src: names, dst: wanted });
    }
    for c in &d.components {
        let Some(o) = s.components.iter().find(|o| o.name == c.name) else { continue };
        if o.width != c.width {
            let component = c.name.clone();
            errors.push(Mismatch::Width { item: item(), component, src: o.width, dst: c.width });
        }
        if o.encoding != c.encoding {
            let (component, src, dst) = (c.name.clone(), o.encoding.clone(), c.encoding.clone());
            errors.push(Mismatch::Encoding { item: item(), component, src, dst });
        }
    }
}
