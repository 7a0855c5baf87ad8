//! Bands around a region that tell where they were touched.
//!
//! ```
//! use kvferry_memory::guard::Guarded;
//! let whole = kvferry_transport::Region::zeroed(4096).unwrap();
//! let guarded = Guarded::new(whole.clone(), 64).unwrap();
//! assert_eq!(guarded.inner().len().get(), 4096 - 128);
//! guarded.check()?;
//! whole.fill(4096 - 64, 1, 0)?; // the first byte behind
//! assert_eq!(guarded.check().unwrap_err().touched[0].offset, 4096 - 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;

use kvferry_transport::Region;
use kvferry_transport::region::AccessError;

use crate::pattern::{self, Mismatch};

/// A region with a band of known bytes on either side of what is used.
#[derive(Clone, Debug)]
pub struct Guarded {
    whole: Region,
    inner: Region,
    band: u64,
    seed: u64,
}

/// Bands that were touched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Touched {
    /// One for each band that was; offsets are in the whole region, bands included.
    pub touched: Vec<Mismatch>,
    /// Where the inner region lies in the whole.
    pub inner: std::ops::Range<u64>,
}

impl fmt::Display for Touched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("guard bytes were written")?;
        for m in &self.touched {
            let (side, distance) = if m.offset < self.inner.start {
                ("before the start", self.inner.start - m.offset)
            } else {
                ("after the end", m.offset - self.inner.end + 1)
            };
            write!(f, "; {} {side}, the first is byte {distance} {side}", m.count)?;
        }
        Ok(())
    }
}

impl std::error::Error for Touched {}

impl Guarded {
    /// Takes a band of `band` bytes off each end of `whole` and fills it. `None` if nothing is left between, or the CPU
    /// cannot reach the memory.
    #[must_use]
    pub fn new(whole: Region, band: usize) -> Option<Self> {
        let len = usize::try_from(whole.len().get()).ok()?;
        let left = len.checked_sub(band.checked_mul(2)?).filter(|left| *left > 0)?;
        let inner = whole.part(band, left)?;
        let guarded = Self { seed: whole.address() as u64, band: band as u64, whole, inner };
        guarded.reset().ok()?;
        Some(guarded)
    }

    /// What is between the bands.
    #[must_use]
    pub fn inner(&self) -> &Region {
        &self.inner
    }

    /// Fills the bands anew.
    ///
    /// # Errors
    /// If the CPU cannot reach the memory.
    pub fn reset(&self) -> Result<(), AccessError> {
        self.bands()
            .into_iter()
            .try_for_each(|at| pattern::fill(&self.whole, at, self.band, pattern::background(self.seed), at))
    }

    /// Whether the bands are as they were.
    ///
    /// # Errors
    /// Where they are not.
    pub fn check(&self) -> Result<(), Touched> {
        let place = pattern::background(self.seed);
        // The ranges were proven when the bands were filled, so there is no other error.
        let compare = |at| pattern::check(&self.whole, at, self.band, place, at).ok().flatten();
        let touched: Vec<_> = self.bands().into_iter().filter_map(compare).collect();
        if touched.is_empty() {
            return Ok(());
        }
        Err(Touched { touched, inner: self.band..self.band + self.inner.len().get() })
    }

    fn bands(&self) -> [u64; 2] {
        [0, self.band + self.inner.len().get()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inside_is_free_and_the_bands_are_not() {
        let whole = Region::zeroed(1000).unwrap();
        let guarded = Guarded::new(whole.clone(), 100).unwrap();
        guarded.inner().fill(0, 800, 0xee).unwrap();
        guarded.check().unwrap();
        for at in [0, 99, 900, 999] {
            let mut old = [0];
            whole.read(at, &mut old).unwrap();
            whole.write(at, &[!old[0]]).unwrap();
            let touched = guarded.check().unwrap_err();
            assert_eq!((touched.touched.len(), touched.touched[0].offset, touched.touched[0].count), (1, at, 1));
            guarded.reset().unwrap();
            guarded.check().unwrap();
        }
        whole.fill(98, 804, 0).unwrap();
        let text = guarded.check().unwrap_err().to_string();
        assert!(text.contains("the first is byte 2 before the start"), "{text}");
        assert!(text.contains("the first is byte 1 after the end"), "{text}");
    }

    #[test]
    fn bands_need_room() {
        assert!(Guarded::new(Region::zeroed(200).unwrap(), 100).is_none());
        assert!(Guarded::new(Region::zeroed(200).unwrap(), usize::MAX).is_none());
        assert!(Guarded::new(Region::zeroed(201).unwrap(), 100).is_some());
    }
}
