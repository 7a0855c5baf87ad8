//! From the lives of requests to an answer, for both engines.

use std::collections::BTreeMap;

use kvferry_sim::fabric::PairMoved;

use crate::answer::{
    Answer, Cost, Descriptors, Gantt, LinkUse, MOST_PAIRS, Pair, Pools, Requests, SLICES, Side, TIMES, Times, Traffic,
};
use crate::cluster::LinkKind;
use crate::number::{nearest, place};
use crate::scenario::{Fleet, Scenario};
use crate::warn;

/// One request; all times in seconds from the load's beginning.
#[derive(Clone, Debug, Default)]
pub(crate) struct Life {
    pub(crate) at: f64,
    pub(crate) prompt: u64,
    pub(crate) hit: u64,
    pub(crate) decode_hit: u64,
    pub(crate) bytes: u64,
    /// Begin and end.
    pub(crate) prefill: Option<(f64, f64)>,
    /// How long bytes moved.
    pub(crate) wire: Option<f64>,
    /// D's blocks are taken.
    pub(crate) taken: Option<f64>,
    pub(crate) delivered: Option<f64>,
    pub(crate) first_token: Option<f64>,
    pub(crate) decoded: Option<f64>,
    /// P has its blocks back.
    pub(crate) released: Option<f64>,
    /// Bytes of D's blocks.
    pub(crate) room: u64,
    /// Why it was not delivered.
    pub(crate) failed: Option<String>,
    /// Whether it waited for room at D.
    pub(crate) waited: bool,
}

impl Life {
    fn times(&self) -> [Option<f64>; 8] {
        let (begin, end) = self.prefill.unzip();
        let since = |from: Option<f64>, to: Option<f64>| Some((to? - from?).max(0.0));
        let handover = since(end, self.delivered);
        let wire = self.wire.filter(|_| self.delivered.is_some());
        [
            since(Some(self.at), begin),
            since(begin, end),
            handover.zip(wire).map(|(all, wire)| (all - wire).max(0.0)),
            wire,
            handover,
            since(Some(self.at), self.first_token),
            since(self.first_token, self.decoded),
            since(end, self.released),
        ]
    }
}

/// What an engine found out besides.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) engine: &'static str,
    pub(crate) moved: Vec<PairMoved>,
    /// By link: bytes, and the share of the capacity in each slice.
    pub(crate) links: Vec<(u64, Vec<f32>)>,
    pub(crate) sizes: Descriptors,
    pub(crate) gantt: Option<Gantt>,
    pub(crate) messages: u64,
    pub(crate) cost: Cost,
    /// When the last thing happened.
    pub(crate) end: f64,
}

/// Makes an answer of it.
pub(crate) fn answer(s: &Scenario, lives: &[Life], found: Found) -> Answer {
    let mut failed: BTreeMap<&str, u64> = BTreeMap::new();
    for life in lives {
        if let Some(why) = &life.failed {
            *failed.entry(why).or_default() += 1;
        }
    }
    let sum = |of: fn(&Life) -> u64| lives.iter().map(of).sum::<u64>();
    let delivered = || lives.iter().filter(|l| l.delivered.is_some());
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); TIMES.len()];
    for life in delivered() {
        for (list, time) in times.iter_mut().zip(life.times()) {
            list.extend(time);
        }
    }
    let span = found.end.max(1e-9);
    let links = links(s, &found.links, span);
    let mut out = Answer {
        scenario: s.name.clone(),
        engine: found.engine.to_owned(),
        seed: s.seed,
        prefill: side(&s.prefill),
        decode: side(&s.decode),
        mode: s.transfer.mode.name().to_owned(),
        stream: s.transfer.stream.name().to_owned(),
        span,
        requests: Requests {
            all: lives.len() as u64,
            delivered: delivered().count() as u64,
            failed: failed.into_iter().map(|(why, n)| (why.to_owned(), n)).collect(),
            prompt_tokens: sum(|l| l.prompt),
            hit_tokens: sum(|l| l.hit),
            decode_hit_tokens: sum(|l| l.decode_hit),
            bytes: delivered().map(|l| l.bytes).sum(),
            wire_bytes: found.moved.iter().map(|m| m.moved.bytes).sum(),
            descriptors: found.moved.iter().map(|m| m.moved.descriptors).sum(),
            messages: found.messages,
        },
        times: TIMES.iter().zip(times).map(|(name, list)| spread(name, list)).collect(),
        compared: Vec::new(),
        traffic: traffic(s, &found.moved),
        links,
        descriptors: found.sizes,
        pools: pools(s, lives, span),
        gantt: found.gantt,
        warnings: Vec::new(),
        cost: found.cost,
    };
    out.warnings = warn::warnings(s, &out);
    out
}

fn side(f: &Fleet) -> Side {
    let (d, spec) = (&f.description, f.manifest.spec());
    let block = f.manifest.groups().iter().map(|g| g.block_tokens.get()).find(|n| *n > 0);
    Side {
        model: d.model.name().to_owned(),
        shape: d.shape.to_string(),
        engines: f.engines,
        ranks: f.ranks,
        gpus: f.engines.saturating_mul(f.ranks),
        block_tokens: block.unwrap_or(0),
        layout: layout(d),
        bytes_per_token: spec.bytes_per_token().get(),
        bytes_per_state: spec.bytes_per_state().get(),
    }
}

fn layout(d: &kvferry_models::EngineDescription) -> String {
    let names = ["hnd", "nhd", "planes", "packed-rows"];
    let known = names.into_iter().find(|name| kvferry_models::layout_named(name) == Some(d.layout));
    known.unwrap_or("its own").to_owned()
}

/// Quantiles and a histogram.
pub(crate) fn spread(name: &str, mut list: Vec<f64>) -> Times {
    list.sort_by(f64::total_cmp);
    let at = |q: f64| {
        let last = list.len().saturating_sub(1);
        list.get(place((list.len() as f64 * q).ceil()).saturating_sub(1).min(last)).copied().unwrap_or(0.0)
    };
    let mean = if list.is_empty() { 0.0 } else { list.iter().sum::<f64>() / list.len() as f64 };
    Times {
        name: name.to_owned(),
        count: list.len() as u64,
        mean,
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        max: at(1.0),
        bars: bars(&list),
    }
}

/// Ten bars to a decade, from a microsecond on.
fn bars(sorted: &[f64]) -> Vec<(f64, u64)> {
    let step = |x: f64| if x <= 1e-6 { 0 } else { nearest(((x / 1e-6).log10() * 10.0 - 1e-9).ceil()) };
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let mut counts: BTreeMap<u64, u64> = (step(*first)..=step(*last)).map(|k| (k, 0)).collect();
    for x in sorted {
        *counts.entry(step(*x)).or_default() += 1;
    }
    counts.into_iter().map(|(k, n)| (1e-6 * 10f64.powf(k as f64 / 10.0), n)).collect()
}

fn links(s: &Scenario, used: &[(u64, Vec<f32>)], span: f64) -> Vec<LinkUse> {
    let mut out: Vec<LinkUse> = s
        .cluster
        .links()
        .iter()
        .zip(used)
        .filter(|(_, (amount, _))| *amount > 0)
        .map(|(link, (amount, over_time))| {
            let mean = *amount as f64 / span / link.capacity();
            LinkUse {
                name: link.name(),
                kind: link.kind().name().to_owned(),
                capacity: link.capacity(),
                bytes: *amount,
                mean,
                peak: over_time.iter().copied().reduce(f32::max).map(f64::from),
                over_time: over_time.clone(),
            }
        })
        .collect();
    // A link that was full for a while is where requests waited, however idle the rest of the span was.
    out.sort_by(|a, b| {
        let (a_first, b_first) = ((a.fullest(), a.mean), (b.fullest(), b.mean));
        b_first.0.total_cmp(&a_first.0).then(b_first.1.total_cmp(&a_first.1)).then_with(|| a.name.cmp(&b.name))
    });
    out
}

/// Whether a link's amount is of bytes.
pub(crate) fn carries_bytes(kind: &str) -> bool {
    kind != LinkKind::Work.name()
}

/// The most ranks, or engines, that are a row each.
const FEW: u32 = 64;
/// The most machines that are a row each.
const MANY: u32 = 128;

/// How the ranks of one side are put into rows.
struct Axis {
    what: String,
    names: Vec<String>,
    of: Vec<u32>,
    ranks: u32,
}

impl Axis {
    fn new(letter: char, f: &Fleet) -> Self {
        let all = f.engines.saturating_mul(f.ranks);
        let index = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let ranks = f.ranks.max(1);
        let each = 0..f.gpus.len();
        if all <= FEW {
            let name = |n: u32| match (f.engines, ranks) {
                (1, _) => format!("{letter} rank {n}"),
                (_, 1) => format!("{letter}{n}"),
                _ => format!("{letter}{} rank {}", n / ranks, n % ranks),
            };
            return Self {
                what: "rank".into(),
                names: (0..all).map(name).collect(),
                of: each.map(index).collect(),
                ranks,
            };
        }
        if f.engines > 1 && f.engines <= FEW {
            let names = (0..f.engines).map(|e| format!("{letter}{e}")).collect();
            return Self { what: "engine".into(), names, of: each.map(|n| index(n) / ranks).collect(), ranks };
        }
        let mut nodes: Vec<u32> = f.gpus.iter().map(|g| g.node).collect();
        nodes.dedup();
        nodes.sort_unstable();
        nodes.dedup();
        let together = index(nodes.len()).div_ceil(MANY).max(1);
        let row = |node: u32| index(nodes.partition_point(|n| *n < node)) / together;
        let name = |group: &[u32]| match (group.first(), group.last()) {
            (Some(a), Some(b)) if a != b => format!("nodes {a}-{b}"),
            (Some(a), _) => format!("node {a}"),
            _ => String::new(),
        };
        let names = nodes.chunks(together as usize).map(name).collect();
        let what = if together == 1 { "node".into() } else { format!("{together} nodes") };
        Self { what, names, of: f.gpus.iter().map(|g| row(g.node)).collect(), ranks }
    }

    fn row(&self, (engine, rank): (u32, u32)) -> u32 {
        let at = u64::from(engine) * u64::from(self.ranks) + u64::from(rank);
        usize::try_from(at).ok().and_then(|at| self.of.get(at)).copied().unwrap_or(0)
    }
}

fn traffic(s: &Scenario, moved: &[PairMoved]) -> Traffic {
    let (rows, columns) = (Axis::new('P', &s.prefill), Axis::new('D', &s.decode));
    let mut cells: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for m in moved.iter().filter(|m| m.moved.bytes > 0) {
        *cells.entry((rows.row(m.src), columns.row(m.dst))).or_default() += m.moved.bytes;
    }
    let pair = |m: &PairMoved| Pair {
        source: m.src,
        destination: m.dst,
        bytes: m.moved.bytes,
        descriptors: m.moved.descriptors,
        transfers: m.moved.ops,
    };
    let mut pairs: Vec<Pair> = moved.iter().map(pair).collect();
    if pairs.len() > MOST_PAIRS {
        pairs.sort_by(|a, b| {
            b.bytes.cmp(&a.bytes).then_with(|| (a.source, a.destination).cmp(&(b.source, b.destination)))
        });
        pairs.truncate(MOST_PAIRS);
    }
    pairs.sort_by_key(|p| (p.source, p.destination));
    Traffic {
        pairs,
        all_pairs: moved.len() as u64,
        rows_are: rows.what,
        rows: rows.names,
        columns_are: columns.what,
        columns: columns.names,
        cells: cells.into_iter().map(|((r, c), bytes)| (r, c, bytes)).collect(),
    }
}

/// Bytes of the pool of one engine of D that requests can take.
pub(crate) fn pool_bytes(f: &Fleet) -> u64 {
    f.manifest.ranks().iter().flat_map(|r| &r.layout.regions).map(|r| r.len.get()).fold(0, u64::saturating_add)
}

fn pools(s: &Scenario, lives: &[Life], span: f64) -> Pools {
    let mut steps: Vec<(f64, i128, i128)> = Vec::new();
    for life in lives {
        let (Some(taken), room) = (life.taken, i128::from(life.room)) else { continue };
        // What failed gave its blocks back then.
        let arrived = life.delivered.or(life.decoded).unwrap_or(span);
        let left = life.decoded.unwrap_or(span);
        steps.extend([(taken, room, room), (arrived, -room, 0), (left, 0, -room)]);
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out = Pools {
        capacity: pool_bytes(&s.decode).saturating_mul(u64::from(s.decode.engines)),
        waited: lives.iter().filter(|l| l.waited).count() as u64,
        ..Pools::default()
    };
    let bytes = |n: i128| u64::try_from(n.max(0)).unwrap_or(u64::MAX);
    let (mut flight, mut used, mut steps) = (0i128, 0i128, steps.into_iter().peekable());
    for slice in 1..=SLICES {
        let end = span * slice as f64 / SLICES as f64;
        while let Some((_, a, b)) = steps.next_if(|step| step.0 <= end || slice == SLICES) {
            (flight, used) = (flight + a, used + b);
            out.peak_in_flight = out.peak_in_flight.max(bytes(flight));
            out.peak_used = out.peak_used.max(bytes(used));
        }
        out.in_flight.push(bytes(flight));
        out.used.push(bytes(used));
    }
    out
}
