//! Random batches in product form with memory to try them on, and what must come out.

use std::sync::Arc;

use arrayvec::ArrayVec;
use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Descriptor, Dim, MAX_DIMS, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};

use crate::region::Region;
pub use crate::rng::Rng;

/// A random batch. Its destinations never overlap; its sources may be read twice.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The batch, proven against the lengths below.
    pub batch: Arc<BoundedBatch>,
    /// Lengths of the source regions by id.
    pub src_lens: Vec<Bytes>,
    /// Lengths of the destination regions by id.
    pub dst_lens: Vec<Bytes>,
}

/// A random batch over up to three regions on either side, of roughly up to `about` bytes: nests of up to four loops in
/// different orders on both sides, padding, scattered and stepped block pairs, several bases and parts.
#[must_use]
pub fn sample(rng: &mut Rng, about: u64) -> Sample {
    let (mut src, mut dst) = (Sides::new(rng), Sides::new(rng));
    let sections = (0..1 + rng.below(2)).map(|_| section(rng, about / 2, &mut src, &mut dst)).collect();
    finish(Batch::new(sections), src.ends, dst.ends)
}

/// A batch of `count` runs of `run` bytes, all apart on both sides, in one region each.
#[must_use]
pub fn scattered(count: u32, run: u64) -> Sample {
    let pairs: Vec<_> = (0..count).map(|i| PairRun { src: 2 * i, dst: count - 1 - i, count: 1 }).collect();
    let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 3, dst_offset: 5 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: run,
        dst_block_stride: run + 1,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(run),
        pairs: pairs.into(),
    };
    let ends = (3 + 2 * u64::from(count) * run, 5 + u64::from(count) * (run + 1));
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    finish(batch, vec![ends.0 + 7], vec![ends.1 + 7])
}

/// A batch of no bytes for regions of the given lengths.
#[must_use]
pub fn empty(src: u64, dst: u64) -> Sample {
    finish(Batch::default(), vec![src], vec![dst])
}

fn finish(batch: Batch, src: Vec<u64>, dst: Vec<u64>) -> Sample {
    let lens = |ends: Vec<u64>| ends.into_iter().map(|e| Bytes::new(e + 1)).collect::<Vec<_>>();
    let (src_lens, dst_lens) = (lens(src), lens(dst));
    // The generator lays everything out inside the ends; were it wrong, the suite would test nothing and must say so.
    #[allow(clippy::expect_used, reason = "see above")]
    let batch = Arc::new(batch.check(&src_lens, &dst_lens).expect("the sample's batch stays inside its regions"));
    Sample { batch, src_lens, dst_lens }
}

/// The regions of one side and where the next free byte of each is.
struct Sides {
    ends: Vec<u64>,
}

impl Sides {
    fn new(rng: &mut Rng) -> Self {
        Self { ends: (0..1 + rng.below(3)).map(|_| rng.below(40)).collect() }
    }

    /// A place for `len` bytes in some region.
    fn place(&mut self, rng: &mut Rng, len: u64) -> (RegionId, u64) {
        let region = rng.below(self.ends.len() as u64);
        let id = RegionId::new(u32::try_from(region).unwrap_or(0));
        let end = &mut self.ends[id.index()];
        let at = *end + if rng.below(2) == 0 { 0 } else { rng.below(50) };
        *end = at + len;
        (id, at)
    }
}

fn section(rng: &mut Rng, about: u64, src: &mut Sides, dst: &mut Sides) -> Section {
    let (bases, parts) = (1 + rng.below(3), 1 + rng.below(3));
    let (mut src_len, mut dst_len) = (0, 0);
    let budget = (about / (bases * parts)).max(8);
    let parts: Vec<_> = (0..parts).map(|_| part(rng, budget, &mut src_len, &mut dst_len)).collect();
    let base = |_| {
        let (src_region, src_offset) = src.place(rng, src_len);
        let (dst_region, dst_offset) = dst.place(rng, dst_len);
        Base { src_region, dst_region, src_offset, dst_offset }
    };
    Section { bases: (0..bases).map(base).collect(), parts }
}

fn part(rng: &mut Rng, budget: u64, src_len: &mut u64, dst_len: &mut u64) -> Part {
    let run = match rng.below(4) {
        0 => [16, 32, 64, 128, 256][usize::try_from(rng.below(5)).unwrap_or(0)].min(budget),
        _ => 1 + rng.below(budget.min(300)),
    };
    let (nest, src_extent, dst_extent) = nest(rng, run, budget);
    let block = nest.runs() * run;
    let (src_pad, dst_pad) = (rng.pad(), rng.pad());
    let (src_block_stride, dst_block_stride) = (src_extent + src_pad, dst_extent + dst_pad);
    let (src_step, dst_step) = (small(rng, 3), 1 + small(rng, 2));
    let (mut pairs, mut src_blocks, mut dst_blocks) = (Vec::new(), 1, 1);
    let mut next_dst = 0u32;
    let longest = 1 + 3 * rng.below(2);
    for _ in 0..1 + rng.below((budget / block).clamp(1, 12)) {
        let count = 1 + small(rng, longest);
        let (s, d) = (small(rng, 20), next_dst + small(rng, 3));
        pairs.push(PairRun { src: s, dst: d, count });
        src_blocks = src_blocks.max(s + (count - 1) * src_step + 1);
        dst_blocks = dst_blocks.max(d + (count - 1) * dst_step + 1);
        next_dst = d + (count - 1) * dst_step + 1;
    }
    rng.shuffle(&mut pairs);
    let part = Part {
        src_add: *src_len,
        dst_add: *dst_len,
        src_block_stride,
        dst_block_stride,
        src_step,
        dst_step,
        nest,
        pairs: pairs.into(),
    };
    *src_len += u64::from(src_blocks) * src_block_stride;
    *dst_len += u64::from(dst_blocks) * dst_block_stride;
    part
}

/// A nest with the bytes that one block of it spans on either side. The loops are nested in another order on each side.
fn nest(rng: &mut Rng, run: u64, budget: u64) -> (Nest, u64, u64) {
    let mut dims: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
    let mut size = run;
    let loops = if rng.below(3) == 0 { 0 } else { rng.below(5) };
    for _ in 0..loops {
        let count = 1 + rng.below(4);
        if size * count <= budget {
            size *= count;
            dims.push(Dim { count, src_stride: 0, dst_stride: 0 });
        }
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    let (mut src_extent, mut dst_extent) = (run, run);
    rng.shuffle(&mut order);
    for &i in &order {
        dims[i].src_stride = src_extent + rng.pad();
        src_extent = dims[i].src_stride * dims[i].count;
    }
    rng.shuffle(&mut order);
    for &i in &order {
        dims[i].dst_stride = dst_extent + rng.pad();
        dst_extent = dims[i].dst_stride * dims[i].count;
    }
    (Nest { dims, run }, src_extent, dst_extent)
}

fn small(rng: &mut Rng, below: u64) -> u32 {
    u32::try_from(rng.below(below)).unwrap_or(0)
}

/// Memory for a sample, filled with random bytes, and a copy of what was filled in.
#[derive(Debug)]
pub struct Memory {
    /// Source regions by id.
    pub src: Vec<Region>,
    /// Destination regions by id.
    pub dst: Vec<Region>,
    src_before: Vec<Vec<u8>>,
    dst_before: Vec<Vec<u8>>,
}

impl Memory {
    /// Memory from `region`, which gives a fresh region of a length.
    #[must_use]
    pub fn new(sample: &Sample, rng: &mut Rng, mut region: impl FnMut(usize) -> Region) -> Self {
        let mut side = |lens: &[Bytes]| -> (Vec<Region>, Vec<Vec<u8>>) {
            let fresh = |len: &Bytes| {
                let bytes = rng.bytes(usize::try_from(len.get()).unwrap_or(0));
                let region = region(bytes.len());
                let written = region.write(0, &bytes);
                debug_assert_eq!(written, Ok(()));
                (region, bytes)
            };
            lens.iter().map(fresh).unzip()
        };
        let (src, src_before) = side(&sample.src_lens);
        let (dst, dst_before) = side(&sample.dst_lens);
        Self { src, dst, src_before, dst_before }
    }

    /// Whether the destination is byte for byte what the batch makes of it, and all other bytes are as they were.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn check(&self, sample: &Sample) -> Result<(), String> {
        let mut expected = self.dst_before.clone();
        for d in descriptors(&sample.batch) {
            let at = |v: u64| usize::try_from(v).unwrap_or(usize::MAX);
            let from = &self.src_before[d.src_region.index()][at(d.src_offset)..at(d.src_offset + d.len)];
            expected[d.dst_region.index()][at(d.dst_offset)..at(d.dst_offset + d.len)].copy_from_slice(from);
        }
        compare("destination", &self.dst, &expected)?;
        compare("source", &self.src, &self.src_before)
    }

    /// Whether no byte outside the batch's destinations has changed; those inside may be old or new.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn check_outside(&self, sample: &Sample) -> Result<(), String> {
        let mut expected = self.dst_before.clone();
        for d in descriptors(&sample.batch) {
            let at = |v: u64| usize::try_from(v).unwrap_or(usize::MAX);
            let place = d.dst_region.index();
            let range = at(d.dst_offset)..at(d.dst_offset + d.len);
            self.dst[place].read(d.dst_offset, &mut expected[place][range]).map_err(|e| e.to_string())?;
        }
        compare("destination", &self.dst, &expected)?;
        compare("source", &self.src, &self.src_before)
    }

    /// Whether no byte has changed.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn check_untouched(&self) -> Result<(), String> {
        compare("destination", &self.dst, &self.dst_before)?;
        compare("source", &self.src, &self.src_before)
    }
}

fn compare(side: &str, regions: &[Region], expected: &[Vec<u8>]) -> Result<(), String> {
    for (id, (region, expected)) in regions.iter().zip(expected).enumerate() {
        let got = region.to_vec().map_err(|e| e.to_string())?;
        if let Some(at) = (0..got.len()).find(|&i| got[i] != expected[i]) {
            return Err(format!("{side} region {id}, byte {at}: {:#04x} instead of {:#04x}", got[at], expected[at]));
        }
    }
    Ok(())
}

fn descriptors(batch: &BoundedBatch) -> Vec<Descriptor> {
    let mut cursor = batch.batch().cursor();
    let (mut out, mut buffer) = (Vec::new(), [Descriptor::default(); 64]);
    loop {
        let n = cursor.fill(&mut buffer);
        if n == 0 {
            return out;
        }
        out.extend_from_slice(&buffer[..n]);
    }
}
