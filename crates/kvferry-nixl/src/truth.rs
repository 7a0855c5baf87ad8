//! What can be known of the lane that NIXL uses.

use kvferry_transport::{Lane, LaneKind};

use crate::config::NixlConfig;
use crate::process::{Process, Watch};

/// The lane to a peer that is up.
pub(crate) fn lane(config: &NixlConfig, _me: &Process, _watch: &Watch) -> Lane {
    Lane {
        kind: LaneKind::Unknown,
        transports: Vec::new(),
        detail: format!("NIXL, plugin {}; which of its transports carries the bytes, NIXL doesn't tell", config.plugin),
        measured: None,
    }
}

/// The lane to a peer that has not answered.
pub(crate) fn intended(config: &NixlConfig) -> Lane {
    Lane {
        kind: LaneKind::Unknown,
        transports: Vec::new(),
        detail: format!("NIXL, plugin {}; not up yet", config.plugin),
        measured: None,
    }
}
