//! An engine's parallel sizes, and their short spelling `tp=4,pp=2,dcp=2,pcp=1,pcp_mode=shard,interleave=1`.

use std::fmt;
use std::str::FromStr;

use kvferry_geometry::placement::{MAX_CONTEXT, MAX_RANKS, PcpMode};

use crate::tree::clip;

/// The largest interleave, in tokens.
pub const MAX_INTERLEAVE: u32 = 1 << 20;

/// How many ranks an engine has in each parallel dimension.
///
/// ```
/// use kvferry_models::Shape;
/// let shape: Shape = "tp=4,pp=2".parse()?;
/// assert_eq!((shape.tp, shape.pp, shape.dcp), (4, 2, 1));
/// assert_eq!(shape.to_string(), "tp=4,pp=2");
/// assert!("tp=4,tp=8".parse::<Shape>().is_err());
/// # Ok::<(), kvferry_models::ShapeErrors>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Tensor parallel size.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Decode context parallel size; re-uses the tensor-parallel ranks and divides their number.
    pub dcp: u32,
    /// Prefill context parallel size; multiplies the ranks.
    pub pcp: u32,
    /// What PCP does to the cache.
    pub pcp_mode: PcpMode,
    /// Tokens dealt out at a time between context-parallel ranks (vLLM: `cp_kv_cache_interleave_size`).
    pub interleave: u32,
}

impl Default for Shape {
    /// One rank. PCP, where it is set, shards the cache.
    fn default() -> Self {
        Self { tp: 1, pp: 1, dcp: 1, pcp: 1, pcp_mode: PcpMode::Shard, interleave: 1 }
    }
}

impl Shape {
    /// The limits of the keys that are numbers.
    pub(crate) const LIMITS: [(&'static str, u32); 5] = [
        ("tp", MAX_RANKS),
        ("pp", MAX_RANKS),
        ("dcp", MAX_CONTEXT),
        ("pcp", MAX_CONTEXT),
        ("interleave", MAX_INTERLEAVE),
    ];

    /// How many ranks; at most `u32::MAX` is said.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.tp.saturating_mul(self.pp).saturating_mul(self.pcp)
    }

    /// How many ranks share the tokens of a sequence.
    pub(crate) fn context(&self) -> u32 {
        match self.pcp_mode {
            PcpMode::Shard => self.dcp.saturating_mul(self.pcp),
            PcpMode::Replicate => self.dcp,
        }
    }

    pub(crate) fn set(&mut self, key: &str, value: u32) {
        match key {
            "tp" => self.tp = value,
            "pp" => self.pp = value,
            "dcp" => self.dcp = value,
            "pcp" => self.pcp = value,
            _ => self.interleave = value,
        }
    }

    pub(crate) fn mode(word: &str) -> Option<PcpMode> {
        match word {
            "shard" => Some(PcpMode::Shard),
            "replicate" => Some(PcpMode::Replicate),
            _ => None,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={}", self.tp)?;
        for (key, value) in [("pp", self.pp), ("dcp", self.dcp), ("pcp", self.pcp)] {
            if value > 1 {
                write!(f, ",{key}={value}")?;
            }
        }
        if self.pcp > 1 {
            let mode = match self.pcp_mode {
                PcpMode::Shard => "shard",
                PcpMode::Replicate => "replicate",
            };
            write!(f, ",pcp_mode={mode}")?;
        }
        if self.interleave > 1 {
            write!(f, ",interleave={}", self.interleave)?;
        }
        Ok(())
    }
}

/// A fault of a shape's short spelling.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A part that isn't `key=value`.
    #[error("{got:?} is not key=value; write for example tp=4,pp=2")]
    NotPair {
        /// The part.
        got: String,
    },
    /// A key that isn't known.
    #[error("{got:?} is not a key of a shape; the keys are tp, pp, dcp, pcp, pcp_mode, interleave")]
    UnknownKey {
        /// The key.
        got: String,
    },
    /// A key that stands twice.
    #[error("{key} is given twice; give it once")]
    Repeated {
        /// The key.
        key: &'static str,
    },
    /// A value that isn't a number in range.
    #[error("{key} is {got:?}; it must be a number from 1 to {limit}")]
    NotInRange {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// The largest number allowed.
        limit: u32,
    },
    /// A PCP mode that isn't known.
    #[error("pcp_mode is {got:?}; it must be shard or replicate")]
    UnknownMode {
        /// The word.
        got: String,
    },
}

/// Every fault of a shape's short spelling.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShapeErrors(pub Vec<ShapeError>);

impl fmt::Display for ShapeErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join("; "))
    }
}
impl std::error::Error for ShapeErrors {}

impl FromStr for Shape {
    type Err = ShapeErrors;

    /// Reads `key=value` parts between commas; what isn't given is 1. An empty text is one rank.
    fn from_str(text: &str) -> Result<Self, ShapeErrors> {
        let mut shape = Self::default();
        let mut errors = Vec::new();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()).take(64) {
            let Some((key, value)) = part.split_once('=') else {
                errors.push(ShapeError::NotPair { got: clip(part) });
                continue;
            };
            let (key, value) = (key.trim(), value.trim());
            let number = Self::LIMITS.iter().find(|(k, _)| *k == key);
            let known = match number {
                Some((k, _)) => *k,
                None if key == "pcp_mode" => "pcp_mode",
                None => {
                    errors.push(ShapeError::UnknownKey { got: clip(key) });
                    continue;
                }
            };
            if seen.contains(&known) {
                errors.push(ShapeError::Repeated { key: known });
            }
            seen.push(known);
            match number {
                Some(&(key, limit)) => match value.parse() {
                    Ok(n) if (1..=limit).contains(&n) => shape.set(key, n),
                    _ => errors.push(ShapeError::NotInRange { key, got: clip(value), limit }),
                },
                None => match Self::mode(value) {
                    Some(mode) => shape.pcp_mode = mode,
                    None => errors.push(ShapeError::UnknownMode { got: clip(value) }),
                },
            }
        }
        if errors.is_empty() { Ok(shape) } else { Err(ShapeErrors(errors)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read_and_written_back() {
        let text = "tp=8,pp=2,dcp=4,pcp=2,pcp_mode=replicate,interleave=16";
        let shape: Shape = text.parse().unwrap();
        assert_eq!(shape, Shape { tp: 8, pp: 2, dcp: 4, pcp: 2, pcp_mode: PcpMode::Replicate, interleave: 16 });
        assert_eq!(shape.to_string(), text);
        assert_eq!(shape.ranks(), 32);
        assert_eq!("".parse::<Shape>().unwrap(), Shape::default());
        assert_eq!(" tp = 2 , pp=3".parse::<Shape>().unwrap().pp, 3);
    }

    #[test]
    fn all_faults_are_listed() {
        let errors = "tp=0,tp=2,qp=1,dcp=,pcp_mode=both,x".parse::<Shape>().unwrap_err().0;
        assert_eq!(
            errors,
            vec![
                ShapeError::NotInRange { key: "tp", got: "0".into(), limit: MAX_RANKS },
                ShapeError::Repeated { key: "tp" },
                ShapeError::UnknownKey { got: "qp".into() },
                ShapeError::NotInRange { key: "dcp", got: String::new(), limit: MAX_CONTEXT },
                ShapeError::UnknownMode { got: "both".into() },
                ShapeError::NotPair { got: "x".into() },
            ]
        );
    }
}
