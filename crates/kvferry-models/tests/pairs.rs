//! Every preset between engines of different shapes: what each rank reads is what it holds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use std::path::Path;
use std::sync::Arc;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::StateOrder;
use kvferry_geometry::manifest::{Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::Placement;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::units::RankId;
use kvferry_models::{EngineDescription, Grouping, Model, layout_named, preset_names};

/// Bytes that a rank holds: of one token, and of one state.
fn held(m: &Manifest, rank: &RankManifest) -> (u64, u64) {
    let (mut token, mut state) = (0, 0);
    for ((_, item), placed) in m.spec().iter().zip(&rank.placement) {
        match placed {
            Some(Placement::Paged(p)) => {
                let widths: u64 = item.as_paged().unwrap().components.iter().map(|c| c.width.get()).sum();
                token += u64::from(p.heads.count()) * widths;
            }
            Some(Placement::State(p)) => {
                let parts = item.as_state().unwrap().parts.iter().zip(&p.parts);
                state += parts.map(|(p, u)| u64::from(u.count()) * u64::from(p.rows) * p.width.get()).sum::<u64>();
            }
            None => {}
        }
    }
    (token, state)
}

/// Plans all pairs, and compares what every rank of `dst` reads with what it holds. Returns the pairs.
fn check(what: &str, src: &EngineDescription, dst: &EngineDescription) -> usize {
    let manifest = |d: &EngineDescription| Arc::new(d.manifest().unwrap_or_else(|e| panic!("{what}: {e}")));
    let (src, dst) = (manifest(src), manifest(dst));
    let c = Compatible::new(src, dst.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
    let peers = PeerMap::new(&c, 7).unwrap_or_else(|e| panic!("{what}: {e}"));
    for (id, rank) in (0u32..).map(RankId::new).zip(dst.ranks()) {
        let mut read = (0, 0);
        for source in peers.sources_of(id) {
            let plan = PairPlan::new(&c, &peers, source, id).unwrap_or_else(|e| panic!("{what}: {e}"));
            for class in plan.classes() {
                match class.retention() {
                    Some(_) => read.0 += class.bytes_per_entry(),
                    None => read.1 += class.bytes_per_entry(),
                }
            }
        }
        assert_eq!(read, held(&dst, rank), "{what}: rank {id}");
    }
    peers.pairs().len()
}

#[test]
fn every_rank_reads_what_it_holds_between_engines_of_any_shape() {
    let pairs = [
        ("tp=2", "tp=2"),
        ("tp=2", "tp=8"),
        ("tp=8", "tp=2"),
        ("tp=4,pp=2", "tp=1"),
        ("tp=1", "tp=2,pp=3"),
        ("tp=2,pp=3", "tp=2,pp=2"),
        ("tp=6", "tp=4"),
        ("tp=3", "tp=8"),
        ("tp=16", "tp=12"),
    ];
    let (mut count, mut ranks) = (0, 0);
    for name in preset_names() {
        for (from, to) in pairs {
            let model = Model::preset(name).unwrap();
            if model.layers().len() < 3 && (from.contains("pp") || to.contains("pp")) {
                continue;
            }
            let mut src = EngineDescription::new(model.clone(), from.parse().unwrap());
            // As vLLM: groups of equal layers over one memory.
            src.grouping = Grouping::EqualLayers;
            src.layout.share = true;
            let mut dst = EngineDescription::new(model, to.parse().unwrap());
            dst.layout = layout_named("packed-rows").unwrap();
            dst.layout.state_order = StateOrder::RowsOuter;
            dst.layout.scratch_rows = 2;
            dst.block_size = 64;
            ranks += check(&format!("{name} {from} to {to}"), &src, &dst);
            ranks += check(&format!("{name} {to} to {from}"), &dst, &src);
            count += 2;
        }
    }
    println!("{count} pairs of engines, {ranks} pairs of ranks");
    assert_eq!(count, 21 * 9 * 2 + 2 * 6 * 2);
}

#[test]
fn the_hybrid_examples_serve_each_other() {
    let example = |name: &str| {
        EngineDescription::from_file(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)).unwrap()
    };
    let (p, d) = (example("hybrid-prefill.toml"), example("hybrid-decode.toml"));
    // 32 ranks, each reading one of two, but heads of attention and groups of B and C are on several.
    assert_eq!(check("examples", &p, &d), 32);
    check("examples, back", &d, &p);
}

#[test]
fn drafts_of_either_kind_go_along_at_any_shape() {
    for (target, draft) in [("kimi-k2.5", "kimi-k2.5-eagle3"), ("llama-3.1-8b", "kimi-k2.5-eagle3-mla")] {
        for (from, to) in [("tp=8", "tp=2"), ("tp=2", "tp=8"), ("tp=6", "tp=4"), ("tp=2,pp=2", "tp=4")] {
            let engine = |shape: &str, grouping| {
                let mut d = EngineDescription::new(Model::preset(target).unwrap(), shape.parse().unwrap());
                d.options.drafts = vec![Model::preset(draft).unwrap()];
                d.grouping = grouping;
                d
            };
            check(target, &engine(from, Grouping::ByKind), &engine(to, Grouping::ByShape));
        }
    }
}
