//! Opens an agent on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use kvferry_transport::EndpointId;

use crate::bell::Bell;
use crate::config::NixlConfig;
use crate::error::NixlError;
use crate::feed::Lists;
use crate::lane::agent_name;
use crate::live::Live;
use crate::metadata::walk;
use crate::process::Process;
use crate::shared::Shared;
use crate::sys::{Agent, AgentConfig, Fail, Library, List, Notifications, c_text};
use crate::truth::Ucx;
use crate::worker::{Net, Worker};

/// Starts the thread and waits until its agent is there.
pub(crate) fn open(
    library: &Library,
    config: &NixlConfig,
    id: EndpointId,
    process: Process,
    shared: &Arc<Shared>,
) -> Result<(JoinHandle<()>, usize), NixlError> {
    let (send, opened) = channel();
    let (library, config, shared) = (library.clone(), config.clone(), shared.clone());
    let run = move || worker(&library, config, id, process, shared, &send);
    let thread = std::thread::Builder::new()
        .name("kvferry-nixl".to_owned())
        .spawn(run)
        .map_err(|e| NixlError::System { what: "starting the agent's thread", reason: e.to_string() })?;
    match opened.recv() {
        Ok(Ok(metadata)) => Ok((thread, metadata)),
        Ok(Err(error)) => {
            drop(thread.join());
            Err(error)
        }
        Err(_) => Err(NixlError::System { what: "starting the agent's thread", reason: "it ended".to_owned() }),
    }
}

fn worker(
    library: &Library,
    config: NixlConfig,
    id: EndpointId,
    process: Process,
    shared: Arc<Shared>,
    opened: &Sender<Result<usize, NixlError>>,
) {
    let _live = Live::begin(id);
    // Short pauses are meant as short; by default the kernel makes each 50 µs longer.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
    let made = agent(library, &config, id).and_then(|(agent, metadata)| {
        let failed = nixl("making lists");
        let ucx = if config.is_ucx() { Ucx::find(id) } else { None };
        let notifications = Notifications::new().map_err(&failed)?;
        let lists = Lists { local: List::new().map_err(&failed)?, remote: List::new().map_err(&failed)? };
        Ok((Net::new(agent, notifications, process, metadata, ucx, Bell::new(id)), lists))
    });
    let worker = match made {
        Ok((net, lists)) => {
            drop(opened.send(Ok(net.metadata.len())));
            Worker::new(net, shared, config, lists)
        }
        Err(error) => {
            drop(opened.send(Err(error)));
            return;
        }
    };
    worker.run();
}

fn nixl(what: &'static str) -> impl Fn(Fail) -> NixlError {
    move |fail| NixlError::Nixl { what, reason: fail.to_string() }
}

/// Makes the agent with its backend; its metadata without memory comes along.
fn agent(library: &Library, config: &NixlConfig, id: EndpointId) -> Result<(Agent, Vec<u8>), NixlError> {
    let progress_us = config.waiting.library_thread.map(|d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX));
    let settings = AgentConfig { progress_us, telemetry: config.telemetry };
    let mut agent = Agent::new(library, &agent_name(id), settings).map_err(nixl("making NIXL's agent"))?;
    let name = c_text(&config.plugin);
    let Ok(plugin) = agent.plugin(&name) else {
        let directory = std::env::var("NIXL_PLUGIN_DIR").ok();
        return Err(NixlError::NoPlugin {
            plugin: config.plugin.clone(),
            directory: directory.map_or(String::new(), |d| format!(" (NIXL_PLUGIN_DIR is {d})")),
            available: agent.plugins().unwrap_or_default().join(", "),
        });
    };
    let not_between = || NixlError::NotBetweenAgents {
        plugin: config.plugin.clone(),
        memory: format!("bytes between its own kinds of memory ({})", plugin.memory_names()),
    };
    // Files and objects are storage. Plugins that have them reach no other agent's memory.
    if !plugin.has_host_memory() || plugin.has_storage() {
        return Err(not_between());
    }
    let params = config.plugin_params(&plugin.params);
    agent.create_backend(&name, &params).map_err(|fail| NixlError::Plugin {
        plugin: config.plugin.clone(),
        params: params.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" "),
        reason: format!("{fail}; NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info say more"),
    })?;
    // An agent without a backend that reaches others has no such metadata.
    let metadata = agent.connection_metadata().map_err(|_| not_between())?;
    let whole = agent.metadata().map_err(|_| not_between())?;
    // Peers walk it as we walk theirs, before NIXL gets it.
    for metadata in [&metadata, &whole] {
        walk(metadata).map_err(|reason| NixlError::Nixl {
            what: "reading its metadata",
            reason: format!("{reason}; this version of NIXL writes it in another way than 1.5 does"),
        })?;
    }
    Ok((agent, metadata))
}
