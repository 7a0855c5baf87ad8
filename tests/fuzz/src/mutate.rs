//! Seeded mutations of a corpus, for tests without a fuzzer.

/// A small generator of numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.number() % n.max(1) as u64).unwrap_or(0)
    }
}

/// Numbers at which arithmetic breaks, as text.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "3",
    "65535",
    "65536",
    "65537",
    "16777216",
    "2147483648",
    "4294967295",
    "4294967296",
    "1099511627776",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e9",
    "0.5",
    "null",
    "true",
    "\"x\"",
    "[]",
    "{}",
    "[1, 2]",
];

/// A neighbour of `data`: one to four changes, some of which take bytes of `other`.
#[must_use]
pub fn mutate(data: &[u8], other: &[u8], is_text: bool, rng: &mut Rng) -> Vec<u8> {
    let mut out = data.to_vec();
    for _ in 0..1 + rng.below(4) {
        if is_text && rng.below(2) == 0 {
            number(&mut out, rng);
        } else {
            change(&mut out, other, rng);
        }
    }
    out
}

fn change(out: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    let at = rng.below(out.len());
    let len = (1 + rng.below(16)).min(out.len() - at.min(out.len()));
    match rng.below(8) {
        0 | 1 => {
            if let Some(byte) = out.get_mut(at) {
                *byte = [0, 1, 127, 128, 240, 254, 255, byte.wrapping_add(1)][rng.below(8)];
            }
        }
        2 | 3 => {
            if let Some(byte) = out.get_mut(at) {
                *byte = rng.number().to_le_bytes()[0];
            }
        }
        4 => drop(out.drain(at..at + len)),
        5 => {
            let copy = out[at..at + len].to_vec();
            out.splice(at..at, copy);
        }
        6 => out.insert(at, rng.number().to_le_bytes()[0]),
        _ => {
            let from = rng.below(other.len());
            let piece = &other[from..(from + 1 + rng.below(64)).min(other.len())];
            let end = (at + len).min(out.len());
            out.splice(at..end, piece.iter().copied());
        }
    }
}

/// A number or word of a text becomes another.
fn number(out: &mut Vec<u8>, rng: &mut Rng) {
    let is_value = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'-';
    let digits: Vec<usize> = (0..out.len()).filter(|&i| out[i].is_ascii_digit()).collect();
    let Some(&at) = digits.get(rng.below(digits.len())) else { return };
    let start = (0..at).rev().find(|&i| !is_value(out[i])).map_or(0, |i| i + 1);
    let end = (at..out.len()).find(|&i| !is_value(out[i])).unwrap_or(out.len());
    out.splice(start..end, NUMBERS[rng.below(NUMBERS.len())].bytes());
}
