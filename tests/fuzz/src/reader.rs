//! Choices read from bytes: small values mostly, now and then the extremes at which arithmetic breaks.

/// Reads choices from the front of some bytes; past their end every choice is 0.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader at the first byte.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Whether all bytes are used up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What is left.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    /// A number below `n`, which is at most 256.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// One in two.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One in sixteen.
    pub fn rare(&mut self) -> bool {
        self.byte() >= 240
    }

    /// Any number: small ones, ones of any length, powers of two and their neighbours, the largest.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=127 => u64::from(small),
            128..=159 => self.little_endian(2),
            160..=175 => self.little_endian(4),
            176..=191 => self.little_endian(8),
            255 => u64::MAX,
            power => {
                let near = u64::from(self.byte() % 3);
                (1u64 << (power - 192)).wrapping_add(near).wrapping_sub(1)
            }
        }
    }

    /// As [`number`](Self::number), cut to 32 bits; what is larger is the largest.
    pub fn number32(&mut self) -> u32 {
        u32::try_from(self.number()).unwrap_or(u32::MAX)
    }

    /// One of the usual values, or one time in sixteen any.
    pub fn usual(&mut self, values: &[u64]) -> u64 {
        let byte = self.byte();
        if byte >= 240 { self.number() } else { values[usize::from(byte) % values.len()] }
    }

    /// As [`usual`](Self::usual), cut to 32 bits.
    pub fn usual32(&mut self, values: &[u64]) -> u32 {
        u32::try_from(self.usual(values)).unwrap_or(u32::MAX)
    }

    fn little_endian(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |n, i| n | u64::from(self.byte()) << (8 * i))
    }
}
