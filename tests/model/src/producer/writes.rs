//! What a producer's ranks write, and how far a stream is.
//!
//! Of a rank (`kvferry-session/src/rank/{push,pushes,streams}.rs`) there is a write that was ordered: what is final arrives at some
//! moment, at one destination after the other; it ends once, with all that was in flight.

use kvferry_geometry::units::RankId;
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_proto::push::{PushId, WriterEnd, WriterReport};
use kvferry_proto::rank::{PullId, RankFault, Stage};

use super::pushes::no_writer;
use super::{Content, Producer, index};
use crate::consumer::{Course, How};
use crate::state::{State, Times};
use crate::world::World;

/// How far a stream is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Stream {
    /// Which run of the prefill.
    pub(crate) run: u8,
    /// Its block was said to be final.
    pub(crate) ready: bool,
    pub(crate) sealed: bool,
}

impl Stream {
    /// Gives the number of the new run.
    pub(super) fn begin_anew(&mut self) -> u8 {
        *self = Self { run: self.run + 1, ..Self::default() };
        self.run
    }
}

/// A rank's share of a push, under way.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Write {
    pub(crate) lease: usize,
    pub(crate) attempt: Attempt,
    pub(crate) run: u8,
    pub(crate) from: u32,
    pub(crate) consumer: usize,
    pub(crate) to: u32,
    /// Whose block it is.
    pub(crate) pull: PullId,
    /// To whom it writes, in which life of theirs.
    pub(crate) targets: Vec<(RankId, u8)>,
    /// To whom it has still to write.
    pub(crate) left: Vec<RankId>,
    /// What it writes is final, so that it may be posted.
    pub(crate) ready: bool,
    /// Nothing more will become final.
    pub(crate) whole: bool,
    pub(crate) course: Course,
}

impl Write {
    /// Nothing more is posted; what is may still arrive.
    pub(super) fn cancel(&mut self) {
        if self.course == Course::Runs {
            self.course = Course::Cancelled;
        }
    }

    pub(super) fn hang(&mut self) {
        self.course = Course::Hangs;
    }

    /// Whether bytes of it may arrive.
    pub(crate) fn may_arrive(&self) -> bool {
        self.ready && !self.left.is_empty()
    }

    /// Whether all of its bytes have.
    pub(crate) fn is_complete(&self) -> bool {
        self.whole && self.left.is_empty()
    }
}

/// A report of a writer that comes once more.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct LatePush {
    pub(crate) producer: usize,
    pub(crate) rank: RankId,
    push: PushId,
    result: WriterEnd,
}

impl Producer {
    /// The ranks have heard that nothing of it is to be written any more.
    pub(super) fn cancel_writes_of(&mut self, lease: usize) {
        for write in self.writes.values_mut().filter(|write| write.lease == lease) {
            write.cancel();
        }
    }
}

impl State {
    /// A piece of a write arrives: what its source holds now.
    pub(crate) fn write(&mut self, producer: usize, rank: RankId, push: PushId) {
        let write = self.producer(producer).and_then(|p| p.writes.get_mut(&(rank, push)));
        let Some(write) = write.filter(|write| write.may_arrive()) else { return };
        let dst = write.left.remove(0);
        let write = write.clone();
        self.arrives(producer, rank, dst, &write);
    }

    /// The same, of a life that is over.
    pub(crate) fn write_late(&mut self, producer: usize, at: usize) {
        let orphan = self.producer(producer).and_then(|p| p.orphans.get_mut(at));
        let Some((rank, write)) = orphan.filter(|(_, write)| write.may_arrive()) else { return };
        let (rank, dst) = (*rank, write.left.remove(0));
        let write = write.clone();
        self.arrives(producer, rank, dst, &write);
    }

    fn arrives(&mut self, producer: usize, rank: RankId, dst: RankId, write: &Write) {
        let content = self.producers.get(producer).map_or(Content::Other, |p| p.content(rank, write.from));
        let life = write.targets.iter().find(|(of, _)| *of == dst).map(|(_, life)| *life);
        let Some(c) = self.consumers.get_mut(write.consumer) else { return };
        // The memory of another life is no more.
        if c.ranks.get(index(dst.get())).copied() == life {
            c.memory.insert((dst, write.to, rank), content);
        }
    }

    /// A write ends, and its rank says so.
    pub(crate) fn end_write(
        &mut self,
        w: &World,
        producer: usize,
        rank: RankId,
        push: PushId,
        (how, times): (How, Times),
    ) {
        let Some(p) = self.producer(producer) else { return };
        let result: WriterEnd = match how {
            How::Complete => {
                let none = std::time::Duration::ZERO;
                Ok(WriterReport { writes: Vec::new(), queued: none, slices: 0, took: none })
            }
            How::Failed => Err(no_writer(false)),
            How::InDoubt => Err(no_writer(true)),
            How::Cancelled => Err(RankFault { stage: Stage::Cancelled, ..no_writer(false) }),
        };
        if how == How::InDoubt {
            // It has said all that it ever will, and its bytes may still arrive.
            if let Some(write) = p.writes.get_mut(&(rank, push)) {
                write.hang();
            }
        } else {
            p.writes.remove(&(rank, push));
        }
        if times == Times::Twice {
            self.late_pushes.push(LatePush { producer, rank, push, result: result.clone() });
        }
        self.on_pushed(w, producer, rank, push, result);
    }

    pub(crate) fn report_again(&mut self, w: &World, index: usize) {
        let LatePush { producer, rank, push, result } = self.late_pushes.remove(index);
        self.on_pushed(w, producer, rank, push, result);
    }

    /// `region_ready`, of all that there is.
    pub(crate) fn region_ready(&mut self, w: &World, producer: usize, lease: LeaseId) {
        let Some(p) = self.producer(producer) else { return };
        let Some((number, stream)) = p.open.get_mut(&lease).and_then(|o| Some((o.lease, o.stream.as_mut()?))) else {
            return;
        };
        stream.ready = true;
        let run = stream.run;
        p.fill(w.leases.get(number).map_or(0, |plan| plan.block), Content::Of(number, run));
        for write in p.writes.values_mut().filter(|write| (write.lease, write.run) == (number, run)) {
            write.ready |= write.course == Course::Runs;
        }
    }

    /// `seal`.
    pub(crate) fn seal(&mut self, producer: usize, lease: LeaseId) {
        let Some(p) = self.producer(producer) else { return };
        let Some((number, stream)) = p.open.get_mut(&lease).and_then(|o| Some((o.lease, o.stream.as_mut()?))) else {
            return;
        };
        stream.sealed = true;
        let run = stream.run;
        for write in p.writes.values_mut().filter(|write| (write.lease, write.run) == (number, run)) {
            write.whole |= write.course == Course::Runs;
        }
    }
}
