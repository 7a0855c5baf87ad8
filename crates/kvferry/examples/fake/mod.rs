//! What both engines of the example would have from their own code: a cache of a fake model, blocks of it that are free, and a
//! server that takes a line of JSON and answers one.
//!
//! The "model" caches for each token a hash of its id, its position, the layer, the head and the byte, so that every byte of a cache
//! that was pulled can be checked.
#![allow(
    clippy::print_stdout,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a part of two programs, which print"
)]

use std::error::Error;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kvferry::{BlockId, CacheGroup, ModelSpec, RankManifest, Region, Tokens};
use kvferry_geometry::layout::{ComponentView, LayoutStyle, PagedView};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_geometry::units::Name;
use kvferry_memory::{BufferOptions, SharedBuffer};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// An engine's cache: what kvferry is told of it, and the memory.
pub struct Cache {
    pub spec: ModelSpec,
    pub group: CacheGroup,
    /// What each rank holds and where, and the memory that has it.
    pub ranks: Vec<(RankManifest, Vec<Region>)>,
    block: u32,
    free: Mutex<Vec<BlockId>>,
}

impl Cache {
    /// Two layers with 4 KV heads, each 64 values of 2 bytes for K and as many for V; `blocks` blocks of `block` tokens on each of
    /// `tp` ranks, laid out as `style` says.
    pub fn new(tp: u32, block: u32, blocks: u32, style: LayoutStyle) -> Result<Self> {
        // What the model caches, whoever runs it.
        let layer = |n: u32| {
            let kv = vec![Component::new("k", 128, "bf16"), Component::new("v", 128, "bf16")];
            Item::paged(&format!("model.layers.{n}.self_attn.attn"), PagedItem::new(4, kv))
        };
        let spec = ModelSpec::new(vec![layer(0), layer(1)])?;
        // The layers that share a block table.
        let items: Vec<_> = spec.iter().map(|(id, _)| id).collect();
        let group =
            CacheGroup { name: Name::new("all"), items: items.clone(), block_tokens: Tokens::new(block.into()) };
        // Which heads each rank has, and where its bytes are. An engine with tensors of its own says so view by view instead.
        let mut ranks = Vec::new();
        let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split);
        for placement in placed.map_err(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))? {
            let layout = style.build(&spec, &placement, &[(&items, block, blocks)])?;
            let mut memory = Vec::new();
            for region in &layout.regions {
                memory.push(SharedBuffer::new("fake cache", region.len, BufferOptions::default())?.region());
            }
            ranks.push((RankManifest { placement, layout }, memory));
        }
        let free = Mutex::new((0..blocks).map(BlockId::new).collect());
        Ok(Self { spec, group, ranks, block, free })
    }

    /// Free blocks for so many tokens.
    pub fn take(&self, tokens: usize) -> Result<Vec<BlockId>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = free.len().checked_sub(tokens.div_ceil(self.block as usize)).ok_or("no block is free")?;
        Ok(free.split_off(rest))
    }

    pub fn give_back(&self, blocks: Vec<BlockId>) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend(blocks);
    }

    /// Computes the cache of some of a prompt's tokens into blocks.
    pub fn compute(&self, prompt: &[u32], blocks: &[BlockId], tokens: Range<usize>) -> Result<()> {
        self.each(prompt, blocks, tokens, |region, offset, bytes| Ok(region.write(offset, bytes)?))
    }

    /// How many bytes of a prompt's cache are not what would have been computed.
    pub fn wrong(&self, prompt: &[u32], blocks: &[BlockId]) -> Result<usize> {
        let mut wrong = 0;
        self.each(prompt, blocks, 0..prompt.len(), |region, offset, bytes| {
            let mut found = [0; 128];
            region.read(offset, &mut found)?;
            wrong += found.iter().zip(bytes).filter(|(found, right)| found != right).count();
            Ok(())
        })?;
        Ok(wrong)
    }

    /// Every value of the cache of these tokens on every rank: where it is, and its bytes.
    fn each(
        &self,
        prompt: &[u32],
        blocks: &[BlockId],
        tokens: Range<usize>,
        mut visit: impl FnMut(&Region, u64, &[u8; 128]) -> Result<()>,
    ) -> Result<()> {
        for (manifest, memory) in &self.ranks {
            for (layer, (view, placed)) in (0u64..).zip(manifest.layout.views.iter().zip(&manifest.placement)) {
                let view = view.as_ref().and_then(|v| v.as_paged()).ok_or("a layer without a view")?;
                let heads = placed.as_ref().and_then(|p| p.as_paged()).ok_or("a layer without heads")?.heads;
                for (position, &token) in (0u64..).zip(prompt).skip(tokens.start).take(tokens.len()) {
                    let block = blocks[usize::try_from(position / u64::from(self.block))?];
                    for (k_or_v, part) in (0u64..).zip(&view.components) {
                        for head in heads.start()..heads.end() {
                            let key = [layer, position, token.into(), k_or_v, head.into()];
                            let offset =
                                offset(view, part, block, position % u64::from(self.block), head - heads.start());
                            visit(&memory[view.region.index()], offset, &value(&key))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

fn offset(view: &PagedView, part: &ComponentView, block: BlockId, entry: u64, head: u32) -> u64 {
    let block = view.offset.get() + u64::from(block.get()) * view.block_stride.get();
    block + part.offset.get() + u64::from(head) * part.head_stride.get() + entry * part.entry_stride.get()
}

fn value(key: &[u64; 5]) -> [u8; 128] {
    let mut state = key.iter().fold(0u64, |h, k| (h ^ k).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    std::array::from_fn(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    })
}

/// Serves lines of JSON at the address that is the program's first argument, all clients at once, until the program ends.
pub async fn serve<F>(answer: impl Fn(Value) -> F + Clone + Send + 'static) -> Result<()>
where
    F: Future<Output = Result<Value>> + Send,
{
    let listener =
        TcpListener::bind(std::env::args().nth(1).ok_or("say where to listen: 127.0.0.1:8100, say")?).await?;
    println!("listening at {}", listener.local_addr()?);
    loop {
        let (client, _) = listener.accept().await?;
        let answer = answer.clone();
        tokio::spawn(async move {
            if let Err(error) = converse(client, answer).await {
                println!("a client was left: {error}");
            }
        });
    }
}

async fn converse<F: Future<Output = Result<Value>>>(client: TcpStream, answer: impl Fn(Value) -> F) -> Result<()> {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Some(line) = lines.next_line().await? {
        let answered = match serde_json::from_str(&line) {
            Ok(request) => answer(request).await,
            Err(error) => Err(error.into()),
        };
        let answered = answered.unwrap_or_else(|error| json!({"error": error.to_string()}));
        writer.write_all(format!("{answered}\n").as_bytes()).await?;
    }
    Ok(())
}
