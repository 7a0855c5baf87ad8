//! What an owner does at a moment, as JSON: every live request and lease, its state, what it waits for and since when.
//!
//! These are types of their own, made from the session's, so that a renamed field there changes nothing here. The format is stable:
//! within a `version` keys are only added. Ids are texts as they stand in references and logs; times are whole milliseconds,
//! counted back (`since_ms`, `age_ms`) or ahead (`left_ms`) from the moment, and `null` where there is no end.
//!
//! A snapshot holds no secret: no token, no key, no address of memory.

use std::borrow::Cow;
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_session::snapshot as session;
use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;

/// An owner at a moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// Of this format.
    pub version: u32,
    /// The engine.
    pub engine: String,
    /// Which life of it, 32 hex digits.
    pub epoch: String,
    /// `joining`, `ready`, `rank lost` or `draining`.
    pub state: Cow<'static, str>,
    /// Ranks that have not joined, or are gone.
    pub missing: Vec<u32>,
    /// Links to other owners.
    pub links: Vec<LinkSnapshot>,
    /// Leases that are open.
    pub leases: Vec<LeaseSnapshot>,
    /// Requests that have not ended.
    pub pulls: Vec<PullSnapshot>,
    /// Requests that have ended and left blocks in quarantine.
    pub quarantine: Vec<QuarantineSnapshot>,
}

/// A link to another owner.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkSnapshot {
    /// Its number.
    pub link: u64,
    /// The engine at its other end, once that is known.
    pub peer: Option<String>,
    /// Which life of it.
    pub epoch: Option<String>,
    /// Where it leads, if it was us who connected.
    pub address: Option<String>,
    /// `up`, or what it waits for.
    pub state: Cow<'static, str>,
    /// For how long it has been up; before that, since it was begun.
    pub since_ms: u64,
    /// The version of the protocol that both speak.
    pub version: Option<u16>,
    /// Leases that its peer has bound.
    pub bound: usize,
    /// Our requests that go over it.
    pub pulls: usize,
}

/// An open lease.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LeaseSnapshot {
    /// Its id, 32 hex digits: that of the reference, and of both sides' spans.
    pub lease: String,
    /// The attempt that reads it.
    pub attempt: u32,
    /// Who has bound it.
    pub consumer: Option<String>,
    /// What it waits for.
    pub waiting_for: Cow<'static, str>,
    /// Since the offer, also once it is bound.
    pub since_ms: u64,
    /// How long it has left.
    pub left_ms: Option<u64>,
}

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PullSnapshot {
    /// Its number.
    pub pull: u64,
    /// The lease that it reads, 32 hex digits.
    pub lease: String,
    /// The present attempt.
    pub attempt: u32,
    /// The producer.
    pub peer: String,
    /// Where the producer's owner listens.
    pub address: String,
    /// `link`, `bind`, `write`, `read`, `stop` or `release`.
    pub phase: Cow<'static, str>,
    /// What it waits for.
    pub waiting_for: Cow<'static, str>,
    /// Since when it is in this phase.
    pub since_ms: u64,
    /// Since the engine's call.
    pub age_ms: u64,
    /// Until its deadline.
    pub left_ms: u64,
    /// How long its lease has left, as far as is known here.
    pub lease_left_ms: Option<u64>,
    /// Our ranks that it waits for.
    pub ranks: Vec<u32>,
    /// What the last attempt to reach the producer's owner came to.
    pub trouble: Option<String>,
}

/// Blocks in quarantine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QuarantineSnapshot {
    /// The request that has left them.
    pub pull: u64,
    /// How many blocks and slots.
    pub blocks: usize,
    /// Our ranks that have not said that they have stopped.
    pub ranks: Vec<u32>,
    /// The engine whose ranks may still write them.
    #[serde(default)]
    pub producer: Option<String>,
    /// Which of its ranks.
    #[serde(default)]
    pub writers: Vec<u32>,
    /// Since the request has ended.
    #[serde(default)]
    pub since_ms: u64,
}

impl Snapshot {
    /// As JSON, one line.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Neither a key nor a value of these types can be refused.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// As JSON, for people.
    #[must_use]
    pub fn to_json_pretty(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

impl From<session::Snapshot> for Snapshot {
    fn from(s: session::Snapshot) -> Self {
        Self {
            version: VERSION,
            engine: s.engine.to_string(),
            epoch: s.epoch.to_string(),
            state: s.state.into(),
            missing: ranks(&s.missing),
            links: s.links.into_iter().map(Into::into).collect(),
            leases: s.leases.into_iter().map(Into::into).collect(),
            pulls: s.pulls.into_iter().map(Into::into).collect(),
            quarantine: s.quarantine.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<session::LinkSnapshot> for LinkSnapshot {
    fn from(s: session::LinkSnapshot) -> Self {
        Self {
            link: s.link,
            peer: s.peer.map(|p| p.to_string()),
            epoch: s.epoch.map(|e| e.to_string()),
            address: s.address,
            state: s.state.into(),
            since_ms: millis(s.since),
            version: s.version,
            bound: s.bound,
            pulls: s.pulls,
        }
    }
}

impl From<session::LeaseSnapshot> for LeaseSnapshot {
    fn from(s: session::LeaseSnapshot) -> Self {
        Self {
            lease: s.fence.lease.to_string(),
            attempt: s.fence.attempt.get(),
            consumer: s.consumer.map(|c| c.to_string()),
            waiting_for: s.waiting_for.into(),
            since_ms: millis(s.since),
            left_ms: s.left.map(millis),
        }
    }
}

impl From<session::PullSnapshot> for PullSnapshot {
    fn from(s: session::PullSnapshot) -> Self {
        Self {
            pull: s.pull.0,
            lease: s.fence.lease.to_string(),
            attempt: s.fence.attempt.get(),
            peer: s.fence.engine.to_string(),
            address: s.address,
            phase: s.phase.into(),
            waiting_for: s.waiting_for.into(),
            since_ms: millis(s.since),
            age_ms: millis(s.age),
            left_ms: millis(s.left),
            lease_left_ms: s.lease_left.map(millis),
            ranks: ranks(&s.ranks),
            trouble: s.trouble,
        }
    }
}

impl From<session::QuarantineSnapshot> for QuarantineSnapshot {
    fn from(s: session::QuarantineSnapshot) -> Self {
        Self {
            pull: s.pull.0,
            blocks: s.blocks,
            ranks: ranks(&s.ranks),
            producer: s.producer.map(|p| p.to_string()),
            writers: ranks(&s.writers),
            since_ms: millis(s.since),
        }
    }
}

fn ranks(ranks: &[RankId]) -> Vec<u32> {
    ranks.iter().map(|r| r.get()).collect()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use kvferry_proto::lease::first_attempt;
    use kvferry_proto::names::{EngineId, Epoch, LeaseId};
    use kvferry_proto::rank::PullId;

    use super::*;

    const PAGE: &str = include_str!("../../../docs/observability.md");

    fn snapshot() -> session::Snapshot {
        let ms = Duration::from_millis;
        let id = |id: &str| EngineId::new(id).unwrap();
        let fence = |engine: &str, lease| first_attempt(id(engine), Epoch::new(7), LeaseId::new(lease));
        session::Snapshot {
            engine: id("decode-0"),
            epoch: Epoch::new(0xd),
            state: "ready",
            missing: Vec::new(),
            links: vec![session::LinkSnapshot {
                link: 3,
                peer: Some(id("prefill-0")),
                epoch: Some(Epoch::new(7)),
                address: Some("tcp:10.0.3.17:7600".into()),
                state: "up",
                since: ms(81_250),
                version: Some(3),
                bound: 0,
                pulls: 1,
            }],
            leases: vec![session::LeaseSnapshot {
                fence: fence("decode-0", 0xb),
                consumer: None,
                waiting_for: "waiting for a consumer",
                since: ms(12_000),
                left: Some(ms(18_000)),
            }],
            pulls: vec![session::PullSnapshot {
                pull: PullId(41),
                fence: fence("prefill-0", 0xa),
                address: "tcp:10.0.3.17:7600".into(),
                phase: "read",
                waiting_for: "waiting for ranks to read",
                since: ms(140),
                age: ms(152),
                left: ms(29_848),
                lease_left: Some(ms(28_100)),
                ranks: vec![RankId::new(1)],
                trouble: None,
            }],
            quarantine: vec![session::QuarantineSnapshot {
                pull: PullId(17),
                blocks: 96,
                ranks: Vec::new(),
                producer: Some(id("prefill-0")),
                writers: vec![RankId::new(2)],
                since: ms(4100),
            }],
        }
    }

    /// The page's example is what comes out, so that whoever reads the format there reads the truth.
    #[test]
    fn the_format_is_as_documented() {
        let json = Snapshot::from(snapshot()).to_json_pretty();
        let example = PAGE.split("```json\n").nth(1).unwrap().split("\n```").next().unwrap();
        assert_eq!(json, example);
    }

    #[test]
    fn what_was_written_can_be_read() {
        let one = Snapshot::from(snapshot());
        assert_eq!(serde_json::from_str::<Snapshot>(&one.to_json()).unwrap(), one);
        // As it was before there was push.
        let before = one.to_json().replace(r#","producer":"prefill-0","writers":[2],"since_ms":4100"#, "");
        let read: Snapshot = serde_json::from_str(&before).unwrap();
        assert_eq!((read.quarantine[0].blocks, &read.quarantine[0].producer), (96, &None));
        let mut endless = snapshot();
        endless.leases[0].left = None;
        endless.pulls[0].age = Duration::MAX;
        let endless = Snapshot::from(endless);
        assert_eq!((endless.leases[0].left_ms, endless.pulls[0].age_ms), (None, u64::MAX));
        assert!(endless.to_json().contains("\"left_ms\":null"));
    }
}
