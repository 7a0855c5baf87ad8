//! Answers to draw, made up but of one piece, as no engine need run to look at a page.

use kvferry_topology::answer::{
    Answer, Compared, Cost, Descriptors, Gantt, GanttRow, LinkUse, Pair, Pools, Requests, SLICES, Side, TIMES, Times,
    Traffic, Warning,
};

/// Numbers that look like chance (SplitMix64).
struct Chance(u64);

impl Chance {
    fn part(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn bytes(&mut self, about: f64) -> u64 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of bytes")]
        let bytes = (about * (-self.part().max(1e-9).ln() * 0.6 + 0.4)) as u64;
        bytes.max(1)
    }
}

fn side(model: &str, shape: &str, engines: u32, ranks: u32) -> Side {
    Side {
        model: model.into(),
        shape: shape.into(),
        engines,
        ranks,
        gpus: engines * ranks,
        block_tokens: 16,
        layout: "hnd".into(),
        bytes_per_token: 327_680,
        bytes_per_state: 0,
    }
}

/// A time with about this median, whose histogram has a tail.
fn times(name: &str, median: f64, count: u64, chance: &mut Chance) -> Times {
    let step = 10f64.powf(0.1);
    let weights: Vec<f64> = (-9i32..=14)
        .map(|n| {
            let x = f64::from(n) / if n < 0 { 3.0 } else { 4.5 };
            (-x * x).exp() * (0.85 + 0.3 * chance.part())
        })
        .collect();
    let all: f64 = weights.iter().sum();
    let mut end = median * 10f64.powf(-0.9);
    let mut bars = Vec::new();
    for weight in weights {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of requests")]
        bars.push((end, (weight / all * count as f64).round() as u64));
        end *= step;
    }
    let name = name.into();
    let (p50, p90, p99) = (median, median * 3.4, median * 9.1);
    Times { name, count, mean: median * 1.31, p50, p90, p99, max: median * 24.7, bars }
}

fn all_times(count: u64, handover: f64, chance: &mut Chance) -> Vec<Times> {
    let medians = [0.013, 0.41, 0.0021, handover * 0.8, handover, 0.47 + handover, 6.3, handover * 1.2];
    TIMES.iter().zip(medians).map(|(name, median)| times(name, median, count, chance)).collect()
}

/// Links of some nodes, the fullest first.
fn links(nodes: u32, peak: f64, chance: &mut Chance) -> Vec<LinkUse> {
    let mut out = Vec::new();
    let kinds = [
        ("nic0/out", "nic", 50e9),
        ("nic0/in", "nic", 50e9),
        ("gpu0/nvlink", "nvlink", 450e9),
        ("nic0/work", "work", 12.5e6),
    ];
    for node in 0..nodes {
        for (rest, kind, capacity) in kinds {
            let level = peak * (0.15 + 0.85 * chance.part());
            #[allow(clippy::cast_possible_truncation, reason = "a share needs few digits")]
            let over_time: Vec<f32> = (0..SLICES)
                .map(|n| {
                    let wave = 0.6 + 0.4 * (n as f64 * 0.21 + f64::from(node)).sin();
                    (level * wave * (0.75 + 0.25 * chance.part())).min(1.0) as f32
                })
                .collect();
            let mean = over_time.iter().map(|s| f64::from(*s)).sum::<f64>() / SLICES as f64;
            let most = over_time.iter().copied().fold(0f32, f32::max);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of bytes")]
            let bytes = (mean * capacity * 60.0) as u64;
            let name = format!("node{node}/{rest}");
            out.push(LinkUse {
                name,
                kind: kind.into(),
                capacity,
                bytes,
                mean,
                peak: Some(f64::from(most)),
                over_time,
            });
        }
    }
    out.sort_by(|a, b| b.fullest().total_cmp(&a.fullest()));
    out
}

fn descriptors() -> Descriptors {
    let sizes: Vec<u64> = (8..24).map(|n| 1 << n).collect();
    let before = vec![0, 0, 5_242_880, 41_943_040, 120_000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let after = vec![0, 0, 0, 4_100, 9_800, 2_300, 18_000, 61_000, 140_200, 88_000, 31_000, 9_000, 1_200, 40, 3, 1];
    Descriptors { requests: 64, sizes, before, after }
}

fn pools(capacity: u64, chance: &mut Chance) -> Pools {
    let most = capacity as f64;
    let level = |n: usize| ((n as f64 / SLICES as f64) * std::f64::consts::PI).sin();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of bytes")]
    let mut series = |share: f64| -> Vec<u64> {
        (1..=SLICES).map(|n| (most * share * level(n).max(0.0) * (0.8 + 0.2 * chance.part())) as u64).collect()
    };
    let (used, in_flight) = (series(0.86), series(0.17));
    let peak = |list: &[u64]| list.iter().copied().max().unwrap_or(0);
    let (peak_used, peak_in_flight) = (peak(&used) + 1, peak(&in_flight) + 1);
    Pools { capacity, in_flight, used, peak_in_flight, peak_used, waited: 17 }
}

fn gantt(pairs: u32) -> Gantt {
    let prefill = (0..8)
        .map(|n| (0.02 + 0.05 * f64::from(n), 0.07 + 0.05 * f64::from(n), format!("layers {}-{}", 4 * n, 4 * n + 3)));
    let mut rows = vec![
        GanttRow { name: "queue at P".into(), kind: "wait".into(), bars: vec![(0.0, 0.02, "waits for P".into())] },
        GanttRow { name: "prefill".into(), kind: "compute".into(), bars: prefill.collect() },
    ];
    for pair in 0..pairs {
        let bars = (0..8).map(|n| {
            let begin = 0.071 + 0.05 * f64::from(n) + 0.002 * f64::from(pair % 4);
            (begin, begin + 0.03 + 0.002 * f64::from(pair % 5), "5.24 MiB".to_owned())
        });
        rows.push(GanttRow {
            name: format!("rank {} -> rank {}", pair, pair / 2),
            kind: "wire".into(),
            bars: bars.collect(),
        });
    }
    rows.push(GanttRow {
        name: "first token at D".into(),
        kind: "compute".into(),
        bars: vec![(0.466, 0.489, "step".into())],
    });
    Gantt { request: 4217, tokens: 8192, rows }
}

fn requests(all: u64, delivered: u64, failed: &[(&str, u64)]) -> Requests {
    Requests {
        all,
        delivered,
        failed: failed.iter().map(|(cause, n)| ((*cause).to_owned(), *n)).collect(),
        prompt_tokens: all * 7_590,
        hit_tokens: all * 2_710,
        decode_hit_tokens: all * 480,
        bytes: delivered * 7_110 * 327_680,
        wire_bytes: delivered * 7_190 * 327_680,
        descriptors: delivered * 2_840,
        messages: all * 21,
    }
}

/// 8 engines of 8 ranks that send to 16 engines of 4: a map of 64 by 64 ranks.
pub(crate) fn ranks() -> Answer {
    let mut chance = Chance(1);
    let (mut cells, mut pairs) = (Vec::new(), Vec::new());
    for source in 0..64u32 {
        for engine in 0..16u32 {
            let destination = engine * 4 + source % 8 / 2;
            let bytes = chance.bytes(3e9 * f64::from(1 + engine % 3));
            cells.push((source, destination, bytes));
            pairs.push(Pair {
                source: (source / 8, source % 8),
                destination: (engine, destination % 4),
                bytes,
                descriptors: bytes / 300_000 + 1,
                transfers: bytes / 100_000_000 + 1,
            });
        }
    }
    let names = |side: &str, of: u32| (0..64).map(|n| format!("{side}{}/{}", n / of, n % of)).collect();
    let traffic = Traffic {
        all_pairs: pairs.len() as u64,
        pairs,
        rows_are: "rank".into(),
        rows: names("P", 8),
        columns_are: "rank".into(),
        columns: names("D", 4),
        cells,
    };
    let with = "pull".to_owned();
    let (first_token, handover) =
        (times("time to first token", 0.93, 12_031, &mut chance), times("handover", 0.46, 12_031, &mut chance));
    Answer {
        scenario: "Llama-3.1-70B, 8 x TP 8 to 16 x TP 4".into(),
        engine: "events".into(),
        seed: 20_261_130,
        prefill: side("llama-3.1-70b", "tp=8", 8, 8),
        decode: side("llama-3.1-70b", "tp=4", 16, 4),
        mode: "pull".into(),
        stream: "layers".into(),
        span: 3_541.27,
        requests: requests(12_031, 12_031, &[]),
        times: all_times(12_031, 0.031_4, &mut chance),
        compared: vec![Compared { with, first_token, handover }],
        traffic,
        links: links(16, 0.78, &mut chance),
        descriptors: descriptors(),
        pools: pools(3 << 40, &mut chance),
        gantt: Some(gantt(8)),
        warnings: Vec::new(),
        cost: Cost { events: 8_123_456, transfers: 192_496, shares: (402_113, 3_201_882) },
    }
}

/// 1,024 ranks that send to 1,024: a map by nodes that is full, and more links and pairs than a page shows.
pub(crate) fn nodes() -> Answer {
    let mut chance = Chance(2);
    let mut answer = ranks();
    let mut cells = Vec::new();
    for row in 0..128u32 {
        let weight = 1.0 + 3.0 * f64::from(row % 16 / 15) + f64::from(row) / 64.0;
        for column in 0..128u32 {
            cells.push((row, column, chance.bytes(4e9 * weight)));
        }
    }
    let pair = |n: u32| Pair {
        source: (n / 32, n % 8),
        destination: (n * 7 % 1024, 0),
        bytes: 9_000_000_000 - u64::from(n) * 1_000_003,
        descriptors: 52_000 - u64::from(n),
        transfers: 811,
    };
    let names = |first: u32| (first..first + 128).map(|n| format!("node{n}")).collect();
    answer.scenario = "DeepSeek-V3, 128 x TP 8 to 1,024 x TP 1".into();
    answer.prefill = side("deepseek-v3", "tp=8", 128, 8);
    answer.decode = side("deepseek-v3", "dp", 1024, 1);
    answer.traffic = Traffic {
        pairs: (0..4096).map(pair).collect(),
        all_pairs: 1_048_576,
        rows_are: "node".into(),
        rows: names(0),
        columns_are: "node".into(),
        columns: names(128),
        cells,
    };
    answer.links = links(256, 0.97, &mut chance);
    answer.gantt = Some(gantt(64));
    answer.warnings = vec![warning(
        "hot-link",
        "node0/nic0/out is above 90 % of its capacity in 12 of 60 parts of the span.",
        "Spread engines over more rails, or stream by layers.",
    )];
    answer
}

fn warning(code: &str, text: &str, change: &str) -> Warning {
    Warning { code: code.into(), text: text.into(), change: change.into() }
}

/// One engine to two, where much fails.
pub(crate) fn failing() -> Answer {
    let mut chance = Chance(3);
    let mut answer = ranks();
    answer.scenario = "TCP pair, overloaded".into();
    answer.prefill = side("llama-3.1-8b", "tp=2", 1, 2);
    answer.decode = side("llama-3.1-8b", "tp=1", 2, 1);
    answer.requests = requests(
        1_000,
        613,
        &[("the lease ran out before the transfer ended", 341), ("D had no room for the prompt", 46)],
    );
    answer.stream = "none".into();
    answer.times = all_times(613, 4.21, &mut chance);
    answer.compared[0].with = "push, stream layers".into();
    answer.links = links(2, 1.9, &mut chance);
    answer.traffic = Traffic {
        pairs: vec![
            Pair {
                source: (0, 0),
                destination: (0, 0),
                bytes: 161_000_000_000,
                descriptors: 1_203_000,
                transfers: 310,
            },
            Pair {
                source: (0, 1),
                destination: (1, 0),
                bytes: 159_000_000_000,
                descriptors: 1_190_000,
                transfers: 303,
            },
        ],
        all_pairs: 2,
        rows_are: "rank".into(),
        rows: vec!["P0/0".into(), "P0/1".into()],
        columns_are: "rank".into(),
        columns: vec!["D0/0".into(), "D1/0".into()],
        cells: vec![(0, 0, 161_000_000_000), (1, 1, 159_000_000_000)],
    };
    answer.warnings = vec![
        warning(
            "leases-end",
            "341 of 1,000 leases of 30 s ended before their transfers did: the median handover takes 4.21 s, and 99 of 100 up to 38.3 s.",
            "Stream by layers (`stream = \"layers\"`), or raise `lease` to at least 45 s, or give P and D more than the one 10 Gbit/s link between them.",
        ),
        warning(
            "hot-link",
            "node0/nic0/out is full in 51 of 60 parts of the span.",
            "Add a NIC, or send less: a D of TP 2 would read the same bytes over two links.",
        ),
        warning(
            "pool-small",
            "17 requests waited for room at D.",
            "Raise D's blocks from 2,048 to at least 4,096, or admit fewer requests at once.",
        ),
    ];
    answer
}

/// What the analytic engine knows: no time of day, so nothing over time.
pub(crate) fn analytic() -> Answer {
    let mut answer = failing();
    answer.engine = "analytic".into();
    answer.requests = requests(1, 1, &[]);
    answer.times.retain(|t| t.name == "wire" || t.name == "handover");
    answer.times.iter_mut().for_each(|t| t.bars.clear());
    answer.compared.clear();
    answer.links.iter_mut().for_each(|l| (l.over_time, l.peak) = (Vec::new(), None));
    answer.links.sort_by(|a, b| b.mean.total_cmp(&a.mean));
    (answer.pools.in_flight, answer.pools.used) = (Vec::new(), Vec::new());
    (answer.gantt, answer.warnings) = (None, Vec::new());
    answer
}

/// A load without requests.
pub(crate) fn empty() -> Answer {
    Answer {
        scenario: "nothing to do".into(),
        engine: "events".into(),
        prefill: side("llama-3.1-8b", "tp=2", 1, 2),
        decode: side("llama-3.1-8b", "tp=1", 2, 1),
        mode: "push".into(),
        stream: "none".into(),
        times: TIMES.iter().map(|name| Times { name: (*name).into(), ..Times::default() }).collect(),
        traffic: Traffic { rows_are: "rank".into(), columns_are: "rank".into(), ..Traffic::default() },
        pools: Pools { capacity: 1 << 36, ..Pools::default() },
        ..Answer::default()
    }
}

/// Names that want to be something else than names.
pub(crate) const HOSTILE: &str =
    "</script><script>document.title='taken'</script><!--\"' onload=alert(1) \u{1b}[31m\u{0}\u{2028}\u{202e}&amp;";

/// An answer with such a name wherever a name can be.
pub(crate) fn hostile() -> Answer {
    let bad = || HOSTILE.to_owned();
    let mut answer = failing();
    (answer.scenario, answer.engine, answer.mode, answer.stream) = (bad(), bad(), bad(), bad());
    for side in [&mut answer.prefill, &mut answer.decode] {
        (side.model, side.shape, side.layout) = (bad(), bad(), bad());
    }
    answer.requests.failed.iter_mut().for_each(|f| f.0 = bad());
    answer.compared.iter_mut().for_each(|c| c.with = bad());
    let traffic = &mut answer.traffic;
    (traffic.rows_are, traffic.columns_are) = (bad(), bad());
    traffic.rows.iter_mut().chain(&mut traffic.columns).for_each(|n| *n = bad());
    answer.links.iter_mut().for_each(|l| (l.name, l.kind) = (bad(), bad()));
    for row in answer.gantt.iter_mut().flat_map(|g| &mut g.rows) {
        (row.name, row.kind) = (bad(), bad());
        row.bars.iter_mut().for_each(|b| b.2 = bad());
    }
    answer.warnings.iter_mut().for_each(|w| (w.code, w.text, w.change) = (bad(), bad(), bad()));
    answer.times.push(Times { name: bad(), count: 3, ..Times::default() });
    answer
}
