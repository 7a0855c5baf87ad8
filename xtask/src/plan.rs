//! `cargo xtask plan P D --tokens N`: what would move from engine P to engine D for one request.
//!
//! With `--json` it prints `check`'s object (`command` is `"plan"`) and, where the engines are compatible, also:
//! - `request`: `tokens`, `prefix_hit`, `tables` (`"contiguous"` or `"scattered"`), `seed`, `frozen_tail`, and `moved`, a list
//!   with `source_group`, `destination_group`, `retention` (null for states), `start`, `end` (tokens), `zero_start`, `zero_end`,
//!   and `states`, each with `position` (tokens), `source_slot`, `destination_slot`;
//! - `pairs`, by destination, then source: `source`, `destination` (rank numbers), `replicas` (source ranks that hold all of
//!   the same and were not chosen for it), `bytes`, `rows` (of the product form), `descriptors_before`,
//!   `descriptors_after` coalescing, `largest_descriptor` (bytes; the longest run before coalescing where there are more than
//!   2^26 of them), `ways` (see below), and `classes`, each with `kind` (`"paged"` or `"state"`), `items` (names), `heads` (first and one past the last; null for states), `parts` (of states, each with `name` and
//!   `units`; null for paged items), `retention`, `entry_tokens`, `bytes_per_entry`, `period` (entries, null where the request's
//!   tokens are walked) and `phases` (none for states), each with `source_block`, `destination_block` (table positions in the
//!   period), `source_start`, `destination_start` (kernel block, entry), `loops` (`count`, `source_step`, `destination_step`),
//!   `entries`;
//! - `zeroed`, by destination rank: `destination`, `bytes`;
//! - `totals`: `pairs`, `bytes`, `rows`, `descriptors_before`, `descriptors_after`, `zeroed_bytes`, and `ways`: sums over the pairs,
//!   with `best_ns` and `best_for_pairs` (how many pairs each way is best for) in place of `best` and `why`; null without pairs.
//!
//! `ways` are `direct`, `destination` and `source` (where bytes are permuted; null where a batch can't be staged), each with `ns`,
//! `descriptors` (on the wire), `local_runs`, `staging_bytes`, `fits` (the pool), and `best` and `why`.
//!
//! `descriptors_before` counts contiguous ranges with nothing joined across heads, blocks and items; `descriptors_after` is
//! what a transport is given one by one.

use std::process::ExitCode;

use anyhow::Context as _;
use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::{Manifest, RankManifest};
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::placement::{HeadRange, Placement};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BoundRequest, GroupMove, Request, Tail};
use kvferry_geometry::spec::Item;
use kvferry_geometry::staged::Choice;
use kvferry_geometry::units::{BlockId, GroupId, ItemId, RankId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;
use kvferry_models::{DEFAULT_BLOCKS, EngineDescription};
use serde_json::{Value, json};

use crate::check::{self, Outcome};
use crate::{output, show};
use kvferry_topology::blocks::{self, Ask, Free, Room};

mod classes;
mod ways;

/// Two engines and a request.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    engines: check::Args,
    /// Length of the prompt
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    tokens: u32,
    /// Tokens that D holds already; its states are read all the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefix_hit: u32,
    /// Random block tables instead of consecutive ones
    #[arg(long)]
    scattered: bool,
    /// Seed of the random block tables
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Salt of the choice between replicas
    #[arg(long, value_name = "N", default_value_t = 0)]
    salt: u64,
    /// Spread what a rank reads over all ranks that hold it equally
    #[arg(long)]
    stripe: bool,
    /// P's last block is frozen and zero-filled, so it may move whole
    #[arg(long)]
    frozen_tail: bool,
    /// The pair of ranks whose classes, phases and ways are printed [default: the first]
    #[arg(long, value_name = "P:D", value_parser = parse_pair)]
    pair: Option<(u32, u32)>,
    #[command(flatten)]
    cost: ways::CostArgs,
}

/// The longest prompt, in tokens.
const MAX_TOKENS: i64 = 1 << 24;
/// The most descriptors of a pair that are looked at one by one.
const LOOKED_AT: u64 = 1 << 26;

fn parse_pair(text: &str) -> Result<(u32, u32), String> {
    let pair = text.split_once(':').and_then(|(s, d)| Some((s.parse().ok()?, d.parse().ok()?)));
    pair.ok_or_else(|| "write a source rank and a destination rank, for example 0:3".into())
}

/// Runs the command.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (text, ok) = report(&args)?;
    output::print(&text)?;
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the command prints, and whether there is a plan.
fn report(args: &Args) -> anyhow::Result<(String, bool)> {
    let (n, hit) = (args.tokens, args.prefix_hit);
    anyhow::ensure!(hit <= n, "--prefix-hit is {hit}, but the prompt has {n} tokens; it must be 0 to {n}");
    let enough = |d: &mut EngineDescription| {
        if d.blocks.is_none() {
            // Where the description doesn't say, there are blocks enough for the request.
            let slots = d.slots;
            blocks::fit(d, Room { ask: args.ask(), requests: 1, spare: true })?;
            (d.blocks, d.slots) = (d.blocks.max(Some(DEFAULT_BLOCKS)), slots);
        }
        Ok(())
    };
    let outcome = Outcome::new(&args.engines, enough);
    let Some(compatible) = &outcome.compatible else {
        let text = if args.engines.json { format!("{:#}\n", outcome.json("plan")) } else { outcome.text() };
        return Ok((text, false));
    };
    let plan = Plan::new(args, compatible)?;
    let text = if args.engines.json {
        let mut value = outcome.json("plan");
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), plan.json(args, compatible)) {
            value.extend(more);
        }
        format!("{value:#}\n")
    } else {
        plan.text(args, compatible, &outcome)?
    };
    Ok((text, true))
}

impl Args {
    fn ask(&self) -> Ask {
        Ask { tokens: self.tokens.into(), states: 1 }
    }
}

/// The plan of one request over all pairs of ranks.
struct Plan {
    bound: BoundRequest,
    pairs: Vec<Pair>,
    /// By destination rank; those where nothing is zeroed are left out.
    zeroed: Vec<(RankId, u64)>,
}

/// One pair of ranks.
struct Pair {
    plan: PairPlan,
    replicas: Vec<u32>,
    bytes: u64,
    rows: u64,
    before: u64,
    after: u64,
    largest: u64,
    ways: Choice,
}

impl Plan {
    fn new(args: &Args, compatible: &Compatible) -> anyhow::Result<Self> {
        let bound =
            BoundRequest::new(compatible, request(args, compatible)?).context("the request cannot be served")?;
        let options = PeerOptions { salt: args.salt, stripe: args.stripe };
        let peers = PeerMap::with(compatible, options, |_, _| 0)?;
        let mut pairs = Vec::new();
        for pair in peers.pairs() {
            let plan = PairPlan::new(compatible, &peers, pair.src(), pair.dst())?;
            let batch = plan.resolve(&bound)?;
            let (bytes, rows) = (batch.bytes().get(), batch.rows());
            let (before, after, largest) = (plan.uncoalesced(&bound)?, batch.descriptors(), largest(&batch));
            let replicas = replicas(compatible, &plan);
            pairs.push(Pair { plan, replicas, bytes, rows, before, after, largest, ways: args.cost.compare(&batch) });
        }
        let dst = compatible.dst();
        let ranks = (0u32..).map(RankId::new).zip(dst.ranks()).map(|(rank, _)| rank);
        let bytes_of = |rank| Ok((rank, ZeroPlan::new(dst, rank)?.resolve(&bound)?.bytes().get()));
        let mut zeroed = ranks.map(bytes_of).collect::<anyhow::Result<Vec<_>>>()?;
        zeroed.retain(|z| z.1 > 0);
        Ok(Self { bound, pairs, zeroed })
    }

    fn text(&self, args: &Args, compatible: &Compatible, outcome: &Outcome) -> anyhow::Result<String> {
        let (Some(source), Some(destination)) = (&outcome.source, &outcome.destination) else {
            anyhow::bail!("there is no plan without both engines");
        };
        let mut out = outcome.text();
        let tables = if args.scattered { format!("scattered (seed {})", args.seed) } else { "contiguous".into() };
        out.push_str(&format!(
            "request: {} tokens, {} of them at the destination already, {tables} blocks\n",
            show::count(args.tokens.into()),
            show::count(args.prefix_hit.into()),
        ));
        for m in self.bound.moves() {
            out.push_str(&move_text(m, compatible));
        }
        let row = |p: &Pair| {
            vec![
                show::rank(&source.description, p.plan.src()),
                show::rank(&destination.description, p.plan.dst()),
                show::size(p.bytes),
                show::count(p.rows),
                show::count(p.before),
                show::count(p.after),
                show::size(p.largest),
                p.ways.best.place.to_string(),
                show::time(p.ways.best.ns),
                ranks(&p.replicas),
            ]
        };
        let headings = [
            "from P",
            "to D",
            "bytes",
            "rows",
            "descriptors before",
            "after coalescing",
            "largest",
            "best way",
            "time",
            "same held by P",
        ];
        out.push('\n');
        out.push_str(&show::table("", &headings, &self.pairs.iter().map(row).collect::<Vec<_>>()));
        out.push('\n');
        let shown = match args.pair {
            None => self.pairs.first(),
            Some((s, d)) => {
                let found = self.pairs.iter().find(|p| (p.plan.src().get(), p.plan.dst().get()) == (s, d));
                Some(
                    found
                        .with_context(|| format!("rank {d} reads nothing from rank {s}; the pairs are listed above"))?,
                )
            }
        };
        if let Some(pair) = shown {
            out.push_str(&classes::text(&pair.plan, compatible.dst()));
            let of = format!("ways of P {} -> D {}", pair.plan.src(), pair.plan.dst());
            out.push_str(&args.cost.text(&of, &pair.ways));
            out.push('\n');
        }
        if let Some(sum) = ways::sum(self.pairs.iter().map(|p| &p.ways)) {
            out.push_str(&sum.text());
            out.push('\n');
        }
        let (zeroed, t) = (self.zeroed_bytes(), self.totals());
        out.push_str(&format!(
            "total: {}, {} ({} B); {} rows; descriptors {} before coalescing, {} after; {} zeroed\n",
            show::number_of(self.pairs.len(), "pair"),
            show::size(t.bytes),
            show::count(t.bytes),
            show::count(t.rows),
            show::count(t.before),
            show::count(t.after),
            show::size(zeroed),
        ));
        Ok(out)
    }

    fn json(&self, args: &Args, compatible: &Compatible) -> Value {
        let moved = self.bound.moves().iter().map(|m| {
            let state = |s: &kvferry_geometry::request::StateMove| {
                json!({"position": s.position.get(), "source_slot": s.src.get(), "destination_slot": s.dst.get()})
            };
            json!({
                "source_group": m.src_group.get(), "destination_group": m.dst_group.get(),
                "retention": m.retention.map(|r| r.to_string()), "states": m.states.iter().map(state).collect::<Vec<_>>(),
                "start": m.range.start().get(), "end": m.range.end().get(),
                "zero_start": m.zero.start().get(), "zero_end": m.zero.end().get(),
            })
        });
        let pairs = self.pairs.iter().map(|p| {
            json!({
                "source": p.plan.src().get(), "destination": p.plan.dst().get(), "replicas": p.replicas,
                "bytes": p.bytes, "rows": p.rows, "descriptors_before": p.before, "descriptors_after": p.after,
                "largest_descriptor": p.largest,
                "ways": ways::json(&p.ways),
                "classes": p.plan.classes().iter().map(|c| classes::json(c, compatible.dst())).collect::<Vec<_>>(),
            })
        });
        let zeroed = self.zeroed.iter().map(|(rank, bytes)| json!({"destination": rank.get(), "bytes": bytes}));
        let t = self.totals();
        json!({
            "request": {
                "tokens": args.tokens, "prefix_hit": args.prefix_hit, "frozen_tail": args.frozen_tail, "seed": args.seed,
                "tables": if args.scattered { "scattered" } else { "contiguous" },
                "moved": moved.collect::<Vec<_>>(),
            },
            "pairs": pairs.collect::<Vec<_>>(),
            "zeroed": zeroed.collect::<Vec<_>>(),
            "totals": {
                "pairs": self.pairs.len(), "bytes": t.bytes, "rows": t.rows, "descriptors_before": t.before,
                "descriptors_after": t.after, "zeroed_bytes": self.zeroed_bytes(),
                "ways": ways::sum(self.pairs.iter().map(|p| &p.ways)).map(|s| s.json()),
            },
        })
    }

    fn zeroed_bytes(&self) -> u64 {
        self.zeroed.iter().map(|z| z.1).sum()
    }

    fn totals(&self) -> Totals {
        let mut t = Totals::default();
        for p in &self.pairs {
            t.bytes += p.bytes;
            t.rows += p.rows;
            t.before += p.before;
            t.after += p.after;
        }
        t
    }
}

#[derive(Default)]
struct Totals {
    bytes: u64,
    rows: u64,
    before: u64,
    after: u64,
}

/// The request of the command line, with blocks for each group.
fn request(args: &Args, compatible: &Compatible) -> anyhow::Result<Request> {
    let (src, dst, ask) = (compatible.src(), compatible.dst(), args.ask());
    let tail = if args.frozen_tail { Tail::Frozen } else { Tail::Exact };
    let mut random = Random(args.seed);
    let mut take = |side: &str, m: &Manifest| {
        let shuffle = |_, list: &mut [BlockId]| {
            for i in 0..list.len() {
                let other = i + random.below(list.len() - i);
                list.swap(i, other);
            }
        };
        let mut free = if args.scattered { Free::new(m, shuffle) } else { Free::new(m, |_, _| {}) };
        free.take(m, ask).with_context(|| format!("the {side}'s blocks"))
    };
    let (from, to) = (take("source", src)?, take("destination", dst)?);
    let (src, dst) = (ask.src(src, &from, tail), ask.dst(dst, &to, args.prefix_hit.into(), 0));
    Ok(Request { tokens: Tokens::new(args.tokens.into()), src, dst })
}

/// SplitMix64: a seed gives one sequence, on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // The remainder is below `limit`, so it fits.
        usize::try_from(z % (limit.max(1) as u64)).unwrap_or(0)
    }
}

/// Bytes of the largest descriptor.
fn largest(batch: &Batch) -> u64 {
    if batch.descriptors() > LOOKED_AT {
        return batch.sections().iter().flat_map(|s| &s.parts).map(|p| p.nest.run).max().unwrap_or(0);
    }
    let mut cursor = batch.cursor();
    let mut buffer = vec![Descriptor::default(); 4096];
    let mut largest = 0;
    while let filled @ 1.. = cursor.fill(&mut buffer) {
        largest = buffer[..filled].iter().map(|d| d.len).fold(largest, u64::max);
    }
    largest
}

/// What one class moves of one item, by the source's ids: along which of the item's axes, and which heads or units.
struct Wanted {
    item: ItemId,
    axis: usize,
    heads: HeadRange,
}

impl Wanted {
    /// Whether a rank holds it, and all tokens that another rank holds of it.
    fn is_on(&self, rank: &RankManifest, chosen: &RankManifest) -> bool {
        let of = |r: &RankManifest| r.placement.get(self.item.index()).cloned().flatten();
        match (of(rank), of(chosen)) {
            (Some(Placement::Paged(p)), Some(Placement::Paged(c))) => {
                p.heads.contains(self.heads) && (p.tokens == c.tokens || p.tokens.count() == 1)
            }
            (Some(Placement::State(s)), _) => s.parts.get(self.axis).is_some_and(|units| units.contains(self.heads)),
            _ => false,
        }
    }
}

/// The source ranks, other than the pair's, that hold all that the pair moves.
fn replicas(c: &Compatible, plan: &PairPlan) -> Vec<u32> {
    let (chosen, spec) = (plan.src(), c.src().spec());
    let Some(holder) = c.src().rank(chosen) else {
        return Vec::new();
    };
    let mut wanted = Vec::new();
    for class in plan.classes() {
        for item in class.items().iter().filter_map(|&dst| c.src_item(dst)) {
            for share in class.shares() {
                let parts = spec.get(item).and_then(Item::as_state).map(|s| &s.parts);
                let axis = parts.and_then(|list| list.iter().position(|p| Some(&p.name) == share.part.as_ref()));
                wanted.push(Wanted { item, axis: axis.unwrap_or(0), heads: share.heads });
            }
        }
    }
    let ranks = (0u32..).zip(c.src().ranks()).filter(|(id, _)| *id != chosen.get());
    ranks.filter(|(_, rank)| wanted.iter().all(|w| w.is_on(rank, holder))).map(|(id, _)| id).collect()
}

/// Rank numbers, the first of them.
fn ranks(list: &[u32]) -> String {
    if list.is_empty() { "-".into() } else { kvferry_models::ranges(list) }
}

fn tokens(range: TokenRange) -> String {
    if range.is_empty() {
        return "no tokens".into();
    }
    format!("tokens {range}")
}

/// What moves of the items of two groups.
fn move_text(m: &GroupMove, compatible: &Compatible) -> String {
    let name = |m: &Manifest, id: GroupId| m.groups().get(id.index()).map_or_else(String::new, |g| g.name.to_string());
    let (from, to) = (name(compatible.src(), m.src_group), name(compatible.dst(), m.dst_group));
    if m.retention.is_none() {
        let state = |s: &kvferry_geometry::request::StateMove| {
            format!("the state after {} moves from slot {} to slot {}", tokens_of(s.position), s.src, s.dst)
        };
        let states: Vec<String> = m.states.iter().map(state).collect();
        let what = if states.is_empty() { "no state moves".into() } else { states.join(", ") };
        return format!("    group {from:?} -> {to:?}: {what}\n");
    }
    let zero = if m.zero.is_empty() { String::new() } else { format!(", then {} zeroed", tokens(m.zero)) };
    format!("    group {from:?} -> {to:?}: {} move{zero}\n", tokens(m.range))
}

fn tokens_of(n: Tokens) -> String {
    format!("{} tokens", show::count(n.get()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::{IgnoreArgs, ModelArgs, Named};

    fn args(source: &str, destination: &str, tokens: u32) -> Args {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples");
        let engine = |name: &str| {
            if name.contains('=') { name.parse().unwrap() } else { Named::File(dir.join(name)) }
        };
        let (model, ignore) = (ModelArgs::default(), IgnoreArgs::default());
        let engines =
            check::Args { source: engine(source), destination: engine(destination), model, ignore, json: true };
        let (prefix_hit, scattered, seed, salt, frozen_tail, stripe) = (0, false, 1, 0, false, false);
        let cost = ways::CostArgs::default();
        Args { engines, tokens, prefix_hit, scattered, seed, salt, stripe, frozen_tail, pair: None, cost }
    }

    fn json_of(args: &Args) -> Value {
        let (text, ok) = report(args).unwrap();
        assert!(ok, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn totals_are_the_model_s_bytes_times_the_moved_tokens() {
        let mut a = args("prefill-tp4-pp2.toml", "decode-tp2.toml", 2001);
        a.prefix_hit = 37;
        let value = json_of(&a);
        assert_eq!(value["totals"]["bytes"], 1964 * 131_072);
        assert_eq!(value["totals"]["pairs"], 8);
        assert_eq!(value["totals"]["zeroed_bytes"], (2048 - 2001) * 131_072);
        assert_eq!(value["request"]["moved"][0]["start"], 37);
        let pair = &value["pairs"][0];
        assert_eq!((&pair["source"], &pair["destination"]), (&json!(0), &json!(0)));
        // K and V of one head of one token, in 16 layers and 2 heads: HND against NHD.
        assert_eq!((&pair["largest_descriptor"], &pair["descriptors_after"]), (&json!(512), &json!(1964 * 16 * 2)));
        // So much permuting is cheaper than so many descriptors.
        assert_eq!(
            (&pair["ways"]["best"], &pair["ways"]["direct"]["descriptors"]),
            (&json!("destination"), &json!(1964 * 16 * 2))
        );
        let sums = &value["totals"]["ways"];
        assert_eq!((&sums["best_for_pairs"]["destination"], sums.get("why")), (&json!(8), None));
        // Nothing can be joined: before coalescing they are the same.
        assert_eq!(pair["descriptors_before"], 1964 * 16 * 2);
        let class = &pair["classes"][0];
        assert_eq!((&class["period"], class["phases"].as_array().unwrap().len()), (&json!(64), 4));
        // Kernel blocks of 16 that only continue each other are one stretch of tokens.
        assert_eq!(class["phases"][3]["destination_start"], json!([0, 48]));
        assert_eq!(class["heads"], json!([0, 2]));
    }

    #[test]
    fn replicas_are_the_ranks_that_hold_the_same() {
        let value = json_of(&args("deepseek-dcp.toml", "deepseek-dcp.toml", 2048));
        let pairs = value["pairs"].as_array().unwrap();
        // Of 8 TP ranks with dcp 4, ranks r and r + 4 hold the same latents.
        assert_eq!(pairs.len(), 16);
        for pair in pairs {
            let (src, dst) = (pair["source"].as_u64().unwrap(), pair["destination"].as_u64().unwrap());
            assert_eq!(src % 4, dst % 4);
            assert_eq!(pair["replicas"], json!([src ^ 4]));
        }
        assert_eq!(value["totals"]["bytes"], 2048 * 79_608 * 2);
        assert_eq!(value["totals"]["descriptors_after"], 32);
    }

    #[test]
    fn windows_move_what_they_still_read() {
        let mut a = args("gpt-oss-groups.toml", "gpt-oss-groups.toml", 2048);
        let contiguous = json_of(&a);
        assert_eq!(contiguous["totals"]["bytes"], 36_864 * 2048 + 36_864 * 127);
        a.scattered = true;
        let scattered = json_of(&a);
        assert_eq!(contiguous["totals"]["bytes"], scattered["totals"]["bytes"]);
        let after = |v: &Value| v["totals"]["descriptors_after"].as_u64().unwrap();
        assert!(after(&scattered) > after(&contiguous));
        a.seed = 2;
        assert_ne!(json_of(&a), scattered);
    }

    #[test]
    fn the_text_ends_with_a_summary() {
        let mut a = args("prefill-tp4-pp2.toml", "prefill-tp4-pp2.toml", 100);
        a.engines.json = false;
        let (text, ok) = report(&a).unwrap();
        assert!(ok);
        let expected = "total: 8 pairs, 12.5 MiB (13,107,200 B); ";
        assert!(text.lines().last().unwrap().starts_with(expected), "{text}");
        assert!(text.contains("P 0 -> D 0, class 1 of 1: 16 items, heads [0, 2), 16,384 B a token"), "{text}");
        a.pair = Some((7, 7));
        assert!(report(&a).unwrap().0.contains("P 7 -> D 7, class 1 of 1"));
        a.pair = Some((0, 7));
        assert!(report(&a).unwrap_err().to_string().contains("rank 7 reads nothing from rank 0"));
    }

    #[test]
    fn states_move_whatever_is_cached() {
        let mut a = args("hybrid-prefill.toml", "hybrid-decode.toml", 2048);
        a.prefix_hit = 2048;
        let value = json_of(&a);
        let moved = value["request"]["moved"].as_array().unwrap();
        let states = moved.iter().filter(|m| m["retention"] == Value::Null);
        assert!(states.clone().all(|m| m["states"][0]["position"] == 2048) && states.count() == 4);
        // B and C have 8 groups, and 16 ranks read them: each of these parts is read twice.
        let twice = 23 * 2 * 8 * 128 * 3 * 2;
        assert_eq!(value["totals"]["bytes"], 49_082_368 + twice);
        let class = &value["pairs"][0]["classes"][0];
        assert_eq!(
            (&class["kind"], &class["heads"], &class["entry_tokens"]),
            (&json!("state"), &Value::Null, &json!(1))
        );
        assert_eq!(class["parts"][3], json!({"name": "temporal", "units": [0, 4]}));
        a.engines.json = false;
        let (text, _) = report(&a).unwrap();
        assert!(text.contains("the state after 2,048 tokens moves from slot"), "{text}");
        assert!(text.contains("states with units of conv.x [0, 256), conv.b [0, 128)"), "{text}");
    }

    #[test]
    fn a_full_hit_moves_nothing() {
        let mut a = args("prefill-tp4-pp2.toml", "decode-tp2.toml", 64);
        a.prefix_hit = 64;
        let value = json_of(&a);
        assert_eq!((&value["totals"]["bytes"], &value["totals"]["zeroed_bytes"]), (&json!(0), &json!(0)));
        a.prefix_hit = 65;
        assert!(report(&a).unwrap_err().to_string().contains("it must be 0 to 64"));
    }

    #[test]
    fn engines_that_differ_have_no_plan() {
        let a = args("prefill-tp4-pp2.toml", "decode-wrong.toml", 64);
        let (text, ok) = report(&a).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(!ok && value["compatible"] == false && value.get("pairs").is_none());
        assert_eq!(format!("{:?}", run(a).unwrap()), format!("{:?}", ExitCode::FAILURE));
    }

    #[test]
    fn too_few_blocks_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.toml");
        std::fs::write(&path, "model = \"llama-3.1-8b\"\nblocks = 3\n").unwrap();
        let mut a = args("prefill-tp4-pp2.toml", "decode-tp2.toml", 64);
        a.engines.destination = Named::File(path);
        let error = format!("{:#}", report(&a).unwrap_err());
        assert!(error.contains("has 3 blocks left of 3, and the request needs 4"), "{error}");
    }

    #[test]
    fn pairs_are_parsed() {
        assert_eq!(parse_pair("3:14"), Ok((3, 14)));
        assert!(parse_pair("3").is_err() && parse_pair("a:1").is_err());
    }
}
