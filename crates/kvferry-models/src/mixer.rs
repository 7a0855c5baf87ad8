//! The sizes of a hybrid model's states, from each family's own keys.

use kvferry_geometry::spec::{MAX_HEADS, MAX_ROWS};

use crate::dtype::Dtype;
use crate::error::{Faults, InputFault};
use crate::hybrid;
use crate::model::StateName;
use crate::state::State;
use crate::tree::{Section, Value};

/// What kind of state a family keeps, by the keys that size it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mixer {
    /// Nemotron-H: Mamba 2.
    NemotronH,
    /// Bamba: Mamba 2 with `mamba_*` keys.
    Bamba,
    /// Falcon-H1: as Bamba, with `mamba_d_ssm`.
    FalconH1,
    /// Jamba: Mamba 1.
    Jamba,
    /// Qwen3-Next: gated delta net.
    Qwen3Next,
    /// Kimi Linear: KDA.
    KimiLinear,
    /// MiniMax-Text-01: lightning attention.
    MiniMax,
}

const HINT: &str = "the state is sized by it";
/// The most channels of a head, or values of a group's state.
const MAX_DIM: u32 = 1 << 16;

impl Mixer {
    /// How vLLM names the attention's and the state's caches, after the layer's number.
    pub(crate) const fn names(self) -> (&'static str, StateName) {
        match self {
            Self::NemotronH => (".mixer.attn", StateName::After(".mixer")),
            Self::Bamba | Self::Jamba => (".attn", StateName::After(".mixer")),
            Self::FalconH1 => (".attn", StateName::Beyond("model.", ".mixer")),
            Self::Qwen3Next => (".self_attn.attn", StateName::After(".linear_attn")),
            Self::KimiLinear => (".self_attn", StateName::After(".self_attn")),
            // The linear attention is registered under the layer's own name.
            Self::MiniMax => (".attn", StateName::After("")),
        }
    }

    /// What the recurrent state is kept in unless the engine says otherwise; `None`: as the convolution.
    pub(crate) fn state_dtype(self, text: Section<'_>, faults: &mut Faults) -> Option<Dtype> {
        match self {
            Self::NemotronH => {
                let stated = text.word("mamba_ssm_cache_dtype", Dtype::KNOWN, Dtype::parse, faults);
                Some(stated.unwrap_or(Dtype::Fp32))
            }
            Self::KimiLinear => Some(Dtype::Fp32),
            _ => None,
        }
    }

    /// The state of one layer.
    pub(crate) fn state(self, text: Section<'_>, faults: &mut Faults) -> Option<State> {
        match self {
            Self::NemotronH => {
                let heads = text.needed("mamba_num_heads", MAX_HEADS, HINT, faults);
                let head_dim = text.needed("mamba_head_dim", MAX_DIM, HINT, faults);
                let groups = text.needed("n_groups", MAX_HEADS, HINT, faults);
                let state_size = text.needed("ssm_state_size", MAX_DIM, HINT, faults);
                let conv_kernel = kernel("conv_kernel", text, faults);
                divides("n_groups", groups, "mamba_num_heads", heads, text, faults);
                mamba2(heads?, head_dim?, groups?, state_size?, conv_kernel?, "mamba_num_heads", text, faults)
            }
            Self::Bamba | Self::FalconH1 => self.bamba(text, faults),
            Self::Jamba => {
                let state_size = text.needed("mamba_d_state", MAX_DIM, HINT, faults);
                let conv_kernel = kernel("mamba_d_conv", text, faults);
                let channels = expanded(text, faults)?;
                channels_fit("mamba_expand", channels.into(), text, faults)?;
                Some(State::Mamba1 { channels, state_size: state_size?, conv_kernel: conv_kernel? })
            }
            Self::Qwen3Next => {
                let key_heads = text.needed("linear_num_key_heads", MAX_HEADS, HINT, faults);
                let key_dim = text.needed("linear_key_head_dim", MAX_DIM, HINT, faults);
                let value_heads = text.needed("linear_num_value_heads", MAX_HEADS, HINT, faults);
                let value_dim = text.needed("linear_value_head_dim", MAX_DIM, HINT, faults);
                let conv_kernel = kernel("linear_conv_kernel_dim", text, faults);
                divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads, text, faults);
                let (key_heads, key_dim, value_heads, value_dim) = (key_heads?, key_dim?, value_heads?, value_dim?);
                let products =
                    [("linear_num_key_heads", key_heads, key_dim), ("linear_num_value_heads", value_heads, value_dim)];
                for (key, heads, dim) in products {
                    channels_fit(key, u64::from(heads) * u64::from(dim), text, faults)?;
                }
                Some(State::DeltaNet { key_heads, key_dim, value_heads, value_dim, conv_kernel: conv_kernel? })
            }
            Self::KimiLinear => {
                let key = "linear_attn_config";
                let path = format!("{}.", text.key(key));
                let inner = hybrid::table(key, &path, text, faults)?;
                let heads = inner.needed("num_heads", MAX_HEADS, HINT, faults);
                let head_dim = inner.needed("head_dim", MAX_DIM, HINT, faults);
                let conv_kernel = kernel("short_conv_kernel_size", inner, faults);
                let (heads, dim) = (heads?, head_dim?);
                channels_fit("num_heads", u64::from(heads) * u64::from(dim), inner, faults)?;
                let (key_heads, key_dim, value_heads, value_dim) = (heads, dim, heads, dim);
                Some(State::DeltaNet { key_heads, key_dim, value_heads, value_dim, conv_kernel: conv_kernel? })
            }
            Self::MiniMax => {
                let heads = text.needed("num_attention_heads", MAX_HEADS, HINT, faults);
                let head_dim = text.needed("head_dim", MAX_DIM, HINT, faults);
                Some(State::Linear { heads: heads?, head_dim: head_dim? })
            }
        }
    }

    fn bamba(self, text: Section<'_>, faults: &mut Faults) -> Option<State> {
        let heads = text.needed("mamba_n_heads", MAX_HEADS, HINT, faults);
        let groups = text.needed("mamba_n_groups", MAX_HEADS, HINT, faults);
        let state_size = text.needed("mamba_d_state", MAX_DIM, HINT, faults);
        let conv_kernel = kernel("mamba_d_conv", text, faults);
        divides("mamba_n_groups", groups, "mamba_n_heads", heads, text, faults);
        let d_ssm = "mamba_d_ssm";
        let (inner, key) = if self == Self::FalconH1 && text.get(d_ssm).is_some() {
            (text.count(d_ssm, MAX_HEADS, faults), d_ssm)
        } else {
            (expanded(text, faults), "mamba_expand")
        };
        let (heads, inner) = (heads?, inner?);
        let d_head = "mamba_d_head";
        // The classes make the head's size of the inner size where it is "auto".
        let auto = text.get(d_head).is_none_or(|n| n.value == Value::Text("auto".into()));
        let head_dim = if auto { inner / heads } else { text.count(d_head, MAX_DIM, faults)? };
        if u64::from(heads) * u64::from(head_dim) != u64::from(inner) {
            let line = text.line_of("mamba_n_heads");
            let fault = format!(
                "makes {inner} inner channels, which are not the {heads} mamba_n_heads on line {line} of {head_dim}"
            );
            text.push(key, InputFault::Contradiction(fault), faults);
            return None;
        }
        mamba2(heads, head_dim, groups?, state_size?, conv_kernel?, "mamba_n_heads", text, faults)
    }
}

#[expect(clippy::too_many_arguments, reason = "five sizes, and where to tell a fault of them")]
fn mamba2(
    heads: u32,
    head_dim: u32,
    groups: u32,
    state_size: u32,
    conv_kernel: u32,
    key: &str,
    text: Section<'_>,
    faults: &mut Faults,
) -> Option<State> {
    channels_fit(key, u64::from(heads) * u64::from(head_dim), text, faults)?;
    channels_fit(key, u64::from(groups) * u64::from(state_size), text, faults)?;
    Some(State::Mamba2 { heads, head_dim, groups, state_size, conv_kernel })
}

/// Taps of a convolution; one alone would keep no state.
fn kernel(key: &str, text: Section<'_>, faults: &mut Faults) -> Option<u32> {
    if text.get(key).is_none() {
        text.push(key, InputFault::Missing(HINT), faults);
    }
    text.number(key, 2, MAX_ROWS + 1, faults)
}

/// `mamba_expand * hidden_size`.
fn expanded(text: Section<'_>, faults: &mut Faults) -> Option<u32> {
    let expand = text.needed("mamba_expand", MAX_HEADS, HINT, faults);
    let hidden = text.needed("hidden_size", MAX_HEADS, HINT, faults);
    let product = u64::from(expand?) * u64::from(hidden?);
    channels_fit("mamba_expand", product, text, faults)?;
    u32::try_from(product).ok()
}

fn channels_fit(key: &str, got: u64, text: Section<'_>, faults: &mut Faults) -> Option<()> {
    let limit = u64::from(MAX_HEADS);
    if (1..=limit).contains(&got) {
        return Some(());
    }
    text.push(key, InputFault::TooLarge { what: "the number of channels that it makes", got, limit }, faults);
    None
}

fn divides(key: &str, small: Option<u32>, of: &str, all: Option<u32>, text: Section<'_>, faults: &mut Faults) {
    if let (Some(small), Some(all)) = (small, all)
        && !all.is_multiple_of(small)
    {
        let line = text.line_of(of);
        let fault = format!("is {small}, which does not divide the {all} {of} on line {line}");
        text.push(key, InputFault::Contradiction(fault), faults);
    }
}
