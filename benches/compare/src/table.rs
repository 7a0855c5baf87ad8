//! Rounds into rows, rows into markdown.

use std::fmt::Write as _;
use std::time::Duration;

use crate::pair::Sample;
use crate::wire::{Backend, Contact, Rival};
use crate::work::Work;

/// Who a row is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    /// One of ours, or a library as it comes.
    Rival(Rival),
    /// vLLM's workers over NIXL.
    Vllm,
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rival(rival) => write!(f, "{rival}"),
            Self::Vllm => f.write_str("vLLM's workers over NIXL"),
        }
    }
}

impl Who {
    fn threads(self) -> String {
        match self {
            Self::Rival(rival) => rival.threads(),
            Self::Vllm => "4 + progress + Python's".to_owned(),
        }
    }

    fn assurance(self) -> &'static str {
        match self {
            Self::Rival(rival) => rival.assurance(),
            Self::Vllm => "none",
        }
    }

    /// Who it is measured against where blocks are moved.
    fn is_yardstick_of(self, other: Self) -> bool {
        let (Self::Rival(own), Self::Rival(other)) = (self, other) else { return false };
        match (own, other) {
            (Rival::Memcpy { threads: a }, Rival::Ferry { backend: Backend::Shm, threads: b }) => a == b,
            (Rival::Memcpy { threads: a }, Rival::ProcessVm { threads: b, .. } | Rival::Ucx { workers: b }) => a == b,
            (Rival::Ucx { workers: a }, Rival::Ferry { backend: Backend::Ucx, threads: b }) => a == b,
            (Rival::Nixl { threads: a, .. }, Rival::Ferry { backend: Backend::Nixl, threads: b }) => a == b,
            _ => false,
        }
    }
}

/// All rounds of one rival with one work.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) who: Who,
    pub(crate) work: Work,
    pub(crate) samples: Vec<Sample>,
    /// Of the first operation of all, if it was this work's.
    pub(crate) first: Option<Duration>,
    pub(crate) wrong: Option<u64>,
    /// Why there is nothing, or less.
    pub(crate) failed: Option<String>,
}

/// The middle of some values.
pub(crate) fn median(values: impl Iterator<Item = Duration>) -> Duration {
    let mut all: Vec<Duration> = values.collect();
    all.sort();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// How many times as fast the first is, by medians and by minima.
fn ratios(own: (Duration, Duration), theirs: (Duration, Duration)) -> (f64, f64) {
    let ratio = |own: Duration, theirs: Duration| theirs.as_secs_f64() / own.as_secs_f64().max(1e-9);
    (ratio(own.0, theirs.0), ratio(own.1, theirs.1))
}

impl Row {
    pub(crate) fn new(who: Who, work: Work) -> Self {
        Self { who, work, samples: Vec::new(), first: None, wrong: None, failed: None }
    }

    fn wall(&self) -> Option<(Duration, Duration)> {
        let min = self.samples.iter().map(|s| s.wall).min()?;
        Some((median(self.samples.iter().map(|s| s.wall)), min))
    }

    fn cpu(&self) -> Duration {
        median(self.samples.iter().map(|s| s.cpu_reader + s.cpu_source))
    }

    /// How many times as fast as another, by medians and by minima.
    fn against(&self, other: &Self) -> Option<(f64, f64)> {
        Some(ratios(self.wall()?, other.wall()?))
    }
}

/// What a work is called.
pub(crate) fn title(work: Work) -> String {
    match work {
        Work::Small => "4 KiB".to_owned(),
        Work::Blocks(bytes) if bytes < 1 << 20 => format!("{} KiB blocks", bytes >> 10),
        Work::Blocks(bytes) => format!("{} MiB blocks", bytes >> 20),
        Work::Request { contiguous, staged, wider } => {
            let blocks = if wider { "16 to 64" } else { "16 to 16" };
            let how = if contiguous { "contiguous" } else { "scattered" };
            format!("request, blocks {blocks}, {how}{}", if staged { ", staged" } else { "" })
        }
    }
}

/// The yardstick of a row among those of the same work: vLLM's workers for a request, and otherwise whoever does the same
/// with the same threads. Of several (bare NIXL in its ways) the fastest.
fn yardstick<'a>(row: &Row, rows: &'a [Row]) -> Option<&'a Row> {
    let fits = |other: &&Row| match (row.work, other.work) {
        (Work::Request { contiguous, wider, .. }, Work::Request { contiguous: c, wider: w, .. }) => {
            (contiguous, wider) == (c, w) && other.who == Who::Vllm && row.who != Who::Vllm
        }
        (a, b) => a == b && other.who.is_yardstick_of(row.who),
    };
    rows.iter().filter(fits).filter(|r| r.wall().is_some()).min_by_key(|r| r.wall())
}

/// Rows as a table.
pub(crate) fn moves(rows: &[Row]) -> String {
    let mut out = String::new();
    let head = [
        "work",
        "who",
        "threads",
        "median ms",
        "min ms",
        "GB/s",
        "times as fast (by min; by CPU)",
        "as",
        "CPU reader ms",
        "CPU source ms",
        "descriptors",
        "lane",
        "assurance",
        "bytes",
    ];
    writeln!(out, "| {} |\n|{}", head.join(" | "), "---|".repeat(head.len())).ok();
    for row in rows {
        let Some((middle, min)) = row.wall() else {
            let why = row.failed.as_deref().unwrap_or("not run");
            writeln!(out, "| {} | {} | {} | {why} |{}", title(row.work), row.who, row.who.threads(), " |".repeat(10))
                .ok();
            continue;
        };
        let against = yardstick(row, rows);
        let (ratio, whom) = match against.and_then(|other| Some((row.against(other)?, other))) {
            Some(((by_median, by_min), other)) => {
                let by_cpu = other.cpu().as_secs_f64() / row.cpu().as_secs_f64().max(1e-9);
                (format!("{by_median:.2} ({by_min:.2}; {by_cpu:.2})"), other.who.to_string())
            }
            None => Default::default(),
        };
        let last = row.samples.last().cloned().unwrap_or_default();
        let verdict = match (row.wrong, &row.failed) {
            (Some(0), None) => "verified".to_owned(),
            (Some(n), None) => format!("**{n} wrong**"),
            (_, Some(why)) => format!("**{why}**"),
            (None, None) => "not compared".to_owned(),
        };
        writeln!(
            out,
            "| {} | {} | {} | {:.1} | {:.1} | {:.2} | {ratio} | {whom} | {:.1} | {:.1} | {} | {} | {} | {verdict} |",
            title(row.work),
            row.who,
            row.who.threads(),
            ms(middle),
            ms(min),
            row.work.bytes() as f64 / 1e9 / middle.as_secs_f64(),
            ms(median(row.samples.iter().map(|s| s.cpu_reader))),
            ms(median(row.samples.iter().map(|s| s.cpu_source))),
            last.descriptors,
            last.lane,
            row.who.assurance()
        )
        .ok();
    }
    out
}

/// First contacts of a rival, or why there are none.
pub(crate) struct Meeting {
    pub(crate) who: Who,
    /// Each by its steps; vLLM's is told as a whole, under the connection.
    pub(crate) contacts: Vec<Contact>,
    pub(crate) first: Option<Duration>,
    pub(crate) failed: Option<String>,
}

impl Meeting {
    fn of(&self, step: impl Fn(&Contact) -> u64) -> Duration {
        median(self.contacts.iter().map(|c| Duration::from_nanos(step(c))))
    }

    /// From the peer's blob to the first bytes: the median, and the least.
    fn met(&self) -> (Duration, Duration) {
        let all = |c: &Contact| c.connect_ns + c.first_ns;
        (self.of(all), Duration::from_nanos(self.contacts.iter().map(all).min().unwrap_or(0)))
    }
}

/// Meetings as a table.
pub(crate) fn meetings(all: &[Meeting]) -> String {
    let mut out = String::new();
    let head = [
        "who",
        "threads",
        "open ms",
        "register ms",
        "connect ms",
        "first 4 KiB ms",
        "connect + first ms",
        "times as fast as vLLM's",
        "first whole request ms",
    ];
    writeln!(out, "| {} |\n|{}", head.join(" | "), "---|".repeat(head.len())).ok();
    let vllm = all.iter().find(|m| m.who == Who::Vllm && !m.contacts.is_empty()).map(Meeting::met);
    for m in all {
        let (who, threads) = (m.who, m.who.threads());
        let first = m.first.map_or_else(String::new, |t| format!("{:.1}", ms(t)));
        if m.contacts.is_empty() {
            let why = m.failed.as_deref().unwrap_or("");
            writeln!(out, "| {who} | {threads} | {why} | | | | | | {first} |").ok();
            continue;
        }
        let step = |of: fn(&Contact) -> u64| match m.of(of) {
            Duration::ZERO => String::new(),
            time => format!("{:.2}", ms(time)),
        };
        let ratio = match vllm {
            Some(theirs) if who != Who::Vllm => {
                let (by_median, by_min) = ratios(m.met(), theirs);
                format!("{by_median:.1} ({by_min:.1})")
            }
            _ => String::new(),
        };
        let steps =
            [step(|c| c.open_ns), step(|c| c.register_ns), step(|c| c.connect_ns), step(|c| c.first_ns)].join(" | ");
        let (middle, min) = m.met();
        writeln!(out, "| {who} | {threads} | {steps} | {:.2} ({:.2}) | {ratio} | {first} |", ms(middle), ms(min)).ok();
    }
    out
}

/// What idle ranks use.
pub(crate) struct Idle {
    pub(crate) who: Who,
    /// Cores of the source and of the reader.
    pub(crate) cores: Result<[f64; 2], String>,
}

/// Idle ranks as a table.
pub(crate) fn idles(all: &[Idle]) -> String {
    let mut out = String::from("| who | threads | source, % of a core | reader, % of a core |\n|---|---|---|---|\n");
    for idle in all {
        let (who, threads) = (idle.who, idle.who.threads());
        match &idle.cores {
            Ok([source, reader]) => {
                writeln!(out, "| {who} | {threads} | {:.2} | {:.2} |", source * 100.0, reader * 100.0).ok()
            }
            Err(why) => writeln!(out, "| {who} | {threads} | {why} | |").ok(),
        };
    }
    out
}

/// What is aimed at, and what came of it.
pub(crate) fn aims(rows: &[Row], meetings: &[Meeting]) -> String {
    let mut out = String::from("| aim | at least | got (by min) | |\n|---|---|---|---|\n");
    let mut say = |what: String, least: f64, got: Option<(f64, f64)>| {
        let Some((by_median, by_min)) = got else {
            writeln!(out, "| {what} | {least} | not measured | |").ok();
            return;
        };
        let verdict = if by_median >= least { "met" } else { "**missed**" };
        writeln!(out, "| {what} | {least} | {by_median:.2} ({by_min:.2}) | {verdict} |").ok();
    };
    let rows_of = |backend, engines: bool, work: fn(Work) -> bool| {
        let fits = move |r: &&Row| match r.who {
            Who::Rival(Rival::Ferry { backend: b, .. }) => !engines && b == backend,
            Who::Rival(Rival::Engine { backend: b, .. }) => engines && b == backend,
            _ => false,
        };
        rows.iter().filter(fits).filter(move |r| work(r.work))
    };
    for backend in [Backend::Ucx, Backend::Nixl] {
        let least = if backend == Backend::Ucx { 0.9 } else { 0.95 };
        for row in rows_of(backend, false, |w| matches!(w, Work::Blocks(_))) {
            let other = yardstick(row, rows);
            let whom = other.map_or_else(|| "nobody".to_owned(), |o| format!("{} ({})", o.who, o.who.threads()));
            let what = format!("{}: {} ({}) beside {whom}", title(row.work), row.who, row.who.threads());
            say(what, least, other.and_then(|o| row.against(o)));
        }
    }
    /// A name, its works, and what is aimed at with shm, UCX and NIXL.
    type Aim = (&'static str, fn(Work) -> bool, [f64; 3]);
    let scenes: [Aim; 3] = [
        (
            "blocks 16 to 16, scattered",
            |w| matches!(w, Work::Request { contiguous: false, wider: false, .. }),
            [2.0, 1.0, 1.0],
        ),
        ("blocks 16 to 16, contiguous", |w| matches!(w, Work::Request { contiguous: true, .. }), [3.0, 1.3, 1.0]),
        ("blocks 16 to 64, scattered", |w| matches!(w, Work::Request { wider: true, .. }), [3.0, 1.0, 1.0]),
    ];
    for (name, work, least) in scenes {
        for (backend, least) in [Backend::Shm, Backend::Ucx, Backend::Nixl].into_iter().zip(least) {
            for engines in [false, true] {
                // Whatever of its ways (threads, staged or not) is fastest.
                let best = rows_of(backend, engines, work).filter(|r| r.wall().is_some()).min_by_key(|r| r.wall());
                let got = best.and_then(|row| row.against(yardstick(row, rows)?));
                let what = if engines { "engines over it, fenced" } else { "its transport" };
                say(format!("{name}: {backend} ({what}) beside vLLM's workers"), least, got);
            }
        }
    }
    let met = |of: &dyn Fn(Who) -> bool| {
        meetings.iter().filter(|m| of(m.who) && !m.contacts.is_empty()).map(Meeting::met).min()
    };
    let is = |backend| move |w| matches!(w, Who::Rival(Rival::Ferry { backend: b, .. }) if b == backend);
    for backend in [Backend::Shm, Backend::Ucx] {
        let got = met(&is(backend)).zip(met(&|w| w == Who::Vllm)).map(|(own, theirs)| ratios(own, theirs));
        say(format!("first contact: {backend} beside vLLM's handshake"), 3.0, got);
    }
    let own = met(&is(Backend::Nixl)).zip(met(&|w| matches!(w, Who::Rival(Rival::Nixl { .. }))));
    match own {
        Some((own, bare)) => {
            let (more, least) = (ms(own.0) - ms(bare.0), ms(own.1) - ms(bare.1));
            let verdict = if more < 2.0 { "met" } else { "**missed**" };
            let what = "first contact: kvferry-nixl above bare NIXL";
            writeln!(out, "| {what} | < 2 ms | {more:.2} ms ({least:.2} ms) | {verdict} |").ok();
        }
        None => {
            writeln!(out, "| first contact: kvferry-nixl above bare NIXL | < 2 ms | not measured | |").ok();
        }
    }
    out
}
