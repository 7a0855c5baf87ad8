//! The engine description's TOML.

use std::collections::BTreeMap;
use std::path::Path;

use kvferry_geometry::layout::{ComponentOrder, LayoutStyle, Rows, StateOrder, TokenOrder};
use kvferry_geometry::spec::{MAX_ITEMS, MAX_ROWS, MAX_SPAN};
use kvferry_geometry::units::Bytes;

use crate::describe::{
    DEFAULT_BLOCK_SIZE, DescribeError, EngineDescription, MAX_BLOCK_SIZE, MAX_BLOCKS, Origin, Slots,
};
use crate::dtype::{Dtype, IndexerDtype, KvDtype, Scales};
use crate::error::{Faults, InputFault};
use crate::grouping::{GroupRule, Grouping, RetentionKind};
use crate::items::{ModelOptions, MtpLayers};
use crate::model::{MAX_LAYERS, Model, ModelError};
use crate::shape::Shape;
use crate::stages::StageLayers;
use crate::tree::{Node, Section, Value, clip};
use crate::{config, toml_tree};

const KEYS: &[&str] = &[
    "name",
    "model",
    "kv_dtype",
    "draft_kv_dtype",
    "scales",
    "scale_block",
    "indexer",
    "conv_dtype",
    "state_dtype",
    "layers",
    "mtp",
    "draft",
    "parallel",
    "whole",
    "block_size",
    "kernel_block",
    "blocks",
    "slots",
    "slots_per_request",
    "layout",
    "groups",
    "group",
];
const PARALLEL_KEYS: &[&str] = &["tp", "pp", "dcp", "pcp", "pcp_mode", "interleave", "stages"];
const GROUP_KEYS: &[&str] =
    &["name", "items", "retention", "split", "block_size", "kernel_block", "blocks", "slots", "layout"];
const LAYOUT_KEYS: &[&str] =
    &["style", "order", "components", "rows", "padding", "share", "state_order", "scratch_rows"];
const MODEL_KEYS: &[&str] = &["preset", "file", "config"];
/// The most groups, stages or drafts that are listed.
const MAX_LIST: usize = 1024;
const LAYOUTS: &str = "hnd, nhd, planes or packed-rows";

/// A layout by its short name: `hnd`, `nhd`, `planes` (K and V planes over all blocks, HND inside) or `packed-rows` (a
/// row for each block that holds every item of a group, HND inside).
///
/// ```
/// use kvferry_geometry::layout::LayoutStyle;
/// assert_eq!(kvferry_models::layout_named("nhd"), Some(LayoutStyle::NHD));
/// ```
#[must_use]
pub fn layout_named(name: &str) -> Option<LayoutStyle> {
    match name {
        "hnd" => Some(LayoutStyle::HND),
        "nhd" => Some(LayoutStyle::NHD),
        "planes" => Some(LayoutStyle::PLANES),
        "packed-rows" => Some(LayoutStyle::PACKED_ROWS),
        _ => None,
    }
}

pub(crate) fn read(file: &str, text: &str, dir: Option<&Path>) -> Result<EngineDescription, DescribeError> {
    let root = toml_tree::parse(file, text)?;
    let mut faults = Faults::new(file);
    let Value::Table(table) = &root.value else { return Ok(faults.finish(None)?) };
    let top = Section::new(table, "", 1);
    top.only(KEYS, &mut faults);
    let mut model_fault = None;
    let model = model(top, dir, &mut faults, &mut model_fault);
    let drafts = drafts(top, dir, &mut faults, &mut model_fault);
    let (shape, stages) = parallel(top, &mut faults);
    let mut options = options(top, &mut faults);
    options.drafts = drafts;
    let whole = texts(top, "whole", &mut faults);
    let block_size = top.count("block_size", MAX_BLOCK_SIZE, &mut faults);
    let kernel_block = top.count("kernel_block", MAX_BLOCK_SIZE, &mut faults);
    let blocks = top.count("blocks", MAX_BLOCKS, &mut faults);
    let slots = Slots {
        count: top.count("slots", MAX_BLOCKS, &mut faults),
        per_request: top.count("slots_per_request", MAX_BLOCKS, &mut faults).unwrap_or(1),
    };
    let layout = layout(top, &mut faults);
    let grouping = grouping(top, &mut faults);
    let name = top.text("name", &mut faults).map(clip);
    match model_fault {
        Some(ModelError::Input(errors)) => faults.extend(errors),
        Some(other) if faults.is_empty() => return Err(other.into()),
        Some(other) => top.push("model", InputFault::Contradiction(other.to_string()), &mut faults),
        None => {}
    }
    let described = model.map(|model| {
        let mut out = EngineDescription::new(model, shape);
        out.name = name.unwrap_or_else(|| file.into());
        out.options = options;
        out.stages = stages;
        out.whole = whole;
        out.block_size = block_size.unwrap_or(out.block_size);
        out.kernel_block = kernel_block;
        out.blocks = blocks;
        out.slots = slots;
        out.layout = layout.unwrap_or(out.layout);
        out.grouping = grouping;
        out.origin = Origin { file: Some(file.into()), lines: lines(&root) };
        out
    });
    Ok(faults.finish(described)?)
}

fn options(top: Section<'_>, faults: &mut Faults) -> ModelOptions {
    const DTYPES: &str = "bf16, fp16 or fp32";
    ModelOptions {
        kv_dtype: top.word("kv_dtype", KvDtype::KNOWN, KvDtype::parse, faults).unwrap_or_default(),
        draft_kv_dtype: top.word("draft_kv_dtype", KvDtype::KNOWN, KvDtype::parse, faults),
        scales: scales(top, faults),
        indexer: top.word("indexer", IndexerDtype::KNOWN, IndexerDtype::parse, faults).unwrap_or_default(),
        conv_dtype: top.word("conv_dtype", DTYPES, Dtype::parse_short, faults),
        state_dtype: top.word("state_dtype", DTYPES, Dtype::parse_short, faults),
        layers: top.count("layers", MAX_LAYERS, faults),
        mtp: mtp(top, faults),
        drafts: Vec::new(),
    }
}

/// `true`, `false` or how many.
fn mtp(top: Section<'_>, faults: &mut Faults) -> MtpLayers {
    match top.get("mtp").map(|n| &n.value) {
        None | Some(Value::Bool(false)) => MtpLayers::None,
        Some(Value::Bool(true)) => MtpLayers::All,
        Some(Value::Integer(_)) => top.count("mtp", MAX_LAYERS, faults).map_or(MtpLayers::None, MtpLayers::First),
        Some(other) => {
            let (expected, got) = ("true, false or a whole number", other.describe());
            top.push("mtp", InputFault::WrongType { expected, got }, faults);
            MtpLayers::None
        }
    }
}

/// The scales' kind, and the tokens that one covers where that is a block.
fn scales(top: Section<'_>, faults: &mut Faults) -> Scales {
    let block = top.count("scale_block", MAX_SPAN, faults);
    let size = || top.count("block_size", MAX_BLOCK_SIZE, &mut Faults::new("")).unwrap_or(DEFAULT_BLOCK_SIZE);
    let tokens = block.unwrap_or_else(size);
    let parse = |word: &str| match word {
        "none" => Some(Scales::None),
        "per-token-head" => Some(Scales::PerTokenHead),
        "per-block-head" => Some(Scales::PerBlockHead(tokens)),
        "per-block" => Some(Scales::PerBlock(tokens)),
        _ => None,
    };
    let known = "none, per-token-head, per-block-head or per-block";
    let scales = top.word("scales", known, parse, faults).unwrap_or_default();
    if block.is_some() && matches!(scales, Scales::None | Scales::PerTokenHead) {
        let text =
            "is the tokens that one scale covers, but scales are neither per-block-head nor per-block; leave it out";
        top.push("scale_block", InputFault::Contradiction(text.into()), faults);
    }
    scales
}

/// The line of every key, by its path; entries of lists by their number.
fn lines(root: &Node) -> BTreeMap<String, u32> {
    fn walk(node: &Node, path: &str, depth: u32, out: &mut BTreeMap<String, u32>) {
        let dot = if path.is_empty() { "" } else { "." };
        match &node.value {
            Value::Table(table) if depth < 4 => {
                for (key, (line, value)) in &table.0 {
                    let path = format!("{path}{dot}{key}");
                    out.insert(path.clone(), *line);
                    walk(value, &path, depth + 1, out);
                }
            }
            Value::List(list) if depth < 4 => {
                for (i, value) in list.iter().enumerate().take(MAX_LIST) {
                    let path = format!("{path}{dot}{i}");
                    out.insert(path.clone(), value.line);
                    walk(value, &path, depth + 1, out);
                }
            }
            _ => {}
        }
    }
    let mut out = BTreeMap::new();
    if let Value::Table(table) = &root.value {
        for key in ["model", "parallel", "group", "layout"] {
            if let Some((line, node)) = table.0.get(key) {
                out.insert(key.into(), *line);
                if key != "model" {
                    walk(node, key, 1, &mut out);
                }
            }
        }
        for (key, (line, _)) in &table.0 {
            out.insert(key.clone(), *line);
        }
    }
    out
}

fn model(top: Section<'_>, dir: Option<&Path>, faults: &mut Faults, fault: &mut Option<ModelError>) -> Option<Model> {
    let Some(node) = top.get("model") else {
        top.push("model", InputFault::Missing("name a preset, or a config.json"), faults);
        return None;
    };
    one_model(node, "model", top, dir, faults, fault)
}

/// A model by preset name, file or inline configuration.
fn one_model(
    node: &Node,
    key: &str,
    top: Section<'_>,
    dir: Option<&Path>,
    faults: &mut Faults,
    fault: &mut Option<ModelError>,
) -> Option<Model> {
    let from_file = |name: &str| match dir {
        Some(dir) => Model::from_file(dir.join(name)),
        None => Model::from_file(name),
    };
    let loaded = match &node.value {
        Value::Text(name) if name.ends_with(".json") => from_file(name),
        Value::Text(name) => Model::preset(name),
        Value::Table(table) => {
            let path = format!("{key}.");
            let section = Section::new(table, &path, node.line);
            section.only(MODEL_KEYS, faults);
            let stated = MODEL_KEYS.iter().filter(|k| section.get(k).is_some()).count();
            if stated != 1 {
                let text = format!("states {stated} of {}; state exactly one", MODEL_KEYS.join(", "));
                faults.push(node.line, key, InputFault::Contradiction(text));
                return None;
            }
            if let Some(config) = section.get("config") {
                config::from_node(faults.file(), config, &format!("{key}.config."))
            } else if let Some(name) = section.text("preset", faults) {
                Model::preset(name)
            } else {
                from_file(section.text("file", faults)?)
            }
        }
        other => {
            let expected = "a preset's name, a file's name that ends in .json, or a table";
            top.push(key, InputFault::WrongType { expected, got: other.describe() }, faults);
            return None;
        }
    };
    match loaded {
        Ok(model) => Some(model),
        Err(ModelError::UnknownPreset { name, known }) => {
            let known = format!("{}; or a file's name that ends in .json", known.join(", "));
            faults.push(node.line, key, InputFault::UnknownValue { got: name, known });
            None
        }
        Err(error) => {
            fault.get_or_insert(error);
            None
        }
    }
}

fn drafts(top: Section<'_>, dir: Option<&Path>, faults: &mut Faults, fault: &mut Option<ModelError>) -> Vec<Model> {
    let Some(node) = top.get("draft") else { return Vec::new() };
    let list = match &node.value {
        Value::List(list) => list.as_slice(),
        _ => core::slice::from_ref(node),
    };
    if list.len() > 16 {
        let (got, limit) = (list.len() as u64, 16);
        top.push("draft", InputFault::TooLarge { what: "the number of drafts", got, limit }, faults);
        return Vec::new();
    }
    list.iter().filter_map(|n| one_model(n, "draft", top, dir, faults, fault)).collect()
}

fn parallel(top: Section<'_>, faults: &mut Faults) -> (Shape, Option<Vec<StageLayers>>) {
    let mut shape = Shape::default();
    let table = match top.get("parallel").map(|n| &n.value) {
        None => return (shape, None),
        Some(Value::Table(table)) => table,
        Some(Value::Text(text)) => {
            match text.parse() {
                Ok(parsed) => shape = parsed,
                Err(error) => top.push("parallel", InputFault::Contradiction(format!("{error}")), faults),
            }
            return (shape, None);
        }
        Some(other) => {
            let (expected, got) = ("a table, or a text like \"tp=4,pp=2\"", other.describe());
            top.push("parallel", InputFault::WrongType { expected, got }, faults);
            return (shape, None);
        }
    };
    let section = Section::new(table, "parallel.", top.line_of("parallel"));
    section.only(PARALLEL_KEYS, faults);
    for (key, limit) in Shape::LIMITS {
        if let Some(value) = section.count(key, limit, faults) {
            shape.set(key, value);
        }
    }
    if let Some(mode) = section.word("pcp_mode", "shard or replicate", Shape::mode, faults) {
        shape.pcp_mode = mode;
    }
    let stages = stages(section, faults);
    if let (Some(stages), None) = (&stages, section.get("pp")) {
        shape.pp = u32::try_from(stages.len()).unwrap_or(u32::MAX);
    }
    (shape, stages)
}

fn stages(section: Section<'_>, faults: &mut Faults) -> Option<Vec<StageLayers>> {
    let list = section.list("stages", faults)?;
    if list.is_empty() || list.len() > MAX_LIST {
        let (got, max) = (list.len().to_string(), MAX_LIST as u64);
        section.push("stages", InputFault::OutOfRange { got, min: 1, max }, faults);
        return None;
    }
    let mut out = Vec::new();
    for node in list {
        let parsed = match &node.value {
            Value::Text(text) => StageLayers::parse(text),
            _ => None,
        };
        let Some(stage) = parsed else {
            let expected = "a text of layers like \"0-7, 16-23\" for each stage";
            let fault = InputFault::WrongType { expected, got: node.value.describe() };
            faults.push(node.line, section.key("stages"), fault);
            return None;
        };
        out.push(stage);
    }
    Some(out)
}

fn layout(section: Section<'_>, faults: &mut Faults) -> Option<LayoutStyle> {
    let table = match section.get("layout").map(|n| &n.value) {
        None => return None,
        Some(Value::Table(table)) => table,
        Some(_) => return section.word("layout", LAYOUTS, layout_named, faults),
    };
    let path = format!("{}.", section.key("layout"));
    let inner = Section::new(table, &path, section.line_of("layout"));
    inner.only(LAYOUT_KEYS, faults);
    let mut style = inner.word("style", LAYOUTS, layout_named, faults).unwrap_or(LayoutStyle::HND);
    let order = |word: &str| match word {
        "hnd" => Some(TokenOrder::HeadsOuter),
        "nhd" => Some(TokenOrder::TokensOuter),
        _ => None,
    };
    let components = |word: &str| match word {
        "packed" => Some(ComponentOrder::Packed),
        "in-block" => Some(ComponentOrder::InBlock),
        "planes" => Some(ComponentOrder::Planes),
        _ => None,
    };
    let rows = |word: &str| match word {
        "per-item" => Some(Rows::PerItem),
        "packed" => Some(Rows::Packed),
        _ => None,
    };
    style.order = inner.word("order", "hnd or nhd", order, faults).unwrap_or(style.order);
    style.components =
        inner.word("components", "packed, in-block or planes", components, faults).unwrap_or(style.components);
    style.rows = inner.word("rows", "per-item or packed", rows, faults).unwrap_or(style.rows);
    if let Some(padding) = inner.number("padding", 0, 1 << 30, faults) {
        style.padding = Bytes::new(padding.into());
    }
    let state_order = |word: &str| match word {
        "dim-first" => Some(StateOrder::UnitsOuter),
        "state-first" => Some(StateOrder::RowsOuter),
        _ => None,
    };
    style.share = inner.flag("share", faults).unwrap_or(style.share);
    style.state_order =
        inner.word("state_order", "dim-first or state-first", state_order, faults).unwrap_or(style.state_order);
    style.scratch_rows = inner.number("scratch_rows", 0, MAX_ROWS, faults).unwrap_or(style.scratch_rows);
    Some(style)
}

fn grouping(top: Section<'_>, faults: &mut Faults) -> Grouping {
    let by = |word: &str| match word {
        "by-shape" => Some(Grouping::ByShape),
        "by-retention" => Some(Grouping::ByRetention),
        "by-kind" => Some(Grouping::ByKind),
        "equal-layers" => Some(Grouping::EqualLayers),
        _ => None,
    };
    let known = "by-shape, by-retention, by-kind or equal-layers, or list [[group]]s";
    let word = top.word("groups", known, by, faults);
    let Some(list) = top.list("group", faults) else { return word.unwrap_or_default() };
    if word.is_some() {
        let line = top.line_of("groups");
        let text = format!("lists groups, but groups on line {line} says how to make them; remove one");
        top.push("group", InputFault::Contradiction(text), faults);
    }
    if list.is_empty() || list.len() > MAX_LIST {
        let (got, max) = (list.len().to_string(), MAX_LIST as u64);
        top.push("group", InputFault::OutOfRange { got, min: 1, max }, faults);
        return Grouping::ByShape;
    }
    let mut rules: Vec<GroupRule> = Vec::new();
    for (i, node) in list.iter().enumerate() {
        let path = format!("group.{i}.");
        let Value::Table(table) = &node.value else {
            let got = node.value.describe();
            faults.push(node.line, format!("group.{i}"), InputFault::WrongType { expected: "a table", got });
            continue;
        };
        let section = Section::new(table, &path, node.line);
        section.only(GROUP_KEYS, faults);
        let kind = |word: &str| match word {
            "full" => Some(RetentionKind::Full),
            "window" => Some(RetentionKind::Window),
            "chunk" => Some(RetentionKind::Chunk),
            "ring" => Some(RetentionKind::Ring),
            "state" => Some(RetentionKind::State),
            _ => None,
        };
        let rule = GroupRule {
            name: section.text("name", faults).map_or_else(|| i.to_string(), clip),
            items: texts(section, "items", faults),
            retention: section.word("retention", "full, window, chunk, ring or state", kind, faults),
            split: section.count("split", u32::try_from(MAX_ITEMS).unwrap_or(u32::MAX), faults),
            block_size: section.count("block_size", MAX_BLOCK_SIZE, faults),
            kernel_block: section.count("kernel_block", MAX_BLOCK_SIZE, faults),
            blocks: section.count("blocks", MAX_BLOCKS, faults),
            slots: section.count("slots", MAX_BLOCKS, faults),
            layout: layout(section, faults),
        };
        if rules.iter().any(|r| r.name == rule.name) {
            let text = format!("{:?} is the name of an earlier group; names must differ", rule.name);
            section.push("name", InputFault::Contradiction(text), faults);
        }
        rules.push(rule);
    }
    Grouping::Listed(rules)
}

/// A text, or a list of texts.
fn texts(section: Section<'_>, key: &str, faults: &mut Faults) -> Vec<String> {
    let Some(node) = section.get(key) else { return Vec::new() };
    let list = match &node.value {
        Value::List(list) => list.as_slice(),
        _ => core::slice::from_ref(node),
    };
    let mut out = Vec::new();
    for node in list.iter().take(MAX_LIST) {
        match &node.value {
            Value::Text(text) => out.push(text.clone()),
            other => {
                let fault = InputFault::WrongType { expected: "a text or a list of texts", got: other.describe() };
                faults.push(node.line, section.key(key), fault);
            }
        }
    }
    out
}
