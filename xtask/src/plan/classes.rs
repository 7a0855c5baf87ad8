//! A pair's classes and phases, for an operator and as JSON.

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::plan::{AxisShare, ItemClass, PairPlan, Phase};
use kvferry_geometry::spec::Retention;
use serde_json::{Value, json};

use crate::show;

/// The most classes and phases that are printed.
const SHOWN: usize = 16;

/// The classes of a pair with their phases.
pub(super) fn text(plan: &PairPlan, dst: &Manifest) -> String {
    let mut out = String::new();
    let classes = plan.classes();
    let (count, from, to) = (classes.len(), plan.src(), plan.dst());
    for (i, class) in classes.iter().enumerate().take(SHOWN) {
        let items = class.items().iter().filter_map(|&id| dst.spec().get(id)).map(|i| i.name.as_str());
        out.push_str(&format!(
            "P {from} -> D {to}, class {} of {count}: {}, {}\n    {}\n",
            i + 1,
            show::number_of(class.items().len(), "item"),
            share(class),
            show::names(items),
        ));
        if class.retention().is_some() {
            out.push_str(&phases(class));
        }
    }
    if count > SHOWN {
        out.push_str(&format!("and {} more classes (--json lists all)\n", count - SHOWN));
    }
    out.push('\n');
    out
}

/// What moves of a class's items.
fn share(class: &ItemClass) -> String {
    let bytes = show::count(class.bytes_per_entry());
    let Some(retention) = class.retention() else {
        let part = |s: &AxisShare| s.part.as_ref().map(|name| format!("{name} {}", s.heads));
        let parts: Vec<String> = class.shares().iter().filter_map(part).collect();
        return format!("states with units of {}, {bytes} B a state", parts.join(", "));
    };
    let heads: Vec<String> = class.shares().iter().map(|s| s.heads.to_string()).collect();
    let each = match class.entry_tokens().get() {
        1 => "a token".to_owned(),
        n => format!("for {n} tokens"),
    };
    let keeps = if retention == Retention::Full { String::new() } else { format!(", {retention}") };
    format!("heads {}{keeps}, {bytes} B {each}", heads.join(", "))
}

fn phases(class: &ItemClass) -> String {
    let Some(period) = class.period() else {
        return "    too many phases to keep: the request's tokens are walked\n".into();
    };
    let (one, many) = if class.entry_tokens().get() == 1 { ("token", "tokens") } else { ("entry", "entries") };
    let n = class.phases().len();
    let s = if n == 1 { "" } else { "s" };
    let mut out = format!("    {n} phase{s} in a period of {} {many}\n", show::count(period));
    let place = |(kernel, entry): (u64, u64), block: u64| match kernel {
        0 => format!("block {block} {one} {entry}"),
        _ => format!("block {block} kernel block {kernel} {one} {entry}"),
    };
    let row = |p: &Phase| {
        let loops = p.loops.iter().map(|l| format!("{} x", l.count)).collect::<Vec<_>>().join(" ");
        let gap = if loops.is_empty() { "" } else { " " };
        vec![
            place(p.src_start, p.src_block),
            place(p.dst_start, p.dst_block),
            format!("{loops}{gap}{} {}", p.len, if p.len == 1 { one } else { many }),
        ]
    };
    let rows: Vec<Vec<String>> = class.phases().take(SHOWN).map(row).collect();
    out.push_str(&show::table("    ", &["at P", "at D", "run"], &rows));
    if n > SHOWN {
        out.push_str(&format!("    and {} more phases (--json lists all)\n", n - SHOWN));
    }
    out
}

/// A class as the module `plan` describes it.
pub(super) fn json(class: &ItemClass, dst: &Manifest) -> Value {
    let names = class.items().iter().filter_map(|&id| dst.spec().get(id)).map(|i| i.name.as_str());
    let range = |s: &AxisShare| json!([s.heads.start(), s.heads.end()]);
    let phase = |p: &Phase| {
        let step = |(kernel, entry): (u64, u64)| json!([kernel, entry]);
        let loops = p
            .loops
            .iter()
            .map(|l| json!({"count": l.count, "source_step": step(l.src), "destination_step": step(l.dst)}));
        json!({
            "source_block": p.src_block, "destination_block": p.dst_block, "source_start": step(p.src_start),
            "destination_start": step(p.dst_start), "loops": loops.collect::<Vec<_>>(), "entries": p.tokens(),
        })
    };
    let state = class.retention().is_none();
    let parts = class
        .shares()
        .iter()
        .map(|s| json!({"name": s.part.as_ref().map(ToString::to_string), "units": range(s)}))
        .collect::<Vec<_>>();
    json!({
        "kind": if state { "state" } else { "paged" },
        "items": names.collect::<Vec<_>>(),
        "heads": if state { Value::Null } else { class.shares().first().map_or(Value::Null, range) },
        "parts": if state { json!(parts) } else { Value::Null },
        "retention": class.retention().map(|r| r.to_string()),
        "entry_tokens": class.entry_tokens().get(),
        "bytes_per_entry": class.bytes_per_entry(),
        "period": class.period(),
        "phases": if state { json!([]) } else { json!(class.phases().map(phase).collect::<Vec<_>>()) },
    })
}
