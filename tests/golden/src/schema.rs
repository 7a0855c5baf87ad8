//! The records of a scenario file, as far as the comparison reads them.
//!
//! Unknown fields are passed over, so that a file with more in it can still be read; a field with a wrong type is an
//! error. Sizes, strides and addresses are bytes. Nothing here is interpreted.

use std::collections::BTreeMap;

use serde::Deserialize;

/// One scenario: what went in, and what the recorded connector made of it.
#[derive(Clone, Debug, Deserialize)]
pub struct Record {
    /// Name of the scenario.
    pub name: String,
    /// What went in.
    pub scenario: Scenario,
    /// Both engines as the connector saw them.
    pub sides: Sides,
    /// Descriptor lists made when ranks met.
    #[serde(default)]
    pub handshakes: Vec<Handshake>,
    /// Transfers by request and initiating rank.
    #[serde(default)]
    pub transfers: Vec<Transfer>,
    /// What the consumer did afterwards, in push mode.
    #[serde(default)]
    pub completions: Vec<Completion>,
    /// Whether the connector carried it out.
    pub verdict: Verdict,
    /// Why not.
    #[serde(default)]
    pub failures: Vec<Failure>,
}

/// Whether the connector carried a scenario out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It did.
    Accept,
    /// Something failed at some stage.
    Reject,
}

/// Who starts transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The consumer reads.
    Pull,
    /// The producer writes.
    Push,
}

/// What went in.
#[derive(Clone, Debug, Deserialize)]
pub struct Scenario {
    /// Who starts transfers.
    pub mode: Mode,
    /// The model.
    pub model: Model,
    /// The producing engine.
    pub prefill: Side,
    /// The consuming engine.
    pub decode: Side,
    /// Requests to carry out.
    #[serde(default)]
    pub requests: Vec<Request>,
    /// What was changed in the peer's payload.
    #[serde(default)]
    pub tamper: Option<Tamper>,
    /// Only these ranks start transfers, as pipeline stage and rank of it; all, if absent.
    #[serde(default)]
    pub local_ranks: Option<Vec<(u32, u32)>>,
}

/// The model's cache.
#[derive(Clone, Debug, Deserialize)]
pub struct Model {
    /// Data type of the cache.
    #[serde(default)]
    pub dtype: Option<String>,
    /// Families of layers.
    pub layers: Vec<Layer>,
    /// Layers of the model; pipeline stages share them out.
    #[serde(default)]
    pub num_hidden_layers: Option<u32>,
}

/// Changes to the model on one side.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ModelOverride {
    /// Another data type.
    #[serde(default)]
    pub dtype: Option<String>,
    /// Other layers.
    #[serde(default)]
    pub layers: Option<Vec<Layer>>,
}

/// A family of layers of one kind.
#[derive(Clone, Debug, Deserialize)]
pub struct Layer {
    /// What the layers cache.
    pub kind: Kind,
    /// Layer numbers.
    pub ids: Vec<u32>,
    /// Name with `{i}` for the number.
    pub name: String,
    /// Heads over all ranks.
    #[serde(default)]
    pub num_kv_heads: Option<u32>,
    /// Elements of one vector.
    #[serde(default)]
    pub head_size: Option<u32>,
    /// Elements of V, if other than of K.
    #[serde(default)]
    pub head_size_v: Option<u32>,
    /// Data type, if other than the model's.
    #[serde(default)]
    pub dtype: Option<String>,
    /// Window of a sliding-window layer.
    #[serde(default)]
    pub sliding_window: Option<u64>,
    /// Chunk of a chunked layer.
    #[serde(default)]
    pub attention_chunk_size: Option<u64>,
    /// Tokens of a ring.
    #[serde(default)]
    pub ring_size: Option<u64>,
    /// Tokens that one entry of the cache stands for.
    #[serde(default)]
    pub tokens_per_state: Option<u32>,
    /// Sizes of a state, over all ranks.
    #[serde(default)]
    pub params: BTreeMap<String, u32>,
    /// Data types of the convolution state and the temporal state.
    #[serde(default)]
    pub state_dtypes: Option<Vec<String>>,
    /// The state is whole on every rank.
    #[serde(default)]
    pub tp_replicated: bool,
    /// Slots at the end of a state's list that only speculation uses.
    #[serde(default)]
    pub num_speculative_blocks: u32,
}

/// Kinds of layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All tokens.
    Full,
    /// A sliding window.
    Swa,
    /// The current chunk.
    Chunked,
    /// One latent vector a token.
    Mla,
    /// One latent vector a token, in a sliding window.
    SwaMla,
    /// The last tokens, at their position modulo the ring's size.
    Ring,
    /// Mamba 1.
    Mamba1,
    /// Mamba 2.
    Mamba2,
    /// Gated delta net.
    Gdn,
    /// Kimi delta attention.
    Kda,
    /// Short convolution.
    ShortConv,
}

impl Kind {
    /// Whether it caches a state and not tokens.
    #[must_use]
    pub fn is_state(self) -> bool {
        matches!(self, Self::Mamba1 | Self::Mamba2 | Self::Gdn | Self::Kda | Self::ShortConv)
    }
}

/// One engine as configured.
#[derive(Clone, Debug, Deserialize)]
pub struct Side {
    /// Tensor-parallel ranks.
    #[serde(default = "one")]
    pub tp_size: u32,
    /// Pipeline stages.
    #[serde(default = "one")]
    pub pp_size: u32,
    /// Decode context parallelism, over tensor-parallel ranks.
    #[serde(default = "one")]
    pub dcp_size: u32,
    /// Prefill context parallelism.
    #[serde(default = "one")]
    pub pcp_size: u32,
    /// Blocks of the scheduler.
    #[serde(default = "eight")]
    pub num_blocks: u32,
    /// Tokens of one.
    #[serde(default = "sixteen")]
    pub block_size: u32,
    /// Order of the axes of the cache, outermost first.
    #[serde(default)]
    pub layout: Option<String>,
    /// Kernel block sizes by kind.
    #[serde(default)]
    pub backends: BTreeMap<String, Backend>,
    /// Changes to the model.
    #[serde(default)]
    pub model_override: Option<ModelOverride>,
    /// `DS` (dimension first) or `SD`.
    #[serde(default)]
    pub ssm_conv_state_layout: Option<String>,
    /// Host memory of a group belongs to all ranks together.
    #[serde(default)]
    pub hisparse_shared_host_pool: bool,
    /// Bytes at the end of the allocation that no layer uses.
    #[serde(default)]
    pub allocation_tail_bytes: u64,
    /// Sliding windows are kept like full attention.
    #[serde(default)]
    pub disable_hybrid_kv_cache_manager: bool,
}

/// An attention backend.
#[derive(Clone, Debug, Deserialize)]
pub struct Backend {
    /// Kernel block sizes it can do.
    pub kernel_block_sizes: Vec<KernelSize>,
}

/// A kernel block size of a backend.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub enum KernelSize {
    /// Exactly this.
    Exact(u32),
    /// Any multiple.
    Multiple {
        /// Of this.
        multiple_of: u32,
    },
}

/// One request.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// Its id.
    pub id: String,
    /// The producer's blocks by group.
    pub prefill_block_ids: Vec<Vec<u32>>,
    /// The consumer's blocks by group, without those it has already.
    pub decode_block_ids: Vec<Vec<u32>>,
    /// Tokens of the prompt, where they end inside a block.
    #[serde(default)]
    pub num_tokens: Option<u64>,
    /// Blocks that the consumer has already, by group.
    #[serde(default)]
    pub decode_num_computed_blocks: Option<Vec<u64>>,
    /// The lists still have placeholders and scratch slots.
    #[serde(default)]
    pub clip: bool,
}

/// Changes to a payload on its way.
#[derive(Clone, Debug, Deserialize)]
pub struct Tamper {
    /// Whose, as pipeline stage and rank of it; everyone's, if absent.
    #[serde(default)]
    pub ranks: Option<Vec<(u32, u32)>>,
    /// Fields with other values.
    #[serde(default)]
    pub set: BTreeMap<String, serde_json::Value>,
}

/// Both engines.
#[derive(Clone, Debug, Deserialize)]
pub struct Sides {
    /// The producer.
    pub prefill: Ranks,
    /// The consumer.
    pub decode: Ranks,
}

/// The ranks of an engine.
#[derive(Clone, Debug, Deserialize)]
pub struct Ranks {
    /// In order of stage, then rank of it; without those that could not register.
    #[serde(default)]
    pub ranks: Vec<Rank>,
}

/// One rank as registered.
#[derive(Clone, Debug, Deserialize)]
pub struct Rank {
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Rank in it.
    pub tp_rank: u32,
    /// First byte of the allocation.
    pub base_addr: u64,
    /// Bytes of the allocation.
    pub allocation_bytes: u64,
    /// Cache groups.
    pub kv_cache_groups: Vec<Group>,
    /// What is registered, by layer.
    pub layer_views: BTreeMap<String, LayerView>,
    /// Derived state.
    pub worker: Worker,
    /// Lists made at registration.
    #[serde(default)]
    pub dlists_at_register: Vec<DescriptorList>,
}

/// Layers that share a block table.
#[derive(Clone, Debug, Deserialize)]
pub struct Group {
    /// Names.
    pub layer_names: Vec<String>,
    /// Class of the group's specification.
    pub spec: String,
    /// Tokens of a logical block.
    pub block_size: u32,
    /// Whether requests move it.
    #[serde(default = "yes")]
    pub enable_kv_transfer: bool,
    /// It lies in host memory.
    #[serde(default)]
    pub host_resident: bool,
}

/// A layer's registered memory: kernel block, head, token, byte.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct LayerView {
    /// First byte.
    pub addr: u64,
    /// Kernel blocks, heads, entries, elements.
    pub shape: [u64; 4],
    /// Their strides.
    pub strides_bytes: [u64; 4],
    /// Bytes of an element.
    pub element_size: u64,
    /// From a logical block to the next, where that isn't so many kernel blocks. Never recorded: views of this kind are
    /// made here, for engines that the connector could not register.
    #[serde(skip)]
    pub block_stride: Option<u64>,
}

/// Derived state of a rank.
#[derive(Clone, Debug, Deserialize)]
pub struct Worker {
    /// This rank's index of context parallelism.
    #[serde(default)]
    pub dcp_rank: u32,
    /// Bytes of the convolution state and of the temporal state.
    #[serde(default)]
    pub ssm_sizes: Vec<u64>,
    /// Offset and length of each part of the convolution state.
    #[serde(default)]
    pub conv_offsets: Option<Vec<(u64, u64)>>,
}

/// What ranks made of each other.
#[derive(Clone, Debug, Deserialize)]
pub struct Handshake {
    /// Who started.
    pub local_side: SideName,
    /// Its stage.
    #[serde(default)]
    pub pp_rank: u32,
    /// Its rank in it.
    #[serde(default)]
    pub tp_rank: u32,
    /// New lists.
    #[serde(default)]
    pub dlists: Vec<DescriptorList>,
}

/// One of two engines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SideName {
    /// The producer.
    Prefill,
    /// The consumer.
    Decode,
}

/// A prepared list of descriptors.
#[derive(Clone, Debug, Deserialize)]
pub struct DescriptorList {
    /// Its name on this rank.
    pub handle: u64,
    /// Whose memory.
    pub agent: String,
    /// Address, length, device, stride, count.
    pub rows: Vec<[u64; 5]>,
}

/// What one rank started for one request.
#[derive(Clone, Debug, Deserialize)]
pub struct Transfer {
    /// The request.
    pub request: String,
    /// Who started.
    pub local_side: SideName,
    /// Its stage.
    #[serde(default)]
    pub pp_rank: u32,
    /// Its rank in it.
    #[serde(default)]
    pub tp_rank: u32,
    /// Batches.
    #[serde(default)]
    pub xfers: Vec<Xfer>,
    /// What the consumer did afterwards, in pull mode.
    #[serde(default)]
    pub post_actions: Vec<PostAction>,
}

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum Direction {
    /// From remote to local.
    #[serde(rename = "READ")]
    Read,
    /// From local to remote.
    #[serde(rename = "WRITE")]
    Write,
}

/// A batch of descriptor pairs.
#[derive(Clone, Debug, Deserialize)]
pub struct Xfer {
    /// Which way.
    pub op: Direction,
    /// List on the starting rank.
    pub local_handle: u64,
    /// List of the other's memory.
    pub remote_handle: u64,
    /// Whose memory.
    pub remote_agent: String,
    /// Indices into the local list.
    pub local_ids: Vec<u64>,
    /// Indices into the remote list, one for each of the local.
    pub remote_ids: Vec<u64>,
    /// SHA-256 of the expanded pairs as little-endian 64-bit numbers.
    #[serde(default)]
    pub pairs_sha256: Option<String>,
    /// The expanded pairs.
    #[serde(default)]
    pub pairs: Option<Vec<[u64; 6]>>,
}

/// What a consumer rank did when a request was complete.
#[derive(Clone, Debug, Deserialize)]
pub struct Completion {
    /// The request.
    #[serde(default)]
    pub request: String,
    /// On which side.
    #[serde(default)]
    pub side: Option<SideName>,
    /// Stage.
    #[serde(default)]
    pub pp_rank: u32,
    /// Rank in it.
    #[serde(default)]
    pub tp_rank: u32,
    /// In push mode.
    #[serde(default)]
    pub post_actions: Vec<PostAction>,
}

/// A step after receipt.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum PostAction {
    /// Sub-blocks are regrouped, permuted or zeroed.
    PostProcess {
        /// Producer's blocks in one of the consumer's.
        block_size_ratio: u64,
        /// Sub-blocks are regrouped to the consumer's block size.
        convert: bool,
        /// The page arrives with heads outside tokens and is permuted.
        permute_layout: bool,
        /// Where.
        groups: Vec<PostGroup>,
    },
    /// Blocks become zero.
    ZeroRegionBlocks {},
    /// Anything else.
    #[serde(other)]
    Other,
}

/// Blocks of a group that a step after receipt changes.
#[derive(Clone, Debug, Deserialize)]
pub struct PostGroup {
    /// Transfer group.
    pub group: usize,
    /// Kernel block ids.
    pub local_block_ids: Vec<u64>,
    /// Sub-blocks that arrived; those after them are zeroed.
    pub covered_sub_blocks: u64,
}

/// Why the connector refused.
#[derive(Clone, Debug, Deserialize)]
pub struct Failure {
    /// `register`, `handshake`, `transfer` or `completion`.
    pub stage: String,
    /// The reason in short.
    pub slug: String,
    /// The side, at registration.
    #[serde(default)]
    pub side: Option<String>,
}

fn one() -> u32 {
    1
}
fn eight() -> u32 {
    8
}
fn sixteen() -> u32 {
    16
}
fn yes() -> bool {
    true
}
