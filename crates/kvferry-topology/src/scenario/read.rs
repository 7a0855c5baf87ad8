//! Scenarios in TOML.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::{CompatOptions, Unmatched};
use kvferry_geometry::units::Bytes;
use kvferry_models::{EngineDescription, Model, Shape, Unread, layout_named, text_within};
use serde::Deserialize;
use toml::Table;

use super::{
    Broken, Choice, Failure, FitError, Fleet, Mode, Router, Scenario, ScenarioError, ScenarioErrors, Stream, Transfer,
    figures,
};
use crate::cluster::{Calibration, Cluster};
use crate::load::{DecodeTable, LoadTable, PrefillTable};
use crate::number::nearest;
use crate::sweep::SweepTable;

/// The most bytes of a scenario.
const MAX_BYTES: u64 = 1 << 20;
/// The most engines of one kind.
const MAX_ENGINES: i64 = 65_536;
/// What a GPU has for its cache where nothing is said.
const DEFAULT_KV_GIB: f64 = 40.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    #[serde(default)]
    seed: u64,
    cluster: Table,
    prefill: Side<PrefillTable>,
    decode: Side<DecodeTable>,
    #[serde(default)]
    load: LoadTable,
    #[serde(default)]
    transfer: TransferTable,
    #[serde(default)]
    router: RouterTable,
    #[serde(default)]
    failure: Vec<FailureTable>,
    gantt: Option<u64>,
    sweep: Option<SweepTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Side<T: Default> {
    engine: Engine,
    model: Option<String>,
    block_size: Option<i64>,
    layout: Option<String>,
    kv_dtype: Option<String>,
    layers: Option<u32>,
    engines: Option<i64>,
    first_gpu: Option<i64>,
    kv_gib: Option<f64>,
    prefix_tokens: Option<i64>,
    #[serde(default)]
    time: T,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Engine {
    Named(String),
    Described(Table),
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TransferTable {
    mode: Option<String>,
    stream: Option<String>,
    steps: Option<i64>,
    chunk_tokens: Option<i64>,
    rails: Option<i64>,
    slice_mib: Option<f64>,
    peer_mib: Option<f64>,
    rank_mib: Option<f64>,
    deadline_s: Option<f64>,
    routing_ms: Option<f64>,
    lane_ms: Option<f64>,
    idle_s: Option<f64>,
    #[serde(default)]
    stripe: bool,
    #[serde(default)]
    ignore_prefill_only: bool,
    #[serde(default)]
    ignore_decode_only: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouterTable {
    prefill: Option<String>,
    decode: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FailureTable {
    at_s: f64,
    lasts_s: f64,
    prefill: Option<u32>,
    decode: Option<u32>,
    link: Option<String>,
    percent: Option<u32>,
}

/// Reads a file, if it isn't too long.
pub(super) fn text(path: &Path) -> Result<String, ScenarioError> {
    let unreadable = |e: Unread| ScenarioError::Unreadable { file: path.display().to_string(), reason: e.to_string() };
    text_within(path, MAX_BYTES).map_err(unreadable)
}

/// What is wrong so far.
struct Faults<'a> {
    file: &'a str,
    all: Vec<ScenarioError>,
}

impl Faults<'_> {
    fn value(&mut self, key: &str, got: impl ToString, change: impl Into<String>) {
        let (file, key, got) = (self.file.to_owned(), key.to_owned(), got.to_string());
        self.all.push(ScenarioError::Value { file, key, got, change: change.into() });
    }

    fn take<T, E: Into<ScenarioError>>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|e| self.all.push(e.into())).ok()
    }

    fn count(&mut self, key: &str, got: Option<i64>, (low, high, usual): (i64, i64, i64)) -> u64 {
        let n = got.unwrap_or(usual);
        if !(low..=high).contains(&n) {
            self.value(key, n, format!("it must be {low} to {high}"));
        }
        u64::try_from(n.clamp(low, high)).unwrap_or(0)
    }

    fn number(&mut self, key: &str, got: Option<f64>, (low, high, usual): (f64, f64, f64)) -> f64 {
        let n = got.unwrap_or(usual);
        if !(low..=high).contains(&n) {
            self.value(key, n, format!("it must be {low} to {high}"));
            return usual;
        }
        n
    }

    fn word<T: Copy + Default>(&mut self, key: &str, got: Option<&str>, words: &[(&str, T)]) -> T {
        let Some(got) = got else { return words.first().map(|w| w.1).unwrap_or_default() };
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == got) {
            return *value;
        }
        let known: Vec<&str> = words.iter().map(|w| w.0).collect();
        self.value(key, format!("{got:?}"), format!("it must be {}", known.join(" or ")));
        T::default()
    }
}

pub(super) fn scenario(file: &str, text: &str, dir: &Path) -> Result<Scenario, ScenarioErrors> {
    if text.len() as u64 > MAX_BYTES {
        let reason = format!("it has {} bytes, more than the {MAX_BYTES} that are read", text.len());
        return Err(ScenarioError::Unreadable { file: file.to_owned(), reason }.into());
    }
    let said: File = toml::from_str(text).map_err(|e| {
        let reason = e.to_string().trim_end().to_owned();
        ScenarioError::Form { file: file.to_owned(), reason }
    })?;
    let mut faults = Faults { file, all: Vec::new() };
    let cluster = cluster(said.cluster, dir, &mut faults);
    let prefill = engine("prefill", &said.prefill, dir, &mut faults);
    let decode = engine("decode", &said.decode, dir, &mut faults);
    let prefill_spec = faults.take(said.prefill.time.check().map_err(|e| e.in_file(file)));
    let decode_spec = faults.take(said.decode.time.check().map_err(|e| e.in_file(file)));
    let load = faults.take(said.load.check().map_err(|e| e.in_file(file)));
    let transfer = transfer(&said.transfer, &mut faults);
    let router = router(&said.router, &mut faults);
    let failures = failures(said.failure, cluster.as_deref(), &mut faults);
    let (Some(cluster), Some(prefill), Some(decode)) = (cluster, prefill, decode) else {
        return Err(ScenarioErrors(faults.all));
    };
    let first = faults.count("prefill.first_gpu", said.prefill.first_gpu, (0, i64::from(cluster.gpus()), 0));
    let prefill =
        fleet("prefill", prefill, (&said.prefill.engines, said.prefill.prefix_tokens, first), &cluster, &mut faults);
    let next = Fleet::after(&prefill.gpus, &cluster, decode.1.ranks().len() as u64 * engines_of(&said.decode.engines));
    let usual = i64::try_from(next).unwrap_or(0);
    let first = faults.count("decode.first_gpu", said.decode.first_gpu, (0, i64::from(cluster.gpus()), usual));
    let decode =
        fleet("decode", decode, (&said.decode.engines, said.decode.prefix_tokens, first), &cluster, &mut faults);
    for failure in &failures {
        let too_high = match failure.what {
            Broken::Prefill(n) => (n >= prefill.engines).then_some(("failure.prefill", n, prefill.engines)),
            Broken::Decode(n) => (n >= decode.engines).then_some(("failure.decode", n, decode.engines)),
            Broken::Link(..) => None,
        };
        if let Some((key, got, all)) = too_high {
            faults.value(key, got, format!("there are {all} engines, counted from 0"));
        }
    }
    let (p, d) = (figures(&prefill, &cluster), figures(&decode, &cluster));
    let prefill_time = prefill_spec.as_ref().and_then(|s| faults.take(s.model(&p).map_err(|e| e.in_file(file))));
    let decode_time = decode_spec.as_ref().and_then(|s| faults.take(s.model(&d).map_err(|e| e.in_file(file))));
    let (Some(prefill_time), Some(decode_time), Some(load)) = (prefill_time, decode_time, load) else {
        return Err(ScenarioErrors(faults.all));
    };
    let (Some(prefill_spec), Some(decode_spec)) = (prefill_spec, decode_spec) else {
        return Err(ScenarioErrors(faults.all));
    };
    if !faults.all.is_empty() {
        return Err(ScenarioErrors(faults.all));
    }
    let scenario = Scenario {
        name: said.name.unwrap_or_else(|| file.to_owned()),
        seed: said.seed,
        cluster,
        prefill,
        decode,
        prefill_time,
        decode_time,
        prefill_spec,
        decode_spec,
        load,
        dir: dir.to_owned(),
        transfer,
        router,
        failures,
        gantt: said.gantt,
        sweep: said.sweep,
    };
    scenario.compatible().map_err(ScenarioError::Mismatch)?;
    Ok(scenario)
}

fn cluster(mut said: Table, dir: &Path, faults: &mut Faults<'_>) -> Option<Arc<Cluster>> {
    let mut path = |key: &str, faults: &mut Faults<'_>| match said.remove(key) {
        None => None,
        Some(toml::Value::String(path)) => Some(path),
        Some(other) => {
            faults.value(&format!("cluster.{key}"), other.type_str(), "it must be the path of a file");
            None
        }
    };
    let (other, calibration) = (path("file", faults), path("calibration", faults));
    let made = match other {
        Some(other) => {
            if !said.is_empty() {
                let keys: Vec<&str> = said.keys().map(String::as_str).collect();
                faults.value("cluster", keys.join(", "), "with `file` there is nothing but `calibration` beside it");
            }
            let text = faults.take(text(&dir.join(&other)))?;
            Cluster::from_toml(&other, &text)
        }
        None => Cluster::from_toml(faults.file, &said.to_string()),
    };
    let made = faults.take(made)?;
    let Some(calibration) = calibration else { return Some(Arc::new(made)) };
    let text = faults.take(text(&dir.join(&calibration)))?;
    let calibration = faults.take(Calibration::from_json(&calibration, &text))?;
    Some(Arc::new(made.calibrated(&calibration)))
}

type Described = (EngineDescription, Arc<kvferry_geometry::manifest::Manifest>, Option<u64>);

fn engine<T: Default>(key: &'static str, said: &Side<T>, dir: &Path, faults: &mut Faults<'_>) -> Option<Described> {
    let failed = |error| ScenarioError::Engine { key, error };
    let model = match &said.model {
        Some(name) => {
            let beside = dir.join(name);
            let name = if beside.is_file() { beside.display().to_string() } else { name.clone() };
            Some(faults.take(Model::preset_or_file(&name).map_err(|e| failed(e.into())))?)
        }
        None => None,
    };
    let mut d = match &said.engine {
        Engine::Named(text) if text.contains('=') => {
            let shape: Shape = match text.parse() {
                Ok(shape) => shape,
                Err(error) => {
                    faults.value(&format!("{key}.engine"), format!("{text:?}"), format!("{error}"));
                    return None;
                }
            };
            let Some(model) = model else {
                faults.value(&format!("{key}.model"), "missing", "name a preset or the path of a config.json");
                return None;
            };
            EngineDescription::new(model, shape)
        }
        Engine::Named(path) => faults.take(EngineDescription::from_file(dir.join(path)).map_err(failed))?,
        Engine::Described(table) => {
            let file = format!("{}: {key}.engine", faults.file);
            faults.take(EngineDescription::from_toml(&file, &table.to_string(), Some(dir)).map_err(failed))?
        }
    };
    d.name = key.to_owned();
    overrule(key, said, &mut d, faults);
    let explicit = said.kv_gib.is_none() && d.blocks.is_some();
    let gib = faults.number(&format!("{key}.kv_gib"), said.kv_gib, (1e-3, 1e5, DEFAULT_KV_GIB));
    let kv_bytes = (!explicit).then(|| nearest(gib * f64::from(1u32 << 30)));
    let fitted = Fleet::fitted(&mut d, kv_bytes).map_err(|error| match error {
        FitError::Described(error) => failed(error),
        FitError::Full(full) => ScenarioError::Pool { key, full },
    });
    let manifest = faults.take(fitted)?;
    Some((d, manifest, kv_bytes))
}

fn overrule<T: Default>(key: &str, said: &Side<T>, d: &mut EngineDescription, faults: &mut Faults<'_>) {
    if let Some(n) = said.block_size {
        let n = faults.count(&format!("{key}.block_size"), Some(n), (1, i64::from(kvferry_models::MAX_BLOCK_SIZE), 16));
        d.block_size = u32::try_from(n).unwrap_or(1);
    }
    if let Some(name) = &said.layout {
        match layout_named(name) {
            Some(style) => d.layout = style,
            None => faults.value(
                &format!("{key}.layout"),
                format!("{name:?}"),
                "it must be hnd, nhd, planes or packed-rows",
            ),
        }
    }
    if let Some(name) = &said.kv_dtype {
        match name.parse() {
            Ok(dtype) => d.options.kv_dtype = dtype,
            Err(error) => faults.value(&format!("{key}.kv_dtype"), format!("{name:?}"), format!("{error}")),
        }
    }
    if said.layers.is_some() {
        d.options.layers = said.layers;
    }
}

fn engines_of(said: &Option<i64>) -> u64 {
    u64::try_from(said.unwrap_or(1).clamp(1, MAX_ENGINES)).unwrap_or(1)
}

fn fleet(
    key: &str,
    (description, manifest, kv_bytes): Described,
    (engines, prefix, first): (&Option<i64>, Option<i64>, u64),
    cluster: &Cluster,
    faults: &mut Faults<'_>,
) -> Fleet {
    let ranks = u32::try_from(manifest.ranks().len()).unwrap_or(u32::MAX);
    let engines = faults.count(&format!("{key}.engines"), *engines, (1, MAX_ENGINES, 1));
    let engines = u32::try_from(engines).unwrap_or(1);
    let prefix_tokens = prefix.map(|n| faults.count(&format!("{key}.prefix_tokens"), Some(n), (0, i64::MAX, 0)));
    let gpus = Fleet::placed(engines, ranks, first, cluster).unwrap_or_else(|few| {
        faults.value(&format!("{key}.engines"), engines, few.to_string());
        // As many as there are, so that whatever else is wrong is told as well.
        (first..few.all).filter_map(|n| Some(cluster.gpu(u32::try_from(n).ok()?))).collect()
    });
    Fleet { description, manifest, engines, ranks, gpus, prefix_tokens, kv_bytes }
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or_default()
}

fn transfer(said: &TransferTable, faults: &mut Faults<'_>) -> Transfer {
    let usual = Transfer::default();
    let mode = faults.word("transfer.mode", said.mode.as_deref(), &[("pull", Mode::Pull), ("push", Mode::Push)]);
    let steps = u32::try_from(faults.count("transfer.steps", said.steps, (1, 1024, 8))).unwrap_or(1);
    let tokens = faults.count("transfer.chunk_tokens", said.chunk_tokens, (1, 1 << 24, 2048));
    let streams = [("none", Stream::None), ("layers", Stream::Layers { steps }), ("chunks", Stream::Chunks { tokens })];
    let stream = faults.word("transfer.stream", said.stream.as_deref(), &streams);
    if stream != Stream::None && mode == Mode::Pull {
        let change = "only P knows when a layer is done: set mode = \"push\", or leave stream out";
        faults.value("transfer.stream", format!("{:?}", stream.name()), change);
    }
    for (key, given, is) in [
        ("transfer.steps", said.steps.is_some(), matches!(stream, Stream::Layers { .. })),
        ("transfer.chunk_tokens", said.chunk_tokens.is_some(), matches!(stream, Stream::Chunks { .. })),
    ] {
        if given && !is {
            faults.value(key, "set", format!("stream is {:?}, which has no such thing", stream.name()));
        }
    }
    let mib = |faults: &mut Faults<'_>, key: &str, got: Option<f64>, usual: Bytes| {
        let usual = usual.get() as f64 / f64::from(1 << 20);
        Bytes::new(nearest(faults.number(key, got, (1e-3, 1e6, usual)) * f64::from(1 << 20)))
    };
    let mut admission = usual.admission;
    admission.slice = mib(faults, "transfer.slice_mib", said.slice_mib, admission.slice);
    admission.peer_bytes = mib(faults, "transfer.peer_mib", said.peer_mib, admission.peer_bytes);
    admission.bytes = mib(faults, "transfer.rank_mib", said.rank_mib, admission.bytes);
    let ignore = |on: bool| if on { Unmatched::Ignore } else { Unmatched::Refuse };
    Transfer {
        mode,
        stream,
        rails: u32::try_from(faults.count("transfer.rails", said.rails, (1, 64, 1))).unwrap_or(1),
        admission,
        deadline: seconds(faults.number("transfer.deadline_s", said.deadline_s, (1e-3, 1e6, 60.0))),
        routing: seconds(faults.number("transfer.routing_ms", said.routing_ms, (0.0, 1e6, 1.0)) / 1e3),
        lane: seconds(faults.number("transfer.lane_ms", said.lane_ms, (0.0, 1e6, 5.0)) / 1e3),
        idle: said.idle_s.map(|s| seconds(faults.number("transfer.idle_s", Some(s), (0.01, 1e6, 60.0)))),
        stripe: said.stripe,
        compat: CompatOptions {
            source_only: ignore(said.ignore_prefill_only),
            destination_only: ignore(said.ignore_decode_only),
        },
    }
}

fn router(said: &RouterTable, faults: &mut Faults<'_>) -> Router {
    let words = [("least-loaded", Choice::LeastLoaded), ("round-robin", Choice::RoundRobin)];
    Router {
        prefill: faults.word("router.prefill", said.prefill.as_deref(), &words),
        decode: faults.word("router.decode", said.decode.as_deref(), &words),
    }
}

fn failures(said: Vec<FailureTable>, cluster: Option<&Cluster>, faults: &mut Faults<'_>) -> Vec<Failure> {
    let mut out = Vec::new();
    for f in said.into_iter().take(10_000) {
        let at = seconds(faults.number("failure.at_s", Some(f.at_s), (0.0, 1e9, 0.0)));
        let lasts = seconds(faults.number("failure.lasts_s", Some(f.lasts_s), (0.0, 1e9, 0.0)));
        let what = match (f.prefill, f.decode, f.link, f.percent) {
            (Some(n), None, None, None) => Broken::Prefill(n),
            (None, Some(n), None, None) => Broken::Decode(n),
            (None, None, Some(link), percent) => {
                if cluster.is_some_and(|c| !c.links().iter().any(|l| l.name() == link)) {
                    faults.value("failure.link", format!("{link:?}"), "the cluster has no such link");
                }
                let percent = faults.count("failure.percent", percent.map(i64::from), (0, 100, 0));
                Broken::Link(link, u32::try_from(percent).unwrap_or(0))
            }
            _ => {
                faults.value(
                    "failure",
                    "not clear",
                    "name one of `prefill`, `decode` and `link`; `percent` goes with `link`",
                );
                continue;
            }
        };
        out.push(Failure { at, what, lasts });
    }
    out.sort_by_key(|f| f.at);
    out
}
