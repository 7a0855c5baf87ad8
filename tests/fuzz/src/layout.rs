//! Specs, placements and layouts.

use std::sync::Arc;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;

use crate::{Reached, Reader, engine, promise, wire};

/// The most ranks that are paired with themselves.
const MAX_PAIRED: usize = 64;

/// Choices for one engine.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let (mut r, mut reached) = (Reader::new(data), Reached::default());
    let items = engine::items(&mut r);
    let turn = usize::from(r.byte());
    if let Some(m) = accepted(&mut r, &mut reached, items, turn) {
        shapes(&m, &mut reached);
        wire::describes(&m);
        if m.ranks().len() <= MAX_PAIRED {
            paired(m, &mut reached);
        }
    }
    reached
}

/// The manifest of some choices, if it is one, with its promises looked at.
pub(crate) fn accepted(
    r: &mut Reader<'_>,
    reached: &mut Reached,
    items: Vec<kvferry_geometry::spec::Item>,
    turn: usize,
) -> Option<Manifest> {
    let spec = match engine::spec(items, turn) {
        Ok(spec) => spec,
        Err(errors) => {
            assert!(!errors.0.is_empty());
            errors.0.iter().take(64).for_each(|e| reached.fault(e));
            return None;
        }
    };
    let _ = (spec.bytes_per_token(), spec.bytes_per_state());
    match engine::engine(r, spec, reached)?.manifest() {
        Ok(m) => {
            crate::show("manifest", &m);
            reached.at("manifest");
            promise::manifest(&m);
            Some(m)
        }
        Err(errors) => {
            let most = kvferry_geometry::manifest::MAX_FAULTS;
            assert!((1..=most).contains(&errors.0.len()), "{} faults", errors.0.len());
            errors.0.iter().for_each(|e| reached.fault(e));
            None
        }
    }
}

/// An engine fits itself.
fn paired(m: Manifest, reached: &mut Reached) {
    let ranks = m.ranks().len();
    let m = Arc::new(m);
    let c = Compatible::new(Arc::clone(&m), m).expect("an engine that does not fit itself");
    match PeerMap::new(&c, 7) {
        Ok(map) => {
            reached.at("map");
            assert!(map.pairs().iter().all(|p| p.src().index() < ranks && p.dst().index() < ranks));
            assert!(!map.pairs().is_empty());
        }
        Err(error) => reached.fault(&error),
    }
}

/// What is special in an accepted manifest, so that a corpus can be seen to hold it.
fn shapes(m: &Manifest, reached: &mut Reached) {
    let paged = || m.spec().items().iter().filter_map(|i| i.as_paged());
    let parts = || m.spec().items().iter().filter_map(|i| i.as_state()).flat_map(|s| &s.parts);
    let components = || paged().flat_map(|p| &p.components);
    let views = || m.ranks().iter().flat_map(|r| r.layout.views.iter().flatten());
    let seen = [
        ("states", parts().next().is_some()),
        ("compressed", paged().any(|p| p.tokens_per_entry > 1)),
        ("spans", components().any(|c| c.span > 1)),
        ("scratch rows", views().filter_map(|v| v.as_state()).any(|v| v.parts.iter().any(|p| p.scratch_rows > 0))),
        ("kernel blocks", views().filter_map(|v| v.as_paged()).any(|v| v.kernel.size < v.block_size)),
        ("chunks", views().filter_map(|v| v.as_paged()).any(|v| v.components.iter().any(|c| c.chunks.is_some()))),
        ("huge", views().any(|v| v.stride().get() > 1 << 32)),
    ];
    seen.into_iter().filter(|s| s.1).for_each(|s| reached.at(s.0));
}
