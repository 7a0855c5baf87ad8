//! `cargo xtask check P.toml D.toml`: can engine D take over the cache of engine P?
//!
//! Exits 0 if it can, else 1, and lists everything that stands in the way: the faults of either description, then what
//! differs between the two, with both values and what to change.
//!
//! With `--json` it prints one object:
//! - `command` (`"check"`), `compatible` (bool);
//! - `source`, `destination`: null where the description is faulty, else `file`, `name`, `model`, `parallel`, `ranks`,
//!   `items`, `bytes_per_token`, `digest`, and `groups`, each with `name`, `items` (count), `block_tokens`, `blocks`;
//! - `faults`: of the descriptions; each has `side` (`"source"` or `"destination"`), `file`, `line` and `key` (null where
//!   there is none), `message`;
//! - `mismatches`: between them; each has `item`, `field` (`"item"`, `"heads"`, `"retention"`, `"components"`, `"width"`,
//!   `"encoding"`, `"tokens"` or `"other"`), `component` (null where it is the whole item), `source`, `destination`, `change`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatch};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::units::{GroupId, Name};
use kvferry_models::{DescribeError, EngineDescription, InputErrors, ModelError};
use serde_json::{Value, json};

use crate::show;

/// Two engine descriptions.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    /// Description of the engine that has the cache (prefill)
    #[arg(value_name = "P.toml")]
    pub(crate) source: PathBuf,
    /// Description of the engine that takes it over (decode)
    #[arg(value_name = "D.toml")]
    pub(crate) destination: PathBuf,
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
    let outcome = Outcome::new(&args.source, &args.destination, |_, _| {});
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
    /// Reads and compares. `adjust` may fill in what a description leaves open, before its manifest is made; it is told
    /// the side.
    pub(crate) fn new(
        source: &Path,
        destination: &Path,
        adjust: impl Fn(&'static str, &mut EngineDescription),
    ) -> Self {
        let mut faults = Vec::new();
        let mut load = |side, path: &Path| {
            let loaded = EngineDescription::from_file(path).and_then(|mut description| {
                adjust(side, &mut description);
                let manifest = Arc::new(description.manifest()?);
                Ok(Engine { description, manifest, file: path.display().to_string() })
            });
            match loaded {
                Ok(engine) => Some(engine),
                Err(error) => {
                    faults.extend(faults_of(side, path, &error));
                    None
                }
            }
        };
        let (source, destination) = (load("source", source), load("destination", destination));
        let mut out = Self { source, destination, compatible: None, faults, differences: Vec::new() };
        if let (Some(src), Some(dst)) = (&out.source, &out.destination) {
            match Compatible::new(src.manifest.clone(), dst.manifest.clone()) {
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
            let headings = ["", "file", "model", "parallel", "ranks", "items", "a token", "blocks and layout"];
            out.push_str(&show::table("", &headings, &rows));
            out.push('\n');
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
            let count = number_of(items.len(), "item");
            out.push_str(&format!("{} differs in {count}: {}\n", d.what(), show::names(items.iter().copied())));
            out.push_str(&format!("    source       {}\n    destination  {}\n", d.source, d.destination));
            out.push_str(&format!("    change       {}\n", d.change));
        }
        out.push_str(&self.verdict());
        out.push('\n');
        out
    }

    fn verdict(&self) -> String {
        if let (Some(_), Some(src)) = (&self.compatible, &self.source) {
            let spec = src.manifest.spec();
            let (items, bytes) = (spec.items().len(), show::count(spec.bytes_per_token().get()));
            return format!("compatible: {items} items, {bytes} B a token");
        }
        let (faults, differences) = (self.faults.len(), self.differences.len());
        if faults > 0 {
            return format!("NOT compatible: {} in the descriptions", number_of(faults, "fault"));
        }
        format!("NOT compatible: {}", number_of(differences, "mismatch"))
    }

    /// The outcome as the module's text describes it.
    pub(crate) fn json(&self, command: &str) -> Value {
        let fault = |f: &Fault| {
            let key = if f.key.is_empty() { Value::Null } else { json!(f.key) };
            json!({"side": f.side, "file": f.file, "line": f.line, "key": key, "message": f.message})
        };
        let difference = |d: &Difference| {
            json!({
                "item": d.item.as_str(), "field": d.field, "component": d.component.as_ref().map(Name::as_str), "source": d.source, "destination": d.destination,
                "change": d.change,
            })
        };
        json!({
            "command": command,
            "compatible": self.compatible.is_some(),
            "source": self.source.as_ref().map(Engine::json),
            "destination": self.destination.as_ref().map(Engine::json),
            "faults": self.faults.iter().map(fault).collect::<Vec<_>>(),
            "mismatches": self.differences.iter().map(difference).collect::<Vec<_>>(),
        })
    }
}

impl Engine {
    fn row(&self, side: &str) -> Vec<String> {
        let (d, m) = (&self.description, &self.manifest);
        let mut groups: Vec<String> = Vec::new();
        for group in m.groups() {
            groups.push(show::count(group.block_tokens.get()));
        }
        groups.dedup();
        let blocks = format!("{} tokens, {}", groups.join(" and "), show::layout(&d.layout));
        vec![
            side.into(),
            self.file.clone(),
            d.model.name().into(),
            d.shape.to_string(),
            m.ranks().len().to_string(),
            m.spec().items().len().to_string(),
            format!("{} B", show::count(m.spec().bytes_per_token().get())),
            blocks,
        ]
    }

    fn json(&self) -> Value {
        let (d, m) = (&self.description, &self.manifest);
        let groups = (0u32..).map(GroupId::new).zip(m.groups()).map(|(id, g)| {
            json!({
                "name": g.name.as_str(), "items": g.items.len(), "block_tokens": g.block_tokens.get(),
                "blocks": m.blocks(id).get(),
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
            "digest": m.digest().to_string(),
            "groups": groups.collect::<Vec<_>>(),
        })
    }
}

fn faults_of(side: &'static str, path: &Path, error: &DescribeError) -> Vec<Fault> {
    let plain = |text: &str| Fault {
        side,
        file: path.display().to_string(),
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
        DescribeError::Model(ModelError::NotYet(e)) => {
            let (file, line, key) = (e.file.clone(), Some(e.line), e.key.clone());
            vec![Fault { file, line, key, ..plain(&e.to_string()) }]
        }
        other => other.to_string().lines().map(plain).collect(),
    }
}

fn difference(m: &Mismatch) -> Difference {
    const MODEL: &str = "give both the same model, layers, mtp and draft";
    const DTYPE: &str = "use one kv_dtype (or indexer) on both sides; nothing is converted on the way";
    let names = |list: &[Name]| list.iter().map(Name::as_str).collect::<Vec<_>>().join(", ");
    let item = m.item().clone();
    let of_item = |field, source, destination, change| Difference {
        item: item.clone(),
        field,
        component: None,
        source,
        destination,
        change,
    };
    match m {
        Mismatch::MissingAtSource { shape, .. } => of_item("item", "doesn't have it".into(), shape.clone(), MODEL),
        Mismatch::MissingAtDestination { shape, .. } => of_item("item", shape.clone(), "doesn't have it".into(), MODEL),
        Mismatch::Heads { src, dst, .. } => {
            of_item("heads", src.to_string(), dst.to_string(), "describe one model on both sides")
        }
        Mismatch::Retention { src, dst, .. } => {
            let change = "describe one model, with one window or chunk, on both sides";
            of_item("retention", src.to_string(), dst.to_string(), change)
        }
        Mismatch::Components { src, dst, .. } => of_item(
            "components",
            names(src),
            names(dst),
            "use one kind of attention and one indexer type on both sides",
        ),
        Mismatch::Width { component, src, dst, .. } => {
            let change = "use one kv_dtype (or indexer) and one head size on both sides";
            let whole = of_item("width", src.to_string(), dst.to_string(), change);
            Difference { component: Some(component.clone()), ..whole }
        }
        Mismatch::Encoding { component, src, dst, .. } => {
            let whole = of_item("encoding", src.to_string(), dst.to_string(), DTYPE);
            Difference { component: Some(component.clone()), ..whole }
        }
        other => of_item("other", other.to_string(), other.to_string(), "make both sides agree"),
    }
}

impl Difference {
    /// What differs, in words.
    fn what(&self) -> String {
        let what = match self.field {
            "item" => "the item",
            "heads" => "the number of KV heads",
            "retention" => "the tokens kept",
            "components" => "the list of components",
            "width" => "the width for a token and head",
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

/// A count with its noun.
fn number_of(count: usize, noun: &str) -> String {
    let (s, es) = if noun.ends_with("ch") { ("", "es") } else { ("", "s") };
    format!("{count} {noun}{}", if count == 1 { s } else { es })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(source: &str, destination: &str, json: bool) -> Args {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples");
        Args { source: dir.join(source), destination: dir.join(destination), json }
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
the width for a token and head of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       256 B
    destination  128 B
    change       use one kv_dtype (or indexer) and one head size on both sides
the encoding of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       bf16
    destination  fp8_e4m3
    change       use one kv_dtype (or indexer) on both sides; nothing is converted on the way
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
            "destination": "128 B", "change": "use one kv_dtype (or indexer) and one head size on both sides",
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
        let destination = write("d.toml", "model = \"jamba-v0.1\"\n");
        let (text, ok) = report(&Args { source: source.clone(), destination, json: true });
        assert!(!ok);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["source"], &value["destination"]), (&Value::Null, &Value::Null));
        let faults = value["faults"].as_array().unwrap();
        assert_eq!(faults.len(), 4, "{text}");
        assert_eq!((&faults[3]["key"], &faults[3]["line"]), (&json!("attn_layer_period"), &json!(12)));
        let destination = write("d.toml", "model = \"llama-3.1-8b\"\n\nblock_size = 0\n");
        let (text, _) = report(&Args { source, destination, json: false });
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
}
