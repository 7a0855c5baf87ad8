//! An engine's configuration.

use kvferry::EngineConfig;

use crate::Reached;

/// A TOML text; bytes that are no UTF-8 are replaced.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    match EngineConfig::from_toml("kvferry.toml", &String::from_utf8_lossy(data)) {
        Ok(config) => {
            reached.at("settings");
            // It has been checked already.
            assert!(config.check().is_ok(), "{:?}", config.check());
        }
        Err(errors) => {
            assert!(!errors.0.is_empty(), "refused without a fault");
            reached.fault(&errors);
            for error in &errors.0 {
                reached.fault(&error.fault);
                assert!(error.to_string().starts_with("kvferry.toml"), "{error}");
            }
        }
    }
    reached
}
