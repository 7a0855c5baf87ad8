//! All candidates that work as points between the two axes, with the front through those that no other beats.

use std::fmt::Write as _;

use super::super::axis::{Linear, Logarithmic, Tick};
use super::super::figures::As;
use super::super::html::{self, percent};
use super::super::plot::{self, Plot};
use crate::sweep::{Objective, Report};

/// The most points that are drawn.
const POINTS: usize = 3_000;
/// From which ratio of the largest to the smallest on an axis is logarithmic.
const WIDE: f64 = 8.0;

/// What the figures of an objective are.
pub(super) fn unit(objective: Objective) -> As {
    match objective {
        Objective::HandoverP50 | Objective::HandoverP99 | Objective::FirstTokenP99 => As::Time,
        Objective::HotLink => As::Share,
        Objective::Descriptors | Objective::Gpus => As::Count,
    }
}

/// One axis.
enum Axis {
    Linear(Linear),
    Logarithmic(Logarithmic),
}

impl Axis {
    fn new(objective: Objective, values: &[f64]) -> Self {
        let (low, high) =
            (values.iter().copied().fold(f64::INFINITY, f64::min), values.iter().copied().fold(0.0, f64::max));
        if low > 0.0 && high / low > WIDE {
            Self::Logarithmic(Logarithmic::new(low / 1.15, high * 1.15, unit(objective)))
        } else {
            Self::Linear(Linear::new(high * 1.05, 5.0, unit(objective), false))
        }
    }

    fn at(&self, value: f64) -> f64 {
        match self {
            Self::Linear(axis) => axis.at(value),
            Self::Logarithmic(axis) => axis.at(value),
        }
    }

    fn ticks(&self) -> &[Tick] {
        match self {
            Self::Linear(axis) => &axis.ticks,
            Self::Logarithmic(axis) => &axis.ticks,
        }
    }

    fn title(&self, objective: Objective) -> String {
        let how = if matches!(self, Self::Logarithmic(_)) { " (logarithmic)" } else { "" };
        format!("{}{how}", objective.title())
    }
}

pub(super) fn draw(report: &Report<'_>) -> String {
    let axes = report.question.axes;
    if report.ranked.is_empty() {
        return "<p class=\"none\">No candidate works.</p>".to_owned();
    }
    let point = |at: &usize| report.row(*at).map(|(_, f)| (axes.0.value(f), axes.1.value(f)));
    let all: Vec<(f64, f64)> = report.ranked.iter().filter_map(point).collect();
    let (x, y): (Vec<f64>, Vec<f64>) = all.into_iter().unzip();
    let (x, y) = (Axis::new(axes.0, &x), Axis::new(axes.1, &y));
    let mut over = String::new();
    let mut circle = |at: usize, class: &str, r: u32, rank: Option<usize>| {
        let Some((candidate, f)) = report.row(at) else { return };
        let value = |o: Objective| unit(o).write(o.value(f));
        let rank = rank.map_or_else(String::new, |rank| format!("#{}: ", rank + 1));
        let _ = write!(
            over,
            "<circle class=\"pt {class}\" cx=\"{}\" cy=\"{}\" r=\"{r}\"><title>{rank}{}: {}, {}</title></circle>",
            percent(x.at(axes.0.value(f))),
            percent(1.0 - y.at(axes.1.value(f))),
            html::name(&candidate.to_string()),
            html::number(&value(axes.0)),
            html::number(&value(axes.1)),
        );
    };
    // The worst first, so that the better ones lie above.
    for (rank, at) in report.ranked.iter().enumerate().take(POINTS).rev() {
        circle(*at, "", 3, Some(rank));
    }
    let steps = report.steps();
    for (at, _) in &steps {
        circle(*at, "on", 6, None);
    }
    if let Some(best) = report.ranked.first() {
        circle(*best, "best", 6, Some(0));
    }
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (at, _) in &steps {
        let Some((_, f)) = report.row(*at) else { continue };
        let (px, py) = (x.at(axes.0.value(f)), y.at(axes.1.value(f)));
        // From step to step: up to the next, what the last has is the best.
        points.extend(points.last().copied().map(|last| (px, last.1)));
        points.push((px, py));
    }
    points.extend(points.last().copied().map(|last| (1.0, last.1)));
    let line = format!("<path class=\"step\" d=\"{}\"/>", plot::path(&points));
    let label = format!("{} against {} of {} candidates", axes.1.title(), axes.0.title(), report.ranked.len());
    let mut out = String::from(
        "<ul class=\"key\"><li class=\"best\">the best</li><li class=\"on\">no other is better in both</li><li class=\"other\">the others</li></ul>\n",
    );
    out.push_str(
        &Plot {
            label: &label,
            height: 380,
            x: x.ticks(),
            x_title: &x.title(axes.0),
            x_lines: true,
            y: y.ticks(),
            y_title: &y.title(axes.1),
            stretched: &line,
            over: &format!("<svg class=\"o\" width=\"100%\" height=\"100%\">{over}</svg>"),
        }
        .draw(),
    );
    if report.ranked.len() > POINTS {
        let _ = write!(out, "<p class=\"more\">The best {POINTS} of {} are drawn.</p>", report.ranked.len());
    }
    out
}
