//! `cargo xtask check P D`: can engine D take over the cache of engine P?
//!
//! Each is a description's file, or parallel sizes of `--model`. Exits 0 if it can, else 1, and lists everything that stands in the
//! way: the faults of either description, then what differs between the two, with both values and what to change.
//!
//! With `--json` it prints one object:
//! - `command` (`"check"`), `compatible` (bool);
//! - `source`, `destination`: null where the description is faulty, else `file`, `name`, `model`, `parallel`, `ranks`,
//!   `items`, `bytes_per_token`, `bytes_per_state`, `digest`, `share_memory` (whether groups lie in the same memory), and `groups`,
//!   each with `name`, `kind` (`"paged"` or `"state"`), `items` (count), `retention` (a list; empty for states), `block_tokens`
//!   (0 for states), `blocks` (slots, of states);
//! - `faults`: of the descriptions; each has `side` (`"source"` or `"destination"`), `file`, `line` and `key` (null where
//!   there is none), `message`;
//! - `mismatches`: between them; each has `item`, `field` (`"item"`, `"kind"`, `"count"`, `"retention"`, `"components"`, `"width"`,
//!   `"encoding"`, `"coverage"`, `"shared"`, `"tokens"` or `"other"`), `component` (or part; null where it is the whole item),
//!   `source`, `destination`, `change`;
//! - `ignored`: `source`, `destination`: items that only that side has and that were let pass.

use std::process::ExitCode;
use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatch};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::HeadRange;
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{GroupId, Name};
use kvferry_models::{DescribeError, EngineDescription, InputErrors, ModelError};
use serde_json::{Value, json};

use crate::engine::{self, IgnoreArgs, ModelArgs, Named};
use crate::{blocks, show};

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

/// Runs the command.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (text, ok) = report(&args);
    print!("{text}");
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the command prints, and whether the engines are compatible.
fn report(args: &Args) -> (String, bool) {
    let outcome = Outcome::new(args, |_| Ok(()));
    let text = if args.json { format!("{:#}\n", outcome.json("check")) } else { outcome.text() };
    (text, outcome.compatible.is_some())
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

/// One thing that differs.
struct Difference {
    item: Name,
    field: &'static str,
    component: Option<Name>,
    source: String,
    destination: String,
    change: &'static str,
}

/// All that can be said of two descriptions.
pub(crate) struct Outcome {
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
        let mut out = Self { source, destination, compatible: None, faults, differences: Vec::new() };
        if let (Some(src), Some(dst)) = (&out.source, &out.destination) {
            match Compatible::with(src.manifest.clone(), dst.manifest.clone(), args.ignore.options()) {
                Err(found) => out.differences = found.0.iter().map(difference).collect(),
                Ok(compatible) => match PeerMap::new(&compatible, 0) {
                    Ok(_) => out.compatible = Some(compatible),
                    Err(error) => out.differences.push(Difference {
                        item: src.manifest.spec().items().first().map_or_else(|| "".into(), |i| i.name.clone()),
                        field: "tokens",
                        component: None,
                        source: src.description.shape.to_string(),
                        destination: format!("{}: {error}", dst.description.shape),
                        change: "choose dcp, pcp and interleave that divide each other",
                    }),
                },
            }
        }
        out
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
        let mut told: Vec<(&Difference, Vec<&str>)> = Vec::new();
        for d in &self.differences {
            let alike = |o: &Difference| {
                (o.field, &o.component, &o.source, &o.destination, o.change)
                    == (d.field, &d.component, &d.source, &d.destination, d.change)
            };
            match told.iter_mut().find(|t| alike(t.0)) {
                Some(t) => t.1.push(d.item.as_str()),
                None => told.push((d, vec![d.item.as_str()])),
            }
        }
        for (d, items) in &told {
            let count = show::number_of(items.len(), "item");
            out.push_str(&format!("{} differs in {count}: {}\n", d.what(), show::names(items.iter().copied())));
            out.push_str(&format!("    source       {}\n    destination  {}\n", d.source, d.destination));
            out.push_str(&format!("    change       {}\n", d.change));
        }
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
                "source": d.source, "destination": d.destination, "change": d.change,
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

fn difference(m: &Mismatch) -> Difference {
    const MODEL: &str = "describe one model on both sides";
    let item = m.item().clone();
    let differs = |field, component: Option<&Name>, source: String, destination: String, change| Difference {
        item: item.clone(),
        field,
        component: component.cloned(),
        source,
        destination,
        change,
    };
    let whole = |field, source, destination, change| differs(field, None, source, destination, change);
    match m {
        Mismatch::MissingAtSource { shape, .. } => whole(
            "item",
            "doesn't have it".into(),
            shape.clone(),
            "give both the same model, layers, mtp and draft; or ignore what only the destination has (--ignore-destination-only)",
        ),
        Mismatch::MissingAtDestination { shape, .. } => whole(
            "item",
            shape.clone(),
            "doesn't have it".into(),
            "give both the same model, layers, mtp and draft; or ignore what only the source has (--ignore-source-only)",
        ),
        Mismatch::Kind { src, dst, .. } => whole("kind", src.clone(), dst.clone(), MODEL),
        Mismatch::Count { what, src, dst, .. } => {
            whole("count", format!("{} {what}", show::count(*src)), format!("{} {what}", show::count(*dst)), MODEL)
        }
        Mismatch::Retention { src, dst, .. } => {
            let change = "describe one model, with one window or chunk, on both sides";
            whole("retention", src.to_string(), dst.to_string(), change)
        }
        Mismatch::Components { src, dst, .. } => whole(
            "components",
            list(src),
            list(dst),
            "use one kind of attention, one indexer type and one kind of scales on both sides",
        ),
        Mismatch::Width { component, src, dst, .. } => {
            let change = "use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides";
            differs("width", Some(component), src.to_string(), dst.to_string(), change)
        }
        Mismatch::Encoding { component, src, dst, .. } => {
            let change = "use one type (kv_dtype, indexer, conv_dtype, state_dtype) on both sides; nothing is converted on the way";
            differs("encoding", Some(component), src.to_string(), dst.to_string(), change)
        }
        Mismatch::Coverage { component, src, dst, .. } => {
            let change = "use one kind of scales and one scale_block on both sides; a scale can't be split or joined";
            differs("coverage", Some(component), src.clone(), dst.clone(), change)
        }
        Mismatch::SharedValue { component, src, dst, .. } => {
            let heads = |list_of: &[HeadRange]| format!("ranks hold heads {}", list(list_of));
            let change =
                "use one tensor-parallel size on both sides, or scales for each head (per-block-head, per-token-head)";
            differs("shared", Some(component), heads(src), heads(dst), change)
        }
        other => whole("other", other.to_string(), other.to_string(), "make both sides agree"),
    }
}

impl Difference {
    /// What differs, in words.
    fn what(&self) -> String {
        let what = match self.field {
            "item" => "the item",
            "kind" => "the kind of cache",
            "count" => "a count",
            "retention" => "the tokens kept",
            "components" => "the list of components or parts",
            "width" => "the width of a value",
            "coverage" => "what one value covers",
            "shared" => "the cut of the heads that share one value",
            "encoding" => "the encoding",
            "tokens" => "the dealing out of tokens",
            _ => "something",
        };
        match &self.component {
            Some(component) => format!("{what} of {component}"),
            None => what.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn args(source: &str, destination: &str, json: bool) -> Args {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples");
        let engine = |name: &str| {
            if name.contains('=') { name.parse().unwrap() } else { Named::File(dir.join(name)) }
        };
        let (model, ignore) = (ModelArgs::default(), IgnoreArgs::default());
        Args { source: engine(source), destination: engine(destination), model, ignore, json }
    }

    fn text_of(args: &Args) -> String {
        report(args).0
    }

    fn exit(args: Args) -> bool {
        // An exit code can't be compared otherwise.
        format!("{:?}", run(args).unwrap()) == format!("{:?}", ExitCode::SUCCESS)
    }

    #[test]
    fn engines_of_one_model_are_compatible_whatever_their_shapes() {
        let (text, ok) = report(&args("prefill-tp4-pp2.toml", "decode-tp2.toml", false));
        assert!(ok, "{text}");
        assert!(text.ends_with("compatible: 32 items, 131,072 B a token\n"), "{text}");
        assert!(text.contains("tp=4,pp=2") && text.contains("64 tokens, nhd"), "{text}");
        assert!(exit(args("prefill-tp4-pp2.toml", "decode-tp2.toml", true)));
    }

    #[test]
    fn every_mismatch_is_listed_with_both_values_and_what_to_change() {
        let (text, ok) = report(&args("prefill-tp4-pp2.toml", "decode-wrong.toml", false));
        assert!(!ok);
        let expected = "\
the width of a value of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       256 B
    destination  128 B
    change       use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides
the encoding of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       bf16
    destination  fp8_e4m3
    change       use one type (kv_dtype, indexer, conv_dtype, state_dtype) on both sides; nothing is converted on the way
";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("the item differs in 2 items: model.layers.{30, 31}.self_attn.attn\n"), "{text}");
        assert!(text.ends_with("NOT compatible: 122 mismatches\n"), "{text}");
        assert!(!exit(args("prefill-tp4-pp2.toml", "decode-wrong.toml", true)));
    }

    #[test]
    fn the_json_has_every_mismatch_by_itself() {
        let (text, _) = report(&args("prefill-tp4-pp2.toml", "decode-wrong.toml", true));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["compatible"], false);
        assert_eq!(value["mismatches"].as_array().unwrap().len(), 122);
        let first = json!({
            "item": "model.layers.0.self_attn.attn", "field": "width", "component": "k", "source": "256 B",
            "destination": "128 B",
            "change": "use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides",
        });
        assert_eq!(value["mismatches"][0], first);
        assert_eq!(value["source"]["groups"][0]["block_tokens"], 16);
        assert_eq!(value["source"]["bytes_per_token"], 131_072);
    }

    #[test]
    fn faults_of_both_descriptions_are_told_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let source = write("p.toml", "model = \"llama-3.1-8b\"\nparallel = \"tp=2,dcp=2\"\n");
        let destination = write("d.toml", "model = \"jamba-v0.1\"\ndraft = \"none\"\n");
        let mut a = args("tp=1", "tp=1", true);
        (a.source, a.destination) = (Named::File(source), Named::File(destination));
        let (text, ok) = report(&a);
        assert!(!ok);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["source"], &value["destination"]), (&Value::Null, &Value::Null));
        let faults = value["faults"].as_array().unwrap();
        assert_eq!(faults.len(), 4, "{text}");
        assert_eq!((&faults[3]["side"], &faults[3]["line"]), (&json!("destination"), &json!(2)), "{text}");
        a.destination = Named::File(write("d.toml", "model = \"llama-3.1-8b\"\n\nblock_size = 0\n"));
        a.json = false;
        let text = text_of(&a);
        assert!(
            text.contains("destination: ") && text.contains("d.toml:3: block_size: is 0; it must be 1 to"),
            "{text}"
        );
        assert!(text.contains("lower dcp, or raise tp to (KV heads) x 2"), "{text}");
        assert!(text.ends_with("NOT compatible: 4 faults in the descriptions\n"), "{text}");
    }

    #[test]
    fn a_missing_file_is_a_fault_of_its_side() {
        let (text, ok) = report(&args("prefill-tp4-pp2.toml", "none.toml", false));
        assert!(!ok && text.contains("destination: ") && text.contains("none.toml: cannot be read"), "{text}");
    }
    #[test]
    fn groups_states_and_shared_memory_are_shown() {
        let text = text_of(&args("hybrid-prefill.toml", "hybrid-decode.toml", false));
        assert!(text.ends_with("compatible: 29 items, 6,144 B a token and 49,082,368 B a state\n"), "{text}");
        assert!(text.contains("these groups share memory: a block id is in use by one of them at a time"), "{text}");
        assert!(text.contains("states' rows outside, 3 scratch rows"), "{text}");
        let value: Value =
            serde_json::from_str(&text_of(&args("hybrid-prefill.toml", "hybrid-decode.toml", true))).unwrap();
        assert_eq!(
            (&value["source"]["share_memory"], &value["destination"]["share_memory"]),
            (&json!(true), &json!(false))
        );
        let groups = value["source"]["groups"].as_array().unwrap();
        let states = groups.iter().filter(|g| g["kind"] == "state");
        assert!(states.clone().all(|g| g["block_tokens"] == 0 && g["retention"] == json!([])) && states.count() > 1);
        assert_eq!(value["source"]["bytes_per_state"], 49_082_368);
    }

    #[test]
    fn reasons_are_typed() {
        let field = |mut a: Args, scales: [&str; 2], tokens: u32| {
            let dir = tempfile::tempdir().unwrap();
            let engine = |name: &str, tp: u32, scales: &str| {
                let path = dir.path().join(name);
                let text = format!(
                    "model = \"llama-3.1-8b\"\nkv_dtype = \"fp8\"\nscales = \"{scales}\"\nscale_block = {tokens}\nparallel = \"tp={tp}\"\nblock_size = 64\n"
                );
                std::fs::write(&path, text).unwrap();
                Named::File(path)
            };
            (a.source, a.destination) = (engine("p.toml", 2, scales[0]), engine("d.toml", 4, scales[1]));
            let value: Value = serde_json::from_str(&text_of(&a)).unwrap();
            let first = &value["mismatches"][0];
            (first["field"].clone(), first["source"].clone(), first["destination"].clone())
        };
        let args = || args("tp=1", "tp=1", true);
        let shared = field(args(), ["per-block", "per-block"], 16);
        let ranges = json!("ranks hold heads [0, 2), [2, 4), [4, 6), [6, 8)");
        assert_eq!(shared, (json!("shared"), json!("ranks hold heads [0, 4), [4, 8)"), ranges));
        let coverage = field(args(), ["per-block", "per-block-head"], 16);
        assert_eq!(
            coverage,
            (json!("coverage"), json!("16 entries of all heads of a rank"), json!("16 entries of one head"))
        );
        assert_eq!(field(args(), ["per-block-head", "per-block-head"], 16).0, Value::Null);
    }

    #[test]
    fn what_only_one_side_has_is_let_pass_on_demand() {
        let mut a = args("draft.toml", "tp=4", false);
        a.model.model = Some("kimi-k2.5".into());
        a.model.kv_dtype = Some(kvferry_models::KvDtype::Fp8DsMla);
        assert!(text_of(&a).contains("(--ignore-source-only)"), "{}", text_of(&a));
        a.ignore.ignore_source_only = true;
        let text = text_of(&a);
        assert!(text.ends_with("compatible: 61 items, 1 left alone: draft.model.layers.61.self_attn.attn\n"), "{text}");
    }
}
