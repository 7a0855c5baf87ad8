//! Byte relations, compared by content.
//!
//! A producer byte is known by what it holds: a [`Content`] is an item and a byte of that item counted over the whole
//! model, so that equal bytes on different ranks have equal content. A [`Relation`] says which content lands on which
//! byte of which consumer rank; two plans that read different replicas of the same bytes have the same relation.

use crate::vllm::Run;

/// What a byte of a producer is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Content {
    /// A byte of an item, which is the item's number by name; counted by [`Cell`]s.
    Logical {
        /// The item.
        item: usize,
        /// The byte.
        byte: u64,
    },
    /// A byte that no item of the request has: padding, or another block's.
    Nothing {
        /// The producer rank.
        rank: usize,
        /// Its address.
        addr: u64,
    },
}

impl Content {
    fn plus(self, bytes: u64) -> Self {
        match self {
            Self::Logical { item, byte } => Self::Logical { item, byte: byte + bytes },
            Self::Nothing { rank, addr } => Self::Nothing { rank, addr: addr + bytes },
        }
    }
}

/// Neighbouring bytes of one rank that are neighbouring bytes of an item.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The item.
    pub item: usize,
    /// First byte of the item.
    pub byte: u64,
}

/// What lies where in the blocks of one request on one rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ContentMap {
    cells: Vec<Cell>,
}

/// Two bytes of a request in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("items {a} and {b} of one request share the byte at address {addr}")]
pub struct Overlap {
    /// The address.
    pub addr: u64,
    /// An item.
    pub a: usize,
    /// Another, or the same.
    pub b: usize,
}

impl ContentMap {
    /// Sorts and merges cells.
    ///
    /// # Errors
    /// Two cells that share a byte.
    pub fn new(mut cells: Vec<Cell>) -> Result<Self, Overlap> {
        cells.sort_unstable();
        let mut merged: Vec<Cell> = Vec::new();
        for cell in cells {
            if let Some(last) = merged.last_mut() {
                if last.addr + last.len > cell.addr {
                    return Err(Overlap { addr: cell.addr, a: last.item, b: cell.item });
                }
                let follows = last.addr + last.len == cell.addr && last.byte + last.len == cell.byte;
                if follows && last.item == cell.item {
                    last.len += cell.len;
                    continue;
                }
            }
            merged.push(cell);
        }
        Ok(Self { cells: merged })
    }

    /// The pieces of a stretch of memory: offset in it, length, and the content of those that have one.
    fn pieces(&self, addr: u64, len: u64, each: &mut dyn FnMut(u64, u64, Option<(usize, u64)>)) {
        let end = addr + len;
        let mut at = addr;
        let first = self.cells.partition_point(|c| c.addr + c.len <= addr);
        for cell in &self.cells[first..] {
            if cell.addr >= end {
                break;
            }
            if cell.addr > at {
                each(at - addr, cell.addr - at, None);
                at = cell.addr;
            }
            let stop = end.min(cell.addr + cell.len);
            each(at - addr, stop - at, Some((cell.item, cell.byte + (at - cell.addr))));
            at = stop;
        }
        if at < end {
            each(at - addr, end - at, None);
        }
    }
}

/// Neighbouring bytes of a consumer rank that get neighbouring content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Piece {
    /// The consumer rank.
    pub rank: usize,
    /// Its first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// What the first byte gets.
    pub content: Content,
}

impl Piece {
    fn cut(self, from: u64, to: u64) -> Self {
        let skip = from - self.addr;
        Self { addr: from, len: to - from, content: self.content.plus(skip), ..self }
    }
}

/// Which content lands where: disjoint pieces by rank and address, neighbours merged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Relation {
    pieces: Vec<Piece>,
    /// Bytes that were written twice, with equal content.
    pub repeated: u64,
    /// Pieces that were written with two contents; the first of each.
    pub contradictions: Vec<Piece>,
}

impl Relation {
    /// The relation of some runs, with one map for each producer rank.
    #[must_use]
    pub fn new(runs: &[Run], producers: &[ContentMap]) -> Self {
        let empty = ContentMap::default();
        let mut pieces = Vec::with_capacity(runs.len());
        for run in runs {
            let map = producers.get(run.src_rank).unwrap_or(&empty);
            map.pieces(run.src, run.len, &mut |skip, len, found| {
                let content = match found {
                    Some((item, byte)) => Content::Logical { item, byte },
                    None => Content::Nothing { rank: run.src_rank, addr: run.src + skip },
                };
                pieces.push(Piece { rank: run.dst_rank, addr: run.dst + skip, len, content });
            });
        }
        pieces.sort_unstable();
        let mut out = Self::default();
        for piece in pieces {
            out.add(piece);
        }
        out
    }

    /// The relation where every rank gets what its map says.
    #[must_use]
    pub fn of_contents(consumers: &[ContentMap]) -> Self {
        let mut out = Self::default();
        for (rank, map) in consumers.iter().enumerate() {
            for c in &map.cells {
                let content = Content::Logical { item: c.item, byte: c.byte };
                out.add(Piece { rank, addr: c.addr, len: c.len, content });
            }
        }
        out
    }

    /// Takes a piece that starts at or after the last one taken.
    fn add(&mut self, mut piece: Piece) {
        // After a contradiction the last piece may be the end of one that started earlier.
        let ahead = self.pieces.last().filter(|l| l.rank == piece.rank && piece.addr < l.addr).map(|l| l.addr);
        if let Some(ahead) = ahead {
            let end = piece.addr + piece.len;
            self.contradictions.push(piece.cut(piece.addr, end.min(ahead)));
            if end <= ahead {
                return;
            }
            piece = piece.cut(ahead, end);
        }
        let Some(last) = self.pieces.last_mut().filter(|l| l.rank == piece.rank && piece.addr <= l.addr + l.len) else {
            self.pieces.push(piece);
            return;
        };
        let end = last.addr + last.len;
        let continues = last.content.plus(piece.addr - last.addr) == piece.content;
        let shared = (end - piece.addr).min(piece.len);
        match (shared, continues) {
            (0, true) => last.len += piece.len,
            (0, false) => self.pieces.push(piece),
            (_, true) => {
                self.repeated += shared;
                last.len = last.len.max(piece.addr - last.addr + piece.len);
            }
            (_, false) => {
                self.contradictions.push(piece.cut(piece.addr, piece.addr + shared));
                if piece.len > shared {
                    self.pieces.push(piece.cut(end, piece.addr + piece.len));
                }
            }
        }
    }

    /// The part of some consumer ranks.
    #[must_use]
    pub fn of_consumers(mut self, keep: impl Fn(usize) -> bool) -> Self {
        self.pieces.retain(|p| keep(p.rank));
        self.contradictions.retain(|p| keep(p.rank));
        self
    }

    /// The pieces in order.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.len).sum()
    }
}

/// How one relation differs from another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// Bytes with equal content in both.
    pub equal: u64,
    /// Pieces of both with unequal content, first one's and second one's.
    pub unequal: Vec<(Piece, Piece)>,
    /// Pieces of the first only.
    pub first_only: Vec<Piece>,
    /// Pieces of the second only.
    pub second_only: Vec<Piece>,
}

/// Compares two relations byte by byte.
#[must_use]
pub fn compare(first: &Relation, second: &Relation) -> Difference {
    let mut out = Difference::default();
    let (mut a, mut b) = (first.pieces.iter().copied().peekable(), second.pieces.iter().copied().peekable());
    let (mut x, mut y) = (a.next(), b.next());
    loop {
        let (p, q) = match (x, y) {
            (None, None) => return out,
            (Some(p), None) => {
                out.first_only.push(p);
                x = a.next();
                continue;
            }
            (None, Some(q)) => {
                out.second_only.push(q);
                y = b.next();
                continue;
            }
            (Some(p), Some(q)) => (p, q),
        };
        let (pe, qe) = (p.addr + p.len, q.addr + q.len);
        if (p.rank, pe) <= (q.rank, q.addr) {
            out.first_only.push(p);
            x = a.next();
        } else if (q.rank, qe) <= (p.rank, p.addr) {
            out.second_only.push(q);
            y = b.next();
        } else if p.addr < q.addr {
            out.first_only.push(p.cut(p.addr, q.addr));
            x = Some(p.cut(q.addr, pe));
        } else if q.addr < p.addr {
            out.second_only.push(q.cut(q.addr, p.addr));
            y = Some(q.cut(p.addr, qe));
        } else {
            let end = pe.min(qe);
            let (s, t) = (p.cut(p.addr, end), q.cut(q.addr, end));
            if s.content == t.content {
                out.equal += s.len;
            } else {
                out.unequal.push((s, t));
            }
            x = if pe > end { Some(p.cut(end, pe)) } else { a.next() };
            y = if qe > end { Some(q.cut(end, qe)) } else { b.next() };
        }
    }
}

/// Splits a piece at the consumer's own contents: each part with what should lie there, if anything.
pub fn owners(piece: Piece, consumer: &ContentMap, each: &mut dyn FnMut(Piece, Option<Content>)) {
    consumer.pieces(piece.addr, piece.len, &mut |skip, len, found| {
        let part = piece.cut(piece.addr + skip, piece.addr + skip + len);
        each(part, found.map(|(item, byte)| Content::Logical { item, byte }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(addr: u64, len: u64, byte: u64) -> Cell {
        Cell { addr, len, item: 0, byte }
    }

    fn run(dst: u64, src_rank: usize, src: u64, len: u64) -> Run {
        Run { dst_rank: 0, dst, src_rank, src, len }
    }

    /// Rank 1 holds the same 16 bytes as rank 0, in another order.
    fn producers() -> [ContentMap; 2] {
        [
            ContentMap::new(vec![cell(100, 8, 0), cell(108, 8, 8)]).unwrap(),
            ContentMap::new(vec![cell(200, 8, 8), cell(208, 8, 0)]).unwrap(),
        ]
    }

    #[test]
    fn replicas_and_cuts_make_no_difference() {
        let maps = producers();
        let one = Relation::new(&[run(0, 0, 100, 16)], &maps);
        let other = Relation::new(&[run(8, 1, 200, 8), run(0, 1, 208, 3), run(3, 0, 103, 5)], &maps);
        assert_eq!(one, other);
        let diff = compare(&one, &other);
        assert_eq!((diff.equal, diff.unequal.len(), diff.first_only.len()), (16, 0, 0));
    }

    #[test]
    fn one_byte_from_elsewhere_is_seen() {
        let maps = producers();
        let one = Relation::new(&[run(0, 0, 100, 16)], &maps);
        let other = Relation::new(&[run(0, 0, 100, 7), run(7, 1, 200, 1), run(8, 0, 108, 8)], &maps);
        let diff = compare(&one, &other);
        assert_eq!((diff.equal, diff.unequal.len()), (15, 1));
        let (p, q) = diff.unequal[0];
        assert_eq!((p.addr, p.len), (7, 1));
        assert_eq!(q.content, Content::Logical { item: 0, byte: 8 });
        let less = Relation::new(&[run(4, 0, 104, 4)], &maps);
        let diff = compare(&one, &less);
        let only: Vec<_> = diff.first_only.iter().map(|p| (p.addr, p.len)).collect();
        assert_eq!((diff.equal, only), (4, vec![(0, 4), (8, 8)]));
        assert!(diff.second_only.is_empty());
    }

    #[test]
    fn a_second_write_with_the_same_content_is_none_with_another_is_told() {
        let maps = producers();
        let twice = Relation::new(&[run(0, 0, 100, 16), run(8, 1, 200, 8)], &maps);
        assert_eq!((twice.repeated, twice.contradictions.len(), twice.bytes()), (8, 0, 16));
        let clash = Relation::new(&[run(0, 0, 100, 16), run(4, 1, 200, 8)], &maps);
        assert_eq!((clash.contradictions.len(), clash.contradictions[0].addr, clash.bytes()), (1, 4, 16));
        // The second outlives the first, so that the third starts before what is left of the second.
        let nested = Relation::new(&[run(0, 0, 100, 4), run(2, 1, 200, 8), run(3, 0, 100, 2)], &maps);
        assert_eq!((nested.contradictions.len(), nested.bytes()), (3, 10));
    }

    #[test]
    fn padding_is_no_content() {
        let maps = producers();
        let wide = Relation::new(&[run(0, 0, 96, 24)], &maps);
        let contents: Vec<_> = wide.pieces().iter().map(|p| (p.addr, p.len, p.content)).collect();
        assert_eq!(
            contents,
            [
                (0, 4, Content::Nothing { rank: 0, addr: 96 }),
                (4, 16, Content::Logical { item: 0, byte: 0 }),
                (20, 4, Content::Nothing { rank: 0, addr: 116 }),
            ]
        );
        let consumer = ContentMap::new(vec![cell(4, 16, 0)]).unwrap();
        let mut seen = Vec::new();
        for &piece in wide.pieces() {
            owners(piece, &consumer, &mut |part, owner| {
                seen.push((part.content == owner.unwrap_or(part.content), owner.is_some()))
            });
        }
        assert_eq!(seen, [(true, false), (true, true), (true, false)]);
    }

    #[test]
    fn two_items_in_one_place_are_refused() {
        assert!(ContentMap::new(vec![cell(0, 8, 0), cell(7, 8, 8)]).is_err());
    }
}
