//! What a model caches: a list of named items.
//!
//! A spec says nothing about ranks, blocks or memory. Two engines that serve one model have equal specs up to the order
//! of items and components; [`compat`](crate::compat) compares them by name.
//!
//! ```
//! use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention};
//! let kv = PagedItem {
//!     heads: 8,
//!     components: vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")],
//!     retention: Retention::Full,
//! };
//! let spec = ModelSpec::new(vec![Item::paged("model.layers.0.self_attn.attn", kv)])?;
//! assert_eq!(spec.bytes_per_token().get(), 4096);
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

/// How a component's bytes are to be read: data type, packing, source of scales. An opaque tag: equal tags mean equal
/// bytes for equal values. kvferry never converts.
pub type Encoding = Name;

/// One kind of bytes that an item keeps for each token and head: K, V, an MLA latent, ...
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Component {
    /// Unique in the item.
    pub name: Name,
    /// Bytes for each (token, head).
    pub width: Bytes,
    /// How the bytes are to be read.
    pub encoding: Encoding,
}

impl Component {
    /// A component of `width` bytes for each (token, head).
    #[must_use]
    pub fn new(name: &str, width: u64, encoding: &str) -> Self {
        Self { name: name.into(), width: Bytes::new(width), encoding: encoding.into() }
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
}

impl Retention {
    /// The tokens of `[0, n)` that the next token, at position `n`, reads.
    ///
    /// Full: `[0, n)`. Window W: `[max(0, n - W + 1), n)`. Chunk C: `[n - n mod C, n)`.
    #[must_use]
    pub fn needed(self, n: Tokens) -> TokenRange {
        let len = n.get();
        let start = match self {
            Self::Full => 0,
            Self::Window(w) => len.saturating_sub(w.get().saturating_sub(1)),
            Self::Chunk(c) => len - len.checked_rem(c.get()).unwrap_or(0),
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
        }
    }
}

/// An attention-like item: bytes at (token, head, component).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PagedItem {
    /// KV heads of the whole model, before any sharding; 1 for an MLA latent.
    pub heads: u32,
    /// At least one; names unique.
    pub components: Vec<Component>,
    /// Which tokens stay readable.
    pub retention: Retention,
}

impl PagedItem {
    /// Bytes for one token over all heads and components.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        u64::from(self.heads) * self.components.iter().map(|c| c.width.get()).sum::<u64>()
    }
}

/// What kind of cache an item is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ItemKind {
    /// Bytes at (token, head, component), in blocks.
    Paged(PagedItem),
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

    /// The paged description.
    #[must_use]
    pub fn as_paged(&self) -> &PagedItem {
        match &self.kind {
            ItemKind::Paged(p) => p,
        }
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
    /// No component.
    #[error("item {item}: no component or more than {limit}: it has {got}")]
    ComponentCount {
        /// The item.
        item: Name,
        /// Components listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A component name stands twice in one item.
    #[error("item {item}: component {component} is listed twice")]
    DuplicateComponent {
        /// The item.
        item: Name,
        /// The component.
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

    /// Bytes of one token over all items, heads and components, counted once whatever the parallelism.
    #[must_use]
    pub fn bytes_per_token(&self) -> Bytes {
        Bytes::new(self.items.iter().map(|i| i.as_paged().bytes_per_token()).sum())
    }
}

fn check_item(item: &Item, errors: &mut Vec<SpecError>) {
    let paged = item.as_paged();
    let mut range = |what, got: u64, limit: u64| {
        if got == 0 || got > limit {
            errors.push(SpecError::OutOfRange { item: item.name.clone(), what, got, limit });
        }
    };
    range("heads", u64::from(paged.heads), u64::from(MAX_HEADS));
    match paged.retention {
        Retention::Full => {}
        Retention::Window(t) => range("window", t.get(), u64::from(u32::MAX)),
        Retention::Chunk(t) => range("chunk", t.get(), u64::from(u32::MAX)),
    }
    for c in &paged.components {
        range("component width", c.width.get(), MAX_WIDTH);
    }
    let count = paged.components.len();
    if count == 0 || count > MAX_COMPONENTS {
        errors.push(SpecError::ComponentCount { item: item.name.clone(), got: count, limit: MAX_COMPONENTS });
    }
    for (i, c) in paged.components.iter().enumerate() {
        if paged.components[..i].iter().any(|o| o.name == c.name) {
            errors.push(SpecError::DuplicateComponent { item: item.name.clone(), component: c.name.clone() });
        }
    }
}

/// A one-line description of an item's shape, for error messages.
#[must_use]
pub(crate) fn describe(item: &Item) -> String {
    use core::fmt::Write as _;
    let p = item.as_paged();
    let mut out = String::new();
    let _ = write!(out, "{} heads, {}", p.heads, p.retention);
    for c in &p.components {
        let _ = write!(out, ", {} {} {}", c.name, c.width, c.encoding);
    }
    out
}
