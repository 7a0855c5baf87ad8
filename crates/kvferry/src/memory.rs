//! Links within one process: owners meet at a name, ranks join their owner's port. Messages are moved, not encoded.
//!
//! What is sent on such a link goes straight into the other end's inbox, all that one round of the driver has for it as one piece
//! of news. Nothing is bounded here: what waits is of requests of this process, which are bounded themselves. What waits for a rank
//! may be of other owners, too; it is counted, roughly, so that the driver can keep the credits of whoever fills it.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_geometry::request::{DstGroup, Request, SrcGroup};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, ToRank};
use kvferry_session::owner::{LinkId, RankLinkId};
use kvferry_session::pairing::Pairings;
use rustix::event::{EventfdFlags, eventfd};

use crate::address::MemoryName;
use crate::connection::DRAINED;
use crate::driver::News;
use crate::driver::inbox::Sender;

/// Takes a list, and leaves room for as much as it had, at most 64: what is said next is about as much.
pub(crate) fn take_list<T>(list: &mut Vec<T>) -> Vec<T> {
    let room = Vec::with_capacity(list.len().min(64));
    std::mem::replace(list, room)
}

/// The owners of this process that listen at a name.
static NAMES: Mutex<Option<HashMap<MemoryName, Sender<News>>>> = Mutex::new(None);

fn names() -> MutexGuard<'static, Option<HashMap<MemoryName, Sender<News>>>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that an owner listens at, until this is dropped.
#[derive(Debug)]
pub(crate) struct Listening(MemoryName);

impl Listening {
    /// Takes a name, if no owner of this process has it.
    pub(crate) fn start(name: &MemoryName, news: Sender<News>) -> Option<Self> {
        let mut names = names();
        let names = names.get_or_insert_default();
        if names.contains_key(name) {
            return None;
        }
        names.insert(name.clone(), news);
        Some(Self(name.clone()))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(names) = &mut *names() {
            names.remove(&self.0);
        }
    }
}

/// Asks the owner that listens at a name for a link. It answers with [`News::MemoryConnected`], or [`News::PeerClosed`].
pub(crate) fn connect(name: &MemoryName, ours: MemoryEnd) -> Result<(), String> {
    let listener = names().as_ref().and_then(|names| names.get(name).cloned());
    let refused = || format!("no owner of this process listens at memory:{name}");
    let Some(listener) = listener else {
        ours.forget();
        return Err(refused());
    };
    listener.send(News::MemoryAccepted(ours)).map_err(|news| {
        if let News::MemoryAccepted(end) = news {
            end.forget();
        }
        refused()
    })
}

/// The far end of a link between two owners: what is sent to it arrives there. Dropping it closes the link, after what was sent.
pub(crate) struct MemoryEnd {
    /// `None` where the far end is not to be told of the end.
    owner: Option<Sender<News>>,
    link: LinkId,
    /// Sent since the last flush.
    new: Vec<PeerMessage>,
}

impl MemoryEnd {
    /// The end at which `owner` knows the link by this number.
    pub(crate) fn new(owner: Sender<News>, link: LinkId) -> Self {
        Self { owner: Some(owner), link, new: Vec::new() }
    }

    /// Tells the far end where ours is.
    pub(crate) fn answer(&self, ours: Self) -> bool {
        match self.owner.as_ref().map(|owner| owner.send(News::MemoryConnected(self.link, ours))) {
            Some(Ok(())) => true,
            Some(Err(News::MemoryConnected(_, ours))) => {
                ours.forget();
                false
            }
            _ => false,
        }
    }

    pub(crate) fn send(&mut self, message: PeerMessage) {
        self.new.push(message);
    }

    /// Hands over what was sent; false if nobody is there any more.
    pub(crate) fn flush(&mut self) -> bool {
        let Some(owner) = &self.owner else { return false };
        self.new.is_empty() || owner.send(News::PeerSaid(self.link, take_list(&mut self.new))).is_ok()
    }

    /// Drops it without a word.
    fn forget(mut self) {
        self.owner = None;
    }
}

impl Drop for MemoryEnd {
    fn drop(&mut self) {
        self.flush();
        if let Some(owner) = self.owner.take() {
            // Gone already is as good.
            drop(owner.send(News::PeerClosed(self.link, "the other end closed it".into())));
        }
    }
}

impl fmt::Debug for MemoryEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryEnd({:?})", self.link)
    }
}

/// Where ranks of an owner's own process join it, without a socket; see
/// [`WorkerBuilder::in_process`](crate::WorkerBuilder::in_process).
#[derive(Clone)]
pub struct RankPort {
    owner: Sender<News>,
    pairings: Pairings,
}

impl fmt::Debug for RankPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankPort")
    }
}

impl RankPort {
    pub(crate) fn new(owner: Sender<News>, pairings: Pairings) -> Self {
        Self { owner, pairings }
    }

    /// What the owner has computed of pairs of caches, to be shared.
    pub(crate) fn pairings(&self) -> Pairings {
        self.pairings.clone()
    }

    /// Joins the owner, if it is there; gives the rank's end.
    pub(crate) fn join(&self) -> std::io::Result<RankEnd> {
        let gone = |_| std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "the owner was shut down");
        let queue = Arc::new(Queue::new()?);
        let end = RankEnd { owner: self.owner.clone(), link: None, queue: queue.clone() };
        self.owner.send(News::RankJoined(OwnerEnd { queue, new: Vec::new() })).map_err(gone)?;
        Ok(end)
    }
}

/// Orders that wait for a rank, which may sleep in a `poll`.
#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    /// Bytes of orders that were sent and are not taken, roughly.
    waiting: AtomicUsize,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct QueueState {
    orders: Vec<ToRank>,
    /// By which number the owner knows the link, once it does.
    link: Option<RankLinkId>,
    /// The rank may be in its `poll`.
    asleep: bool,
    closed: bool,
}

impl Queue {
    fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { state: Mutex::default(), waiting: AtomicUsize::new(0), wake })
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the rank if it may sleep.
    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        let mut state = self.lock();
        change(&mut state);
        let asleep = std::mem::take(&mut state.asleep);
        drop(state);
        if asleep {
            // A full counter wakes as well as one more.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// The owner's end of a link to a rank of its process. Dropping it closes the link, after what was sent.
pub(crate) struct OwnerEnd {
    queue: Arc<Queue>,
    /// Sent since the last flush.
    new: Vec<ToRank>,
}

impl OwnerEnd {
    /// Tells the rank by which number the owner knows it; false if the rank is gone.
    pub(crate) fn accept(&self, link: RankLinkId) -> bool {
        let mut there = false;
        self.queue.change(|state| {
            there = !state.closed;
            state.link = Some(link);
        });
        there
    }

    pub(crate) fn send(&mut self, order: ToRank) {
        self.queue.waiting.fetch_add(rough_bytes(&order), Ordering::Relaxed);
        self.new.push(order);
    }

    /// Bytes that wait for the rank, roughly.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.waiting.load(Ordering::Relaxed)
    }

    /// Hands over what was sent, all at once; false if the rank is gone.
    pub(crate) fn flush(&mut self) -> bool {
        if self.new.is_empty() {
            return true;
        }
        let (mut there, new) = (false, &mut self.new);
        self.queue.change(|state| {
            there = !state.closed;
            if there && state.orders.is_empty() {
                std::mem::swap(&mut state.orders, new);
            } else if there {
                state.orders.append(new);
            }
        });
        self.new.clear();
        there
    }
}

impl Drop for OwnerEnd {
    fn drop(&mut self) {
        self.flush();
        self.queue.change(|state| state.closed = true);
    }
}

/// The rank's end. Dropping it closes the link.
pub(crate) struct RankEnd {
    owner: Sender<News>,
    link: Option<RankLinkId>,
    queue: Arc<Queue>,
}

/// What a rank finds at its end of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// Something to do.
    Orders,
    /// Nothing; it may sleep now, and will be woken.
    Nothing,
    /// The owner has closed the link, and all that it said was taken.
    End,
}

impl RankEnd {
    /// Whether the owner has taken the link, so that [`send`](Self::send) can send.
    pub(crate) fn is_open(&mut self) -> bool {
        if self.link.is_none() {
            self.link = self.queue.lock().link;
        }
        self.link.is_some()
    }

    /// Hands messages over, all at once; false if the owner is gone.
    pub(crate) fn send(&self, messages: Vec<FromRank>) -> bool {
        let Some(link) = self.link else { return false };
        self.owner.send(News::RankSaid(link, messages)).is_ok()
    }

    /// Takes what the owner has sent. If that is nothing, the rank counts as asleep until the next call.
    pub(crate) fn take(&self, into: &mut Vec<ToRank>) -> Found {
        let mut state = self.queue.lock();
        std::mem::swap(&mut state.orders, into);
        state.asleep = false;
        if !into.is_empty() {
            drop(state);
            self.taken(into);
            return Found::Orders;
        }
        if state.closed {
            return Found::End;
        }
        state.asleep = true;
        Found::Nothing
    }

    /// Tells the owner when little waits any more.
    fn taken(&self, orders: &[ToRank]) {
        let bytes: usize = orders.iter().map(rough_bytes).sum();
        let before = self.queue.waiting.fetch_sub(bytes, Ordering::Relaxed);
        if before > DRAINED && before - bytes <= DRAINED {
            // Gone already is as good.
            drop(self.owner.send(News::Drained));
        }
    }

    /// Readable when a sleeping rank is woken.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.queue.wake.as_fd()
    }

    /// Takes notice of having been woken.
    pub(crate) fn woken(&self) {
        // Empty is as good.
        let _ = rustix::io::read(&self.queue.wake, &mut [0u8; 8]);
    }
}

impl Drop for RankEnd {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.closed = true;
        let link = self.link.or(state.link);
        let orders = std::mem::take(&mut state.orders);
        drop(state);
        drop(orders);
        if let Some(link) = link {
            // Gone already is as good.
            drop(self.owner.send(News::RankClosed(link, "the rank has ended".into())));
        }
    }
}

/// What an order takes, roughly: itself and its tables.
fn rough_bytes(order: &ToRank) -> usize {
    let lists = match order {
        ToRank::Pull(order) => blocks(&order.request),
        ToRank::Digest(order) => blocks(&order.request) + 4 * order.windows.len() as u64,
        ToRank::Gather(order) => blocks(&order.request),
        ToRank::DigestAnswer { pieces: Ok(pieces), .. } => 8 * pieces.len() as u64,
        _ => 0,
    };
    size_of::<ToRank>().saturating_add(usize::try_from(lists.saturating_mul(8)).unwrap_or(usize::MAX))
}

fn blocks(request: &Request) -> u64 {
    let src = request.src.iter().map(|group| match group {
        SrcGroup::Paged(group) => group.table.len(),
        SrcGroup::State(_) => 0,
    });
    let dst = request.dst.iter().map(|group| match group {
        DstGroup::Paged(group) => group.table.len(),
        DstGroup::State(_) => 0,
    });
    src.chain(dst).sum()
}

impl fmt::Debug for OwnerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnerEnd")
    }
}

impl fmt::Debug for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankEnd({:?})", self.link)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::driver::inbox::inbox;

    fn is_readable(fd: BorrowedFd<'_>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).unwrap() > 0
    }

    fn order() -> ToRank {
        ToRank::GatherEnd(7)
    }

    #[test]
    fn a_rank_is_woken_only_if_it_may_sleep() {
        let (tell, news) = inbox();
        let rank = RankPort::new(tell, Pairings::default()).join().unwrap();
        let mut got = Vec::new();
        news.take(&mut got);
        let Some(News::RankJoined(mut owner)) = got.pop() else { panic!("it did not join") };
        let mut orders = Vec::new();
        owner.send(order());
        assert_eq!(rank.take(&mut orders), Found::Nothing, "nothing is handed over before a flush");
        assert!(owner.flush());
        assert!(is_readable(rank.wake_fd()), "it was asleep");
        rank.woken();
        assert_eq!((rank.take(&mut orders), orders.len()), (Found::Orders, 1));
        orders.clear();
        owner.send(order());
        owner.flush();
        assert!(!is_readable(rank.wake_fd()), "it was awake, and will look before it sleeps");
        // The last words come before the end.
        owner.send(order());
        drop(owner);
        assert_eq!((rank.take(&mut orders), orders.len()), (Found::Orders, 2));
        orders.clear();
        assert_eq!(rank.take(&mut orders), Found::End);
    }

    #[test]
    fn what_waits_for_a_rank_is_counted_until_it_is_taken() {
        let (tell, news) = inbox();
        let rank = RankPort::new(tell, Pairings::default()).join().unwrap();
        let mut got = Vec::new();
        news.take(&mut got);
        let Some(News::RankJoined(mut owner)) = got.pop() else { panic!("it did not join") };
        while owner.waiting() <= DRAINED {
            owner.send(order());
        }
        owner.flush();
        let mut orders = Vec::new();
        assert_eq!(rank.take(&mut orders), Found::Orders);
        assert_eq!(owner.waiting(), 0);
        news.take(&mut got);
        assert!(matches!(got[..], [News::Drained]));
    }

    #[test]
    fn a_link_that_one_end_drops_is_closed_at_the_other() {
        let (tell, news) = inbox();
        let mut rank = RankPort::new(tell.clone(), Pairings::default()).join().unwrap();
        let mut got = Vec::new();
        news.take(&mut got);
        let Some(News::RankJoined(mut owner)) = got.pop() else { panic!("it did not join") };
        assert!(!rank.is_open());
        assert!(owner.accept(RankLinkId(3)) && rank.is_open());
        drop(rank);
        owner.send(order());
        assert!(!owner.flush());
        news.take(&mut got);
        assert!(matches!(&got[..], [News::RankClosed(RankLinkId(3), _)]));
        // A rank that is gone before it was accepted.
        drop(RankPort::new(tell.clone(), Pairings::default()).join().unwrap());
        got.clear();
        news.take(&mut got);
        let Some(News::RankJoined(owner)) = got.pop() else { panic!("it did not join") };
        assert!(!owner.accept(RankLinkId(4)));
        // Owners, likewise, after the last words.
        let mut end = MemoryEnd::new(tell, LinkId(9));
        end.send(PeerMessage::Refused(vec!["no".into()]));
        drop(end);
        got.clear();
        news.take(&mut got);
        assert!(
            matches!(&got[..], [News::PeerSaid(LinkId(9), said), News::PeerClosed(LinkId(9), _)] if said.len() == 1)
        );
    }

    #[test]
    fn a_name_has_one_owner_at_a_time() {
        let (tell, news) = inbox();
        let crate::Address::Memory(name) = crate::Address::memory("one-owner").unwrap() else { panic!("a name") };
        let held = Listening::start(&name, tell.clone()).unwrap();
        assert!(Listening::start(&name, tell.clone()).is_none());
        assert!(connect(&name, MemoryEnd::new(tell.clone(), LinkId(1))).is_ok());
        drop(held);
        let error = connect(&name, MemoryEnd::new(tell.clone(), LinkId(2))).unwrap_err();
        assert!(error.contains("memory:one-owner"), "{error}");
        // The refused end says nothing more; the accepted one closes its link when it is dropped.
        let mut got = Vec::new();
        news.take(&mut got);
        assert!(matches!(&got[..], [News::MemoryAccepted(_)]));
        drop(got);
        let mut got = Vec::new();
        news.take(&mut got);
        assert!(matches!(&got[..], [News::PeerClosed(LinkId(1), _)]));
        drop(Listening::start(&name, tell).unwrap());
    }
}
