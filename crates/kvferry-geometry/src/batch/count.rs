//! How many descriptors a batch has, without going through them.
//!
//! The cursor joins what it comes to with what it left only where a part begins. So the parts count for themselves, and it
//! is looked at each joint whether the end of one part of a base is the start of the next.

use super::{Base, Batch, Part, Section};
use crate::units::RegionId;

/// Offsets at the source and the destination.
type Place = (u64, u64);

/// Where the first run of a part starts and its last run ends, counted from the base.
///
/// Wrapping, as a batch whose numbers run over has no descriptors that could be told.
#[derive(Clone, Copy)]
struct Span {
    start: Place,
    end: Place,
}

impl Span {
    /// `None` for a part that moves nothing.
    fn new(part: &Part) -> Option<Self> {
        let (first, last) = (part.pairs.first()?, part.pairs.last()?);
        let at = |src: u64, dst: u64| {
            let src = src.wrapping_mul(part.src_block_stride).wrapping_add(part.src_add);
            (src, dst.wrapping_mul(part.dst_block_stride).wrapping_add(part.dst_add))
        };
        let steps = u64::from(last.count.saturating_sub(1));
        let last = at(
            u64::from(last.src).wrapping_add(steps.wrapping_mul(part.src_step.into())),
            u64::from(last.dst).wrapping_add(steps.wrapping_mul(part.dst_step.into())),
        );
        let end = part.nest.dims.iter().fold(plus(last, (part.nest.run, part.nest.run)), |end, dim| {
            let steps = dim.count.saturating_sub(1);
            plus(end, (steps.wrapping_mul(dim.src_stride), steps.wrapping_mul(dim.dst_stride)))
        });
        Some(Self { start: at(first.src.into(), first.dst.into()), end })
    }
}

fn plus(a: Place, b: Place) -> Place {
    (a.0.wrapping_add(b.0), a.1.wrapping_add(b.1))
}

fn absolute(base: &Base, place: Place) -> (RegionId, RegionId, Place) {
    (base.src_region, base.dst_region, plus((base.src_offset, base.dst_offset), place))
}

/// The descriptors that the parts of a section make for one base, and where they start and end.
fn of_base(section: &Section) -> Option<(u64, Span)> {
    let parts = section.parts.iter().filter_map(|part| Some((part.descriptors(), Span::new(part)?)));
    parts.reduce(|(n, all), (more, next)| {
        let joins = u64::from(all.end == next.start);
        ((n + more).saturating_sub(joins), Span { end: next.end, ..all })
    })
}

pub(super) fn descriptors(batch: &Batch) -> u64 {
    let (mut count, mut last) = (0, None);
    for section in batch.sections() {
        let Some((each, span)) = of_base(section) else { continue };
        for base in section.bases.iter() {
            let joins = u64::from(last == Some(absolute(base, span.start)));
            count = (count + each).saturating_sub(joins);
            last = Some(absolute(base, span.end));
        }
    }
    count
}
