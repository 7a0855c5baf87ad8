//! The death of a peer in the middle of large transfers, and traffic with a peer that lives.
//!
//! The same for every backend: a [`Victim`] is a [`PeerProcess`] or whatever else can die, and the endpoint that stays is given.
//! Both functions take an endpoint that has nothing registered, and memory of the victim's bytes with [`MARGIN`] bytes more on either
//! side, which must stay as they are; and they leave the endpoint as they found it.

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;

use super::bytes::{PEER, block, check, fill, reversed, sum_reversed};
use super::ensure;
use super::process::{PeerProcess, SUM_BLOCK};
use crate::error::{LostCause, SubmitError};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Event, OpId, OpKind, Outcome, PeerId, Submission};

/// Bytes of our region before and behind those that move.
pub const MARGIN: u64 = 1 << 20;

/// The seed of what our memory holds at first.
const OURS: u64 = 1000;
/// The seeds of the margins.
const BEFORE: u64 = 2000;
const BEHIND: u64 = 3000;
/// How long what must happen may take, if nothing else is said.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who can die.
pub trait Victim {
    /// Its blob, with one region of whole blocks full of the bytes of [`PEER`].
    fn blob(&self) -> Vec<u8>;

    /// Dies as hard as it can, now.
    ///
    /// # Errors
    /// If it can't.
    fn kill(&mut self) -> Result<(), String>;
}

impl Victim for PeerProcess {
    fn blob(&self) -> Vec<u8> {
        PeerProcess::blob(self).to_vec()
    }

    fn kill(&mut self) -> Result<(), String> {
        PeerProcess::kill(self)
    }
}

/// What the victim is in the middle of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Death {
    /// Which way the bytes go.
    pub kind: OpKind,
    /// Bytes of each operation: the victim's whole region.
    pub bytes: u64,
    /// Bytes of each block; a divisor of `bytes`.
    pub block: u64,
    /// Operations in flight.
    pub operations: u32,
    /// How long after the submission it dies. `None`, for reads: as soon as bytes of the first are seen to arrive.
    pub after: Option<Duration>,
    /// How soon after the death the loss must be told.
    pub within: Duration,
}

impl Death {
    /// During three reads of `bytes` bytes in blocks of 64 KiB, once bytes arrive.
    #[must_use]
    pub fn reading(bytes: u64) -> Self {
        let block = 64 << 10;
        Self { kind: OpKind::Read, bytes, block, operations: 3, after: None, within: PATIENCE }
    }

    /// During three writes, so long after their submission.
    #[must_use]
    pub fn writing(bytes: u64, after: Duration) -> Self {
        Self { kind: OpKind::Write, after: Some(after), ..Self::reading(bytes) }
    }

    /// Bytes of the region that the endpoint which stays must be given.
    #[must_use]
    pub fn our_bytes(&self) -> u64 {
        self.bytes + 2 * MARGIN
    }
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Aftermath {
    /// Operations that were done before.
    pub done: usize,
    /// Operations that ended as failed.
    pub failed: usize,
    /// Operations that ended in doubt.
    pub in_doubt: usize,
    /// From the death to the news of it.
    pub told_after: Duration,
    /// What was told.
    pub cause: LostCause,
}

/// Lets the victim die in the middle, and shows `[peer-death]`: every operation ends once, then the loss is told and nothing
/// after it; no byte outside of the batch's places has changed, and those inside are old or the peer's; the memory is free in the
/// end.
///
/// # Errors
/// What does not hold; also if all operations were done before the death, which then was not in the middle.
pub fn dies_in_the_middle(
    near: &mut dyn Transport,
    ours: &Region,
    victim: &mut dyn Victim,
    death: &Death,
) -> Result<Aftermath, String> {
    let mut run = Run::begin(near, ours, death.bytes, &victim.blob())?;
    let reads = death.kind == OpKind::Read;
    let batch = reversed(death.bytes, death.block, MARGIN, reads).ok_or("no whole number of blocks")?;
    let mut ops = Vec::new();
    for i in 0..death.operations {
        let notify = Some(i.to_le_bytes().to_vec());
        let submission = Submission { peer: run.peer, kind: death.kind, batch: batch.clone(), notify };
        ops.push(run.near.submit(submission).map_err(|e| format!("operation {i}: {e}"))?);
    }
    run.until_the_moment(ours, death)?;
    victim.kill()?;
    let killed = Instant::now();
    let lost = |event: &Event, peer| matches!(event, Event::PeerLost { peer: p, .. } if *p == peer);
    let peer = run.peer;
    run.drive(death.within, "PeerLost", |events| events.iter().any(|e| lost(e, peer)))?;
    let told_after = killed.elapsed();
    let at = run.events.iter().position(|e| lost(e, peer)).unwrap_or(0);
    let Some(Event::PeerLost { cause, .. }) = run.events.get(at).cloned() else { return Err("no loss".to_owned()) };
    let mut aftermath = Aftermath { done: 0, failed: 0, in_doubt: 0, told_after, cause };
    for &op in &ops {
        match run.ends(op, at)? {
            Outcome::Done(_) => aftermath.done += 1,
            Outcome::Failed(_) => aftermath.failed += 1,
            Outcome::InDoubt(_) => aftermath.in_doubt += 1,
        }
    }
    ensure!(aftermath.done < ops.len(), "all operations were done before the death; take more bytes or less time");
    run.linger();
    ensure!(run.events.len() == at + 1, "events after the loss: {:?}", &run.events[at + 1..]);
    if !reads {
        check(ours, MARGIN, death.bytes, OURS).map_err(|e| format!("our memory, only read from: {e}"))?;
    } else if aftermath.done > 0 {
        read_well(ours, death)?;
    } else {
        old_or_new(ours, death)?;
    }
    let again = run.near.submit(Submission { peer, kind: death.kind, batch, notify: None });
    ensure!(matches!(again, Err(SubmitError::PeerLost { .. })), "submitting to the dead gave {again:?}");
    run.finish(ours)?;
    Ok(aftermath)
}

/// Reads all of a living peer's memory and writes to it, `rounds` times each; each byte and each notification arrives.
///
/// # Errors
/// What does not hold.
pub fn exchange(
    near: &mut dyn Transport,
    ours: &Region,
    peer: &mut PeerProcess,
    bytes: u64,
    rounds: u64,
) -> Result<(), String> {
    let whole = SUM_BLOCK as u64;
    let mut run = Run::begin(near, ours, bytes, peer.blob())?;
    let connection = run.peer;
    for (kind, round) in [OpKind::Read, OpKind::Write].into_iter().flat_map(|k| (0..rounds).map(move |r| (k, r))) {
        let note = format!("{kind} {round}").into_bytes();
        let batch = reversed(bytes, whole, MARGIN, kind == OpKind::Read).ok_or("no whole number of blocks")?;
        // A new pattern each time, so that each write is told from the last and each read changes something.
        fill(ours, MARGIN, bytes, OURS + round)?;
        let submission = Submission { peer: connection, kind, batch, notify: Some(note.clone()) };
        let op = run.near.submit(submission).map_err(|e| e.to_string())?;
        run.drive(PATIENCE, "the end", |events| ended(events, op).is_some())?;
        let end = run.ends(op, usize::MAX)?;
        let stats = end.done().ok_or_else(|| format!("{kind} {round} ended as {end:?}"))?;
        ensure!(stats.bytes.get() == bytes, "{kind} {round} moved {}", stats.bytes);
        match kind {
            OpKind::Read => read_well(ours, &Death { block: whole, ..Death::reading(bytes) })?,
            // Done is visible to the peer at once.
            OpKind::Write => {
                let (theirs, expected) = (peer.sum()?, sum_reversed(ours, MARGIN, bytes, SUM_BLOCK)?);
                ensure!(theirs == expected, "{kind} {round}: the peer's memory has another sum");
            }
        }
        run.drain();
        let told = run.hear(peer)?;
        ensure!(told == note, "{kind} {round}: the peer was notified {told:?}");
    }
    ensure!(peer.notifications_left() == 0, "a notification came twice");
    run.finish(ours)
}

/// An endpoint with one region and one connection.
struct Run<'a> {
    near: &'a mut dyn Transport,
    peer: PeerId,
    bytes: u64,
    start: Instant,
    events: Vec<Event>,
}

impl<'a> Run<'a> {
    fn begin(near: &'a mut dyn Transport, ours: &Region, bytes: u64, blob: &[u8]) -> Result<Self, String> {
        let want = bytes + 2 * MARGIN;
        ensure!(ours.len().get() == want, "our region has {}, it must have {want} bytes", ours.len());
        fill(ours, 0, MARGIN, BEFORE)?;
        fill(ours, MARGIN, bytes, OURS)?;
        fill(ours, MARGIN + bytes, MARGIN, BEHIND)?;
        let id = near.register(ours.clone()).map_err(|e| e.to_string())?;
        ensure!(id == RegionId::ZERO, "the endpoint had something registered: our region is {id}");
        let peer = near.connect(blob).map_err(|e| e.to_string())?;
        let mut run = Self { near, peer, bytes, start: Instant::now(), events: Vec::new() };
        run.drive(PATIENCE, "Connected", |events| events.contains(&Event::Connected { peer }))?;
        run.events.clear();
        Ok(run)
    }

    fn step(&mut self) {
        let next = self.near.step(self.start.elapsed());
        self.drain();
        let rest = next.map_or(Duration::MAX, |at| at.saturating_sub(self.start.elapsed()));
        self.near.wait(Some(rest.min(Duration::from_millis(1))));
    }

    fn drain(&mut self) {
        self.events.extend(std::iter::from_fn(|| self.near.next_event()));
    }

    fn drive(&mut self, within: Duration, what: &str, done: impl Fn(&[Event]) -> bool) -> Result<(), String> {
        let begun = Instant::now();
        while !done(&self.events) {
            ensure!(begun.elapsed() < within, "no {what} within {within:?}; heard {:?}", self.events);
            self.step();
        }
        Ok(())
    }

    /// Until so long after the submission, or until bytes arrive.
    fn until_the_moment(&mut self, ours: &Region, death: &Death) -> Result<(), String> {
        let begun = Instant::now();
        if let Some(after) = death.after {
            while begun.elapsed() < after {
                self.step();
            }
            return Ok(());
        }
        // The first bytes of some blocks, all over the region.
        let (blocks, mut old, mut now) = (death.bytes / death.block, [0; 8], [0; 8]);
        let places: Vec<_> = (0..64).map(|i| i * blocks / 64 * death.block).collect();
        let before = block_heads(&places);
        while begun.elapsed() < PATIENCE {
            for (&place, head) in places.iter().zip(&before) {
                ours.read(MARGIN + place, &mut now).map_err(|e| e.to_string())?;
                old.copy_from_slice(head);
                if now != old {
                    return Ok(());
                }
            }
            let next = self.near.step(self.start.elapsed());
            if next.is_none_or(|at| at > self.start.elapsed()) {
                self.near.wait(Some(Duration::from_micros(50)));
            }
        }
        Err(format!("no byte arrived within {PATIENCE:?}; heard {:?}", self.events))
    }

    /// The one end of an operation, among the first so many events.
    fn ends(&self, op: OpId, before: usize) -> Result<Outcome, String> {
        let of_op = |e: &&Event| matches!(e, Event::Completed { op: id, .. } if *id == op);
        let (early, all) =
            (self.events.iter().take(before).filter(of_op).count(), self.events.iter().filter(of_op).count());
        ensure!(early == 1 && all == 1, "{op} ended {early} times before the loss, {all} times in all");
        ended(&self.events, op).ok_or_else(|| format!("no end of {op}"))
    }

    /// Steps a while longer, so that what must not come has time to.
    fn linger(&mut self) {
        for _ in 0..30 {
            self.step();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next notification that the peer got; we go on stepping, as its sender.
    fn hear(&mut self, peer: &mut PeerProcess) -> Result<Vec<u8>, String> {
        let begun = Instant::now();
        while peer.notifications_left() == 0 && begun.elapsed() < PATIENCE {
            self.step();
        }
        peer.notification()
    }

    /// Disconnects, deregisters, and sees that nobody keeps the memory.
    fn finish(self, ours: &Region) -> Result<(), String> {
        check(ours, 0, MARGIN, BEFORE).map_err(|e| format!("before the blocks: {e}"))?;
        check(ours, MARGIN + self.bytes, MARGIN, BEHIND).map_err(|e| format!("behind the blocks: {e}"))?;
        self.near.disconnect(self.peer).map_err(|e| e.to_string())?;
        self.near.deregister(RegionId::ZERO).map_err(|e| format!("in the end: {e}"))?;
        let begun = Instant::now();
        while ours.owners() > 1 {
            ensure!(begun.elapsed() < Duration::from_secs(10), "{} owners of the memory are left", ours.owners() - 1);
            self.near.step(self.start.elapsed());
            self.near.wait(Some(Duration::from_millis(1)));
        }
        while self.near.next_event().is_some() {}
        Ok(())
    }
}

fn ended(events: &[Event], op: OpId) -> Option<Outcome> {
    events.iter().find_map(|e| match e {
        Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
        _ => None,
    })
}

/// What our memory holds at first at these places, which are multiples of eight.
fn block_heads(places: &[u64]) -> Vec<Vec<u8>> {
    places.iter().map(|place| block(place / 8, 8, OURS)).collect()
}

/// Every block of ours is the peer's, in reverse order.
fn read_well(ours: &Region, death: &Death) -> Result<(), String> {
    each_block(ours, death, |index, got, new| {
        let at = got.iter().zip(new).position(|(a, b)| a != b);
        at.map_or(Ok(()), |at| {
            Err(format!("byte {at} of block {index} is {:#04x} instead of {:#04x}", got[at], new[at]))
        })
    })
}

/// Every byte of ours is what it was, or the peer's.
fn old_or_new(ours: &Region, death: &Death) -> Result<(), String> {
    let len = usize::try_from(death.block).map_err(|e| e.to_string())?;
    each_block(ours, death, |index, got, new| {
        let old = block(index, len, OURS);
        let at = (0..len).find(|&i| got[i] != old[i] && got[i] != new[i]);
        at.map_or(Ok(()), |at| Err(format!("byte {at} of block {index} is {:#04x}, neither old nor new", got[at])))
    })
}

fn each_block(
    ours: &Region,
    death: &Death,
    mut each: impl FnMut(u64, &[u8], &[u8]) -> Result<(), String>,
) -> Result<(), String> {
    let (blocks, len) = (death.bytes / death.block, usize::try_from(death.block).map_err(|e| e.to_string())?);
    let mut got = vec![0; len];
    for index in 0..blocks {
        ours.read(MARGIN + index * death.block, &mut got).map_err(|e| e.to_string())?;
        each(index, &got, &block(blocks - 1 - index, len, PEER))?;
    }
    Ok(())
}
