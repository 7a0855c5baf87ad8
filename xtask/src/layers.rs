//! `cargo xtask layers`: which crate may depend on which, and what must be absent, each from one list.
//!
//! Edges are checked against `cargo metadata`, absences also against the source text ([`source`]). Dev-dependencies
//! are free: tests may use what they need.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::Context as _;
use cargo_metadata::{CargoOpt, DependencyKind, MetadataCommand};

mod source;

/// No arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The crates of this workspace and which of them each may depend on.
const LAYERS: &[(&str, &[&str])] = &[
    ("kvferry-geometry", &[]),
    ("kvferry-models", &["kvferry-geometry"]),
    ("kvferry-proto", &["kvferry-geometry"]),
    ("kvferry-transport", &["kvferry-geometry"]),
    // Its buffers are made into transport's regions, which only a crate with unsafe code can do.
    ("kvferry-memory", &["kvferry-geometry", "kvferry-transport"]),
    ("kvferry-shm", &["kvferry-geometry", "kvferry-transport", "kvferry-memory"]),
    ("kvferry-ucx", &["kvferry-geometry", "kvferry-transport"]),
    ("kvferry-nixl", &["kvferry-geometry", "kvferry-transport"]),
    ("kvferry-session", &["kvferry-geometry", "kvferry-proto", "kvferry-transport", "kvferry-memory"]),
    // Nothing of the product may need it.
    (SIM, &[GEOMETRY, "kvferry-proto", "kvferry-transport", "kvferry-memory", "kvferry-session"]),
    (TOPOLOGY, &[GEOMETRY, MODELS, "kvferry-proto", "kvferry-transport", "kvferry-session", SIM]),
    ("kvferry", &[GEOMETRY, MODELS, "kvferry-proto", "kvferry-transport", "kvferry-memory", "kvferry-session"]),
    ("kvferry-oracle", &["kvferry-geometry"]),
    (GOLDEN, &[GEOMETRY, "kvferry-oracle"]),
    ("kvferry-model", &[GEOMETRY, "kvferry-proto"]),
    // Applications take the facade and the backends they want.
    ("xtask", APPLICATION),
    ("xtask-launch", &[]),
    (FUZZ, &[GEOMETRY, MODELS, "kvferry-proto", TOPOLOGY, "kvferry"]),
    ("kvferry-tests", EVERYTHING),
    ("kvferry-benches", EVERYTHING),
];
const GEOMETRY: &str = "kvferry-geometry";
const MODELS: &str = "kvferry-models";
const GOLDEN: &str = "kvferry-golden";
const FUZZ: &str = "kvferry-fuzz";
const SIM: &str = "kvferry-sim";
const TOPOLOGY: &str = "kvferry-topology";
const APPLICATION: &[&str] = &[
    GEOMETRY,
    MODELS,
    "kvferry-transport",
    "kvferry-memory",
    "kvferry-shm",
    "kvferry-ucx",
    "kvferry-nixl",
    "kvferry-session",
    SIM,
    TOPOLOGY,
    "kvferry",
    GOLDEN,
];
const EVERYTHING: &[&str] = &[
    GEOMETRY,
    MODELS,
    "kvferry-proto",
    "kvferry-transport",
    "kvferry-memory",
    "kvferry-shm",
    "kvferry-session",
    TOPOLOGY,
    "kvferry",
    "kvferry-oracle",
    GOLDEN,
    FUZZ,
];

/// Libraries of others that only the listed crates may depend on, and why. What isn't listed is free.
const ONLY: &[(&str, &[&str], &str)] = &[
    (
        "tokio",
        &["kvferry", "xtask", FUZZ, "kvferry-tests", "kvferry-benches"],
        "the facade is the only asynchronous crate",
    ),
    ("anyhow", &["xtask", "kvferry-tests", "kvferry-benches"], "libraries have typed errors"),
    ("serde", SERDE, "domain types are not serialisable; the wire has types of its own"),
    ("serde_json", SERDE, "domain types are not serialisable; the wire has types of its own"),
    ("postcard", &["kvferry-proto"], "the wire format is proto's"),
    ("ucx-rs", &["kvferry-ucx"], "raw handles never leave the backend"),
    ("nixl-sys", &["kvferry-nixl"], "raw handles never leave the backend"),
];
const SERDE: &[&str] =
    &["kvferry-models", "kvferry-proto", "kvferry", TOPOLOGY, "xtask", GOLDEN, "kvferry-tests", "kvferry-benches"];

/// Bindings of native libraries: what they need is theirs, and no type of ours meets it.
const BINDINGS: &[&str] = &["nixl-sys", "ucx-rs"];

/// Dependencies by package name: who is in the workspace, and what each package needs to be built and run.
#[derive(Debug, Default)]
struct Graph {
    members: BTreeSet<String>,
    needs: BTreeMap<String, BTreeSet<String>>,
}

/// Prints every violation; succeeds where there is none.
pub(crate) fn run(_: Args) -> anyhow::Result<ExitCode> {
    // What is optional is a dependency all the same.
    let metadata = MetadataCommand::new().features(CargoOpt::AllFeatures).exec().context("cargo metadata failed")?;
    let mut violations = graph_violations(&Graph::new(&metadata)?);
    violations.extend(source::violations(metadata.workspace_root.as_std_path())?);
    for violation in &violations {
        eprintln!("{violation}");
    }
    if violations.is_empty() {
        println!("layers: {} crates, no violation", LAYERS.len());
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{} violations of the layers (docs/architecture.md says what they are for)", violations.len());
    Ok(ExitCode::FAILURE)
}

impl Graph {
    fn new(metadata: &cargo_metadata::Metadata) -> anyhow::Result<Self> {
        let resolve = metadata.resolve.as_ref().context("cargo metadata resolved nothing")?;
        let names: BTreeMap<_, _> = metadata.packages.iter().map(|p| (&p.id, p.name.to_string())).collect();
        let mut graph = Self::default();
        graph.members.extend(metadata.workspace_members.iter().filter_map(|id| names.get(id).cloned()));
        for node in &resolve.nodes {
            let Some(name) = names.get(&node.id) else { continue };
            let needed = node.deps.iter().filter(|d| d.dep_kinds.iter().any(|k| k.kind != DependencyKind::Development));
            graph.needs.entry(name.clone()).or_default().extend(needed.filter_map(|d| names.get(&d.pkg).cloned()));
        }
        Ok(graph)
    }

    /// How `from` comes to need `target` through crates of others, if it does.
    fn path(&self, from: &str, target: &str) -> Option<Vec<String>> {
        let mut paths = vec![vec![from.to_owned()]];
        let mut seen = BTreeSet::new();
        while let Some(path) = paths.pop() {
            for next in path.last().and_then(|last| self.needs.get(last)).into_iter().flatten() {
                if self.members.contains(next) || !seen.insert(next) {
                    continue;
                }
                let longer = [path.as_slice(), std::slice::from_ref(next)].concat();
                if next == target {
                    return Some(longer);
                }
                if !BINDINGS.contains(&next.as_str()) {
                    paths.push(longer);
                }
            }
        }
        None
    }
}

fn graph_violations(graph: &Graph) -> Vec<String> {
    let mut out = Vec::new();
    let allowed = |name: &str| LAYERS.iter().find(|l| l.0 == name).map(|l| l.1);
    for name in &graph.members {
        let Some(allowed) = allowed(name) else {
            out.push(format!("{name}: not in the list of layers; say there what it may depend on"));
            continue;
        };
        for needed in graph.needs.get(name).into_iter().flatten() {
            if graph.members.contains(needed) && !allowed.contains(&needed.as_str()) {
                out.push(format!("{name}: depends on {needed}; it may depend on {}", list(allowed)));
            }
        }
        for (library, users, why) in ONLY {
            if users.contains(&name.as_str()) {
                continue;
            }
            if let Some(path) = graph.path(name, library) {
                let path = path.join(" -> ");
                out.push(format!("{name}: needs {library} ({path}), which only {} may: {why}", list(users)));
            }
        }
    }
    for (name, _) in LAYERS.iter().filter(|l| !graph.members.contains(l.0)) {
        out.push(format!("{name}: in the list of layers but not in the workspace"));
    }
    out
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none of this workspace".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The workspace as the list allows it, with some edges added.
    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::default();
        for (name, allowed) in LAYERS {
            graph.members.insert((*name).to_owned());
            graph.needs.insert((*name).to_owned(), allowed.iter().map(|a| (*a).to_owned()).collect());
        }
        for (from, to) in edges {
            graph.needs.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        graph
    }

    #[test]
    fn the_list_violates_nothing_and_has_no_cycle() {
        assert_eq!(graph_violations(&graph(&[])), Vec::<String>::new());
        for (i, (name, allowed)) in LAYERS.iter().enumerate() {
            for a in *allowed {
                let place = LAYERS.iter().position(|l| l.0 == *a).unwrap_or_else(|| panic!("{name}: unknown {a}"));
                assert!(place < i, "{name} may depend on {a}, which stands below it");
            }
        }
    }

    #[test]
    fn every_violation_is_reported() {
        let found = graph_violations(&graph(&[
            ("kvferry-geometry", "kvferry-proto"),
            ("xtask", "kvferry-benches"),
            ("kvferry-transport", "serde"),
            ("kvferry-shm", "tokio"),
        ]));
        assert_eq!(found.len(), 4, "{found:#?}");
        assert!(found[0].contains("kvferry-geometry: depends on kvferry-proto"), "{found:#?}");
        assert!(found[3].contains("xtask: depends on kvferry-benches"), "{found:#?}");
    }

    #[test]
    fn an_absent_library_is_found_behind_others_but_not_behind_our_own_crates() {
        let hidden = graph_violations(&graph(&[("kvferry-memory", "bytes"), ("bytes", "serde")]));
        assert_eq!(hidden.len(), 1);
        assert!(hidden[0].contains("kvferry-memory -> bytes -> serde"), "{hidden:?}");
        assert!(graph_violations(&graph(&[("kvferry-nixl", "nixl-sys"), ("nixl-sys", "serde")])).is_empty());
        assert_eq!(graph_violations(&graph(&[("kvferry-session", "nixl-sys"), ("nixl-sys", "serde")])).len(), 1);
        // session depends on proto, which has serde; that is as it should be.
        assert!(graph_violations(&graph(&[("kvferry-proto", "serde")])).is_empty());
    }

    #[test]
    fn the_list_and_the_workspace_name_the_same_crates() {
        let mut graph = graph(&[]);
        graph.members.remove("kvferry-models");
        graph.members.insert("kvferry-new".to_owned());
        let found = graph_violations(&graph);
        assert!(found.iter().any(|v| v.starts_with("kvferry-new: not in the list")), "{found:?}");
        assert!(found.iter().any(|v| v.starts_with("kvferry-models: in the list")), "{found:?}");
    }
}
