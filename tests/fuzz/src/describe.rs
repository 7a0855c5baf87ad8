//! Engine descriptions in TOML.

use kvferry_models::{DescribeError, EngineDescription};

use crate::{Reached, config, promise};

/// The text of a description, whose model is a preset or stands in it; bytes that are no UTF-8 are replaced.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    let text = String::from_utf8_lossy(data);
    // A path would make the result depend on the machine, and some files never end.
    if text.contains('/') {
        return reached;
    }
    let described = EngineDescription::from_toml("engine.toml", &text, None);
    let described = described.and_then(|d| {
        reached.at("description");
        d.manifest()
    });
    match described {
        Ok(manifest) => {
            reached.at("manifest");
            promise::manifest(&manifest);
        }
        Err(error) => refused(&error, &mut reached),
    }
    reached
}

/// Notes why a description was refused.
pub(crate) fn refused(error: &DescribeError, reached: &mut Reached) {
    reached.fault(error);
    match error {
        DescribeError::Input(errors) => errors.0.iter().for_each(|e| reached.fault(&e.fault)),
        DescribeError::Model(error) => config::refused(error, reached),
        DescribeError::Manifest { errors, .. } => errors.0.iter().for_each(|e| reached.fault(e)),
        _ => {}
    }
}
