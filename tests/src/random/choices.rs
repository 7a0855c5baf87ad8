//! A stream of random choices in which zero is the simplest.

/// Numbers to choose by; after the last one every choice is the simplest.
#[derive(Clone, Debug)]
pub struct Choices {
    data: Vec<u32>,
    at: usize,
    /// State of a generator that goes on where `data` ends; `None` goes on with zeros.
    state: Option<u64>,
}

impl Choices {
    /// Choices from a list of numbers.
    #[must_use]
    pub fn new(data: &[u32]) -> Self {
        Self { data: data.to_vec(), at: 0, state: None }
    }

    /// Endless choices from a seed; seed 0 always makes the simplest.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { data: Vec::new(), at: 0, state: (seed != 0).then_some(seed) }
    }

    /// Endless choices for one part of a case, from one number of this stream. Keeps long parts from using up the
    /// list, and parts from shifting each other while shrinking.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::seeded(u64::from(self.next()))
    }

    fn next(&mut self) -> u32 {
        if let Some(&n) = self.data.get(self.at) {
            self.at += 1;
            return n;
        }
        let Some(state) = &mut self.state else { return 0 };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from(x >> 32).expect("the upper half")
    }

    /// A number below `n`, smaller for smaller choices; 0 where `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n <= 1 << 32);
        (u64::from(self.next()) * n) >> 32
    }

    /// A number from `low` to `high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in `percent` of 100; the simplest is false.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) >= 100 - percent
    }

    /// One of a list; the simplest is the first.
    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()].clone()
    }

    /// A random order; the simplest is the one it has.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in 0..list.len() {
            let j = i + usize::try_from(self.below((list.len() - i) as u64)).unwrap();
            list.swap(i, j);
        }
    }
}
