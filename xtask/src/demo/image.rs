//! What every byte of a rank must be, by arithmetic of its own: nothing here comes from the planner.
//!
//! A prefill rank is filled with a function of each byte's logical coordinate, a decode rank with a background; what belongs to
//! no coordinate of a request (scratch rows, free blocks, the rest of a last block) has another background at the prefill
//! rank, so that it would be seen if it were moved. After the transfers a decode rank is checked cell by cell against what it
//! would have computed itself; then its checked cells are returned to the background, and whatever still differs from it was
//! touched outside.

use std::fmt;

use anyhow::Context as _;
use kvferry_geometry::layout::{Chunks, ComponentView, PagedView, StateView, View};
use kvferry_geometry::placement::{PagedPlacement, Placement, StatePlacement, TokenClass};
use kvferry_geometry::spec::{Component, ItemKind, PagedItem, Retention, StateItem, ValueHeads};
use kvferry_geometry::units::{BlockId, RankId, RegionId};
use kvferry_memory::pattern::{self, Coordinate};
use kvferry_transport::Region;
use serde::{Deserialize, Serialize};

use super::scenario::{Role, Scenario};
use kvferry_topology::blocks::GroupBlocks;

/// The outcome of checking one decode rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// Bytes that were moved or zeroed, and compared.
    pub(crate) checked: u64,
    /// Those among them that are not what they must be.
    pub(crate) wrong: u64,
    /// Other bytes that changed, guard bands included.
    pub(crate) outside: u64,
    /// The first fault in words.
    pub(crate) first: Option<String>,
}

/// What a cell must hold.
#[derive(Clone, Copy)]
enum Content {
    /// The coordinate's bytes from this one on.
    Pattern(Coordinate, u64),
    Zero,
}

/// Where a cell stands in the model.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// One value of a paged item.
    Value { token: u64, head: u32, component: &'a str },
    /// One row of one unit of a state.
    Row { position: u64, unit: u32, row: u32, part: &'a str },
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value { token, head, component } => write!(f, "token {token}, head {head}, component {component}"),
            Self::Row { position, unit, row, part } => {
                write!(f, "state after {position} tokens, part {part}, row {row}, unit {unit}")
            }
        }
    }
}

/// A run of bytes of a rank that belong together: one value, or one row of one unit of a state.
struct CellAt<'a> {
    region: RegionId,
    offset: u64,
    width: u64,
    content: Content,
    item: &'a str,
    place: Place<'a>,
}

/// Which computation of each request is meant: another one has other bytes everywhere, so that one that was moved too late is seen.
#[derive(Clone, Copy, Default)]
pub(crate) struct Turns<'a> {
    /// One for each request; none means the first of all.
    pub(crate) of: &'a [u32],
    /// Only this request.
    pub(crate) only: Option<usize>,
    /// Only these items.
    pub(crate) items: Option<&'a [u32]>,
}

impl Turns<'_> {
    fn seed(self, request: usize) -> u64 {
        match self.of.get(request) {
            None | Some(0) => pattern::seed(&format!("request {request}")),
            Some(turn) => pattern::seed(&format!("request {request} computed again, {turn}")),
        }
    }
}

/// What a region holds where no cell is.
fn background(role: Role, region: u64) -> Coordinate {
    pattern::background(if role == Role::Prefill { region | 1 << 40 } else { region })
}

/// Fills a rank before the transfers.
pub(crate) fn fill(scenario: &Scenario, role: Role, rank: RankId, regions: &[Region]) -> anyhow::Result<()> {
    for (id, region) in (0u64..).zip(regions) {
        pattern::fill(region, 0, region.len().get(), background(role, id), 0)?;
    }
    if role == Role::Prefill {
        compute(scenario, rank, regions, Turns::default())?;
    }
    Ok(())
}

/// Fills what a prefill rank has of the requests that are meant.
pub(crate) fn compute(scenario: &Scenario, rank: RankId, regions: &[Region], turns: Turns<'_>) -> anyhow::Result<()> {
    for_each_cell(scenario, Role::Prefill, rank, turns, &mut |cell| {
        if let Content::Pattern(place, byte) = cell.content {
            pattern::fill(&regions[cell.region.index()], cell.offset, cell.width, place, byte)?;
        }
        Ok(())
    })
}

/// Checks a rank after the transfers, and leaves it filled with background. A prefill rank must be as it was filled:
/// whatever changed there was touched outside.
pub(crate) fn verify(
    scenario: &Scenario,
    role: Role,
    rank: RankId,
    regions: &[Region],
    turns: Turns<'_>,
) -> anyhow::Result<Verdict> {
    let mut verdict = Verdict::default();
    for_each_cell(scenario, role, rank, turns, &mut |cell| {
        let region = &regions[cell.region.index()];
        let wrong = match cell.content {
            Content::Pattern(place, byte) => {
                pattern::check(region, cell.offset, cell.width, place, byte)?.map(|m| (m.count, m.expected, m.got))
            }
            Content::Zero => not_zero(region, cell.offset, cell.width)?,
        };
        let (count, checked) = match role {
            Role::Prefill => (&mut verdict.outside, 0),
            Role::Decode => (&mut verdict.wrong, cell.width),
        };
        *count += wrong.map_or(0, |w| w.0);
        verdict.checked += checked;
        if let Some((_, expected, got)) = wrong {
            verdict.first.get_or_insert_with(|| {
                format!("item {}, {}: byte {expected:#04x} expected, {got:#04x} found", cell.item, cell.place)
            });
        }
        Ok(())
    })?;
    for_each_cell(scenario, role, rank, turns, &mut |cell| {
        let background = background(role, u64::from(cell.region.get()));
        Ok(pattern::fill(&regions[cell.region.index()], cell.offset, cell.width, background, cell.offset)?)
    })?;
    for (id, region) in (0u64..).zip(regions) {
        if let Some(m) = pattern::check(region, 0, region.len().get(), background(role, id), 0)? {
            verdict.outside += m.count;
            verdict.first.get_or_insert_with(|| format!("region {id}, byte {}: touched outside", m.offset));
        }
    }
    Ok(verdict)
}

fn not_zero(region: &Region, offset: u64, width: u64) -> anyhow::Result<Option<(u64, u8, u8)>> {
    let mut bytes = vec![0; usize::try_from(width)?];
    region.read(offset, &mut bytes)?;
    let wrong = bytes.iter().filter(|b| **b != 0);
    let first = wrong.clone().next().copied();
    Ok(first.map(|got| (wrong.count() as u64, 0, got)))
}

/// All cells of a rank that hold something of a request: at the prefill engine what was computed, at the decode engine
/// what must arrive or be zeroed.
fn for_each_cell(
    scenario: &Scenario,
    role: Role,
    rank: RankId,
    turns: Turns<'_>,
    visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let engine = scenario.engine(role);
    let described = engine.manifest.rank(rank).context("no such rank")?;
    for (id, item) in engine.manifest.spec().iter() {
        if turns.items.is_some_and(|only| !only.contains(&id.get())) {
            continue;
        }
        let (Some(placement), Some(view)) = (&described.placement[id.index()], &described.layout.views[id.index()])
        else {
            continue;
        };
        if role == Role::Decode && scenario.prefill.manifest.spec().find(&item.name).is_none() {
            // Ignored: nothing of it may be touched.
            continue;
        }
        let group = engine.manifest.group_of(id).index();
        let meant = |number: &usize| turns.only.is_none_or(|only| only == *number);
        for (number, blocks) in scenario.requests.iter().enumerate().filter(|(number, _)| meant(number)) {
            let blocks = match role {
                Role::Prefill => &blocks.src[group],
                Role::Decode => &blocks.dst[group],
            };
            // One request's tokens must not look like another's.
            let seed = pattern::seed(item.name.as_str()) ^ turns.seed(number);
            let name = item.name.as_str();
            match (&item.kind, placement, view) {
                (ItemKind::Paged(paged), Placement::Paged(placement), View::Paged(view)) => {
                    let at = PagedAt { name, seed, paged, placement, view };
                    at.cells(scenario, role, blocks, visit)?;
                }
                (ItemKind::State(state), Placement::State(placement), View::State(view)) => {
                    let at = StateAt { name, seed, state, placement, view };
                    at.cells(scenario, role, blocks, visit)?;
                }
                _ => anyhow::bail!("item {name} is placed as another kind than it is"),
            }
        }
    }
    Ok(())
}

/// A paged item of a rank.
struct PagedAt<'a> {
    name: &'a str,
    seed: u64,
    paged: &'a PagedItem,
    placement: &'a PagedPlacement,
    view: &'a PagedView,
}

impl PagedAt<'_> {
    fn cells(
        &self,
        scenario: &Scenario,
        role: Role,
        blocks: &GroupBlocks,
        visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let n = scenario.ask.tokens;
        let kept = kept_from(self.paged.retention, n);
        let start = if role == Role::Decode { kept.max(scenario.cached) } else { kept };
        // Where the decode engine needs nothing, nothing is zeroed either.
        let wanted = Wanted { start, end: n, zeroes: role == Role::Decode && start < n };
        for c in &self.paged.components {
            // By name: a proven manifest has a view of every component.
            let Some(v) = self.view.components.iter().find(|v| v.name == c.name) else {
                continue;
            };
            for (position, &id) in (blocks.first_position..).zip(&blocks.ids) {
                self.block(c, v, (position, id), wanted, visit)?;
            }
        }
        Ok(())
    }

    /// One component's values in one block.
    fn block(
        &self,
        c: &Component,
        v: &ComponentView,
        (position, id): (u64, BlockId),
        wanted: Wanted,
        visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (entries, span) = (u64::from(self.view.block_size), u64::from(c.span));
        let entry_tokens = u64::from(self.paged.tokens_per_entry);
        let heads = self.placement.heads;
        // One value for all heads of a rank is that of its first.
        let last = if c.heads == ValueHeads::Shared { heads.start() + 1 } else { heads.end() };
        let kernel = u64::from(self.view.kernel.size);
        let chunks = v.chunks.unwrap_or(Chunks { bytes: c.width, stride: c.width });
        let component = named(c.name.as_str());
        for entry in (0..entries).step_by(usize::try_from(span)?) {
            let place = token_at(self.placement.tokens, (position * entries + entry) * entry_tokens);
            let token = latest_in(self.paged.retention, place, wanted.end);
            let Some(computed) = wanted.is_computed(token, entry_tokens, span) else {
                continue;
            };
            for head in heads.start()..last {
                let offset = self.view.offset.get()
                    + u64::from(id.get()) * self.view.block_stride.get()
                    + entry / kernel * self.view.kernel.stride.get()
                    + v.offset.get()
                    + u64::from(head - heads.start()) * v.head_stride.get()
                    + entry % kernel / span * v.entry_stride.get();
                let coordinate = Coordinate { item: self.seed, token, head, component };
                for chunk in 0..c.width.get() / chunks.bytes.get() {
                    let byte = chunk * chunks.bytes.get();
                    visit(CellAt {
                        region: self.view.region,
                        offset: offset + chunk * chunks.stride.get(),
                        width: chunks.bytes.get(),
                        content: if computed { Content::Pattern(coordinate, byte) } else { Content::Zero },
                        item: self.name,
                        place: Place::Value { token, head, component: c.name.as_str() },
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// Tokens of an item that were computed, or must arrive.
#[derive(Clone, Copy)]
struct Wanted {
    start: u64,
    end: u64,
    /// Whether what follows in the listed blocks is zeroed.
    zeroes: bool,
}

impl Wanted {
    /// Whether the value of `span` entries, of `each` tokens, that begins with a token must be there, or zeroed; `None`: neither.
    /// An entry exists when all its tokens do, and a value when its first entry does.
    fn is_computed(self, token: u64, each: u64, span: u64) -> Option<bool> {
        let (first, start, end) = (token / each, self.start / each, self.end / each);
        if first < end {
            return (first + span > start && start < end).then_some(true);
        }
        self.zeroes.then_some(false)
    }
}

/// The token at a rank's local position: tokens are dealt out `interleave` at a time.
fn token_at(class: TokenClass, local: u64) -> u64 {
    let (deal, ranks) = (u64::from(class.interleave()), u64::from(class.count()));
    (local / deal * ranks + u64::from(class.index())) * deal + local % deal
}

/// The token that is in a place of the table when `n` tokens are there: in a ring, the latest that came to the place.
fn latest_in(retention: Retention, place: u64, n: u64) -> u64 {
    match retention {
        Retention::Ring(r) if place < n => place + (n - 1 - place) / r.get() * r.get(),
        _ => place,
    }
}

/// A state item of a rank.
struct StateAt<'a> {
    name: &'a str,
    seed: u64,
    state: &'a StateItem,
    placement: &'a StatePlacement,
    view: &'a StateView,
}

impl StateAt<'_> {
    fn cells(
        &self,
        scenario: &Scenario,
        role: Role,
        blocks: &GroupBlocks,
        visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let kept: Vec<u64> = match role {
            Role::Prefill => scenario.ask.positions().collect(),
            Role::Decode => scenario.states_moved().collect(),
        };
        for (&position, &slot) in kept.iter().zip(&blocks.ids) {
            for (part, units) in self.state.parts.iter().zip(&self.placement.parts) {
                let Some(v) = self.view.parts.iter().find(|v| v.name == part.name) else {
                    continue;
                };
                let (component, width) = (named(part.name.as_str()), part.width.get());
                let start =
                    self.view.offset.get() + u64::from(slot.get()) * self.view.slot_stride.get() + v.offset.get();
                // Scratch rows come after the state's own and belong to no coordinate.
                for row in 0..part.rows {
                    for unit in units.start()..units.end() {
                        let offset = start
                            + u64::from(row) * v.row_stride.get()
                            + u64::from(unit - units.start()) * v.unit_stride.get();
                        let coordinate = Coordinate { item: self.seed, token: position, head: unit, component };
                        visit(CellAt {
                            region: self.view.region,
                            offset,
                            width,
                            content: Content::Pattern(coordinate, u64::from(row) * width),
                            item: self.name,
                            place: Place::Row { position, unit, row, part: part.name.as_str() },
                        })?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Components and parts are told apart by name, since engines may list them in different orders.
fn named(name: &str) -> u32 {
    u32::try_from(pattern::seed(name) & 0xffff_ffff).unwrap_or(0)
}

/// The first token that the token after the prompt still reads.
fn kept_from(retention: Retention, tokens: u64) -> u64 {
    match retention {
        Retention::Window(w) => (tokens + 1).saturating_sub(w.get()),
        Retention::Chunk(c) => tokens / c.get() * c.get(),
        Retention::Ring(r) => tokens.saturating_sub(r.get()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::units::Tokens;

    use super::*;

    #[test]
    fn values_of_several_tokens_begin_and_end_in_their_own_way() {
        let wanted = Wanted { start: 10, end: 21, zeroes: true };
        let of = |each, span| [0, 4, 8, 12, 16, 20, 24].map(|token| wanted.is_computed(token, each, span));
        let (moved, zero) = (Some(true), Some(false));
        assert_eq!(of(4, 1), [None, None, moved, moved, moved, zero, zero]);
        assert_eq!(of(1, 4), [None, None, moved, moved, moved, moved, zero]);
        let nothing = Wanted { start: 21, end: 21, zeroes: false };
        assert_eq!(nothing.is_computed(20, 1, 4), None);
    }

    #[test]
    fn a_ring_s_places_have_their_latest_tokens() {
        let ring = Retention::Ring(Tokens::new(8));
        assert_eq!([0, 1, 2, 7].map(|place| latest_in(ring, place, 10)), [8, 9, 2, 7]);
        assert_eq!([0, 4, 5].map(|place| latest_in(ring, place, 5)), [0, 4, 5]);
        assert_eq!((kept_from(ring, 10), kept_from(ring, 5)), (2, 0));
    }
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        demo: crate::demo::Args,
    }

    /// A hybrid between engines of one rank, with scratch rows, moved by plain copies. What each rank's memory is afterwards.
    fn moved() -> (Scenario, Vec<Region>, Vec<Region>) {
        use std::sync::Arc;

        use kvferry_geometry::plan::PairPlan;
        use kvferry_geometry::request::BoundRequest;
        use kvferry_geometry::zero::ZeroPlan;
        use kvferry_transport::copy::Copier;

        let line = "x --model jamba-v0.1 --layers 5 --prefill tp=1 --decode tp=1 --tokens 20 --requests 1 --prefix-hit 16 \
            --prefill-layout nhd,scratch=2 --decode-layout hnd,state-first,scratch=1";
        let args = <Line as clap::Parser>::try_parse_from(line.split_whitespace()).unwrap().demo;
        let scenario = Scenario::new(&args).unwrap();
        let rank = RankId::new(0);
        let memory = |role| -> Vec<Region> {
            let lens = scenario.engine(role).manifest.region_lens(rank);
            let regions: Vec<Region> =
                lens.iter().map(|l| Region::zeroed(usize::try_from(l.get()).unwrap()).unwrap()).collect();
            fill(&scenario, role, rank, &regions).unwrap();
            regions
        };
        let (src, dst) = (memory(Role::Prefill), memory(Role::Decode));
        let (compatible, peers) = scenario.plan().unwrap();
        let bound = BoundRequest::new(&compatible, scenario.request(0)).unwrap();
        let batch = PairPlan::new(&compatible, &peers, rank, rank).unwrap().resolve(&bound).unwrap();
        let (from, to) = (compatible.src().region_lens(rank), compatible.dst().region_lens(rank));
        let batch = Arc::new(batch.check(&from, &to).unwrap());
        let copier = Copier::new(batch, |i| src.get(i.index()).cloned(), |i| dst.get(i.index()).cloned()).unwrap();
        assert!(copier.copy(0..copier.bytes()).bytes.get() > 0);
        let zero = ZeroPlan::new(compatible.dst(), rank).unwrap().resolve(&bound).unwrap();
        for range in zero.ranges() {
            dst[range.region.index()].fill(range.offset, range.len, 0).unwrap();
        }
        (scenario, src, dst)
    }

    fn flip(region: &Region, offset: u64) {
        let mut byte = [0];
        region.read(offset, &mut byte).unwrap();
        region.write(offset, &[byte[0] ^ 1]).unwrap();
    }

    #[test]
    fn every_wrong_byte_is_found_wherever_it_is() {
        let rank = RankId::new(0);
        let (scenario, src, dst) = moved();
        let verdict = |role, regions: &[Region]| {
            let v = verify(&scenario, role, rank, regions, Turns::default()).unwrap();
            (v.checked, v.wrong, v.outside)
        };
        let checked = verdict(Role::Decode, &dst);
        assert!(checked.0 > 0 && (checked.1, checked.2) == (0, 0), "{checked:?}");
        assert_eq!(verdict(Role::Prefill, &src), (0, 0, 0));
        // The same bytes of another computation would all be wrong, but for those that are equal by chance.
        let again = Turns { of: &[1, 1], ..Turns::default() };
        let (scenario, _, dst) = moved();
        let wrong = verify(&scenario, Role::Decode, rank, &dst, again).unwrap().wrong;
        assert!(wrong > checked.0 / 2, "{wrong} of {}", checked.0);
        // Afterwards there is only background; every single byte that differs from it counts.
        let manifest = scenario.decode.manifest.clone();
        let (scenario, _, dst) = moved();
        let state = manifest.ranks()[0].layout.views.iter().flatten().find(|v| v.as_state().is_some()).unwrap();
        let parts = &state.as_state().unwrap().parts;
        let (item, _) = manifest.spec().iter().find(|(_, item)| item.as_state().is_some()).unwrap();
        let slot = scenario.requests[0].dst[manifest.group_of(item).index()].ids[0];
        let at = state.offset().get() + u64::from(slot.get()) * state.stride().get() + parts[0].offset.get();
        let region = &dst[state.region().index()];
        let scratch =
            manifest.spec().items().iter().find_map(|i| i.as_state()).map(|s| u64::from(s.parts[0].rows)).unwrap();
        flip(region, at);
        flip(region, at + scratch * parts[0].row_stride.get());
        let v = verify(&scenario, Role::Decode, rank, &dst, Turns::default()).unwrap();
        assert_eq!((v.checked, v.wrong, v.outside), (checked.0, 1, 1));
        let first = v.first.unwrap();
        assert!(first.contains("state after 20 tokens, part conv.x, row 0, unit 0"), "{first}");
    }
}
