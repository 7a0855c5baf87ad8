//! One random request between two random engines.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::Batch;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::View;
use kvferry_geometry::manifest::{CacheGroup, Manifest};
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::placement::{HeadRule, Parallelism, RankPlacement};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstGroup, DstPaged, Request, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::spec::{ModelSpec, Retention};
use kvferry_geometry::units::{BlockId, RankId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;
use kvferry_oracle::{DstTable, Execution, Expansion, SrcTable, Table, Transfer, Verdict, unusual};

use super::engine::{Draft, Engine, Kin, RefusedDraft};
use super::{Choices, random_items, small};

/// Bytes of both engines' tokens together, more or less: what keeps a case fast.
const BUDGET: u64 = 48 << 10;

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
    /// Drafts met on the way that no manifest can be made of.
    pub refused: Vec<RefusedDraft>,
    usual: [Option<(Parallelism, Vec<HeadRule>)>; 2],
    text: [String; 2],
}

impl Case {
    /// The case that a list of choices makes.
    #[must_use]
    pub fn new(c: &mut Choices) -> Self {
        let items = random_items(c);
        let kin = c.below(100);
        let src_kin = if kin >= 95 { Kin::Prime(4) } else { Kin::None };
        let (src_draft, mut refused) = Draft::random(c, &items, src_kin);
        let dst_kin = match kin {
            95.. => Kin::Prime(3),
            60.. => Kin::Like(&src_draft),
            _ => Kin::None,
        };
        let (dst_draft, more) = Draft::random(c, &items, dst_kin);
        refused.extend(more);
        let bytes = src_draft.bytes_per_token() + dst_draft.bytes_per_token();
        let most = (BUDGET / bytes.max(1)).clamp(20, 260);
        let n = c.within(1, most);
        let dst_sizes = random_dst(c, &dst_draft, n);
        let src_sizes = random_src(c, &src_draft, &dst_draft, &dst_sizes, n);
        let (src_tables, src_blocks) = random_ids(c, &src_draft, src_sizes, |s| &mut s.table);
        let (dst_tables, dst_blocks) = random_ids(c, &dst_draft, dst_sizes, |s| &mut s.table);
        let salt = c.below(17);
        let src = build(&src_draft, &src_blocks);
        let dst = build(&dst_draft, &dst_blocks);
        Self {
            src: Arc::new(src.manifest),
            dst: Arc::new(dst.manifest),
            tokens: n,
            src_tables,
            dst_tables,
            salt,
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
        let src = |s: &SrcTable| -> SrcGroup {
            let paged = SrcPaged {
                table: table(&s.table),
                held: TokenRange::new(Tokens::new(s.held.start), Tokens::new(s.held.end)),
                tail: if s.frozen { Tail::Frozen } else { Tail::Exact },
            };
            paged.into()
        };
        let dst =
            |d: &DstTable| -> DstGroup { DstPaged { table: table(&d.table), cached: Tokens::new(d.cached) }.into() };
        Request {
            tokens: Tokens::new(self.tokens),
            src: self.src_tables.iter().map(src).collect(),
            dst: self.dst_tables.iter().map(dst).collect(),
        }
    }

    /// Plans the request.
    ///
    /// # Errors
    /// The planner's refusal, in words: always a finding, since a case is valid.
    pub fn plan(&self) -> Result<Plan, String> {
        let compatible = Compatible::new(self.src.clone(), self.dst.clone()).map_err(|e| e.to_string())?;
        // A third of the maps know distances.
        let far = |src: RankId, dst: RankId| if self.salt % 3 == 2 { (src.get() * 5 + dst.get() * 3) % 4 } else { 0 };
        let peers = PeerMap::with(&compatible, PeerOptions { salt: self.salt, stripe: false }, far)
            .map_err(|e| e.to_string())?;
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

    /// Carries a plan out in memory and holds the outcome against the oracle.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn verify_plan(&self, plan: &Plan) -> Result<Outcome, String> {
        let transfer = self.transfer();
        let mut run = Execution::new(&transfer).map_err(|e| e.to_string())?;
        let mut outcome = Outcome::default();
        for (src, dst, batch) in &plan.batches {
            let seen = run.run(*src, *dst, batch).map_err(|e| e.to_string())?;
            outcome.add(&seen);
        }
        for rank in 0..small(self.dst.ranks().len() as u64) {
            let rank = RankId::new(rank);
            let zeros =
                ZeroPlan::new(&self.dst, rank).and_then(|z| z.resolve(&plan.bound)).map_err(|e| e.to_string())?;
            for range in zeros.ranges() {
                run.zero(rank, range.region, range.offset, range.len).map_err(|e| e.to_string())?;
            }
        }
        outcome.verdict = run.finish().map_err(|e| e.to_string())?;
        Ok(outcome)
    }

    /// What kinds of difficulty this case has; tests check that all kinds occur.
    #[must_use]
    pub fn features(&self) -> Vec<&'static str> {
        let mut found = Vec::new();
        let mut note = |name, yes| {
            if yes {
                found.push(name);
            }
        };
        let contexts = |m: &Manifest| placements(m).map(|(_, p)| p.tokens.count()).max().unwrap_or(1);
        let (src_context, dst_context) = (contexts(&self.src), contexts(&self.dst));
        note("context parallel source", src_context > 1);
        note("context parallel destination", dst_context > 1);
        note("context parallel on both sides", src_context > 1 && dst_context > 1);
        let deals = |m: &Manifest| placements(m).map(|(_, p)| p.tokens.interleave()).max().unwrap_or(1);
        note("interleaves differ", src_context > 1 && dst_context > 1 && deals(&self.src) != deals(&self.dst));
        let ranks = (self.src.ranks().len(), self.dst.ranks().len());
        note("many ranks to few", ranks.0 > ranks.1);
        note("few ranks to many", ranks.0 < ranks.1);
        note(
            "neither rank count divides the other",
            !ranks.0.is_multiple_of(ranks.1) && !ranks.1.is_multiple_of(ranks.0),
        );
        let views = |m: &Manifest| {
            let views: Vec<_> = m
                .ranks()
                .iter()
                .flat_map(|r| r.layout.views.iter().flatten().filter_map(View::as_paged).cloned())
                .collect();
            views
        };
        let kernels = |m: &Manifest| views(m).iter().any(|v| v.kernel.size < v.block_size);
        note("kernel blocks at the source", kernels(&self.src));
        note("kernel blocks at the destination", kernels(&self.dst));
        let partial = |m: &Manifest| m.ranks().iter().any(|r| r.placement.contains(&None));
        note("pipeline stages on both sides", partial(&self.src) && partial(&self.dst));
        let spec = self.src.spec();
        let kinds: Vec<bool> = spec.items().iter().map(|i| i.as_paged().unwrap().heads == 1).collect();
        let mixed =
            |g: &CacheGroup| g.items.iter().any(|i| kinds[i.index()]) && g.items.iter().any(|i| !kinds[i.index()]);
        note("one and several heads in one group", self.src.groups().iter().any(mixed));
        note("several groups", self.src.groups().len() > 1 && self.dst.groups().len() > 1);
        note("groups differ", self.src.groups().len() != self.dst.groups().len());
        note("item order differs", spec.items().iter().zip(self.dst.spec().items()).any(|(a, b)| a.name != b.name));
        let windows =
            |m: &ModelSpec| m.items().iter().any(|i| matches!(i.as_paged().unwrap().retention, Retention::Window(_)));
        let chunks =
            |m: &ModelSpec| m.items().iter().any(|i| matches!(i.as_paged().unwrap().retention, Retention::Chunk(_)));
        note("windows", windows(spec));
        note("chunks", chunks(spec));
        let sizes = |m: &Manifest| m.groups().iter().map(|g| g.block_tokens.get()).collect::<Vec<_>>();
        let pairs = || sizes(&self.src).into_iter().flat_map(|s| sizes(&self.dst).into_iter().map(move |d| (s, d)));
        note("block sizes differ, one divides", pairs().any(|(s, d)| s != d && (s % d == 0 || d % s == 0)));
        note("block sizes differ, none divides", pairs().any(|(s, d)| s % d != 0 && d % s != 0));
        note("hits", self.dst_tables.iter().any(|d| d.cached > 0));
        note("frozen tails", self.src_tables.iter().any(|s| s.frozen));
        note("late tables", self.src_tables.iter().any(|s| s.table.first > 0));
        note("groups share memory", self.text.iter().any(|t| t.contains("Hybrid")));
        note("hand-made placements", self.text.iter().any(|t| t.contains("by hand")));
        note("refused placements", !self.refused.is_empty());
        let replicated =
            |m: &Manifest| placements(m).any(|(i, p)| placements(m).filter(|(j, q)| *j == i && *q == p).count() > 1);
        note("replicas at the source", replicated(&self.src));
        found
    }
}

/// Every item's placement on every rank.
fn placements(m: &Manifest) -> impl Iterator<Item = (usize, kvferry_geometry::placement::PagedPlacement)> {
    m.ranks()
        .iter()
        .flat_map(|r| r.placement.iter().enumerate().filter_map(|(i, p)| Some((i, *p.as_ref()?.as_paged()?))))
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} tokens, salt {}", self.tokens, self.salt)?;
        for (side, text, manifest) in [("src", &self.text[0], &self.src), ("dst", &self.text[1], &self.dst)] {
            writeln!(f, "{side}: {text}")?;
            for item in manifest.spec().items() {
                let p = item.as_paged().unwrap();
                let widths: Vec<_> = p.components.iter().map(|c| (c.name.as_str(), c.width.get())).collect();
                writeln!(f, "  {}: {} heads, {widths:?}, {}", item.name, p.heads, p.retention)?;
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

/// What happened in a case whose every byte is right.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Bytes by fate.
    pub verdict: Verdict,
    /// Sums over all batches.
    pub expansion: Expansion,
}

impl Outcome {
    fn add(&mut self, seen: &Expansion) {
        self.expansion.bytes += seen.bytes;
        self.expansion.runs += seen.runs;
        self.expansion.descriptors += seen.descriptors;
        self.expansion.unmerged += seen.unmerged;
    }
}

fn build(draft: &Draft, blocks: &[u32]) -> Engine {
    draft
        .build(blocks)
        .unwrap_or_else(|e| panic!("a draft that is sound by construction was refused: {e}\n{}", draft.text))
}

fn retention_of(draft: &Draft, group: usize) -> Retention {
    draft.spec.get(draft.groups[group].items[0]).unwrap().as_paged().unwrap().retention
}

/// The first token that is needed of `[0, n)`, by walking; `n` where none is.
fn first_needed(retention: Retention, n: u64, cached: u64) -> u64 {
    let reads = |t: &u64| match retention {
        Retention::Window(w) => t + w.get() > n,
        Retention::Chunk(c) => *t >= n - n % c.get(),
        _ => true,
    };
    (cached..n).find(reads).unwrap_or(n)
}

/// Tables without ids yet: first position and length are set.
fn random_dst(c: &mut Choices, draft: &Draft, n: u64) -> Vec<DstTable> {
    let hit = if c.chance(50) { c.within(0, n) } else { 0 };
    let mut tables = Vec::new();
    for (group, info) in draft.groups.iter().enumerate() {
        // Groups may have been hit differently.
        let cached = if c.chance(20) { c.within(0, n) } else { hit };
        let first = first_needed(retention_of(draft, group), n, cached);
        let spare = if c.chance(30) { c.within(1, 2) } else { 0 };
        let table = random_span(c, info, first, n, spare, first == n);
        tables.push(DstTable { table, cached });
    }
    tables
}

fn random_src(c: &mut Choices, draft: &Draft, dst: &Draft, dst_tables: &[DstTable], n: u64) -> Vec<SrcTable> {
    let mut tables = Vec::new();
    for info in &draft.groups {
        // Everything that any destination group with a common item needs.
        let shares = |g: &CacheGroup| {
            let name = |spec: &ModelSpec, id| spec.get(id).unwrap().name.clone();
            g.items.iter().any(|d| info.items.iter().any(|s| name(&dst.spec, *d) == name(&draft.spec, *s)))
        };
        let sharing = dst.groups.iter().enumerate().filter(|(_, g)| shares(g)).map(|(i, _)| i);
        let first = sharing.map(|g| first_needed(retention_of(dst, g), n, dst_tables[g].cached)).min().unwrap_or(n);
        let start = if c.chance(50) { first } else { c.within(0, first) };
        let end = n + if c.chance(25) { c.below(info.block_tokens.get() * 2) } else { 0 };
        let spare = if c.chance(20) { 1 } else { 0 };
        let table = random_span(c, info, start, end, spare, false);
        tables.push(SrcTable { table, held: Range { start, end }, frozen: c.chance(30) });
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

/// Gives the tables their ids, and says how many blocks each group must have.
fn random_ids<T>(
    c: &mut Choices,
    draft: &Draft,
    mut tables: Vec<T>,
    table: impl Fn(&mut T) -> &mut Table,
) -> (Vec<T>, Vec<u32>) {
    let mut bulk = c.fork();
    let c = &mut bulk;
    let lens: Vec<u64> = tables.iter_mut().map(|t| table(t).blocks.len() as u64).collect();
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
        table(t).blocks = ids;
    }
    (tables, blocks)
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
