//! One request between two manifests, and what must happen to each token of each item.

use std::ops::Range;

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::Name;

use crate::at;
use crate::execute::Finding;
use crate::walk::Table;

/// What the producer lists for one of its groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SrcTable {
    /// Its blocks.
    pub table: Table,
    /// Tokens whose bytes were computed.
    pub held: Range<u64>,
    /// The block of the last held token is frozen, and zero after it.
    pub frozen: bool,
}

/// What the consumer lists for one of its groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DstTable {
    /// Its blocks.
    pub table: Table,
    /// It already has the tokens below this.
    pub cached: u64,
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

/// What must happen to one token of one item at the consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays as it was.
    Untouched,
    /// It arrives.
    Moved,
    /// It becomes zero.
    Zeroed,
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

    /// One past the last token of the producer's item that has a defined value: the end of the held tokens, or of
    /// their last block where that is frozen.
    pub(crate) fn frozen_end(&self, item: usize) -> Result<u64, Finding> {
        let SrcTable { held, frozen, .. } = self.src_table(item)?;
        if !frozen || held.is_empty() {
            return Ok(held.end);
        }
        Ok(block_end(self.src, item, held.end - 1))
    }

    /// What must happen to each token of one of the *consumer's* items, from token 0 to the end of its table.
    ///
    /// # Errors
    /// An item or table that is missing.
    pub fn fates(&self, dst_item: usize) -> Result<Vec<Fate>, Finding> {
        let dst = self.dst_table(dst_item)?;
        let name = &self.dst.spec().items().get(dst_item).ok_or(Finding::Tables)?.name;
        let src_item = self.src_item(name)?;
        let src = self.src_table(src_item)?;
        let room = room(self.dst, dst_item, &dst.table);
        let mut fates = vec![Fate::Untouched; at(room.end.max(self.tokens))];
        let mut moved_end = None;
        for token in 0..self.tokens {
            if token >= dst.cached && self.reads(dst_item, token) {
                fates[at(token)] = Fate::Moved;
                moved_end = Some(token + 1);
            }
        }
        let Some(mut end) = moved_end else { return Ok(fates) };
        // A whole tail moves only where it is the producer's last: past the held tokens there is nothing but zeros.
        if src.frozen && src.held.end == end {
            let stop = block_end(self.src, src_item, end - 1);
            while end < stop && end < room.end {
                fates[at(end)] = Fate::Moved;
                end += 1;
            }
        }
        for token in end..room.end {
            if room.contains(&token) {
                fates[at(token)] = Fate::Zeroed;
            }
        }
        Ok(fates)
    }

    /// Whether the token that follows the prompt reads `token`.
    fn reads(&self, dst_item: usize, token: u64) -> bool {
        let next = self.tokens;
        let Some(paged) = self.dst.spec().items()[dst_item].as_paged() else { return false };
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
            _ => true,
        }
    }

    /// Everything that the consumer needs and the producer lacks, or that has no room: the first token for each item.
    ///
    /// # Errors
    /// An item or table that is missing.
    pub fn gaps(&self) -> Result<Vec<Gap>, Finding> {
        let mut gaps = Vec::new();
        for (dst_item, spec) in self.dst.spec().items().iter().enumerate() {
            let src = self.src_table(self.src_item(&spec.name)?)?;
            let src_room = room(self.src, self.src_item(&spec.name)?, &src.table);
            let dst = self.dst_table(dst_item)?;
            let room = room(self.dst, dst_item, &dst.table);
            let needed = |t: &u64| *t >= dst.cached && self.reads(dst_item, *t);
            let item = &spec.name;
            let lacking = |t: &u64| !src.held.contains(t) || !src_room.contains(t);
            if let Some(token) = (0..self.tokens).filter(needed).find(lacking) {
                gaps.push(Gap::NotHeld { item: item.clone(), token });
            }
            if let Some(token) = (0..self.tokens).filter(needed).find(|t| !room.contains(t)) {
                gaps.push(Gap::NoRoom { item: item.clone(), token });
            }
        }
        Ok(gaps)
    }

    /// The producer's index of a name.
    pub(crate) fn src_item(&self, name: &Name) -> Result<usize, Finding> {
        self.src.spec().items().iter().position(|i| i.name == *name).ok_or(Finding::Tables)
    }
}

fn group_of(manifest: &Manifest, item: usize) -> usize {
    let has = |g: &kvferry_geometry::manifest::CacheGroup| g.items.iter().any(|i| i.index() == item);
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
