//! Whole engines whose requests are read in slices, directly and staged.

use kvferry_geometry::staged::Place;
use kvferry_geometry::units::Bytes;

use super::World;
use super::tests::{N, STATE_BYTES, TOKEN_BYTES, destination, is_there, places, prefill, source, staged};
use crate::rank::{Admission, Way};

/// In slices of so many bytes, at most fifty in flight.
fn sliced(w: &mut World, slice: u64) {
    let admission = Admission { slice: Bytes::new(slice), ops: 50, ..Admission::default() };
    let ranks = w.d.ranks.drain(..).map(|r| r.with_admission(admission).unwrap()).collect();
    w.d.ranks = ranks;
}

/// Whichever way bytes take and however they are cut, they are the same, and all of them are compared in place.
#[test]
fn bytes_in_slices_are_the_same_whichever_way_they_take() {
    for (way, place) in
        [(Way::Direct, Place::Direct), (Way::Destination, Place::Destination), (Way::Source, Place::Source)]
    {
        for slice in [200, 1500, 1 << 20] {
            let shape = |engine: super::Shape| match (staged(1 << 20, way), engine) {
                (d, p) if place == Place::Source => super::Shape { staging: d.staging, ..p },
                (_, p) => p,
            };
            let mut w = World::new(shape(prefill()), staged(1 << 20, way));
            sliced(&mut w, slice);
            w.p.fill(1, &source());
            let delivered = w.pull(N, source(), destination(1)).unwrap();
            assert!(places(&delivered).iter().all(|p| *p == place), "{way:?}: {:?}", places(&delivered));
            let all = N * TOKEN_BYTES + STATE_BYTES;
            assert_eq!((delivered.report().bytes().get(), delivered.report().compared.get()), (all, all));
            assert!(is_there(&w, 1), "{way:?} in slices of {slice}");
            assert!(w.d.ranks.iter().all(|r| r.staging_lent() == Bytes::ZERO), "all segments are back");
        }
    }
}
