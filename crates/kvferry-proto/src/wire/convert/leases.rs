//! Heartbeats and notices of closed leases.

use std::time::Duration;

use super::{ConvertError, Converted};
use crate::lease::Closing;
use crate::names::{Attempt, LeaseId};
use crate::peer::{Heartbeat, HeartbeatAnswer, LeaseClosed, Left};
use crate::wire::dto;

impl TryFrom<dto::Heartbeat> for Heartbeat {
    type Error = ConvertError;
    fn try_from(d: dto::Heartbeat) -> Converted<Self> {
        let lease = |(lease, attempt)| (LeaseId::new(lease), Attempt::new(attempt));
        Ok(Self { beat: d.beat, leases: d.leases.into_iter().map(lease).collect() })
    }
}

impl From<&Heartbeat> for dto::Heartbeat {
    fn from(m: &Heartbeat) -> Self {
        Self { beat: m.beat, leases: m.leases.iter().map(|(lease, attempt)| (lease.get(), attempt.get())).collect() }
    }
}

impl TryFrom<dto::HeartbeatAnswer> for HeartbeatAnswer {
    type Error = ConvertError;
    fn try_from(d: dto::HeartbeatAnswer) -> Converted<Self> {
        let left = |left| match left {
            dto::Left::Closed => Left::Closed,
            dto::Left::ForNs(ns) => Left::For(Duration::from_nanos(ns)),
            dto::Left::Always => Left::Always,
        };
        Ok(Self { beat: d.beat, left: d.left.into_iter().map(left).collect() })
    }
}

impl From<&HeartbeatAnswer> for dto::HeartbeatAnswer {
    fn from(m: &HeartbeatAnswer) -> Self {
        let left = |left: &Left| match left {
            Left::Closed => dto::Left::Closed,
            Left::For(time) => dto::Left::ForNs(super::messages::nanos(*time)),
            Left::Always => dto::Left::Always,
        };
        Self { beat: m.beat, left: m.left.iter().map(left).collect() }
    }
}

impl TryFrom<dto::LeaseClosed> for LeaseClosed {
    type Error = ConvertError;
    fn try_from(d: dto::LeaseClosed) -> Converted<Self> {
        let how = match d.how {
            dto::Closing::Read => Closing::Read,
            dto::Closing::Abandoned => Closing::Abandoned,
            dto::Closing::Declined => Closing::Declined,
            dto::Closing::ConsumerLost => Closing::ConsumerLost,
            dto::Closing::Withdrawn => Closing::Withdrawn,
            dto::Closing::Expired => Closing::Expired,
            dto::Closing::RankLost => Closing::RankLost,
            dto::Closing::Restarted => Closing::Restarted,
        };
        Ok(Self { fence: d.fence.try_into()?, how })
    }
}

impl From<&LeaseClosed> for dto::LeaseClosed {
    fn from(m: &LeaseClosed) -> Self {
        let how = match m.how {
            Closing::Read => dto::Closing::Read,
            Closing::Abandoned => dto::Closing::Abandoned,
            Closing::Declined => dto::Closing::Declined,
            Closing::ConsumerLost => dto::Closing::ConsumerLost,
            Closing::Withdrawn => dto::Closing::Withdrawn,
            Closing::Expired => dto::Closing::Expired,
            Closing::RankLost => dto::Closing::RankLost,
            Closing::Restarted => dto::Closing::Restarted,
        };
        Self { fence: (&m.fence).into(), how }
    }
}
