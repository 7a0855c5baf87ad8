//! What of a world is left out: so a failing one is made smaller, and what is left is named when it is run again.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::faults::FaultKind;

/// What is left out. The default is nothing.
///
/// Written as `r1,4/f0/kjitter,cancel`: of the requests only these, of the strikes only these (counted from 0), and none of
/// these kinds of fault.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mask {
    /// The requests that are made; `None`: all.
    pub requests: Option<BTreeSet<u32>>,
    /// The strikes that come; `None`: all.
    pub strikes: Option<BTreeSet<u32>>,
    /// The kinds of fault that don't happen.
    pub without: BTreeSet<FaultKind>,
}

impl Mask {
    /// Whether this request is made.
    #[must_use]
    pub fn makes(&self, request: u32) -> bool {
        self.requests.as_ref().is_none_or(|r| r.contains(&request))
    }

    /// Whether this strike comes.
    #[must_use]
    pub fn strikes(&self, strike: u32) -> bool {
        self.strikes.as_ref().is_none_or(|s| s.contains(&strike))
    }

    /// Whether this kind happens.
    #[must_use]
    pub fn has(&self, kind: FaultKind) -> bool {
        !self.without.contains(&kind)
    }

    /// Whether nothing is left out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self == &Self::default()
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |set: &BTreeSet<u32>| set.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let kinds = self.without.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let parts = [
            self.requests.as_ref().map(|r| format!("r{}", list(r))),
            self.strikes.as_ref().map(|s| format!("f{}", list(s))),
            (!self.without.is_empty()).then(|| format!("k{kinds}")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join("/"))
    }
}

/// A world to run again: `SEED` or `SEED:MASK`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replay {
    /// The seed.
    pub seed: u64,
    /// What is left out.
    pub mask: Mask,
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.seed)?;
        if self.mask.is_empty() { Ok(()) } else { write!(f, ":{}", self.mask) }
    }
}

/// A text that is no [`Replay`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no SEED[:MASK]: {why}; write it as a failing run prints it, such as 17:r1,4/f0/kjitter")]
pub struct ReplayError {
    text: String,
    why: String,
}

impl FromStr for Replay {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, ReplayError> {
        let wrong = |why: String| ReplayError { text: text.into(), why };
        let (seed, parts) = text.split_once(':').unwrap_or((text, ""));
        let seed = seed.parse().map_err(|_| wrong(format!("{seed:?} is no number")))?;
        let mut mask = Mask::default();
        for part in parts.split('/').filter(|p| !p.is_empty()) {
            let (what, list) = part.split_at(part.chars().next().map_or(0, char::len_utf8));
            let names = || list.split(',').filter(|n| !n.is_empty());
            let numbers = || {
                let number = |n: &str| n.parse().map_err(|_| wrong(format!("{n:?} is no number")));
                names().map(number).collect::<Result<BTreeSet<u32>, _>>()
            };
            match what {
                "r" => mask.requests = Some(numbers()?),
                "f" => mask.strikes = Some(numbers()?),
                "k" => {
                    for name in names() {
                        let kind = FaultKind::ALL.iter().find(|k| k.name() == name);
                        mask.without.insert(*kind.ok_or_else(|| wrong(format!("there is no kind of fault {name:?}")))?);
                    }
                }
                _ => return Err(wrong(format!("a part begins with {what:?}, and not with r, f or k"))),
            }
        }
        Ok(Self { seed, mask })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_reads_as_it_is_written() {
        for text in ["7", "7:r1,3", "7:f", "18446744073709551615:r0/f2,9/kjitter,twice"] {
            let replay: Replay = text.parse().unwrap();
            assert_eq!(replay.to_string(), text);
        }
        for text in ["", "x", "7:q1", "7:r1,b", "7:kno-such"] {
            assert!(text.parse::<Replay>().is_err(), "{text}");
        }
    }
}
