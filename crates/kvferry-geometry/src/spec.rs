//! What a model caches: a list of named items.
//!
//! A spec says nothing about ranks, blocks or memory. Two engines that serve one model have equal specs up to the order
//! of items and components; [`compat`](crate::compat) compares them by name.
//!
//! ```
//! use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, StateItem, StatePart};
//! let kv = PagedItem::new(8, vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")]);
//! // The convolution state of 64 channels, 3 rows of 2 bytes, and 8 heads' recurrent state.
//! let state = StateItem {
//!     parts: vec![StatePart::new("conv.x", 64, 3, 2, "bf16"), StatePart::new("temporal", 8, 1, 4096, "fp32")],
//! };
//! let spec = ModelSpec::new(vec![Item::paged("layers.0.attn", kv), Item::state("layers.1.mixer", state)])?;
//! assert_eq!(spec.bytes_per_token().get(), 4096);
//! assert_eq!(spec.bytes_per_state().get(), 64 * 3 * 2 + 8 * 4096);
//! # Ok::<(), kvferry_geometry::spec::SpecErrors>(())
//! ```

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::units::{Bytes, ItemId, Name, TokenRange, Tokens};

/// The most items a spec can have; beyond it a description is refused rather than planned slowly.
pub const MAX_ITEMS: usize = 4096;
/// The most components an item can have.
pub const MAX_COMPONENTS: usize = 16;
/// The most heads an item can have.
pub const MAX_HEADS: u32 = 1 << 16;
/// The widest component, in bytes for each (token, head).
pub const MAX_WIDTH: u64 = 1 << 24;

/// The most parts a state item can have.
pub const MAX_PARTS: usize = 16;
/// The most rows a state part can have.
pub const MAX_ROWS: u32 = 1 << 10;
/// The most tokens that an entry, and the most entries that a value, can cover.
pub const MAX_SPAN: u32 = 1 << 16;

/// How a component's bytes are to be read: data type, packing, source of scales. An opaque tag: equal tags mean equal
/// bytes for equal values. kvferry never converts.
pub type Encoding = Name;

/// For how many heads one value of a component stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ValueHeads {
    /// One value for each head.
    #[default]
    Each,
    /// One value for all heads that a rank holds (a scale for a whole block). Such a value is that of its heads together, so
    /// it moves only between engines that cut the heads alike.
    Shared,
}

/// One kind of bytes that a paged item keeps: K, V, an MLA latent, the scales of K, ...
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Component {
    /// Unique in the item.
    pub name: Name,
    /// Bytes of one value.
    pub width: Bytes,
    /// How the bytes are to be read.
    pub encoding: Encoding,
    /// Entries that one value covers, at least 1: more for the scale of a whole block, say. Every block size must be a multiple.
    pub span: u32,
    /// Heads that one value covers.
    pub heads: ValueHeads,
}

impl Component {
    /// A component with a value of `width` bytes for each (entry, head).
    #[must_use]
    pub fn new(name: &str, width: u64, encoding: &str) -> Self {
        let (name, encoding) = (name.into(), encoding.into());
        Self { name, width: Bytes::new(width), encoding, span: 1, heads: ValueHeads::Each }
    }

    /// The same with one value for every `span` entries.
    #[must_use]
    pub fn with_span(self, span: u32) -> Self {
        Self { span, ..self }
    }

    /// The same with one value for all heads of a rank.
    #[must_use]
    pub fn shared(self) -> Self {
        Self { heads: ValueHeads::Shared, ..self }
    }
}

/// Which tokens of a sequence of length `n` the model still reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Retention {
    /// All of them.
    Full,
    /// Sliding window: the token at position `n` reads the last `W` tokens, itself included, so the `W - 1` before it.
    Window(Tokens),
    /// Chunked: the token at position `n` reads its own chunk of `C` tokens, from `n - n mod C`.
    Chunk(Tokens),
    /// Ring: the last `R` tokens, kept in a ring of `R` places: token `t` in place `t mod R`. A block table lists the ring's
    /// blocks; `R` is a multiple of what one covers.
    Ring(Tokens),
}

impl Retention {
    /// The tokens of `[0, n)` that are still read at position `n`.
    ///
    /// Full: `[0, n)`. Window W: `[max(0, n - W + 1), n)`. Chunk C: `[n - n mod C, n)`. Ring R: `[max(0, n - R), n)`.
    #[must_use]
    pub fn needed(self, n: Tokens) -> TokenRange {
        let len = n.get();
        let start = match self {
            Self::Full => 0,
            Self::Window(w) => len.saturating_sub(w.get().saturating_sub(1)),
            Self::Chunk(c) => len - len.checked_rem(c.get()).unwrap_or(0),
            Self::Ring(r) => len.saturating_sub(r.get()),
        };
        TokenRange::new(Tokens::new(start), n)
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window(w) => write!(f, "window {}", w.get()),
            Self::Chunk(c) => write!(f, "chunk {}", c.get()),
            Self::Ring(r) => write!(f, "ring {}", r.get()),
        }
    }
}

/// An attention-like item: bytes at (entry, head, component).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PagedItem {
    /// KV heads of the whole model, before any sharding; 1 for an MLA latent.
    pub heads: u32,
    /// Tokens of the sequence that one entry stands for, at least 1: more in compressed caches. An entry exists when all its
    /// tokens do.
    pub tokens_per_entry: u32,
    /// At least one; names unique.
    pub components: Vec<Component>,
    /// Which tokens stay readable.
    pub retention: Retention,
}

impl PagedItem {
    /// An item with an entry for each token, all of which stay readable.
    #[must_use]
    pub fn new(heads: u32, components: Vec<Component>) -> Self {
        Self { heads, tokens_per_entry: 1, components, retention: Retention::Full }
    }

    /// Tokens that one value of a component covers.
    #[must_use]
    pub fn tokens_per_value(&self, component: &Component) -> u64 {
        u64::from(self.tokens_per_entry).max(1) * u64::from(component.span).max(1)
    }
}

/// One part of a recurrent state: bytes at (row, unit).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StatePart {
    /// Unique in the item.
    pub name: Name,
    /// Units of the whole model, before any sharding: channels of a convolution state, heads of a recurrent state.
    pub units: u32,
    /// Rows: the tokens that a convolution looks back on; 1 for a recurrent state.
    pub rows: u32,
    /// Bytes for each (row, unit).
    pub width: Bytes,
    /// How the bytes are to be read.
    pub encoding: Encoding,
}

impl StatePart {
    /// A part of `units` times `rows` of `width` bytes.
    #[must_use]
    pub fn new(name: &str, units: u32, rows: u32, width: u64, encoding: &str) -> Self {
        Self { name: name.into(), units, rows, width: Bytes::new(width), encoding: encoding.into() }
    }

    /// Bytes of all rows and units.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.units).saturating_mul(u64::from(self.rows)).saturating_mul(self.width.get())
    }
}

/// A recurrent state (Mamba, gated delta net, KDA, short convolution): one set of bytes for a sequence, which stands for all
/// tokens up to its position. Every part is sharded over its units on its own.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StateItem {
    /// At least one; names unique.
    pub parts: Vec<StatePart>,
}

/// What kind of cache an item is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ItemKind {
    /// Bytes at (entry, head, component), in blocks.
    Paged(PagedItem),
    /// Bytes at (part, row, unit), in slots.
    State(StateItem),
}

/// A named cache.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Item {
    /// Unique in the model, e.g. `model.layers.17.self_attn.attn`.
    pub name: Name,
    /// What it keeps.
    pub kind: ItemKind,
}

impl Item {
    /// A paged item.
    #[must_use]
    pub fn paged(name: &str, item: PagedItem) -> Self {
        Self { name: name.into(), kind: ItemKind::Paged(item) }
    }

    /// A state item.
    #[must_use]
    pub fn state(name: &str, item: StateItem) -> Self {
        Self { name: name.into(), kind: ItemKind::State(item) }
    }

    /// The paged description, of a paged item.
    #[must_use]
    pub fn as_paged(&self) -> Option<&PagedItem> {
        match &self.kind {
            ItemKind::Paged(p) => Some(p),
            ItemKind::State(_) => None,
        }
    }

    /// The state's description, of a state item.
    #[must_use]
    pub fn as_state(&self) -> Option<&StateItem> {
        match &self.kind {
            ItemKind::Paged(_) => None,
            ItemKind::State(s) => Some(s),
        }
    }

    /// The axis of `other` that is this item's `axis`: parts are matched by name.
    pub(crate) fn axis_in(&self, axis: usize, other: &Self) -> Option<usize> {
        match (self.as_state(), other.as_state()) {
            (Some(own), Some(theirs)) => {
                let name = &own.parts.get(axis)?.name;
                theirs.parts.iter().position(|p| p.name == *name)
            }
            (None, None) => Some(axis),
            _ => None,
        }
    }

    /// The axes that are sharded: the heads of a paged item, the units of every part of a state.
    pub(crate) fn axes(&self) -> impl Iterator<Item = u32> {
        let (paged, state) = (self.as_paged(), self.as_state());
        paged.map(|p| p.heads).into_iter().chain(state.into_iter().flat_map(|s| s.parts.iter().map(|p| p.units)))
    }
}

/// A fault of one item of a spec.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// No item at all.
    #[error("the model lists no cache item; list at least one")]
    Empty,
    /// Too many items.
    #[error("the model lists {got} cache items, more than the {limit} that are planned for")]
    TooManyItems {
        /// Items listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A name stands twice.
    #[error("item {item}: the name is listed twice; item names must be unique in the model")]
    DuplicateItem {
        /// The name.
        item: Name,
    },
    /// No component or part, or too many.
    #[error("item {item}: it has {got} components or parts; it must have 1 to {limit}")]
    ComponentCount {
        /// The item.
        item: Name,
        /// How many are listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A value that covers several entries of a ring: when the ring has gone round it would stand for new and old ones.
    #[error(
        "item {item}: component {component} has one value for {span} entries, which a ring can't have; use one for each"
    )]
    RingSpan {
        /// The item.
        item: Name,
        /// The component.
        component: Name,
        /// Entries of a value.
        span: u32,
    },
    /// A component or part name stands twice in one item.
    #[error("item {item}: component or part {component} is listed twice")]
    DuplicateComponent {
        /// The item.
        item: Name,
        /// Its name.
        component: Name,
    },
    /// A number outside its range.
    #[error("item {item}: {what} is {got}; it must be 1 to {limit}")]
    OutOfRange {
        /// The item.
        item: Name,
        /// Which number.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest value allowed.
        limit: u64,
    },
}

/// Every fault of a spec.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpecErrors(pub Vec<SpecError>);

impl fmt::Display for SpecErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, &self.0)
    }
}
impl core::error::Error for SpecErrors {}

pub(crate) fn write_list<E: fmt::Display>(f: &mut fmt::Formatter<'_>, list: &[E]) -> fmt::Result {
    for (i, e) in list.iter().enumerate() {
        if i > 0 {
            f.write_str("\n")?;
        }
        write!(f, "{e}")?;
    }
    Ok(())
}

/// The cache items of one model, in the engine's order. Names are unique and sizes are in range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelSpec {
    items: Vec<Item>,
    by_name: BTreeMap<Name, ItemId>,
}

impl ModelSpec {
    /// Checks and indexes a list of items.
    ///
    /// # Errors
    /// All faults of all items.
    pub fn new(items: Vec<Item>) -> Result<Self, SpecErrors> {
        let mut errors = Vec::new();
        if items.is_empty() {
            errors.push(SpecError::Empty);
        }
        if items.len() > MAX_ITEMS {
            return Err(SpecErrors([SpecError::TooManyItems { got: items.len(), limit: MAX_ITEMS }].into()));
        }
        let mut by_name = BTreeMap::new();
        for (id, item) in (0u32..).map(ItemId::new).zip(&items) {
            if by_name.insert(item.name.clone(), id).is_some() {
                errors.push(SpecError::DuplicateItem { item: item.name.clone() });
            }
            check_item(item, &mut errors);
        }
        if errors.is_empty() { Ok(Self { items, by_name }) } else { Err(SpecErrors(errors)) }
    }

    /// All items.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Items with their ids.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ItemId, &Item)> {
        self.items.iter().enumerate().map(|(i, item)| (ItemId::new(u32::try_from(i).unwrap_or(u32::MAX)), item))
    }

    /// One item.
    #[must_use]
    pub fn get(&self, id: ItemId) -> Option<&Item> {
        self.items.get(id.index())
    }

    /// The id of a name.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<ItemId> {
        self.by_name.get(name).copied()
    }

    /// Bytes of one token over all paged items, heads and components, counted once whatever the parallelism. Values that cover
    /// several tokens count by their share, rounded up; one that all heads of a rank share counts once.
    #[must_use]
    pub fn bytes_per_token(&self) -> Bytes {
        let mut by_tokens: BTreeMap<u64, u64> = BTreeMap::new();
        for paged in self.items.iter().filter_map(Item::as_paged) {
            for c in &paged.components {
                let heads = if c.heads == ValueHeads::Shared { 1 } else { u64::from(paged.heads) };
                *by_tokens.entry(paged.tokens_per_value(c)).or_default() += heads * c.width.get();
            }
        }
        Bytes::new(by_tokens.into_iter().map(|(tokens, bytes)| bytes.div_ceil(tokens)).sum())
    }

    /// Bytes of one checkpoint of all state items.
    #[must_use]
    pub fn bytes_per_state(&self) -> Bytes {
        let parts = self.items.iter().filter_map(Item::as_state).flat_map(|s| &s.parts);
        Bytes::new(parts.map(StatePart::bytes).fold(0, u64::saturating_add))
    }
}

fn check_item(item: &Item, errors: &mut Vec<SpecError>) {
    let mut range = |what, got: u64, limit: u64| {
        if got == 0 || got > limit {
            errors.push(SpecError::OutOfRange { item: item.name.clone(), what, got, limit });
        }
    };
    let (names, limit): (Vec<&Name>, usize) = match &item.kind {
        ItemKind::Paged(paged) => {
            range("heads", u64::from(paged.heads), u64::from(MAX_HEADS));
            range("tokens per entry", u64::from(paged.tokens_per_entry), u64::from(MAX_SPAN));
            match paged.retention {
                Retention::Full => {}
                Retention::Window(t) => range("window", t.get(), u64::from(u32::MAX)),
                Retention::Chunk(t) => range("chunk", t.get(), u64::from(u32::MAX)),
                Retention::Ring(t) => range("ring", t.get(), u64::from(u32::MAX)),
            }
            for c in &paged.components {
                range("component width", c.width.get(), MAX_WIDTH);
                range("component span", u64::from(c.span), u64::from(MAX_SPAN));
            }
            (paged.components.iter().map(|c| &c.name).collect(), MAX_COMPONENTS)
        }
        ItemKind::State(state) => {
            for p in &state.parts {
                range("units", u64::from(p.units), u64::from(MAX_HEADS));
                range("rows", u64::from(p.rows), u64::from(MAX_ROWS));
                range("part width", p.width.get(), MAX_WIDTH);
            }
            (state.parts.iter().map(|p| &p.name).collect(), MAX_PARTS)
        }
    };
    if let Some(paged) = item.as_paged().filter(|p| matches!(p.retention, Retention::Ring(_))) {
        for c in paged.components.iter().filter(|c| c.span > 1) {
            let (component, span) = (c.name.clone(), c.span);
            errors.push(SpecError::RingSpan { item: item.name.clone(), component, span });
        }
    }
    let got = names.len();
    if got == 0 || got > limit {
        errors.push(SpecError::ComponentCount { item: item.name.clone(), got, limit });
        return;
    }
    for (i, &name) in names.iter().enumerate() {
        if names[..i].contains(&name) {
            errors.push(SpecError::DuplicateComponent { item: item.name.clone(), component: name.clone() });
        }
    }
}

/// A one-line description of an item's shape, for error messages.
#[must_use]
pub(crate) fn describe(item: &Item) -> String {
    use core::fmt::Write as _;
    let mut out = String::new();
    match &item.kind {
        ItemKind::Paged(p) => {
            let _ = write!(out, "{} heads, {}", p.heads, p.retention);
            for c in &p.components {
                let _ = write!(out, ", {} {} {}", c.name, c.width, c.encoding);
            }
        }
        ItemKind::State(s) => {
            let _ = write!(out, "state");
            for p in &s.parts {
                let _ = write!(out, ", {} {} x {} x {} {}", p.name, p.rows, p.units, p.width, p.encoding);
            }
        }
    }
    out
}
