//! What pulls and pushes have in common: an order's name, its other ranks, and how its faults add up.

use std::fmt;

use kvferry_geometry::units::RankId;
use kvferry_proto::push::PushId;
use kvferry_proto::rank::{PullId, RankFault, Stage};
use kvferry_transport::{OpKind, Outcome};

/// An order of the owner that moves bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Order {
    /// We read from the other ranks.
    Pull(PullId),
    /// We write to them.
    Push(PushId),
}

impl Order {
    pub(super) const fn kind(self) -> OpKind {
        match self {
            Self::Pull(_) => OpKind::Read,
            Self::Push(_) => OpKind::Write,
        }
    }

    /// One of its other ranks, in words.
    pub(super) const fn other(self, rank: RankId) -> Other {
        match self {
            Self::Pull(_) => Other { side: "source", rank },
            Self::Push(_) => Other { side: "destination", rank },
        }
    }
}

/// A rank of the other engine, as faults name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Other {
    side: &'static str,
    rank: RankId,
}

impl Other {
    /// A fault that concerns it.
    pub(super) fn fault(self, stage: Stage, text: impl fmt::Display) -> RankFault {
        fault(stage, format!("{self}: {text}"))
    }
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.side, self.rank)
    }
}

/// A fault that leaves nothing in doubt.
pub(super) fn fault(stage: Stage, text: impl Into<String>) -> RankFault {
    RankFault { stage, text: text.into(), in_doubt: false, bad: Vec::new() }
}

/// The fault that a slice's end is, if it is one; in words, why.
pub(super) fn fault_of(outcome: &Outcome, stage: Stage, other: Other, why: &str) -> Option<RankFault> {
    let in_doubt = match outcome {
        Outcome::Done(_) => return None,
        Outcome::Failed(_) => false,
        Outcome::InDoubt(_) => true,
    };
    Some(RankFault { in_doubt, ..other.fault(stage, why) })
}

/// What has gone wrong with an order: the first fault is the one that is told, doubt adds up.
#[derive(Debug, Default)]
pub(super) struct Faults(Option<RankFault>);

impl Faults {
    pub(super) fn add(&mut self, fault: RankFault) {
        match &mut self.0 {
            Some(first) => first.in_doubt |= fault.in_doubt,
            None => self.0 = Some(fault),
        }
    }

    pub(super) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// What is told.
    pub(super) fn told(&self) -> Option<RankFault> {
        self.0.clone()
    }
}
