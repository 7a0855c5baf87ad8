//! The NIXL backend of kvferry.

mod bell;
mod config;
mod error;
mod feed;
mod frame;
mod lane;
mod live;
mod open;
mod process;
mod shared;
mod sys;
mod transport;
mod truth;
mod worker;

pub use config::{Cutting, NixlConfig, Waiting};
pub use error::NixlError;
pub use shared::Telemetry;
pub use transport::NixlTransport;

/// Whether NIXL's library is there and complete: where it was found.
///
/// # Errors
/// [`NixlError::NoLibrary`] or [`NixlError::OldLibrary`], which say what was looked for and how to get it.
pub fn available() -> Result<std::path::PathBuf, NixlError> {
    sys::library().map(|library| library.path)
}
