//! The model's cache as kvferry's items.
//!
//! Sizes that the record gives for the whole model become the spec; what a rank holds of them is in [`engine`](crate::engine).

use std::collections::BTreeMap;

use kvferry_geometry::spec::{Component, Item, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::Tokens;

use crate::engine::EngineError;
use crate::schema::{Kind, Layer, Model, Side};

/// The one component of an attention page: K, then V, of one head and token.
pub const PACKED: &str = "kv";
/// The part of a state after the convolution's.
pub const TEMPORAL: &str = "temporal";

/// A layer by name.
#[derive(Clone, Copy, Debug)]
pub struct Named<'m> {
    /// Its family.
    pub layer: &'m Layer,
    /// Its number.
    pub id: u32,
    /// Data type of its cache.
    pub dtype: &'m str,
}

/// The layers of the model as one side has it, by name.
#[must_use]
pub fn layers<'m>(model: &'m Model, side: &'m Side) -> BTreeMap<String, Named<'m>> {
    let changed = side.model_override.as_ref();
    let list = changed.and_then(|c| c.layers.as_ref()).unwrap_or(&model.layers);
    let dtype = changed.and_then(|c| c.dtype.as_deref()).or(model.dtype.as_deref()).unwrap_or("bfloat16");
    let mut out = BTreeMap::new();
    for layer in list {
        for &id in &layer.ids {
            let dtype = layer.dtype.as_deref().unwrap_or(dtype);
            out.insert(layer.name.replace("{i}", &id.to_string()), Named { layer, id, dtype });
        }
    }
    out
}

/// The item of one layer. `vector` is the bytes of one head's entry; `full` says that its group keeps all tokens.
///
/// # Errors
/// Sizes that the kind needs and the record lacks.
pub fn item(name: &str, named: Named<'_>, vector: u64, full: bool) -> Result<Item, EngineError> {
    let layer = named.layer;
    if layer.kind.is_state() {
        let parts = parts(name, layer)?.into_iter().map(|p| p.part).collect();
        return Ok(Item::state(name, StateItem { parts }));
    }
    let lacks = |what: &str| EngineError::Model { layer: name.to_owned(), what: what.to_owned() };
    let window = || layer.sliding_window.map(Tokens::new).ok_or_else(|| lacks("sliding_window"));
    let retention = match layer.kind {
        Kind::Ring => Retention::Ring(Tokens::new(layer.ring_size.ok_or_else(|| lacks("ring_size"))?)),
        _ if full => Retention::Full,
        Kind::Swa | Kind::SwaMla => Retention::Window(window()?),
        Kind::Chunked => {
            Retention::Chunk(Tokens::new(layer.attention_chunk_size.ok_or_else(|| lacks("attention_chunk_size"))?))
        }
        _ => Retention::Full,
    };
    let paged = PagedItem::new(heads(name, layer)?, vec![Component::new(PACKED, vector, named.dtype)]);
    let tokens_per_entry = layer.tokens_per_state.unwrap_or(1).max(1);
    Ok(Item::paged(name, PagedItem { retention, tokens_per_entry, ..paged }))
}

/// Heads of an attention layer over all ranks; a latent is one.
///
/// # Errors
/// The record lacks them.
pub fn heads(name: &str, layer: &Layer) -> Result<u32, EngineError> {
    match layer.kind {
        Kind::Full | Kind::Swa | Kind::Chunked => layer
            .num_kv_heads
            .ok_or_else(|| EngineError::Model { layer: name.to_owned(), what: "num_kv_heads".to_owned() }),
        _ => Ok(1),
    }
}

/// A part of a state, with rows of speculative decoding.
#[derive(Clone, Debug)]
pub struct Part {
    /// The part.
    pub part: StatePart,
    /// Rows after its own.
    pub scratch_rows: u32,
}

/// The parts of a state in the order in which they lie in a slot: the convolution's, then the temporal state.
///
/// # Errors
/// Sizes that the kind needs and the record lacks.
pub fn parts(name: &str, layer: &Layer) -> Result<Vec<Part>, EngineError> {
    let lacks = |what: String| EngineError::Model { layer: name.to_owned(), what };
    let get = |key: &str| layer.params.get(key).copied().ok_or_else(|| lacks(format!("params.{key}")));
    let product = |a: u32, b: u32| a.checked_mul(b).ok_or_else(|| lacks("sizes that fit 32 bits".to_owned()));
    let names = layer.state_dtypes.as_deref();
    let dtype = |i: usize, usual: &'static str| -> Result<(String, u64), EngineError> {
        let dtype = names.and_then(|n| n.get(i).cloned()).unwrap_or_else(|| usual.to_owned());
        let size = element_size(&dtype).ok_or_else(|| lacks(format!("a known size of {dtype}")))?;
        Ok((dtype, size))
    };
    // Names and channels of the convolution's parts; heads of the temporal state and elements of one.
    let (conv, temporal) = match layer.kind {
        Kind::Mamba1 => {
            let inner = get("intermediate_size")?;
            (vec![("conv.x", inner)], Some((inner, get("state_size")?)))
        }
        Kind::Mamba2 => {
            let state = get("state_size")?;
            let groups = product(get("n_groups")?, state)?;
            let conv = vec![("conv.x", get("intermediate_size")?), ("conv.B", groups), ("conv.C", groups)];
            (conv, Some((get("num_heads")?, product(get("head_dim")?, state)?)))
        }
        Kind::Gdn => {
            let (k, v) = (get("head_k_dim")?, get("head_v_dim")?);
            let (keys, values) = (product(get("num_k_heads")?, k)?, product(get("num_v_heads")?, v)?);
            let conv = vec![("conv.q", keys), ("conv.k", keys), ("conv.v", values)];
            (conv, Some((get("num_v_heads")?, product(k, v)?)))
        }
        Kind::Kda => {
            let (heads, dim) = (get("num_heads")?, get("head_dim")?);
            let all = product(heads, dim)?;
            (vec![("conv.q", all), ("conv.k", all), ("conv.v", all)], Some((heads, product(dim, dim)?)))
        }
        _ => (vec![("conv.x", get("intermediate_size")?)], None),
    };
    let kernel = layer.params.get("conv_kernel").copied().unwrap_or(4);
    let rows = kernel.checked_sub(1).filter(|r| *r > 0).ok_or_else(|| lacks("a conv_kernel above 1".to_owned()))?;
    let scratch_rows = layer.params.get("num_spec").copied().unwrap_or(0);
    let (conv_dtype, conv_size) = dtype(0, "bfloat16")?;
    let mut out = Vec::new();
    for (part, units) in conv {
        out.push(Part { part: StatePart::new(part, units, rows, conv_size, &conv_dtype), scratch_rows });
    }
    if let Some((units, elements)) = temporal {
        let (dtype, size) = dtype(1, "float32")?;
        let part = StatePart::new(TEMPORAL, units, 1, u64::from(elements) * size, &dtype);
        out.push(Part { part, scratch_rows: 0 });
    }
    Ok(out)
}

/// Bytes of an element.
#[must_use]
pub fn element_size(dtype: &str) -> Option<u64> {
    match dtype {
        "float32" => Some(4),
        "bfloat16" | "float16" => Some(2),
        "uint8" | "int8" | "fp8" => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(json: &str) -> Layer {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_mamba2_state_has_its_parts() {
        let l = layer(
            r#"{"kind":"mamba2","ids":[0],"name":"m","params":{"intermediate_size":32,"n_groups":8,"num_heads":8,
                "head_dim":4,"state_size":4,"conv_kernel":4}}"#,
        );
        let parts = parts("m", &l).unwrap();
        let got: Vec<_> = parts.iter().map(|p| (p.part.name.as_str().to_owned(), p.part.bytes())).collect();
        let want = [("conv.x", 192), ("conv.B", 192), ("conv.C", 192), ("temporal", 512)];
        assert_eq!(got, want.map(|(n, b)| (n.to_owned(), b)));
    }

    #[test]
    fn what_is_missing_is_named() {
        let l = layer(r#"{"kind":"gdn","ids":[0],"name":"m","params":{"head_k_dim":4}}"#);
        let error = parts("m", &l).unwrap_err().to_string();
        assert!(error.contains("params.head_v_dim"), "{error}");
    }
}
