//! Items whose pages lie end to end in a row on both sides, of one class or of several, move as one run.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::batch::{Base, Nest, Part, Section};
use crate::units::RegionId;

/// What one base moves by a part without loops, for each pair.
struct Strip {
    src: (RegionId, u64),
    dst: (RegionId, u64),
    run: u64,
}

/// Bases times parts of every class, with strips that continue each other joined.
pub(super) fn join(mut all: Vec<(Arc<[Base]>, Vec<Part>)>) -> Vec<Section> {
    let mut out = Vec::new();
    for row in rows_of(&all) {
        let mut strips: Vec<Strip> = Vec::new();
        for &(class, part) in &row {
            let (bases, part) = (&all[class].0, &all[class].1[part]);
            strips.extend(bases.iter().map(|b| Strip {
                src: (b.src_region, b.src_offset + part.src_add),
                dst: (b.dst_region, b.dst_offset + part.dst_add),
                run: part.nest.run,
            }));
        }
        let before = strips.len();
        let mut strips = chained(strips);
        if strips.len() == before {
            continue;
        }
        let Some(template) = row.first().map(|&(class, part)| all[class].1[part].clone()) else { continue };
        strips.sort_by_key(|s| s.run);
        for alike in strips.chunk_by(|a, b| a.run == b.run) {
            let base =
                |s: &Strip| Base { src_region: s.src.0, dst_region: s.dst.0, src_offset: s.src.1, dst_offset: s.dst.1 };
            let part = Part { src_add: 0, dst_add: 0, nest: Nest::run(alike[0].run), ..template.clone() };
            out.push(Section { bases: alike.iter().map(base).collect(), parts: alloc::vec![part] });
        }
        // Taken: a part without pairs moves nothing and is dropped below.
        row.iter().for_each(|&(class, part)| all[class].1[part].pairs = Vec::new().into());
    }
    for (bases, mut parts) in all {
        parts.retain(|p| !p.pairs.is_empty());
        if !parts.is_empty() {
            out.push(Section { bases, parts });
        }
    }
    out
}

/// List of pairs, block strides, steps: what the parts of a row have in common.
type RowKey = (usize, (u64, u64), (u32, u32));

/// Parts without loops that go through the same blocks in the same steps, as (class, part); only where there are strips
/// to join.
fn rows_of(all: &[(Arc<[Base]>, Vec<Part>)]) -> Vec<Vec<(usize, usize)>> {
    let mut rows: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut known: BTreeMap<RowKey, usize> = BTreeMap::new();
    for (class, (_, parts)) in all.iter().enumerate() {
        for (index, part) in parts.iter().enumerate().filter(|(_, p)| p.nest.dims.is_empty()) {
            let strides = (part.src_block_stride, part.dst_block_stride);
            let row = *known.entry((part.pairs.id(), strides, (part.src_step, part.dst_step))).or_insert(rows.len());
            match rows.get_mut(row) {
                Some(row) => row.push((class, index)),
                None => rows.push(alloc::vec![(class, index)]),
            }
        }
    }
    rows.retain(|row| row.len() > 1 || row.iter().any(|&(class, _)| all[class].0.len() > 1));
    rows
}

/// The strips by destination, those that go on on both sides as one.
fn chained(mut strips: Vec<Strip>) -> Vec<Strip> {
    strips.sort_unstable_by_key(|s| s.dst);
    let mut out: Vec<Strip> = Vec::with_capacity(strips.len());
    for strip in strips {
        let goes_on =
            |a: (RegionId, u64), run: u64, b: (RegionId, u64)| a.0 == b.0 && a.1.checked_add(run) == Some(b.1);
        match out.last_mut() {
            Some(last) if goes_on(last.src, last.run, strip.src) && goes_on(last.dst, last.run, strip.dst) => {
                last.run += strip.run;
            }
            _ => out.push(strip),
        }
    }
    out
}
