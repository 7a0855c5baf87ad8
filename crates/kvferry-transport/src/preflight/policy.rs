//! What a lane must be.

use std::fmt;

use crate::types::{Lane, LaneKind};

/// What a lane must be. The default allows every lane.
///
/// A name is that of a [`LaneKind`] (`rdma`, `shm`, `cma`, `device`, `tcp`, ...) or of a library's transport, whole (`rc_mlx5`,
/// `cuda_ipc`) or up to an underscore (`rc` for `rc_mlx5` and `rc_verbs`; but `cuda` is `cuda_copy` too, which goes through the
/// host). A lane fits if its kind does, or *each* of the transports that carry its bytes; a transport that is known to be of
/// another kind fits only by a name of its own, so that a part that goes another way is no part of what was allowed.
///
/// Libraries' names can't be listed here, so every name of the right form is taken: one that nothing fits refuses every lane.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Policy {
    require: Vec<String>,
    min_bytes_per_second: Option<u64>,
}

/// A policy that can't be, or a lane that isn't what the policy requires.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// Not a name of a lane.
    #[error(
        "{got:?} can't be the name of a lane: names are of a-z, 0-9, - and _; known kinds are {}, and a library's own names \
         (rc_mlx5, cuda_ipc, ...) or their part before an underscore",
        kinds()
    )]
    Name {
        /// What was given.
        got: String,
    },
    /// The lane is another.
    #[error(
        "the policy requires {}; the lane is {}. Either the library fell back (look at its devices, drivers and transport list), \
         or allow what it is with require = [\"{}\"]",
        .required.join(" or "), .found, .found.kind
    )]
    Kind {
        /// What would have been right.
        required: Vec<String>,
        /// What there is.
        found: Found,
    },
    /// The lane is too slow.
    #[error(
        "the policy requires {} at least; the lane is {found}. Look for other load and for a lane that was meant to be faster, or \
         lower the policy's minimum",
        rate(*.required)
    )]
    TooSlow {
        /// The least, in bytes per second.
        required: u64,
        /// What there is.
        found: Found,
    },
    /// Nobody has measured it.
    #[error(
        "the policy requires {} at least, and the lane ({found}) was not measured; run a probe on it, or leave the minimum out",
        rate(*.required)
    )]
    NotMeasured {
        /// The least, in bytes per second.
        required: u64,
        /// What there is.
        found: Found,
    },
}

/// A lane, as a refusal tells it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its kind.
    pub kind: LaneKind,
    /// The library's own names of what carries it.
    pub transports: Vec<String>,
    /// In the backend's words.
    pub detail: String,
    /// Measured bytes per second.
    pub bytes_per_second: Option<u64>,
}

impl Found {
    fn new(lane: &Lane) -> Self {
        Self {
            kind: lane.kind,
            transports: lane.transports.clone(),
            detail: lane.detail.clone(),
            bytes_per_second: lane.measured.map(|m| whole(m.bytes_per_second)),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if !self.transports.is_empty() {
            write!(f, " ({})", self.transports.join(", "))?;
        }
        write!(f, ", {:?}", self.detail)?;
        self.bytes_per_second.map_or(Ok(()), |got| write!(f, ", measured {}", rate(got)))
    }
}

impl Policy {
    /// One of the names must fit, where there are any; and so many bytes per second must have been measured.
    ///
    /// # Errors
    /// [`PolicyError::Name`] for what can't be a name.
    pub fn new<I>(require: I, min_bytes_per_second: Option<u64>) -> Result<Self, PolicyError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let require: Vec<String> = require.into_iter().map(Into::into).collect();
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
        match require.iter().find(|name| name.is_empty() || !name.chars().all(fits)) {
            Some(got) => Err(PolicyError::Name { got: got.clone() }),
            None => Ok(Self { require, min_bytes_per_second }),
        }
    }

    /// The names; none: any lane.
    #[must_use]
    pub fn require(&self) -> &[String] {
        &self.require
    }

    /// The least rate.
    #[must_use]
    pub fn min_bytes_per_second(&self) -> Option<u64> {
        self.min_bytes_per_second
    }

    /// Whether it allows every lane.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.require.is_empty() && self.min_bytes_per_second.is_none()
    }

    /// Whether a lane is what is required.
    ///
    /// # Errors
    /// What is required, what there is, and what to change.
    pub fn check(&self, lane: &Lane) -> Result<(), PolicyError> {
        self.check_kind(lane)?;
        self.check_rate(lane)
    }

    /// The names alone; before anything was measured.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn check_kind(&self, lane: &Lane) -> Result<(), PolicyError> {
        let required = |kind: LaneKind| self.require.iter().any(|name| name == kind.name());
        let by_kind = required(lane.kind);
        // What the table doesn't know is what the backend says of the lane.
        let of_kind = |t: &str| by_kind && LaneKind::of_transport(t).is_none_or(required);
        let each = lane.transports.iter().all(|t| self.require.iter().any(|name| fits(name, t)) || of_kind(t));
        if self.require.is_empty() || (each && (by_kind || !lane.transports.is_empty())) {
            return Ok(());
        }
        Err(PolicyError::Kind { required: self.require.clone(), found: Found::new(lane) })
    }

    /// The rate alone.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn check_rate(&self, lane: &Lane) -> Result<(), PolicyError> {
        let Some(required) = self.min_bytes_per_second else { return Ok(()) };
        let found = Found::new(lane);
        match found.bytes_per_second {
            Some(got) if got >= required => Ok(()),
            Some(_) => Err(PolicyError::TooSlow { required, found }),
            None => Err(PolicyError::NotMeasured { required, found }),
        }
    }
}

/// Whether a transport is one that the name means.
fn fits(name: &str, transport: &str) -> bool {
    transport.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

fn kinds() -> String {
    LaneKind::ALL.map(LaneKind::name).join(", ")
}

/// Bytes per second in words.
pub(super) fn rate(bytes_per_second: u64) -> String {
    match bytes_per_second {
        0..10_000_000 => format!("{} kB/s", bytes_per_second / 1000),
        10_000_000..1_000_000_000 => format!("{} MB/s", bytes_per_second / 1_000_000),
        _ => format!("{}.{:02} GB/s", bytes_per_second / 1_000_000_000, bytes_per_second % 1_000_000_000 / 10_000_000),
    }
}

/// A rate as a whole number; what is no number is 0.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates, and takes NaN as 0")]
pub(super) fn whole(rate: f64) -> u64 {
    rate as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Measured;
    use std::time::Duration;

    fn lane(kind: LaneKind, transports: &[&str], bytes_per_second: Option<f64>) -> Lane {
        let per_operation = Duration::from_micros(3);
        let measured = bytes_per_second.map(|bytes_per_second| Measured { bytes_per_second, per_operation });
        let transports = transports.iter().map(|t| (*t).to_owned()).collect();
        Lane { kind, transports, detail: "as the library says".to_owned(), measured }
    }

    #[test]
    fn names_of_kinds_of_transports_and_their_beginnings() {
        let rc = lane(LaneKind::Rdma, &["rc_mlx5"], None);
        let ipc = lane(LaneKind::DeviceDirect, &["cuda_ipc"], None);
        let tcp = lane(LaneKind::Stream, &["tcp"], None);
        let check = |names: &[&str], lane: &Lane| Policy::new(names.iter().copied(), None).unwrap().check(lane).is_ok();
        assert!([&rc, &ipc, &tcp].iter().all(|lane| check(&[], lane)));
        assert!(check(&["rdma", "cuda_ipc"], &rc) && check(&["rdma", "cuda_ipc"], &ipc));
        assert!(!check(&["rdma", "cuda_ipc"], &tcp));
        assert!(check(&["rc"], &rc) && check(&["rc_mlx5"], &rc) && check(&["cuda"], &ipc));
        assert!(!check(&["r"], &rc) && !check(&["rc_"], &rc) && !check(&["rc_mlx"], &rc) && !check(&["mlx5"], &rc));
        // A lane that says no more than its kind.
        let shm = lane(LaneKind::SharedMemory, &[], None);
        assert!(check(&["shm"], &shm) && !check(&["posix"], &shm));
        // A backend that calls a lane by its fastest part.
        let fallback = lane(LaneKind::Rdma, &["rc_mlx5", "tcp"], None);
        assert!(!check(&["rdma"], &fallback) && check(&["rdma", "tcp"], &fallback));
        assert!(
            check(&["rdma"], &lane(LaneKind::Rdma, &["efa"], None)),
            "of a name that nobody knows, the backend says the kind"
        );
        // Some of the bytes go another way.
        let mixed = lane(LaneKind::Unknown, &["rc_mlx5", "tcp"], None);
        assert!(!check(&["rc"], &mixed) && check(&["rc", "tcp"], &mixed));
    }

    #[test]
    fn a_refusal_says_what_is_required_what_there_is_and_what_to_do() {
        let policy = Policy::new(["rdma", "cuda_ipc"], Some(10_000_000_000)).unwrap();
        let text = policy.check(&lane(LaneKind::Stream, &["tcp"], Some(1.25e9))).unwrap_err().to_string();
        for part in
            ["requires rdma or cuda_ipc", "tcp (tcp)", "as the library says", "1.25 GB/s", "require = [\"tcp\"]"]
        {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        let slow = policy.check(&lane(LaneKind::Rdma, &[], Some(9.99e9))).unwrap_err();
        assert!(matches!(slow, PolicyError::TooSlow { required: 10_000_000_000, .. }));
        assert!(slow.to_string().contains("requires 10.00 GB/s") && slow.to_string().contains("9.99 GB/s"), "{slow}");
        let unknown = policy.check(&lane(LaneKind::Rdma, &[], None)).unwrap_err();
        assert!(unknown.to_string().contains("run a probe"), "{unknown}");
        assert_eq!(policy.check(&lane(LaneKind::Rdma, &[], Some(1e10))), Ok(()));
        assert!(policy.check_kind(&lane(LaneKind::Rdma, &[], None)).is_ok());
        assert!(policy.check_rate(&lane(LaneKind::Rdma, &[], Some(f64::NAN))).is_err());
    }

    #[test]
    fn what_cannot_be_a_name_is_refused_with_what_can() {
        for bad in ["", "RDMA", "rc mlx5", "rdma,tcp", "тcp"] {
            let error = Policy::new(["shm", bad], None).unwrap_err();
            assert_eq!(error, PolicyError::Name { got: bad.to_owned() });
            assert!(LaneKind::ALL.iter().all(|kind| error.to_string().contains(kind.name())), "{error}");
        }
        assert!(Policy::new(["in-process"], None).is_ok() && Policy::default().is_any());
    }
}
