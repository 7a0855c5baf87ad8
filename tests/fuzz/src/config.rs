//! Hugging Face configurations.

use kvferry_models::{
    EngineDescription, KvDtype, Model, ModelError, ModelItems, ModelOptions, MtpLayers, Scales, Shape,
};

use crate::{Reached, describe, promise};

/// A `config.json`; bytes that are no UTF-8 are replaced.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    match Model::from_json("config.json", &String::from_utf8_lossy(data)) {
        Ok(model) => accepted(&model, &mut reached),
        Err(error) => refused(&error, &mut reached),
    }
    reached
}

/// A model under the options that change most, then on two ranks with few blocks.
fn accepted(model: &Model, reached: &mut Reached) {
    reached.at("model");
    let fp8 = ModelOptions { kv_dtype: KvDtype::Fp8E4m3, ..ModelOptions::default() };
    let options = [
        ModelOptions::default(),
        ModelOptions { mtp: MtpLayers::All, layers: Some(1), ..ModelOptions::default() },
        ModelOptions { scales: Scales::PerBlockHead(16), ..fp8.clone() },
        ModelOptions { drafts: vec![model.clone()], ..fp8 },
    ];
    for option in &options {
        match model.items(option) {
            Ok(items) => check_items(&items),
            Err(error) => refused(&error, reached),
        }
    }
    let mut engine = EngineDescription::new(model.clone(), "tp=2".parse::<Shape>().unwrap());
    engine.blocks = Some(8);
    match engine.manifest() {
        Ok(manifest) => {
            reached.at("manifest");
            promise::manifest(&manifest);
        }
        Err(error) => describe::refused(&error, reached),
    }
}

/// Every item belongs to one layer, and every axis of it has a rule.
fn check_items(items: &ModelItems) {
    let mut layers_of = vec![0; items.spec.items().len()];
    for id in items.layers.iter().flat_map(|l| &l.items) {
        layers_of[id.index()] += 1;
    }
    assert!(layers_of.iter().all(|&n| n == 1), "an item stands in {layers_of:?} layers");
    assert_eq!(items.sharding.len(), layers_of.len());
    for (item, rules) in items.spec.items().iter().zip(&items.sharding) {
        assert_eq!(rules.len(), item.as_state().map_or(1, |s| s.parts.len()), "{}", item.name);
    }
    assert!(items.spec.bytes_per_token().get() + items.spec.bytes_per_state().get() > 0);
}

/// Notes why a model was refused.
pub(crate) fn refused(error: &ModelError, reached: &mut Reached) {
    reached.fault(error);
    match error {
        ModelError::Input(errors) => {
            assert!((1..=kvferry_models::MAX_FAULTS).contains(&errors.0.len()), "{} faults", errors.0.len());
            errors.0.iter().for_each(|e| reached.fault(&e.fault));
        }
        ModelError::Spec(errors) => errors.0.iter().for_each(|e| reached.fault(e)),
        ModelError::Several(errors) => errors.iter().for_each(|e| refused(e, reached)),
        _ => {}
    }
}
