//! What differs between two engines, in words for an operator; items that differ alike are told once.

use kvferry_geometry::compat::Mismatch;
use kvferry_geometry::placement::HeadRange;
use kvferry_geometry::units::Name;

use super::{list, rules};
use crate::show;

/// One thing that differs.
pub(super) struct Difference {
    pub(super) item: Name,
    pub(super) field: &'static str,
    pub(super) component: Option<Name>,
    pub(super) source: String,
    pub(super) destination: String,
    pub(super) change: &'static str,
    /// As a running engine says it.
    pub(super) reason: String,
}

/// Items that differ alike.
pub(super) struct Alike<'a> {
    pub(super) first: &'a Difference,
    pub(super) items: Vec<&'a str>,
}

/// As a handshake says it.
pub(super) fn of(m: &Mismatch) -> Difference {
    const MODEL: &str = "describe one model on both sides";
    let item = m.item().clone();
    let differs = |field, component: Option<&Name>, source: String, destination: String, change| Difference {
        item: item.clone(),
        field,
        component: component.cloned(),
        source,
        destination,
        change,
        reason: m.to_string(),
    };
    let whole = |field, source, destination, change| differs(field, None, source, destination, change);
    match m {
        Mismatch::MissingAtSource { shape, .. } => whole(
            "item",
            "doesn't have it".into(),
            shape.clone(),
            "give both the same model, layers, mtp and draft; or ignore what only the destination has (--ignore-destination-only)",
        ),
        Mismatch::MissingAtDestination { shape, .. } => whole(
            "item",
            shape.clone(),
            "doesn't have it".into(),
            "give both the same model, layers, mtp and draft; or ignore what only the source has (--ignore-source-only)",
        ),
        Mismatch::Kind { src, dst, .. } => whole("kind", src.clone(), dst.clone(), MODEL),
        Mismatch::Count { what, src, dst, .. } => {
            whole("count", format!("{} {what}", show::count(*src)), format!("{} {what}", show::count(*dst)), MODEL)
        }
        Mismatch::Retention { src, dst, .. } => {
            let change = "describe one model, with one window or chunk, on both sides";
            whole("retention", src.to_string(), dst.to_string(), change)
        }
        Mismatch::Components { src, dst, .. } => whole(
            "components",
            list(src),
            list(dst),
            "use one kind of attention, one indexer type and one kind of scales on both sides",
        ),
        Mismatch::Width { component, src, dst, .. } => {
            let change = "use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides";
            differs("width", Some(component), src.to_string(), dst.to_string(), change)
        }
        Mismatch::Encoding { component, src, dst, .. } => {
            let change = "use one type (kv_dtype, indexer, conv_dtype, state_dtype) on both sides; nothing is converted on the way";
            differs("encoding", Some(component), src.to_string(), dst.to_string(), change)
        }
        Mismatch::Coverage { component, src, dst, .. } => {
            let change = "use one kind of scales and one scale_block on both sides; a scale can't be split or joined";
            differs("coverage", Some(component), src.clone(), dst.clone(), change)
        }
        Mismatch::SharedValue { component, src, dst, .. } => {
            let heads = |list_of: &[HeadRange]| format!("ranks hold heads {}", list(list_of));
            let change =
                "use one tensor-parallel size on both sides, or scales for each head (per-block-head, per-token-head)";
            differs("shared", Some(component), heads(src), heads(dst), change)
        }
        Mismatch::NothingInCommon { src, dst, .. } => {
            let held = show::number_of(*src, "item");
            let wanted = format!("{}, and none of them is among the source's", show::number_of(*dst, "item"));
            whole("model", held, wanted, MODEL)
        }
        other => whole("other", other.to_string(), other.to_string(), "make both sides agree"),
    }
}

/// What differs, each with all items that differ so, in order of the first.
pub(super) fn alike(differences: &[Difference]) -> Vec<Alike<'_>> {
    let mut told: Vec<Alike<'_>> = Vec::new();
    for d in differences {
        let alike = |o: &Difference| {
            (o.field, &o.component, &o.source, &o.destination, o.change)
                == (d.field, &d.component, &d.source, &d.destination, d.change)
        };
        match told.iter_mut().find(|t| alike(t.first)) {
            Some(t) => t.items.push(d.item.as_str()),
            None => told.push(Alike { first: d, items: vec![d.item.as_str()] }),
        }
    }
    told
}

/// What differs, for people: once for all items that differ so, with both values and what to change.
pub(super) fn text(differences: &[Difference]) -> String {
    alike(differences).iter().map(|a| a.heading() + &a.text()).collect()
}

impl Difference {
    /// What differs, in words.
    fn what(&self) -> String {
        let what = rules::of(self.field).what;
        match &self.component {
            Some(component) => format!("{what} of {component}"),
            None => what.into(),
        }
    }
}

impl Alike<'_> {
    /// What differs where.
    pub(super) fn heading(&self) -> String {
        let count = show::number_of(self.items.len(), "item");
        format!("{} differs in {count}: {}\n", self.first.what(), show::names(self.items.iter().copied()))
    }

    /// Both values, and what to change.
    pub(super) fn text(&self) -> String {
        let d = self.first;
        format!("    source       {}\n    destination  {}\n    change       {}\n", d.source, d.destination, d.change)
    }
}
