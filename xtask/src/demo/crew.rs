//! The ranks of both engines, as processes or threads, and the lines to them.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kvferry_geometry::units::RankId;
use kvferry_transport::mem::MemNetwork;

use super::args::Args;
use super::link::{Answer, Link, Order};
use super::rank::{self, RankArgs};
use super::scenario::{Role, Scenario};
use crate::backends::{THIS_PROGRAM, Wire};

/// One rank, seen from the demo.
struct Member {
    role: Role,
    label: String,
    link: Link,
    /// `None` for a thread.
    process: Option<Child>,
}

/// All ranks. Dropping it leaves none behind.
#[derive(Default)]
pub(crate) struct Crew {
    members: Vec<Member>,
}

impl Crew {
    /// Starts all ranks of both engines; `owners` are the sockets where each engine's ranks join.
    pub(crate) fn start(args: &Args, scenario: &Arc<Scenario>, owners: [(Role, &Path); 2]) -> anyhow::Result<Self> {
        let mut crew = Self::default();
        let network = MemNetwork::new(0);
        for (role, socket) in owners {
            let engine = scenario.engine(role);
            for rank in engine.ranks() {
                let (ours, theirs) = UnixStream::pair()?;
                let process = if args.wires(role).has(Wire::Mem) {
                    let (scenario, socket) = (Arc::clone(scenario), socket.to_owned());
                    let transport = Box::new(network.endpoint()?);
                    let serve = move || rank::serve(&scenario, role, rank, &socket, theirs, transport);
                    let label = engine.label(rank);
                    // Its end is heard on the line.
                    let thread = std::thread::Builder::new().name(label).spawn(move || {
                        if let Err(error) = serve() {
                            eprintln!("a rank ended: {error:#}");
                        }
                    })?;
                    drop(thread);
                    None
                } else {
                    Some(spawn(args, role, rank, socket, theirs)?)
                };
                crew.members.push(Member { role, label: engine.label(rank), link: Link::new(ours)?, process });
            }
        }
        Ok(crew)
    }

    /// Gives an order to all ranks of the given roles at once and waits for every answer.
    pub(crate) fn ask(&mut self, order: Order, roles: &[Role]) -> anyhow::Result<Vec<(Role, Answer)>> {
        for m in self.members.iter_mut().filter(|m| roles.contains(&m.role)) {
            m.link.say(&order).with_context(|| format!("rank {} is gone", m.label))?;
        }
        self.hear(roles)
    }

    /// The next answer of every rank of the given roles.
    pub(crate) fn hear(&mut self, roles: &[Role]) -> anyhow::Result<Vec<(Role, Answer)>> {
        let mut answers = Vec::new();
        for m in self.members.iter_mut().filter(|m| roles.contains(&m.role)) {
            match m.link.hear()? {
                Some(Answer::Failed(reason)) => bail!("rank {}: {reason}", m.label),
                Some(answer) => answers.push((m.role, answer)),
                None => bail!("rank {} is gone{}", m.label, m.process.as_mut().map(end_of).unwrap_or_default()),
            }
        }
        Ok(answers)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for m in &mut self.members {
            // One that is gone needs no word.
            m.link.say(&Order::Quit).ok();
        }
        for process in self.members.iter_mut().filter_map(|m| m.process.as_mut()) {
            // It may be busy or stuck; nothing of it is worth waiting for.
            process.kill().ok();
            process.wait().ok();
        }
    }
}

fn spawn(args: &Args, role: Role, rank: RankId, socket: &Path, line: UnixStream) -> anyhow::Result<Child> {
    Command::new(THIS_PROGRAM)
        .args(RankArgs::line(role, rank, socket, args))
        .stdin(Stdio::from(OwnedFd::from(line)))
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start a rank's process")
}

fn end_of(process: &mut Child) -> String {
    match process.wait() {
        Ok(status) => format!(" ({status})"),
        Err(_) => String::new(),
    }
}
