//! PP cases: pipeline stages that are cut differently, and layers that are named.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatch};
use kvferry_geometry::spec::{Item, ModelSpec, SpecError};
use kvferry_tests::by_hand::{Engine, Pair, kv, request};
use kvferry_tests::by_hand_states::{Ask, Shape, falcon, prove};

fn layers(numbers: &[u32]) -> Vec<Item> {
    numbers.iter().map(|n| kv(&format!("layer.{n}"), 1, 2)).collect()
}

/// (source rank, source region, destination region) of everything that destination rank 0 reads.
fn regions(pair: &Pair) -> Vec<(u32, u32, u32)> {
    let bound = pair.bind(request(16, &[0], &[0]));
    let of =
        |src| pair.descriptors(src, 0, &bound).into_iter().map(move |d| (src, d.src_region.get(), d.dst_region.get()));
    pair.sources(0).into_iter().flat_map(of).collect()
}

#[test]
fn pp_01_layers_are_paired_by_name() {
    // Attention in layers 1, 3, 5, 7 of 8; stages of layers 0-3 and 4-7.
    let attention = || layers(&[1, 3, 5, 7]);
    let source = Engine::new(attention(), 1).stages(&[&["layer.1", "layer.3"], &["layer.5", "layer.7"]]);
    let pair = Pair::new(&source, &Engine::new(attention(), 1));
    assert_eq!(regions(&pair), [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]);
}

#[test]
fn pp_01_an_odd_cut() {
    let all = || layers(&[0, 1, 2, 3, 4]);
    let source = Engine::new(all(), 1).stages(&[&["layer.0", "layer.1", "layer.2"], &["layer.3", "layer.4"]]);
    let pair = Pair::new(&source, &Engine::new(all(), 1));
    assert_eq!(regions(&pair), [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4)]);
}

#[test]
fn pp_01_a_stage_without_attention_is_legal() {
    let all = || layers(&[0, 1]);
    let source = Engine::new(all(), 1).stages(&[&["layer.0"], &[], &["layer.1"]]);
    let pair = Pair::new(&source, &Engine::new(all(), 1));
    assert_eq!(pair.sources(0), [0, 2]);
    assert_eq!(pair.consumer_counts(), [1, 0, 1]);
}

#[test]
fn pp_01_a_stage_of_states_only_is_legal() {
    // Four layers, states in 0, 2 and 3; the second stage has no attention.
    let items = || vec![falcon("layer.0"), kv("layer.1", 1, 2), falcon("layer.2"), falcon("layer.3")];
    let source = Shape::new(items(), 1).stages(&[&["layer.0", "layer.1"], &["layer.2", "layer.3"]]);
    let whole = Shape::new(items(), 1);
    for (src, dst) in [(&source, &whole), (&whole, &source), (&source, &source)] {
        let proof = prove(&src.manifest(), &dst.manifest(), Ask::of(20));
        let state = whole.manifest().spec().bytes_per_state().get();
        assert_eq!(proof.moved, 20 * 4 + state);
    }
    let proof = prove(&source.manifest(), &whole.manifest(), Ask::of(20));
    assert_eq!(proof.pairs, [(0, 0), (1, 0)]);
}

#[test]
fn pp_05_a_repeated_layer_is_named() {
    let errors = ModelSpec::new(layers(&[0, 1, 1])).expect_err("layer.1 is listed twice").0;
    assert_eq!(errors, [SpecError::DuplicateItem { item: "layer.1".into() }]);
}

#[test]
fn pp_05_a_missing_layer_is_named() {
    let (one, two) = (Engine::new(layers(&[0]), 1).manifest(), Engine::new(layers(&[0, 1]), 1).manifest());
    let refused = Compatible::new(Arc::clone(&one), Arc::clone(&two)).expect_err("layer.1 is missing").0;
    assert!(matches!(refused.as_slice(), [Mismatch::MissingAtSource { item, .. }] if item.as_str() == "layer.1"));
    let refused = Compatible::new(two, one).expect_err("layer.1 is missing").0;
    assert!(matches!(refused.as_slice(), [Mismatch::MissingAtDestination { item, .. }] if item.as_str() == "layer.1"));
}

#[test]
fn pp_05_another_order_is_paired_by_name_and_capacities_may_differ() {
    let engine = |numbers: &[u32], blocks| Engine::new(layers(numbers), 1).blocks(16, blocks);
    let pair = Pair::new(&engine(&[2, 0, 1], 113), &engine(&[0, 1, 2], 211));
    assert_eq!(regions(&pair), [(0, 1, 0), (0, 2, 1), (0, 0, 2)]);
}
