//! Orders and fronts against what they are by definition.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test")]

use kvferry_sim::rng::Rng;
use kvferry_topology::sweep::rank::front;
use kvferry_topology::sweep::{Figures, Objective};

/// All that no other is as good as in both and better than in one.
fn naive(points: &[(f64, f64)]) -> Vec<usize> {
    let beats = |a: &(f64, f64), b: &(f64, f64)| a.0 <= b.0 && a.1 <= b.1 && (a.0 < b.0 || a.1 < b.1);
    (0..points.len()).filter(|at| !points.iter().any(|other| beats(other, &points[*at]))).collect()
}

#[test]
fn a_front_is_all_that_nothing_beats() {
    let mut rng = Rng::of(&[5]);
    for round in 0..3000u64 {
        let (many, grid) = (rng.below(40), 1 + rng.below(12));
        let points: Vec<(f64, f64)> = (0..many).map(|_| (rng.below(grid) as f64, rng.below(grid) as f64)).collect();
        let found = front(&points);
        let mut sorted = found.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, naive(&points), "{round}: {points:?}");
        assert!(found.is_sorted_by(|a, b| points[*a].0 <= points[*b].0), "{points:?}");
    }
}

#[test]
fn objectives_have_names_and_figures_of_their_own() {
    let f = Figures {
        gpus: 1,
        handover_p50: 2.0,
        handover_p99: 3.0,
        first_token_p99: 4.0,
        hot_link: 5.0,
        descriptors: 6.0,
        ..Figures::default()
    };
    let values: Vec<f64> = Objective::ALL.iter().map(|o| o.value(&f)).collect();
    assert_eq!(values, [2.0, 3.0, 4.0, 5.0, 6.0, 1.0]);
    for o in Objective::ALL {
        assert_eq!(Objective::named(o.name()), Some(o));
        assert_eq!(serde_json::to_value(o).unwrap(), o.name());
        assert_eq!(o.with_ties().count(), Objective::ALL.len());
    }
}
