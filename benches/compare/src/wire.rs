//! What the processes say to each other: one JSON value a line.

use serde::{Deserialize, Serialize};

use crate::work::{Scene, Work};

/// Who moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Rival {
    /// Plain copies between mappings of both memories.
    Memcpy {
        /// Threads.
        threads: usize,
    },
    /// `process_vm_readv`.
    ProcessVm {
        /// Ranges in a call.
        ranges: usize,
        /// Threads.
        threads: usize,
    },
    /// A loop of UCX reads.
    Ucx {
        /// Workers, each with a thread and a context of its own.
        workers: usize,
    },
    /// A NIXL transfer.
    Nixl {
        /// Threads of the UCX plugin.
        threads: usize,
        /// Whether the agents have a progress thread.
        progress: bool,
        /// Prepared lists and indices into them, or lists made for each transfer.
        prepared: bool,
        /// Whether UCX may use shared memory and the kernel's copies for everything, as kvferry-nixl lets it; otherwise its messages
        /// take TCP, as vLLM's do.
        host: bool,
    },
    /// A backend of kvferry, by its transport alone.
    Ferry {
        /// Which.
        backend: Backend,
        /// Copy threads or rails; 0: its default.
        threads: usize,
    },
    /// The same with owners, workers and leases around it.
    Engine {
        /// Which.
        backend: Backend,
        /// Copy threads or rails; 0: its default.
        threads: usize,
    },
}

/// kvferry's backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Backend {
    Shm,
    Ucx,
    Nixl,
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Shm => "kvferry-shm",
            Self::Ucx => "kvferry-ucx",
            Self::Nixl => "kvferry-nixl",
        })
    }
}

impl std::fmt::Display for Rival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memcpy { .. } => f.write_str("memcpy"),
            Self::ProcessVm { ranges, .. } => write!(f, "process_vm_readv, {ranges} a call"),
            Self::Ucx { .. } => f.write_str("raw UCX"),
            Self::Nixl { prepared, host, .. } => {
                let lists = if *prepared { "prepared lists" } else { "raw lists" };
                write!(f, "bare NIXL, {lists}{}", if *host { ", host lanes" } else { "" })
            }
            Self::Ferry { backend, .. } => write!(f, "{backend}"),
            Self::Engine { backend, .. } => write!(f, "kvferry engines over {backend}"),
        }
    }
}

impl Rival {
    /// What the threads of its row are.
    pub(crate) fn threads(self) -> String {
        match self {
            Self::Memcpy { threads } | Self::ProcessVm { threads, .. } => threads.to_string(),
            Self::Ucx { workers } => workers.to_string(),
            Self::Nixl { threads, progress, .. } => {
                format!("{threads} + caller{}", if progress { " + progress" } else { "" })
            }
            Self::Ferry { threads: 0, .. } | Self::Engine { threads: 0, .. } => "default".to_owned(),
            Self::Ferry { threads, .. } | Self::Engine { threads, .. } => threads.to_string(),
        }
    }

    /// How sure it is at the end that the bytes are what they should be.
    pub(crate) fn assurance(self) -> &'static str {
        match self {
            Self::Memcpy { .. } | Self::ProcessVm { .. } | Self::Ucx { .. } | Self::Nixl { .. } => "none",
            Self::Ferry { .. } => "peer alive, registration current",
            Self::Engine { .. } => "fenced",
        }
    }
}

/// Which end of a rival a process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Side {
    /// Owns the source.
    Prefill,
    /// Reads into the destination.
    Decode,
}

/// A process's command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) rival: Rival,
    pub(crate) side: Side,
    pub(crate) scene: Scene,
    /// Files of the source and of the destination.
    pub(crate) memory: [std::path::PathBuf; 2],
}

/// To a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// To the reader: who to read from.
    Connect(Vec<u8>),
    /// To the reader: whatever may be done before a work is timed.
    Prepare(Work),
    /// To the source: offer a work's blocks; only to engines.
    Offer(Work),
    /// To the reader: a work, timed; engines need an offer.
    Read(Work, Vec<u8>),
    /// To the reader: forget what was read.
    Clear,
    /// To the reader: compare everything.
    Verify(Work),
    /// To the reader: a fresh endpoint reads 4 KiB from this source, timed; a fresh engine pulls one block by this offer.
    Contact(Vec<u8>),
    /// To all.
    Quit,
}

/// From a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// It is ready; what others need to connect.
    Hello(Vec<u8>),
    /// It is so.
    Ok,
    /// How it went.
    Moved(Moved),
    /// How meeting went.
    Met(Contact),
    /// Bytes that were wrong.
    Wrong(u64),
    /// It is not so.
    Failed(String),
}

/// One timed operation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Moved {
    /// From the order to the last byte.
    pub(crate) ns: u64,
    /// Contiguous pieces.
    pub(crate) descriptors: u64,
    /// What carried them, if that is known.
    pub(crate) lane: String,
}

/// A first contact, by its steps.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Contact {
    /// Making the endpoint.
    pub(crate) open_ns: u64,
    /// Registering its memory.
    pub(crate) register_ns: u64,
    /// From the peer's blob to the connection.
    pub(crate) connect_ns: u64,
    /// The first 4 KiB; for engines all of it, from the reference to one block in place.
    pub(crate) first_ns: u64,
}
