//! The loop of a rank's thread.

use std::os::fd::AsFd;
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_session::RankSession;
use kvferry_session::rank::Standing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::link::{Go, RankLink};
use super::ready::Readies;
use super::{LaneBoard, WorkerError};
use crate::driver::Clock;
use crate::permuter::Permuter;

#[derive(Debug)]
pub(super) struct Loop {
    pub(super) rank: RankId,
    pub(super) session: RankSession,
    pub(super) link: RankLink,
    pub(super) readies: Readies,
    pub(super) permuter: Permuter,
    /// Where the lanes are shown, and up to which change they are.
    pub(super) board: (LaneBoard, u64),
}

impl Loop {
    /// Until the owner closes the link, or we are asked to stop.
    pub(super) fn run(mut self) -> Result<(), WorkerError> {
        let clock = Clock::start();
        let mut orders = Vec::new();
        let mut ready = false;
        loop {
            // Whatever came while we worked is dealt with before we say anything: many orders are one step.
            let link = self.link.receive(ready, &mut orders)?;
            let came = !orders.is_empty();
            for order in orders.drain(..) {
                self.session.handle(order, clock.now());
            }
            self.readies.hand_over(&mut self.session, came, clock.now());
            let next = self.session.step(clock.now());
            if self.session.lanes_revision() != self.board.1 {
                self.board.1 = self.session.lanes_revision();
                self.board.0.set(self.session.lanes());
            }
            while let Some(work) = self.session.next_work() {
                self.permuter.start(work)?;
            }
            while let Some(message) = self.session.next_message() {
                self.link.send(message)?;
            }
            let said = self.link.flush()?;
            if let Standing::Refused(reason) = self.session.standing() {
                return Err(WorkerError::Refused { rank: self.rank, reason: reason.clone() });
            }
            if link == Go::End || said == Go::End {
                return Ok(());
            }
            // More may have come meanwhile; only who has found nothing may sleep.
            let timeout = if came { Some(Duration::ZERO) } else { next.map(|t| t.saturating_sub(clock.now())) };
            let woken;
            (ready, woken) = self.sleep(timeout)?;
            if woken && self.readies.hear() {
                return Ok(());
            }
            while let Some(work) = self.permuter.done()? {
                self.session.work_done(work, clock.now());
            }
        }
    }

    /// Sleeps until something is to be done; says whether the owner has sent, and whether somebody else has woken it.
    fn sleep(&self, timeout: Option<Duration>) -> Result<(bool, bool), WorkerError> {
        let (link, wanted) = self.link.poll_fd();
        let mut fds = [
            PollFd::from_borrowed_fd(link, wanted),
            PollFd::from_borrowed_fd(self.readies.woken.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.session.wake_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.permuter.wake_fd(), PollFlags::IN),
        ];
        // Beyond a day it may as well look once more.
        let timeout = timeout.map(|t| t.min(Duration::from_secs(86400)));
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(WorkerError::System { what: "to wait", error: error.into() }),
        }
        let any = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok((fds[0].revents().intersects(any), fds[1].revents().intersects(any)))
    }
}
