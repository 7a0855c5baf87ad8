//! Giving ranks their network devices.

use std::collections::BTreeMap;
use std::fmt;

use super::{Distance, Nic, NicKind, Place, Topology, distance};

/// A rank, and where its memory is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankPlace {
    /// The rank.
    pub rank: u32,
    /// Where its memory is.
    pub place: Place,
}

/// What counts more where not both can be had.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Prefer {
    /// No device has more ranks than it must: a far device of one's own has more bandwidth than a near one that is shared.
    #[default]
    Even,
    /// Every rank has the nearest.
    Near,
}

/// How devices are given. The default: one each, by distance, RDMA devices if there are any, none excluded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Ranks whose devices are said, in that order; these are given, whatever their distance.
    pub explicit: BTreeMap<u32, Vec<String>>,
    /// Devices that are never given, by name, or by the beginning of names before a `*`. An RDMA device is excluded by its
    /// interface's name too, and an interface by its RDMA device's.
    pub exclude: Vec<String>,
    /// What kind to give. Default: `None`, RDMA devices if one is up, else interfaces.
    pub kind: Option<NicKind>,
    /// How many devices a rank has, where there are so many. Default: 1.
    pub per_rank: usize,
    /// What counts more. Default: even.
    pub prefer: Prefer,
}

impl Default for Rules {
    fn default() -> Self {
        Self { explicit: BTreeMap::new(), exclude: Vec::new(), kind: None, per_rank: 1, prefer: Prefer::Even }
    }
}

/// No assignment can be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssignError {
    /// A rank's list names what is not there.
    #[error("rank {rank} is given {device:?}, which is not there; there are {}", .known.join(", "))]
    UnknownDevice {
        /// The rank.
        rank: u32,
        /// The name.
        device: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// A rank's list names an excluded device.
    #[error("rank {rank} is given {device}, which {pattern:?} excludes; change one of them")]
    Excluded {
        /// The rank.
        rank: u32,
        /// The device.
        device: String,
        /// What excludes it.
        pattern: String,
    },
    /// A rank's list names a device that is down.
    #[error("rank {rank} is given {device}, which is down; bring it up or give another")]
    Down {
        /// The rank.
        rank: u32,
        /// The device.
        device: String,
    },
    /// A rank's list is empty, or says a device twice.
    #[error("rank {rank} is given the devices {}: a list has at least one, and none twice", .list.join(", "))]
    List {
        /// The rank.
        rank: u32,
        /// Its list.
        list: Vec<String>,
    },
    /// The same rank twice.
    #[error("rank {rank} is there twice")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
    /// No device is left.
    #[error("no network device can be given: {}", if .seen.is_empty() { "there is none".to_owned() } else { .seen.join(", ") })]
    NoDevice {
        /// Each with the reason against it.
        seen: Vec<String>,
    },
}

/// Why a rank has a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Why {
    /// It was said.
    Explicit,
    /// None is nearer.
    Nearest(Distance),
    /// Nearer ones have their share of ranks.
    Shared {
        /// How far it is.
        distance: Distance,
        /// The nearest.
        nearest: String,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Explicit => f.write_str("as configured"),
            Self::Nearest(distance) => write!(f, "nearest: {distance}"),
            Self::Shared { distance, nearest } => {
                write!(f, "{distance}; {nearest} is nearer and has its share of ranks")
            }
        }
    }
}

/// The devices of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The rank.
    pub rank: u32,
    /// Its devices, and why each.
    pub devices: Vec<(String, Why)>,
}

/// The devices of every rank, in the order in which the ranks were given.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Assignment {
    /// A choice for each.
    pub choices: Vec<Choice>,
}

impl Assignment {
    /// The names of a rank's devices.
    #[must_use]
    pub fn devices(&self, rank: u32) -> Vec<&str> {
        let choice = self.choices.iter().find(|c| c.rank == rank);
        choice.map_or(Vec::new(), |c| c.devices.iter().map(|(name, _)| name.as_str()).collect())
    }
}

impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, choice) in self.choices.iter().enumerate() {
            let end = if i == 0 { "" } else { "\n" };
            let devices: Vec<_> = choice.devices.iter().map(|(name, why)| format!("{name} ({why})")).collect();
            write!(f, "{end}rank {}: {}", choice.rank, devices.join(", "))?;
        }
        Ok(())
    }
}

/// Gives every rank its devices. A device that is down, excluded or virtual is given to none.
///
/// # Errors
/// What is wrong with the rules, or why no device is left.
pub fn assign(topology: &Topology, ranks: &[RankPlace], rules: &Rules) -> Result<Assignment, AssignError> {
    if let Some(twice) = ranks.iter().enumerate().find(|(i, r)| ranks[..*i].iter().any(|other| other.rank == r.rank)) {
        return Err(AssignError::RankTwice { rank: twice.1.rank });
    }
    let mut choices = Vec::with_capacity(ranks.len());
    for place in ranks {
        let list =
            rules.explicit.get(&place.rank).map_or(Ok(Vec::new()), |list| said(topology, rules, place.rank, list))?;
        choices.push(Choice { rank: place.rank, devices: list });
    }
    let free: Vec<usize> = (0..ranks.len()).filter(|&i| choices[i].devices.is_empty()).collect();
    if !free.is_empty() {
        let nics = candidates(topology, rules)?;
        by_distance(topology, ranks, rules, &nics, &free, &mut choices);
    }
    Ok(Assignment { choices })
}

/// The devices that a rank's list says.
fn said(topology: &Topology, rules: &Rules, rank: u32, list: &[String]) -> Result<Vec<(String, Why)>, AssignError> {
    if list.is_empty() || (1..list.len()).any(|i| list[..i].contains(&list[i])) {
        return Err(AssignError::List { rank, list: list.to_vec() });
    }
    let each = |name: &String| {
        let device = name.clone();
        let Some(nic) = topology.nic(name) else {
            let known = topology.nics.iter().map(|nic| nic.name.clone()).collect();
            return Err(AssignError::UnknownDevice { rank, device, known });
        };
        match excluded(rules, nic) {
            Some(pattern) => Err(AssignError::Excluded { rank, device, pattern: pattern.to_owned() }),
            None if !nic.up => Err(AssignError::Down { rank, device }),
            None => Ok((device, Why::Explicit)),
        }
    };
    list.iter().map(each).collect()
}

/// The pattern that excludes a device under one of its names.
fn excluded<'a>(rules: &'a Rules, nic: &Nic) -> Option<&'a str> {
    let fits = |pattern: &str, name: &str| match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    };
    let names = || std::iter::once(&nic.name).chain(&nic.aliases);
    rules.exclude.iter().find(|pattern| names().any(|name| fits(pattern, name))).map(String::as_str)
}

fn candidates<'a>(topology: &'a Topology, rules: &Rules) -> Result<Vec<&'a Nic>, AssignError> {
    let against = |nic: &Nic| match excluded(rules, nic) {
        Some(pattern) => Some(format!("{} is excluded by {pattern:?}", nic.name)),
        None if nic.pci.is_none() => Some(format!("{} is virtual", nic.name)),
        None if !nic.up => Some(format!("{} is down", nic.name)),
        None => None,
    };
    let usable = |kind| move |nic: &&Nic| nic.kind == kind && against(nic).is_none();
    let default = || {
        let rdma = topology.nics.iter().any(|nic| usable(NicKind::Rdma)(&nic));
        if rdma { NicKind::Rdma } else { NicKind::Interface }
    };
    let kind = rules.kind.unwrap_or_else(default);
    let nics: Vec<_> = topology.nics.iter().filter(usable(kind)).collect();
    if nics.is_empty() {
        let of_kind = topology.nics.iter().filter(|nic| rules.kind.is_none_or(|kind| kind == nic.kind));
        return Err(AssignError::NoDevice { seen: of_kind.filter_map(against).collect() });
    }
    Ok(nics)
}

/// The nearest pairs first; where ranks are shared out evenly, a device that has its share takes no more.
fn by_distance(
    topology: &Topology,
    ranks: &[RankPlace],
    rules: &Rules,
    nics: &[&Nic],
    free: &[usize],
    choices: &mut [Choice],
) {
    let far = |rank: usize, nic: &Nic| distance(topology, &ranks[rank].place, nic);
    let per_rank = rules.per_rank.clamp(1, nics.len());
    // What was said counts too.
    let mut load: Vec<usize> = nics
        .iter()
        .map(|nic| choices.iter().filter(|c| c.devices.iter().any(|(name, _)| *name == nic.name)).count())
        .collect();
    let said: usize = load.iter().sum();
    for round in 1..=per_rank {
        let share = match rules.prefer {
            Prefer::Even => (said + free.len() * round).div_ceil(nics.len()),
            Prefer::Near => usize::MAX,
        };
        let mut open: Vec<usize> = free.to_vec();
        while !open.is_empty() {
            let pairs = |most: usize| {
                let all = open.iter().flat_map(|&rank| (0..nics.len()).map(move |n| (rank, n)));
                all.filter(|&(rank, n)| load[n] < most && !has(&choices[rank], nics[n]))
                    .min_by_key(|&(rank, n)| (far(rank, nics[n]), load[n], rank, n))
            };
            // What was said may have filled a device beyond its share, and a rank may have those with room already.
            let Some((rank, n)) = pairs(share).or_else(|| pairs(usize::MAX)) else { break };
            let nearest = nics.iter().filter(|nic| !has(&choices[rank], nic)).min_by_key(|nic| far(rank, nic));
            let distance = far(rank, nics[n]);
            let why = match nearest {
                Some(nearest) if far(rank, nearest) < distance => {
                    Why::Shared { distance, nearest: nearest.name.clone() }
                }
                _ => Why::Nearest(distance),
            };
            choices[rank].devices.push((nics[n].name.clone(), why));
            load[n] += 1;
            open.retain(|&r| r != rank);
        }
    }
}

fn has(choice: &Choice, nic: &Nic) -> bool {
    choice.devices.iter().any(|(name, _)| *name == nic.name)
}
