//! Published sizes of the model presets, by name: what the roofline needs and a cache's geometry doesn't tell.
//!
//! Parameters are as their makers publish them, rounded as there; a source stands with each. `docs/load.md` has the same as a table.
//! Heads are those of each model's public `config.json`, as the presets are. Only what grows with the context is attention:
//! recurrent and linear layers cost the same for each token, and are in the parameters.

use super::roofline::Attention;

/// What is published of one model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Figures {
    /// The preset's name.
    pub name: &'static str,
    /// Parameters that one token meets, in 10⁹.
    pub active_b: f64,
    /// All, in 10⁹.
    pub total_b: f64,
    /// Bytes of one, in the checkpoint that the preset describes.
    pub weight_bytes: f64,
    /// Where the parameters are published.
    pub source: &'static str,
    /// Its attention.
    attention: &'static [Kind],
}

/// Layers of one kind of attention.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// Layers, query heads, values of a head, and the window where there is one.
    Heads(u32, u32, u32, Option<u64>),
    /// Layers and heads of MLA with a latent of 512 and 64 rotary values; what an indexer picks, where there is one.
    Latent(u32, u32, Option<u64>),
    /// Layers, heads and values of an indexer, which scores all tokens.
    Indexer(u32, u32, u32),
}

impl Kind {
    fn attention(self, decode: bool) -> Attention {
        match self {
            Self::Heads(layers, heads, dim, most) => Attention { layers, heads, qk_dim: dim, v_dim: dim, most },
            // A prefill makes keys of 128 + 64 and values of 128 of the latent; a step takes the latent itself for both.
            Self::Latent(layers, heads, most) if decode => Attention { layers, heads, qk_dim: 576, v_dim: 512, most },
            Self::Latent(layers, heads, most) => Attention { layers, heads, qk_dim: 192, v_dim: 128, most },
            Self::Indexer(layers, heads, dim) => Attention { layers, heads, qk_dim: dim, v_dim: 0, most: None },
        }
    }
}

impl Figures {
    /// Parameters that one token meets.
    #[must_use]
    pub fn active_params(&self) -> f64 {
        self.active_b * 1e9
    }

    /// All parameters.
    #[must_use]
    pub fn params(&self) -> f64 {
        self.total_b * 1e9
    }

    /// Its attention in a prefill, or where tokens are made one by one.
    #[must_use]
    pub fn attention(&self, decode: bool) -> Vec<Attention> {
        self.attention.iter().map(|k| k.attention(decode)).collect()
    }
}

/// The figures of a preset. There are none of draft models, which don't run alone.
///
/// ```
/// use kvferry_topology::load::figures;
/// let v3 = figures::of("deepseek-v3").ok_or("no such preset")?;
/// assert_eq!((v3.active_b, v3.total_b), (37.0, 671.0));
/// # Ok::<(), &str>(())
/// ```
#[must_use]
pub fn of(name: &str) -> Option<&'static Figures> {
    ALL.iter().find(|f| f.name == name)
}

/// All of them, by name.
pub const ALL: &[Figures] = &[
    Figures {
        name: "bamba-9b",
        active_b: 9.78,
        total_b: 9.78,
        weight_bytes: 2.0,
        source: "https://huggingface.co/ibm-ai-platform/Bamba-9B-v1",
        attention: &[Kind::Heads(3, 32, 128, None)],
    },
    Figures {
        name: "deepseek-v3",
        active_b: 37.0,
        total_b: 671.0,
        weight_bytes: 1.0,
        source: "https://arxiv.org/abs/2412.19437",
        attention: &[Kind::Latent(61, 128, None)],
    },
    Figures {
        name: "deepseek-v3.2",
        active_b: 37.0,
        total_b: 671.0,
        weight_bytes: 1.0,
        source: "https://arxiv.org/abs/2412.19437",
        attention: &[Kind::Latent(61, 128, Some(2_048)), Kind::Indexer(61, 64, 128)],
    },
    Figures {
        name: "falcon-h1-0.5b",
        active_b: 0.5,
        total_b: 0.5,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2507.22448",
        attention: &[Kind::Heads(36, 8, 64, None)],
    },
    Figures {
        name: "gemma-3-27b-it",
        active_b: 27.0,
        total_b: 27.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2503.19786",
        attention: &[Kind::Heads(52, 32, 128, Some(1_024)), Kind::Heads(10, 32, 128, None)],
    },
    Figures {
        name: "gemma-4-26b-a4b-it",
        active_b: 3.8,
        total_b: 25.2,
        weight_bytes: 2.0,
        source: "https://ai.google.dev/gemma/docs/core/model_card_4",
        attention: &[Kind::Heads(25, 16, 256, Some(1_024)), Kind::Heads(5, 16, 512, None)],
    },
    Figures {
        name: "gpt-oss-120b",
        active_b: 5.1,
        total_b: 116.8,
        // A checkpoint of 60.8 GiB.
        weight_bytes: 0.56,
        source: "https://arxiv.org/abs/2508.10925",
        attention: &[Kind::Heads(18, 64, 64, Some(128)), Kind::Heads(18, 64, 64, None)],
    },
    Figures {
        name: "jamba-v0.1",
        active_b: 12.0,
        total_b: 52.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2403.19887",
        attention: &[Kind::Heads(4, 32, 128, None)],
    },
    Figures {
        name: "kimi-k2-instruct",
        active_b: 32.0,
        total_b: 1_000.0,
        weight_bytes: 1.0,
        source: "https://arxiv.org/abs/2507.20534",
        attention: &[Kind::Latent(61, 64, None)],
    },
    Figures {
        name: "kimi-k2.5",
        active_b: 32.0,
        total_b: 1_000.0,
        // Experts in 4 bits with a scale for each group of 32, the rest in 16.
        weight_bytes: 0.6,
        source: "https://huggingface.co/moonshotai/Kimi-K2.5",
        attention: &[Kind::Latent(61, 64, None)],
    },
    Figures {
        name: "kimi-linear-48b-a3b",
        active_b: 3.0,
        total_b: 48.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2510.26692",
        attention: &[Kind::Latent(7, 32, None)],
    },
    Figures {
        name: "llama-3.1-70b",
        active_b: 70.6,
        total_b: 70.6,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2407.21783",
        attention: &[Kind::Heads(80, 64, 128, None)],
    },
    Figures {
        name: "llama-3.1-8b",
        active_b: 8.0,
        total_b: 8.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2407.21783",
        attention: &[Kind::Heads(32, 32, 128, None)],
    },
    Figures {
        name: "minimax-text-01",
        active_b: 45.9,
        total_b: 456.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2501.08313",
        attention: &[Kind::Heads(10, 64, 128, None)],
    },
    Figures {
        name: "mistral-7b-v0.1",
        active_b: 7.3,
        total_b: 7.3,
        weight_bytes: 2.0,
        source: "https://mistral.ai/news/announcing-mistral-7b",
        attention: &[Kind::Heads(32, 32, 128, Some(4_096))],
    },
    Figures {
        name: "nemotron-3-nano-30b-a3b",
        active_b: 3.2,
        total_b: 31.6,
        weight_bytes: 2.0,
        source: "https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        attention: &[Kind::Heads(6, 32, 128, None)],
    },
    Figures {
        name: "nemotron-3-super-120b-a12b",
        active_b: 12.0,
        total_b: 120.0,
        weight_bytes: 1.0,
        source: "https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        attention: &[Kind::Heads(8, 32, 128, None)],
    },
    Figures {
        name: "nemotron-h-56b",
        active_b: 56.0,
        total_b: 56.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2504.03624",
        attention: &[Kind::Heads(10, 64, 128, None)],
    },
    Figures {
        name: "qwen3-235b-a22b",
        active_b: 22.0,
        total_b: 235.0,
        weight_bytes: 2.0,
        source: "https://arxiv.org/abs/2505.09388",
        attention: &[Kind::Heads(94, 64, 128, None)],
    },
    Figures {
        name: "qwen3-8b",
        active_b: 8.2,
        total_b: 8.2,
        weight_bytes: 2.0,
        source: "https://huggingface.co/Qwen/Qwen3-8B",
        attention: &[Kind::Heads(36, 32, 128, None)],
    },
    Figures {
        name: "qwen3-next-80b-a3b",
        active_b: 3.0,
        total_b: 80.0,
        weight_bytes: 2.0,
        source: "https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct",
        attention: &[Kind::Heads(12, 16, 256, None)],
    },
];
