//! Requests in pieces: a source that is still computing, at random, against the oracle. Whatever became final in which order, and
//! whatever was listed when: each byte moves with the step that made it final, and all pieces together are the request.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::request::{BlockTable, BoundRequest, Request, SrcGroup};
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{BlockId, GroupId, ItemId, RankId, TokenRange, Tokens};
use kvferry_geometry::watermarks::{Watermark, Watermarks};
use kvferry_oracle::{Fate, carry_out, flatten, walk};
use kvferry_tests::{Case, Choices, Plan, cases, check_cases};

/// A moment of a prefill.
struct Step {
    marks: Watermarks,
    /// What the source lists by then; `None` for the final lists.
    promised: Option<Request>,
}

/// A prefill in steps: stretches of layers, chunks of tokens, or both; final lists last.
fn prefill(case: &Case, c: &mut Choices) -> Vec<Step> {
    let items = case.src.spec().items().len();
    let mut marks = Watermarks::none(items);
    let mut steps = Vec::new();
    for _ in 0..c.within(1, 5) {
        let (mut from, mut to) = (0, items as u64);
        if c.chance(60) {
            from = c.below(items as u64);
            to = c.within(from + 1, items as u64);
        }
        let range = || (u32::try_from(from).unwrap()..u32::try_from(to).unwrap()).map(ItemId::new);
        let reached = range().filter_map(|i| upto(marks.get(i)?)).max().unwrap();
        let to = match c.below(4) {
            0 => c.within(reached, case.tokens),
            // Whole chunks of a prompt.
            1 => c.within(reached, case.tokens).next_multiple_of(c.pick(&[4, 16, 48])),
            2 => case.tokens,
            // The engine went on after the prompt.
            _ => case.tokens + c.below(20),
        };
        marks.advance(range(), Tokens::new(to.max(reached))).unwrap();
        let promised = lists(case, &marks, c);
        steps.push(Step { marks: marks.clone(), promised: Some(promised) });
    }
    if c.chance(40) {
        // Some are whole before others.
        marks = marks.as_slice().iter().map(|&m| if c.chance(50) { Watermark::Whole } else { m }).collect();
        steps.push(Step { marks: marks.clone(), promised: None });
    }
    marks.seal();
    steps.push(Step { marks, promised: None });
    steps
}

fn upto(mark: Watermark) -> Option<u64> {
    match mark {
        Watermark::Upto(tokens) => Some(tokens.get()),
        Watermark::Whole => None,
    }
}

/// What the source lists at least, or more: blocks as far as tokens are final, a ring whole or not at all, any states.
fn lists(case: &Case, marks: &Watermarks, c: &mut Choices) -> Request {
    let mut request = case.request();
    for (id, group) in (0u32..).map(GroupId::new).zip(&mut request.src) {
        match group {
            SrcGroup::Paged(g) => {
                let least = blocks_to(case, id, marks).min(g.table.len());
                let more = if is_ring(case, id) { g.table.len() } else { c.below(g.table.len() - least + 1) };
                g.table = cut(&g.table, if least == 0 && c.chance(50) { 0 } else { least + more });
                // Not read.
                g.held = TokenRange::new(Tokens::new(c.below(50)), Tokens::new(c.below(50)));
            }
            SrcGroup::State(g) => g.checkpoints.retain(|_| c.chance(50)),
        }
    }
    request
}

/// How many blocks of a group must be listed for what is final.
fn blocks_to(case: &Case, group: GroupId, marks: &Watermarks) -> u64 {
    let info = &case.src.groups()[group.index()];
    let far = info.items.iter().filter_map(|&i| upto(marks.get(i)?)).max().unwrap_or(0);
    let first = case.src_tables[group.index()].table.first;
    far.div_ceil(info.block_tokens.get()).saturating_sub(first)
}

fn is_ring(case: &Case, group: GroupId) -> bool {
    let item = case.src.spec().get(case.src.groups()[group.index()].items[0]).unwrap();
    item.as_paged().is_some_and(|p| matches!(p.retention, Retention::Ring(_)))
}

/// The first `len` blocks of a table.
fn cut(table: &BlockTable, len: u64) -> BlockTable {
    let ids: Vec<BlockId> = table.iter().take(usize::try_from(len).unwrap()).collect();
    BlockTable::new(table.first_position(), &ids)
}

/// What the oracle says of a byte that moves: with which step, and the last token that it stands for.
#[derive(Clone, Copy)]
struct Due {
    step: usize,
    src_group: GroupId,
    last: u64,
}

/// By destination rank: (region, offset) of every byte that moves.
type Dues = Vec<HashMap<(usize, u64), Due>>;

fn dues(case: &Case, steps: &[Step]) -> Result<Dues, String> {
    let transfer = case.transfer();
    let mut all = Vec::new();
    for rank in 0..case.dst.ranks().len() {
        let mut dues = HashMap::new();
        for (item, spec) in case.dst.spec().items().iter().enumerate() {
            let Some(src) = case.src.spec().find(&spec.name) else { continue };
            let fates = transfer.fates(item).map_err(|e| e.to_string())?;
            let listed = transfer.dst_listed(item).map_err(|e| e.to_string())?;
            let src_group = (0u32..).map(GroupId::new).zip(case.src.groups());
            let src_group = src_group.into_iter().find(|(_, g)| g.items.contains(&src)).unwrap().0;
            walk(&case.dst, rank, item, listed, |cell| {
                if fates.of(&cell) != Fate::Moved {
                    return;
                }
                // A value exists with its first entry.
                let of_tokens = spec.as_paged().is_some() && cell.entries().next().unwrap() < case.tokens;
                let due = |step: &Step| match step.marks.get(src).unwrap() {
                    Watermark::Whole => true,
                    Watermark::Upto(tokens) => of_tokens && cell.last < tokens.get(),
                };
                let due = Due { step: steps.iter().position(due).unwrap(), src_group, last: cell.last };
                dues.extend((cell.offset..cell.offset + cell.width).map(|at| ((cell.region, at), due)));
            });
        }
        all.push(dues);
    }
    Ok(all)
}

/// All pairs of ranks with their plans.
fn plans(plan: &Plan) -> Result<Vec<PairPlan>, String> {
    let of = |p: &kvferry_geometry::peers::RankPair| PairPlan::new(&plan.compatible, &plan.peers, p.src(), p.dst());
    plan.peers.pairs().iter().map(of).collect::<Result<_, _>>().map_err(|e| e.to_string())
}

fn check(case: &Case, counts: &RefCell<BTreeMap<&'static str, u32>>) -> Result<(), String> {
    if !case.unshareable().is_empty() {
        return Ok(());
    }
    let count = |name| *counts.borrow_mut().entry(name).or_default() += 1;
    let mut c = Choices::seeded(1 + case.salt + 17 * case.tokens + 5000 * case.src_tables.len() as u64);
    let whole = case.plan()?;
    let pairs = plans(&whole)?;
    let steps = prefill(case, &mut c);
    let dues = dues(case, &steps)?;

    let items = case.src.spec().items().len();
    let mut from = Watermarks::none(items);
    let mut batches = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        let text = |e: &dyn std::fmt::Display| format!("step {i}: {e}");
        let bound = match &step.promised {
            Some(request) => BoundRequest::promised(&whole.compatible, request.clone()).map_err(|e| text(&e))?,
            None => whole.bound.clone(),
        };
        let mut expected: Vec<usize> =
            dues.iter().map(|rank| rank.values().filter(|due| due.step == i).count()).collect();
        for plan in &pairs {
            let batch = plan.resolve_between(&bound, &from, &step.marks).map_err(|e| text(&e))?;
            let before = plan.uncoalesced_between(&bound, &from, &step.marks).map_err(|e| text(&e))?;
            if batch.descriptors() > before {
                return Err(format!("step {i}: {} descriptors of {before} ranges", batch.descriptors()));
            }
            for d in flatten(&batch, &[64]) {
                for at in d.dst_offset..d.dst_offset + d.len {
                    let due = dues[plan.dst().index()].get(&(d.dst_region.index(), at)).map(|due| due.step);
                    if due != Some(i) {
                        return Err(format!(
                            "step {i} moves byte {at} of {:?}, which is due with {due:?}",
                            d.dst_region
                        ));
                    }
                    // None moves twice: the oracle counts the writes below.
                    expected[plan.dst().index()] = expected[plan.dst().index()].wrapping_sub(1);
                }
            }
            if !batch.is_empty() {
                count(if step.promised.is_some() { "pieces of a promise" } else { "pieces of the final lists" });
            }
            batches.push((plan.src(), plan.dst(), batch));
        }
        if expected.iter().any(|&left| left != 0) {
            return Err(format!("step {i}: of {:?} bytes by rank that are due too few or too many move", expected));
        }
        if let Some(request) = &step.promised {
            refusals(&pairs, (&from, &step.marks), &bound)?;
            let moment = Moment { at: i, from: &from, to: &step.marks, request, bound: &bound };
            short(case, &whole, &pairs, &moment, &dues, &mut c, &count)?;
        }
        from = step.marks.clone();
    }
    if dues.iter().any(|rank| rank.values().any(|d| d.step > 0) && rank.values().any(|d| d.step == 0)) {
        case.features().into_iter().for_each(count);
    }

    let text = |e: PlanError| e.to_string();
    let (none, all) = (Watermarks::none(items), Watermarks::whole(items));
    for (plan, (_, _, batch)) in pairs.iter().zip(&whole.batches) {
        if plan.resolve_between(&whole.bound, &none, &all).map_err(text)? != *batch {
            return Err("from none to whole is not the request".into());
        }
        let ranges = plan.uncoalesced_between(&whole.bound, &none, &all).map_err(text)?;
        if ranges != plan.uncoalesced(&whole.bound).map_err(text)? {
            return Err(format!("{ranges} ranges from none to whole are not those of the request"));
        }
        for marks in [&none, &all, &steps[0].marks] {
            if !plan.resolve_between(&whole.bound, marks, marks).map_err(text)?.is_empty() {
                return Err("something moves though nothing became final".into());
            }
        }
    }
    let outcome = carry_out(&case.transfer(), &whole.bound, &batches, case.place)?;
    let expected = case.verify_plan(&whole)?;
    if outcome.verdict != expected.verdict {
        return Err(format!("in pieces {:?}, whole {:?}", outcome.verdict, expected.verdict));
    }
    Ok(())
}

/// What no promise can be asked.
fn refusals(pairs: &[PairPlan], (from, to): (&Watermarks, &Watermarks), bound: &BoundRequest) -> Result<(), String> {
    for plan in pairs {
        let mut whole = to.clone();
        whole.seal();
        for refused in [plan.resolve(bound), plan.resolve_between(bound, from, &whole)] {
            if !matches!(refused, Err(PlanError::Promised { .. })) {
                return Err(format!("a promise is resolved whole: {refused:?}"));
            }
        }
        if from != to && !matches!(plan.resolve_between(bound, to, from), Err(PlanError::Backwards { .. })) {
            return Err("watermarks may go back".into());
        }
    }
    Ok(())
}

/// A step and what it was resolved from.
struct Moment<'a> {
    at: usize,
    from: &'a Watermarks,
    to: &'a Watermarks,
    request: &'a Request,
    bound: &'a BoundRequest,
}

/// The same step with a table cut short: refused where anything that is due lies behind it, else the same.
fn short(
    case: &Case,
    whole: &Plan,
    pairs: &[PairPlan],
    moment: &Moment<'_>,
    dues: &Dues,
    c: &mut Choices,
    count: &impl Fn(&'static str),
) -> Result<(), String> {
    let Moment { at: i, from, to, request, bound } = *moment;
    let id = GroupId::new(u32::try_from(c.below(request.src.len() as u64)).unwrap());
    let mut request = request.clone();
    let SrcGroup::Paged(g) = &mut request.src[id.index()] else { return Ok(()) };
    if g.table.is_empty() {
        return Ok(());
    }
    let is_ring = is_ring(case, id);
    g.table = cut(&g.table, if is_ring { 0 } else { c.below(g.table.len()) });
    let end = (g.table.first_position() + g.table.len()) * case.src.groups()[id.index()].block_tokens.get();
    let lacks = |due: &Due| due.step == i && due.src_group == id && (due.last >= end || is_ring);
    let lacking = dues.iter().any(|rank| rank.values().any(lacks));
    let cut_short = BoundRequest::promised(&whole.compatible, request).map_err(|e| e.to_string())?;
    let mut refused = false;
    for plan in pairs {
        match plan.resolve_between(&cut_short, from, to) {
            Ok(batch) => {
                if plan.resolve_between(bound, from, to).as_ref() != Ok(&batch) {
                    return Err(format!("step {i}: blocks that aren't listed change what moves"));
                }
            }
            Err(PlanError::NotListed { group, .. }) if group == id => refused = true,
            Err(e) => return Err(format!("step {i}, group {id} cut short: {e}")),
        }
    }
    if refused != lacking {
        return Err(format!("step {i}, group {id} cut to {end}: refused {refused}, lacking {lacking}"));
    }
    count(if refused { "refused: not listed" } else { "not listed, not needed" });
    Ok(())
}

#[test]
fn pieces_are_the_request_each_byte_when_it_is_final() {
    let counts = RefCell::new(BTreeMap::new());
    let total = cases(1200);
    check_cases("pieces", total, |case: &Case| check(case, &counts));
    let counts = counts.into_inner();
    println!("of {total}: {counts:#?}");
    if total >= 1200 {
        let rare: Vec<_> = KINDS.iter().filter(|k| counts.get(*k).copied().unwrap_or(0) < 5).collect();
        assert!(rare.is_empty(), "of {total}: {rare:?}");
    }
}

/// What must be met in requests of which a part moves at first and another later.
const KINDS: &[&str] = &[
    "block sizes differ, none divides",
    "block sizes differ, one divides",
    "chunks",
    "compressed entries",
    "context parallel destination",
    "context parallel on both sides",
    "context parallel source",
    "frozen tails",
    "groups differ",
    "groups share memory",
    "hits",
    "interleaves differ",
    "items of one side",
    "item order differs",
    "kernel blocks on both sides, that differ",
    "late tables",
    "not listed, not needed",
    "pieces of a promise",
    "pieces of the final lists",
    "pipeline stages on both sides",
    "placeholders of blocks given back",
    "refused: not listed",
    "retentions mixed in a group",
    "rings",
    "rings that have gone round",
    "scales for all heads of a block",
    "scales for each head and block",
    "scales of compressed blocks",
    "several checkpoints",
    "staged at the destination",
    "staged at the source",
    "states and pages",
    "windows",
];

/// A destination can prove its own blocks before the source has listed any.
#[test]
fn a_promise_of_nothing_checks_the_destination() {
    for case in kvferry_tests::sample(21, 100) {
        let c = case.compatible().unwrap();
        let mut request = case.request();
        for group in &mut request.src {
            match group {
                SrcGroup::Paged(g) => g.table = BlockTable::default(),
                SrcGroup::State(g) => g.checkpoints.clear(),
            }
        }
        let bound = BoundRequest::promised(&c, request.clone()).unwrap();
        assert!(bound.is_promised());
        let whole = BoundRequest::new(&c, case.request()).unwrap();
        assert!(!whole.is_promised());
        assert_eq!(bound.moves().len(), whole.moves().len());
        for (promised, last) in bound.moves().iter().zip(whole.moves()) {
            assert_eq!(promised.range.start(), last.range.start());
            assert!(promised.range.end() <= last.range.end() && promised.states.is_empty());
        }
        let rank = RankId::ZERO;
        let zero = kvferry_geometry::zero::ZeroPlan::new(c.dst(), rank).unwrap();
        let bytes = |bound| zero.resolve(bound).unwrap().bytes();
        // A tail that is frozen in the end brings zeros of its own.
        assert!(bytes(&bound) >= bytes(&whole));
    }
}
