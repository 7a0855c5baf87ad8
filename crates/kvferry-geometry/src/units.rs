//! Newtypes for the quantities that must not be mixed up.
//!
//! Each has a private field, checked arithmetic and no conversion to a neighbour. Inner loops run on the plain
//! integers behind them once a constructor has proven their extremes.

use alloc::sync::Arc;
use core::fmt;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident, $raw:ty, $suffix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name($raw);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);

            /// Wraps a plain number.
            #[must_use]
            pub const fn new(raw: $raw) -> Self {
                Self(raw)
            }

            /// The plain number.
            #[must_use]
            pub const fn get(self) -> $raw {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{}", $suffix), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

macro_rules! quantity {
    ($name:ident) => {
        impl $name {
            /// Sum, or `None` on overflow.
            #[must_use]
            pub const fn checked_add(self, other: Self) -> Option<Self> {
                match self.0.checked_add(other.0) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }

            /// Product with a count, or `None` on overflow.
            #[must_use]
            pub const fn checked_mul(self, count: u64) -> Option<Self> {
                match self.0.checked_mul(count) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }
        }
    };
}

unit!(
    /// A length, offset or stride in bytes.
    Bytes, u64, " B"
);
unit!(
    /// A count of tokens, or a token's position in the sequence.
    Tokens, u64, " tokens"
);
quantity!(Bytes);
quantity!(Tokens);
unit!(
    /// A rank of one engine, counted over all of its parallel dimensions.
    RankId, u32, ""
);
unit!(
    /// A registered region of one rank.
    RegionId, u32, ""
);
unit!(
    /// A scheduler's (logical) block of one engine.
    BlockId, u32, ""
);
unit!(
    /// An item's index in its engine's [`ModelSpec`](crate::spec::ModelSpec). Never compared across engines: items are
    /// matched by name.
    ItemId, u32, ""
);
unit!(
    /// A cache group's index in its engine's manifest. Never compared across engines.
    GroupId, u32, ""
);

impl RankId {
    /// The index of this rank in a list of all ranks.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl RegionId {
    /// The index of this region in its rank's list.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl ItemId {
    /// The index of this item in its spec.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl GroupId {
    /// The index of this group in its manifest.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A shared, immutable name of an item, component or group.
#[derive(Clone, Eq, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl PartialEq for Name {
    /// Mostly both are one text.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl core::hash::Hash for Name {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Name {
    /// Wraps a name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// A half-open interval of tokens `[start, end)`; `start <= end` always holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TokenRange {
    start: u64,
    end: u64,
}

impl TokenRange {
    /// The interval `[start, end)`; empty at `start` where `end < start`.
    #[must_use]
    pub const fn new(start: Tokens, end: Tokens) -> Self {
        let (start, end) = (start.get(), end.get());
        Self { start, end: if end < start { start } else { end } }
    }

    /// First token.
    #[must_use]
    pub const fn start(self) -> Tokens {
        Tokens::new(self.start)
    }

    /// One past the last token.
    #[must_use]
    pub const fn end(self) -> Tokens {
        Tokens::new(self.end)
    }

    /// How many tokens.
    #[must_use]
    pub const fn len(self) -> Tokens {
        Tokens::new(self.end - self.start)
    }

    /// No token at all.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The tokens in both; empty where they don't meet.
    #[must_use]
    pub const fn intersect(self, other: Self) -> Self {
        let start = if self.start > other.start { self.start } else { other.start };
        let end = if self.end < other.end { self.end } else { other.end };
        Self { start, end: if end < start { start } else { end } }
    }

    /// Whether every token of `other` is in `self`; an empty `other` always is.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }
}

impl fmt::Display for TokenRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}
