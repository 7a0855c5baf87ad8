//! One request between two manifests, and what must happen to each value of each item.

use std::ops::Range;

use kvferry_geometry::manifest::{CacheGroup, Manifest};
use kvferry_geometry::placement::HeadRange;
use kvferry_geometry::request::{BlockTable, DstGroup, Request, SrcGroup, Tail};
use kvferry_geometry::spec::{PagedItem, Retention, ValueHeads};
use kvferry_geometry::units::Name;

use crate::at;
use crate::execute::Finding;
use crate::walk::{Cell, Listed, Table};

/// What the producer lists for one of its groups.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SrcTable {
    /// Its blocks; none for a group of states.
    pub table: Table,
    /// Tokens whose bytes were computed.
    pub held: Range<u64>,
    /// The block of the last held token is frozen, and zero after it.
    pub frozen: bool,
    /// The states of a group of states: (position, slot).
    pub states: Vec<(u64, u32)>,
}

/// What the consumer lists for one of its groups.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DstTable {
    /// Its blocks; none for a group of states.
    pub table: Table,
    /// It already has the tokens below this.
    pub cached: u64,
    /// The states that a group of states takes: (position, slot). The one that it resumes from is at the end of the prompt.
    pub states: Vec<(u64, u32)>,
}

/// One request between two engines; tables by group id of their engine.
#[derive(Clone, Debug)]
pub struct Transfer<'m> {
    /// The producer.
    pub src: &'m Manifest,
    /// The consumer.
    pub dst: &'m Manifest,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The producer's tables.
    pub src_tables: Vec<SrcTable>,
    /// The consumer's tables.
    pub dst_tables: Vec<DstTable>,
}

/// What must happen to one value, or one element of a state, at the consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays as it was.
    Untouched,
    /// It arrives.
    Moved,
    /// It becomes zero.
    Zeroed,
}

/// The fates of one item of the consumer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fates {
    /// By token.
    tokens: Vec<Fate>,
    /// Of every listed state; `None` for paged items.
    states: Option<Fate>,
}

impl Fates {
    /// What must happen to one of the item's cells.
    #[must_use]
    pub fn of(&self, cell: &Cell<'_>) -> Fate {
        if let Some(fate) = self.states {
            return fate;
        }
        let fate = |token: u64| self.tokens.get(at(token)).copied().unwrap_or(Fate::Untouched);
        // A value of several entries is as soon as its first entry is, and changes with every further one.
        let mut entries = cell.entries().map(fate);
        let first = entries.next().unwrap_or(Fate::Untouched);
        if entries.any(|f| f == Fate::Moved) { Fate::Moved } else { first }
    }
}

/// What is known of one of the producer's cells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// A function of its coordinate.
    Held,
    /// Zero, by the producer's word.
    Zero,
    /// Nothing.
    Nothing,
}

/// Why a request can't be served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Gap {
    /// The producer doesn't hold a token that the consumer needs.
    NotHeld {
        /// The item.
        item: Name,
        /// The token.
        token: u64,
    },
    /// The consumer's table has no place for a token that it needs.
    NoRoom {
        /// The item.
        item: Name,
        /// The token.
        token: u64,
    },
    /// The consumer has a token already and needs a later one, and one value stands for both.
    Split {
        /// The item.
        item: Name,
        /// The first token that it doesn't have.
        token: u64,
    },
    /// The producer has no state at a position that the consumer takes.
    NoState {
        /// The item.
        item: Name,
        /// The position.
        position: u64,
    },
}

impl<'m> Transfer<'m> {
    /// A request as the oracle reads it.
    #[must_use]
    pub fn of(src: &'m Manifest, dst: &'m Manifest, request: &Request) -> Self {
        let table = |t: &BlockTable| Table {
            first: t.first_position(),
            blocks: t.iter().map(kvferry_geometry::units::BlockId::get).collect(),
        };
        let of_src = |g: &SrcGroup| match g {
            SrcGroup::Paged(g) => SrcTable {
                table: table(&g.table),
                held: g.held.start().get()..g.held.end().get(),
                frozen: g.tail == Tail::Frozen,
                states: Vec::new(),
            },
            SrcGroup::State(g) => SrcTable {
                states: g.checkpoints.iter().map(|c| (c.position.get(), c.slot.get())).collect(),
                ..SrcTable::default()
            },
        };
        let tokens = request.tokens.get();
        let of_dst = |g: &DstGroup| match g {
            DstGroup::Paged(g) => DstTable { table: table(&g.table), cached: g.cached.get(), states: Vec::new() },
            DstGroup::State(g) => {
                let resume = g.slot.map(|slot| (tokens, slot.get()));
                let more = g.more.iter().map(|c| (c.position.get(), c.slot.get()));
                DstTable { states: resume.into_iter().chain(more).collect(), ..DstTable::default() }
            }
        };
        let src_tables = request.src.iter().map(of_src).collect();
        Self { src, dst, tokens, src_tables, dst_tables: request.dst.iter().map(of_dst).collect() }
    }
}

impl Transfer<'_> {
    /// The producer's table for one of *its* items.
    pub(crate) fn src_table(&self, item: usize) -> Result<&SrcTable, Finding> {
        self.src_tables.get(group_of(self.src, item)).ok_or(Finding::Tables)
    }

    /// The consumer's table for one of *its* items.
    pub(crate) fn dst_table(&self, item: usize) -> Result<&DstTable, Finding> {
        self.dst_tables.get(group_of(self.dst, item)).ok_or(Finding::Tables)
    }

    /// What the producer's cells of an item are walked by.
    ///
    /// # Errors
    /// A missing table.
    pub fn src_listed(&self, item: usize) -> Result<Listed<'_>, Finding> {
        let SrcTable { table, held, states, .. } = self.src_table(item)?;
        Ok(Listed { table, states, end: held.end })
    }

    /// What the consumer's cells of an item are walked by.
    ///
    /// # Errors
    /// A missing table.
    pub fn dst_listed(&self, item: usize) -> Result<Listed<'_>, Finding> {
        let DstTable { table, states, .. } = self.dst_table(item)?;
        Ok(Listed { table, states, end: self.tokens })
    }

    /// What is known of a cell of the *producer's* item.
    pub(crate) fn known(&self, item: usize, cell: &Cell<'_>) -> Result<Known, Finding> {
        let Some(paged) = paged_of(self.src, item) else { return Ok(Known::Held) };
        let SrcTable { held, frozen, .. } = self.src_table(item)?;
        // A value of several entries was begun with its first entry, also where that is no longer held and the next is not full.
        let begun = cell.entries().any(|last| last < held.start) && cell.entries().any(|last| last >= held.end);
        let computed = cell.entries().any(|last| held.contains(&last)) || begun && !held.is_empty();
        // The bytes behind a ring's last token are those of older ones.
        let is_ring = matches!(paged.retention, Retention::Ring(_));
        let frozen_end =
            if *frozen && !is_ring && !held.is_empty() { block_end(self.src, item, held.end - 1) } else { held.end };
        Ok(match computed {
            true => Known::Held,
            false if cell.entries().all(|last| last >= held.end) && cell.last < frozen_end => Known::Zero,
            false => Known::Nothing,
        })
    }

    /// What must happen to the cells of one of the *consumer's* items.
    ///
    /// # Errors
    /// A missing table.
    pub fn fates(&self, dst_item: usize) -> Result<Fates, Finding> {
        let spec = self.dst.spec().items().get(dst_item).ok_or(Finding::Tables)?;
        let src_item = self.src_item(&spec.name);
        let Some(paged) = spec.as_paged() else {
            let fate = if src_item.is_some() { Fate::Moved } else { Fate::Untouched };
            return Ok(Fates { tokens: Vec::new(), states: Some(fate) });
        };
        let dst = self.dst_table(dst_item)?;
        let room = room(self.dst, dst_item, &dst.table);
        let mut fates = vec![Fate::Untouched; at(room.end.max(self.tokens))];
        let mut moved_end = None;
        for token in 0..self.tokens {
            if src_item.is_some() && token >= dst.cached && self.reads(paged, token) {
                fates[at(token)] = Fate::Moved;
                moved_end = Some(token + 1);
            }
        }
        let (Some(src_item), Some(mut end)) = (src_item, moved_end) else {
            return Ok(Fates { tokens: fates, states: None });
        };
        let ring = if let Retention::Ring(ring) = paged.retention { Some(ring.get()) } else { None };
        // A whole tail moves only where it is the producer's last: past the held tokens there is nothing but zeros.
        let src = self.src_table(src_item)?;
        if src.frozen && src.held.end == end && ring.is_none() {
            let stop = block_end(self.src, src_item, end - 1);
            while end < stop && end < room.end {
                fates[at(end)] = Fate::Moved;
                end += 1;
            }
        }
        // Behind the last token of a ring that has gone round are tokens that are still read.
        if ring.is_none_or(|ring| self.tokens < ring) {
            for token in end..room.end {
                if room.contains(&token) {
                    fates[at(token)] = Fate::Zeroed;
                }
            }
        }
        Ok(Fates { tokens: fates, states: None })
    }

    /// Whether the token that follows the prompt reads `token`.
    fn reads(&self, paged: &PagedItem, token: u64) -> bool {
        let next = self.tokens;
        match paged.retention {
            // Itself and the W - 1 before it.
            Retention::Window(w) => next - token < w.get(),
            Retention::Chunk(c) => {
                let mut start = 0;
                while start + c.get() <= next {
                    start += c.get();
                }
                token >= start
            }
            // The R before it, whose places are not taken yet.
            Retention::Ring(r) => next - token <= r.get(),
            _ => true,
        }
    }

    /// Everything that the consumer needs and the producer lacks, or that has no room: the first token for each item.
    ///
    /// # Errors
    /// A missing table.
    pub fn gaps(&self) -> Result<Vec<Gap>, Finding> {
        let mut gaps = Vec::new();
        for (dst_item, spec) in self.dst.spec().items().iter().enumerate() {
            let Some(src_item) = self.src_item(&spec.name) else { continue };
            let (src, dst) = (self.src_table(src_item)?, self.dst_table(dst_item)?);
            let item = &spec.name;
            let Some(paged) = spec.as_paged() else {
                let lacking = dst.states.iter().filter(|d| !src.states.iter().any(|s| s.0 == d.0));
                gaps.extend(lacking.map(|d| Gap::NoState { item: item.clone(), position: d.0 }));
                continue;
            };
            let src_room = room(self.src, src_item, &src.table);
            let room = room(self.dst, dst_item, &dst.table);
            let is_ring = matches!(paged.retention, Retention::Ring(_));
            let needed = |t: &u64| *t >= dst.cached && self.reads(paged, *t);
            let lacking = |t: &u64| !src.held.contains(t) || !is_ring && !src_room.contains(t);
            if let Some(token) = (0..self.tokens).filter(needed).find(lacking) {
                gaps.push(Gap::NotHeld { item: item.clone(), token });
            }
            if let Some(token) = (0..self.tokens).filter(needed).find(|t| !is_ring && !room.contains(t)) {
                gaps.push(Gap::NoRoom { item: item.clone(), token });
            }
            // The first value that moves would stand for tokens that are there already.
            let moves = (0..self.tokens).find(needed);
            let cuts = |size: u64| {
                moves.is_some_and(|first| {
                    (dst.cached.saturating_sub(size)..dst.cached).any(|had| same_stretch(had, first, size))
                })
            };
            if paged.components.iter().any(|c| c.span > 1 && cuts(paged.tokens_per_value(c))) {
                gaps.push(Gap::Split { item: item.clone(), token: dst.cached });
            }
        }
        Ok(gaps)
    }

    /// The producer's index of a name.
    pub(crate) fn src_item(&self, name: &Name) -> Option<usize> {
        self.src.spec().items().iter().position(|i| i.name == *name)
    }
}

/// Items that can't move since one of their values stands for all heads of a rank, and some rank's heads are not those of a
/// rank of the other engine, or overlap another's of its own.
#[must_use]
pub fn unshareable(src: &Manifest, dst: &Manifest) -> Vec<Name> {
    let mut out = Vec::new();
    for (d, spec) in dst.spec().items().iter().enumerate() {
        let Some(s) = src.spec().items().iter().position(|i| i.name == spec.name) else { continue };
        let shared = |p: &PagedItem| p.components.iter().any(|c| c.heads == ValueHeads::Shared);
        if !spec.as_paged().is_some_and(shared) {
            continue;
        }
        let heads = |m: &Manifest, item: usize| -> Vec<HeadRange> {
            m.ranks().iter().filter_map(|r| Some(r.placement.get(item)?.as_ref()?.as_paged()?.heads)).collect()
        };
        let (src_heads, dst_heads) = (heads(src, s), heads(dst, d));
        let same = |a: &HeadRange, b: &HeadRange| a.start() == b.start() && a.end() == b.end();
        let known = |a: &[HeadRange], b: &[HeadRange]| a.iter().all(|x| b.iter().any(|y| same(x, y)));
        let apart = |a: &HeadRange, b: &HeadRange| a.end() <= b.start() || b.end() <= a.start();
        let clean = |a: &[HeadRange]| a.iter().all(|x| a.iter().all(|y| same(x, y) || apart(x, y)));
        if !known(&src_heads, &dst_heads) || !known(&dst_heads, &src_heads) || !clean(&src_heads) {
            out.push(spec.name.clone());
        }
    }
    out
}

fn paged_of(manifest: &Manifest, item: usize) -> Option<&PagedItem> {
    manifest.spec().items().get(item).and_then(|i| i.as_paged())
}

fn group_of(manifest: &Manifest, item: usize) -> usize {
    let has = |g: &CacheGroup| g.items.iter().any(|i| i.index() == item);
    manifest.groups().iter().position(has).unwrap_or(usize::MAX)
}

/// Tokens that the group of an item puts into one entry of its table.
fn block_tokens(manifest: &Manifest, item: usize) -> u64 {
    manifest.groups().get(group_of(manifest, item)).map_or(1, |g| g.block_tokens.get())
}

/// The tokens that a table has places for.
fn room(manifest: &Manifest, item: usize, table: &Table) -> Range<u64> {
    let size = block_tokens(manifest, item);
    table.first * size..(table.first + table.blocks.len() as u64) * size
}

/// One past the last token of the block that `token` lies in.
fn block_end(manifest: &Manifest, item: usize, token: u64) -> u64 {
    let size = block_tokens(manifest, item);
    let mut end = size;
    while end <= token {
        end += size;
    }
    end
}

/// Whether two tokens are in one stretch of `size`, counted from token 0.
fn same_stretch(a: u64, b: u64, size: u64) -> bool {
    let mut end = size;
    while end <= a.min(b) {
        end += size;
    }
    a.max(b) < end
}
