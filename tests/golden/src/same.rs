//! Whether two relations of one request are the same, up to what the recorded connector moves beyond need.
//!
//! It moves whole blocks; kvferry moves the tokens that exist and that are read. So bytes that only the recorded side
//! moves are told apart by what they are at the consumer:
//!
//! - *tail*: tokens past the prompt's end, in a block whose other tokens it has;
//! - *unread*: tokens that a window or chunk has left behind, which nothing reads again;
//! - *padding*: bytes of no item, on both sides, in the consumer's listed blocks.
//!
//! Everything else that differs is a fault: bytes that only kvferry moves, a needed byte that only the record moves, and
//! a byte that gets another content.

use kvferry_geometry::spec::{ItemKind, Retention};
use kvferry_geometry::units::{TokenRange, Tokens};

use crate::blocks::{List, Lists};
use crate::contents::Names;
use crate::engine::Engine;
use crate::relation::{Content, ContentMap, Piece, Relation, compare, owners};

/// Bytes of a request by how they compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Both move them.
    pub equal: u64,
    /// Recorded only: past the prompt's end.
    pub tail: u64,
    /// Recorded only: not read again.
    pub unread: u64,
    /// Recorded only: of no item.
    pub padding: u64,
}

impl Tally {
    /// Adds another's bytes.
    pub fn add(&mut self, other: Self) {
        self.equal += other.equal;
        self.tail += other.tail;
        self.unread += other.unread;
        self.padding += other.padding;
    }
}

/// Relations that are not the same.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", self.words())]
pub struct Unequal {
    /// Bytes that only kvferry moves.
    pub extra: u64,
    /// Bytes that only the record moves, though needed or to a wrong place.
    pub missing: u64,
    /// Bytes that get different contents.
    pub different: u64,
    /// The first, in words.
    pub first: String,
}

impl Unequal {
    fn words(&self) -> String {
        let Self { extra, missing, different, first } = self;
        format!(
            "{extra} bytes only kvferry moves, {missing} only the record moves, {different} get other contents; first: \
             {first}"
        )
    }
}

/// A request's blocks on one consumer rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Consumer {
    /// What lies in them.
    pub contents: ContentMap,
    /// Their memory with its padding, as [`rows`](crate::contents::rows) gives it.
    pub rows: Vec<(u64, u64)>,
}

impl Consumer {
    fn has(&self, addr: u64, len: u64) -> bool {
        let row = self.rows.partition_point(|r| r.0 <= addr).checked_sub(1).and_then(|i| self.rows.get(i));
        row.is_some_and(|r| addr.saturating_add(len) <= r.1)
    }
}

/// Compares kvferry's relation with the recorded one.
///
/// # Errors
/// What differs.
pub fn same(
    ours: &Relation,
    theirs: &Relation,
    src: &Engine,
    needs: &[Option<Need>],
    consumers: &[Consumer],
) -> Result<Tally, Unequal> {
    let diff = compare(ours, theirs);
    let mut tally = Tally { equal: diff.equal, ..Tally::default() };
    let mut fault = Unequal { extra: 0, missing: 0, different: 0, first: String::new() };
    let mut first = |words: &dyn Fn() -> String| {
        if fault.first.is_empty() {
            fault.first = words();
        }
    };
    let tell = |p: &Piece| format!("rank {}, address {:#x}, {} B, {}", p.rank, p.addr, p.len, p.content.words(src));
    let (mut extra, mut missing, mut different) = (0, 0, 0);
    for piece in &ours.contradictions {
        different += piece.len;
        first(&|| format!("kvferry writes twice: {}", tell(piece)));
    }
    for piece in &diff.first_only {
        extra += piece.len;
        first(&|| format!("only kvferry: {}", tell(piece)));
    }
    for (a, b) in &diff.unequal {
        different += a.len;
        first(&|| format!("kvferry {}; recorded {}", tell(a), tell(b)));
    }
    let none = Consumer::default();
    for &piece in theirs.contradictions.iter().chain(&diff.second_only) {
        let consumer = consumers.get(piece.rank).unwrap_or(&none);
        owners(piece, &consumer.contents, &mut |part, owner| match judge(
            part.content,
            owner,
            needs,
            consumer.has(part.addr, part.len),
        ) {
            Some(Surplus::Tail) => tally.tail += part.len,
            Some(Surplus::Unread) => tally.unread += part.len,
            Some(Surplus::Padding) => tally.padding += part.len,
            None => {
                missing += part.len;
                first(&|| format!("only recorded: {}", tell(&part)));
            }
        });
    }
    (fault.extra, fault.missing, fault.different) = (extra, missing, different);
    if extra + missing + different == 0 { Ok(tally) } else { Err(fault) }
}

enum Surplus {
    Tail,
    Unread,
    Padding,
}

/// What of an item its consumer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Bytes of one entry over all heads; 0 for states.
    entry: u64,
    /// Entries that are needed; places, of a ring.
    entries: (u64, u64),
}

impl Need {
    /// Whether a byte of the item is needed; of a state all are.
    #[must_use]
    pub fn has(&self, byte: u64) -> bool {
        byte.checked_div(self.entry).is_none_or(|entry| (self.entries.0..self.entries.1).contains(&entry))
    }
}

/// What the consumer needs, by the producer's item number; `None` where it has no such item.
#[must_use]
pub fn needs(src: &Engine, dst: &Engine, lists: &Lists) -> Vec<Option<Need>> {
    let names = Names::new(&src.manifest);
    let mut out: Vec<Option<Need>> = src.manifest.spec().items().iter().map(|_| None).collect();
    for (group, list) in dst.manifest.groups().iter().zip(&lists.dst) {
        for &id in &group.items {
            let Some(item) = dst.manifest.spec().get(id) else { continue };
            let Some(slot) = names.get(&item.name).and_then(|n| out.get_mut(n)) else { continue };
            *slot = match (&item.kind, list) {
                (ItemKind::Paged(spec), List::Paged { from, .. }) => {
                    let (n, tokens) = (Tokens::new(lists.tokens), lists.tokens);
                    let range = spec.retention.needed(n).intersect(TokenRange::new(Tokens::new(*from), n));
                    let per_entry = u64::from(spec.tokens_per_entry.max(1));
                    let entries = match spec.retention {
                        Retention::Ring(r) => (0, if range.is_empty() { 0 } else { r.get().min(tokens) }),
                        _ => (range.start().get() / per_entry, range.end().get() / per_entry),
                    };
                    let width: u64 = spec.components.iter().map(|c| c.width.get()).sum();
                    Some(Need { entry: width * u64::from(spec.heads), entries })
                }
                _ => Some(Need { entry: 0, entries: (0, 0) }),
            };
        }
    }
    out
}

/// What a byte is that only the record moves; `None` where it should have been moved, or should not have.
fn judge(content: Content, owner: Option<Content>, needs: &[Option<Need>], listed: bool) -> Option<Surplus> {
    match (content, owner) {
        (Content::Nothing { .. }, None) if listed => Some(Surplus::Padding),
        (Content::Logical { item, byte }, Some(owner)) if owner == content => {
            let need = needs.get(item)?.as_ref()?;
            let entry = byte.checked_div(need.entry)?;
            if entry >= need.entries.1 {
                Some(Surplus::Tail)
            } else if entry < need.entries.0 {
                Some(Surplus::Unread)
            } else {
                None
            }
        }
        _ => None,
    }
}

impl Content {
    /// In words, for a message.
    #[must_use]
    pub fn words(self, src: &Engine) -> String {
        let (number, byte) = match self {
            Self::Nothing { rank, addr } => return format!("of no item (producer rank {rank}, address {addr:#x})"),
            Self::Logical { item, byte } => (item, byte),
        };
        let Some(item) = src.manifest.spec().items().get(number) else { return format!("item {number}, byte {byte}") };
        let Some(paged) = item.as_paged() else { return format!("state {}, byte {byte}", item.name) };
        let width = paged.components.iter().map(|c| c.width.get()).sum::<u64>().max(1);
        let heads = u64::from(paged.heads.max(1));
        let (vector, inside) = (byte / width, byte % width);
        format!("item {}, entry {}, head {}, byte {inside}", item.name, vector / heads, vector % heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_ends_where_the_listed_blocks_end() {
        let consumer = Consumer { contents: ContentMap::default(), rows: vec![(10, 20), (30, 40)] };
        assert!(consumer.has(10, 10) && consumer.has(39, 1));
        assert!(!consumer.has(9, 2) && !consumer.has(19, 2) && !consumer.has(20, 1) && !consumer.has(40, 1));
    }

    #[test]
    fn only_what_nobody_reads_is_let_pass() {
        let needs = [Some(Need { entry: 8, entries: (2, 5) }), Some(Need { entry: 0, entries: (0, 0) })];
        let at = |entry: u64| Content::Logical { item: 0, byte: entry * 8 };
        let verdict = |content, owner| match judge(content, owner, &needs, true) {
            Some(Surplus::Tail) => "tail",
            Some(Surplus::Unread) => "unread",
            Some(Surplus::Padding) => "padding",
            None => "fault",
        };
        let nothing = Content::Nothing { rank: 0, addr: 1 };
        assert_eq!(verdict(at(1), Some(at(1))), "unread");
        assert_eq!(verdict(at(2), Some(at(2))), "fault");
        assert_eq!(verdict(at(4), Some(at(4))), "fault");
        assert_eq!(verdict(at(5), Some(at(5))), "tail");
        // A tail byte that lands where another token's belongs.
        assert_eq!(verdict(at(5), Some(at(6))), "fault");
        assert_eq!(verdict(at(5), None), "fault");
        assert_eq!(verdict(nothing, Some(at(5))), "fault");
        assert_eq!(verdict(nothing, None), "padding");
        assert!(judge(nothing, None, &needs, false).is_none());
        let state = Content::Logical { item: 1, byte: 3 };
        assert_eq!(verdict(state, Some(state)), "fault");
    }
}
