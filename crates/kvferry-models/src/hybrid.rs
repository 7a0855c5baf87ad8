//! Which layers of a hybrid model keep a state, in each family's own spelling.

use crate::error::{Faults, InputFault};
use crate::model::MAX_LAYERS;
use crate::tree::{Section, Value, clip};

/// How a family says which layers keep what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rule {
    /// `hybrid_override_pattern`: a letter for each layer.
    Letters,
    /// `layer_types`, else `full_attention_interval`.
    Interval,
    /// `linear_attn_config` with lists of layer numbers from 1.
    NumberedFromOne,
    /// `attn_layer_period` and `attn_layer_offset`.
    Period,
    /// `attn_layer_indices`.
    Indices,
    /// Every layer keeps both.
    Both,
    /// `layer_types`, else `attn_type_list` of 0 and 1.
    ZeroOne,
}

/// What one layer keeps: (attention cache, state).
pub(crate) type Kept = (bool, bool);

/// What each of `layers` keeps.
pub(crate) fn read(rule: Rule, layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    match rule {
        Rule::Letters => letters("hybrid_override_pattern", Some(layers), section, faults),
        Rule::Interval | Rule::ZeroOne if section.get("layer_types").is_some() => types(layers, section, faults),
        Rule::Interval => interval(layers, section, faults),
        Rule::NumberedFromOne => from_one(layers, section, faults),
        Rule::Period => period(layers, section, faults),
        Rule::Indices => indices(layers, section, faults),
        Rule::Both => Some((0..layers).map(|_| (true, true)).collect()),
        Rule::ZeroOne => zero_one(layers, section, faults),
    }
}

/// A table inside another.
pub(crate) fn table<'a>(key: &str, path: &'a str, section: Section<'a>, faults: &mut Faults) -> Option<Section<'a>> {
    let Some(node) = section.get(key) else {
        section.push(key, InputFault::Missing(HINT), faults);
        return None;
    };
    let Value::Table(table) = &node.value else {
        section.push(key, InputFault::WrongType { expected: "a table", got: node.value.describe() }, faults);
        return None;
    };
    Some(Section::new(table, path, section.line_of(key)))
}

const HINT: &str = "it says which layers keep a state";

fn same_length(got: usize, layers: u32, key: &str, section: Section<'_>, faults: &mut Faults) -> Option<()> {
    if got == layers as usize {
        return Some(());
    }
    let line = section.line_of("num_hidden_layers");
    let text = format!("lists {got} layers, but num_hidden_layers on line {line} is {layers}");
    section.push(key, InputFault::Contradiction(text), faults);
    None
}

/// A letter for each layer; without a number of layers, as many as there are letters.
pub(crate) fn letters(key: &str, layers: Option<u32>, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    if section.get(key).is_none() {
        section.push(key, InputFault::Missing(HINT), faults);
    }
    let pattern = section.text(key, faults)?;
    if let Some(layers) = layers {
        same_length(pattern.chars().count(), layers, key, section, faults)?;
    }
    let mut kept = Vec::new();
    for c in pattern.chars().take(MAX_LAYERS as usize) {
        kept.push(match c {
            'M' => (false, true),
            '*' => (true, false),
            'E' | '-' => (false, false),
            other => {
                let known = "M (Mamba), * (attention), E or - (no cache)".into();
                section.push(key, InputFault::UnknownValue { got: other.to_string(), known }, faults);
                return None;
            }
        });
    }
    Some(kept)
}

fn types(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "layer_types";
    let list = section.list(key, faults)?;
    same_length(list.len(), layers, key, section, faults)?;
    let mut kept = Vec::new();
    for node in list {
        kept.push(match &node.value {
            Value::Text(t) if t == "full_attention" => (true, false),
            Value::Text(t) if t == "linear_attention" => (false, true),
            other => {
                let known = "full_attention or linear_attention".into();
                let got = match other {
                    Value::Text(t) => clip(t),
                    other => other.describe(),
                };
                faults.push(node.line, section.key(key), InputFault::UnknownValue { got, known });
                return None;
            }
        });
    }
    Some(kept)
}

fn interval(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "full_attention_interval";
    let every = section.needed(key, layers, HINT, faults)?;
    Some((1..=layers).map(|i| (i % every == 0, i % every != 0)).collect())
}

fn from_one(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "linear_attn_config";
    let path = format!("{}.", section.key(key));
    let inner = table(key, &path, section, faults)?;
    let mut kept: Vec<Kept> = (0..layers).map(|_| (false, false)).collect();
    for (list, is_state) in [("full_attn_layers", false), ("kda_layers", true)] {
        if inner.get(list).is_none() {
            inner.push(list, InputFault::Missing("it lists layers, counted from 1"), faults);
        }
        for number in inner.numbers(list, faults)? {
            let slot = number.checked_sub(1).and_then(|i| kept.get_mut(i as usize));
            match slot {
                Some(slot) if *slot == (false, false) => *slot = (!is_state, is_state),
                Some(_) => {
                    let text = format!("lists layer {number} a second time (layers are counted from 1)");
                    inner.push(list, InputFault::Contradiction(text), faults);
                    return None;
                }
                None => {
                    let fault = InputFault::OutOfRange { got: number.to_string(), min: 1, max: layers.into() };
                    inner.push(list, fault, faults);
                    return None;
                }
            }
        }
    }
    if let Some(gap) = kept.iter().position(|k| *k == (false, false)) {
        let text = format!("layer {} (counted from 1) is in neither list", gap + 1);
        section.push(key, InputFault::Contradiction(text), faults);
        return None;
    }
    Some(kept)
}

fn period(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "attn_layer_period";
    let every = section.needed(key, layers, HINT, faults)?;
    if section.get("attn_layer_offset").is_none() {
        section.push("attn_layer_offset", InputFault::Missing(HINT), faults);
    }
    let offset = section.number("attn_layer_offset", 0, every - 1, faults)?;
    Some((0..layers).map(|i| (i % every == offset, i % every != offset)).collect())
}

fn indices(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "attn_layer_indices";
    if section.get(key).is_none() {
        section.push(key, InputFault::Missing(HINT), faults);
    }
    let mut kept: Vec<Kept> = (0..layers).map(|_| (false, true)).collect();
    for index in section.numbers(key, faults)? {
        let Some(slot) = kept.get_mut(index as usize) else {
            let max = u64::from(layers) - 1;
            section.push(key, InputFault::OutOfRange { got: index.to_string(), min: 0, max }, faults);
            return None;
        };
        *slot = (true, false);
    }
    Some(kept)
}

fn zero_one(layers: u32, section: Section<'_>, faults: &mut Faults) -> Option<Vec<Kept>> {
    let key = "attn_type_list";
    if section.get(key).is_none() {
        section.push(key, InputFault::Missing(HINT), faults);
    }
    let list = section.numbers(key, faults)?;
    same_length(list.len(), layers, key, section, faults)?;
    let mut kept = Vec::new();
    for n in list {
        match n {
            0 => kept.push((false, true)),
            1 => kept.push((true, false)),
            other => {
                let known = "0 (linear) or 1 (attention)".into();
                section.push(key, InputFault::UnknownValue { got: other.to_string(), known }, faults);
                return None;
            }
        }
    }
    Some(kept)
}
