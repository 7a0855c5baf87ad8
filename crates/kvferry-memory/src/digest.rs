//! Digests of one side of a batch, in batch order.
//!
//! The bytes that a batch reads at its source, in its order, and the bytes it wrote at its destination, in the same order,
//! are the same bytes if and only if the transfer is right; so both ranks digest their side and compare. The order is that
//! of byte positions ([`kvferry_transport::strips`]), so a digest does not depend on how a cursor or a backend
//! splits descriptors, nor on the number of threads.
//!
//! The bytes are cut into *leaves* of [`LEAF`] bytes; the root is the digest of the leaves' digests and the length. Leaves let
//! several threads work on one batch, and say where two sides differ. The hash is BLAKE3, 256 bits: several GB/s
//! on one core, and no accident or adversary makes two different sides agree.

use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::Region;
use kvferry_transport::region::AccessError;
use kvferry_transport::strips::Strips;

/// Bytes of a leaf; the last one of a batch may have fewer.
pub const LEAF: u64 = 1 << 20;

/// Bytes are gathered here before they are hashed: short runs cost no call of the hash each, and no reference to memory
/// that others may write is made.
const SCRATCH: usize = 64 << 10;

/// A digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Digest(pub [u8; 32]);

/// The digests of one side of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SideDigest {
    /// Of everything.
    pub root: Digest,
    /// Of each leaf in order.
    pub leaves: Vec<Digest>,
    /// How many bytes.
    pub bytes: Bytes,
}

/// A side could not be digested.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// A region that the batch names was not given.
    #[error("the batch names {side} region {region}, which there is not")]
    UnknownRegion {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
    },
    /// The bytes can't be reached.
    #[error("{side} region {region}: {source}")]
    Access {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
        /// Why.
        source: AccessError,
    },
    /// A thread of ours died.
    #[error("a digesting thread panicked")]
    Panicked,
}

/// Digests one side of a batch with up to `threads` threads, one of them the caller's. `region` gives a region by id.
///
/// # Errors
/// If a region is missing, is shorter than the batch was proven for, or isn't host memory.
pub fn digest_side(
    batch: &Arc<BoundedBatch>,
    side: Side,
    region: impl Fn(RegionId) -> Option<Region> + Sync,
    threads: usize,
) -> Result<SideDigest, DigestError> {
    let total = batch.batch().bytes().get();
    let count = total.div_ceil(LEAF);
    let threads = (threads.max(1) as u64).min(count.max(1));
    let part = |t: u64| count * t / threads..count * (t + 1) / threads;
    let work = |leaves: Range<u64>| digest_leaves(batch, side, &region, leaves);
    let leaves = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|t| scope.spawn(move || work(part(t)))).collect();
        let mut leaves = work(part(0))?;
        for other in others {
            leaves.extend(other.join().map_err(|_| DigestError::Panicked)??);
        }
        Ok(leaves)
    })?;
    let mut root = blake3::Hasher::new();
    root.update(&total.to_le_bytes());
    for Digest(leaf) in &leaves {
        root.update(leaf);
    }
    Ok(SideDigest { root: Digest(root.finalize().into()), leaves, bytes: Bytes::new(total) })
}

/// The byte positions of the leaves in which two sides differ; neighbours joined. Everything, if their lengths differ.
#[must_use]
pub fn differences(a: &SideDigest, b: &SideDigest) -> Vec<Range<u64>> {
    let total = a.bytes.max(b.bytes).get();
    if a.bytes != b.bytes || a.leaves.len() != b.leaves.len() {
        return vec![Range { start: 0, end: total }];
    }
    let mut out: Vec<Range<u64>> = Vec::new();
    for ((x, y), i) in a.leaves.iter().zip(&b.leaves).zip(0u64..) {
        let (start, end) = (i * LEAF, ((i + 1) * LEAF).min(total));
        match out.last_mut() {
            _ if x == y => {}
            Some(last) if last.end == start => last.end = end,
            _ => out.push(start..end),
        }
    }
    out
}

fn digest_leaves(
    batch: &BoundedBatch,
    side: Side,
    region: &impl Fn(RegionId) -> Option<Region>,
    leaves: Range<u64>,
) -> Result<Vec<Digest>, DigestError> {
    let mut strips = Strips::new(batch, leaves.start * LEAF..leaves.end * LEAF);
    let mut source = Source { side, region, last: None };
    let mut scratch = vec![0; SCRATCH];
    let mut out = Vec::with_capacity(usize::try_from(leaves.end - leaves.start).unwrap_or(0));
    for leaf in leaves {
        let end = (leaf + 1) * LEAF;
        let mut hasher = blake3::Hasher::new();
        let mut filled = 0;
        while let Some(strip) = strips.next_within(end - strips.position()) {
            let (id, mut offset, stride) = match side {
                Side::Src => (strip.src_region, strip.src_offset, strip.src_stride),
                Side::Dst => (strip.dst_region, strip.dst_offset, strip.dst_stride),
            };
            let region = source.get(id)?;
            for _ in 0..strip.count {
                gather(region, offset, strip.run, &mut scratch, &mut filled, &mut hasher)
                    .map_err(|source| DigestError::Access { side, region: id, source })?;
                offset = offset.wrapping_add(stride);
            }
        }
        hasher.update(&scratch[..filled]);
        out.push(Digest(hasher.finalize().into()));
    }
    Ok(out)
}

/// Appends a run to the scratch, hashing that whenever it is full.
fn gather(
    region: &Region,
    offset: u64,
    run: u64,
    scratch: &mut [u8],
    filled: &mut usize,
    hasher: &mut blake3::Hasher,
) -> Result<(), AccessError> {
    let mut done = 0;
    while done < run {
        let room = &mut scratch[*filled..];
        let take = room.len().min(usize::try_from(run - done).unwrap_or(usize::MAX));
        region.read(offset + done, &mut room[..take])?;
        done += take as u64;
        *filled += take;
        if *filled == scratch.len() {
            hasher.update(scratch);
            *filled = 0;
        }
    }
    Ok(())
}

/// Regions by id, the last one remembered.
struct Source<'a, F> {
    side: Side,
    region: &'a F,
    last: Option<(RegionId, Region)>,
}

impl<F: Fn(RegionId) -> Option<Region>> Source<'_, F> {
    fn get(&mut self, id: RegionId) -> Result<&Region, DigestError> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != id) {
            self.last = (self.region)(id).map(|region| (id, region));
        }
        let side = self.side;
        self.last.as_ref().map(|(_, region)| region).ok_or(DigestError::UnknownRegion { side, region: id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_geometry::batch::Descriptor;
    use kvferry_transport::conformance::sample::{Memory, Rng, Sample, sample, scattered};
    use kvferry_transport::copy::Copier;

    /// The same by the cursor and one flat buffer.
    fn naive(batch: &BoundedBatch, side: Side, regions: &[Region]) -> SideDigest {
        let mut bytes = Vec::new();
        let (mut cursor, mut buffer) = (batch.batch().cursor(), [Descriptor::default(); 5]);
        loop {
            let n = cursor.fill(&mut buffer);
            if n == 0 {
                break;
            }
            for d in &buffer[..n] {
                let (id, offset) =
                    if side == Side::Src { (d.src_region, d.src_offset) } else { (d.dst_region, d.dst_offset) };
                let mut run = vec![0; usize::try_from(d.len).unwrap()];
                regions[id.index()].read(offset, &mut run).unwrap();
                bytes.extend(run);
            }
        }
        let leaves: Vec<_> =
            bytes.chunks(usize::try_from(LEAF).unwrap()).map(|leaf| Digest(blake3::hash(leaf).into())).collect();
        let mut root = (bytes.len() as u64).to_le_bytes().to_vec();
        root.extend(leaves.iter().flat_map(|d| d.0));
        SideDigest { root: Digest(blake3::hash(&root).into()), leaves, bytes: Bytes::new(bytes.len() as u64) }
    }

    fn moved(sample: &Sample, seed: u64) -> Memory {
        let memory = Memory::new(sample, &mut Rng::new(seed), |len| Region::zeroed(len).unwrap());
        let (src, dst) = (&memory.src, &memory.dst);
        let copier =
            Copier::new(sample.batch.clone(), |id| Some(src[id.index()].clone()), |id| Some(dst[id.index()].clone()));
        let copier = copier.unwrap();
        assert_eq!(copier.copy(0..copier.bytes()).bytes, sample.batch.batch().bytes());
        memory
    }

    #[test]
    fn both_sides_of_a_right_transfer_agree_with_the_naive_digest() {
        for seed in 0..150 {
            let sample = sample(&mut Rng::new(seed), 5000);
            let memory = moved(&sample, seed);
            let src = digest_side(&sample.batch, Side::Src, |id| memory.src.get(id.index()).cloned(), 1).unwrap();
            let dst = digest_side(&sample.batch, Side::Dst, |id| memory.dst.get(id.index()).cloned(), 3).unwrap();
            assert_eq!(src, naive(&sample.batch, Side::Src, &memory.src), "seed {seed}");
            assert_eq!(src, dst, "seed {seed}");
        }
    }

    #[test]
    fn several_leaves_and_threads_and_where_they_differ() {
        let sample = scattered(1000, 5003);
        let memory = moved(&sample, 1);
        let digest =
            |threads| digest_side(&sample.batch, Side::Dst, |id| memory.dst.get(id.index()).cloned(), threads).unwrap();
        let right = digest(1);
        assert_eq!(right, naive(&sample.batch, Side::Dst, &memory.dst));
        assert_eq!(right.leaves.len(), 5);
        for threads in [2, 3, 5, 9] {
            assert_eq!(digest(threads), right);
        }
        assert!(differences(&right, &right).is_empty());
        // Run 300 of the order is at destination block 699; its position is in leaf 1. Run 900 is in leaf 4.
        for (run, leaf) in [(300u64, 1u64), (900, 4)] {
            memory.dst[0].fill(5 + (999 - run) * 5004 + 17, 1, 0xaa).unwrap();
            memory.dst[0].fill(5 + (999 - run) * 5004 + 18, 1, 0x55).unwrap();
            assert!(differences(&right, &digest(2)).iter().any(|r| r.contains(&(leaf * LEAF))));
        }
        let total = right.bytes.get();
        assert_eq!(differences(&right, &digest(1)), [LEAF..2 * LEAF, 4 * LEAF..total]);
    }

    #[test]
    fn a_swap_of_equal_multisets_is_seen() {
        let sample = scattered(2, 64);
        let memory = moved(&sample, 2);
        let digest = || digest_side(&sample.batch, Side::Dst, |id| memory.dst.get(id.index()).cloned(), 1).unwrap();
        let before = digest();
        let (mut a, mut b) = ([0; 64], [0; 64]);
        memory.dst[0].read(5, &mut a).unwrap();
        memory.dst[0].read(5 + 65, &mut b).unwrap();
        memory.dst[0].write(5, &b).unwrap();
        memory.dst[0].write(5 + 65, &a).unwrap();
        assert_ne!(digest().root, before.root);
    }

    #[test]
    fn missing_and_short_regions_are_errors() {
        let sample = scattered(2, 64);
        let missing = digest_side(&sample.batch, Side::Src, |_| None, 2);
        assert!(matches!(missing, Err(DigestError::UnknownRegion { side: Side::Src, .. })));
        let short = digest_side(&sample.batch, Side::Dst, |_| Region::zeroed(20), 1);
        assert!(matches!(short, Err(DigestError::Access { side: Side::Dst, .. })));
    }

    #[test]
    fn an_empty_batch_has_a_digest() {
        let sample = kvferry_transport::conformance::sample::empty(1, 1);
        let digest = digest_side(&sample.batch, Side::Src, |_| None, 4).unwrap();
        assert!(digest.leaves.is_empty() && digest.bytes == Bytes::ZERO);
    }
}
