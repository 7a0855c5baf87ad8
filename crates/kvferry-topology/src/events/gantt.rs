//! One request in detail: what its ranks moved while it was handed over.

use std::collections::BTreeMap;

use kvferry_sim::world::World;

use super::Deployment;
use crate::answer::{Gantt, GanttRow};

/// The request that is shown.
#[derive(Debug)]
pub(super) struct Watch {
    request: u64,
    /// When it was watched, by the world's time.
    from: Option<std::time::Duration>,
    ops: Vec<kvferry_sim::fabric::Logged>,
}

/// Begin, end, and what it is.
type Bar = (f64, f64, String);

/// The most rows of pairs of ranks; more are put together by machine.
const ROWS: usize = 24;

impl Watch {
    pub(super) fn new(request: u64) -> Self {
        Self { request, from: None, ops: Vec::new() }
    }
}

/// A request is asked for: where it is the one that is shown, operations between its engines are written down.
pub(super) fn begins(world: &mut World<Deployment>, i: u32) {
    if world.script.watch.request != u64::from(i) {
        return;
    }
    let Some((p, d)) = world.script.requests.get(i as usize).map(|r| (r.p, world.script.consumer(r.d))) else { return };
    world.script.watch.from = Some(world.now());
    world.fabric().log(Some((p, d)));
}

/// It has ended.
pub(super) fn ends(world: &mut World<Deployment>, i: u32) {
    if world.script.watch.request == u64::from(i) {
        world.script.watch.ops = world.fabric().log(None);
    }
}

/// What was seen.
pub(super) fn gantt(world: &World<Deployment>) -> Option<Gantt> {
    let (script, begin) = (&world.script, world.script.begin);
    let watch = &script.watch;
    let i = watch.request;
    let life = &script.requests.get(usize::try_from(i).ok()?)?.life;
    let (from, to) = life.prefill?;
    let at = life.at;
    let mut rows = Vec::new();
    let bar = |a: f64, b: f64, text: String| (a - at, (b - at).max(a - at), text);
    if from > at {
        rows.push(GanttRow {
            name: "queue".into(),
            kind: "wait".into(),
            bars: vec![bar(at, from, "waits for P".into())],
        });
    }
    let text = format!("{} tokens, {} of them hit", life.prompt, life.hit);
    rows.push(GanttRow { name: "prefill".into(), kind: "compute".into(), bars: vec![bar(from, to, text)] });
    let seconds = |t: std::time::Duration| t.saturating_sub(begin).as_secs_f64();
    if let Some(taken) = life.taken {
        let first = watch.ops.iter().map(|op| seconds(op.begin)).fold(life.delivered.unwrap_or(taken), f64::min);
        let wait = vec![bar(taken, first.max(taken), "asks, binds, connects".into())];
        rows.push(GanttRow { name: "bind".into(), kind: "wait".into(), bars: wait });
    }
    let mut pairs: BTreeMap<(u32, u32), Vec<Bar>> = BTreeMap::new();
    for op in &watch.ops {
        let text = format!("{:.1} MB", op.bytes as f64 / 1e6);
        pairs.entry((op.src, op.dst)).or_default().push(bar(seconds(op.begin), seconds(op.end), text));
    }
    let node = |rank: u32, of_p: bool| {
        let r = script.requests.get(usize::try_from(i).unwrap_or(0));
        let s = &script.scenario;
        let gpu = r.and_then(|r| if of_p { s.prefill.gpu(r.p, rank) } else { s.decode.gpu(r.d, rank) });
        gpu.map_or(0, |g| g.node)
    };
    if pairs.len() <= ROWS {
        for ((src, dst), bars) in pairs {
            rows.push(GanttRow { name: format!("rank {src} -> rank {dst}"), kind: "wire".into(), bars: joined(bars) });
        }
    } else {
        let mut nodes: BTreeMap<(u32, u32), (u32, Vec<Bar>)> = BTreeMap::new();
        for ((src, dst), bars) in pairs {
            let row = nodes.entry((node(src, true), node(dst, false))).or_default();
            row.0 += 1;
            row.1.extend(bars);
        }
        for ((src, dst), (count, bars)) in nodes {
            let name = format!("node {src} -> node {dst} ({count} pairs)");
            rows.push(GanttRow { name, kind: "wire".into(), bars: joined(bars) });
        }
    }
    let first = life.first_token.zip(life.delivered);
    if let Some((token, delivered)) = first {
        let bars = vec![bar(delivered, token, "first token at D".into())];
        rows.push(GanttRow { name: "decode".into(), kind: "compute".into(), bars });
    }
    Some(Gantt { request: i, tokens: life.prompt, rows })
}

/// The most bars of a row.
const BARS: usize = 48;

/// Bars in order; where there are too many, neighbours are one.
fn joined(mut bars: Vec<Bar>) -> Vec<Bar> {
    bars.sort_by(|a, b| a.0.total_cmp(&b.0));
    let each = bars.len().div_ceil(BARS).max(1);
    if each == 1 {
        return bars;
    }
    let join = |some: &[Bar]| {
        let from = some.iter().map(|b| b.0).fold(f64::INFINITY, f64::min);
        let to = some.iter().map(|b| b.1).fold(f64::NEG_INFINITY, f64::max);
        (from, to, format!("{} operations", some.len()))
    };
    bars.chunks(each).map(join).collect()
}
