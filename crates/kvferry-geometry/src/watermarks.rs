//! How far the bytes of a source's items are final while its prefill still runs.
//!
//! A [`Watermark`] is an item's: all of its bytes that stand for tokens below it are final, and stay so until the request is
//! released. [`Watermarks`] are those of all items, in the order of the source's spec. They only grow. What lies between
//! two of them is what [`PairPlan::resolve_between`](crate::plan::PairPlan::resolve_between) moves.
//!
//! They say nothing of who computes what: a producer whose ranks finish at different times marks what all of them have finished.
//!
//! ```
//! use kvferry_geometry::units::{ItemId, Tokens};
//! use kvferry_geometry::watermarks::{Watermark, Watermarks};
//! let mut marks = Watermarks::none(61);
//! // Layers 3 and 4 are final up to token 4096.
//! marks.advance((3..5).map(ItemId::new), Tokens::new(4096)).unwrap();
//! assert_eq!(marks.get(ItemId::new(4)), Some(Watermark::Upto(Tokens::new(4096))));
//! assert!(marks.advance([ItemId::new(4)], Tokens::new(4000)).is_err());
//! marks.seal();
//! assert!(marks.is_whole());
//! ```

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use crate::units::{ItemId, Tokens};

/// How far the bytes of one item are final.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Watermark {
    /// What stands for tokens below this and for no later one. Of a state, which stands for all of its tokens, nothing.
    Upto(Tokens),
    /// All of it: states, the last value that is filled in part, the zeros of a frozen block too.
    Whole,
}

impl Watermark {
    /// Nothing is final.
    pub const NONE: Self = Self::Upto(Tokens::ZERO);
}

impl fmt::Display for Watermark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upto(tokens) => write!(f, "final up to {tokens}"),
            Self::Whole => f.write_str("final as a whole"),
        }
    }
}

/// A watermark that can't be moved so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatermarkError {
    /// The source has no such item.
    #[error("item {item} does not exist; the source has {items} items")]
    UnknownItem {
        /// The item.
        item: ItemId,
        /// Items of the source.
        items: usize,
    },
    /// Bytes that were final are not any more: that takes a new attempt.
    #[error("item {item} is {at}, and can't go back to be {to}; begin a new attempt where bytes are computed again")]
    Backwards {
        /// The item.
        item: ItemId,
        /// Where it is.
        at: Watermark,
        /// Where it was to go.
        to: Watermark,
    },
}

/// How far the bytes of each item of a source are final.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Watermarks(Vec<Watermark>);

impl Watermarks {
    /// Of a source with `items` items, nothing is final.
    #[must_use]
    pub fn none(items: usize) -> Self {
        Self(vec![Watermark::NONE; items])
    }

    /// Of a source with `items` items, everything is.
    #[must_use]
    pub fn whole(items: usize) -> Self {
        Self(vec![Watermark::Whole; items])
    }

    /// These items are final up to these tokens: all of them, or none where there is an error.
    ///
    /// # Errors
    /// The first item that doesn't exist, or is further already.
    pub fn advance<I>(&mut self, items: I, upto: Tokens) -> Result<(), WatermarkError>
    where
        I: IntoIterator<Item = ItemId, IntoIter: Clone>,
    {
        let (items, to) = (items.into_iter(), Watermark::Upto(upto));
        for item in items.clone() {
            let at = self.get(item).ok_or(WatermarkError::UnknownItem { item, items: self.0.len() })?;
            if at > to {
                return Err(WatermarkError::Backwards { item, at, to });
            }
        }
        items.for_each(|item| self.0[item.index()] = to);
        Ok(())
    }

    /// Everything is final.
    pub fn seal(&mut self) {
        self.0.fill(Watermark::Whole);
    }

    /// Of one item; `None` where the source has no such item.
    #[must_use]
    pub fn get(&self, item: ItemId) -> Option<Watermark> {
        self.0.get(item.index()).copied()
    }

    /// Of all items, in the order of the source's spec. They can be collected again from such a list.
    #[must_use]
    pub fn as_slice(&self) -> &[Watermark] {
        &self.0
    }

    /// Whether everything is final.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.0.iter().all(|&mark| mark == Watermark::Whole)
    }

    /// Whether these are of the same items as `other`, and of none less far.
    #[must_use]
    pub fn is_at_least(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.behind(other).is_none()
    }

    /// The first item that is less far than in `other`.
    pub(crate) fn behind(&self, other: &Self) -> Option<ItemId> {
        let pairs = (0u32..).map(ItemId::new).zip(self.0.iter().zip(&other.0));
        pairs.into_iter().find(|(_, (own, other))| own < other).map(|(item, _)| item)
    }
}

impl FromIterator<Watermark> for Watermarks {
    fn from_iter<I: IntoIterator<Item = Watermark>>(marks: I) -> Self {
        Self(marks.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upto(tokens: u64) -> Watermark {
        Watermark::Upto(Tokens::new(tokens))
    }

    fn item(id: u32) -> ItemId {
        ItemId::new(id)
    }

    #[test]
    fn they_only_grow_and_all_or_none_does() {
        let mut marks = Watermarks::none(3);
        marks.advance([item(2)], Tokens::new(8)).unwrap();
        marks.advance([item(2)], Tokens::new(8)).unwrap();
        let before = marks.clone();
        let back = marks.advance((0..3).map(ItemId::new), Tokens::new(7));
        assert_eq!(back, Err(WatermarkError::Backwards { item: item(2), at: upto(8), to: upto(7) }));
        let unknown = marks.advance([item(0), item(3)], Tokens::new(9));
        assert_eq!(unknown, Err(WatermarkError::UnknownItem { item: item(3), items: 3 }));
        assert_eq!(marks, before);
        marks.seal();
        let sealed = marks.advance([item(1)], Tokens::new(u64::MAX)).unwrap_err();
        assert_eq!(sealed, WatermarkError::Backwards { item: item(1), at: Watermark::Whole, to: upto(u64::MAX) });
        assert_eq!(marks, Watermarks::whole(3));
    }

    #[test]
    fn they_are_compared_by_item() {
        let of = |marks: [Watermark; 2]| marks.into_iter().collect::<Watermarks>();
        let (a, b) = (of([upto(4), Watermark::Whole]), of([upto(5), upto(9)]));
        assert!(!a.is_at_least(&b) && !b.is_at_least(&a));
        assert_eq!((a.behind(&b), b.behind(&a)), (Some(item(0)), Some(item(1))));
        assert!(a.is_at_least(&a) && a.is_at_least(&Watermarks::none(2)) && Watermarks::whole(2).is_at_least(&a));
        assert!(!a.is_at_least(&Watermarks::none(1)));
        assert!(!a.is_whole() && Watermarks::none(0).is_whole());
        assert_eq!(a.as_slice(), [upto(4), Watermark::Whole]);
        assert_eq!(a.get(item(2)), None);
    }
}
