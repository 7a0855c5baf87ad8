//! What can be set.

use std::time::Duration;

use kvferry_transport::EndpointId;

use crate::error::NixlError;

/// Settings of an endpoint. Start from [`NixlConfig::default`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NixlConfig {
    /// NIXL's plugin: `UCX` (the default), `LIBFABRIC`, or another that moves bytes between agents. Those that move them between
    /// memory and storage (`POSIX`, `GDS`, `OBJ`, ...) are refused.
    pub plugin: String,
    /// The endpoint's id, for one that is an endpoint of other backends, too. By default, random.
    pub endpoint: Option<EndpointId>,
    /// Parameters for the plugin by its own names, laid over its defaults and over what the other settings say.
    pub params: Vec<(String, String)>,
    /// Network devices (rails) that the plugin may use, by its own names: `mlx5_0`, ... Empty (the default): the plugin's choice. For
    /// UCX they are the parameter `device_list`.
    pub devices: Vec<String>,
    /// UCX settings by their names without `UCX_`, as `("TLS", "rc,cuda")`. What the environment sets wins. Only for the plugin UCX, which
    /// gets them as `engine_config`, after those that make the lanes of one host fit for endpoints that handle errors.
    pub ucx: Vec<(String, String)>,
    /// Threads of the plugin UCX for requests of 128 descriptors or more (`num_threads`; vLLM uses 4): they share the descriptors of a
    /// request, spin while it is under way, and sleep otherwise. Each has its own connection to each peer. What they gain depends on the lane
    /// and on free processors: measure it. Default: 0, all on the agent's own thread. NIXL 1.5.1 gives a shared request up at its first error
    /// with parts of it still queued, and UCX has been seen to abort the process some time after a peer had been killed.
    pub threads: usize,
    /// How the agent's thread waits.
    pub waiting: Waiting,
    /// How large operations are cut.
    pub cutting: Cutting,
    /// How long a peer may be silent while something of ours waits for it. An endpoint is silent while it registers memory, so this must
    /// be longer than any peer's longest registration takes. Default: 10 s.
    pub silence: Duration,
    /// Whether NIXL measures each request; see [`NixlTransport::telemetry`](crate::NixlTransport::telemetry). Default: false.
    pub telemetry: bool,
    /// Most peers that are connected to us at a time. Default: 4,096.
    pub max_guests: usize,
}

/// How the agent's thread waits for what NIXL doesn't tell: it looks again and again, for a while without pause, then with pauses
/// that grow to a bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Waiting {
    /// How long it looks without pause after something happened. Default: 50 µs.
    pub spin: Duration,
    /// The longest pause while bytes of ours move or an answer is awaited. Default: 50 µs.
    pub busy: Duration,
    /// The longest pause while peers' operations on our memory are open. Default: 500 µs. Lanes over sockets need this thread to send what
    /// peers read; their buffers last that long.
    pub serving: Duration,
    /// The longest pause otherwise: how long a peer's first question to an idle endpoint may wait. Default: 2 ms.
    pub idle: Duration,
    /// The longest pause otherwise where every peer is on this host: these ring when they send, so nothing waits for the pause's end.
    /// Default: 20 ms.
    pub resting: Duration,
    /// Runs NIXL's own progress thread, with this delay between its rounds; zero makes it burn a whole core. Default: `None`, no such
    /// thread. Our own thread makes progress.
    pub library_thread: Option<Duration>,
}

/// How large operations are cut into requests of NIXL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Cutting {
    /// Most bytes of a request. Default: 16 MiB.
    pub request_bytes: u64,
    /// Most descriptors of a request. Default: 1,000.
    pub request_descriptors: usize,
    /// Most requests in progress over all peers. Default: 16.
    pub outstanding: usize,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(50),
            busy: Duration::from_micros(50),
            serving: Duration::from_micros(500),
            idle: Duration::from_millis(2),
            resting: Duration::from_millis(20),
            library_thread: None,
        }
    }
}

impl Default for Cutting {
    fn default() -> Self {
        Self { request_bytes: 16 << 20, request_descriptors: 1000, outstanding: 16 }
    }
}

impl Default for NixlConfig {
    fn default() -> Self {
        Self {
            plugin: "UCX".to_owned(),
            endpoint: None,
            params: Vec::new(),
            devices: Vec::new(),
            ucx: Vec::new(),
            threads: 0,
            waiting: Waiting::default(),
            cutting: Cutting::default(),
            silence: Duration::from_secs(10),
            telemetry: false,
            max_guests: 4096,
        }
    }
}

/// What UCX needs so that memory of the same host is reached without a socket by endpoints that handle errors, and so that it looks after
/// them often enough.
const UCX: [(&str, &str); 3] =
    [("POSIX_ERROR_HANDLING", "y"), ("CMA_ERROR_HANDLING", "y"), ("KEEPALIVE_INTERVAL", "1s")];

/// Descriptors below which a request stays with one of UCX's threads.
const SPLIT: usize = 128;

impl NixlConfig {
    /// Whether requests are shared among threads. NIXL gives such a one up at the first error of any, without waiting for the others.
    pub(crate) fn shares_requests(&self) -> bool {
        self.threads > 0 || self.params.iter().any(|(key, _)| key == "num_threads")
    }

    pub(crate) fn is_ucx(&self) -> bool {
        self.plugin == "UCX"
    }

    /// Checks every setting that could be out of range.
    pub(crate) fn check(&self) -> Result<(), NixlError> {
        let setting = |setting, got: &dyn std::fmt::Debug, allowed: &str| {
            Err(NixlError::Setting { setting, got: format!("{got:?}"), allowed: allowed.to_owned() })
        };
        let plain = |text: &str| !text.is_empty() && !text.contains(['\0', '/']);
        if !plain(&self.plugin) {
            return setting("plugin", &self.plugin, "a plugin's name");
        }
        if let Some(bad) = self.devices.iter().find(|d| !plain(d) || d.contains(',')) {
            return setting("devices", bad, "names of devices, one each");
        }
        if !self.is_ucx() && !self.ucx.is_empty() {
            return setting("ucx", &self.plugin, "only with the plugin UCX");
        }
        if let Some(bad) = self.ucx.iter().find(|(k, v)| !plain(k) || k.contains(['=', ',']) || v.contains([',', '\0']))
        {
            return setting(
                "ucx",
                bad,
                "names without UCX_, and values without a comma (lists: set UCX_... in the environment)",
            );
        }
        if self.threads > 64 {
            return setting("threads", &self.threads, "at most 64");
        }
        let c = &self.cutting;
        if c.request_bytes == 0 || c.request_descriptors == 0 || c.outstanding == 0 || c.outstanding > 4096 {
            return setting("cutting", c, "1 byte or more, 1 descriptor or more, 1 to 4096 requests");
        }
        let w = &self.waiting;
        if [w.busy, w.serving, w.idle, w.resting].iter().any(Duration::is_zero) {
            return setting("waiting", &self.waiting, "pauses longer than zero");
        }
        if self.silence < Duration::from_millis(100) {
            return setting("silence", &self.silence, "at least 100 ms");
        }
        Ok(())
    }

    /// The plugin's parameters: its defaults, what the settings say, and what was given by name.
    pub(crate) fn plugin_params(&self, defaults: &[(String, String)]) -> Vec<(String, String)> {
        let mut out = defaults.to_vec();
        let mut set = |key: &str, value: String| match out.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => out.push((key.to_owned(), value)),
        };
        if self.is_ucx() {
            let ours = UCX.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            let kept = ours.filter(|(k, _)| !self.ucx.iter().any(|(key, _)| key == k));
            let all: Vec<String> = kept.chain(self.ucx.iter().cloned()).map(|(k, v)| format!("{k}={v}")).collect();
            set("engine_config", all.join(","));
            // Those of NIXL that know it free a connection whose peer has ended at once.
            set("ucx_ep_close_force", "true".to_owned());
            if !self.devices.is_empty() {
                set("device_list", self.devices.join(", "));
            }
            if self.threads > 0 {
                set("num_threads", self.threads.to_string());
                set("split_batch_size", SPLIT.to_string());
            }
        } else if !self.devices.is_empty() {
            set("device_list", self.devices.join(","));
        }
        for (key, value) in &self.params {
            set(key, value.clone());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        assert_eq!(NixlConfig::default().check(), Ok(()));
        let bad: [fn(&mut NixlConfig); 8] = [
            |c| c.plugin = String::new(),
            |c| c.devices = vec!["mlx5_0,mlx5_1".to_owned()],
            |c| c.ucx = vec![("TLS".to_owned(), "rc,tcp".to_owned())],
            |c| c.threads = 65,
            |c| c.cutting.outstanding = 0,
            |c| c.waiting.idle = Duration::ZERO,
            |c| c.silence = Duration::ZERO,
            |c| (c.plugin, c.ucx) = ("LIBFABRIC".to_owned(), vec![("TLS".to_owned(), "rc".to_owned())]),
        ];
        for change in bad {
            let mut config = NixlConfig::default();
            change(&mut config);
            assert!(matches!(config.check(), Err(NixlError::Setting { .. })), "{config:?}");
        }
    }

    #[test]
    fn parameters_are_laid_over_each_other() {
        let config = NixlConfig {
            threads: 4,
            devices: vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()],
            ucx: vec![("KEEPALIVE_INTERVAL".to_owned(), "5s".to_owned())],
            params: vec![("num_workers".to_owned(), "2".to_owned())],
            ..NixlConfig::default()
        };
        let params = config.plugin_params(&[("num_workers".to_owned(), "1".to_owned())]);
        let of = |key: &str| params.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
        assert_eq!(of("num_workers"), Some("2"));
        assert_eq!(of("num_threads"), Some("4"));
        assert_eq!(of("device_list"), Some("mlx5_0, mlx5_1"));
        assert_eq!(of("engine_config"), Some("POSIX_ERROR_HANDLING=y,CMA_ERROR_HANDLING=y,KEEPALIVE_INTERVAL=5s"));
    }
}
