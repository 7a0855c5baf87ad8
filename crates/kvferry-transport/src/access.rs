//! Asking before touching: for backends whose lanes reach a peer's memory without the peer's code running.
//!
//! A one-sided lane knows nothing of generations, deregistration or who is done with a region. So the endpoint that
//! submits an operation asks before its first byte and says when it has stopped; the endpoint whose memory it is answers
//! from its table and keeps the regions' owners alive between the two:
//!
//! ```text
//! submitting side                                    side whose memory it is
//! Begin op, read or write, generation, regions  ->
//!                                               <-   Answer op: granted, stale or revoked
//!         (the bytes move)
//! End op (+ notification, if it is Done)        ->   owners released, notification told
//! ```
//!
//! One round trip an operation, pipelined over operations, buys what the [contract](crate::Transport) asks of generations, of
//! owners that outlive transfers and of notifications told once; [`Revocation::Fences`](crate::Revocation::Fences) is what it
//! gives to revocation. It binds peers that keep to the protocol: a peer that was let onto a one-sided lane can reach what was registered there
//! whatever it was told.
//!
//! Sans IO: backends carry [`Message`]s as they like, in any order between operations, but `End` after the bytes of its
//! operation (visible, for a write), and hand the [`Keeper`] what comes in.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::units::RegionId;

use crate::error::RevokeError;
use crate::region::Region;
use crate::table::RegionTable;
use crate::types::{EndpointId, OpKind, RevokeScope};

/// The longest head of a message: what it has before a notification's bytes.
pub const MAX_HEAD: usize = 1 + 8 + 1 + 8 + 4 + 4 * MAX_REGIONS;
/// The most regions that one operation may name at the peer.
pub const MAX_REGIONS: usize = 1 << 14;
/// The most operations that a peer may have open.
pub const MAX_OPEN: usize = 1 << 16;
/// The most regions that all open operations of a peer may name together, one named by two counted twice.
pub const MAX_HELD: usize = 1 << 20;
/// The most operations and named regions of all peers together: ids are by the peers' word, so that bounds for each are none alone.
pub const MAX_IN_ALL: usize = 4 * MAX_HELD;

const BEGIN: u8 = 1;
const ANSWER: u8 = 2;
const END: u8 = 3;

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// May these regions be touched?
    Begin {
        /// The operation, by the asking side's own number.
        op: u64,
        /// Which way.
        kind: OpKind,
        /// The generation of the registrations that it knows.
        generation: u64,
        /// The regions, ascending.
        regions: Vec<RegionId>,
    },
    /// The answer to a `Begin`.
    Answer {
        /// The operation.
        op: u64,
        /// Whether.
        answer: Answer,
    },
    /// The operation has stopped.
    End {
        /// The operation.
        op: u64,
        /// What is to be told, if it is done and carried something.
        notify: Option<&'a [u8]>,
    },
}

/// Whether memory may be touched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Answer {
    /// It may, until the operation's `End`.
    Granted,
    /// A region is not registered as the asking side believes.
    Stale(RegionId),
    /// Access to a region was taken back.
    Revoked(RegionId),
    /// The same operation twice, or too many.
    Refused,
}

/// Bytes that are no message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// It is too short, too long, or has a number that means nothing.
    #[error("{len} bytes that are no message about access: {what}")]
    Malformed {
        /// Its length.
        len: usize,
        /// What is wrong.
        what: &'static str,
    },
}

impl<'a> Message<'a> {
    /// The bytes, without a notification's, which follow directly.
    #[must_use]
    pub fn head(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        match self {
            Self::Begin { op, kind, generation, regions } => {
                out.push(BEGIN);
                out.extend_from_slice(&op.to_le_bytes());
                out.push(u8::from(*kind == OpKind::Write));
                out.extend_from_slice(&generation.to_le_bytes());
                out.extend_from_slice(&u32::try_from(regions.len()).unwrap_or(u32::MAX).to_le_bytes());
                regions.iter().for_each(|r| out.extend_from_slice(&r.get().to_le_bytes()));
            }
            Self::Answer { op, answer } => {
                let (code, region) = match answer {
                    Answer::Granted => (0, 0),
                    Answer::Stale(r) => (1, r.get()),
                    Answer::Revoked(r) => (2, r.get()),
                    Answer::Refused => (3, 0),
                };
                out.push(ANSWER);
                out.extend_from_slice(&op.to_le_bytes());
                out.push(code);
                out.extend_from_slice(&region.to_le_bytes());
            }
            Self::End { op, notify } => {
                out.push(END);
                out.extend_from_slice(&op.to_le_bytes());
                out.push(u8::from(notify.is_some()));
            }
        }
        out
    }

    /// All bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.head();
        if let Self::End { notify: Some(bytes), .. } = self {
            out.extend_from_slice(bytes);
        }
        out
    }

    /// Parses what a peer sent.
    ///
    /// # Errors
    /// If it is no message. Nothing is allocated beyond the size of `bytes`.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let bad = |what| MessageError::Malformed { len: bytes.len(), what };
        let mut rest = bytes;
        let [tag] = take(&mut rest).ok_or_else(|| bad("it is empty"))?;
        let op = u64::from_le_bytes(take(&mut rest).ok_or_else(|| bad("it ends inside the operation"))?);
        let [code] = take(&mut rest).ok_or_else(|| bad("it ends behind the operation"))?;
        match tag {
            BEGIN => {
                let kind = match code {
                    0 => OpKind::Read,
                    1 => OpKind::Write,
                    _ => return Err(bad("neither a read nor a write")),
                };
                let generation =
                    u64::from_le_bytes(take(&mut rest).ok_or_else(|| bad("it ends inside the generation"))?);
                let count = u32::from_le_bytes(take(&mut rest).ok_or_else(|| bad("it ends inside the count"))?);
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                if count > MAX_REGIONS || rest.len() != 4 * count {
                    return Err(bad("the number of regions isn't that of its bytes"));
                }
                let regions: Vec<RegionId> =
                    rest.as_chunks().0.iter().map(|id| RegionId::new(u32::from_le_bytes(*id))).collect();
                if !regions.is_sorted_by(|a, b| a < b) {
                    return Err(bad("the regions don't ascend"));
                }
                Ok(Self::Begin { op, kind, generation, regions })
            }
            ANSWER => {
                let region =
                    RegionId::new(u32::from_le_bytes(take(&mut rest).ok_or_else(|| bad("it ends inside the region"))?));
                let answer = match code {
                    0 => Answer::Granted,
                    1 => Answer::Stale(region),
                    2 => Answer::Revoked(region),
                    3 => Answer::Refused,
                    _ => return Err(bad("an unknown answer")),
                };
                if rest.is_empty() { Ok(Self::Answer { op, answer }) } else { Err(bad("bytes behind the answer")) }
            }
            END => match (code, rest) {
                (0, []) => Ok(Self::End { op, notify: None }),
                (1, notify) => Ok(Self::End { op, notify: Some(notify) }),
                _ => Err(bad("an end with neither a notification nor none")),
            },
            _ => Err(bad("an unknown kind")),
        }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

/// The side whose memory it is: who has which operations open, and what was revoked.
#[derive(Debug, Default)]
pub struct Keeper {
    open: BTreeMap<EndpointId, Open>,
    /// Operations and their regions, of all peers.
    in_all: usize,
    revoked_regions: BTreeSet<RegionId>,
    revoked_peers: BTreeSet<EndpointId>,
    /// The generation that `revoked_regions` are of.
    generation: u64,
}

/// What one peer has open.
#[derive(Debug, Default)]
struct Open {
    ops: BTreeMap<u64, Vec<Region>>,
    /// Regions of all of them.
    held: usize,
}

impl Keeper {
    /// Nothing open, nothing revoked.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Answers a `Begin`. Granted, the regions' owners are kept alive until [`end`](Self::end) or [`gone`](Self::gone).
    pub fn begin(
        &mut self,
        from: EndpointId,
        op: u64,
        generation: u64,
        regions: &[RegionId],
        table: &RegionTable,
    ) -> Answer {
        let mut kept = Vec::with_capacity(regions.len());
        for &id in regions {
            match table.get(id) {
                Some(region) if generation == table.generation() => kept.push(region.clone()),
                _ => return Answer::Stale(id),
            }
        }
        let of_region = |id: &&RegionId| self.generation == table.generation() && self.revoked_regions.contains(id);
        let revoked = if self.revoked_peers.contains(&from) { regions.first() } else { regions.iter().find(of_region) };
        if let Some(&id) = revoked {
            return Answer::Revoked(id);
        }
        if self.in_all + 1 + kept.len() > MAX_IN_ALL {
            return Answer::Refused;
        }
        let open = self.open.entry(from).or_default();
        if open.ops.len() >= MAX_OPEN || open.held + kept.len() > MAX_HELD || open.ops.contains_key(&op) {
            return Answer::Refused;
        }
        open.held += kept.len();
        self.in_all += 1 + kept.len();
        open.ops.insert(op, kept);
        Answer::Granted
    }

    /// Takes an `End`; whether the operation was open, and so its notification is to be told.
    pub fn end(&mut self, from: EndpointId, op: u64) -> bool {
        let Some(open) = self.open.get_mut(&from) else { return false };
        let Some(ended) = open.ops.remove(&op) else { return false };
        open.held -= ended.len();
        self.in_all -= 1 + ended.len();
        if open.ops.is_empty() {
            self.open.remove(&from);
        }
        true
    }

    /// A peer is gone for good: it will not touch memory any more.
    pub fn gone(&mut self, peer: EndpointId) {
        if let Some(open) = self.open.remove(&peer) {
            self.in_all -= open.ops.len() + open.held;
        }
    }

    /// Operations of peers that have begun and not ended.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.values().map(|open| open.ops.len()).sum()
    }

    /// Refuses what begins from now on.
    ///
    /// # Errors
    /// If the region is not registered.
    pub fn revoke(&mut self, scope: RevokeScope, table: &RegionTable) -> Result<(), RevokeError> {
        match scope {
            RevokeScope::Endpoint(peer) => {
                self.revoked_peers.insert(peer);
            }
            RevokeScope::Region(region) => {
                table.get(region).ok_or(RevokeError::Unknown { region })?;
                if self.generation != table.generation() {
                    self.generation = table.generation();
                    self.revoked_regions.clear();
                }
                self.revoked_regions.insert(region);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Capabilities;

    fn ids(raw: &[u32]) -> Vec<RegionId> {
        raw.iter().map(|&r| RegionId::new(r)).collect()
    }

    fn table(regions: usize) -> (RegionTable, Region) {
        let whole = Region::zeroed(8192).unwrap();
        let mut table = RegionTable::new();
        for i in 0..regions {
            table.register(whole.part(i, 8).unwrap(), &Capabilities::host("test")).unwrap();
        }
        (table, whole)
    }

    const A: EndpointId = EndpointId::new([1; 16]);
    const B: EndpointId = EndpointId::new([2; 16]);

    #[test]
    fn messages_come_back_and_every_cut_is_refused() {
        let messages = [
            Message::Begin { op: 7, kind: OpKind::Write, generation: 3, regions: ids(&[0, 5, 9]) },
            Message::Begin { op: 8, kind: OpKind::Read, generation: 0, regions: Vec::new() },
            Message::Answer { op: 7, answer: Answer::Granted },
            Message::Answer { op: 7, answer: Answer::Stale(RegionId::new(4)) },
            Message::Answer { op: 7, answer: Answer::Revoked(RegionId::new(4)) },
            Message::Answer { op: 7, answer: Answer::Refused },
            Message::End { op: 7, notify: None },
            Message::End { op: u64::MAX, notify: Some(b"payload") },
            Message::End { op: 7, notify: Some(b"") },
        ];
        for message in &messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).as_ref(), Ok(message));
            for cut in 0..bytes.len() {
                if let Ok(shorter) = Message::decode(&bytes[..cut]) {
                    // Only a notification may be shorter and still be one.
                    assert!(matches!(shorter, Message::End { notify: Some(_), .. }), "{message:?} cut at {cut}");
                }
            }
            let mut longer = bytes.clone();
            longer.push(0);
            let grown = Message::decode(&longer);
            assert!(grown.is_err() || matches!(grown, Ok(Message::End { notify: Some(_), .. })), "{grown:?}");
        }
        let unsorted = Message::Begin { op: 1, kind: OpKind::Read, generation: 0, regions: ids(&[3, 3]) }.encode();
        assert!(Message::decode(&unsorted).is_err());
    }

    #[test]
    fn owners_live_from_begin_to_end_whatever_is_deregistered() {
        let (mut table, whole) = table(2);
        let mut keeper = Keeper::new();
        assert_eq!(keeper.begin(A, 1, 0, &ids(&[0, 1]), &table), Answer::Granted);
        assert_eq!(keeper.begin(A, 1, 0, &ids(&[0]), &table), Answer::Refused);
        assert_eq!(keeper.begin(B, 1, 0, &ids(&[1]), &table), Answer::Granted);
        table.deregister(RegionId::new(0), 0).unwrap();
        table.deregister(RegionId::new(1), 0).unwrap();
        assert_eq!((whole.owners(), keeper.open()), (1 + 3, 2));
        assert_eq!(keeper.begin(A, 2, 0, &ids(&[0]), &table), Answer::Stale(RegionId::new(0)));
        assert!(!keeper.end(A, 2) && keeper.end(A, 1) && !keeper.end(A, 1));
        keeper.gone(B);
        assert_eq!((whole.owners(), keeper.open()), (1, 0));
        assert!(!keeper.end(B, 1));
        // The next generation's region 0 is another region.
        let again = table.register(whole.part(0, 8).unwrap(), &Capabilities::host("test")).unwrap();
        assert_eq!(keeper.begin(A, 3, 0, &[again], &table), Answer::Stale(again));
        assert_eq!(keeper.begin(A, 3, 1, &[again], &table), Answer::Granted);
    }

    #[test]
    fn what_is_revoked_is_refused_from_then_on() {
        let (mut table, whole) = table(3);
        let mut keeper = Keeper::new();
        let unknown = RevokeScope::Region(RegionId::new(9));
        assert_eq!(keeper.revoke(unknown, &table), Err(RevokeError::Unknown { region: RegionId::new(9) }));
        keeper.revoke(RevokeScope::Region(RegionId::new(1)), &table).unwrap();
        assert_eq!(keeper.begin(A, 1, 0, &ids(&[0, 1]), &table), Answer::Revoked(RegionId::new(1)));
        assert_eq!(keeper.begin(A, 1, 0, &ids(&[0, 2]), &table), Answer::Granted);
        keeper.revoke(RevokeScope::Endpoint(A), &table).unwrap();
        assert_eq!(keeper.begin(A, 2, 0, &ids(&[2]), &table), Answer::Revoked(RegionId::new(2)));
        assert_eq!(keeper.begin(B, 2, 0, &ids(&[2]), &table), Answer::Granted);
        // A region of the next generation is not the revoked one, a peer stays the same.
        (0..3).for_each(|i| drop(table.deregister(RegionId::new(i), 0).unwrap()));
        for i in 0..2 {
            table.register(whole.part(i, 8).unwrap(), &Capabilities::host("test")).unwrap();
        }
        assert_eq!(keeper.begin(B, 3, 1, &ids(&[1]), &table), Answer::Granted);
        assert_eq!(keeper.begin(A, 3, 1, &ids(&[1]), &table), Answer::Revoked(RegionId::new(1)));
    }

    #[test]
    fn a_peer_can_open_only_so_many() {
        let (table, _whole) = table(1);
        let mut keeper = Keeper::new();
        for op in 0..MAX_OPEN as u64 {
            assert_eq!(keeper.begin(A, op, 0, &[], &table), Answer::Granted);
        }
        assert_eq!(keeper.begin(A, u64::MAX, 0, &[], &table), Answer::Refused);
        assert_eq!(keeper.begin(B, 0, 0, &[], &table), Answer::Granted);
        let (table, _whole) = self::table(1 << 12);
        let all = ids(&(0..1 << 12).collect::<Vec<_>>());
        let granted = (0..).take_while(|&op| keeper.begin(B, op + 1, 0, &all, &table) == Answer::Granted).count();
        assert_eq!(granted, MAX_HELD >> 12);
        assert!(keeper.end(B, 1));
        assert_eq!(keeper.begin(B, 1, 0, &all, &table), Answer::Granted);
    }

    #[test]
    fn all_peers_together_can_open_only_so_many() {
        let (table, _whole) = table(1 << 12);
        let all = ids(&(0..1 << 12).collect::<Vec<_>>());
        let mut keeper = Keeper::new();
        let each = MAX_HELD >> 12;
        let peer = |i: usize| EndpointId::new([u8::try_from(i / each).unwrap(); 16]);
        let begin = |keeper: &mut Keeper, i: usize| keeper.begin(peer(i), i as u64, 0, &all, &table);
        let granted = (0..10_000).take_while(|&i| begin(&mut keeper, i) == Answer::Granted).count();
        assert_eq!(granted, MAX_IN_ALL / (all.len() + 1));
        assert_eq!(begin(&mut keeper, 9 * each), Answer::Refused);
        keeper.gone(peer(0));
        assert!((0..each).all(|i| begin(&mut keeper, 9 * each + i) == Answer::Granted));
        assert!(keeper.end(peer(each), each as u64));
        assert_eq!(begin(&mut keeper, 5 * each), Answer::Granted);
        assert_eq!(begin(&mut keeper, 5 * each + 1), Answer::Refused);
        // Nothing is left of what is counted.
        (0..12).for_each(|i| keeper.gone(EndpointId::new([i; 16])));
        assert_eq!((keeper.open(), keeper.in_all), (0, 0));
    }
}
