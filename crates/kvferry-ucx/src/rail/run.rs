//! Shares of operations: their pieces become reads and writes of UCX, a bounded number at a time.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kvferry_geometry::units::RegionId;
use kvferry_transport::{OpKind, Region, TransferError};

use super::Rail;
use crate::shared::Command;
use crate::sys::{Endpoint, Memory, RemoteKey, Tally};
use crate::walk::{Piece, Walk};
use crate::work::{ShareEnd, Work};

/// A share of an operation at this rail.
pub(super) struct Run {
    work: Arc<Work>,
    walk: Walk,
    tally: Rc<Tally>,
    places: Option<Places>,
    pieces: u64,
    stage: Stage,
    /// What kept it from posting.
    failure: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// There are pieces left.
    Posting,
    /// All are posted.
    Posted,
    /// It was stopped before all were.
    Cut,
}

/// The regions that a share names, as UCX wants them; all ascending by id.
struct Places {
    local: Vec<Local>,
    remote: Vec<Remote>,
    /// Where the last piece was: the next is there, mostly.
    last: (usize, usize),
}

struct Local {
    id: RegionId,
    region: Region,
    memory: Rc<Memory>,
}

struct Remote {
    id: RegionId,
    address: u64,
    key: Rc<RemoteKey>,
}

impl Places {
    fn local(&mut self, id: RegionId) -> Option<&Local> {
        if self.local.get(self.last.0).is_none_or(|l| l.id != id) {
            self.last.0 = self.local.binary_search_by_key(&id, |l| l.id).ok()?;
        }
        self.local.get(self.last.0)
    }

    fn remote(&mut self, id: RegionId) -> Option<&Remote> {
        if self.remote.get(self.last.1).is_none_or(|r| r.id != id) {
            self.last.1 = self.remote.binary_search_by_key(&id, |r| r.id).ok()?;
        }
        self.remote.get(self.last.1)
    }

    /// Posts one piece.
    fn post(&mut self, endpoint: &Endpoint, kind: OpKind, piece: &Piece, tally: &Rc<Tally>) -> Result<(), String> {
        let (ours, theirs) = match kind {
            OpKind::Read => ((piece.dst_region, piece.dst_offset), (piece.src_region, piece.src_offset)),
            OpKind::Write => ((piece.src_region, piece.src_offset), (piece.dst_region, piece.dst_offset)),
        };
        // The batch was admitted, so every region that it names is among the places.
        let unnamed = |id: RegionId| format!("region {id} is not among those that the operation named");
        let len = usize::try_from(piece.len).map_err(|e| e.to_string())?;
        let (address, key) =
            self.remote(theirs.0).map(|r| (r.address, r.key.clone())).ok_or_else(|| unnamed(theirs.0))?;
        let local = self.local(ours.0).ok_or_else(|| unnamed(ours.0))?;
        let start = local.region.host_range(ours.1, len).map_err(|e| e.to_string())?;
        // The proof of the batch keeps this inside the peer's region, which ends before the end of memory.
        let remote = (address.wrapping_add(theirs.1), &*key);
        // SAFETY: `host_range` has shown the bytes to be inside of a region that is host memory, which its owner keeps mapped,
        // readable and writable, without references to it. The operation holds the region, and with it the registration
        // `memory`, and the run holds the key; the rail keeps the run until the tally has ended.
        unsafe {
            match kind {
                OpKind::Read => endpoint.get((start, len), &local.memory, remote, tally),
                OpKind::Write => endpoint.put((start.cast_const(), len), &local.memory, remote, tally),
            }
        }
        Ok(())
    }
}

impl Rail {
    pub(super) fn start_run(&mut self, work: Arc<Work>, range: Range<u64>) {
        if let Some(conn) = self.conns.get_mut(&work.conn) {
            conn.runs += 1;
        }
        let walk = Walk::new(work.batch.clone(), range);
        let tally = Tally::new(self.outstanding.clone());
        let stage = Stage::Posting;
        self.runs.push_back(Run { work, walk, tally, places: None, pieces: 0, stage, failure: None });
    }

    /// Posts what there is room for, and ends the shares that are over. Whether it did anything.
    pub(super) fn post_runs(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..self.runs.len() {
            let Some(mut run) = self.runs.pop_front() else { break };
            busy |= self.drive(&mut run);
            // Of what was cut by a broken lane, the end depends on why it broke.
            let known = self.conns.get(&run.work.conn).is_none_or(|conn| !conn.is_suspect());
            if run.stage != Stage::Posting && run.tally.outstanding() == 0 && known {
                busy = true;
                self.end_run(run);
            } else {
                self.runs.push_back(run);
            }
        }
        busy
    }

    fn drive(&mut self, run: &mut Run) -> bool {
        if run.stage != Stage::Posting {
            return false;
        }
        let before = run.pieces;
        let lost = self.conns.get(&run.work.conn).is_none_or(|conn| conn.is_halted());
        if lost || run.work.stopped() || run.tally.failed().is_some() {
            run.stage = Stage::Cut;
        } else if let Err(reason) = self.post(run) {
            run.failure = Some(reason);
            run.stage = Stage::Cut;
        }
        if run.stage != Stage::Posting && run.work.kind == OpKind::Write && run.pieces > 0 {
            // For a cut one too: nothing of it is under way after that.
            if let Some(endpoint) = self.conns.get(&run.work.conn).and_then(|conn| conn.endpoint()) {
                endpoint.flush(&run.tally);
            }
        }
        run.pieces > before || run.stage != Stage::Posting
    }

    fn post(&mut self, run: &mut Run) -> Result<(), String> {
        if self.conns.get(&run.work.conn).is_none_or(|conn| conn.ready().is_none()) {
            // Its lane is broken, and it isn't known yet why.
            return Ok(());
        }
        let most = u32::try_from(self.shared.config.outstanding).unwrap_or(u32::MAX);
        let mut places = match run.places.take() {
            Some(places) => places,
            None => self.places(&run.work)?,
        };
        let Some(endpoint) = self.conns.get(&run.work.conn).and_then(|conn| conn.ready()) else { return Ok(()) };
        // A lane may do its pieces at once, so that nothing is ever outstanding; then others must have their turn.
        for _ in 0..most {
            if self.outstanding.get() >= most {
                break;
            }
            let Some(piece) = run.walk.next() else {
                run.stage = Stage::Posted;
                break;
            };
            run.pieces += 1;
            if let Err(reason) = places.post(endpoint, run.work.kind, &piece, &run.tally) {
                // The run keeps its places until all that was posted has ended.
                run.places = Some(places);
                return Err(reason);
            }
            if run.tally.failed().is_some() {
                break;
            }
        }
        run.places = Some(places);
        Ok(())
    }

    fn places(&mut self, work: &Work) -> Result<Places, String> {
        let local = work.ours.iter().map(|ours| {
            let mapping = self.maps.get(&ours.key).ok_or_else(|| format!("region {} has no registration", ours.id))?;
            Ok(Local { id: ours.id, region: ours.region.clone(), memory: mapping.memory.clone() })
        });
        let local = local.collect::<Result<_, String>>()?;
        let index = self.index;
        let conn = self.conns.get_mut(&work.conn).ok_or("the connection is gone")?;
        let remote = work.peers.iter().map(|&id| {
            let (address, key) = conn.remote(index, id)?;
            Ok(Remote { id, address, key })
        });
        let remote = remote.collect::<Result<_, String>>()?;
        Ok(Places { local, remote, last: (0, 0) })
    }

    /// A share has nothing under way any more.
    fn end_run(&mut self, run: Run) {
        let work = run.work;
        if run.tally.failed().is_some() {
            self.look_why(work.conn);
        }
        let conn = self.conns.get_mut(&work.conn);
        // A write that failed, or could not be flushed: the peer's memory may be written later, unless its process has ended.
        let gone = conn.as_ref().is_some_and(|conn| conn.is_gone());
        let flushed = conn.as_ref().is_some_and(|conn| conn.endpoint().is_some()) && run.tally.failed().is_none();
        let doubtful = work.kind == OpKind::Write && run.pieces > 0 && !flushed && !gone;
        let reason = run.failure.or_else(|| run.tally.failed().map(|status| status.to_string()));
        let end = match reason {
            Some(reason) => ShareEnd::Failed { error: TransferError::Lane { reason }, doubtful },
            None if run.stage == Stage::Posted => ShareEnd::Whole,
            None if doubtful => {
                ShareEnd::Failed { error: TransferError::Lane { reason: "the lane broke".to_owned() }, doubtful }
            }
            None => ShareEnd::Cut,
        };
        if let Some(conn) = conn {
            conn.runs -= 1;
        }
        // The keys go before the endpoint can.
        drop(run.places);
        let id = work.conn;
        if work.share_ended(run.pieces, end) {
            if work.home == self.index {
                self.finish(&work);
            } else {
                self.shared.mailboxes[work.home].post(Command::Finish(work));
            }
        }
        self.let_conn_go(id);
    }
}
