//! The name of a staged batch, by which two engines know that they compute the same.

use super::Staged;
use crate::batch::Batch;
use crate::digest::{Digest, Digester};

impl Staged {
    /// Names what both engines compute for themselves of a batch that is gathered: the direct batch that it was made of, the
    /// wire step, which says in which order the bytes lie in the buffer, and the local step that puts them there. Equal digests, equal batches in product form; batches that
    /// move the same bytes in other rows may have other digests.
    #[must_use]
    pub fn digest(&self, direct: &Batch) -> Digest {
        let mut d = Digester::new("kvferry staged batch 2");
        for batch in [direct, &self.wire, &self.local] {
            add(&mut d, batch);
        }
        d.number(self.bytes);
        d.finish()
    }
}

fn add(d: &mut Digester, batch: &Batch) {
    d.count(batch.sections().len());
    for section in batch.sections() {
        d.count(section.bases.len());
        for b in section.bases.iter() {
            d.number(u64::from(b.src_region.get()));
            d.number(u64::from(b.dst_region.get()));
            d.number(b.src_offset);
            d.number(b.dst_offset);
        }
        d.count(section.parts.len());
        for p in &section.parts {
            for n in [p.src_add, p.dst_add, p.src_block_stride, p.dst_block_stride, p.nest.run] {
                d.number(n);
            }
            d.number(u64::from(p.src_step));
            d.number(u64::from(p.dst_step));
            d.count(p.nest.dims.len());
            for dim in &p.nest.dims {
                for n in [dim.count, dim.src_stride, dim.dst_stride] {
                    d.number(n);
                }
            }
            d.count(p.pairs.len());
            for pair in p.pairs.iter() {
                for n in [pair.src, pair.dst, pair.count] {
                    d.number(u64::from(n));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    use crate::batch::{Base, Batch, Dim, Nest, PairRun, Part, Section};
    use crate::staged::{Place, Staged};
    use crate::units::RegionId;

    fn section() -> Section {
        let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::new(1), src_offset: 0, dst_offset: 64 };
        let dims = [Dim { count: 4, src_stride: 64, dst_stride: 128 }].into_iter().collect();
        let part = Part {
            src_add: 16,
            dst_add: 0,
            src_block_stride: 256,
            dst_block_stride: 512,
            src_step: 1,
            dst_step: 1,
            nest: Nest { dims, run: 16 },
            pairs: vec![PairRun { src: 2, dst: 0, count: 1 }, PairRun { src: 5, dst: 1, count: 2 }].into(),
        };
        Section { bases: vec![base].into(), parts: vec![part] }
    }

    fn digest(sections: Vec<Section>, staging: u32) -> crate::digest::Digest {
        let direct = Batch::new(sections);
        Staged::new(&direct, Place::Source, RegionId::new(staging)).unwrap().digest(&direct)
    }

    /// Each of the steps has a part in the name: who would do another one is found out.
    #[test]
    fn every_step_is_in_the_name() {
        let direct = Batch::new(vec![section()]);
        let staged = Staged::new(&direct, Place::Source, RegionId::new(9)).unwrap();
        let other = Batch::new(vec![section(), section()]);
        let names = [
            staged.digest(&direct),
            staged.digest(&other),
            Staged { wire: other.clone(), ..staged.clone() }.digest(&direct),
            Staged { local: other, ..staged.clone() }.digest(&direct),
            Staged { bytes: 1, ..staged }.digest(&direct),
        ];
        assert_eq!(BTreeSet::from(names).len(), names.len());
    }

    /// Whatever changes in the batch, or where the buffer is, changes the name.
    #[test]
    fn every_number_of_a_batch_is_in_its_name() {
        let changes: [fn(&mut Section); 14] = [
            |s| s.bases = vec![Base { src_region: RegionId::new(7), ..s.bases[0] }].into(),
            |s| s.bases = vec![Base { dst_region: RegionId::new(7), ..s.bases[0] }].into(),
            |s| s.bases = vec![Base { src_offset: 8, ..s.bases[0] }].into(),
            |s| s.bases = vec![Base { dst_offset: 8, ..s.bases[0] }].into(),
            |s| s.parts[0].src_add = 8,
            |s| s.parts[0].dst_add = 8,
            |s| s.parts[0].src_block_stride = 1024,
            |s| s.parts[0].dst_block_stride = 1024,
            |s| s.parts[0].src_step = 2,
            |s| s.parts[0].nest.run = 8,
            |s| s.parts[0].nest.dims[0].count = 3,
            |s| s.parts[0].nest.dims[0].src_stride = 32,
            |s| s.parts[0].nest.dims[0].dst_stride = 32,
            |s| {
                s.parts[0].pairs =
                    vec![PairRun { src: 5, dst: 1, count: 2 }, PairRun { src: 2, dst: 0, count: 1 }].into()
            },
        ];
        let mut seen = BTreeSet::from([digest(vec![section()], 9)]);
        assert!(!seen.insert(digest(vec![section()], 9)), "the same batch has the same name");
        assert!(seen.insert(digest(vec![section()], 8)));
        for (i, change) in changes.iter().enumerate() {
            let mut changed = section();
            change(&mut changed);
            assert!(seen.insert(digest(vec![changed], 9)), "change {i}");
        }
        assert!(seen.insert(digest(vec![section(), section()], 9)));
    }
}
