//! One random request between two random engines.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::Batch;
use kvferry_geometry::compat::{CompatOptions, Compatible, Unmatched};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError};
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::placement::RankPlacement;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::{Item, ModelSpec, Retention};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{BlockId, Name, RankId, TokenRange, Tokens};
use kvferry_oracle::{DstTable, Outcome, SrcTable, Table, Transfer, carry_out, unshareable, unusual};

use super::engine::{Draft, Engine, Kin, RefusedDraft, Usual, lcm};
use super::model::{Model, random_model};
use super::{Choices, features, small};

/// Bytes of both engines' tokens together, more or less: what keeps a case fast.
const BUDGET: u64 = 40 << 10;

/// A random request between two engines of one model, valid by construction.
#[derive(Clone)]
pub struct Case {
    /// The producer.
    pub src: Arc<Manifest>,
    /// The consumer.
    pub dst: Arc<Manifest>,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The producer's tables.
    pub src_tables: Vec<SrcTable>,
    /// The consumer's tables.
    pub dst_tables: Vec<DstTable>,
    /// Salt of the peer map.
    pub salt: u64,
    /// Whether one consumer's items are spread over equal holders.
    pub stripe: bool,
    /// What becomes of items that one side has alone.
    pub options: CompatOptions,
    /// Where the batches are permuted besides being carried out directly.
    pub place: Place,
    /// Drafts met on the way that no manifest can be made of.
    pub refused: Vec<RefusedDraft>,
    usual: [Option<Usual>; 2],
    pub(super) text: [String; 2],
}

impl Case {
    /// The case that a list of choices makes.
    #[must_use]
    pub fn new(c: &mut Choices) -> Self {
        let model = random_model(c);
        let kin = if can_be_prime(&model) { c.below(100) } else { c.below(95) };
        let side = |own: &[Item]| model.both.iter().chain(own).cloned().collect::<Vec<Item>>();
        let src_kin = if kin >= 95 { Kin::Prime(4) } else { Kin::None };
        let (src_draft, mut refused) = Draft::random(c, &side(&model.src_only), src_kin);
        let dst_kin = match kin {
            95.. => Kin::Prime(3),
            60.. => Kin::Like(&src_draft),
            _ => Kin::None,
        };
        let (dst_draft, more) = Draft::random(c, &side(&model.dst_only), dst_kin);
        refused.extend(more);
        let n = c.within(1, longest(&src_draft, &dst_draft));
        let dst_sizes = random_dst(c, &dst_draft, &src_draft.spec, n);
        let src_sizes = random_src(c, &src_draft, &dst_draft, &dst_sizes, n);
        let (mut src_tables, src_blocks) =
            random_ids(c, &src_draft, src_sizes, |s| (&mut s.table.blocks, &mut s.states));
        let (dst_tables, dst_blocks) = random_ids(c, &dst_draft, dst_sizes, |d| (&mut d.table.blocks, &mut d.states));
        leave_placeholders(c, &src_draft, &mut src_tables);
        let salt = c.below(17);
        let stripe = c.chance(50);
        let ignored = |own: &[Item], coin: bool| {
            if own.is_empty() && !coin { Unmatched::Refuse } else { Unmatched::Ignore }
        };
        let coin = c.chance(10);
        let options = CompatOptions {
            source_only: ignored(&model.src_only, coin),
            destination_only: ignored(&model.dst_only, coin),
        };
        let place = c.pick(&[Place::Direct, Place::Destination, Place::Source]);
        let src = build(&src_draft, &src_blocks);
        let dst = build(&dst_draft, &dst_blocks);
        Self {
            src: Arc::new(src.manifest),
            dst: Arc::new(dst.manifest),
            tokens: n,
            src_tables,
            dst_tables,
            salt,
            stripe,
            options,
            place,
            refused,
            usual: [src.usual, dst.usual],
            text: [src.text, dst.text],
        }
    }

    /// The request as the oracle reads it.
    #[must_use]
    pub fn transfer(&self) -> Transfer<'_> {
        Transfer {
            src: &self.src,
            dst: &self.dst,
            tokens: self.tokens,
            src_tables: self.src_tables.clone(),
            dst_tables: self.dst_tables.clone(),
        }
    }

    /// The request as the planner reads it.
    #[must_use]
    pub fn request(&self) -> Request {
        let table = |t: &Table| {
            let ids: Vec<BlockId> = t.blocks.iter().map(|&b| BlockId::new(b)).collect();
            BlockTable::new(t.first, &ids)
        };
        let checkpoint = |s: &(u64, u32)| Checkpoint { position: Tokens::new(s.0), slot: BlockId::new(s.1) };
        let src = |(group, s): (&CacheGroup, &SrcTable)| -> SrcGroup {
            if holds_states(&self.src, group) {
                return SrcState { checkpoints: s.states.iter().map(checkpoint).collect() }.into();
            }
            let held = TokenRange::new(Tokens::new(s.held.start), Tokens::new(s.held.end));
            let tail = if s.frozen { Tail::Frozen } else { Tail::Exact };
            SrcPaged { table: table(&s.table), held, tail }.into()
        };
        let dst = |(group, d): (&CacheGroup, &DstTable)| -> DstGroup {
            if holds_states(&self.dst, group) {
                let slot = d.states.iter().find(|s| s.0 == self.tokens).map(|s| BlockId::new(s.1));
                let more = d.states.iter().filter(|s| s.0 != self.tokens).map(checkpoint).collect();
                return DstState { slot, more }.into();
            }
            DstPaged { table: table(&d.table), cached: Tokens::new(d.cached) }.into()
        };
        // What a test lists beyond the groups is of the last one's kind.
        let groups = |m: &Manifest, len: usize| {
            let mut groups = m.groups().to_vec();
            groups.resize(len, groups[groups.len() - 1].clone());
            groups
        };
        let src_groups = groups(&self.src, self.src_tables.len());
        let dst_groups = groups(&self.dst, self.dst_tables.len());
        Request {
            tokens: Tokens::new(self.tokens),
            src: src_groups.iter().zip(&self.src_tables).map(src).collect(),
            dst: dst_groups.iter().zip(&self.dst_tables).map(dst).collect(),
        }
    }

    /// The two engines compared.
    ///
    /// # Errors
    /// The mismatches, in words.
    pub fn compatible(&self) -> Result<Compatible, String> {
        Compatible::with(self.src.clone(), self.dst.clone(), self.options).map_err(|e| e.to_string())
    }

    /// Items that can't move between these engines, by the oracle: none in most cases.
    #[must_use]
    pub fn unshareable(&self) -> Vec<Name> {
        unshareable(&self.src, &self.dst)
    }

    /// Plans the request.
    ///
    /// # Errors
    /// The planner's refusal, in words: a finding, unless items are [`unshareable`](Self::unshareable).
    pub fn plan(&self) -> Result<Plan, String> {
        let compatible = self.compatible()?;
        // A third of the maps know distances.
        let far = |src: RankId, dst: RankId| if self.salt % 3 == 2 { (src.get() * 5 + dst.get() * 3) % 4 } else { 0 };
        let options = PeerOptions { salt: self.salt, stripe: self.stripe };
        let peers = PeerMap::with(&compatible, options, far).map_err(|e| e.to_string())?;
        let bound = BoundRequest::new(&compatible, self.request()).map_err(|e| e.to_string())?;
        let mut batches = Vec::new();
        for pair in peers.pairs() {
            let plan = PairPlan::new(&compatible, &peers, pair.src(), pair.dst()).map_err(|e| e.to_string())?;
            batches.push((pair.src(), pair.dst(), plan.resolve(&bound).map_err(|e| e.to_string())?));
        }
        Ok(Plan { compatible, peers, bound, batches })
    }

    /// Holds the placements that were made by the usual rules against the oracle's.
    ///
    /// # Errors
    /// The first that differs.
    pub fn check_placements(&self) -> Result<(), String> {
        for (manifest, usual) in [&self.src, &self.dst].into_iter().zip(&self.usual) {
            let Some((parallelism, rules)) = usual else { continue };
            let ranks: Vec<RankPlacement> = manifest.ranks().iter().map(|r| r.placement.clone()).collect();
            if let Some((rank, item, expected, got)) = unusual(parallelism, manifest.spec(), rules, &ranks) {
                return Err(format!(
                    "rank {rank}, item {item}: expected {expected:?}, placed {got:?}, {parallelism:?}"
                ));
            }
        }
        Ok(())
    }

    /// Plans the request, carries it out in memory and holds the outcome against the oracle.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn verify(&self) -> Result<Outcome, String> {
        self.verify_plan(&self.plan()?)
    }

    /// Carries a plan out in memory, directly and perhaps staged, and holds the outcomes against the oracle.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn verify_plan(&self, plan: &Plan) -> Result<Outcome, String> {
        let transfer = self.transfer();
        let direct = carry_out(&transfer, &plan.bound, &plan.batches, Place::Direct)?;
        if self.place != Place::Direct {
            let staged = carry_out(&transfer, &plan.bound, &plan.batches, self.place);
            let staged = staged.map_err(|e| format!("{}: {e}", self.place))?;
            if staged.verdict != direct.verdict {
                return Err(format!("{}: {:?}, directly {:?}", self.place, staged.verdict, direct.verdict));
            }
        }
        Ok(direct)
    }

    /// What kinds of difficulty this case has; tests check that all kinds occur.
    #[must_use]
    pub fn features(&self) -> Vec<&'static str> {
        features::of(self)
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} tokens, salt {}, stripe {}, {:?}", self.tokens, self.salt, self.stripe, self.place)?;
        for (side, text, manifest) in [("src", &self.text[0], &self.src), ("dst", &self.text[1], &self.dst)] {
            writeln!(f, "{side}: {text}")?;
            for item in manifest.spec().items() {
                write!(f, "  {}:", item.name)?;
                if let Some(p) = item.as_paged() {
                    write!(f, " {} heads, {}, {} tokens an entry", p.heads, p.retention, p.tokens_per_entry)?;
                    for x in &p.components {
                        write!(f, ", {} {} B per {} {:?}", x.name, x.width.get(), x.span, x.heads)?;
                    }
                }
                for p in item.as_state().iter().flat_map(|s| &s.parts) {
                    write!(f, " {} {} x {} of {} B", p.name, p.rows, p.units, p.width.get())?;
                }
                writeln!(f)?;
            }
            for group in manifest.groups() {
                writeln!(f, "  {}: items {:?}, {} a block", group.name, group.items, group.block_tokens)?;
            }
        }
        writeln!(f, "src tables: {:?}", self.src_tables)?;
        write!(f, "dst tables: {:?}", self.dst_tables)
    }
}

/// What the planner makes of a case.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The engines.
    pub compatible: Compatible,
    /// Who reads from whom.
    pub peers: PeerMap,
    /// The request, proven.
    pub bound: BoundRequest,
    /// Source, destination, batch.
    pub batches: Vec<(RankId, RankId, Batch)>,
}

/// Blocks of a prime number of tokens need values of one token, and no ring.
fn can_be_prime(model: &Model) -> bool {
    let all = model.both.iter().chain(&model.src_only).chain(&model.dst_only);
    all.filter_map(Item::as_paged).all(|p| {
        let single = p.components.iter().all(|x| p.tokens_per_value(x) == 1);
        single && !matches!(p.retention, Retention::Ring(_))
    })
}

/// The longest prompt that keeps a case fast.
fn longest(src: &Draft, dst: &Draft) -> u64 {
    let of = |draft: &Draft| {
        let (token, state) = draft.bytes();
        // Where groups share memory, a block is as long as a state.
        token + if draft.shares_blocks() { state / 4 } else { 0 }
    };
    (BUDGET / (of(src) + of(dst)).max(1)).clamp(20, 260)
}

fn holds_states(manifest: &Manifest, group: &CacheGroup) -> bool {
    manifest.spec().get(group.items[0]).unwrap().as_state().is_some()
}

fn build(draft: &Draft, blocks: &[u32]) -> Engine {
    let built = draft.build(blocks).or_else(|e| {
        // Groups in one region, with more loops over blocks than are told apart.
        let too_many = e.0.iter().all(|e| matches!(e, ManifestError::Sharing { .. }));
        if too_many { draft.apart().build(blocks) } else { Err(e) }
    });
    built.unwrap_or_else(|e| panic!("a draft that is sound by construction was refused: {e}\n{}", draft.text))
}

fn is_state(draft: &Draft, group: &CacheGroup) -> bool {
    draft.spec.get(group.items[0]).unwrap().as_state().is_some()
}

/// What the items of a paged group keep.
fn retentions(draft: &Draft, group: &CacheGroup) -> Vec<Retention> {
    group.items.iter().map(|&i| draft.spec.get(i).unwrap().as_paged().unwrap().retention).collect()
}

fn reads(retention: Retention, n: u64, t: u64) -> bool {
    match retention {
        Retention::Window(w) => t + w.get() > n,
        Retention::Chunk(c) => t >= n - n % c.get(),
        Retention::Ring(r) => t + r.get() >= n,
        _ => true,
    }
}

/// The first token that is needed of `[0, n)`, by walking; `n` where none is.
fn first_needed(draft: &Draft, group: &CacheGroup, n: u64, cached: u64) -> u64 {
    let kept = retentions(draft, group);
    (cached..n).find(|&t| kept.iter().any(|&r| reads(r, n, t))).unwrap_or(n)
}

/// The blocks of a group's ring, if it has one.
fn ring_blocks(draft: &Draft, group: &CacheGroup) -> Option<(u64, u64)> {
    match retentions(draft, group)[0] {
        Retention::Ring(r) => Some((r.get(), r.get() / group.block_tokens.get())),
        _ => None,
    }
}

/// A hit that doesn't cut a value that moves.
fn whole_hit(c: &mut Choices, draft: &Draft, group: &CacheGroup, n: u64, cached: u64) -> u64 {
    let items = || group.items.iter().map(|&i| draft.spec.get(i).unwrap().as_paged().unwrap());
    let span = items().flat_map(|p| p.components.iter().map(|x| p.tokens_per_value(x))).fold(1, lcm);
    let cuts = items().any(|p| {
        let first = (cached..n).find(|&t| reads(p.retention, n, t));
        first.is_some_and(|t| t / span * span < cached && !cached.is_multiple_of(span))
    });
    if cuts || c.chance(20) { cached - cached % span } else { cached }
}

/// Tables without ids yet: positions and lengths are set.
fn random_dst(c: &mut Choices, draft: &Draft, src: &ModelSpec, n: u64) -> Vec<DstTable> {
    let hit = if c.chance(50) { c.within(0, n) } else { 0 };
    // The pages may all be there, and the state not.
    let hit = if c.chance(8) { n } else { hit };
    // Or all but a few.
    let hit = if c.chance(10) { n.saturating_sub(c.within(1, 6)) } else { hit };
    // Where the engine keeps states besides the one that it resumes from.
    let positions: Vec<u64> = if c.chance(40) { (0..c.within(1, 3)).map(|_| c.below(n)).collect() } else { Vec::new() };
    let mut tables = Vec::new();
    for group in &draft.groups {
        if is_state(draft, group) {
            let shared = group.items.iter().any(|&i| src.find(&draft.spec.get(i).unwrap().name).is_some());
            let mut states: Vec<u64> = if c.chance(25) { Vec::new() } else { vec![n] };
            states.extend(positions.iter().filter(|_| shared && c.chance(70)));
            let mut once = Vec::new();
            states.into_iter().for_each(|p| {
                if !once.contains(&p) {
                    once.push(p)
                }
            });
            tables.push(DstTable { states: once.into_iter().map(|p| (p, 0)).collect(), ..DstTable::default() });
            continue;
        }
        // Groups may have been hit differently.
        let cached = if c.chance(20) { c.within(0, n) } else { hit };
        let cached = whole_hit(c, draft, group, n, cached);
        let first = first_needed(draft, group, n, cached);
        let spare = if c.chance(30) { c.within(1, 2) } else { 0 };
        let table = match ring_blocks(draft, group) {
            Some((_, blocks)) => whole_ring(blocks),
            None => random_span(c, group, first, n, spare, first == n),
        };
        tables.push(DstTable { table, cached, states: Vec::new() });
    }
    tables
}

fn whole_ring(blocks: u64) -> Table {
    Table { first: 0, blocks: vec![0; usize::try_from(blocks).unwrap()] }
}

fn random_src(c: &mut Choices, draft: &Draft, dst: &Draft, dst_tables: &[DstTable], n: u64) -> Vec<SrcTable> {
    let mut tables = Vec::new();
    for group in &draft.groups {
        // Everything that any destination group with a common item needs.
        let shares = |g: &CacheGroup| {
            let name = |spec: &ModelSpec, id| spec.get(id).unwrap().name.clone();
            g.items.iter().any(|d| group.items.iter().any(|s| name(&dst.spec, *d) == name(&draft.spec, *s)))
        };
        let sharing: Vec<usize> = (0..dst.groups.len()).filter(|&g| shares(&dst.groups[g])).collect();
        if is_state(draft, group) {
            let mut positions: Vec<u64> =
                sharing.iter().flat_map(|&g| dst_tables[g].states.iter().map(|s| s.0)).collect();
            positions.extend((0..c.below(3)).map(|_| c.below(n + 20)));
            positions.sort_unstable();
            positions.dedup();
            c.shuffle(&mut positions);
            tables.push(SrcTable { states: positions.into_iter().map(|p| (p, 0)).collect(), ..SrcTable::default() });
            continue;
        }
        let needed = |g: &usize| first_needed(dst, &dst.groups[*g], n, dst_tables[*g].cached);
        let first = sharing.iter().map(needed).min().unwrap_or(n);
        let mut end = n + if c.chance(25) { c.below(group.block_tokens.get() * 2) } else { 0 };
        let mut start = if c.chance(50) { first } else { c.within(0, first) };
        let spare = if c.chance(20) { 1 } else { 0 };
        let table = match ring_blocks(draft, group) {
            Some((ring, blocks)) => {
                // What came later took the places of the oldest.
                end = end.min(first + ring);
                start = start.max(end.saturating_sub(ring));
                whole_ring(blocks)
            }
            None => random_span(c, group, start, end, spare, false),
        };
        tables.push(SrcTable { table, held: Range { start, end }, frozen: c.chance(30), states: Vec::new() });
    }
    tables
}

/// A table that covers `[start, end)`, perhaps more at the front, with `spare` blocks at the end.
fn random_span(c: &mut Choices, info: &CacheGroup, start: u64, end: u64, spare: u64, may_be_short: bool) -> Table {
    let size = info.block_tokens.get();
    let late = if c.chance(50) { start / size } else { 0 };
    let first = if c.chance(20) { c.within(0, start / size) } else { late };
    let stop = end.div_ceil(size) + spare;
    let len = if may_be_short && c.chance(30) { 0 } else { stop.saturating_sub(first) };
    Table { first, blocks: vec![0; usize::try_from(len).unwrap()] }
}

/// Gives blocks and states their ids, and says how many blocks or slots each group must have.
fn random_ids<T>(
    c: &mut Choices,
    draft: &Draft,
    mut tables: Vec<T>,
    places: impl Fn(&mut T) -> (&mut Vec<u32>, &mut Vec<(u64, u32)>),
) -> (Vec<T>, Vec<u32>) {
    let mut bulk = c.fork();
    let c = &mut bulk;
    let len = |t: &mut T| {
        let (blocks, states) = places(t);
        (blocks.len() + states.len()) as u64
    };
    let lens: Vec<u64> = tables.iter_mut().map(len).collect();
    let shared = draft.shares_blocks();
    let mut pool: Vec<u32> = Vec::new();
    let mut blocks = Vec::new();
    for (t, &len) in tables.iter_mut().zip(&lens) {
        let spare = if c.chance(60) { c.within(0, 3) } else { 0 };
        if !shared || blocks.is_empty() {
            let total = if shared { lens.iter().sum() } else { len } + spare;
            blocks.push(small(total.max(1)));
            pool = (0..small(total)).collect();
            scramble(c, &mut pool);
        } else {
            blocks.push(blocks[0]);
        }
        let ids = pool.split_off(pool.len() - usize::try_from(len).unwrap());
        let (table, states) = places(t);
        table.iter_mut().chain(states.iter_mut().map(|s| &mut s.1)).zip(ids).for_each(|(to, id)| *to = id);
    }
    (tables, blocks)
}

/// What a producer has given back may stand in its tables as anything.
fn leave_placeholders(c: &mut Choices, draft: &Draft, tables: &mut [SrcTable]) {
    let mut c = c.fork();
    for (group, table) in draft.groups.iter().zip(tables) {
        if is_state(draft, group) || ring_blocks(draft, group).is_some() || !c.chance(40) {
            continue;
        }
        let size = group.block_tokens.get();
        let first = table.table.first;
        for (position, id) in (first..).zip(&mut table.table.blocks) {
            if (position + 1) * size <= table.held.start {
                *id = 0;
            }
        }
    }
}

/// In order, backwards, anyhow, or in stretches.
fn scramble(c: &mut Choices, ids: &mut Vec<u32>) {
    match c.below(5) {
        0 => {}
        1 => ids.reverse(),
        2 => c.shuffle(ids),
        _ => {
            let mut pieces: Vec<Vec<u32>> = Vec::new();
            for &id in ids.iter() {
                match pieces.last_mut() {
                    Some(last) if !c.chance(30) => last.push(id),
                    _ => pieces.push(vec![id]),
                }
            }
            c.shuffle(&mut pieces);
            *ids = pieces.concat();
        }
    }
}
