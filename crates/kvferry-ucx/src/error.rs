//! Why an endpoint could not be opened.

/// An endpoint could not be opened. Nothing is left of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    /// A setting is out of its range.
    #[error("{name} is {got}; allowed is {allowed}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        got: String,
        /// The values that it may have.
        allowed: &'static str,
    },
    /// UCX refused a setting.
    #[error("UCX refused the setting {option}: {reason}; `ucx_info -c` lists what there is")]
    Option {
        /// Name and value.
        option: String,
        /// UCX's words.
        reason: String,
    },
    /// A list of transports reaches device memory directly but can't copy it.
    #[error(
        "rail {rail}: the transports {} have {direct} but not {missing}, without which memory of that device can't be \
         copied; add {missing} to the list", list(.transports)
    )]
    DeviceList {
        /// The rail's index.
        rail: usize,
        /// The list.
        transports: Vec<String>,
        /// What needs the other.
        direct: String,
        /// What is missing.
        missing: String,
    },
    /// None of the transports can be used on the devices.
    #[error(
        "rail {rail}: UCX has no transport among {} on the devices {}: {reason}; name others, or leave the lists empty",
        list(.transports), list(.devices)
    )]
    NoTransport {
        /// The rail's index.
        rail: usize,
        /// The transports that were allowed; empty: all.
        transports: Vec<String>,
        /// The devices that were allowed; empty: all.
        devices: Vec<String>,
        /// UCX's words.
        reason: String,
    },
    /// The transports move bytes but can't carry messages.
    #[error(
        "rail {rail}: no transport among {} carries messages ({reason}), without which nothing can be asked or told; add \
         tcp, or posix on one host, to the list", list(.transports)
    )]
    NoMessages {
        /// The rail's index.
        rail: usize,
        /// The transports that were allowed; empty: all.
        transports: Vec<String>,
        /// UCX's words.
        reason: String,
    },
    /// UCX failed otherwise.
    #[error("UCX failed at {what}: {reason}")]
    Ucx {
        /// What was to be done.
        what: &'static str,
        /// UCX's words.
        reason: String,
    },
    /// The system refused something.
    #[error("the system refused {what}: {reason}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
}

impl UcxError {
    pub(crate) fn system<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |e| Self::System { what, reason: e.to_string() }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "(all)".to_owned() } else { names.join(",") }
}
