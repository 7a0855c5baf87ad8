//! A Hugging Face `config.json` turned into layers.
//!
//! Only the keys that decide what is cached are read; a configuration has many others, and those are let be. What is
//! read must be known and free of contradiction: no size is guessed. The two exceptions are the classes' own
//! defaults that published files lean on: Gemma 3's layer pattern, and bf16 where no data type is stated.

use kvferry_geometry::spec::{MAX_HEADS, Retention};
use kvferry_geometry::units::Tokens;

use crate::dtype::Dtype;
use crate::error::{Faults, InputError, InputErrors, InputFault};
use crate::hybrid;
use crate::json;
use crate::mixer::Mixer;
use crate::model::{Attention, ItemNames, KvAuto, Layer, MAX_LAYERS, Model, ModelError, Mtp, StateName};
use crate::tree::{Node, Section, Table, Value, clip};

/// The most values of one head or latent.
const MAX_DIM: u32 = 1 << 16;
/// Gemma 3: every sixth layer is full where the file names no pattern.
const GEMMA3_PATTERN: u32 = 6;

/// Which layers slide, where `layer_types` doesn't say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Window {
    /// None.
    Never,
    /// All, if there is a window.
    All,
    /// With `use_sliding_window`, those from `max_window_layers` on.
    FromLayer,
    /// All but each n-th.
    Pattern,
    /// `layer_types` must say.
    Types,
}

/// What kind of cache a family has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// K and V by heads.
    Heads,
    /// As `Heads`, with sizes of their own for full layers.
    GlobalHeads,
    /// MLA.
    Latent,
    /// MLA with an indexer.
    Indexed,
    /// A hybrid: which layers keep a state, and which. Its attention has heads, or a latent in Kimi Linear.
    Hybrid(hybrid::Rule, Mixer),
}

struct Family {
    model_type: &'static str,
    kind: Kind,
    window: Window,
}

const fn family(model_type: &'static str, kind: Kind, window: Window) -> Family {
    Family { model_type, kind, window }
}

const FAMILIES: &[Family] = &[
    family("llama", Kind::Heads, Window::Never),
    family("mistral", Kind::Heads, Window::All),
    family("qwen3", Kind::Heads, Window::FromLayer),
    family("qwen3_moe", Kind::Heads, Window::FromLayer),
    family("gpt_oss", Kind::Heads, Window::Types),
    family("gemma3_text", Kind::Heads, Window::Pattern),
    family("gemma4_text", Kind::GlobalHeads, Window::Types),
    family("deepseek_v3", Kind::Latent, Window::Never),
    family("deepseek_v32", Kind::Indexed, Window::Never),
    family("kimi_k2", Kind::Latent, Window::Never),
    family("nemotron_h", Kind::Hybrid(hybrid::Rule::Letters, Mixer::NemotronH), Window::Never),
    family("qwen3_next", Kind::Hybrid(hybrid::Rule::Interval, Mixer::Qwen3Next), Window::Never),
    family("kimi_linear", Kind::Hybrid(hybrid::Rule::NumberedFromOne, Mixer::KimiLinear), Window::Never),
    family("jamba", Kind::Hybrid(hybrid::Rule::Period, Mixer::Jamba), Window::Never),
    family("bamba", Kind::Hybrid(hybrid::Rule::Indices, Mixer::Bamba), Window::Never),
    family("falcon_h1", Kind::Hybrid(hybrid::Rule::Both, Mixer::FalconH1), Window::Never),
    family("minimax_text_01", Kind::Hybrid(hybrid::Rule::ZeroOne, Mixer::MiniMax), Window::Never),
];

/// Types that hold the language model's configuration in `text_config`.
const WRAPPERS: &[&str] = &["gemma3", "gemma4", "kimi_k25"];

/// Keys that a wrapper and its `text_config` may both state, and then must agree on.
const SHARED: &[&str] = &[
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "sliding_window",
    "kv_lora_rank",
    "qk_rope_head_dim",
];

/// Reads a text whole.
pub(crate) fn from_json(file: &str, text: &str) -> Result<Model, ModelError> {
    let root = json::parse(file, text)?;
    from_node(file, &root, "")
}

/// Reads a tree; `path` is that of the tree in its file, empty or ending with a dot.
pub(crate) fn from_node(file: &str, root: &Node, path: &str) -> Result<Model, ModelError> {
    let mut faults = Faults::new(file);
    let Value::Table(table) = &root.value else {
        faults.push(root.line, path, InputFault::WrongType { expected: "a table", got: root.value.describe() });
        return Err(faults.finish::<()>(None).err().map_or_else(|| unreadable(file), Into::into));
    };
    let model = read(table, path, root.line, &mut faults);
    Ok(faults.finish(model)?)
}

fn unreadable(file: &str) -> ModelError {
    let fault = InputFault::Syntax("cannot be understood".into());
    InputErrors::from(InputError { file: file.into(), line: None, key: String::new(), fault }).into()
}

fn read(table: &Table, path: &str, line: u32, faults: &mut Faults) -> Option<Model> {
    let root = Section::new(table, path, line);
    let inner_path = format!("{}.", root.key("text_config"));
    let nested = match root.get("text_config").map(|n| &n.value) {
        Some(Value::Table(inner)) => Some(Section::new(inner, &inner_path, root.line_of("text_config"))),
        Some(other) => {
            let got = other.describe();
            root.push("text_config", InputFault::WrongType { expected: "a table", got }, faults);
            return None;
        }
        None => None,
    };
    let text = nested.unwrap_or(root);
    let family = find_family(root, nested, faults)?;
    if nested.is_some() {
        agree(root, text, faults);
    }
    let layers =
        text.needed("num_hidden_layers", MAX_LAYERS, "it is the number of layers that the cache is sized by", faults)?;
    let mut all = match family.kind {
        Kind::Latent | Kind::Indexed => {
            latent_layer(family.kind, text, faults).map(|l| (0..layers).map(|_| l).collect())
        }
        Kind::Heads | Kind::GlobalHeads => head_layers(family, layers, text, faults),
        Kind::Hybrid(rule, mixer) => hybrid_layers(family, rule, mixer, layers, text, faults),
    };
    let shared = text.number("num_kv_shared_layers", 0, layers - 1, faults).unwrap_or(0);
    for layer in all.iter_mut().flat_map(|l: &mut Vec<Layer>| l.iter_mut().rev().take(shared as usize)) {
        layer.attention = None;
    }
    let state_auto = match family.kind {
        Kind::Hybrid(_, mixer) => mixer.state_dtype(text, faults),
        _ => None,
    };
    let mtp = mtp(family, all.as_deref().unwrap_or_default(), text, faults);
    let (dtype, kv_auto) = (dtype(root, text, faults), kv_auto(root, text, faults));
    let names = names(family, nested.is_some());
    Some(Model { name: family.model_type.into(), dtype, kv_auto, state_auto, names, layers: all?, mtp })
}

fn find_family(root: Section<'_>, nested: Option<Section<'_>>, faults: &mut Faults) -> Option<&'static Family> {
    const HINT: &str = "it says which kind of model this is";
    let known = || {
        let all = FAMILIES.iter().map(|f| f.model_type).chain(WRAPPERS.iter().copied());
        all.collect::<Vec<_>>().join(", ")
    };
    if root.get("model_type").is_none() {
        root.push("model_type", InputFault::Missing(HINT), faults);
    }
    let outer = root.text("model_type", faults)?;
    let find = |name: &str| FAMILIES.iter().find(|f| f.model_type == name);
    let Some(nested) = nested else {
        if WRAPPERS.contains(&outer) {
            root.push("text_config", InputFault::Missing("this model_type holds its sizes there"), faults);
            return None;
        }
        let found = find(outer);
        if found.is_none() {
            root.push("model_type", InputFault::UnknownValue { got: clip(outer), known: known() }, faults);
        }
        return found;
    };
    if !WRAPPERS.contains(&outer) {
        let known = format!("one of {} beside text_config", WRAPPERS.join(", "));
        root.push("model_type", InputFault::UnknownValue { got: clip(outer), known }, faults);
        return None;
    }
    if nested.get("model_type").is_none() {
        nested.push("model_type", InputFault::Missing(HINT), faults);
    }
    let inner = nested.text("model_type", faults)?;
    let allowed: &[&str] = match outer {
        "gemma3" => &["gemma3_text"],
        "gemma4" => &["gemma4_text"],
        _ => &["kimi_k2", "deepseek_v3"],
    };
    if !allowed.contains(&inner) {
        let known = format!("{} inside model_type {outer}", allowed.join(" or "));
        nested.push("model_type", InputFault::UnknownValue { got: clip(inner), known }, faults);
        return None;
    }
    find(inner)
}

/// Item names as vLLM makes them: the module's prefix.
fn names(family: &Family, nested: bool) -> ItemNames {
    let before = if nested { "language_model.model.layers." } else { "model.layers." };
    let (attention, state) = match family.kind {
        Kind::Hybrid(_, mixer) => mixer.names(),
        _ if family.model_type == "gpt_oss" => (".attn.attn", StateName::After("")),
        _ => (".self_attn.attn", StateName::After("")),
    };
    ItemNames { before, attention, state }
}

/// Multi-token-prediction layers: as the last layer with attention, or as the pattern says.
fn mtp(family: &Family, layers: &[Layer], text: Section<'_>, faults: &mut Faults) -> Mtp {
    let steps = text.number("num_nextn_predict_layers", 0, 16, faults).unwrap_or(0);
    let last = layers.iter().rev().find_map(|l| l.attention);
    let attention = Layer { attention: last, state: None };
    if steps == 0 || last.is_none() {
        return Mtp::default();
    }
    let (layers, before) = match family.kind {
        Kind::Hybrid(hybrid::Rule::Letters, _) => {
            let key = "mtp_hybrid_override_pattern";
            if text.get(key).is_none() {
                return Mtp::default();
            }
            let pattern = hybrid::letters(key, None, text, faults).unwrap_or_default();
            if pattern.iter().any(|k| k.1) {
                let known = "* (attention), E or - (no cache): prediction layers keep no state".into();
                text.push(key, InputFault::UnknownValue { got: "M".into(), known }, faults);
            }
            (pattern.iter().map(|k| if k.0 { attention } else { Layer::default() }).collect(), Some("mtp.layers."))
        }
        Kind::Hybrid(hybrid::Rule::Interval, _) => (vec![attention], Some("mtp.layers.")),
        _ => (vec![attention], None),
    };
    Mtp { steps, layers, before }
}

fn agree(root: Section<'_>, text: Section<'_>, faults: &mut Faults) {
    for key in SHARED {
        if let (Some(a), Some(b)) = (root.get(key), text.get(key))
            && a.value != b.value
        {
            let (a, b, line) = (a.value.describe(), b.value.describe(), root.line_of(key));
            let fault = InputFault::Contradiction(format!("is {b} here but {a} on line {line}, outside text_config"));
            text.push(key, fault, faults);
        }
    }
}

/// The first data type stated, outermost first; all that are stated must agree.
fn dtype(root: Section<'_>, text: Section<'_>, faults: &mut Faults) -> Option<Dtype> {
    let mut found: Option<(Dtype, u32)> = None;
    for section in [root, text] {
        for key in ["torch_dtype", "dtype"] {
            let Some(dtype) = section.word(key, Dtype::KNOWN, Dtype::parse, faults) else { continue };
            match found {
                Some((first, line)) if first != dtype => {
                    let (first, dtype) = (first.format().1, dtype.format().1);
                    let text = format!("is {dtype} here but {first} on line {line}");
                    section.push(key, InputFault::Contradiction(text), faults);
                }
                Some(_) => {}
                None => found = Some((dtype, section.line_of(key))),
            }
        }
    }
    found.map(|f| f.0)
}

/// What `quantization_config` says of the KV cache (compressed-tensors: `kv_cache_scheme`; ModelOpt:
/// `kv_cache_quant_algo`).
fn kv_auto(root: Section<'_>, text: Section<'_>, faults: &mut Faults) -> KvAuto {
    for section in [root, text] {
        let Some(node) = section.get("quantization_config") else { continue };
        let Value::Table(table) = &node.value else { continue };
        let path = format!("{}.", section.key("quantization_config"));
        let q = Section::new(table, &path, section.line_of("quantization_config"));
        let unknown = |key: &str, got: String| {
            let known = "FP8 (8 bits, float), or set kv_dtype".into();
            let fault = InputFault::UnknownValue { got, known };
            let (file, line) = (faults.file().into(), Some(q.line_of(key)));
            KvAuto::Unknown(InputError { file, line, key: q.key(key), fault })
        };
        match q.get("kv_cache_quant_algo").map(|n| &n.value) {
            None => {}
            Some(Value::Text(t)) if t.eq_ignore_ascii_case("fp8") => return KvAuto::Fp8,
            Some(other) => return unknown("kv_cache_quant_algo", other.describe()),
        }
        match q.get("kv_cache_scheme").map(|n| &n.value) {
            None => {}
            Some(Value::Table(scheme)) => {
                let value = |key: &str| scheme.0.get(key).map(|e| &e.1.value);
                let float = value("type") == Some(&Value::Text("float".into()));
                if float && value("num_bits") == Some(&Value::Integer(8)) {
                    return KvAuto::Fp8;
                }
                return unknown("kv_cache_scheme", "a scheme that isn't 8-bit float".into());
            }
            Some(other) => return unknown("kv_cache_scheme", other.describe()),
        }
    }
    KvAuto::Model
}

fn latent_layer(kind: Kind, text: Section<'_>, faults: &mut Faults) -> Option<Layer> {
    const HINT: &str = "an MLA cache is sized by it";
    let latent = text.needed("kv_lora_rank", MAX_DIM, HINT, faults);
    let rope = text.needed("qk_rope_head_dim", MAX_DIM, HINT, faults);
    let key = "index_head_dim";
    let indexer = if kind == Kind::Indexed {
        text.needed(key, MAX_DIM, "an indexer's keys are sized by it", faults)
    } else {
        if text.get(key).is_some() {
            let line = text.line_of("model_type");
            let fault = format!("sizes an indexer, but the model_type on line {line} has none; deepseek_v32 has");
            text.push(key, InputFault::Contradiction(fault), faults);
        }
        None
    };
    let attention = Attention::Latent { latent: latent?, rope: rope?, indexer };
    Some(Layer { attention: Some(attention), state: None })
}

fn hybrid_layers(
    family: &Family,
    rule: hybrid::Rule,
    mixer: Mixer,
    layers: u32,
    text: Section<'_>,
    faults: &mut Faults,
) -> Option<Vec<Layer>> {
    let kept = hybrid::read(rule, layers, text, faults);
    let state = mixer.state(text, faults);
    let attention = if mixer == Mixer::KimiLinear {
        latent_layer(Kind::Latent, text, faults).and_then(|l| l.attention)
    } else {
        if text.get("sliding_window").is_some() {
            let fault = format!("is set, but {} models have no sliding layers", family.model_type);
            text.push("sliding_window", InputFault::Contradiction(fault), faults);
        }
        let (heads, head_dim) = (kv_heads(family, text, faults), head_dim(text, faults));
        heads.zip(head_dim).map(|(heads, head_dim)| Attention::Heads { heads, head_dim, retention: Retention::Full })
    };
    let (attention, state) = (attention?, state?);
    let layer = |k: &hybrid::Kept| Layer { attention: k.0.then_some(attention), state: k.1.then_some(state) };
    Some(kept?.iter().map(layer).collect())
}

fn head_layers(family: &Family, layers: u32, text: Section<'_>, faults: &mut Faults) -> Option<Vec<Layer>> {
    let retention = retentions(family, layers, text, faults);
    let heads = kv_heads(family, text, faults);
    let head_dim = head_dim(text, faults);
    let global = family.kind == Kind::GlobalHeads;
    let (mut full_heads, mut full_dim) = (heads, head_dim);
    if global {
        full_dim = text.count("global_head_dim", MAX_DIM, faults).or(head_dim);
        // Full layers have KV heads of their own only where K and V share a projection.
        if text.flag("attention_k_eq_v", faults).unwrap_or(false) {
            full_heads = text.count("num_global_key_value_heads", MAX_HEADS, faults).or(heads);
        }
    }
    let (heads, head_dim, full_heads, full_dim) = (heads?, head_dim?, full_heads?, full_dim?);
    let layer = |&retention: &Retention| {
        let (heads, head_dim) = if retention == Retention::Full { (full_heads, full_dim) } else { (heads, head_dim) };
        Layer { attention: Some(Attention::Heads { heads, head_dim, retention }), state: None }
    };
    Some(retention?.iter().map(layer).collect())
}

fn kv_heads(family: &Family, text: Section<'_>, faults: &mut Faults) -> Option<u32> {
    let key = "num_key_value_heads";
    let queries = text.needed("num_attention_heads", MAX_HEADS, "KV heads are checked against it", faults);
    let heads = match text.get(key) {
        // The Llama class takes a missing key for multi-head attention; others have defaults of their own.
        None if family.model_type == "llama" => queries,
        _ => text.needed(key, MAX_HEADS, "the cache is sized by it", faults),
    };
    if let (Some(q), Some(kv)) = (queries, heads)
        && q % kv != 0
    {
        let line = text.line_of("num_attention_heads");
        let fault = format!("is {kv}, which does not divide the {q} num_attention_heads on line {line}");
        text.push(key, InputFault::Contradiction(fault), faults);
    }
    heads
}

fn head_dim(text: Section<'_>, faults: &mut Faults) -> Option<u32> {
    // Nemotron-H spells it `attention_head_dim` in some files.
    for key in ["head_dim", "attention_head_dim"] {
        if text.get(key).is_some() {
            return text.count(key, MAX_DIM, faults);
        }
    }
    let hint = "without head_dim the head's size is hidden_size / num_attention_heads";
    let hidden = text.needed("hidden_size", 1 << 24, hint, faults)?;
    let queries = text.count("num_attention_heads", MAX_HEADS, faults)?;
    if hidden % queries != 0 || hidden / queries > MAX_DIM {
        let line = text.line_of("num_attention_heads");
        let fault = format!(
            "is {hidden}, which makes no head size with the {queries} num_attention_heads on line {line}; state head_dim"
        );
        text.push("hidden_size", InputFault::Contradiction(fault), faults);
        return None;
    }
    Some(hidden / queries)
}

fn retentions(family: &Family, layers: u32, text: Section<'_>, faults: &mut Faults) -> Option<Vec<Retention>> {
    let key = "sliding_window";
    // The Qwen classes slide only where this is true; others unless it is false.
    let flag = text.flag("use_sliding_window", faults);
    let off = if family.window == Window::FromLayer { flag != Some(true) } else { flag == Some(false) };
    let stated = text.count(key, u32::MAX, faults);
    let window = stated.filter(|_| !off).map(|w| Retention::Window(Tokens::new(w.into())));
    if text.get("layer_types").is_some() {
        return typed(layers, window, text, faults);
    }
    let all = |r: Retention| (0..layers).map(|_| r).collect();
    match (family.window, window) {
        (Window::Types, _) => {
            text.push("layer_types", InputFault::Missing("it says which layers slide"), faults);
            None
        }
        (Window::Never, Some(_)) => {
            let fault = format!("is set, but {} models have no sliding layers", family.model_type);
            text.push(key, InputFault::Contradiction(fault), faults);
            None
        }
        (Window::FromLayer, None) if flag == Some(true) => {
            let line = text.line_of("use_sliding_window");
            let fault = format!("has no value, but use_sliding_window on line {line} is true");
            text.push(key, InputFault::Contradiction(fault), faults);
            None
        }
        (Window::FromLayer, Some(w)) => {
            let hint = "with a sliding_window it says from which layer on it slides";
            if text.get("max_window_layers").is_none() {
                text.push("max_window_layers", InputFault::Missing(hint), faults);
            }
            let first = text.number("max_window_layers", 0, u32::MAX, faults)?;
            Some((0..layers).map(|i| if i >= first { w } else { Retention::Full }).collect())
        }
        (Window::Pattern, Some(w)) => {
            let stated = text.count("sliding_window_pattern", MAX_LAYERS, faults);
            let every = stated.or_else(|| text.count("_sliding_window_pattern", MAX_LAYERS, faults));
            let every = every.unwrap_or(GEMMA3_PATTERN);
            Some((1..=layers).map(|i| if i % every == 0 { Retention::Full } else { w }).collect())
        }
        (Window::Pattern, None) => {
            text.push(key, InputFault::Missing("the cache of sliding layers is cut by it"), faults);
            None
        }
        (Window::All, Some(w)) => Some(all(w)),
        (Window::Never | Window::All | Window::FromLayer, None) => Some(all(Retention::Full)),
    }
}

/// The layers as `layer_types` names them.
fn typed(layers: u32, window: Option<Retention>, text: Section<'_>, faults: &mut Faults) -> Option<Vec<Retention>> {
    let key = "layer_types";
    let list = text.list(key, faults)?;
    if list.len() != layers as usize {
        let (got, line) = (list.len(), text.line_of("num_hidden_layers"));
        let fault = format!("lists {got} layers, but num_hidden_layers on line {line} is {layers}");
        text.push(key, InputFault::Contradiction(fault), faults);
        return None;
    }
    let chunk = text.count("attention_chunk_size", u32::MAX, faults).map(|c| Retention::Chunk(Tokens::new(c.into())));
    let mut out = Vec::new();
    for (i, node) in list.iter().enumerate() {
        let (kept, size) = match &node.value {
            Value::Text(t) if t == "full_attention" => (Some(Retention::Full), ""),
            Value::Text(t) if t == "sliding_attention" => (window, "sliding_window"),
            Value::Text(t) if t == "chunked_attention" => (chunk, "attention_chunk_size"),
            other => {
                let got = match other {
                    Value::Text(t) => clip(t),
                    other => other.describe(),
                };
                let known = "full_attention, sliding_attention or chunked_attention".into();
                faults.push(node.line, text.key(key), InputFault::UnknownValue { got, known });
                return None;
            }
        };
        let Some(kept) = kept else {
            let fault = format!("layer {i} needs {size}, which has no value or is switched off");
            faults.push(node.line, text.key(key), InputFault::Contradiction(fault));
            return None;
        };
        out.push(kept);
    }
    pattern_agrees(&out, text, faults)?;
    Some(out)
}

/// A pattern beside `layer_types` must say the same.
fn pattern_agrees(types: &[Retention], text: Section<'_>, faults: &mut Faults) -> Option<()> {
    for key in ["sliding_window_pattern", "_sliding_window_pattern"] {
        let Some(every) = text.count(key, MAX_LAYERS, faults) else { continue };
        let full = |i: usize| (i + 1).is_multiple_of(every as usize);
        if let Some(i) = types.iter().enumerate().position(|(i, r)| full(i) != (*r == Retention::Full)) {
            let line = text.line_of("layer_types");
            let fault = format!("is {every}, but layer {i} of layer_types on line {line} does not follow it");
            text.push(key, InputFault::Contradiction(fault), faults);
            return None;
        }
    }
    Some(())
}
