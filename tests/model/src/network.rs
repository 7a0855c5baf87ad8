//! Links between owners, and what is on its way on them.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::names::{Epoch, Fence};
use kvferry_proto::peer::{Bind, BindAnswer, Heartbeat, HeartbeatAnswer, LeaseClosed, Release, ReleaseAnswer};
use kvferry_proto::push::{Stop, Stopped, WriterEnd};
use kvferry_proto::rank::PullId;

use crate::world::{Lives, Network};

/// Names a link; never re-used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub(crate) u8);

/// One of a link's two ends, or the way to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum End {
    /// The consumer's.
    Consumer,
    /// The producer's.
    Producer,
}

/// The messages of one lease's life, as in `kvferry_proto::peer::PeerMessage`.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Message {
    Bind(Bind),
    BindAnswer(BindAnswer),
    PushBind(PushBind),
    Written(Written),
    Stop(Stop),
    Stopped(Stopped),
    Release(Release),
    ReleaseAnswer(ReleaseAnswer),
    Heartbeat(Heartbeat),
    HeartbeatAnswer(HeartbeatAnswer),
    Closed(LeaseClosed),
}

/// `kvferry_proto::push::PushBind`, with the one block that is granted.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct PushBind {
    pub(crate) bind: Bind,
    pub(crate) block: u32,
    /// Whose block it is: for the rules only.
    pub(crate) pull: PullId,
}

/// `kvferry_proto::push::Written`; what is held stands in the references of a world.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Written {
    pub(crate) fence: Fence,
    pub(crate) writers: Vec<(RankId, WriterEnd)>,
}

/// A link that has been greeted on both sides, or by the producer.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Link {
    pub(crate) consumer: usize,
    pub(crate) producer: usize,
    /// The lives that have greeted each other.
    pub(crate) consumer_epoch: Epoch,
    pub(crate) producer_epoch: Epoch,
    /// The lives of their ranks, as each has told the other.
    pub(crate) consumer_ranks: Lives,
    pub(crate) producer_ranks: Lives,
    pub(crate) made: Made,
    pub(crate) up: Duration,
    pub(crate) wire: Wire,
    pub(crate) at_consumer: Side,
    pub(crate) at_producer: Side,
}

/// How a link came about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Made {
    /// By the consumer, for its requests.
    Road,
    /// Otherwise (by the producer, or to another address): the consumer has not heard yet what the producer has said of itself.
    Apart,
    /// The same, and it has.
    ApartUp,
}

/// Whether what is sent arrives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Wire {
    Whole,
    /// What was sent before may still arrive.
    Cut,
}

/// What an owner has of a link.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Side {
    /// It is there; what is on its way to it.
    Up(Vec<Message>),
    Down,
}

impl Side {
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    pub(crate) fn waiting(&self) -> &[Message] {
        match self {
            Self::Up(messages) => messages,
            Self::Down => &[],
        }
    }
}

impl Link {
    pub(crate) fn side(&self, end: End) -> &Side {
        match end {
            End::Consumer => &self.at_consumer,
            End::Producer => &self.at_producer,
        }
    }

    pub(crate) fn side_mut(&mut self, end: End) -> &mut Side {
        match end {
            End::Consumer => &mut self.at_consumer,
            End::Producer => &mut self.at_producer,
        }
    }

    /// Sends to an end, if the other one has the link and the wire is whole.
    pub(crate) fn send(&mut self, to: End, message: Message, network: Network) {
        let from = match to {
            End::Consumer => End::Producer,
            End::Producer => End::Consumer,
        };
        if self.wire == Wire::Cut || !self.side(from).is_up() {
            return;
        }
        let Side::Up(waiting) = self.side_mut(to) else { return };
        let at = match network {
            Network::Ordered => waiting.len(),
            // Their order says nothing: one order stands for all.
            Network::Anyhow => waiting.partition_point(|m| digest(m) <= digest(&message)),
        };
        waiting.insert(at, message);
    }

    /// Takes one that is on its way to an end.
    pub(crate) fn take(&mut self, to: End, index: usize) -> Option<Message> {
        match self.side_mut(to) {
            Side::Up(waiting) if index < waiting.len() => Some(waiting.remove(index)),
            _ => None,
        }
    }

    /// An end has it no more.
    pub(crate) fn drop_end(&mut self, end: End) {
        self.wire = Wire::Cut;
        *self.side_mut(end) = Side::Down;
    }
}

fn digest(message: &Message) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.hash(&mut hasher);
    hasher.finish()
}
