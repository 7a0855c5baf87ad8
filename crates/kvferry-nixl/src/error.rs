//! Why an endpoint could not be opened.

/// An endpoint could not be opened.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// NIXL is not on this machine, or not where the loader looks.
    #[error("NIXL's library is not there: {looked_for}; {cure}")]
    NoLibrary {
        /// What was looked for, where, and what the loader said.
        looked_for: String,
        /// How to get it.
        cure: String,
    },
    /// The library lacks a function.
    #[error(
        "libnixl_capi.so has no {symbol}; it is older than NIXL 1.5: take a newer one (`cargo xtask native` fetches the right one)"
    )]
    OldLibrary {
        /// The function.
        symbol: String,
    },
    /// A setting is out of its range.
    #[error("{setting} is {got}, allowed is {allowed}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        got: String,
        /// What may be.
        allowed: String,
    },
    /// There is no such plugin, or it can't be loaded.
    #[error(
        "NIXL has no plugin {plugin:?} that can be loaded{directory}; there are: {available}. Set NIXL_PLUGIN_DIR to the folder of \
         libplugin_*.so, or choose another; NIXL_LOG_LEVEL=DEBUG tells what a plugin lacks"
    )]
    NoPlugin {
        /// The plugin.
        plugin: String,
        /// Where plugins are looked for, if that is known.
        directory: String,
        /// Those that were found (found does not mean that they can be loaded).
        available: String,
    },
    /// The plugin moves bytes between memory and storage, not between the memories of two agents.
    #[error(
        "NIXL's plugin {plugin} moves {memory} on one host: it reaches no other agent's memory, so no peer can be connected over it; \
         use UCX or LIBFABRIC"
    )]
    NotBetweenAgents {
        /// The plugin.
        plugin: String,
        /// The kinds of memory that it has.
        memory: String,
    },
    /// The plugin refused its parameters, or finds nothing to work on.
    #[error("NIXL's plugin {plugin} could not be started with {params}: {reason}")]
    Plugin {
        /// The plugin.
        plugin: String,
        /// Its parameters.
        params: String,
        /// Cause, as far as NIXL's interface tells.
        reason: String,
    },
    /// NIXL failed otherwise.
    #[error("{what} failed: {reason}")]
    Nixl {
        /// What was tried.
        what: &'static str,
        /// Cause, as far as NIXL's interface tells.
        reason: String,
    },
    /// The system refused.
    #[error("{what} failed: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
}

impl NixlError {
    pub(crate) fn no_library(loader: String) -> Self {
        let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let loader = if loader.is_empty() { "nothing".to_owned() } else { loader };
        Self::NoLibrary {
            looked_for: format!(
                "libnixl_capi.so was looked for where the loader looks, with LD_LIBRARY_PATH={path:?}; the loader said {loader:?}"
            ),
            cure: "run `cargo xtask native`, which fetches it and prints the environment; or unzip the wheel nixl-cu12 of the Python \
                   registry and set LD_LIBRARY_PATH to its folders .nixl_cu12.mesonpy.libs and nixl_cu12.libs, and NIXL_PLUGIN_DIR to \
                   .nixl_cu12.mesonpy.libs/plugins"
                .to_owned(),
        }
    }

    pub(crate) fn system(what: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, reason: errno.to_string() }
    }
}
