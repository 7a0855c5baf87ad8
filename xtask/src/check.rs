//! `cargo xtask check P D`: can engine D take over the cache of engine P?
//!
//! Each is a description's file, or parallel sizes of `--model`. Lists everything that stands in the way: the faults of either
//! description, then what differs between the two, with both values and what to change. The comparison is the one that two running
//! engines make when they meet ([`Direction`]), so the reasons are the same. What no description says, only they can refuse: another
//! model identity, striping on one side, versions, keys.
//!
//! Exits 0 where D can, 1 where it can't, 2 where there was nothing to compare: a description that can't be read or is faulty, or
//! wrong usage. `--format` says how to print it: [`sarif`] and [`junit`] are for pipelines, and with `json` (or `--json`) it is one
//! object:
//! - `command` (`"check"`), `compatible` (bool);
//! - `source`, `destination`: null where the description is faulty, else `file`, `name`, `model`, `parallel`, `ranks`,
//!   `items`, `bytes_per_token`, `bytes_per_state`, `digest`, `share_memory` (whether groups lie in the same memory), and `groups`,
//!   each with `name`, `kind` (`"paged"` or `"state"`), `items` (count), `retention` (a list; empty for states), `block_tokens`
//!   (0 for states), `blocks` (slots, of states);
//! - `faults`: of the descriptions; each has `side` (`"source"` or `"destination"`), `file`, `line` and `key` (null where
//!   there is none), `message`;
//! - `mismatches`: between them; each has `item`, `field` (`"item"`, `"kind"`, `"count"`, `"retention"`, `"components"`, `"width"`,
//!   `"encoding"`, `"coverage"`, `"shared"`, `"model"`, `"tokens"` or `"other"`), `component` (or part; null where it is the whole
//!   item), `source`, `destination`, `change`, and `reason`: the words in which a running engine says it;
//! - `ignored`: `source`, `destination`: items that only that side has and that were let pass.

use std::process::ExitCode;
use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatches};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{GroupId, Name};
use kvferry_models::{DescribeError, EngineDescription, InputErrors, ModelError};
use kvferry_session::pairing::{Direction, PairingError};
use kvferry_topology::blocks;
use serde_json::{Value, json};

use crate::engine::{self, IgnoreArgs, ModelArgs, Named};
use crate::{output, show};

mod differences;
#[cfg(test)]
mod handshake;
mod junit;
mod rules;
mod sarif;
#[cfg(test)]
mod tests;

use differences::Difference;

/// Two engines.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    /// The engine that has the cache (prefill): the file of its description, or parallel sizes such as tp=4,pp=2
    #[arg(value_name = "P")]
    pub(crate) source: Named,
    /// The engine that takes it over (decode)
    #[arg(value_name = "D")]
    pub(crate) destination: Named,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) ignore: IgnoreArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Two engines, and how to tell what comes of them.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 compatible; 1 not compatible; 2 a description that can't be read or is faulty, or wrong usage"
)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    engines: Args,
    /// How to print it: text for people, json for programs (as --json), sarif or junit for pipelines
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with = "json")]
    format: Option<Format>,
}

/// How the outcome is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Format {
    Text,
    Json,
    Sarif,
    Junit,
}

/// Exit status: they are not compatible.
pub(crate) const INCOMPATIBLE: u8 = 1;
/// Exit status: there was nothing to compare. What the command line's parser says of wrong usage, too.
pub(crate) const FAULTY: u8 = 2;

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let (text, status) = report(args);
    output::print(&text)?;
    Ok(ExitCode::from(status))
}

/// What the command prints, and its exit status.
fn report(args: &CheckArgs) -> (String, u8) {
    let outcome = Outcome::new(&args.engines, |_| Ok(()));
    let as_told = if args.engines.json { Format::Json } else { Format::Text };
    let text = match args.format.unwrap_or(as_told) {
        Format::Text => outcome.text(),
        Format::Json => format!("{:#}\n", outcome.json("check")),
        Format::Sarif => format!("{:#}\n", sarif::log(&outcome)),
        Format::Junit => junit::report(&outcome),
    };
    (text, outcome.status())
}

/// An engine that is sound in itself.
pub(crate) struct Engine {
    pub(crate) description: EngineDescription,
    pub(crate) manifest: Arc<Manifest>,
    file: String,
}

/// One fault of a description.
struct Fault {
    side: &'static str,
    file: String,
    line: Option<u32>,
    key: String,
    message: String,
    /// The fault in one line.
    text: String,
}

/// All that can be said of two descriptions.
pub(crate) struct Outcome {
    /// As they stand on the command line; the files, where they are files.
    named: [Named; 2],
    pub(crate) source: Option<Engine>,
    pub(crate) destination: Option<Engine>,
    pub(crate) compatible: Option<Compatible>,
    faults: Vec<Fault>,
    differences: Vec<Difference>,
}

impl Outcome {
    /// Reads and compares. `adjust` may fill in what a description leaves open, before its manifest is made.
    pub(crate) fn new(args: &Args, adjust: impl Fn(&mut EngineDescription) -> Result<(), DescribeError>) -> Self {
        let mut faults = Vec::new();
        let mut load = |side, named: &Named| {
            let loaded = args.model.describe(named, side).and_then(|mut description| {
                adjust(&mut description)?;
                let manifest = Arc::new(description.manifest()?);
                Ok(Engine { description, manifest, file: named.to_string() })
            });
            match loaded {
                Ok(engine) => Some(engine),
                Err(error) => {
                    faults.extend(faults_of(side, named, &error));
                    None
                }
            }
        };
        let (source, destination) = (load("source", &args.source), load("destination", &args.destination));
        let named = [args.source.clone(), args.destination.clone()];
        let mut out = Self { named, source, destination, compatible: None, faults, differences: Vec::new() };
        if let (Some(src), Some(dst)) = (&out.source, &out.destination) {
            // As two engines do when they meet.
            let direction = Direction::new(src.manifest.clone(), dst.manifest.clone(), args.ignore.options());
            let met = direction.and_then(|d| d.map(PeerOptions::default()).map(|_| d.compatible().clone()));
            match met {
                Ok(compatible) => out.compatible = Some(compatible),
                Err(PairingError::Mismatch(found)) => out.differences = found.0.iter().map(differences::of).collect(),
                Err(error) => out.differences.push(Difference {
                    item: src.manifest.spec().items().first().map_or_else(|| "".into(), |i| i.name.clone()),
                    field: "tokens",
                    component: None,
                    source: src.description.shape.to_string(),
                    destination: format!("{}: {error}", dst.description.shape),
                    change: "choose dcp, pcp and interleave that divide each other",
                    reason: error.to_string(),
                }),
            }
        }
        out
    }

    /// The command's exit status.
    fn status(&self) -> u8 {
        match (self.faults.is_empty(), &self.compatible) {
            (false, _) => FAULTY,
            (true, None) => INCOMPATIBLE,
            (true, Some(_)) => 0,
        }
    }

    /// The outcome for an operator, its verdict last.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let engines = [("source", &self.source), ("destination", &self.destination)];
        let row = |(side, engine): (&str, &Option<Engine>)| engine.as_ref().map(|e| e.row(side));
        let rows: Vec<Vec<String>> = engines.into_iter().filter_map(row).collect();
        if !rows.is_empty() {
            let headings =
                ["", "engine", "model", "parallel", "ranks", "items", "a token", "a state", "blocks and layout"];
            out.push_str(&show::table("", &headings, &rows));
            out.push('\n');
        }
        for (side, engine) in engines.into_iter().filter_map(|(side, e)| Some((side, e.as_ref()?))) {
            if let Some(text) = engine.groups_text(side) {
                out.push_str(&text);
                out.push('\n');
            }
        }
        for fault in &self.faults {
            out.push_str(&format!("{}: {}\n", fault.side, fault.text));
        }
        out.push_str(&differences::text(&self.differences));
        out.push_str(&self.verdict());
        out.push('\n');
        out
    }

    fn verdict(&self) -> String {
        if let (Some(c), Some(dst)) = (&self.compatible, &self.destination) {
            let spec = dst.manifest.spec();
            let ignored = self.ignored();
            let moved = spec.items().len() - ignored[1].len();
            let mut out = format!("compatible: {}", show::number_of(moved, "item"));
            let left = ignored.iter().map(Vec::len).sum::<usize>();
            if left > 0 {
                out.push_str(&format!(
                    ", {} left alone: {}",
                    left,
                    show::names(ignored.concat().iter().map(Name::as_str))
                ));
                return out;
            }
            let (token, state) = (c.dst().spec().bytes_per_token().get(), c.dst().spec().bytes_per_state().get());
            out.push_str(&format!(", {} B a token", show::count(token)));
            if state > 0 {
                out.push_str(&format!(" and {} B a state", show::count(state)));
            }
            return out;
        }
        let (faults, differences) = (self.faults.len(), self.differences.len());
        if faults > 0 {
            return format!("NOT compatible: {} in the descriptions", show::number_of(faults, "fault"));
        }
        format!("NOT compatible: {}", show::number_of(differences, "mismatch"))
    }

    /// Items that only the source has, and items that only the destination has, of compatible engines.
    fn ignored(&self) -> [Vec<Name>; 2] {
        let Some(c) = &self.compatible else {
            return [Vec::new(), Vec::new()];
        };
        let (src, dst) = (c.src().spec(), c.dst().spec());
        let only = |these: &[Item], find: &dyn Fn(&Name) -> bool| {
            these.iter().map(|i| i.name.clone()).filter(|name| !find(name)).collect()
        };
        [only(src.items(), &|n| dst.find(n).is_some()), only(dst.items(), &|n| src.find(n).is_some())]
    }

    /// The outcome as the module's text describes it.
    pub(crate) fn json(&self, command: &str) -> Value {
        let fault = |f: &Fault| {
            let key = if f.key.is_empty() { Value::Null } else { json!(f.key) };
            json!({"side": f.side, "file": f.file, "line": f.line, "key": key, "message": f.message})
        };
        let difference = |d: &Difference| {
            json!({
                "item": d.item.as_str(), "field": d.field, "component": d.component.as_ref().map(Name::as_str),
                "source": d.source, "destination": d.destination, "change": d.change, "reason": d.reason,
            })
        };
        let ignored = self.ignored().map(|list| list.iter().map(Name::to_string).collect::<Vec<_>>());
        json!({
            "command": command,
            "compatible": self.compatible.is_some(),
            "source": self.source.as_ref().map(Engine::json),
            "destination": self.destination.as_ref().map(Engine::json),
            "faults": self.faults.iter().map(fault).collect::<Vec<_>>(),
            "mismatches": self.differences.iter().map(difference).collect::<Vec<_>>(),
            "ignored": {"source": ignored[0], "destination": ignored[1]},
        })
    }
}

impl Engine {
    fn row(&self, side: &str) -> Vec<String> {
        let (d, m) = (&self.description, &self.manifest);
        let mut sizes: Vec<String> = Vec::new();
        for group in m.groups().iter().filter(|g| g.block_tokens.get() > 0) {
            sizes.push(show::count(group.block_tokens.get()));
        }
        sizes.dedup();
        let blocks = match sizes.as_slice() {
            [] => show::layout(&d.layout),
            sizes => format!("{} tokens, {}", sizes.join(" and "), show::layout(&d.layout)),
        };
        let options = engine::options(&d.options);
        let state = m.spec().bytes_per_state().get();
        vec![
            side.into(),
            self.file.clone(),
            if options.is_empty() { d.model.name().into() } else { format!("{} ({options})", d.model.name()) },
            d.shape.to_string(),
            m.ranks().len().to_string(),
            m.spec().items().len().to_string(),
            format!("{} B", show::count(m.spec().bytes_per_token().get())),
            if state > 0 { format!("{} B", show::count(state)) } else { "-".into() },
            blocks,
        ]
    }

    /// The groups, where there is more to say of them than that all items share one table.
    fn groups_text(&self, side: &str) -> Option<String> {
        let m = &self.manifest;
        if m.groups().len() < 2 {
            return None;
        }
        let row = |id: GroupId| {
            let group = m.groups().get(id.index())?;
            let state = m.is_state(id);
            let keeps = if state { "states".to_owned() } else { list(&retentions(m, id)) };
            let tokens = if state { "-".into() } else { show::count(group.block_tokens.get()) };
            let names = group.items.iter().filter_map(|&i| m.spec().get(i)).map(|i| i.name.as_str());
            let blocks = show::count(m.blocks(id).get().into());
            Some(vec![group.name.to_string(), keeps, blocks, tokens, group.items.len().to_string(), show::names(names)])
        };
        let rows: Vec<Vec<String>> = blocks::groups(m).filter_map(row).collect();
        let headings = [&format!("{side} group"), "keeps", "blocks or slots", "tokens a block", "items", ""];
        let mut out = show::table("", &headings, &rows);
        if blocks::shares_memory(m) {
            out.push_str("these groups share memory: a block id is in use by one of them at a time\n");
        }
        Some(out)
    }

    fn json(&self) -> Value {
        let (d, m) = (&self.description, &self.manifest);
        let groups = blocks::groups(m).zip(m.groups()).map(|(id, g)| {
            json!({
                "name": g.name.as_str(), "kind": if m.is_state(id) { "state" } else { "paged" }, "items": g.items.len(),
                "retention": retentions(m, id).iter().map(Retention::to_string).collect::<Vec<_>>(),
                "block_tokens": g.block_tokens.get(), "blocks": m.blocks(id).get(),
            })
        });
        json!({
            "file": self.file,
            "name": d.name,
            "model": d.model.name(),
            "parallel": d.shape.to_string(),
            "ranks": m.ranks().len(),
            "items": m.spec().items().len(),
            "bytes_per_token": m.spec().bytes_per_token().get(),
            "bytes_per_state": m.spec().bytes_per_state().get(),
            "digest": m.digest().to_string(),
            "share_memory": blocks::shares_memory(m),
            "groups": groups.collect::<Vec<_>>(),
        })
    }
}

/// What the items of a group keep, each kind once.
fn retentions(m: &Manifest, group: GroupId) -> Vec<Retention> {
    let mut out: Vec<Retention> = blocks::retentions(m, group).collect();
    out.sort_unstable();
    out.dedup();
    out
}

fn list<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// What stands between two engines, as the command tells it.
pub(crate) fn mismatches_text(found: &Mismatches) -> String {
    differences::text(&found.0.iter().map(differences::of).collect::<Vec<_>>())
}

fn faults_of(side: &'static str, engine: &Named, error: &DescribeError) -> Vec<Fault> {
    let plain = |text: &str| Fault {
        side,
        file: engine.to_string(),
        line: None,
        key: String::new(),
        message: text.into(),
        text: text.into(),
    };
    match error {
        DescribeError::Input(InputErrors(list)) | DescribeError::Model(ModelError::Input(InputErrors(list))) => {
            let fault = |e: &kvferry_models::InputError| Fault {
                side,
                file: e.file.clone(),
                line: e.line,
                key: e.key.clone(),
                message: e.fault.to_string(),
                text: e.to_string(),
            };
            list.iter().map(fault).collect()
        }
        other => other.to_string().lines().map(plain).collect(),
    }
}
