//! What can be set, and its checks.

use std::time::Duration;

use kvferry_transport::EndpointId;

use crate::error::UcxError;

/// The most rails of an endpoint.
pub const MAX_RAILS: usize = 16;

/// One rail: a UCX context with workers of its own, driven by a thread of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Rail {
    /// The devices that it may use, as `UCX_NET_DEVICES` lists them (`mlx5_0:1`, `eth0`); empty: as UCX would.
    pub devices: Vec<String>,
    /// The transports that it may use, as `UCX_TLS` lists them (`rc`, `cma`, `tcp`); empty: as UCX would.
    pub transports: Vec<String>,
}

impl Rail {
    /// A rail on these devices, all transports allowed.
    #[must_use]
    pub fn on<S: Into<String>>(devices: impl IntoIterator<Item = S>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), transports: Vec::new() }
    }

    /// The same rail with these transports only.
    #[must_use]
    pub fn with_transports<S: Into<String>>(mut self, transports: impl IntoIterator<Item = S>) -> Self {
        self.transports = transports.into_iter().map(Into::into).collect();
        self
    }
}

/// How to open an endpoint. `UCX_*` variables of the environment are UCX's defaults; what is set here goes before them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UcxConfig {
    /// The endpoint's id, for one that is an endpoint of other backends, too. By default, random.
    pub endpoint: Option<EndpointId>,
    /// The rails, 1 to [`MAX_RAILS`]. By default two alike, or one where there is one processor: a lane that copies by CPU
    /// (cma, tcp) is twice as fast with two.
    pub rails: Vec<Rail>,
    /// The most reads and writes that a rail has under way at once, 1 to 4096.
    pub outstanding: usize,
    /// A batch of at least this many bytes a rail is cut over all rails; a smaller one goes over one. At least 1.
    pub stripe: u64,
    /// How often UCX looks whether the peers of idle connections are alive. At least a millisecond. The death of a process on
    /// this host is told by the kernel at once, whatever this is.
    pub keepalive: Duration,
    /// How long a peer may take to answer a connection.
    pub connect_within: Duration,
    /// How long a rail's thread looks for the next thing to do before it sleeps. Zero: not at all.
    pub spin: Duration,
    /// More of UCX's settings, for all rails: names without the prefix `UCX_`, and values. A few of them (`LOG_LEVEL`, ...) act on
    /// all of UCX in this process.
    pub options: Vec<(String, String)>,
}

impl Default for UcxConfig {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            endpoint: None,
            rails: vec![Rail::default(); processors.min(2)],
            outstanding: 64,
            stripe: 256 << 10,
            keepalive: Duration::from_secs(2),
            connect_within: Duration::from_secs(10),
            spin: Duration::from_micros(20),
            options: Vec::new(),
        }
    }
}

impl UcxConfig {
    /// Settings with `count` rails alike.
    #[must_use]
    pub fn with_rails(count: usize) -> Self {
        Self { rails: vec![Rail::default(); count], ..Self::default() }
    }

    /// Whether everything is in its range, and no list of transports is one that UCX would take and fail with later.
    ///
    /// # Errors
    /// The first setting that isn't.
    pub fn check(&self) -> Result<(), UcxError> {
        let setting = |name, got: String, allowed| Err(UcxError::Setting { name, got, allowed });
        if self.rails.is_empty() || self.rails.len() > MAX_RAILS {
            return setting("rails", self.rails.len().to_string(), "1 to 16");
        }
        if !(1..=4096).contains(&self.outstanding) {
            return setting("outstanding", self.outstanding.to_string(), "1 to 4096");
        }
        if self.stripe == 0 {
            return setting("stripe", "0".to_owned(), "at least 1 byte");
        }
        if self.keepalive < Duration::from_millis(1) {
            return setting("keepalive", format!("{:?}", self.keepalive), "at least 1 ms");
        }
        // Where one side handles errors and the other doesn't, UCX 1.22 crashes at the first connection.
        let fixed = |name: &str| name.ends_with("ERROR_HANDLING");
        if let Some((name, value)) = self.options.iter().find(|(name, _)| fixed(name)) {
            return setting(
                "an option",
                format!("{name}={value}"),
                "any but for the handling of errors, which is needed",
            );
        }
        self.rails.iter().enumerate().try_for_each(|(rail, r)| check_transports(rail, &r.transports))
    }
}

/// A list that names direct device transports but none that copies device memory: UCX takes it, and fails (or worse) at the first
/// device buffer that the direct ones can't serve.
fn check_transports(rail: usize, transports: &[String]) -> Result<(), UcxError> {
    const DIRECT: [(&str, &str); 5] = [
        ("cuda_ipc", "cuda_copy"),
        ("gdr_copy", "cuda_copy"),
        ("rocm_ipc", "rocm_copy"),
        ("rocm_gdr", "rocm_copy"),
        ("ze_ipc", "ze_copy"),
    ];
    let has = |name: &str| transports.iter().any(|t| t == name);
    // A list of what is *not* to be used begins with a caret.
    if transports.first().is_some_and(|t| t.starts_with('^')) {
        return Ok(());
    }
    for (direct, copy) in DIRECT {
        let family = copy.split('_').next().unwrap_or(copy);
        if has(direct) && !has(copy) && !has(family) && !has("all") {
            return Err(UcxError::DeviceList {
                rail,
                transports: transports.to_vec(),
                direct: direct.to_owned(),
                missing: copy.to_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_ranges() {
        assert!(UcxConfig::default().check().is_ok());
        let bad = |change: fn(&mut UcxConfig)| {
            let mut config = UcxConfig::default();
            change(&mut config);
            let error = config.check().unwrap_err();
            assert!(matches!(error, UcxError::Setting { .. }), "{error}");
            error.to_string()
        };
        assert!(bad(|c| c.rails.clear()).contains("rails"));
        bad(|c| c.rails = vec![Rail::default(); 17]);
        bad(|c| c.outstanding = 0);
        bad(|c| c.outstanding = 4097);
        bad(|c| c.stripe = 0);
        bad(|c| c.keepalive = Duration::ZERO);
        bad(|c| c.options = vec![("POSIX_ERROR_HANDLING".to_owned(), "n".to_owned())]);
    }

    #[test]
    fn uc_02_a_device_list_without_its_copy_transport_is_refused_before_anything_starts() {
        let with = |list: &[&str]| {
            let rail = Rail::default().with_transports(list.iter().copied());
            UcxConfig { rails: vec![Rail::default(), rail], ..UcxConfig::default() }.check()
        };
        let error = with(&["rc", "gdr_copy"]).unwrap_err();
        assert!(matches!(&error, UcxError::DeviceList { rail: 1, missing, .. } if missing == "cuda_copy"), "{error}");
        assert!(error.to_string().contains("add cuda_copy"), "{error}");
        assert!(with(&["rc", "cuda_ipc"]).is_err() && with(&["rocm_ipc", "tcp"]).is_err());
        for good in [&["rc", "cuda_copy", "gdr_copy"][..], &["rc", "cuda"], &["all"], &["^cuda_copy"], &["tcp"], &[]] {
            with(good).unwrap();
        }
    }
}
