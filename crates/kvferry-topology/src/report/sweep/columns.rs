//! What tells candidates apart: a column for each thing that is not the same for all.

use crate::sweep::candidate::Layout;
use crate::sweep::{Candidate, Report};

/// Which columns there are.
pub(super) struct Columns {
    block: Option<String>,
    layout: Option<String>,
    way: Option<String>,
}

impl Columns {
    pub(super) fn new(report: &Report<'_>) -> Self {
        let all = report.sweep.candidates();
        let same = |of: fn(&Candidate) -> String| {
            let mut values = all.iter().map(of);
            let first = values.next()?;
            values.all(|v| v == first).then_some(first)
        };
        Self { block: same(block), layout: same(layout), way: same(|c| c.way.name().to_owned()) }
    }

    pub(super) fn headings(&self) -> Vec<&'static str> {
        let mut out = vec!["P", "D"];
        for (same, heading) in [(&self.block, "block"), (&self.layout, "layout"), (&self.way, "mode")] {
            if same.is_none() {
                out.push(heading);
            }
        }
        out
    }

    pub(super) fn cells(&self, c: &Candidate) -> Vec<String> {
        let side = |e: &crate::sweep::Engines| format!("{} of {}", e.engines, e.sizes);
        let mut out = vec![side(&c.prefill), side(&c.decode)];
        for (same, cell) in [(&self.block, block(c)), (&self.layout, layout(c)), (&self.way, c.way.name().to_owned())] {
            if same.is_none() {
                out.push(cell);
            }
        }
        out
    }

    /// What has no column, in words.
    pub(super) fn same(&self) -> Option<String> {
        let mut out = Vec::new();
        if let Some(block) = &self.block {
            out.push(format!("blocks of {block} tokens"));
        }
        if let Some(layout) = self.layout.as_ref().filter(|l| *l != OWN) {
            out.push(format!("layout {layout}"));
        }
        if let Some(way) = &self.way {
            out.push(format!("mode {way}"));
        }
        (!out.is_empty()).then(|| out.join(", "))
    }
}

/// What a layout is called that is the description's.
const OWN: &str = "own";

/// One value where both sides have it, else both.
fn both(p: String, d: String) -> String {
    if p == d { p } else { format!("{p}/{d}") }
}

fn block(c: &Candidate) -> String {
    both(c.prefill.block_size.to_string(), c.decode.block_size.to_string())
}

fn layout(c: &Candidate) -> String {
    let name = |l: Layout| if l == Layout::Own { OWN.to_owned() } else { l.name().to_owned() };
    both(name(c.prefill.layout), name(c.decode.layout))
}
