//! One operation under way: where a batch's region-relative places become addresses, here and nowhere else.
//!
//! A job is cut into shares that copy threads take. A share is moved in slices; before each the thread enters its slot,
//! looks at the peer's gates and at the stop flag, and so a cancel, a lost peer or a deregistered region is heard within
//! one slice.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::strips::{Strip, Strips, shares};
use kvferry_transport::{LostCause, OpId, Region, Stats, TransferError};
use rustix::io::Errno;

use crate::board::{PeerBoard, Slot};
use crate::copy::{Runs, STREAM_FROM, drain};
use crate::process::{Kernel, Process, ProcessError, Ranges, Way};
use crate::refusal::{Surroundings, explain};
use crate::window::Window;

/// Bytes of a slice between mappings. About 100 microseconds of copying.
const SLICE: u64 = 512 << 10;
/// Bytes of a slice that the kernel copies, so that its calls are long.
const KERNEL_SLICE: u64 = 4 << 20;
/// Below this an operation is not worth a second thread.
const SMALL: u64 = 512 << 10;
/// From this on it is cut into more shares than there are threads, so that a thread which is held up does not hold up all.
const LARGE: u64 = 16 << 20;

/// How a peer's region is reached.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Mapped(Arc<Window>),
    Remote { start: u64, len: u64 },
}

impl Place {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Mapped(window) => window.len() as u64,
            Self::Remote { len, .. } => *len,
        }
    }
}

/// How a job ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// All of it, in this time.
    Moved(Stats, Duration),
    Failed(TransferError),
    /// It was told to stop, and did.
    Stopped,
}

/// The peer's process, its registrations' gates, and how its memory is copied where it cannot be mapped.
#[derive(Clone)]
pub(crate) struct PeerSide {
    pub(crate) board: PeerBoard,
    pub(crate) generation: u64,
    pub(crate) process: Option<Process>,
    pub(crate) user: u32,
    pub(crate) kernel: Arc<dyn Kernel>,
    /// Held and not used: the peer takes a closed socket as proof that we touch nothing of its any more.
    #[expect(dead_code, reason = "held for its end alone")]
    pub(crate) socket: Arc<OwnedFd>,
}

/// Regions that a batch names, on both sides, ascending by id.
pub(crate) struct Regions {
    pub(crate) ours: Vec<(RegionId, Region)>,
    pub(crate) peers: Vec<(RegionId, Place)>,
}

/// One operation under way.
pub(crate) struct Job {
    way: Way,
    batch: Arc<BoundedBatch>,
    regions: Regions,
    peer: PeerSide,
    /// Whether it is large enough to be written past the caches.
    stream: bool,
    /// Bytes of a slice.
    slice: u64,
    stop: AtomicBool,
    tally: Arc<Tally>,
}

/// What came of a job's shares. Apart from the job, so that whoever counts a share down has let go of the job before: once the
/// end is told, no thread holds the job's mappings and owners.
pub(crate) struct Tally {
    op: OpId,
    total: Bytes,
    since: Instant,
    failed: OnceLock<TransferError>,
    left: AtomicUsize,
    bytes: AtomicU64,
    descriptors: AtomicU64,
}

impl Tally {
    pub(crate) fn op(&self) -> OpId {
        self.op
    }

    /// How many shares have not ended.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// Counts ended shares. Gives the end if none is left.
    pub(crate) fn leave(&self, shares: usize) -> Option<End> {
        // Release, so that whoever sees the end sees the bytes; acquire, so that the last one sees the others' sums.
        if self.left.fetch_sub(shares, Ordering::AcqRel) > shares {
            return None;
        }
        let stats = Stats {
            bytes: Bytes::new(self.bytes.load(Ordering::Relaxed)),
            descriptors: self.descriptors.load(Ordering::Relaxed),
        };
        Some(match self.failed.get() {
            Some(error) => End::Failed(error.clone()),
            None if stats.bytes == self.total => End::Moved(stats, self.since.elapsed()),
            None => End::Stopped,
        })
    }
}

impl Job {
    /// A job, and its shares for so many threads. There is at least one share. `None` if a region is missing or shorter
    /// than the batch was proven against.
    pub(crate) fn new(
        op: OpId,
        way: Way,
        batch: Arc<BoundedBatch>,
        regions: Regions,
        peer: PeerSide,
        threads: usize,
    ) -> Option<(Arc<Self>, Vec<Range<u64>>)> {
        let total = batch.bytes().get();
        let pieces = match total {
            0..SMALL => 1,
            SMALL..LARGE => threads,
            _ if threads > 1 => threads * 4,
            _ => 1,
        };
        let mut cut: Vec<_> = shares(&batch, pieces).into_iter().filter(|s| !s.is_empty()).collect();
        if cut.is_empty() {
            cut.push(0..0);
        }
        let mapped = regions.peers.iter().all(|(_, place)| matches!(place, Place::Mapped(_)));
        let tally = Tally {
            op,
            total: batch.bytes(),
            since: Instant::now(),
            failed: OnceLock::new(),
            left: AtomicUsize::new(cut.len()),
            bytes: AtomicU64::new(0),
            descriptors: AtomicU64::new(0),
        };
        let job = Self {
            way,
            batch,
            regions,
            peer,
            stream: total >= STREAM_FROM,
            slice: if mapped { SLICE } else { KERNEL_SLICE },
            stop: AtomicBool::new(false),
            tally: Arc::new(tally),
        };
        job.covers_its_batch().then(|| (Arc::new(job), cut))
    }

    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// Asks it to stop.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Moves one share. It is still to be counted as ended.
    pub(crate) fn run(&self, share: Range<u64>, slot: &Slot) {
        let end = share.end;
        let mut walk = Walk { strips: Strips::new(&self.batch, share), ranges: Ranges::default(), stats: (0, 0) };
        if let Err(error) = self.run_slices(&mut walk, end, slot) {
            // The first failure is the one that is told.
            self.tally.failed.set(error).unwrap_or(());
            self.stop();
        }
        self.tally.bytes.fetch_add(walk.stats.0, Ordering::Relaxed);
        self.tally.descriptors.fetch_add(walk.stats.1, Ordering::Relaxed);
    }

    fn run_slices(&self, walk: &mut Walk<'_>, end: u64, slot: &Slot) -> Result<(), TransferError> {
        while walk.strips.position() < end {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let inside = slot.enter();
            self.check_gates()?;
            let moved = self.slice(walk)?;
            drop(inside);
            if moved == 0 {
                break;
            }
        }
        // A region that was deregistered while its bytes were read may have been in other use already.
        self.check_gates()
    }

    fn check_gates(&self) -> Result<(), TransferError> {
        let closed = self.regions.peers.iter().find(|(id, _)| !self.peer.board.is_open(*id, self.peer.generation));
        closed.map_or(Ok(()), |(region, _)| Err(TransferError::Stale { region: *region }))
    }

    /// Moves up to a slice; gives the bytes moved.
    fn slice(&self, walk: &mut Walk<'_>) -> Result<u64, TransferError> {
        let mut moved = 0;
        // One behind, so that the next one's source is on its way while one is copied.
        let mut held: Option<Runs> = None;
        while moved < self.slice {
            let Some(strip) = walk.strips.next_within(self.slice - moved) else { break };
            if let Some(runs) = self.locate(&strip, &mut walk.ranges)? {
                runs.fetch();
                if let Some(before) = held.replace(runs) {
                    // SAFETY: as argued in `locate`.
                    unsafe { before.copy(self.stream) };
                }
            }
            moved += strip.bytes();
            walk.stats.0 += strip.bytes();
            walk.stats.1 += strip.count;
        }
        if let Some(last) = held {
            // SAFETY: as argued in `locate`.
            unsafe { last.copy(self.stream) };
        }
        drain();
        self.flush(&mut walk.ranges)?;
        Ok(moved)
    }

    /// Makes addresses of a strip: runs to copy where the peer's side is mapped, ranges for the kernel where it isn't.
    ///
    /// Runs given may be copied while `self` lives: `covers_its_batch` proved at construction that every region that the
    /// batch names is as long as the batch was proven against, so each run of the strip lies inside both regions. Ours is
    /// kept mapped by its owner (`Region::from_raw`), which `self` holds; the peer's by the window, which can't shrink and was
    /// mapped writable where we write. The two are distinct mappings, so their addresses don't overlap.
    fn locate(&self, strip: &Strip, ranges: &mut Ranges) -> Result<Option<Runs>, TransferError> {
        let (src, dst) = ((strip.src_region, strip.src_offset), (strip.dst_region, strip.dst_offset));
        let ((our_id, our_offset), (peer_id, peer_offset)) = match self.way {
            Way::Fetch => (dst, src),
            Way::Store => (src, dst),
        };
        let ours = find(&self.regions.ours, our_id).ok_or_else(internal)?;
        let peers = find(&self.regions.peers, peer_id).ok_or_else(internal)?;
        let fit = |v: u64| usize::try_from(v).unwrap_or(0);
        match peers {
            Place::Mapped(window) => {
                // SAFETY: both offsets lie inside their mappings, see above.
                let (ours, peers) =
                    unsafe { (ours.as_ptr().add(fit(our_offset)), window.start().as_ptr().add(fit(peer_offset))) };
                let (src, dst) = match self.way {
                    Way::Fetch => (peers, ours),
                    Way::Store => (ours, peers),
                };
                Ok(Some(Runs {
                    src,
                    dst,
                    src_stride: fit(strip.src_stride),
                    dst_stride: fit(strip.dst_stride),
                    run: fit(strip.run),
                    count: fit(strip.count),
                }))
            }
            Place::Remote { start, .. } => {
                let (our_stride, peer_stride) = match self.way {
                    Way::Fetch => (strip.dst_stride, strip.src_stride),
                    Way::Store => (strip.src_stride, strip.dst_stride),
                };
                let base = ours.as_ptr().expose_provenance() as u64 + our_offset;
                for i in 0..strip.count {
                    if ranges.is_full() {
                        self.flush(ranges)?;
                    }
                    ranges.push(base + i * our_stride, start + peer_offset + i * peer_stride, strip.run);
                }
                Ok(None)
            }
        }
    }

    fn flush(&self, ranges: &mut Ranges) -> Result<(), TransferError> {
        if ranges.is_empty() {
            return Ok(());
        }
        let process = self.peer.process.as_ref().ok_or_else(internal)?;
        // SAFETY: our side of each range is a run of a strip inside a registered region, as argued in `locate`.
        let moved = unsafe { process.transfer(&*self.peer.kernel, self.way, ranges) };
        ranges.clear();
        moved.map_err(|e| process_error(e, process.pid, self.peer.user))
    }

    fn covers_its_batch(&self) -> bool {
        let (our_lens, peer_lens) = match self.way {
            Way::Fetch => (self.batch.dst_lens(), self.batch.src_lens()),
            Way::Store => (self.batch.src_lens(), self.batch.dst_lens()),
        };
        let long = |lens: &[Bytes], id: RegionId, len: Option<u64>| {
            lens.get(id.index()).is_some_and(|proven| len.is_some_and(|len| len >= proven.get()))
        };
        self.batch.batch().sections().iter().filter(|s| !s.parts.is_empty()).flat_map(|s| s.bases.iter()).all(|base| {
            let (ours, peers) = match self.way {
                Way::Fetch => (base.dst_region, base.src_region),
                Way::Store => (base.src_region, base.dst_region),
            };
            let our_len = find(&self.regions.ours, ours).map(|r| r.len().get());
            let peer_len = find(&self.regions.peers, peers).map(Place::len);
            long(our_lens, ours, our_len) && long(peer_lens, peers, peer_len)
        })
    }
}

/// A share's progress.
struct Walk<'a> {
    strips: Strips<'a>,
    ranges: Ranges,
    /// Bytes, pieces.
    stats: (u64, u64),
}

/// What a failed copy between processes means.
pub(crate) fn process_error(error: ProcessError, pid: i32, user: u32) -> TransferError {
    match error {
        ProcessError::Errno(Errno::SRCH) | ProcessError::NotThePeer => TransferError::PeerLost(LostCause::Gone),
        ProcessError::Errno(errno) => TransferError::Lane { reason: explain(errno, &Surroundings::look(pid, user)) },
    }
}

fn internal() -> TransferError {
    TransferError::Lane { reason: "internal error of the shm backend: a region of the batch is missing".to_owned() }
}

fn find<T>(regions: &[(RegionId, T)], id: RegionId) -> Option<&T> {
    // Most batches name few regions, and neighbours are found at once.
    match regions {
        [(only, value)] if *only == id => Some(value),
        _ => regions.binary_search_by_key(&id, |(id, _)| *id).ok().and_then(|at| regions.get(at)).map(|(_, v)| v),
    }
}
