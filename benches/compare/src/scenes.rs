//! What is run, in which order.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::pair::{Pair, Sample};
use crate::peer::{Peer, Place};
use crate::table::{self, Idle, Meeting, Row, Who};
use crate::wire::{Backend, Contact, Rival};
use crate::work::{Scene, Work};
use crate::{Args, Files, IDLE, Part, machine, say};

/// How often strangers meet; vLLM's engines less often, since each time they start anew.
const MEETINGS: usize = 9;
const MEETINGS_VLLM: usize = 3;

/// Somebody who can be asked to move bytes.
enum Runner<'a> {
    Pair(Box<Pair>),
    Peer(&'a mut Peer),
}

impl Runner<'_> {
    fn who(&self) -> Who {
        match self {
            Self::Pair(pair) => Who::Rival(pair.rival),
            Self::Peer(_) => Who::Vllm,
        }
    }

    fn wake(&self) -> anyhow::Result<()> {
        match self {
            Self::Pair(pair) => pair.wake(),
            Self::Peer(peer) => peer.wake(),
        }
    }

    fn rest(&self) -> anyhow::Result<()> {
        match self {
            Self::Pair(pair) => pair.rest(),
            Self::Peer(peer) => peer.rest(),
        }
    }

    /// Does something while all others rest.
    fn turn<R>(&mut self, what: impl FnOnce(&mut Self) -> anyhow::Result<R>) -> anyhow::Result<R> {
        self.wake()?;
        let result = what(self);
        self.rest()?;
        result
    }

    fn read(&mut self, work: Work) -> anyhow::Result<Sample> {
        self.turn(|r| match r {
            Self::Pair(pair) => pair.read(work),
            Self::Peer(peer) => Ok(peer.read(work)?.0),
        })
    }

    fn verify(&mut self, work: Work) -> anyhow::Result<u64> {
        self.turn(|r| match r {
            Self::Pair(pair) => pair.verify(work),
            Self::Peer(peer) => peer.verify(work),
        })
    }

    fn contact(&mut self) -> anyhow::Result<Contact> {
        self.turn(|r| match r {
            Self::Pair(pair) => pair.contact(),
            Self::Peer(_) => anyhow::bail!("vLLM's workers meet at their first request"),
        })
    }

    fn idle(&mut self) -> anyhow::Result<[f64; 2]> {
        self.turn(|r| match r {
            Self::Pair(pair) => pair.idle(IDLE),
            Self::Peer(peer) => peer.idle(IDLE),
        })
    }

    /// Whether it does such a work.
    fn does(&self, work: Work) -> bool {
        let Work::Request { staged: true, .. } = work else { return true };
        // shm lands bytes in place at the speed of a copy; staging is for those to whom a descriptor is dear.
        matches!(self.who(), Who::Rival(Rival::Ferry { backend: Backend::Ucx | Backend::Nixl, .. }))
    }
}

/// What a run has found so far.
#[derive(Default)]
struct Found {
    rows: Vec<Row>,
    meetings: Vec<Meeting>,
    idles: Vec<Idle>,
}

/// Runs everything that is asked for; the report.
pub(crate) fn run(args: &Args) -> anyhow::Result<String> {
    let start = Instant::now();
    let mut about = machine::describe();
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let (mut peer, place) = match open_peer(args, wanted(Part::Requests) || wanted(Part::Wider)) {
        Ok((peer, place)) => (Ok(peer), Some(place)),
        Err(why) => (Err(why), None),
    };
    if let Some(place) = &place {
        about.push(place.versions().unwrap_or_else(|why| format!("{why:#}")));
    }
    let mut found = Found::default();
    let scenes = [(Part::Blocks, Scene::Blocks), (Part::Requests, Scene::Same), (Part::Wider, Scene::Wider)];
    for (part, scene) in scenes {
        if wanted(part) {
            play(args, scene, &mut peer, &mut found, start)
                .with_context(|| format!("the part about {part:?}").to_lowercase())?;
        }
    }
    about.push(format!("load after it: {}; it took {:.0} s", machine::load(), start.elapsed().as_secs_f64()));
    let mut out = String::new();
    about.iter().try_for_each(|line| writeln!(out, "- {line}"))?;
    writeln!(
        out,
        "- {} timed rounds after one that is not, alternating; all processes map the same two files",
        args.rounds
    )?;
    writeln!(out, "\n{}", table::moves(&found.rows))?;
    if !found.meetings.is_empty() {
        writeln!(
            out,
            "First contact, medians of {MEETINGS} (vLLM's of {MEETINGS_VLLM}), in brackets the least:\n\n{}",
            table::meetings(&found.meetings)
        )?;
    }
    if !found.idles.is_empty() {
        writeln!(out, "Idle ranks, over {} s:\n\n{}", IDLE.as_secs(), table::idles(&found.idles))?;
    }
    writeln!(out, "Aims:\n\n{}", table::aims(&found.rows, &found.meetings))?;
    Ok(out)
}

fn open_peer(args: &Args, wanted: bool) -> anyhow::Result<(Peer, Place)> {
    let folder = args.peer.as_deref().context("--peer was not given")?;
    let place = Place::find(folder, args.python.as_deref())?;
    if !wanted {
        anyhow::bail!("not asked for");
    }
    Ok((Peer::open(&place)?, place))
}

/// Who takes part in a scene.
fn rivals(args: &Args, scene: Scene) -> Vec<Rival> {
    let ferry = |backend, threads| Rival::Ferry { backend, threads };
    // As vLLM sets it up, and as kvferry-nixl does.
    let nixl = |threads, prepared| Rival::Nixl { threads, progress: true, prepared, host: false };
    let quiet = |threads, prepared| Rival::Nixl { threads, progress: false, prepared, host: true };
    let mut all = Vec::new();
    if scene == Scene::Blocks {
        all.extend([Rival::Memcpy { threads: 1 }, Rival::Memcpy { threads: 2 }]);
        all.extend([Rival::ProcessVm { ranges: 1, threads: 1 }, Rival::ProcessVm { ranges: 512, threads: 1 }]);
        all.push(Rival::ProcessVm { ranges: 512, threads: 2 });
        all.extend([
            Rival::Ucx { workers: 1 },
            ferry(Backend::Ucx, 1),
            Rival::Ucx { workers: 2 },
            ferry(Backend::Ucx, 2),
        ]);
        all.extend([nixl(0, true), quiet(0, true), quiet(0, false), ferry(Backend::Nixl, 0), nixl(1, true)]);
        all.extend([nixl(4, true), nixl(4, false), quiet(4, true), ferry(Backend::Nixl, 4)]);
        all.extend([ferry(Backend::Shm, 1), ferry(Backend::Shm, 2)]);
    } else {
        all.extend([Rival::Ucx { workers: 1 }, Rival::Ucx { workers: 2 }]);
        all.extend([nixl(4, true), quiet(0, true), quiet(4, true)]);
        all.extend([ferry(Backend::Shm, 2), ferry(Backend::Ucx, 2), ferry(Backend::Nixl, 0), ferry(Backend::Nixl, 4)]);
        for (backend, threads) in [(Backend::Shm, 2), (Backend::Ucx, 2), (Backend::Nixl, 0)] {
            all.push(Rival::Engine { backend, threads });
        }
    }
    let asked = |r: &Rival| args.who.is_empty() || args.who.iter().any(|word| r.to_string().contains(word.as_str()));
    all.retain(asked);
    all
}

fn works(scene: Scene) -> Vec<Work> {
    let request = |contiguous, staged, wider| Work::Request { contiguous, staged, wider };
    match scene {
        Scene::Blocks => [4 << 10, 16 << 10, 64 << 10, 1 << 20].map(Work::Blocks).to_vec(),
        Scene::Same => vec![request(false, false, false), request(true, false, false)],
        Scene::Wider => vec![request(false, false, true), request(false, true, true)],
    }
}

fn play(
    args: &Args,
    scene: Scene,
    peer: &mut anyhow::Result<Peer>,
    found: &mut Found,
    start: Instant,
) -> anyhow::Result<()> {
    let total = |side: usize| scene.lens()[side].iter().map(|l| l.get()).sum();
    let files = Files::new([total(0), total(1)])?;
    let works = works(scene);
    let first_row = found.rows.len();
    for &work in &works {
        let staged = matches!(work, Work::Request { staged: true, .. });
        let of = |r: Rival| Row::new(Who::Rival(r), work);
        let does = |r: &Rival| !staged || matches!(r, Rival::Ferry { backend: Backend::Ucx | Backend::Nixl, .. });
        found.rows.extend(rivals(args, scene).into_iter().filter(does).map(of));
        if scene != Scene::Blocks && !staged {
            found.rows.push(Row::new(Who::Vllm, work));
        }
    }
    let rows = found.rows.get_mut(first_row..).unwrap_or_default();

    say(start, &format!("{scene:?}: starting everybody"));
    let mut runners = Vec::new();
    let mut strangers = Vec::new();
    for rival in rivals(args, scene) {
        let started = Pair::start(rival, scene, &files.paths).and_then(|pair| pair.rest().map(|()| pair));
        match started {
            Ok(pair) => runners.push(Runner::Pair(Box::new(pair))),
            Err(why) => fail(rows, Who::Rival(rival), &why),
        }
    }
    if scene != Scene::Blocks {
        match peer {
            Ok(peer) => {
                let mut meet = || -> anyhow::Result<Vec<Duration>> {
                    let meetings = if scene == Scene::Same { MEETINGS_VLLM } else { 0 };
                    let times = (0..meetings).map(|_| peer.handshake()).collect();
                    peer.start(scene)?;
                    peer.rest()?;
                    times
                };
                match meet() {
                    Ok(times) => {
                        strangers = times;
                        runners.push(Runner::Peer(peer));
                    }
                    Err(why) => fail(rows, Who::Vllm, &why),
                }
            }
            Err(why) => fail(rows, Who::Vllm, why),
        }
    }
    for &work in &works {
        say(start, &format!("{scene:?}: {}", table::title(work)));
        rounds(args.rounds, work, &mut runners, rows);
    }
    say(start, &format!("{scene:?}: comparing every byte"));
    for &work in &works {
        for runner in runners.iter_mut().filter(|r| r.does(work)) {
            if let Some(row) = row_of(rows, runner.who(), work)
                && row.failed.is_none()
            {
                match runner.verify(work) {
                    Ok(wrong) => row.wrong = Some(wrong),
                    Err(why) => row.failed = Some(format!("{why:#}")),
                }
            }
        }
    }
    if scene == Scene::Same {
        say(start, "first contacts");
        for runner in &mut runners {
            found.meetings.extend(meeting(runner, &strangers, rows, works[0]));
        }
        say(start, "idle ranks");
        // UCX's raw loop has no rank that could be idle.
        for runner in runners.iter_mut().filter(|r| !matches!(r.who(), Who::Rival(Rival::Ucx { .. }))) {
            let cores = runner.idle().map_err(|why| format!("{why:#}"));
            found.idles.push(Idle { who: runner.who(), cores });
        }
    }
    drop(runners);
    if let Ok(peer) = peer {
        peer.stop()?;
    }
    Ok(())
}

fn row_of(rows: &mut [Row], who: Who, work: Work) -> Option<&mut Row> {
    rows.iter_mut().find(|r| r.who == who && r.work == work)
}

fn fail(rows: &mut [Row], who: Who, why: &anyhow::Error) {
    for row in rows.iter_mut().filter(|r| r.who == who) {
        row.failed = Some(format!("{why:#}"));
    }
}

/// All rounds of a work; the order of the rivals goes round, too.
fn rounds(count: usize, work: Work, runners: &mut [Runner<'_>], rows: &mut [Row]) {
    let all = runners.len();
    for round in 0..=count {
        for turn in 0..all {
            let Some(runner) = runners.get_mut((round + turn) % all) else { continue };
            let Some(row) = row_of(rows, runner.who(), work).filter(|r| r.failed.is_none()) else { continue };
            match runner.read(work) {
                // The first touches what is touched for the first time.
                Ok(sample) if round == 0 => row.first = Some(sample.wall),
                Ok(sample) => row.samples.push(sample),
                Err(why) => row.failed = Some(format!("{why:#}")),
            }
        }
    }
}

fn meeting(runner: &mut Runner<'_>, strangers: &[Duration], rows: &[Row], first: Work) -> Option<Meeting> {
    let who = runner.who();
    let whole = rows.iter().find(|r| r.who == who && r.work == first).and_then(|r| r.first);
    let of_engine = matches!(who, Who::Vllm | Who::Rival(Rival::Engine { .. }));
    let mut meeting = Meeting { who, contacts: Vec::new(), first: whole.filter(|_| of_engine), failed: None };
    match who {
        Who::Vllm => {
            let contact = |t: &Duration| Contact {
                connect_ns: u64::try_from(t.as_nanos()).unwrap_or(u64::MAX),
                ..Contact::default()
            };
            meeting.contacts = strangers.iter().map(contact).collect();
        }
        Who::Rival(Rival::Memcpy { .. } | Rival::ProcessVm { .. }) => return None,
        Who::Rival(_) => {
            for _ in 0..MEETINGS {
                match runner.contact() {
                    Ok(contact) => meeting.contacts.push(contact),
                    Err(why) => {
                        meeting.failed = Some(format!("{why:#}"));
                        break;
                    }
                }
            }
        }
    }
    Some(meeting)
}
