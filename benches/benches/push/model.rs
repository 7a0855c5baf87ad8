//! The compute model: Llama-3.1-8B in bf16 on one H100 SXM at half of its 989 dense teraflops.
//!
//! A layer has 218,103,808 parameters (q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 14336), each of which takes two
//! operations a token; attention takes 4 x 4096 more for each token and each token before it. What surrounds the layers (embedding,
//! head, launches) takes no time here.

use std::time::Duration;

pub(crate) const LAYERS: u32 = 32;
/// Bytes of a K or V head: with 8 KV heads, 4 KiB a token and layer.
pub(crate) const WIDTH: u64 = 256;
pub(crate) const BYTES_PER_TOKEN: u64 = LAYERS as u64 * 8 * 2 * WIDTH;

const PARAMETERS: f64 = 218_103_808.0;
const HIDDEN: f64 = 4096.0;
const RATE: f64 = 989e12 / 2.0;

/// How long a layer takes for the tokens from `from` to `to` of a prompt.
pub(crate) fn layer(from: u64, to: u64) -> Duration {
    let (from, to) = (from as f64, to as f64);
    let linear = 2.0 * PARAMETERS * (to - from);
    let attention = 4.0 * HIDDEN * (to * to - from * from) / 2.0;
    Duration::from_secs_f64((linear + attention) / RATE)
}

pub(crate) fn told() -> &'static str {
    "Llama-3.1-8B: 32 layers, 128 KiB of cache a token; compute model: one H100 at 494.5 TFLOP/s"
}
