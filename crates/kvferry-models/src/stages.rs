//! Which layers a pipeline stage holds.

/// Layers, in the order given, as `(first, last)` both included.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct StageLayers(pub Vec<(u32, u32)>);

impl StageLayers {
    /// Reads `0-7, 16, 20-23`; `None` where a part isn't a number or a rising range, or there are more than 1024 parts.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut out = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            if first > last || out.len() >= 1024 {
                return None;
            }
            out.push((first, last));
        }
        Some(Self(out))
    }

    /// Whether the stage holds a layer.
    #[must_use]
    pub fn holds(&self, layer: u32) -> bool {
        self.0.iter().any(|&(first, last)| (first..=last).contains(&layer))
    }
}

/// How many of `layers` each of `stages` holds when they are cut evenly, as vLLM cuts them: what is left over goes one
/// each to the stages before the last, from the back, since the last also computes the logits.
///
/// ```
/// assert_eq!(kvferry_models::even_stages(61, 4), [15, 15, 16, 15]);
/// assert_eq!(kvferry_models::even_stages(32, 5), [6, 6, 7, 7, 6]);
/// ```
#[must_use]
pub fn even_stages(layers: u32, stages: u32) -> Vec<u32> {
    let n = stages.max(1);
    let left = layers % n;
    // Stage i of n gets one more where it is among the `left` stages before the last.
    (0..n).map(|i| layers / n + u32::from(i + 1 < n && i + 1 + left >= n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_cuts_give_the_rest_to_the_stages_before_the_last() {
        for n in 1..=9 {
            for layers in 0..60 {
                let cut = even_stages(layers, n);
                assert_eq!(cut.iter().sum::<u32>(), layers);
                assert!(cut.iter().max().unwrap() - cut.iter().min().unwrap() <= 1);
            }
        }
        assert_eq!(even_stages(7, 4), [2, 2, 2, 1]);
        assert_eq!(even_stages(32, 2), [16, 16]);
    }

    #[test]
    fn lists_of_layers_are_read() {
        let stage = StageLayers::parse("0-2, 7,9-9").unwrap();
        let held: Vec<u32> = (0..12).filter(|&l| stage.holds(l)).collect();
        assert_eq!(held, [0, 1, 2, 7, 9]);
        for bad in ["", "3-1", "a", "1-", "-1", "1,,2"] {
            assert_eq!(StageLayers::parse(bad), None, "{bad:?}");
        }
    }
}
