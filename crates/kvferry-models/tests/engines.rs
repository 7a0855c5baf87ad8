//! Every preset under many engines: each makes a manifest, or says why not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use std::collections::BTreeMap;

use kvferry_geometry::placement::Placement;
use kvferry_models::{DescribeError, EngineDescription, Grouping, Model, Shape, layout_named, preset_names};

/// The description of one combination.
fn engine(model: &Model, tp: u32, pp: u32, share: bool, layout: &str) -> EngineDescription {
    let mut d = EngineDescription::new(model.clone(), Shape { tp, pp, ..Shape::default() });
    d.layout = layout_named(layout).unwrap();
    d.layout.share = share;
    d.grouping = if share { Grouping::EqualLayers } else { Grouping::ByShape };
    d.blocks = Some(64);
    d
}

#[test]
fn every_preset_under_every_engine_makes_a_manifest_or_says_why_not() {
    let (mut made, mut ranks, mut refused) = (0, 0, BTreeMap::<String, usize>::new());
    for name in preset_names() {
        let model = Model::preset(name).unwrap();
        for tp in [1, 2, 4, 8, 3, 6] {
            for (pp, share) in [(1, false), (1, true), (2, false), (2, true)] {
                for layout in ["hnd", "nhd", "packed-rows"] {
                    match engine(&model, tp, pp, share, layout).manifest() {
                        Ok(m) => {
                            made += 1;
                            ranks += m.ranks().len();
                            assert_eq!(m.ranks().len(), (tp * pp) as usize);
                        }
                        Err(DescribeError::Input(errors)) => {
                            // The only engines that can't be are those with more stages than layers.
                            assert_eq!(errors.0.len(), 1, "{name} tp {tp} pp {pp}: {errors}");
                            let text = errors.0[0].to_string();
                            *refused.entry(text).or_default() += 1;
                        }
                        Err(error) => panic!("{name} tp {tp} pp {pp} share {share} {layout}: {error}"),
                    }
                }
            }
        }
    }
    println!("{made} manifests of {ranks} ranks, {} refused:", refused.values().sum::<usize>());
    for (text, count) in &refused {
        println!("  {count} x {text}");
    }
    // 23 presets x 6 x 4 x 3, less pp 2 of the two drafts of one layer.
    let all = 23 * 6 * 4 * 3;
    assert_eq!((made, refused.values().sum::<usize>()), (all - 72, 72));
    assert_eq!(
        refused.keys().collect::<Vec<_>>(),
        ["engine: parallel.pp: is 2, but there are only 1 layers to cut into stages"]
    );
}

/// Bytes that the ranks hold together, each logical byte as often as it is held; and those of the model alone.
fn held(d: &EngineDescription) -> (u64, u64) {
    let m = d.manifest().unwrap();
    let mut sum = 0;
    for rank in m.ranks() {
        for ((_, item), placed) in m.spec().iter().zip(&rank.placement) {
            let Some(Placement::State(placed)) = placed else { continue };
            let parts = &item.as_state().unwrap().parts;
            let bytes = |(p, held): (&kvferry_geometry::spec::StatePart, &kvferry_geometry::placement::HeadRange)| {
                u64::from(held.count()) * u64::from(p.rows) * p.width.get()
            };
            sum += parts.iter().zip(&placed.parts).map(bytes).sum::<u64>();
        }
    }
    (sum, m.spec().bytes_per_state().get())
}

#[test]
fn states_are_held_once_but_for_what_has_fewer_units_than_ranks() {
    for name in preset_names() {
        let model = Model::preset(name).unwrap();
        let groups = match name {
            "bamba-9b" | "falcon-h1-0.5b" => 1,
            "qwen3-next-80b-a3b" => 16,
            _ => 8,
        };
        for tp in [1, 2, 3, 4, 6, 8] {
            let (sum, once) = held(&engine(&model, tp, 1, false, "hnd"));
            if tp <= groups {
                assert_eq!(sum, once, "{name} tp {tp}");
            } else {
                // B and C of the one group are on every rank.
                assert!(sum > once && sum < once + once / 2, "{name} tp {tp}: {sum} {once}");
            }
        }
    }
}

#[test]
fn whole_items_keep_all_their_parts_on_every_rank() {
    let model = Model::preset("kimi-linear-48b-a3b").unwrap();
    let mut d = engine(&model, 4, 1, false, "hnd");
    d.whole = vec!["*".into()];
    let (sum, once) = held(&d);
    assert_eq!(sum, 4 * once);
}

#[test]
fn states_are_on_every_context_parallel_rank() {
    let model = Model::preset("kimi-linear-48b-a3b").unwrap();
    let mut d = engine(&model, 4, 1, false, "hnd");
    d.shape = "tp=4,dcp=4,pcp=2,interleave=16".parse().unwrap();
    let (sum, once) = held(&d);
    assert_eq!(sum, 2 * once);
    let m = d.manifest().unwrap();
    let tokens: Vec<u64> = m.groups().iter().map(|g| g.block_tokens.get()).collect();
    assert_eq!(tokens, [0, 16 * 8]);
}
