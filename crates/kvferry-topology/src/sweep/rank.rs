//! What is better: objectives, the order by one of them, and the front of two.

use std::cmp::Ordering;

use serde::Serialize;

use super::candidate::Candidate;
use super::outcome::Figures;

/// Something of which less is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub enum Objective {
    /// The median of the handover.
    #[serde(rename = "handover-p50")]
    HandoverP50,
    /// Its 99th percentile.
    #[serde(rename = "handover-p99")]
    HandoverP99,
    /// The 99th percentile of the time to first token.
    #[serde(rename = "ttft-p99")]
    FirstTokenP99,
    /// How full the fullest link is.
    #[serde(rename = "hot-link")]
    HotLink,
    /// Descriptors of a request.
    #[serde(rename = "descriptors")]
    Descriptors,
    /// GPUs of all engines.
    #[serde(rename = "gpus")]
    Gpus,
}

impl Objective {
    /// All; of those that are equal in one, the next decides.
    pub const ALL: [Self; 6] =
        [Self::HandoverP50, Self::HandoverP99, Self::FirstTokenP99, Self::HotLink, Self::Descriptors, Self::Gpus];

    /// As the command line and JSON write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HandoverP50 => "handover-p50",
            Self::HandoverP99 => "handover-p99",
            Self::FirstTokenP99 => "ttft-p99",
            Self::HotLink => "hot-link",
            Self::Descriptors => "descriptors",
            Self::Gpus => "gpus",
        }
    }

    /// That of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|o| o.name() == name)
    }

    /// In words.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::HandoverP50 => "handover, median",
            Self::HandoverP99 => "handover, p99",
            Self::FirstTokenP99 => "time to first token, p99",
            Self::HotLink => "fullest link, mean",
            Self::Descriptors => "descriptors of a request",
            Self::Gpus => "GPUs",
        }
    }

    /// The figure that it is.
    #[must_use]
    pub fn value(self, figures: &Figures) -> f64 {
        match self {
            Self::HandoverP50 => figures.handover_p50,
            Self::HandoverP99 => figures.handover_p99,
            Self::FirstTokenP99 => figures.first_token_p99,
            Self::HotLink => figures.hot_link,
            Self::Descriptors => figures.descriptors,
            Self::Gpus => f64::from(figures.gpus),
        }
    }

    /// This one, then the others in their order.
    pub fn with_ties(self) -> impl Iterator<Item = Self> {
        std::iter::once(self).chain(Self::ALL.into_iter().filter(move |o| *o != self))
    }

    /// Which of two is the better: by this, then by the others in the order of [`ALL`](Self::ALL), then by their names.
    #[must_use]
    pub fn compare(self, a: (&Figures, &Candidate), b: (&Figures, &Candidate)) -> Ordering {
        let by = |o: Self| o.value(a.0).total_cmp(&o.value(b.0));
        let figures = self.with_ties().map(by).find(|o| o.is_ne()).unwrap_or(Ordering::Equal);
        figures.then_with(|| a.1.to_string().cmp(&b.1.to_string())).then_with(|| a.1.cmp(b.1))
    }
}

/// The points that no other is as good as in both and better than in one, by the first figure; equal points are all of them on it.
#[must_use]
pub fn front(points: &[(f64, f64)]) -> Vec<usize> {
    let by = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
    let mut order: Vec<(usize, (f64, f64))> = points.iter().copied().enumerate().collect();
    order.sort_by(|a, b| by(&a.1, &b.1).then(a.0.cmp(&b.0)));
    let mut out = Vec::new();
    // The last point of the front: what comes now is no better in the first figure.
    let mut last: Option<(f64, f64)> = None;
    for (at, point) in order {
        let equal = last.is_some_and(|l| by(&l, &point).is_eq());
        if equal || last.is_none_or(|l| point.1.total_cmp(&l.1).is_lt()) {
            out.push(at);
            last = Some(point);
        }
    }
    out
}
