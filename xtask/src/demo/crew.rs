//! The ranks of both engines, as processes or threads, and the lines to them.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kvferry_geometry::units::{ItemId, RankId};
use kvferry_transport::mem::MemNetwork;
use rustix::process::Pid;

use super::args::Args;
use super::link::{Answer, Link, Order};
use super::rank::{self, RankArgs};
use super::scenario::{Role, Scenario};
use crate::backends::{THIS_PROGRAM, Wire};

/// One rank, seen from the demo.
struct Member {
    role: Role,
    rank: RankId,
    label: String,
    link: Link,
    /// `None` for a thread.
    process: Option<Child>,
}

/// All ranks. Dropping it leaves none behind.
pub(crate) struct Crew {
    members: Vec<Member>,
    args: Args,
    /// Where each engine's ranks join.
    owners: [(Role, PathBuf); 2],
}

impl Crew {
    /// Starts all ranks of both engines; `owners` are the sockets where each engine's ranks join.
    pub(crate) fn start(args: &Args, scenario: &Arc<Scenario>, owners: [(Role, &Path); 2]) -> anyhow::Result<Self> {
        let owners = owners.map(|(role, socket)| (role, socket.to_owned()));
        let mut crew = Self { members: Vec::new(), args: args.clone(), owners: owners.clone() };
        let network = MemNetwork::new(0);
        for (role, socket) in owners {
            let engine = scenario.engine(role);
            for rank in engine.ranks() {
                let (ours, theirs) = UnixStream::pair()?;
                let process = if args.wires(role).has(Wire::Mem) {
                    let (scenario, socket) = (Arc::clone(scenario), socket.clone());
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
                    Some(spawn(args, role, rank, &socket, theirs)?)
                };
                crew.members.push(Member { role, rank, label: engine.label(rank), link: Link::new(ours)?, process });
            }
        }
        Ok(crew)
    }

    fn of(&mut self, role: Role) -> impl Iterator<Item = &mut Member> {
        self.members.iter_mut().filter(move |m| m.role == role)
    }

    fn member(&mut self, role: Role, rank: RankId) -> anyhow::Result<&mut Member> {
        self.of(role).find(|m| m.rank == rank).context("no such rank")
    }

    /// The process of a rank. It is not waited for before the rank is started again, so that it stays this rank's.
    pub(crate) fn process(&mut self, role: Role, rank: RankId) -> Option<Pid> {
        self.member(role, rank).ok()?.process.as_ref().map(Pid::from_child)
    }

    /// Starts a rank again whose process has ended; its memory is filled as at the start. It does not outlive the calling thread.
    pub(crate) fn start_again(&mut self, role: Role, rank: RankId) -> anyhow::Result<()> {
        let socket = self.owners.iter().find(|(of, _)| *of == role).map(|(_, socket)| socket.clone());
        let args = self.args.clone();
        let member = self.member(role, rank)?;
        if let Some(mut old) = member.process.take() {
            old.wait()?;
        }
        let (ours, theirs) = UnixStream::pair()?;
        member.process = Some(spawn(&args, role, rank, &socket.context("no such engine")?, theirs)?);
        member.link = Link::new(ours)?;
        Ok(())
    }

    /// Has a request, or these items of it, computed once more by all prefill ranks; false if one of them is gone.
    pub(crate) fn prefill(&mut self, request: usize, turn: u32, items: Option<Vec<ItemId>>) -> anyhow::Result<bool> {
        let items = items.map(|items| items.iter().map(|item| item.get()).collect());
        let order = Order::Prefill { request, turn, items };
        // All at once, and every answer is heard, whoever is gone.
        let told: Vec<bool> = self.of(Role::Prefill).map(|m| m.link.say(&order).is_ok()).collect();
        let mut all = true;
        for (m, told) in self.of(Role::Prefill).zip(told) {
            match if told { m.link.hear()? } else { None } {
                Some(Answer::Prefilled) => {}
                Some(Answer::Failed(reason)) => bail!("rank {}: {reason}", m.label),
                Some(_) => bail!("rank {} answered something else than that it has computed", m.label),
                None => all = false,
            }
        }
        Ok(all)
    }

    /// The next answer of one rank.
    pub(crate) fn hear_one(&mut self, role: Role, rank: RankId) -> anyhow::Result<Answer> {
        self.member(role, rank)?.hear()
    }

    /// Gives an order to all ranks of the given roles at once and waits for every answer.
    pub(crate) fn ask(&mut self, order: &Order, roles: &[Role]) -> anyhow::Result<Vec<(Role, Answer)>> {
        for m in self.members.iter_mut().filter(|m| roles.contains(&m.role)) {
            m.link.say(order).with_context(|| format!("rank {} is gone", m.label))?;
        }
        self.hear(roles)
    }

    /// The next answer of every rank of the given roles.
    pub(crate) fn hear(&mut self, roles: &[Role]) -> anyhow::Result<Vec<(Role, Answer)>> {
        let mut answers = Vec::new();
        for m in self.members.iter_mut().filter(|m| roles.contains(&m.role)) {
            answers.push((m.role, m.hear()?));
        }
        Ok(answers)
    }
}

impl Member {
    fn hear(&mut self) -> anyhow::Result<Answer> {
        match self.link.hear()? {
            Some(Answer::Failed(reason)) => bail!("rank {}: {reason}", self.label),
            Some(answer) => Ok(answer),
            None => bail!("rank {} is gone{}", self.label, self.process.as_mut().map(end_of).unwrap_or_default()),
        }
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
