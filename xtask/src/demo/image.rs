//! What every byte of a rank must be, by arithmetic of its own: nothing here comes from the planner.
//!
//! A prefill rank is filled with a function of each byte's logical coordinate, a decode rank with a background. After the
//! transfers a decode rank is checked cell by cell against what it would have computed itself; then its checked cells
//! are returned to the background, and whatever still differs from it was touched outside.

use anyhow::Context as _;
use kvferry_geometry::layout::PagedView;
use kvferry_geometry::placement::Placement;
use kvferry_geometry::spec::{PagedItem, Retention};
use kvferry_geometry::units::{GroupId, RankId, RegionId};
use kvferry_memory::pattern::{self, Coordinate};
use kvferry_transport::Region;
use serde::{Deserialize, Serialize};

use super::scenario::{Engine, GroupBlocks, Role, Scenario};

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

/// What a cell (one token, head and component) must hold.
#[derive(Clone, Copy)]
enum Content {
    Pattern(Coordinate),
    Zero,
}

/// One cell of a rank.
struct CellAt<'a> {
    region: RegionId,
    offset: u64,
    width: u64,
    content: Content,
    item: &'a str,
    token: u64,
    head: u32,
    component: usize,
}

/// Fills a rank before the transfers.
pub(crate) fn fill(scenario: &Scenario, role: Role, rank: RankId, regions: &[Region]) -> anyhow::Result<()> {
    for (id, region) in (0u64..).zip(regions) {
        pattern::fill(region, 0, region.len().get(), pattern::background(id), 0)?;
    }
    if role == Role::Prefill {
        for_each_cell(scenario, role, rank, &mut |cell| {
            if let Content::Pattern(place) = cell.content {
                pattern::fill(&regions[cell.region.index()], cell.offset, cell.width, place, 0)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Checks a rank after the transfers, and leaves it filled with background. A prefill rank must be as it was filled:
/// whatever changed there was touched outside.
pub(crate) fn verify(scenario: &Scenario, role: Role, rank: RankId, regions: &[Region]) -> anyhow::Result<Verdict> {
    let mut verdict = Verdict::default();
    for_each_cell(scenario, role, rank, &mut |cell| {
        let region = &regions[cell.region.index()];
        let wrong = match cell.content {
            Content::Pattern(place) => {
                pattern::check(region, cell.offset, cell.width, place, 0)?.map(|m| (m.count, m.expected, m.got))
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
                format!(
                    "item {}, token {}, head {}, component {}: byte {expected:#04x} expected, {got:#04x} found",
                    cell.item, cell.token, cell.head, cell.component
                )
            });
        }
        Ok(())
    })?;
    for_each_cell(scenario, role, rank, &mut |cell| {
        let background = pattern::background(u64::from(cell.region.get()));
        Ok(pattern::fill(&regions[cell.region.index()], cell.offset, cell.width, background, cell.offset)?)
    })?;
    for (id, region) in (0u64..).zip(regions) {
        if let Some(m) = pattern::check(region, 0, region.len().get(), pattern::background(id), 0)? {
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
    visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let engine = scenario.engine(role);
    let described = engine.manifest.rank(rank).context("no such rank")?;
    for (id, item) in engine.manifest.spec().iter() {
        let (Some(placement), Some(view)) = (described.placement[id.index()], &described.layout.views[id.index()])
        else {
            continue;
        };
        let paged = item.as_paged();
        let one = ItemAt { name: item.name.as_str(), paged, placement, view };
        let group = engine.manifest.group_of(id);
        for request in 0..scenario.requests.len() {
            one.cells(scenario, engine, request, group, visit)?;
        }
    }
    Ok(())
}

struct ItemAt<'a> {
    name: &'a str,
    paged: &'a PagedItem,
    placement: Placement,
    view: &'a PagedView,
}

impl ItemAt<'_> {
    fn cells(
        &self,
        scenario: &Scenario,
        engine: &Engine,
        request: usize,
        group: GroupId,
        visit: &mut dyn FnMut(CellAt<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let blocks = &scenario.requests[request];
        let GroupBlocks { first_position, ids } = match engine.role {
            Role::Prefill => &blocks.src[group.index()],
            Role::Decode => &blocks.dst[group.index()],
        };
        let start = match engine.role {
            Role::Prefill => kept_from(self.paged.retention, scenario.tokens),
            Role::Decode => kept_from(self.paged.retention, scenario.tokens).max(scenario.cached),
        };
        // Where the decode engine needs nothing, nothing is zeroed either.
        let zeroes = engine.role == Role::Decode && start < scenario.tokens;
        // One request's tokens must not look like another's.
        let item = pattern::seed(self.name) ^ pattern::seed(&format!("request {request}"));
        let block_size = u64::from(self.view.block_size);
        for (position, id) in (*first_position..).zip(ids) {
            for entry in 0..block_size {
                let token = self.token_at(position * block_size + entry);
                let computed = (start..scenario.tokens).contains(&token);
                let zeroed = zeroes && token >= scenario.tokens;
                if !(computed || zeroed) {
                    continue;
                }
                for head in self.placement.heads.start()..self.placement.heads.end() {
                    for (component, c) in self.paged.components.iter().enumerate() {
                        // By name: a proven manifest has a view of every component.
                        let Some(v) = self.view.components.iter().find(|v| v.name == c.name) else { continue };
                        let kernel = u64::from(self.view.kernel.size);
                        let offset = self.view.offset.get()
                            + u64::from(id.get()) * self.view.block_stride.get()
                            + entry / kernel * self.view.kernel.stride.get()
                            + v.offset.get()
                            + u64::from(head - self.placement.heads.start()) * v.head_stride.get()
                            + entry % kernel * v.entry_stride.get();
                        let place = Coordinate { item, token, head, component: named(c.name.as_str()) };
                        let content = if computed { Content::Pattern(place) } else { Content::Zero };
                        let (region, width, item) = (self.view.region, c.width.get(), self.name);
                        visit(CellAt { region, offset, width, content, item, token, head, component })?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The token at a rank's local position: tokens are dealt out `interleave` at a time.
    fn token_at(&self, local: u64) -> u64 {
        let class = self.placement.tokens;
        let (deal, ranks) = (u64::from(class.interleave()), u64::from(class.count()));
        (local / deal * ranks + u64::from(class.index())) * deal + local % deal
    }
}

/// Components are told apart by name, since engines may list them in different orders.
fn named(name: &str) -> u32 {
    u32::try_from(pattern::seed(name) & 0xffff_ffff).unwrap_or(0)
}

/// The first token that the token after the prompt still reads.
fn kept_from(retention: Retention, tokens: u64) -> u64 {
    match retention {
        Retention::Window(w) => (tokens + 1).saturating_sub(w.get()),
        Retention::Chunk(c) => tokens / c.get() * c.get(),
        _ => 0,
    }
}
